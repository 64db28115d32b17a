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

// Whole panels in rounds over the CTAs: the panels of a block run side by side and share its tokens in L2, and an expert's
// blocks its weights. What does not fill a last round is dealt out in single 64-row tiles, so that all CTAs end level.
// K is never split: a row's sum has the same order in whatever batch it is.
template <class Config>
struct Schedule {
  int32_t panels;      // of a block
  int32_t row_tiles;   // of a block
  int32_t even_units;  // in whole rounds, a unit being one panel
  int32_t panel;       // next, in whole rounds
  int32_t tile, end;   // next and last, in the rest, counted in weight tiles

  __device__ __forceinline__ Schedule(int blocks, int block_tiles)
      : panels((block_tiles + Config::kPanelTiles - 1) / Config::kPanelTiles), row_tiles(block_tiles), panel(blockIdx.x) {
    const int units = blocks * panels, workers = gridDim.x, self = blockIdx.x;
    even_units = units / workers * workers;
    const int rest = (units - even_units) * Config::kPanelTiles;
    tile = rest * self / workers;
    end = rest * (self + 1) / workers;
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    int unit, skip, count;
    if (panel < even_units) {
      unit = panel, skip = 0, count = Config::kPanelTiles;
      panel += gridDim.x;
    } else if (tile < end) {
      unit = even_units + tile / Config::kPanelTiles;
      skip = tile % Config::kPanelTiles;
      count = min(Config::kPanelTiles - skip, end - tile);
      tile += count;
    } else {
      return false;
    }
    piece.block = unit / panels;
    piece.first_tile = unit % panels * Config::kPanelTiles + skip;
    piece.tiles = min(count, row_tiles - piece.first_tile);  // a block's last panel may be partial: then 0 or less
    return true;
  }
};

}  // namespace chord
