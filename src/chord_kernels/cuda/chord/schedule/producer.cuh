// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: walks the output tiles and fills the ring. Weight tiles come as bulk copies, one 64-row panel
// tile each; token rows are gathered by cp.async, 16 bytes a thread, straight into wgmma's 128-byte swizzle.
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/schedule/rows.cuh"
#include "chord/tile/ring.cuh"

namespace chord {

struct Operands {
  const uint8_t* activations;  // [rows, K] BF16
  const uint8_t* weights;      // [E, N/64, K/64] WeightTile
  uint8_t* outputs;            // [rows, N or N/2] BF16
  int32_t row_tiles;           // N / 64
  int32_t k_tiles;             // K / 64
};

// Which 16-byte pieces of a stage one producer thread copies: chunk `chunk` of rows row, row + 16, ... (or, in blocks of
// 8 rows, of one row in every second k-tile).
template <class Config>
struct Gather {
  static constexpr int kChunks = kTokenBytes / 16;
  static constexpr int kSlots = kGroupThreads / kChunks;
  static constexpr int kRowSlots = Config::kBlockRows < kSlots ? Config::kBlockRows : kSlots;
  static constexpr int kRowPasses = Config::kBlockRows / kRowSlots;
  static constexpr int kTileStep = kSlots / kRowSlots;  // k-tiles filled side by side

  const uint8_t* source[kRowPasses];
  uint32_t live = 0;  // bit p: pass p has a row to copy
  uint32_t row, chunk, first_tile, offset;

  __device__ __forceinline__ explicit Gather(int thread)
      : row(thread / kChunks % kRowSlots), chunk(thread % kChunks), first_tile(thread / kChunks / kRowSlots) {
    offset = (first_tile * Config::kBlockRows + row) * kTokenBytes + ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void aim(const Rows<Config>& rows, const Block& block, const Operands& operands) {
    const int64_t pitch = int64_t{operands.k_tiles} * kTokenBytes;
    live = 0;
#pragma unroll
    for (int pass = 0; pass < kRowPasses; ++pass) {
      const int i = row + pass * kRowSlots;
      const int from = i < block.rows ? rows.source(block.first_slot + i, block.expert) : -1;
      source[pass] = operands.activations + from * pitch + first_tile * kTokenBytes + chunk * 16;
      if (from >= 0) live |= 1u << pass;
    }
  }

  // Copies this thread's pieces of the next stage and moves on along K.
  __device__ __forceinline__ void copy(uint32_t stage) {
#pragma unroll
    for (int pass = 0; pass < kRowPasses; ++pass) {
      if (live >> pass & 1) {
#pragma unroll
        for (int tile = 0; tile < Config::kKTiles; tile += kTileStep) {
          if (Config::kKTiles % kTileStep == 0 || tile + first_tile < Config::kKTiles)
            copy_async_16(stage + offset + tile * (Config::kBlockRows * kTokenBytes) + pass * (kRowSlots * kTokenBytes),
                          source[pass] + tile * kTokenBytes);
        }
      }
      source[pass] += Config::kKTiles * kTokenBytes;
    }
  }
};

template <class Config>
__device__ __forceinline__ void produce(Storage<Config>& storage, const Operands& operands, const Routing& routing, int thread) {
  const Ring<Config> ring(storage);
  RingPosition<Config> at(1);
  Rows<Config> rows(routing);
  Gather<Config> gather(thread);
  const int panels = (operands.row_tiles + Config::kPanelTiles - 1) / Config::kPanelTiles;
  const int k_stages = operands.k_tiles / Config::kKTiles;
  const uint32_t panel_pitch = operands.k_tiles * sizeof(WeightTile);
  constexpr uint32_t kPieceBytes = Config::kKTiles * sizeof(WeightTile);

  rows.start();
  // Panels of one block run side by side: they share its tokens in L2, and an expert's blocks share its weights.
  for (int tile = blockIdx.x;; tile += gridDim.x) {
    Block block;
    const int panel = tile % panels;
    if (!rows.locate(tile / panels, block)) break;
    if (block.rows == 0) continue;
    gather.aim(rows, block, operands);
    const int first_tile = panel * Config::kPanelTiles;
    const int panel_tiles = min(Config::kPanelTiles, operands.row_tiles - first_tile);
    const uint8_t* weights = operands.weights +
                             (int64_t{block.expert} * operands.row_tiles + first_tile + min(thread, panel_tiles - 1)) * panel_pitch;
    for (int k_stage = 0; k_stage < k_stages; ++k_stage) {
      ring.wait_empty(at);
      const uint32_t full = ring.full_barrier(at.stage);
      if (thread < panel_tiles) {
        if (thread == 0) {
          if (k_stage == 0) storage.tiles[at.stage] = {block.first_slot, block.rows, panel, block.expert};
          barrier_arrive_expect(full, panel_tiles * kPieceBytes);
        }
        copy_bulk(ring.weights(at.stage) + thread * kPieceBytes, weights, kPieceBytes, full);
        weights += kPieceBytes;
      }
      gather.copy(ring.stage(at.stage));
      // No proxy fence after cp.async: it would stall the ring, and completion through the barrier is enough for wgmma.
      barrier_arrive_after_copies(full);
      at.advance();
    }
  }

  ring.wait_empty(at);
  if (thread == 0) {
    storage.tiles[at.stage].rows = 0;
    barrier_arrive(ring.full_barrier(at.stage));
  }
  barrier_arrive(ring.full_barrier(at.stage));
}

}  // namespace chord
