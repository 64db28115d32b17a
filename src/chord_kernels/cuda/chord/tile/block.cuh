// SPDX-License-Identifier: Apache-2.0
// A 16-row block of weights x eight or sixteen tokens by mma.sync: what the stream kernel does with a k-tile.
#pragma once
#include "chord/arch/mma.cuh"
#include "chord/tile/dequantize.cuh"

namespace chord {

// A k-tile of tokens as B operands: of each octet and 32-group, the registers of its two k-steps.
template <int kOctets>
struct TokenFragments {
  uint32_t fragments[kOctets][2][4];
};

// The product of a 32-group of a block that has not been added to its sum yet: mma.sync takes a while, in which the next group can be
// dequantized. Exact: summed on its own, to be scaled in FP32.
template <int kOctets>
struct PendingGroup {
  float part[kOctets][4];  // of each octet, rows g and g + 8, tokens 2 t and 2 t + 1
  float scale[2];

  __device__ __forceinline__ void multiply(const WeightFragment& weight, int group, const TokenFragments<kOctets>& tokens) {
    constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint32_t a[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) decode_integers(a[step], weight.words[2 * group + step]);
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) mma_m16n8k16(part[octet], a[0], tokens.fragments[octet][group], kZero);
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) mma_m16n8k16(part[octet], a[1], tokens.fragments[octet][group] + 2, part[octet]);
    scale[0] = weight.scale(0, group), scale[1] = weight.scale(1, group);
  }
  __device__ __forceinline__ void add_to(float (&sum)[kOctets][4]) const {
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[octet][c] = fmaf(scale[c / 2], part[octet][c], sum[octet][c]);
  }
};

// sum: of each octet. BF16: weights are rounded, sums need no second accumulator.
template <int kOctets>
__device__ __forceinline__ void multiply_rounded(float (&sum)[kOctets][4], const WeightFragment& weight, const TokenFragments<kOctets>& tokens) {
  const ScaledRows rows(weight);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    uint32_t a[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) decode_scaled(a[step], weight.words[2 * group + step], rows, group);
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      mma_m16n8k16(sum[octet], a[0], tokens.fragments[octet][group], sum[octet]);
      mma_m16n8k16(sum[octet], a[1], tokens.fragments[octet][group] + 2, sum[octet]);
    }
  }
}

}  // namespace chord
