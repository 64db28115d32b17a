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
// blocks its weights. Panels that do not fill a last round are halved or quartered as long as every CTA still gets at most
// one part: fewer weight tiles take less time, if not in proportion. K is never split: a row's sum has the same order in
// whatever batch it is.
template <class Config>
struct Schedule {
  int32_t panels;     // of a block
  int32_t row_tiles;  // of a block
  int32_t unit;       // next
  int32_t whole;      // units that are whole panels
  int32_t all;        // units, with the parts of the rest
  int32_t parts;      // that a panel of the rest is cut into

  __device__ __forceinline__ Schedule(int blocks, int block_tiles)
      : panels((block_tiles + Config::kPanelTiles - 1) / Config::kPanelTiles), row_tiles(block_tiles), unit(blockIdx.x), parts(1) {
    const int workers = gridDim.x, total = blocks * panels, rest = total % workers;
    whole = total - rest;
    while (parts < Config::kPanelTiles && rest * parts * 2 <= workers) parts *= 2;
    all = whole + rest * parts;
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    if (unit >= all) return false;
    const int rest = unit - whole;
    const int panel = rest < 0 ? unit : whole + rest / parts;
    const int count = rest < 0 ? Config::kPanelTiles : Config::kPanelTiles / parts;
    piece.block = panel / panels;
    piece.first_tile = panel % panels * Config::kPanelTiles + (rest < 0 ? 0 : rest % parts * count);
    piece.tiles = min(count, row_tiles - piece.first_tile);  // a block's last panel may be partial: then 0 or less
    unit += gridDim.x;
    return true;
  }
};

}  // namespace chord
