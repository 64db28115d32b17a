// SPDX-License-Identifier: Apache-2.0
// One warp's share of a piece: a weight tile, that is four 16-row blocks, x eight tokens, over every fourth k-tile.
//
// Exact numerics without decoding. Codes enter the tensor cores as the BF16 subnormals that their bits spell, code x 2^-133
// in rows g and code x 2^-129 in rows g + 8; tokens are multiplied by 2^64 on their way, so that products and sums stay
// normal FP32 numbers. The zero point is in the accumulator: every 32-group starts from -8 times the sum of its activations,
// which one more product with a constant weight yields for all rows at once. The powers of two leave in the epilogue.
// Activations of 2^63 and more overflow; sums below 2^-57 lose bits.
#pragma once
#include "chord/arch/mma.cuh"
#include "chord/tile/dequantize.cuh"
#include "chord/tile/stream_storage.cuh"

namespace chord {

// Of each 16-row block: rows g and g + 8, tokens 2 t and 2 t + 1.
using StreamSums = float[4][4];

// What a sum has to be multiplied by: rows g, rows g + 8.
constexpr float kStreamUnits[2] = {0x1p69f, 0x1p65f};

// A warp's tokens of one k-tile, and what every 32-group of it starts from.
struct StreamTokens {
  uint32_t fragments[2][4];  // of each 32-group: B of its two k-steps
  float start[2][4];

  __device__ __forceinline__ void load(uint32_t rows, int lane) {
    const uint32_t row = rows + lane % 8 * sizeof(StreamStage::activations[0]) + lane / 8 * 16;
#pragma unroll
    for (int group = 0; group < 2; ++group) load_matrices(fragments[group], row + group * (kTokenBytes / 2));
  }

  __device__ __forceinline__ void find_start() {
    constexpr uint32_t kTwoTo64 = 0x5F805F80u, kMinus8 = 0x80088008u, kMinus128 = 0x80808080u;
    const uint32_t zero_points[4] = {kMinus8, kMinus128, kMinus8, kMinus128};
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      uint32_t(&b)[4] = fragments[group];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = multiply_bf16x2(b[i], kTwoTo64);
      mma_m16n8k16(start[group], zero_points, b, zero);
      mma_m16n8k16(start[group], zero_points, b + 2, start[group]);
    }
  }
};

// sum += a 16-row block of weights x the tokens.
__device__ __forceinline__ void stream_multiply(float (&sum)[4], const WeightFragment& weight, const StreamTokens& tokens) {
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    uint32_t a[2][4];
    decode_raw(a[0], weight.words[2 * group]);
    decode_raw(a[1], weight.words[2 * group + 1]);
    float part[4];
    mma_m16n8k16(part, a[0], tokens.fragments[group], tokens.start[group]);
    mma_m16n8k16(part, a[1], tokens.fragments[group] + 2, part);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = fmaf(weight.scale(c / 2, group), part[c], sum[c]);
  }
}

// A warp whose tile the piece does not have (busy == false) lets the stages pass.
template <class Config>
__device__ __forceinline__ void stream_accumulate(StreamSums& sum, const StreamRing<Config>& ring, RingPosition<Config>& at, int k_tiles,
                                                  bool busy, const StreamThread& self) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[i][c] = 0.0f;

  const uint32_t offset = (self.tile * kStreamKTiles + self.quarter) * sizeof(WeightTile);
  for (int k_tile = self.quarter; k_tile - self.quarter < k_tiles; k_tile += kStreamKTiles) {
    ring.wait_full(at);
    if (busy && k_tile < k_tiles) {
      const uint32_t weights = ring.weights(at.stage) + offset;
      StreamTokens tokens;
      tokens.load(ring.activations(at.stage) + self.quarter * kTokenBytes, self.lane);
      tokens.find_start();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        WeightFragment weight;
        weight.load(weights + i * sizeof(WeightBlock), self.lane);
        if (i == 3) {  // the stage is in registers and may be filled anew
          __syncwarp();
          ring.release(at.stage, self.lane);
        }
        stream_multiply(sum[i], weight, tokens);
      }
    } else {
      ring.release(at.stage, self.lane);
    }
    at.advance();
  }
}

}  // namespace chord
