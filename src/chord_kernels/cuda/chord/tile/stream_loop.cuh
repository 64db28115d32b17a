// SPDX-License-Identifier: Apache-2.0
// One warp's share of a piece: kUnits 16-row blocks of weights x kOctets octets of token rows, over every kSplit-th k-tile.
//
// The 16-row blocks of a piece are counted through its weight tiles. Piece of one, two or four tiles: the warp at position p has
// the 1, 2 or 4 blocks from p * kUnits on, all of one tile. Whatever the width, a row's sum has the same parts, in the same order.
#pragma once
#include "chord/tile/block.cuh"
#include "chord/tile/stream_storage.cuh"

namespace chord {

// Of each 16-row block and octet: rows g and g + 8, tokens 2 t and 2 t + 1.
template <int kUnits, int kOctets>
using StreamSums = float[kUnits][kOctets][4];

// Where a lane's rows for ldmatrix lie, from the first row of a stage: rows that are missing read another's, and count for nothing.
template <int kOctets>
struct TokenRows {
  uint32_t offset[kOctets];

  __device__ __forceinline__ TokenRows(int rows, int depth, int lane) {
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const int row = octet * 8 + lane % 8;
      offset[octet] = (row < rows ? row : 0) * token_pitch(depth) + lane / 8 * 16;
    }
  }
  // address: of the k-tile in the first row.
  __device__ __forceinline__ void load(TokenFragments<kOctets>& tokens, uint32_t address) const {
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
      for (int group = 0; group < 2; ++group)
        load_matrices(tokens.fragments[octet][group], address + offset[octet] + group * (kTokenBytes / 2));
  }
};

// busy: the piece has blocks for this warp; others let its stages pass.
template <class Config, int kUnits, int kOctets>
__device__ __forceinline__ void stream_accumulate(StreamSums<kUnits, kOctets>& sum, const StreamRing<Config>& ring, RingPosition<Config>& at,
                                                  int rows, int depth, int k_tiles, bool busy, const StreamThread& self) {
  constexpr int kMost = (kUnits == 1 ? kLongestStage<Config> : kStreamKTiles) / Config::kSplit;  // k-tiles of a stage and part
  // Full stages have no branch between their k-tiles where units are few: one's loads and products fill the other's waits.
  constexpr bool kFull = kUnits == 1 || kMost == 1;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[unit][octet][c] = 0.0f;

  const TokenRows<kOctets> token_rows(rows, depth, self.lane);
  const int first = self.position * kUnits;
  const uint32_t offset = (first / kTileBlocks * depth + self.part) * sizeof(WeightTile) + first % kTileBlocks * sizeof(WeightBlock);
  const auto multiply = [&](int step, bool last) {  // the part's k-tile `step` of a stage
    const int k_tile = step * Config::kSplit;       // from the part's first one on
    const uint32_t weights = ring.weights(at.stage) + offset + k_tile * sizeof(WeightTile);
    TokenFragments<kOctets> tokens;
    token_rows.load(tokens, ring.activations(at.stage) + (self.part + k_tile) * kTokenBytes);
    PendingGroup<kOctets> pending[2];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      WeightFragment weight;
      weight.load(weights + unit * sizeof(WeightBlock), self.lane);
      if (last && unit == kUnits - 1) {  // the stage is in registers and may be filled anew
        __syncwarp();
        ring.release(at.stage, self.lane);
      }
      if constexpr (Config::kNumerics == Numerics::kExact) {
        pending[0].multiply(weight, 0, tokens);
        if (unit > 0) pending[1].add_to(sum[unit - 1]);
        pending[1].multiply(weight, 1, tokens);
        pending[0].add_to(sum[unit]);
      } else {
        multiply_rounded(sum[unit], weight, tokens);
      }
    }
    if constexpr (Config::kNumerics == Numerics::kExact) pending[1].add_to(sum[kUnits - 1]);
  };
  for (int k_tile = 0; k_tile < k_tiles; k_tile += depth) {
    ring.wait_full(at);
    const int own = busy ? (min(depth, k_tiles - k_tile) - self.part + Config::kSplit - 1) / Config::kSplit : 0;
    if (kFull && own == kMost) {
#pragma unroll
      for (int step = 0; step < kMost; ++step) multiply(step, step == kMost - 1);
    } else {
      if (own == 0) {
        __syncwarp();
        ring.release(at.stage, self.lane);
      }
#pragma unroll
      for (int step = 0; step < kMost - kFull; ++step)
        if (step < own) multiply(step, step == own - 1);
    }
    at.advance();
  }
}

}  // namespace chord
