// SPDX-License-Identifier: Apache-2.0
// Packed words to wgmma A fragments.
#pragma once
#include "chord/arch/bf16.cuh"
#include "chord/arch/shared.cuh"
#include "chord/tile/storage.cuh"

namespace chord {

constexpr uint32_t kPair128 = 0x43004300u;  // BF16 (128, 128): its low four mantissa bits count in ones
constexpr uint32_t kPair136 = 0x43084308u;

// A lane's share of a WeightBlock: one word a k-step of 16, scales of rows g and g + 8 as [32-group 0 | 1] pairs.
struct WeightFragment {
  uint32_t words[4];
  uint32_t scales[2];

  __device__ __forceinline__ void load(uint32_t block, int lane) {
    const uint4 codes = load_shared_16(block + lane * 16);
    const uint2 pair = load_shared_8(block + sizeof(WeightBlock::codes) + (lane >> 2) * 8);
    words[0] = codes.x, words[1] = codes.y, words[2] = codes.z, words[3] = codes.w;
    scales[0] = pair.x, scales[1] = pair.y;
  }
  // The scale of one 32-group in both halves of a register.
  __device__ __forceinline__ uint32_t scale_pair(int row_half, int group) const {
    return __byte_perm(scales[row_half], 0, group ? 0x3232 : 0x1010);
  }
  __device__ __forceinline__ float scale(int row_half, int group) const {
    return group ? high_bf16(scales[row_half]) : low_bf16(scales[row_half]);
  }
};

// code - 8 as BF16, exact.
__device__ __forceinline__ void decode_integers(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = subtract_bf16x2(and_or(word >> (4 * j), 0x000F000Fu, kPair128), kPair136);
}

// RN_bf16((code - 8) * scale). Register j belongs to row half j & 1.
__device__ __forceinline__ void decode_scaled(uint32_t (&a)[4], uint32_t word, uint32_t scale_low_row, uint32_t scale_high_row) {
  decode_integers(a, word);
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = multiply_bf16x2(a[j], j & 1 ? scale_high_row : scale_low_row);
}

}  // namespace chord
