// SPDX-License-Identifier: Apache-2.0
// Numerics::kExact: a piece's sums over K, of integer weights; every 32-group has an accumulator of its own, which its row's
// scale multiplies in FP32.
#pragma once
#include "chord/tile/operands.cuh"

namespace chord {

// Two group accumulators alternate, so that the tensor cores work on one while the other is added up. A stage ends drained: ptxas
// serialises every wgmma when such an accumulator is in flight around the loop.
template <class Config, int kWidth>
__device__ __forceinline__ void accumulate_exact(float (&sum)[Config::kBlockRows / 2], const Ring<Config>& ring, RingPosition<Config>& at,
                                                 int k_stages, const ConsumerThread& self) {
  constexpr int kGroups = 2;  // 32-groups of a k-tile
  constexpr int kStageGroups = Config::kKTiles * kGroups;
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) sum[i] = 0.0f;
  float part[kGroups][kWidth / 2];
  for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
    ring.wait_full(at);
    const uint64_t tokens = stage_operand(ring, at.stage);
    const uint32_t weights = ring.weights(at.stage);
    WeightFragment fragment[2];
    uint32_t a[kGroups][2][4];
    auto add_up = [&](int index) {
      const int group = index % kGroups;
      const WeightFragment& weight = fragment[index / kGroups % 2];
      const float scale[2] = {weight.scale(0, group), weight.scale(1, group)};
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) sum[i] = fmaf(scale[i >> 1 & 1], part[group][i], sum[i]);
    };
#pragma unroll
    for (int index = 0; index < kStageGroups; ++index) {
      const int k_tile = index / kGroups, group = index % kGroups;
      WeightFragment& weight = fragment[k_tile % 2];
      if (group == 0) weight.load(weight_block<Config>(weights, self.group, k_tile, self), self.lane);
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
    __syncwarp();  // one lane arrives for them all; while wgmma are in flight (bf16.cuh) this would serialise them
    ring.release(at.stage, self.lane);
    add_up(kStageGroups - 1);
    at.advance();
  }
}

// The narrowest compiled width that covers `rows`: padding rows of a block then cost no time.
template <class Config, int kWidth = Config::kLeastWidth>
__device__ __forceinline__ void accumulate_exact_rows(int rows, float (&sum)[Config::kBlockRows / 2], const Ring<Config>& ring,
                                                      RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  if constexpr (kWidth < Config::kBlockRows) {
    if (rows > kWidth) {
      accumulate_exact_rows<Config, kWidth + Config::kWidthStep>(rows, sum, ring, at, k_stages, self);
      return;
    }
  }
  accumulate_exact<Config, kWidth>(sum, ring, at, k_stages, self);
}

// A weight tile a warpgroup.
template <class Config>
__device__ __forceinline__ void exact_piece(const TileInfo& tile, Accumulators<Config>& sum, const Ring<Config>& ring,
                                            RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  static_assert(Config::kRowTiles == 1);
  if (self.group >= tile.tiles)
    pass_stages(ring, at, k_stages, self);
  else
    accumulate_exact_rows<Config>(tile.rows, sum[0], ring, at, k_stages, self);
}

}  // namespace chord
