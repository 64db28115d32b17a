// SPDX-License-Identifier: Apache-2.0
// What the main loops of the tile kernel read from a stage: weights are the A operand, dequantized in registers; tokens are the
// B operand, read by wgmma from the swizzled stage. A fragment covers weight rows g and g + 8 of the warp's 16, for tokens
// 8 j + 2 t and 8 j + 2 t + 1: accumulators [4 j + {0, 1, 2, 3}].
#pragma once
#include "chord/arch/wgmma.cuh"
#include "chord/tile/dequantize.cuh"
#include "chord/tile/ring.cuh"

namespace chord {

template <class Config>
using Accumulators = float[Config::kRowTiles][Config::kBlockRows / 2];

struct ConsumerThread {
  int group, warp, lane;  // warpgroup, warp in it, lane in that
};

// A piece's weight tiles are dealt out evenly to the warpgroups, neighbours to one, so that a piece of few tiles still busies them all.
template <class Config>
__device__ __forceinline__ int tiles_of_group(int tiles) {
  return (tiles + Config::kConsumerGroups - 1) / Config::kConsumerGroups;
}
template <class Config>
__device__ __forceinline__ int first_tile_of_group(int tiles, int group) {
  return group * tiles_of_group<Config>(tiles);
}

// The warp's 16 rows of k-tile `k_tile` of slot `slot` of a stage's weights.
template <class Config>
__device__ __forceinline__ uint32_t weight_block(uint32_t weights, int slot, int k_tile, const ConsumerThread& self) {
  return weights + (slot * Config::kKTiles + k_tile) * sizeof(WeightTile) + self.warp * sizeof(WeightBlock);
}

// Where the tokens of a stage begin, for token_operand. The shuffle tells the compiler that all lanes hold the same: descriptors are
// then computed in uniform registers, where wgmma wants them, and not moved there one by one.
template <class Config>
__device__ __forceinline__ uint64_t stage_operand(const Ring<Config>& ring, uint32_t stage) {
  return wgmma_operand(__shfl_sync(kFullMask, wgmma_operand_base(ring.stage(stage)), 0));
}

// The tokens of k-step `step` (16 k) of a k-tile, as wgmma's B operand: one addition of 64 bits in uniform registers.
template <class Config>
__device__ __forceinline__ uint64_t token_operand(uint64_t tokens, int k_tile, int step) {
  return tokens + wgmma_operand_step(k_tile * (Config::kBlockRows * kTokenBytes) + step * 32);
}

// A warpgroup that no weight tile of this piece falls to lets its stages pass.
template <class Config>
__device__ __forceinline__ void pass_stages(const Ring<Config>& ring, RingPosition<Config>& at, int stages, const ConsumerThread& self) {
  for (int stage = 0; stage < stages; ++stage) {
    ring.wait_full(at);
    ring.release(at.stage, self.lane);
    at.advance();
  }
}

}  // namespace chord
