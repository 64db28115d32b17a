// SPDX-License-Identifier: Apache-2.0
// Numerics::kExact: a piece's sums over K, of integer weights; every 32-group has an accumulator of its own, which its row's
// scale multiplies in FP32.
//
// The slices of a weight tile are summed in kChains chains, slice i in chain i % kChains, and the chains added up in one fixed tree.
// So two or four warpgroups may share a tile, each with its own chains, and the sum is the same bit for bit as by one: a narrow
// piece keeps all warpgroups busy, and a row's result does not depend on how wide the pieces of its batch are.
#pragma once
#include "chord/tile/operands.cuh"

namespace chord {

// Which weight tile of the piece a warpgroup works on, and whether it ends up with the tile's sums.
struct ExactRole {
  int tile;
  bool stores;
};

// Chains share, share + kShare, ... of one tile: its slices are in slot self.group of every stage. Two group accumulators
// alternate, so that the tensor cores work on one while the other is added up. A slice ends drained: ptxas serialises every
// wgmma when such an accumulator is in flight around the loop.
template <class Config, int kWidth, int kShare>
__device__ __forceinline__ void accumulate_exact(float (&sum)[Config::kChains / kShare][kWidth / 2], const Ring<Config>& ring,
                                                 RingPosition<Config>& at, int slices, int share, const ConsumerThread& self) {
  constexpr int kGroups = 2;  // 32-groups of a k-tile
  constexpr int kOwn = Config::kChains / kShare, kSliceGroups = Config::kKTiles * kGroups;
  // The chain of the current slice is sum[0]. Registers have no run-time index, so the chains move instead.
  const auto rotate = [&] {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const float first = sum[0][i];
#pragma unroll
      for (int own = 0; own + 1 < kOwn; ++own) sum[own][i] = sum[own + 1][i];
      sum[kOwn - 1][i] = first;
    }
  };
#pragma unroll
  for (int own = 0; own < kOwn; ++own)
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sum[own][i] = 0.0f;

  float part[kGroups][kWidth / 2];
  int turn = 0;
  for (int first_slice = 0;;) {
    ring.wait_full(at);
    if (first_slice + share < slices) {
      const uint32_t tokens = stage_operand(ring, at.stage, share);
      const uint32_t weights = weight_block<Config>(ring.weights(at.stage), self.group, 0, self);
      WeightFragment fragment[2];
      uint32_t a[kGroups][2][4];
      auto add_up = [&](int index) {
        const int group = index % kGroups;
        const WeightFragment& weight = fragment[index / kGroups % 2];
        const float scale[2] = {weight.scale(0, group), weight.scale(1, group)};
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sum[0][i] = fmaf(scale[i >> 1 & 1], part[group][i], sum[0][i]);
      };
#pragma unroll
      for (int index = 0; index < kSliceGroups; ++index) {
        const int k_tile = index / kGroups, group = index % kGroups;
        WeightFragment& weight = fragment[k_tile % 2];
        if (group == 0) weight.load(weights + k_tile * sizeof(WeightTile), self.lane);
        decode_integers(a[group][0], weight.words[2 * group]);
        decode_integers(a[group][1], weight.words[2 * group + 1]);
        wgmma_fence();
        Wgmma<kWidth>::issue(part[group], a[group][0], token_operand<Config>(tokens, k_tile, 2 * group), false);
        Wgmma<kWidth>::issue(part[group], a[group][1], token_operand<Config>(tokens, k_tile, 2 * group + 1), true);
        wgmma_commit();
        if (index > 0) {
          wgmma_wait<1>();
          add_up(index - 1);
        }
      }
      wgmma_wait<0>();
      ring.release(at.stage, self.lane);
      add_up(kSliceGroups - 1);
    } else {
      ring.release(at.stage, self.lane);
    }
    at.advance();
    first_slice += kShare;
    if (first_slice >= slices) break;
    if constexpr (kOwn > 1) rotate(), ++turn;
  }
  if constexpr (kOwn > 1)
    for (; turn % kOwn != 0; ++turn) rotate();
}

// The chains of one value, added up.
template <int kChains>
__device__ __forceinline__ float chain_total(const float (&value)[kChains]) {
  static_assert(kChains == 1 || kChains == 2 || kChains == 4);
  if constexpr (kChains == 1) return value[0];
  if constexpr (kChains == 2) return value[0] + value[1];
  if constexpr (kChains == 4) return (value[0] + value[1]) + (value[2] + value[3]);
}

