// SPDX-License-Identifier: Apache-2.0
// Sets of up to 32 or 64 small numbers, a bit each.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

template <int kMost>
struct BitsOfSelect {
  static_assert(kMost <= 64);
  using Type = uint64_t;
};
template <>
struct BitsOfSelect<32> {
  using Type = uint32_t;
};
template <int kMost>
using BitsOf = typename BitsOfSelect<kMost>::Type;

// The numbers below `number`, which is less than the bits of the type.
template <class Bits>
__device__ __forceinline__ Bits bits_below(int number) {
  return (Bits{1} << number) - 1;
}

__device__ __forceinline__ int count_bits(uint32_t bits) { return __popc(bits); }
__device__ __forceinline__ int count_bits(uint64_t bits) { return __popcll(bits); }

// -1: none.
__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(bits) - 1; }
__device__ __forceinline__ int first_bit(uint64_t bits) { return __ffsll(bits) - 1; }

}  // namespace chord
