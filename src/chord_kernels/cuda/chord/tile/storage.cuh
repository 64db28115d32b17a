// SPDX-License-Identifier: Apache-2.0
// What a CTA keeps in shared memory, and the packed W4A16 layout that formats.py defines (layout version 1).
#pragma once
#include "chord/arch/barrier.cuh"
#include "chord/arch/shared.cuh"

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

// What a consumer has to know of the output tile whose first stage this is. rows == 0: there is no further tile.
struct alignas(16) TileInfo {
  int32_t first_slot;  // a row contract's name for the block's first row
  int32_t expert;
  int32_t first_tile;    // the first of the 64-row weight tiles
  uint32_t rows : 16;    // token rows up to the last valid one
  uint32_t tiles : 16;   // weight tiles, 1 to kPanelTiles
};
static_assert(sizeof(TileInfo) == 16);

template <class Config>
struct Storage {
  Stage<Config> stages[Config::kStages];
  // 16 bytes of padding a row: stmatrix and the 16-byte reads are free of bank conflicts.
  uint8_t staging[Config::kConsumerGroups][Config::kBlockRows][Config::kStagingBytes + 16];
  TileInfo tiles[Config::kStages];
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
};

}  // namespace chord
