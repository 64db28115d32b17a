// SPDX-License-Identifier: Apache-2.0
// A 16-row block of weights x eight or sixteen tokens by mma.sync: what the stream and the direct kernel do with a k-tile.
#pragma once
#include "chord/arch/mma.cuh"
#include "chord/tile/dequantize.cuh"

namespace chord {

// What a sum has to be multiplied by: rows g, rows g + 8.
template <class Config>
__device__ __forceinline__ constexpr float block_units(int row_half) {
  return Config::kNumerics == Numerics::kExact ? kIntegerUnits[row_half] : kScaledUnits[row_half];
}

// A k-tile of tokens as B operands: of each octet and 32-group, the registers of its two k-steps.
template <int kOctets>
struct TokenFragments {
  uint32_t fragments[kOctets][2][4];
};

// sum: of each octet, rows g and g + 8, tokens 2 t and 2 t + 1. Exact: every 32-group is summed on its own and scaled in FP32.
template <Numerics kNumerics, int kOctets>
__device__ __forceinline__ void multiply_block(float (&sum)[kOctets][4], const WeightFragment& weight, const TokenFragments<kOctets>& tokens) {
  constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    uint32_t a[2][4];
    if constexpr (kNumerics == Numerics::kExact) {
#pragma unroll
      for (int step = 0; step < 2; ++step) decode_integers(a[step], weight.words[2 * group + step]);
    } else {
      const ScaledGroup low_row(weight, 0, group), high_row(weight, 1, group);
#pragma unroll
      for (int step = 0; step < 2; ++step) decode_scaled(a[step], weight.words[2 * group + step], low_row, high_row);
    }
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const uint32_t* b = tokens.fragments[octet][group];
      if constexpr (kNumerics == Numerics::kExact) {
        float part[4];
        mma_m16n8k16(part, a[0], b, kZero);
        mma_m16n8k16(part, a[1], b + 2, part);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[octet][c] = fmaf(weight.scale(c / 2, group), part[c], sum[octet][c]);
      } else {
        mma_m16n8k16(sum[octet], a[0], b, sum[octet]);
        mma_m16n8k16(sum[octet], a[1], b + 2, sum[octet]);
      }
    }
  }
}

}  // namespace chord
