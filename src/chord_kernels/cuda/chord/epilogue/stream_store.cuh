// SPDX-License-Identifier: Apache-2.0
// From the partial sums of four warps to rows of the output. Every 16-row block has one warp that adds up its four quarters of
// K, always in the same order, and stores.
#pragma once
#include "chord/epilogue/outputs.cuh"
#include "chord/tile/stream_loop.cuh"

namespace chord {

// Named barrier 1 is the consumers' own. Quarter q of a tile's four warps finishes its block q.
// destination: the output row of token lane / 4; -1: none. busy: the piece has this warp's tile.
template <class Config>
__device__ __forceinline__ void stream_store(const StreamSums& sum, int first_tile, int32_t destination, bool busy,
                                             StreamStorage<Config>& storage, const Operands& operands, const StreamThread& self) {
  constexpr int kThreads = kStreamWarps * kWarpLanes;
  auto& partials = storage.partials[self.tile];
  float own[4];
  named_barrier_sync(1, kThreads);  // the partials of the piece before have been read
  if (busy) {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block == self.quarter) {
#pragma unroll
        for (int c = 0; c < 4; ++c) own[c] = sum[block][c];
      } else {
        partials[block][self.quarter - (self.quarter > block)][self.lane] =
            make_float4(sum[block][0], sum[block][1], sum[block][2], sum[block][3]);
      }
    }
  }
  named_barrier_sync(1, kThreads);
  if (!busy) return;

  float part[kStreamKTiles][4];
#pragma unroll
  for (int quarter = 0; quarter < kStreamKTiles; ++quarter) {
    if (quarter == self.quarter) {
#pragma unroll
      for (int c = 0; c < 4; ++c) part[quarter][c] = own[c];
    } else {
      const float4 other = partials[self.quarter][quarter - (quarter > self.quarter)][self.lane];
      part[quarter][0] = other.x, part[quarter][1] = other.y, part[quarter][2] = other.z, part[quarter][3] = other.w;
    }
  }
  float total[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) total[c] = ((part[0][c] + part[1][c]) + (part[2][c] + part[3][c])) * kStreamUnits[c / 2];
  store_octet<Config::kEpilogue>(total, first_tile + self.tile, self.quarter, destination, operands, self.lane);
}

}  // namespace chord
