// SPDX-License-Identifier: Apache-2.0
// The two producer warps of a ring of the stream kernels. One walks the pieces and copies weights, one lane a 64-row tile, as far ahead
// as the ring allows. The other follows it from stage to stage and gathers token rows by cp.async; it alone waits for what they need.
// (A warp issues the bulk copies of its lanes one after the other: one a token row would hold up the ring.)
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/schedule/pieces.cuh"
#include "chord/schedule/rows.cuh"
#include "chord/tile/short_loop.cuh"

namespace chord {

// Copies weights, and tells of every piece in the StreamInfo of its first stage.
template <class Config>
struct WeightsWarp {
  static_assert(Config::kBlockRows <= kWarpLanes, "a lane knows one row");

  StreamRing<Config> ring;
  RingPosition<Config> at;
  Rows<Config> rows;
  int lane;

  __device__ __forceinline__ WeightsWarp(StreamStorage<Config>& storage, const Routing& routing, int l)
      : ring(storage), at(1), rows(routing), lane(l) {}

  __device__ __forceinline__ void copy(const Block& block, const Piece& piece, const Operands& operands) {
    const int destination = lane < block.rows ? rows.destination(block.first_slot + lane, block.expert) : -1;
    const int depth = stage_depth<Config>(piece.tiles, block.rows, operands.k_tiles);
    const int64_t row = int64_t{block.expert} * operands.row_tiles + piece.first_tile + lane;
    const uint8_t* weights = operands.weights + row * (int64_t{operands.k_tiles} * sizeof(WeightTile));
    for (int k_tile = 0; k_tile < operands.k_tiles; k_tile += depth) {
      const uint32_t bytes = min(depth, operands.k_tiles - k_tile) * sizeof(WeightTile);
      ring.wait_empty(at);
      if (k_tile == 0) {
        StreamInfo<Config>& info = ring.info(at.stage);
        if (lane == 0)
          info.rows = block.rows, info.first_tile = piece.first_tile, info.tiles = piece.tiles, info.depth = depth, info.block = piece.block;
        if (lane < Config::kBlockRows) info.destinations[lane] = destination;
        __syncwarp();  // lane 0 arrives for them all
      }
      const uint32_t full = ring.full_barrier(at.stage);
      if (lane == 0) {
        barrier_arrive_expect(full, piece.tiles * bytes);
        barrier_arrive(ring.described_barrier(at.stage));
      }
      __syncwarp();
      if (lane < piece.tiles) copy_bulk(ring.weights(at.stage) + lane * depth * sizeof(WeightTile), weights, bytes, full);
      weights += bytes;
      at.advance();
    }
  }

  // There is no further piece.
  __device__ __forceinline__ void finish() {
    ring.wait_empty(at);
    if (lane == 0) {
      ring.info(at.stage).rows = 0;
      barrier_arrive(ring.full_barrier(at.stage));
      barrier_arrive(ring.described_barrier(at.stage));
    }
  }
};

// Gathers token rows; knows of the pieces by their StreamInfo alone.
template <class Config>
struct TokensWarp {
  static constexpr int kChunks = kTokenBytes / 16;
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;

  StreamRing<Config> ring;
  RingPosition<Config> at;
  int lane;
  int block = -1;  // whose rows were gathered last

  __device__ __forceinline__ TokensWarp(StreamStorage<Config>& storage, int l) : ring(storage), at(0), lane(l) {}

  // Waits for the next piece; null: there is none.
  __device__ __forceinline__ const StreamInfo<Config>* next() {
    barrier_wait(ring.described_barrier(at.stage), at.parity);
    const StreamInfo<Config>& info = ring.info(at.stage);
    if (info.rows != 0) return &info;
    arrive();
    return nullptr;
  }

  // All arrivals on a stage without token rows.
  __device__ __forceinline__ void arrive() {
    const uint32_t full = ring.full_barrier(at.stage);
    barrier_arrive(full);
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
  }

  // The token rows of a piece, unless the consumers have kept them from the piece before.
  __device__ __forceinline__ void supply(const StreamInfo<Config>& info, const Operands& operands, int top_k) {
    if (Config::kSplit == 1 && kKeepsTokens<Config> && info.block == block) {
      arrive();
      at.advance();
    } else {
      block = info.block;
      gather(info, operands, top_k);
    }
  }

  // The token rows of the piece: row destination / top_k of the activations.
  __device__ __forceinline__ void gather(const StreamInfo<Config>& info, const Operands& operands, int top_k) {
    const int rows = info.rows, depth = info.depth, destination = lane < Config::kBlockRows ? info.destinations[lane] : -1;
    const uint32_t row_chunks = operands.k_tiles * kChunks;
    const uint32_t source = destination < 0 ? kNoRow : static_cast<uint32_t>(destination) / static_cast<uint32_t>(top_k) * row_chunks;
    const uint8_t* tokens = operands.activations + lane * 16;
    for (int k_tile = 0; k_tile < operands.k_tiles; k_tile += depth) {
      if (k_tile > 0) barrier_wait(ring.described_barrier(at.stage), at.parity);
      copy_rows(source, rows, tokens, token_pitch(depth), min(depth, operands.k_tiles - k_tile) * kChunks);
      const uint32_t full = ring.full_barrier(at.stage);
      barrier_arrive_after_copies(full);
      // An arrival of copies says nothing of the warp's own reads of StreamInfo: lane 0 arrives for them all.
      __syncwarp();
      if (lane == 0) barrier_arrive(full);
      tokens += depth * kTokenBytes;
      at.advance();
    }
  }

  __device__ __forceinline__ void copy_rows(uint32_t source, int rows, const uint8_t* tokens, int pitch, int chunks) {
    static_assert(kLongestStage<Config> * kChunks <= 2 * kWarpLanes);
    const uint32_t to = ring.activations(at.stage) + lane * 16;
    const bool near = lane < chunks, far = lane + kWarpLanes < chunks;
#pragma unroll
    for (int octet = 0; octet < Config::kBlockRows / 8; ++octet) {
      if (octet * 8 >= rows) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = octet * 8 + i;
        const uint32_t from = __shfl_sync(kFullMask, source, row);
        const uint8_t* chunk = tokens + int64_t{16} * from;
        if (from != kNoRow && near) copy_async_16(to + row * pitch, chunk);
        if (kLongestStage<Config> > kStreamKTiles && from != kNoRow && far) copy_async_16(to + row * pitch + kWarpLanes * 16, chunk + kWarpLanes * 16);
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void stream_weights(StreamStorage<Config>& storage, const Operands& operands, const Routing& routing, int lane) {
  WeightsWarp<Config> warp(storage, routing, lane);
  if (!operands.weights_first) grid_dependency_wait();
  StreamSchedule<Config> schedule(warp.rows.start(), operands.row_tiles);
  for_each_piece(schedule, warp.rows, [&](const Block& block, const Piece& piece) {
    if (block.rows > 0) warp.copy(block, piece, operands);
  });
  warp.finish();
}

template <class Config>
__device__ __forceinline__ void stream_tokens(StreamStorage<Config>& storage, const Operands& operands, const Routing& routing, int lane) {
  TokensWarp<Config> warp(storage, lane);
  Dependency().meet();
  while (const StreamInfo<Config>* info = warp.next())
    warp.supply(*info, operands, Config::kContract == Contract::kIndexed ? routing.top_k : 1);
}

}  // namespace chord
