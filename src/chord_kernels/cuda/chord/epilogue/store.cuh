// SPDX-License-Identifier: Apache-2.0
// From accumulators to rows of the output, one 64-row weight tile at a time through the warpgroup's own staging rows:
// fragments are transposed by stmatrix, so that a token's outputs leave as 16-byte pieces of one line.
#pragma once
#include "chord/epilogue/outputs.cuh"
#include "chord/schedule/producer.cuh"
#include "chord/tile/mainloop.cuh"

namespace chord {

template <class Config>
__device__ __forceinline__ void store_tile(const Accumulators<Config>& sum, const TileInfo& tile, Storage<Config>& storage,
                                           const Operands& operands, const Rows<Config>& rows, const ConsumerThread& self) {
  using Map = OutputMap<Config::kEpilogue>;
  static_assert(Config::kStagingBytes == Map::kOutputs * 2);
  constexpr int kPitch = Config::kStagingBytes + 16;
  constexpr int kOctets = Config::kBlockRows < 16 ? 1 : 2;  // token octets of one stmatrix
  constexpr int kMatrices = kOctets * Map::kHalves;
  constexpr int kPieces = Map::kOutputs / 8;  // 16-byte pieces of a token's row
  const uint32_t staging = shared_address(storage.staging[self.group]);
  const int thread = self.warp * kWarpLanes + self.lane;
  const int64_t row_bytes = int64_t{operands.row_tiles} * Map::kOutputs * 2;
  // Matrix i of a stmatrix: octet i / kHalves, half i % kHalves; lanes 8 i .. 8 i + 7 address its eight token rows.
  const int matrix = self.lane / 8 % kMatrices;
  const uint32_t lane_address = staging + (matrix / Map::kHalves * 8 + self.lane % 8) * kPitch +
                                Map::staged(self.warp, matrix % Map::kHalves) * 2;

#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    const int index = m * Config::kConsumerGroups + self.group, row_tile = tile.first_tile + index;
    if (index >= tile.tiles) break;  // computed from what the stage held before, and not wanted
    named_barrier_sync(1 + self.group, kGroupThreads);  // the rows staged before have been read
#pragma unroll
    for (int octet = 0; octet < Config::kBlockRows / 8; octet += kOctets) {
      if (octet * 8 < tile.rows) {
        uint32_t values[kMatrices];
#pragma unroll
        for (int i = 0; i < kOctets; ++i) octet_values<Config::kEpilogue>(values + i * Map::kHalves, sum[m] + (octet + i) * 4);
        store_matrices_transposed(lane_address + octet * 8 * kPitch, values);
      }
    }
    named_barrier_sync(1 + self.group, kGroupThreads);
#pragma unroll 4
    for (int i = thread; i < tile.rows * kPieces; i += kGroupThreads) {
      const int token = i / kPieces, column = i % kPieces * 8;
      const int to = rows.destination(tile.first_slot + token, tile.expert);
      if (to >= 0)
        *reinterpret_cast<uint4*>(operands.outputs + to * row_bytes + Map::column(row_tile, column, operands.row_tiles) * 2) =
            load_shared_16(staging + token * kPitch + column * 2);
    }
  }
}

}  // namespace chord
