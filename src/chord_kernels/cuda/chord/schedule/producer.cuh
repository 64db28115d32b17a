// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: walks the strips that it draws and fills the ring. Weight tiles come as bulk copies, one 64-row panel
// tile each; token rows are gathered by cp.async, 16 bytes a thread, straight into wgmma's 128-byte swizzle.
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/schedule/draws.cuh"
#include "chord/schedule/rows.cuh"
#include "chord/tile/ring.cuh"

namespace chord {

// A CTA draws at least so many stages at a time: a draw takes about a microsecond.
constexpr int kStripStages = 8;
// So many stages before its strip is over: a CTA that draws too early takes what another would have had time for.
constexpr int kDrawStages = 3;

// Which 16-byte pieces of a stage one producer thread copies: chunk `chunk` of rows row, row + 16, ... (or, in blocks of
// 8 rows, of one row in every second k-tile).
template <class Config>
struct Gather {
  static constexpr int kChunks = kTokenBytes / 16;
  static constexpr int kSlots = kGroupThreads / kChunks;
  static constexpr int kRowSlots = Config::kBlockRows < kSlots ? Config::kBlockRows : kSlots;
  static constexpr int kRowPasses = Config::kBlockRows / kRowSlots;
  static constexpr int kTileStep = kSlots / kRowSlots;  // k-tiles filled side by side

  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;

  const uint8_t* base;          // of x, at this thread's chunk of the next stage
  uint32_t source[kRowPasses];  // offset of each row from there, in 16-byte pieces: half the registers of a pointer
  uint32_t offset;              // in the stage, of the first pass

  __device__ __forceinline__ static uint32_t row(int thread) { return thread / kChunks % kRowSlots; }
  __device__ __forceinline__ static uint32_t first_tile(int thread) { return thread / kChunks / kRowSlots; }

  __device__ __forceinline__ explicit Gather(int thread) {
    const uint32_t swizzled = (thread % kChunks) ^ (row(thread) & 7);
    offset = (first_tile(thread) * Config::kBlockRows + row(thread)) * kTokenBytes + swizzled * 16;
  }

  __device__ __forceinline__ void aim(const Rows<Config>& rows, const Block& block, const Operands& operands, int thread) {
    base = operands.activations + first_tile(thread) * kTokenBytes + thread % kChunks * 16;
#pragma unroll
    for (int pass = 0; pass < kRowPasses; ++pass) {
      const int i = row(thread) + pass * kRowSlots;
      const int from = i < block.rows ? rows.source(block.first_slot + i, block.expert) : -1;
      source[pass] = from < 0 ? kNoRow : static_cast<uint32_t>(from) * static_cast<uint32_t>(operands.k_tiles * kChunks);
    }
  }

  // Back to the rows' beginning.
  __device__ __forceinline__ void rewind(const Operands& operands) { base -= operands.k_tiles * kTokenBytes; }

  // Copies this thread's pieces of the next stage and moves on along K.
  __device__ __forceinline__ void copy(uint32_t stage, int thread) {
#pragma unroll
    for (int pass = 0; pass < kRowPasses; ++pass) {
      if (source[pass] != kNoRow) {
        const uint8_t* from = base + int64_t{16} * source[pass];
#pragma unroll
        for (int tile = 0; tile < Config::kKTiles; tile += kTileStep) {
          if (Config::kKTiles % kTileStep == 0 || tile + first_tile(thread) < Config::kKTiles)
            copy_async_16(stage + offset + tile * (Config::kBlockRows * kTokenBytes) + pass * (kRowSlots * kTokenBytes),
                          from + tile * kTokenBytes);
        }
      }
    }
    base += Config::kKTiles * kTokenBytes;
  }
};

template <class Config>
__device__ __forceinline__ void produce(Storage<Config>& storage, const Operands& operands, const Routing& routing, int thread) {
  const Ring<Config> ring(storage);
  RingPosition<Config> at(1);
  PieceSlot<Config> slot;
  Rows<Config> rows(routing);
  Gather<Config> gather(thread);
  const int k_stages = operands.k_tiles / Config::kKTiles;
  const uint32_t tile_row_bytes = operands.k_tiles * sizeof(WeightTile);
  constexpr uint32_t kCopyBytes = Config::kKTiles * sizeof(WeightTile);
  const int strip_panels = (kStripStages + k_stages - 1) / k_stages;

  Dependency dependency;
  if (!operands.weights_first) dependency.meet();
  DrawnSchedule<Config> schedule(rows.start(), operands.row_tiles, strip_panels * Config::kPanelTiles, storage, operands.counter, thread);
  // The next strip. Its routing is asked for while this one is copied, where the ids of a block take few registers.
  constexpr bool kFetchAhead = Config::kBlockRows <= kWarpLanes;
  const auto next = [&] {
    const Piece piece = schedule.next(thread);
    if (kFetchAhead && piece.tiles > 0) rows.fetch(piece.block);
    return piece;
  };
  for (Piece strip = next(); strip.tiles > 0;) {
    if (!kFetchAhead) rows.fetch(strip.block);
    const Block block = rows.locate(strip.block);
    if (block.rows == 0) {
      schedule.draw(dependency, thread);
      strip = next();
      continue;
    }
    Piece following;
    for (int tile = 0; tile < strip.tiles; tile += Config::kPanelTiles) {
      const int first_tile = strip.first_tile + tile, tiles = min(Config::kPanelTiles, strip.tiles - tile);
      const uint8_t* weights = operands.weights + (int64_t{block.expert} * operands.row_tiles + first_tile + thread) * tile_row_bytes;
      for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
        const int left = Strips::parts(strip.tiles - tile, Config::kPanelTiles) * k_stages - k_stage;  // stages of the strip
        if (left == kDrawStages || (left < kDrawStages && tile == 0 && k_stage == 0)) schedule.draw(dependency, thread);
        if (kFetchAhead && left == 1) following = next();
        ring.wait_empty(at);
        const uint32_t full = ring.full_barrier(at.stage);
        if constexpr (kSmallBlocks<Config>) {
          if (k_stage == 0 && thread < kWarpLanes) {
            if (thread < Config::kBlockRows)
              storage.end.destinations[slot.index][thread] =
                  thread < block.rows ? rows.destination(block.first_slot + thread, block.expert) : -1;
            __syncwarp();  // thread 0 arrives for them all
          }
        }
        if (thread < tiles) {
          if (thread == 0) {
            if (k_stage == 0)
              storage.tiles[slot.index] = {block.first_slot, block.expert, first_tile, static_cast<uint32_t>(block.rows),
                                           static_cast<uint32_t>(tiles)};
            barrier_arrive_expect(full, tiles * kCopyBytes);
          }
          copy_bulk(ring.weights(at.stage) + thread * kCopyBytes, weights, kCopyBytes, full);
          weights += kCopyBytes;
        }
        if (k_stage == 0) {
          if (tile == 0) {  // only now: the weights are on their way while the rows' ids are read
            dependency.meet();
            gather.aim(rows, block, operands, thread);
          } else {
            gather.rewind(operands);
          }
        }
        gather.copy(ring.stage(at.stage), thread);
        // No proxy fence after cp.async: it would stall the ring, and completion through the barrier is enough for wgmma.
        barrier_arrive_after_copies(full);
        at.advance();
      }
      slot.advance();
    }
    strip = kFetchAhead ? following : next();
  }

  dependency.meet();
  ring.wait_empty(at);
  if (thread == 0) {
    storage.tiles[slot.index].rows = 0;
    barrier_arrive(ring.full_barrier(at.stage));
  }
  barrier_arrive(ring.full_barrier(at.stage));
}

}  // namespace chord
