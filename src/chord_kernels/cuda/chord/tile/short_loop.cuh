// SPDX-License-Identifier: Apache-2.0
// One warp's share of pieces whose K is a single stage: a 16-row block over all of K, so that they end without an exchange between
// warps. Token rows can stay in registers for as long as the pieces are of one block of them.
#pragma once
#include "chord/tile/stream_loop.cuh"

namespace chord {

// Exact numerics on few rows: token rows are kept, and codes are not decoded. These enter the tensor cores as the BF16 subnormals that
// their bits spell (dequantize.cuh: code x 2^-133 in rows g, x 2^-129 in rows g + 8); tokens are multiplied by 2^64 on their way, so that
// products and sums are normal FP32 numbers. The zero point is two more products, of constant weights: the tensor cores have time, the
// registers no room for its sums. Activations of 2^63 and more overflow.
template <class Config>
constexpr bool kKeepsTokens = Config::kBlockRows == 8 && Config::kNumerics == Numerics::kExact;

template <class Config, bool kKept = kKeepsTokens<Config>>
struct StageTokens {
  uint32_t fragments[kStreamKTiles][2][4];  // of each k-tile and 32-group, as in TokenFragments

  __device__ __forceinline__ void keep(const StreamRing<Config>& ring, uint32_t stage, int rows, int k_tiles, int lane) {
    constexpr uint32_t kTwoTo64 = 0x5F805F80u;
    const TokenRows<1> token_rows(rows, kStreamKTiles, lane);
#pragma unroll
    for (int k_tile = 0; k_tile < kStreamKTiles; ++k_tile) {
      if (k_tile >= k_tiles) break;
      TokenFragments<1> loaded;
      token_rows.load(loaded, ring.activations(stage) + k_tile * kTokenBytes);
#pragma unroll
      for (int group = 0; group < 2; ++group)
#pragma unroll
        for (int i = 0; i < 4; ++i) fragments[k_tile][group][i] = multiply_bf16x2(loaded.fragments[0][group][i], kTwoTo64);
    }
  }

  // Adds the products of a 32-group, in units of 2^-63 of decode_integers'.
  __device__ __forceinline__ void multiply(float (&sum)[4], const WeightFragment& weight, int k_tile, int group) const {
    constexpr uint32_t kMinus8 = 0x80088008u, kMinus128 = 0x80808080u;  // in the units of codes of rows g and g + 8
    constexpr uint32_t zero_points[4] = {kMinus8, kMinus128, kMinus8, kMinus128};
    constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const uint32_t(&b)[4] = fragments[k_tile][group];
    uint32_t a[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) decode_raw(a[step], weight.words[2 * group + step]);
    float part[4];
    mma_m16n8k16(part, zero_points, b, kZero);
    mma_m16n8k16(part, zero_points, b + 2, part);
    mma_m16n8k16(part, a[0], b, part);
    mma_m16n8k16(part, a[1], b + 2, part);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = fmaf(weight.scale(c / 2, group), part[c], sum[c]);
  }
  static constexpr float kUnit = 0x1p63f;
};

template <class Config>
struct StageTokens<Config, false> {
  __device__ __forceinline__ void keep(const StreamRing<Config>&, uint32_t, int, int, int) {}
};

// The sums of a block over the k-tiles of a stage. weights: of the block in it.
template <class Config, int kTiles, int kOctets>
__device__ __forceinline__ void multiply_stage(float (&sum)[kOctets][4], const StageTokens<Config>& kept, const StreamRing<Config>& ring, uint32_t stage,
                                               uint32_t weights, int rows, int lane) {
  const TokenRows<kOctets> token_rows(rows, kStreamKTiles, lane);
#pragma unroll
  for (int k_tile = 0; k_tile < kTiles; ++k_tile) {
    WeightFragment weight;
    weight.load(weights + k_tile * sizeof(WeightTile), lane);
    if constexpr (kKeepsTokens<Config>) {
#pragma unroll
      for (int group = 0; group < 2; ++group) kept.multiply(sum[0], weight, k_tile, group);
    } else {
      TokenFragments<kOctets> tokens;
      token_rows.load(tokens, ring.activations(stage) + k_tile * kTokenBytes);
      if constexpr (Config::kNumerics == Numerics::kExact) {
        PendingGroup<kOctets> pending[2];
        pending[0].multiply(weight, 0, tokens);
        pending[1].multiply(weight, 1, tokens);
        pending[0].add_to(sum);
        pending[1].add_to(sum);
      } else {
        multiply_rounded(sum, weight, tokens);
      }
    }
  }
  if constexpr (kKeepsTokens<Config>) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[0][c] *= StageTokens<Config>::kUnit;
  }
}

template <class Config, int kOctets, int kTiles = kStreamKTiles>
__device__ __forceinline__ void multiply_short(float (&sum)[kOctets][4], const StageTokens<Config>& kept, const StreamRing<Config>& ring, uint32_t stage,
                                               uint32_t weights, int rows, int k_tiles, int lane) {
  if constexpr (kTiles > 1) {
    if (k_tiles < kTiles) {
      multiply_short<Config, kOctets, kTiles - 1>(sum, kept, ring, stage, weights, rows, k_tiles, lane);
      return;
    }
  }
  multiply_stage<Config, kTiles, kOctets>(sum, kept, ring, stage, weights, rows, lane);
}

}  // namespace chord
