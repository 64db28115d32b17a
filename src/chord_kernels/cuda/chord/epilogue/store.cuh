// SPDX-License-Identifier: Apache-2.0
// From a warpgroup's accumulators of one weight tile to rows of the output: straight from registers for small blocks, through the
// warpgroup's own staging rows for large ones, where stmatrix transposes fragments, so that a token's outputs leave as 16-byte
// pieces of one line.
#pragma once
#include "chord/epilogue/outputs.cuh"
#include "chord/tile/operands.cuh"

namespace chord {

// Where the rows of a piece go. Small blocks: the rows of this lane's tokens, one an octet, as the producer left them. Large ones
// look them up.
template <class Config, bool kSmall = kSmallBlocks<Config>>
struct OutputRows {
  int32_t rows[Config::kBlockRows / 8];

  __device__ __forceinline__ OutputRows(const Storage<Config>& storage, const Routing&, const PieceSlot<Config>& slot, int lane) {
#pragma unroll
    for (int octet = 0; octet < Config::kBlockRows / 8; ++octet) rows[octet] = storage.end.destinations[slot.index][octet * 8 + lane / 4];
  }
};
template <class Config>
struct OutputRows<Config, false> {
  Rows<Config> rows;

  __device__ __forceinline__ OutputRows(const Storage<Config>&, const Routing& routing, const PieceSlot<Config>&, int) : rows(routing) {}
};

template <class Config>
__device__ __forceinline__ void store_staged(const float (&sum)[Config::kBlockRows / 2], int row_tile, const TileInfo& tile, const Rows<Config>& rows,
                                             Storage<Config>& storage, const Operands& operands, const ConsumerThread& self) {
  using Map = OutputMap<Config::kEpilogue>;
  static_assert(Config::kStagingBytes == Map::kOutputs * 2);
  constexpr int kPitch = Config::kStagingBytes + 16;
  constexpr int kMatrices = 2 * Map::kHalves;  // of one stmatrix: two octets
  constexpr int kPieces = Map::kOutputs / 8;   // 16-byte pieces of a token's row
  const uint32_t staging = shared_address(storage.end.staging[self.group]);
  const int thread = self.warp * kWarpLanes + self.lane;
  const int64_t row_bytes = int64_t{operands.row_tiles} * Map::kOutputs * 2;
  // Matrix i of a stmatrix: octet i / kHalves, half i % kHalves; lanes 8 i .. 8 i + 7 address its eight token rows.
  const int matrix = self.lane / 8 % kMatrices;
  const uint32_t lane_address = staging + (matrix / Map::kHalves * 8 + self.lane % 8) * kPitch +
                                Map::staged(self.warp, matrix % Map::kHalves) * 2;

  named_barrier_sync(1 + self.group, kGroupThreads);  // the rows staged before have been read
#pragma unroll
  for (int octet = 0; octet < Config::kBlockRows / 8; octet += 2) {
    if (octet * 8 < tile.rows) {
      uint32_t values[kMatrices];
#pragma unroll
      for (int i = 0; i < 2; ++i) octet_values<Config>(values + i * Map::kHalves, sum + (octet + i) * 4);
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

// sum: of weight tile row_tile, for the piece's rows.
template <class Config>
__device__ __forceinline__ void store_tile(const float (&sum)[Config::kBlockRows / 2], int row_tile, const TileInfo& tile, const OutputRows<Config>& to,
                                           Storage<Config>& storage, const Operands& operands, const ConsumerThread& self) {
  if constexpr (kSmallBlocks<Config>) {
#pragma unroll
    for (int octet = 0; octet < Config::kBlockRows / 8; ++octet)
      if (octet * 8 < tile.rows)
        store_octet<Config>(sum + octet * 4, row_tile, self.warp, to.rows[octet], operands, self.lane);
  } else {
    store_staged<Config>(sum, row_tile, tile, to.rows, storage, operands, self);
  }
}

// Of bf16 pieces: tile m of a warpgroup, as bf16.cuh deals them out.
template <class Config>
__device__ __forceinline__ void store_tiles(const Accumulators<Config>& sum, const TileInfo& tile, const OutputRows<Config>& to,
                                            Storage<Config>& storage, const Operands& operands, const ConsumerThread& self) {
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    const int index = m * Config::kConsumerGroups + self.group;
    if (index >= tile.tiles) break;  // computed from what the stage held before, and not wanted
    store_tile<Config>(sum[m], tile.first_tile + index, tile, to, storage, operands, self);
  }
}

}  // namespace chord
