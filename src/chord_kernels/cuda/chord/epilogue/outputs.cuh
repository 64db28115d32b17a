// SPDX-License-Identifier: Apache-2.0
// Which outputs a fragment of sums becomes, and where they lie in an output row.
#pragma once
#include "chord/arch/bf16.cuh"
#include "chord/arch/mma.cuh"
#include "chord/schedule/rows.cuh"
#include "chord/tile/dequantize.cuh"

namespace chord {

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// How a tile's 64 packed rows become outputs. In every 16-row block of a paired weight, rows 0..7 are gate rows and
// 8..15 their up rows, so that a lane holds both halves of a pair.
template <Epilogue kEpilogue>
struct OutputMap {
  static_assert(kEpilogue == Epilogue::kStore);
  static constexpr int kOutputs = 64;  // of one tile, for one token
  static constexpr int kHalves = 2;    // fragment halves (rows g, rows g + 8) that are stored
  // Column in the staging row of a warp's fragment half.
  __device__ static int staged(int warp, int half) { return warp * 16 + half * 8; }
  // Output column of staged column c of tile `tile`.
  __device__ static int column(int tile, int c, int) { return tile * 64 + c; }
};

template <>
struct OutputMap<Epilogue::kStorePaired> {
  static constexpr int kOutputs = 64;
  static constexpr int kHalves = 2;
  __device__ static int staged(int warp, int half) { return half * 32 + warp * 8; }
  __device__ static int column(int tile, int c, int row_tiles) {
    return c < 32 ? tile * 32 + c : row_tiles * 32 + tile * 32 + c - 32;
  }
};

template <>
struct OutputMap<Epilogue::kSwiglu> {
  static constexpr int kOutputs = 32;
  static constexpr int kHalves = 1;
  __device__ static int staged(int warp, int) { return warp * 8; }
  __device__ static int column(int tile, int c, int) { return tile * 32 + c; }
};

// One token octet of a fragment in its units, as the BF16 pairs that stmatrix takes. Where nothing but rounding is left to do, the
// units, which are powers of two, follow it: half the multiplications, and the same bits above 2^-97.
template <class Config>
__device__ __forceinline__ void octet_values(uint32_t* values, const float* sum) {
  constexpr float kLow = weight_units<Config>(0), kHigh = weight_units<Config>(1);
  if constexpr (Config::kEpilogue == Epilogue::kSwiglu) {
    values[0] = round_bf16x2(silu(sum[0] * kLow) * (sum[2] * kHigh), silu(sum[1] * kLow) * (sum[3] * kHigh));
  } else {
    static_assert(Config::kEpilogue == Epilogue::kStore || Config::kEpilogue == Epilogue::kStorePaired);
    values[0] = multiply_bf16x2(round_bf16x2(sum[0], sum[1]), bf16_pair_of_power(kLow));
    values[1] = multiply_bf16x2(round_bf16x2(sum[2], sum[3]), bf16_pair_of_power(kHigh));
  }
}

// Eight tokens of a 16-row block, straight to memory: of weight tile `tile` (of all), the block `block`. destination: the output
// row of token lane / 4; -1: none. A token's line is written in pieces of 16 bytes, which few tokens can afford.
template <class Config>
__device__ __forceinline__ void store_octet(const float* sum, int tile, int block, int32_t destination, const Operands& operands, int lane) {
  using Map = OutputMap<Config::kEpilogue>;
  uint32_t values[Map::kHalves];
  octet_values<Config>(values, sum);
  const int64_t row = destination * (int64_t{operands.row_tiles} * Map::kOutputs);
#pragma unroll
  for (int half = 0; half < Map::kHalves; ++half) {
    const uint32_t pair = transpose_matrix(values[half]);  // token lane / 4, outputs 2 (lane % 4) and the next
    const int column = Map::column(tile, Map::staged(block, half), operands.row_tiles) + lane % 4 * 2;
    if (destination >= 0) *reinterpret_cast<uint32_t*>(operands.outputs + (row + column) * 2) = pair;
  }
}

}  // namespace chord
