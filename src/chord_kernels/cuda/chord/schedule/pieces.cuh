// SPDX-License-Identifier: Apache-2.0
// Which output a CTA computes, and in which order.
#pragma once
#include "chord/tile/storage.cuh"

namespace chord {

// Weight tiles [first_tile, first_tile + tiles) of one block of token rows.
struct Piece {
  int32_t block;
  int32_t first_tile;
  int32_t tiles;
};

// A piece spans all of K: a row's sum has the same order in whatever batch it is.

// Whole panels are dealt out in rounds over the CTAs: the panels of a block run side by side and share its tokens in L2, and an
// expert's blocks its weights. What does not fill a last round is cut anew, into the narrowest pieces that still give every CTA
// at most one: fewer weight tiles take less time, if not in proportion.
template <class Config>
struct NarrowSchedule {
  int32_t panels;     // of a block
  int32_t row_tiles;  // of a block
  int32_t panel;      // the next one of this CTA
  int32_t whole;      // panels that are dealt out whole
  int32_t width;      // of this CTA's piece of the rest; 0: none

  __device__ __forceinline__ NarrowSchedule(int blocks, int block_tiles)
      : panels(pieces(block_tiles, Config::kPanelTiles)), row_tiles(block_tiles), panel(blockIdx.x), width(0) {
    const int workers = gridDim.x, total = blocks * panels;
    whole = total - total % workers;
    if (whole == total) return;
    // From the widest down; a panel's width fits by construction.
#pragma unroll
    for (int w = Config::kPanelTiles; w >= 1; --w) {
      const int count = pieces(row_tiles - rest_first(), w) + (blocks - whole / panels - 1) * pieces(row_tiles, w);
      if (count <= workers) width = static_cast<int>(blockIdx.x) < count ? w : 0;
    }
  }

  __device__ __forceinline__ static int pieces(int tiles, int w) { return (tiles + w - 1) / w; }

  // The rest begins with this tile of its first block.
  __device__ __forceinline__ int rest_first() const { return whole % panels * Config::kPanelTiles; }

  __device__ __forceinline__ bool next(Piece& piece) {
    int w = Config::kPanelTiles;
    if (panel < whole) {
      piece.block = panel / panels;
      piece.first_tile = panel % panels * w;
      panel += gridDim.x;
    } else {
      if (width == 0) return false;
      w = width;
      width = 0;
      const int later = static_cast<int>(blockIdx.x) - pieces(row_tiles - rest_first(), w), per_block = pieces(row_tiles, w);
      piece.block = whole / panels + (later < 0 ? 0 : 1 + later / per_block);
      piece.first_tile = later < 0 ? rest_first() + blockIdx.x * w : later % per_block * w;
    }
    piece.tiles = min(w, row_tiles - piece.first_tile);
    return true;
  }
};

// Every CTA has a run of weight tiles, counted through the blocks and level to one: for pieces so short that a CTA has many of a
// block, whose tokens and routing it then keeps close.
template <class Config>
struct RunSchedule {
  int32_t row_tiles;  // of a block
  int64_t tile, end;  // the next one of this CTA; behind its last

  __device__ __forceinline__ RunSchedule(int blocks, int block_tiles) : row_tiles(block_tiles) {
    const int64_t total = int64_t{blocks} * block_tiles;
    tile = total * blockIdx.x / gridDim.x;
    end = total * (blockIdx.x + 1) / gridDim.x;
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    if (tile >= end) return false;
    piece.block = static_cast<int32_t>(tile / row_tiles);
    piece.first_tile = static_cast<int32_t>(tile - int64_t{piece.block} * row_tiles);
    piece.tiles = min(min(Config::kPanelTiles, row_tiles - piece.first_tile), static_cast<int32_t>(end - tile));
    tile += piece.tiles;
    return true;
  }
};

// copy(block, piece) for every piece; the routing of the next one is fetched while one is copied.
template <class Schedule, class Rows, class Copy>
__device__ __forceinline__ void for_each_piece(Schedule& schedule, Rows& rows, const Copy& copy) {
  Piece piece;
  bool more = schedule.next(piece);
  if (more) rows.fetch(piece.block);
  while (more) {
    const auto block = rows.locate(piece.block);
    const Piece current = piece;
    more = schedule.next(piece);
    if (more) rows.fetch(piece.block);
    copy(block, current);
  }
}

template <class Config, bool kRuns>
struct StreamScheduleOf {
  using Type = NarrowSchedule<Config>;
};
template <class Config>
struct StreamScheduleOf<Config, true> {
  using Type = RunSchedule<Config>;
};
template <class Config>
using StreamSchedule = typename StreamScheduleOf<Config, Config::kSplit == 1>::Type;

}  // namespace chord
