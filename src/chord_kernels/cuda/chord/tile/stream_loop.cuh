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

template <class Config, int kOctets>
__device__ __forceinline__ void load_tokens(TokenFragments<kOctets>& tokens, const StreamRing<Config>& ring, uint32_t stage, int k_tile, int lane) {
  constexpr int kPitch = sizeof(StreamStage<Config>::activations[0]);
  const uint32_t row = ring.activations(stage) + k_tile * kTokenBytes + lane % 8 * kPitch + lane / 8 * 16;
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
    for (int group = 0; group < 2; ++group) load_matrices(tokens.fragments[octet][group], row + octet * 8 * kPitch + group * (kTokenBytes / 2));
}

// busy: the piece has blocks for this warp; others let its stages pass.
template <class Config, int kUnits, int kOctets>
__device__ __forceinline__ void stream_accumulate(StreamSums<kUnits, kOctets>& sum, const StreamRing<Config>& ring, RingPosition<Config>& at,
                                                  int k_tiles, bool busy, const StreamThread& self) {
  constexpr int kOwn = kStreamKTiles / Config::kSplit;  // k-tiles of a stage
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[unit][octet][c] = 0.0f;

  const int first = self.position * kUnits;
  const uint32_t offset = first / kTileBlocks * sizeof(StreamStage<Config>::weights[0]) + first % kTileBlocks * sizeof(WeightBlock);
  for (int k_tile = self.part; k_tile - self.part < k_tiles; k_tile += kStreamKTiles) {
    ring.wait_full(at);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int step = own * Config::kSplit;  // from the part's first k-tile on
      if (busy && k_tile + step < k_tiles) {
        const uint32_t weights = ring.weights(at.stage) + offset + (self.part + step) * sizeof(WeightTile);
        TokenFragments<kOctets> tokens;
        load_tokens(tokens, ring, at.stage, self.part + step, self.lane);
        PendingGroup<kOctets> pending[2];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          WeightFragment weight;
          weight.load(weights + unit * sizeof(WeightBlock), self.lane);
          if (own == kOwn - 1 && unit == kUnits - 1) {  // the stage is in registers and may be filled anew
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
      } else if (own == kOwn - 1) {
        __syncwarp();
        ring.release(at.stage, self.lane);
      }
    }
    at.template advance<Config::kTeams>();
  }
}

}  // namespace chord
