// SPDX-License-Identifier: Apache-2.0
// BF16 pairs in one register. The low half is the element with the smaller index.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

// All of these take and give subnormals.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// One half in both; as an operand of the two above it costs no instruction.
__device__ __forceinline__ uint32_t both_halves(uint32_t pair, bool high) {
  uint32_t result;
  if (high)
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(result) : "r"(pair));
  else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(result) : "r"(pair));
  return result;
}

__device__ __forceinline__ uint32_t round_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// A power of two in both halves.
__device__ __forceinline__ uint32_t bf16_pair_of_power(float power) { return (__float_as_uint(power) >> 16) * 0x10001u; }

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

}  // namespace chord
