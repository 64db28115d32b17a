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

// What turns a raw value into (code - 8) * scale / kScaledUnits[row half], for one row: halves are the 32-groups of a k-tile.
constexpr float kScaledUnits[2] = {0x1p29f, 0x1p25f};

struct ScaledRow {
  uint32_t factors, offsets;

  __device__ __forceinline__ ScaledRow(const WeightFragment& weight, int row_half) {
    constexpr uint32_t kTwoTo104 = 0x73807380u, kMinusEight[2] = {0xB280B280u, 0xB480B480u};  // -2^-26, -2^-22: in the units
    factors = multiply_bf16x2(weight.scales[row_half], kTwoTo104);
    offsets = multiply_bf16x2(weight.scales[row_half], kMinusEight[row_half]);
  }
  __device__ __forceinline__ uint32_t scaled(uint32_t raw, int group) const {
    return fma_bf16x2(raw, both_halves(factors, group), both_halves(offsets, group));
  }
};

struct ScaledRows {
  ScaledRow low, high;
  __device__ __forceinline__ explicit ScaledRows(const WeightFragment& weight) : low(weight, 0), high(weight, 1) {}
};

// RN_bf16((code - 8) * scale) / kScaledUnits[row half]: a fused multiply-add rounds once, and powers of two change no digit as
// long as 2^-97 <= scale < 2^23 (formats.py refuses larger ones; smaller ones lose bits). Register j belongs to row half j & 1.
__device__ __forceinline__ void decode_scaled(uint32_t (&a)[4], uint32_t word, const ScaledRows& rows, int group) {
  decode_raw(a, word);
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = j & 1 ? rows.high.scaled(a[j], group) : rows.low.scaled(a[j], group);
}

// What a sum of products with dequantized weights has to be multiplied by: rows g, rows g + 8.
template <class Config>
__device__ __forceinline__ constexpr float weight_units(int row_half) {
  return Config::kNumerics == Numerics::kExact ? kIntegerUnits[row_half] : kScaledUnits[row_half];
}

}  // namespace chord
