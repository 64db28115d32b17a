// SPDX-License-Identifier: Apache-2.0
// Which output a CTA computes, and in which order, where it follows from the CTA's number alone.
#pragma once
#include "chord/tile/strips.cuh"

namespace chord {

// Strips as wide as a panel, dealt out in rounds.
template <class Config>
struct RoundSchedule {
  Strips strips;
  int32_t number;  // of this CTA's next

  __device__ __forceinline__ RoundSchedule(int blocks, int block_tiles)
      : strips(blocks, block_tiles, Config::kPanelTiles, Config::kPanelTiles), number(blockIdx.x) {}

  __device__ __forceinline__ bool next(Piece& piece) {
    piece = strips.at(number);
    number += gridDim.x;
    return piece.tiles > 0;
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
  using Type = RoundSchedule<Config>;
};
template <class Config>
struct StreamScheduleOf<Config, true> {
  using Type = RunSchedule<Config>;
};
template <class Config>
using StreamSchedule = typename StreamScheduleOf<Config, Config::kSplit == 1>::Type;

}  // namespace chord
