// SPDX-License-Identifier: Apache-2.0
// One output tile's sum over K, by a consumer warpgroup: weights are the A operand, dequantized in registers; tokens are
// the B operand, read by wgmma from the swizzled stage. A fragment covers weight rows g and g + 8 of the warp's 16, for
// tokens 8 j + 2 t and 8 j + 2 t + 1: accumulators [m][4 j + {0, 1, 2, 3}]. Weight tile m of warpgroup w is the
// (m * kConsumerGroups + w)-th of the output tile, so that a tile of few weight tiles still busies every warpgroup.
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

template <class Config>
__device__ __forceinline__ uint32_t weight_block(uint32_t weights, const ConsumerThread& self, int m, int k_tile) {
  const int tile = (m * Config::kConsumerGroups + self.group) * Config::kKTiles + k_tile;
  return weights + tile * sizeof(WeightTile) + self.warp * sizeof(WeightBlock);
}

// Where a stage's tokens begin, for token_operand. The shuffle tells the compiler that all lanes hold the same: descriptors are
// then computed in uniform registers, where wgmma wants them, and not moved there one by one.
template <class Config>
__device__ __forceinline__ uint32_t stage_operand(const Ring<Config>& ring, uint32_t stage) {
  return __shfl_sync(kFullMask, wgmma_operand_base(ring.stage(stage)), 0);
}

// The tokens of k-step `step` (16 k) of a stage's k-tile, as wgmma's B operand.
template <class Config>
__device__ __forceinline__ uint64_t token_operand(uint32_t tokens, int k_tile, int step) {
  return wgmma_operand(tokens + wgmma_operand_step(k_tile * (Config::kBlockRows * kTokenBytes) + step * 32));
}

// Row half h of every sum times units[h].
template <class Config, int kWidth, int kTiles>
__device__ __forceinline__ void multiply_rows(Accumulators<Config>& sum, const float (&units)[2]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sum[m][i] *= units[i >> 1 & 1];
}

// Numerics::kBf16. kDepth k-steps of A are in flight, across stage boundaries too: draining the tensor cores at every
// stage would leave them idle for the time of a dequantization. The stage before is therefore released late.
template <class Config, int kWidth, int kTiles>
__device__ __forceinline__ void accumulate_bf16(Accumulators<Config>& sum, const Ring<Config>& ring, RingPosition<Config>& at,
                                                int k_stages, const ConsumerThread& self) {
  constexpr int kDepth = Config::kDepth, kSteps = 4;
  static_assert(kDepth >= 2 && kDepth <= kSteps);
  uint32_t a[kDepth][kTiles][4];
  uint32_t previous = 0;
  for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
    ring.wait_full(at);
    const uint32_t tokens = stage_operand(ring, at.stage), weights = ring.weights(at.stage);
#pragma unroll
    for (int k_tile = 0; k_tile < Config::kKTiles; ++k_tile) {
      WeightFragment fragment[kTiles];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) fragment[m].load(weight_block<Config>(weights, self, m, k_tile), self.lane);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int slot = (k_tile * kSteps + step) % kDepth;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
          decode_scaled(a[slot][m], fragment[m].words[step], {fragment[m], 0, step / 2}, {fragment[m], 1, step / 2});
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
  multiply_rows<Config, kWidth, kTiles>(sum, kScaledUnits);
}

// Numerics::kExact. Integer weights; every 32-group has an accumulator of its own, which its row's scale multiplies in
// FP32. Two of them alternate, so that the tensor cores work on one while the other is added up. A stage ends drained:
// ptxas serialises every wgmma when such an accumulator is in flight around the loop.
template <class Config, int kWidth, int kTiles>
__device__ __forceinline__ void accumulate_exact(Accumulators<Config>& sum, const Ring<Config>& ring, RingPosition<Config>& at,
                                                 int k_stages, const ConsumerThread& self) {
  constexpr int kGroups = 2;  // 32-groups of a k-tile
  constexpr int kStageGroups = Config::kKTiles * kGroups;
  float part[kGroups][kTiles][kWidth / 2];
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sum[m][i] = 0.0f;

  for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
    ring.wait_full(at);
    const uint32_t tokens = stage_operand(ring, at.stage), weights = ring.weights(at.stage);
    WeightFragment fragment[2][kTiles];
    uint32_t a[kGroups][kTiles][2][4];
    auto add_up = [&](int index) {
      const int group = index % kGroups;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const WeightFragment& weight = fragment[index / kGroups % 2][m];
        const float scale[2] = {weight.scale(0, group), weight.scale(1, group)};
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sum[m][i] = fmaf(scale[i >> 1 & 1], part[group][m][i], sum[m][i]);
      }
    };
