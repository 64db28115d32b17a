// SPDX-License-Identifier: Apache-2.0
// Packed words to wgmma A fragments.
#pragma once
#include "chord/arch/bf16.cuh"
#include "chord/arch/shared.cuh"
#include "chord/tile/storage.cuh"

namespace chord {

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
  // The scale of one 32-group in both halves of a register, times kIntegerUnits[row_half].
  __device__ __forceinline__ uint32_t scale_pair(int row_half, int group) const {
    constexpr uint32_t kUnits[2] = {0x42804280u, 0x40804080u};  // 64 and 4
    return multiply_bf16x2(__byte_perm(scales[row_half], 0, group ? 0x3232 : 0x1010), kUnits[row_half]);
  }
  __device__ __forceinline__ float scale(int row_half, int group) const {
    return group ? high_bf16(scales[row_half]) : low_bf16(scales[row_half]);
  }
};

// Codes as they lie, as BF16: register j is code << 4 (j & 1), read as a bit pattern below 256. BF16 patterns below 256 are the
// subnormals and the first normal binade, which are evenly spaced: the value is the pattern times 2^-133, exactly.
__device__ __forceinline__ void decode_raw(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = (word >> (j / 2 * 8)) & (j & 1 ? 0x00F000F0u : 0x000F000Fu);
}

// (code - 8) / kIntegerUnits[row half] as BF16, exact: one fused multiply-add of the raw value, by the largest power of two.
constexpr float kIntegerUnits[2] = {64.0f, 4.0f};

__device__ __forceinline__ void decode_integers(uint32_t (&a)[4], uint32_t word) {
  constexpr uint32_t kTwoTo127 = 0x7F007F00u, kMinusEighth = 0xBE00BE00u, kMinusTwo = 0xC000C000u;
  decode_raw(a, word);
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = fma_bf16x2(a[j], kTwoTo127, j & 1 ? kMinusTwo : kMinusEighth);
}

// RN_bf16((code - 8) * scale). Register j belongs to row half j & 1; scales are in kIntegerUnits (WeightFragment::scale_pair).
__device__ __forceinline__ void decode_scaled(uint32_t (&a)[4], uint32_t word, uint32_t scale_low_row, uint32_t scale_high_row) {
  decode_integers(a, word);
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = multiply_bf16x2(a[j], j & 1 ? scale_high_row : scale_low_row);
}

}  // namespace chord
