// SPDX-License-Identifier: Apache-2.0
// Packed 16 x 64 blocks of weights for warp decode, one struct a format: where a block lies, and how a lane's share of it becomes A
// fragments of mma m16n8k16. An output is sum over 32-groups of scale * (products of the group) * unit of the row's half.
#pragma once
#include "chord/arch/mma.cuh"
#include "chord/tile/dequantize.cuh"

namespace chord {

enum class Format { kInt4, kMxfp8 };

template <Format kFormat>
struct DecodeBlock;

// W4A16 of formats.py: four blocks are a 64-row tile.
template <>
struct DecodeBlock<Format::kInt4> {
  static constexpr int kBytes = sizeof(WeightBlock);
  static constexpr int kKStride = sizeof(WeightTile);  // from one k-tile to the next
  static constexpr int kTileBlocks = 4;

  WeightFragment fragment;

  // Of block `row` (16 rows each) of an expert with `rows` of them, k-tile `k_tile` of k_tiles. 32 bits count more k-tiles than a memory has.
  __device__ __forceinline__ static int64_t offset(uint32_t expert, uint32_t row, uint32_t rows, uint32_t k_tiles, uint32_t k_tile) {
    return int64_t{kKStride} * ((expert * rows + row) / kTileBlocks * k_tiles + k_tile) + row % kTileBlocks * kBytes;
  }

  __device__ __forceinline__ void load(uint32_t block, int lane) { fragment.load(block, lane); }
  // Codes enter the tensor cores as the BF16 subnormals that their bits spell, and activations multiplied by 2^64, so that products and
  // sums are normal FP32 numbers (2^63 and more overflow). Sums begin with minus eight times those of the activations.
  __device__ __forceinline__ void decode(uint32_t (&a)[4], int step) const { decode_raw(a, fragment.words[step]); }
  __device__ __forceinline__ static void prepare(uint32_t (&b)[2][4], float (&start)[2][4]) {
    constexpr uint32_t kTwoTo64 = 0x5F805F80u, kMinus8 = 0x80088008u, kMinus128 = 0x80808080u;  // in the units of rows g and g + 8
    constexpr uint32_t zero_points[4] = {kMinus8, kMinus128, kMinus8, kMinus128};
    constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[group][i] = multiply_bf16x2(b[group][i], kTwoTo64);
      mma_m16n8k16(start[group], zero_points, b[group], kZero);
      mma_m16n8k16(start[group], zero_points, b[group] + 2, start[group]);
    }
  }
  __device__ __forceinline__ float scale(int row_half, int group) const { return fragment.scale(row_half, group); }
  __device__ __forceinline__ void look_for_nan(uint32_t&) const {}
  __device__ __forceinline__ static float unit(uint32_t, int row_half) { return kIntegerUnits[row_half] * 0x1p63f; }
};

// MXFP8 of formats.py.
template <>
struct DecodeBlock<Format::kMxfp8> {
  static constexpr int kCodeBytes = 1024;
  static constexpr int kBytes = kCodeBytes + 32;
  static constexpr int kKStride = kBytes;

  uint32_t words[8];  // two a k-step of 16
  uint32_t scales;    // E8M0 bytes [row half][32-group]

  __device__ __forceinline__ static int64_t offset(uint32_t expert, uint32_t row, uint32_t rows, uint32_t k_tiles, uint32_t k_tile) {
    return int64_t{kKStride} * ((expert * rows + row) * k_tiles + k_tile);
  }

  __device__ __forceinline__ void load(uint32_t block, int lane) {
    const uint4 low = load_shared_16(block + lane * 16), high = load_shared_16(block + kCodeBytes / 2 + lane * 16);
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
    scales = load_shared_4(block + kCodeBytes + lane / 4 * 4);
  }

  // Sign, exponent and mantissa of an E4M3 number at bits 15, 10..7 and 6..4 are a BF16 number of 2^-120 its value, subnormals too. In a
  // word, those of rows g lie there; of rows g + 8, sign at 11, exponent at 14..12 and 3, mantissa at 2..0.
  __device__ __forceinline__ void decode(uint32_t (&a)[4], int step) const {
    constexpr uint32_t kTwoTo120 = 0x7B807B80u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = words[step * 2 + half];
      a[half * 2] = multiply_bf16x2(word & 0x87F087F0u, kTwoTo120);
      a[half * 2 + 1] = multiply_bf16x2(((word << 4) & 0x80F080F0u) | ((word >> 4) & 0x07000700u), kTwoTo120);
    }
  }

  __device__ __forceinline__ static void prepare(uint32_t (&)[2][4], float (&start)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) start[i / 4][i % 4] = 0.0f;
  }

  // 2^(byte - 127); byte 0 is the subnormal 2^-127. Byte 255 is infinity here, and NaN once unit() has been applied. Both row halves' are the
  // exponents of two BF16 numbers at once.
  __device__ __forceinline__ float scale(int row_half, int group) const {
    constexpr uint32_t kExponents = 0x7F807F80u, kTwoToMinus127 = 0x00400040u;
    const uint32_t pair = __vmaxu2((group ? scales >> 1 : scales << 7) & kExponents, kTwoToMinus127);
    return __uint_as_float(row_half ? pair & 0xFFFF0000u : pair << 16);
  }
  // Bit 7 of every byte of `found` that was 255 in some block; other bits mean nothing.
  __device__ __forceinline__ void look_for_nan(uint32_t& found) const {
    found |= ((scales & 0x7F7F7F7Fu) + 0x01010101u) & scales;
  }
  __device__ __forceinline__ static float unit(uint32_t found, int row_half) {
    return found >> row_half * 16 & 0x8080u ? __uint_as_float(0x7FC00000u) : 1.0f;
  }
};

}  // namespace chord
