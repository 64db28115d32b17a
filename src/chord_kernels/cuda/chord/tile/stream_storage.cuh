// SPDX-License-Identifier: Apache-2.0
// What a CTA of the stream kernel keeps in shared memory, and its ring.
#pragma once
#include "chord/tile/ring.cuh"

namespace chord {

constexpr int kStreamWarps = 16;  // consumers: warp w computes weight tile w % 4 of a piece over k-tile w / 4 of a stage
constexpr int kStreamKTiles = 4;  // of a stage
constexpr int kStreamPanelTiles = 4;
constexpr int kStreamRows = 8;  // token rows of a block: n of the mma instruction

struct alignas(128) StreamStage {
  WeightTile weights[kStreamPanelTiles][kStreamKTiles];
  // 16 bytes of padding a row: the eight rows that one ldmatrix reads lie in different banks.
  uint8_t activations[kStreamRows][kStreamKTiles * kTokenBytes + 16];
};

// What consumers have to know of the piece whose first stage this is. rows == 0: there is no further one.
struct StreamInfo {
  int32_t rows;        // token rows up to the last valid one
  int32_t first_tile;  // the first of the 64-row weight tiles
  int32_t tiles;       // 1 to 4
  int32_t destinations[kStreamRows];  // output row of each token row, -1: none
};

template <class Config>
struct StreamStorage {
  StreamStage stages[Config::kStages];
  // Partial sums on their way to the warp that adds them up: of each 16-row block of a panel, three of its four quarters of K.
  float4 partials[kStreamPanelTiles][4][kStreamKTiles - 1][kWarpLanes];
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
  StreamInfo infos[Config::kStages];
};

template <class Config>
struct StreamRing : StageBarriers<Config> {
  StreamStorage<Config>& storage;

  __device__ __forceinline__ explicit StreamRing(StreamStorage<Config>& s) : StageBarriers<Config>(s), storage(s) {}

  __device__ __forceinline__ uint32_t weights(uint32_t index) const { return shared_address(storage.stages[index].weights); }
  __device__ __forceinline__ uint32_t activations(uint32_t index) const { return shared_address(storage.stages[index].activations); }
  __device__ __forceinline__ StreamInfo& info(uint32_t index) const { return storage.infos[index]; }
};

struct StreamThread {
  int tile;     // which weight tile of a piece
  int quarter;  // which k-tile of a stage
  int lane;
};

}  // namespace chord
