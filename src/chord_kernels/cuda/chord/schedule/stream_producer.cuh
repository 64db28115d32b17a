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
struct StreamProducer {
  static constexpr int kChunks = kTokenBytes / 16;
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;
  static_assert(kStreamKTiles * kChunks == kWarpLanes, "a row's share of a stage is one copy of the warp");
  static_assert(Config::kBlockRows <= kWarpLanes, "a lane knows one row");

  StreamRing<Config> ring;
  RingPosition<Config> at;
  Rows<Config> rows;
  Dependency dependency;
  const Operands& operands;
  int lane;

  __device__ __forceinline__ StreamProducer(StreamStorage<Config>& storage, const Operands& o, const Routing& routing, int l)
      : ring(storage), at(1), rows(routing), operands(o), lane(l) {}

  __device__ __forceinline__ void copy(const Block& block, const Piece& piece) {
    if (block.rows == 0) return;
    const int64_t first_row = int64_t{block.expert} * operands.row_tiles + piece.first_tile + lane;
    const uint8_t* weights = operands.weights + first_row * (int64_t{operands.k_tiles} * sizeof(WeightTile));
    const uint8_t* tokens = operands.activations + lane * 16;
    uint32_t source = kNoRow;  // of row `lane`, in 16-byte pieces
    for (int k_tile = 0; k_tile < operands.k_tiles; k_tile += kStreamKTiles) {
      const int k_tiles = min(kStreamKTiles, operands.k_tiles - k_tile);
      ring.wait_empty(at);
      const uint32_t full = ring.full_barrier(at.stage);
      if (lane == 0) barrier_expect(full, piece.tiles * k_tiles * sizeof(WeightTile));
      __syncwarp();
      if (lane < piece.tiles)
        copy_bulk(ring.weights(at.stage) + lane * sizeof(StreamStage<Config>::weights[0]), weights, k_tiles * sizeof(WeightTile), full);
      weights += kStreamKTiles * sizeof(WeightTile);
      if (k_tile == 0) {
        dependency.meet();  // only now: the weights are on their way while the rows' ids are read
        source = describe(block, piece);
      }
      if (lane == 0) barrier_arrive(full);
      gather(source, block.rows, tokens, k_tiles);
      barrier_arrive_after_copies(full);
      tokens += kStreamKTiles * kTokenBytes;
      at.advance();
    }
  }

  // Writes the piece's StreamInfo and returns where row `lane` begins.
  __device__ __forceinline__ uint32_t describe(const Block& block, const Piece& piece) {
    const bool inside = lane < block.rows;
    const int from = inside ? rows.source(block.first_slot + lane, block.expert) : -1;
    StreamInfo<Config>& info = ring.info(at.stage);
    if (lane == 0) info.rows = block.rows, info.first_tile = piece.first_tile, info.tiles = piece.tiles;
    if (lane < Config::kBlockRows) info.destinations[lane] = inside ? rows.destination(block.first_slot + lane, block.expert) : -1;
    __syncwarp();  // lane 0 arrives for them all
    return from < 0 ? kNoRow : static_cast<uint32_t>(from) * static_cast<uint32_t>(operands.k_tiles * kChunks);
  }

  __device__ __forceinline__ void gather(uint32_t source, int block_rows, const uint8_t* tokens, int k_tiles) {
    const uint32_t to = ring.activations(at.stage) + lane * 16;
#pragma unroll
    for (int octet = 0; octet < Config::kBlockRows / 8; ++octet) {
      if (octet * 8 >= block_rows) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = octet * 8 + i;
        const uint32_t from = __shfl_sync(kFullMask, source, row);
        if (from != kNoRow && lane < k_tiles * kChunks)
          copy_async_16(to + row * sizeof(StreamStage<Config>::activations[0]), tokens + int64_t{16} * from);
      }
    }
  }

  // Every team is told that there is no further piece.
  __device__ __forceinline__ void finish() {
    dependency.meet();
    for (int team = 0; team < Config::kTeams; ++team) {
      ring.wait_empty(at);
      if (lane == 0) {
        ring.info(at.stage).rows = 0;
        barrier_arrive(ring.full_barrier(at.stage));
      }
      barrier_arrive(ring.full_barrier(at.stage));
      at.advance();
    }
  }
};

template <class Config>
__device__ __forceinline__ void stream_produce(StreamStorage<Config>& storage, const Operands& operands, const Routing& routing, int lane) {
  StreamProducer<Config> producer(storage, operands, routing, lane);
  Rows<Config>& rows = producer.rows;
  if (!operands.weights_first) producer.dependency.meet();
  StreamSchedule<Config> schedule(rows.start(), operands.row_tiles);
  for_each_piece(schedule, rows, [&](const Block& block, const Piece& piece) { producer.copy(block, piece); });
  producer.finish();
}

}  // namespace chord