// Named barrier of all consumers.
template <class Config>
__device__ __forceinline__ void consumers_sync() {
  named_barrier_sync(1 + Config::kConsumerGroups, Config::kConsumerGroups * kGroupThreads);
}

// total: of the tile, in the warpgroup with share 0.
template <class Config, int kWidth, int kShare>
__device__ __forceinline__ void exact_width(float (&total)[Config::kBlockRows / 2], Storage<Config>& storage, const Ring<Config>& ring,
                                            RingPosition<Config>& at, int slices, int tile, int share, const ConsumerThread& self) {
  constexpr int kOwn = Config::kChains / kShare;
  const bool busy = share < kShare;
  float sum[kOwn][kWidth / 2];
  if (busy)
    accumulate_exact<Config, kWidth, kShare>(sum, ring, at, slices, share, self);
  else
    pass_stages(ring, at, (slices + kShare - 1) / kShare, self);

  if constexpr (kShare > 1) {
    auto& exchange = storage.end.exchange;
    const int thread = self.warp * kWarpLanes + self.lane;
    // Where a warpgroup of this tile hands over one of its own chains.
    const auto unit = [&](int from, int own) { return (tile * (kShare - 1) + from - 1) * kOwn + own; };
    consumers_sync<Config>();  // what was handed over before has been read
    if (busy && share > 0) {
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
#pragma unroll
        for (int v = 0; v < kWidth / 8; ++v)
          exchange[unit(share, own)][v][thread] =
              make_float4(sum[own][4 * v], sum[own][4 * v + 1], sum[own][4 * v + 2], sum[own][4 * v + 3]);
    }
    consumers_sync<Config>();
    if (!busy || share > 0) return;
#pragma unroll
    for (int v = 0; v < kWidth / 8; ++v) {
      float value[4][Config::kChains];
#pragma unroll
      for (int chain = 0; chain < Config::kChains; ++chain) {
        const int own = chain / kShare, from = chain % kShare;
        const float4 one = from > 0 ? exchange[unit(from, own)][v][thread]
                                    : make_float4(sum[own][4 * v], sum[own][4 * v + 1], sum[own][4 * v + 2], sum[own][4 * v + 3]);
        value[0][chain] = one.x, value[1][chain] = one.y, value[2][chain] = one.z, value[3][chain] = one.w;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) total[4 * v + c] = chain_total<Config::kChains>(value[c]) * kIntegerUnits[c >> 1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      float value[Config::kChains];
#pragma unroll
      for (int chain = 0; chain < Config::kChains; ++chain) value[chain] = sum[chain][i];
      total[i] = chain_total<Config::kChains>(value) * kIntegerUnits[i >> 1 & 1];
    }
  }
}

// The narrowest compiled width that covers `rows`: padding rows of a block then cost no time.
template <class Config, int kShare, int kWidth = Config::kWidthStep>
__device__ __forceinline__ void exact_rows(int rows, float (&total)[Config::kBlockRows / 2], Storage<Config>& storage,
                                           const Ring<Config>& ring, RingPosition<Config>& at, int slices, int tile, int share,
                                           const ConsumerThread& self) {
  if constexpr (kWidth < Config::kBlockRows) {
    if (rows > kWidth) {
      exact_rows<Config, kShare, kWidth + Config::kWidthStep>(rows, total, storage, ring, at, slices, tile, share, self);
      return;
    }
  }
  exact_width<Config, kWidth, kShare>(total, storage, ring, at, slices, tile, share, self);
}

template <class Config>
__device__ __forceinline__ ExactRole exact_piece(const TileInfo& info, float (&total)[Config::kBlockRows / 2], Storage<Config>& storage,
                                                 const Ring<Config>& ring, RingPosition<Config>& at, int slices, const ConsumerThread& self) {
  static_assert(Config::kRowTiles == 1 && Config::kConsumerGroups == 4);
  const int tiles = info.tiles, tile = self.group % tiles, share = self.group / tiles;
  switch (piece_slices<Config>(tiles)) {
    case 1: exact_rows<Config, 1>(info.rows, total, storage, ring, at, slices, tile, share, self); break;
    case 2:
      if constexpr (Config::kChains >= 2) exact_rows<Config, 2>(info.rows, total, storage, ring, at, slices, tile, share, self);
      break;
    case 4:
      if constexpr (Config::kChains >= 4) exact_rows<Config, 4>(info.rows, total, storage, ring, at, slices, tile, share, self);
      break;
  }
  return {tile, share == 0};
}

}  // namespace chord
