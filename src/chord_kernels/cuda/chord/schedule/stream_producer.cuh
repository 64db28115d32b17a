// SPDX-License-Identifier: Apache-2.0
// The producer warp of the stream kernel: bulk copies of weight tiles, one lane a 64-row tile, and a gather of token rows by
// cp.async. (A warp issues the bulk copies of its lanes one after the other: one a token row would hold up the ring.)
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/schedule/pieces.cuh"
#include "chord/schedule/rows.cuh"
#include "chord/tile/stream_storage.cuh"

namespace chord {

template <class Config>
__device__ __forceinline__ void stream_produce(StreamStorage<Config>& storage, const Operands& operands, const Routing& routing, int lane) {
  constexpr int kChunks = kTokenBytes / 16;
  static_assert(kStreamKTiles * kChunks == kWarpLanes, "a row's share of a stage is one copy of the warp");
  static_assert(Config::kBlockRows == kStreamRows && Config::kPanelTiles == kStreamPanelTiles);
  const StreamRing<Config> ring(storage);
  RingPosition<Config> at(1);
  Rows<Config> rows(routing);
  const int64_t tile_row_bytes = int64_t{operands.k_tiles} * sizeof(WeightTile);
  const uint32_t token_row_bytes = operands.k_tiles * kTokenBytes;

  Dependency dependency;
  if (!operands.weights_first) dependency.meet();
  NarrowSchedule<Config> schedule(rows.start(), operands.row_tiles);
  for (Piece piece; schedule.next(piece);) {
    rows.fetch(piece.block);
    const Block block = rows.locate(piece.block);
    if (block.rows == 0) continue;
    int source = -1;
    const int64_t first_row = int64_t{block.expert} * operands.row_tiles + piece.first_tile + lane;
    const uint8_t* weights = operands.weights + first_row * tile_row_bytes;
    const uint8_t* tokens = operands.activations + lane * 16;
    for (int k_tile = 0; k_tile < operands.k_tiles; k_tile += kStreamKTiles) {
      const int k_tiles = min(kStreamKTiles, operands.k_tiles - k_tile);
      ring.wait_empty(at);
      const uint32_t full = ring.full_barrier(at.stage);
      if (lane == 0) barrier_expect(full, piece.tiles * k_tiles * sizeof(WeightTile));
      __syncwarp();
      if (lane < piece.tiles)
        copy_bulk(ring.weights(at.stage) + lane * sizeof(StreamStage::weights[0]), weights, k_tiles * sizeof(WeightTile), full);
      weights += kStreamKTiles * sizeof(WeightTile);
      if (k_tile == 0) {
        dependency.meet();  // only now: the weights are on their way while the rows' ids are read
        const bool inside = lane < block.rows;
        source = inside ? rows.source(block.first_slot + lane, block.expert) : -1;
        const int destination = inside ? rows.destination(block.first_slot + lane, block.expert) : -1;
        StreamInfo& info = ring.info(at.stage);
        if (lane == 0) info.rows = block.rows, info.first_tile = piece.first_tile, info.tiles = piece.tiles;
        if (lane < kStreamRows) info.destinations[lane] = destination;
        __syncwarp();
      }
      if (lane == 0) barrier_arrive(full);
      const uint32_t to = ring.activations(at.stage) + lane * 16;
#pragma unroll
      for (int row = 0; row < kStreamRows; ++row) {
        const int from = __shfl_sync(kFullMask, source, row);
        if (from >= 0 && lane < k_tiles * kChunks)
          copy_async_16(to + row * sizeof(StreamStage::activations[0]), tokens + int64_t{from} * token_row_bytes);
      }
      barrier_arrive_after_copies(full);
      tokens += kStreamKTiles * kTokenBytes;
      at.advance();
    }
  }

  dependency.meet();
  ring.wait_empty(at);
  if (lane == 0) {
    ring.info(at.stage).rows = 0;
    barrier_arrive(ring.full_barrier(at.stage));
  }
  barrier_arrive(ring.full_barrier(at.stage));
}

}  // namespace chord
