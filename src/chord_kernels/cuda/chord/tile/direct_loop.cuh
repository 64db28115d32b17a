// SPDX-License-Identifier: Apache-2.0
// What a CTA of the direct kernel keeps in shared memory, and one warp's share of its work: a 16-row block of weights x up to eight
// tokens, over every kParts-th k-tile. A warp copies its weights itself, kDepth k-tiles ahead, and waits for nobody.
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/tile/block.cuh"
#include "chord/tile/storage.cuh"

namespace chord {

template <class Config>
constexpr int kDirectWarps = Config::kBlocks * Config::kParts;

// Sums of parts of K on their way to the warp with part 0.
template <class Config, bool kShared = (Config::kParts > 1)>
struct DirectPartials {
  float4 partials[Config::kBlocks][Config::kParts - 1][kWarpLanes];
};
template <class Config>
struct DirectPartials<Config, false> {};

template <class Config>
struct alignas(16) DirectStorage : DirectPartials<Config> {
  WeightBlock weights[kDirectWarps<Config>][Config::kDepth];
  // 16 bytes of padding a row: the rows that one ldmatrix reads lie in different banks.
  uint8_t activations[Config::kRowsAtOnce][Config::kKTiles * kTokenBytes + 16];
  uint4 zeros;  // what a row reads that is not there
};

struct DirectThread {
  int place;  // which of the kBlocks 16-row blocks of a unit
  int part;   // which part of K
  int lane;
};

// A warp's own ring: step i is its i-th k-tile, in slot i % kDepth.
template <class Config>
struct DirectWeights {
  static constexpr int kSteps = (Config::kKTiles + Config::kParts - 1) / Config::kParts;
  static_assert(Config::kDepth <= kSteps);
  uint32_t slots;
  const uint8_t* base;  // of step 0, at what this lane copies of it
  int part, lane;

  __device__ __forceinline__ bool inside(int step) const {
    return step < kSteps && (Config::kKTiles % Config::kParts == 0 || step * Config::kParts + part < Config::kKTiles);
  }
  // One group of copies, which is empty behind the last step.
  __device__ __forceinline__ void fetch(int step, int slot) const {
    if (inside(step)) {
      const uint32_t to = slots + slot * sizeof(WeightBlock) + lane * 16;
      const uint8_t* from = base + step * static_cast<int>(Config::kParts * sizeof(WeightTile));
      copy_async_16(to, from);
      if (lane < static_cast<int>(sizeof(WeightBlock::scales) / 16)) copy_async_16(to + sizeof(WeightBlock::codes), from + sizeof(WeightBlock::codes));
    }
    copy_async_commit();
  }
};

// The first kDepth steps have been asked for. rows: of the tokens that are there.
template <class Config>
__device__ __forceinline__ void direct_accumulate(float (&sum)[1][4], const DirectWeights<Config>& weights, DirectStorage<Config>& storage, int rows) {
  const int row = weights.lane % 8;
  const bool there = row < rows;
  uint32_t tokens = there ? shared_address(storage.activations[row]) + weights.part * kTokenBytes + weights.lane / 8 * 16 : shared_address(&storage.zeros);
  const uint32_t half = there ? kTokenBytes / 2 : 0, step_bytes = there ? Config::kParts * kTokenBytes : 0;
  int slot = 0;
#pragma unroll 1
  for (int step = 0; weights.inside(step); ++step) {
    copy_async_wait<Config::kDepth - 1>();
    __syncwarp();
    WeightFragment weight;
    weight.load(weights.slots + slot * sizeof(WeightBlock), weights.lane);
    TokenFragments<1> fragments;
    load_matrices(fragments.fragments[0][0], tokens);
    load_matrices(fragments.fragments[0][1], tokens + half);
    __syncwarp();  // the slot is in registers and may be filled anew
    weights.fetch(step + Config::kDepth, slot);
    PendingGroup<1> pending[2];
    pending[0].multiply(weight, 0, fragments);
    pending[1].multiply(weight, 1, fragments);
    pending[0].add_to(sum);
    pending[1].add_to(sum);
    tokens += step_bytes;
    slot = slot + 1 == Config::kDepth ? 0 : slot + 1;
  }
}

}  // namespace chord
