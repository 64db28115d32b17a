// SPDX-License-Identifier: Apache-2.0
// How the output is numbered, to be dealt out to CTAs.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

// Weight tiles [first_tile, first_tile + tiles) of one block of token rows, and all of K: a row's sum has the same order in whatever
// batch it is.
struct Piece {
  int32_t block;
  int32_t first_tile;
  int32_t tiles;
};

// Numbered strips of a block's weight tiles: whole ones first, those of a block side by side, which share its tokens in L2, and an
// expert's blocks its weights. What would not fill a last round of the CTAs is cut anew, into the narrowest strips that give every CTA
// at most one: fewer weight tiles take less time, if not in proportion.
struct Strips {
  int32_t row_tiles;  // of a block
  int32_t tiles;      // of a whole strip
  int32_t per_block;  // whole strips
  int32_t whole;      // strips that stay whole
  int32_t narrow;     // tiles of the others
  int32_t count;

  Strips() = default;
  __device__ __forceinline__ Strips(int blocks, int block_tiles, int strip_tiles, int panel_tiles)
      : row_tiles(block_tiles), tiles(strip_tiles), per_block(parts(block_tiles, strip_tiles)), narrow(strip_tiles) {
    const int workers = gridDim.x, total = blocks * per_block;
    whole = total - total % workers;
    count = total;
    if (whole == total) return;
    for (int w = strip_tiles; w >= 1; w -= w > panel_tiles ? panel_tiles : 1) {
      const int cut = parts(row_tiles - rest_first(), w) + (blocks - whole / per_block - 1) * parts(row_tiles, w);
      if (cut <= workers) narrow = w, count = whole + cut;
    }
  }

  __device__ __forceinline__ static int parts(int tiles, int w) { return (tiles + w - 1) / w; }

  // The rest begins with this tile of its first block.
  __device__ __forceinline__ int rest_first() const { return whole % per_block * tiles; }

  // Strip `number`; of no tiles from `count` on.
  __device__ __forceinline__ Piece at(int number) const {
    if (number >= count) return {0, 0, 0};
    Piece piece;
    int w = tiles;
    if (number < whole) {
      piece.block = number / per_block;
      piece.first_tile = number % per_block * w;
    } else {
      w = narrow;
      const int later = number - whole - parts(row_tiles - rest_first(), w), a_block = parts(row_tiles, w);
      piece.block = whole / per_block + (later < 0 ? 0 : 1 + later / a_block);
      piece.first_tile = later < 0 ? rest_first() + (number - whole) * w : later % a_block * w;
    }
    piece.tiles = min(w, row_tiles - piece.first_tile);
    return piece;
  }
};

}  // namespace chord
