// SPDX-License-Identifier: Apache-2.0
// From a warpgroup's accumulators of one weight tile to rows of the output: straight from registers for small blocks, through the
// warpgroup's own staging rows for large ones, where stmatrix transposes fragments, so that a token's outputs leave as 16-byte
// pieces of one line.
#pragma once
#include "chord/epilogue/outputs.cuh"
#include "chord/tile/operands.cuh"

namespace chord {

// Where the rows of a piece go; made before the piece is computed. Small blocks: as the producer left it. Large ones: the row of the
// block that has this thread's number, so that its lookup takes no time at the end.
template <class Config, bool kSmall = kSmallBlocks<Config>>
struct OutputRows {
  const PieceSlot<Config>& slot;

  __device__ __forceinline__ OutputRows(const TileInfo&, const Routing&, const PieceSlot<Config>& s, const ConsumerThread&) : slot(s) {}
};
template <class Config>
struct OutputRows<Config, false> {
  static_assert(Config::kBlockRows <= kGroupThreads);
  int32_t row;

  __device__ __forceinline__ OutputRows(const TileInfo& tile, const Routing& routing, const PieceSlot<Config>&, const ConsumerThread& self) {
    const int i = self.warp * kWarpLanes + self.lane;
    row = i < tile.rows ? Rows<Config>(routing).destination(tile.first_slot + i, tile.expert) : -1;
  }
};

// destination: the output row of the token row that has this thread's number.
template <class Config>
__device__ __forceinline__ void store_staged(const float (&sum)[Config::kBlockRows / 2], int row_tile, int rows, int32_t destination,
                                             Storage<Config>& storage, const Operands& operands, const ConsumerThread& self) {
  using Map = OutputMap<Config::kEpilogue>;
  static_assert(Config::kStagingBytes == Map::kOutputs * 2);
  constexpr int kPitch = Config::kStagingBytes + 16;  // a row's destination lies behind it
  constexpr int kMatrices = 2 * Map::kHalves;         // of one stmatrix: two octets
  constexpr int kPieces = Map::kOutputs / 8;          // 16-byte pieces of a token's row
  constexpr int kRowsAtOnce = kGroupThreads / kPieces, kPasses = Config::kBlockRows / kRowsAtOnce;
  const uint32_t staging = shared_address(storage.end.staging[self.group]);
  const int thread = self.warp * kWarpLanes + self.lane;
  const int64_t row_bytes = int64_t{operands.row_tiles} * Map::kOutputs * 2;
  // Matrix i of a stmatrix: octet i / kHalves, half i % kHalves; lanes 8 i .. 8 i + 7 address its eight token rows.
  const int matrix = self.lane / 8 % kMatrices;
  const uint32_t lane_address = staging + (matrix / Map::kHalves * 8 + self.lane % 8) * kPitch +
                                Map::staged(self.warp, matrix % Map::kHalves) * 2;

  named_barrier_sync(1 + self.group, kGroupThreads);  // the rows staged before have been read
  if (thread < Config::kBlockRows) store_shared_4(staging + thread * kPitch + Config::kStagingBytes, destination);
#pragma unroll
  for (int octet = 0; octet < Config::kBlockRows / 8; octet += 2) {
    if (octet * 8 < rows) {
      uint32_t values[kMatrices];
#pragma unroll
      for (int i = 0; i < 2; ++i) octet_values<Config>(values + i * Map::kHalves, sum + (octet + i) * 4);
      store_matrices_transposed(lane_address + octet * 8 * kPitch, values);
    }
  }
  named_barrier_sync(1 + self.group, kGroupThreads);

  // A few rows at a time, all loads before the stores: the compiler moves no load across a store.
  constexpr int kBatch = kPasses % 4 == 0 ? 4 : kPasses % 3 == 0 ? 3 : kPasses;
  const int column = thread % kPieces * 8;
  uint8_t* outputs = operands.outputs + Map::column(row_tile, column, operands.row_tiles) * 2;
  const uint32_t first = staging + thread / kPieces * kPitch;
#pragma unroll
  for (int pass = 0; pass < kPasses; pass += kBatch) {
    if (pass * kRowsAtOnce >= rows) break;
    uint4 values[kBatch];
    int32_t to[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t row = first + (pass + i) * kRowsAtOnce * kPitch;
      to[i] = load_shared_4(row + Config::kStagingBytes);
      values[i] = load_shared_16(row + column * 2);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (to[i] >= 0) *reinterpret_cast<uint4*>(outputs + to[i] * row_bytes) = values[i];
  }
}

// sum: of weight tile row_tile, for the piece's rows.
template <class Config>
__device__ __forceinline__ void store_tile(const float (&sum)[Config::kBlockRows / 2], int row_tile, int rows, const OutputRows<Config>& to,
                                           Storage<Config>& storage, const Operands& operands, const ConsumerThread& self) {
  if constexpr (kSmallBlocks<Config>) {
    const auto& destinations = storage.end.destinations[to.slot.index];
#pragma unroll
    for (int octet = 0; octet < Config::kBlockRows / 8; ++octet)
      if (octet * 8 < rows) store_octet<Config>(sum + octet * 4, row_tile, self.warp, destinations[octet * 8 + self.lane / 4], operands, self.lane);
  } else {
    store_staged<Config>(sum, row_tile, rows, to.row, storage, operands, self);
  }
}

// A warpgroup's tiles of a piece. TileInfo is read anew for each rather than kept in registers.
template <class Config>
__device__ __forceinline__ void store_tiles(const Accumulators<Config>& sum, const Ring<Config>& ring, const PieceSlot<Config>& slot,
                                            const OutputRows<Config>& to, Storage<Config>& storage, const Operands& operands,
                                            const ConsumerThread& self) {
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
    const TileInfo tile = ring.tile(slot);
    const int index = first_tile_of_group<Config>(tile.tiles, self.group) + m;
    // What lies beyond was computed from what the stage held before, and is not wanted.
    if (m >= tiles_of_group<Config>(tile.tiles) || index >= tile.tiles) break;
    store_tile<Config>(sum[m], tile.first_tile + index, tile.rows, to, storage, operands, self);
  }
}

}  // namespace chord