#pragma unroll
    for (int index = 0; index < kStageGroups; ++index) {
      const int k_tile = index / kGroups, group = index % kGroups;
      auto& weight = fragment[k_tile % 2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (group == 0) weight[m].load(weight_block<Config>(weights, self, m, k_tile), self.lane);
        decode_integers(a[group][m][0], weight[m].words[2 * group]);
        decode_integers(a[group][m][1], weight[m].words[2 * group + 1]);
      }
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        Wgmma<kWidth>::issue(part[group][m], a[group][m][0], token_operand<Config>(tokens, k_tile, 2 * group), false);
        Wgmma<kWidth>::issue(part[group][m], a[group][m][1], token_operand<Config>(tokens, k_tile, 2 * group + 1), true);
      }
      wgmma_commit();
      if (index > 0) {
        wgmma_wait<1>();
        add_up(index - 1);
      }
    }
    wgmma_wait<0>();
    ring.release(at.stage, self.lane);
    add_up(kStageGroups - 1);
    at.advance();
  }
  multiply_rows<Config, kWidth, kTiles>(sum, kIntegerUnits);
}

template <class Config, int kWidth, int kTiles>
__device__ __forceinline__ void accumulate(Accumulators<Config>& sum, const Ring<Config>& ring, RingPosition<Config>& at,
                                           int k_stages, const ConsumerThread& self) {
  if constexpr (Config::kNumerics == Numerics::kBf16) {
    accumulate_bf16<Config, kWidth, kTiles>(sum, ring, at, k_stages, self);
  } else {
    static_assert(Config::kNumerics == Numerics::kExact);
    accumulate_exact<Config, kWidth, kTiles>(sum, ring, at, k_stages, self);
  }
}

// The narrowest compiled width that covers `rows`: padding rows of a block then cost no tensor time. More than four widths
// in one kernel make ptxas run out of registers and serialise the wgmma.
template <class Config, int kTiles, int kWidth = Config::kWidthStep>
__device__ __forceinline__ void accumulate_rows(int rows, Accumulators<Config>& sum, const Ring<Config>& ring,
                                                RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  static_assert(Config::kBlockRows % Config::kWidthStep == 0 && Config::kBlockRows <= 4 * Config::kWidthStep);
  if constexpr (kWidth < Config::kBlockRows) {
    if (rows > kWidth) {
      accumulate_rows<Config, kTiles, kWidth + Config::kWidthStep>(rows, sum, ring, at, k_stages, self);
      return;
    }
  }
  accumulate<Config, kWidth, kTiles>(sum, ring, at, k_stages, self);
}

// A warpgroup that no weight tile of this output tile falls to lets its stages pass.
template <class Config>
__device__ __forceinline__ void pass_stages(const Ring<Config>& ring, RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
    ring.wait_full(at);
    ring.release(at.stage, self.lane);
    at.advance();
  }
}

// As many weight tiles a warpgroup as the output tile needs.
template <class Config, int kTiles = 1>
__device__ __forceinline__ void accumulate_tile(const TileInfo& tile, Accumulators<Config>& sum, const Ring<Config>& ring,
                                                RingPosition<Config>& at, int k_stages, const ConsumerThread& self) {
  if (kTiles == 1 && self.group >= tile.tiles) {
    pass_stages(ring, at, k_stages, self);
    return;
  }
  if constexpr (kTiles < Config::kRowTiles) {
    if (tile.tiles > kTiles * Config::kConsumerGroups) {
      accumulate_tile<Config, kTiles + 1>(tile, sum, ring, at, k_stages, self);
      return;
    }
  }
  accumulate_rows<Config, kTiles>(tile.rows, sum, ring, at, k_stages, self);
}

}  // namespace chord
