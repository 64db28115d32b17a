// SPDX-License-Identifier: Apache-2.0
// Numerics::kBf16: a piece's sums over K, of weights RN_bf16((code - 8) * scale).
#pragma once
#include "chord/tile/operands.cuh"

namespace chord {

// kDepth k-steps of A are in flight, across stage boundaries too: draining the tensor cores at every
// stage would leave them idle for the time of a dequantization. The stage before is therefore released late.
template <class Config, int kWidth, int kTiles>
__device__ __forceinline__ void accumulate_bf16(Accumulators<Config>& sum, const Ring<Config>& ring, RingPosition<Config>& at,
                                                int k_stages, const ConsumerThread& self) {
  constexpr int kDepth = Config::kDepth, kSteps = 4;
  // The next k-tile is loaded before the last k-step of this one is dequantized. Not in blocks of 128 rows, whose tensor time hides the
  // loads, and which have few k-tiles a stage.
  constexpr bool kAhead = Config::kBlockRows < 128;
  static_assert(kDepth >= 2 && kDepth <= kSteps);
  uint32_t a[kDepth][kTiles][4];
  uint32_t previous = 0;
  for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
    ring.wait_full(at);
    const uint64_t tokens = stage_operand(ring, at.stage);
    const uint32_t weights = ring.weights(at.stage);
    WeightFragment fragment[2][kTiles];
    const auto load = [&](int k_tile) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        fragment[k_tile % 2][m].load(weight_block<Config>(weights, self.group * kTiles + m, k_tile, self), self.lane);
    };
#pragma unroll
    for (int k_tile = 0; k_tile < Config::kKTiles; ++k_tile) {
      if (!kAhead || k_tile == 0) load(k_tile);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (kAhead && step == kSteps - 1 && k_tile + 1 < Config::kKTiles) load(k_tile + 1);
        const int slot = (k_tile * kSteps + step) % kDepth;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const WeightFragment& weight = fragment[k_tile % 2][m];
          decode_scaled(a[slot][m], weight.words[step], ScaledRows(weight), step / 2);
        }
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
          Wgmma<kWidth>::issue(sum[m], a[slot][m], token_operand<Config>(tokens, k_tile, step), (k_stage | k_tile | step) != 0);
        wgmma_commit();
        wgmma_wait<kDepth - 1>();
        if (k_tile == 0 && step == kDepth - 2 && k_stage > 0) ring.release(previous, self.lane);
      }
    }
    previous = at.stage;
    at.advance();
  }
  wgmma_wait<0>();
  ring.release(previous, self.lane);
}

// The narrowest compiled width that covers `rows`: padding rows of a block then cost no tensor time. More than four widths
// in one kernel make ptxas run out of registers and serialise the wgmma.
template <class Config, int kTiles, int kWidth = Config::kLeastWidth>
__device__ __forceinline__ void accumulate_bf16_rows(int rows, Accumulators<Config>& sum, const Ring<Config>& ring,
                                                     RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  if constexpr (kWidth < Config::kBlockRows) {
    if (rows > kWidth) {
      accumulate_bf16_rows<Config, kTiles, kWidth + Config::kWidthStep>(rows, sum, ring, at, k_stages, self);
      return;
    }
  }
  accumulate_bf16<Config, kWidth, kTiles>(sum, ring, at, k_stages, self);
}

// As many weight tiles a warpgroup as the piece needs.
template <class Config, int kTiles = 1>
__device__ __forceinline__ void bf16_piece(const TileInfo& tile, Accumulators<Config>& sum, const Ring<Config>& ring,
                                           RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  if (kTiles == 1 && first_tile_of_group<Config>(tile.tiles, self.group) >= tile.tiles) {
    pass_stages(ring, at, k_stages, self);
    return;
  }
  if constexpr (kTiles < Config::kRowTiles) {
    if (tile.tiles > kTiles * Config::kConsumerGroups) {
      bf16_piece<Config, kTiles + 1>(tile, sum, ring, at, k_stages, self);
      return;
    }
  }
  accumulate_bf16_rows<Config, kTiles>(tile.rows, sum, ring, at, k_stages, self);
}

}  // namespace chord
