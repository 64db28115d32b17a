// SPDX-License-Identifier: Apache-2.0
// From the sums of the warps of a team to rows of the output. Where warps share K, every 16-row block has one that adds up its
// parts, always in the same order, and stores.
#pragma once
#include "chord/epilogue/outputs.cuh"
#include "chord/tile/stream_loop.cuh"

namespace chord {

// Which part's warp finishes a unit.
template <class Config>
__device__ __forceinline__ constexpr int finisher(int unit) {
  return unit % Config::kSplit;
}

template <int kParts>
__device__ __forceinline__ float total_of(const float (&part)[kParts]) {
  static_assert(kParts == 2 || kParts == 4);
  if constexpr (kParts == 2) return part[0] + part[1];
  if constexpr (kParts == 4) return (part[0] + part[1]) + (part[2] + part[3]);
}

// Leaves in sum the totals of the units that this warp finishes. Named barrier 1 is the consumers' own.
template <class Config, int kUnits, int kOctets>
__device__ __forceinline__ void add_up_parts(StreamSums<kUnits, kOctets>& sum, bool busy, StreamStorage<Config>& storage, const StreamThread& self) {
  constexpr int kThreads = Config::kWarps * kWarpLanes;
  auto& partials = storage.partials[self.position];
  named_barrier_sync(1, kThreads);  // the sums of the piece before have been read
  if (busy) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int to = finisher<Config>(unit);
      if (to == self.part) continue;
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        const float(&from)[4] = sum[unit][octet];
        partials[unit][self.part - (self.part > to)][octet][self.lane] = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
  }
  named_barrier_sync(1, kThreads);
  if (!busy) return;

#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const int to = finisher<Config>(unit);
    if (to != self.part) continue;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      float part[4][Config::kSplit];
#pragma unroll
      for (int from = 0; from < Config::kSplit; ++from) {
        if (from == to) {
#pragma unroll
          for (int c = 0; c < 4; ++c) part[c][from] = sum[unit][octet][c];
        } else {
          const float4 other = partials[unit][from - (from > to)][octet][self.lane];
          part[0][from] = other.x, part[1][from] = other.y, part[2][from] = other.z, part[3][from] = other.w;
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[unit][octet][c] = total_of(part[c]);
    }
  }
}

// destinations: the output row of token lane / 4 of every octet; -1: none.
template <class Config, int kUnits, int kOctets>
__device__ __forceinline__ void stream_store(StreamSums<kUnits, kOctets>& sum, int first_tile, const int32_t (&destinations)[kOctets], bool busy,
                                             StreamStorage<Config>& storage, const Operands& operands, const StreamThread& self) {
  if constexpr (Config::kSplit > 1) add_up_parts<Config, kUnits, kOctets>(sum, busy, storage, self);
  if (!busy) return;
  const int first = self.position * kUnits;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (finisher<Config>(unit) != self.part) continue;
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      store_octet<Config>(sum[unit][octet], first_tile + first / kTileBlocks, first % kTileBlocks + unit, destinations[octet], operands, self.lane);
    }
  }
}

}  // namespace chord
