// SPDX-License-Identifier: Apache-2.0
// What a CTA keeps in shared memory, and the packed W4A16 layout that formats.py defines (layout version 1).
#pragma once
#include "chord/arch/barrier.cuh"
#include "chord/arch/shared.cuh"
#include "chord/tile/strips.cuh"

namespace chord {

enum class Contract { kIndexed, kContiguous, kMasked };
enum class Epilogue { kStore, kStorePaired, kSwiglu };
enum class Numerics { kBf16, kExact };

constexpr int kTileRows = 64;  // weight rows and k of one packed tile
constexpr int kTileK = 64;
constexpr int kTokenBytes = kTileK * 2;  // a token's BF16 slice of one tile: exactly one 128-byte swizzle row

// 16 weight rows x 64 k: what one warp feeds to four m64nNk16 instructions.
struct WeightBlock {
  uint8_t codes[512];
  uint8_t scales[64];
};

struct WeightTile {
  WeightBlock blocks[4];
};
static_assert(sizeof(WeightTile) == 2304);

template <class Config>
struct alignas(1024) Stage {  // the 128-byte swizzle repeats every 1024 bytes
  uint8_t activations[Config::kKTiles][Config::kBlockRows][kTokenBytes];
  WeightTile weights[Config::kPanelTiles][Config::kKTiles];
};

// What consumers have to know of a piece. rows == 0: there is no further one.
struct alignas(16) TileInfo {
  int32_t first_slot;  // a row contract's name for the block's first row
  int32_t expert;
  int32_t first_tile;    // the first of the 64-row weight tiles
  uint32_t rows : 16;    // token rows up to the last valid one
  uint32_t tiles : 16;   // weight tiles, 1 to kPanelTiles
};
static_assert(sizeof(TileInfo) == 16);

// Pieces that may be known at once: as many as there are stages, and the one whose outputs are being stored.
template <class Config>
constexpr int kPieceSlots = Config::kStages + 1;

// What the end of a piece needs. Small blocks: the output row of every token row; -1: none.
template <class Config, bool kSmall>
struct EndStorage {
  int32_t destinations[kPieceSlots<Config>][Config::kBlockRows];
};
// Large ones: staging rows. 16 bytes of padding a row: stmatrix and the 16-byte reads are free of bank conflicts.
template <class Config>
struct EndStorage<Config, false> {
  uint8_t staging[Config::kConsumerGroups][Config::kBlockRows][Config::kStagingBytes + 16];
};

template <class Config>
constexpr bool kSmallBlocks = Config::kBlockRows <= 16;

template <class Config>
struct Storage {
  Stage<Config> stages[Config::kStages];
  EndStorage<Config, kSmallBlocks<Config>> end;
  TileInfo tiles[kPieceSlots<Config>];
  Strips strips;  // the producers' (schedule/draws.cuh)
  Piece drawn;
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
};

}  // namespace chord
