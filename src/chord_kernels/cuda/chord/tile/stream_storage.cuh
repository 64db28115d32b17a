// SPDX-License-Identifier: Apache-2.0
// What a CTA of the stream kernel keeps in shared memory, and its ring.
#pragma once
#include "chord/tile/ring.cuh"

namespace chord {

constexpr int kStreamKTiles = 4;  // of a stage, at least
constexpr int kTeamWarps = 4;     // warps that share the 16-row blocks of a piece, where others share its K
constexpr int kTileBlocks = 4;    // 16-row blocks of a weight tile

template <class Config>
struct alignas(128) StreamStage {
  WeightTile weights[Config::kPanelTiles * kStreamKTiles];  // [tiles][depth], by piece
  uint8_t activations[Config::kBlockRows * (kStreamKTiles * kTokenBytes + 16)];  // [rows] of token_pitch(depth)
};

// 16 bytes of padding a row: the eight rows that one ldmatrix reads lie in different banks.
__device__ __forceinline__ constexpr int token_pitch(int depth) { return depth * kTokenBytes + 16; }

template <class Config>
constexpr int kLongestStage = Config::kSplit > 1 ? 2 * kStreamKTiles : kStreamKTiles;

// How many k-tiles the stages of a piece hold. Twice as many where it has one weight tile and few token rows: the ring is fuller, and a
// warp has two products at once.
template <class Config>
__device__ __forceinline__ int stage_depth(int tiles, int rows, int k_tiles) {
  constexpr int kLong = kLongestStage<Config>;
  return tiles == 1 && k_tiles > kStreamKTiles && rows * token_pitch(kLong) <= sizeof(StreamStage<Config>::activations) ? kLong : kStreamKTiles;
}

// What consumers have to know of the piece whose first stage this is. rows == 0: there is no further one.
template <class Config>
struct StreamInfo {
  int32_t rows;        // token rows up to the last valid one
  int32_t first_tile;  // the first of the 64-row weight tiles
  int32_t tiles;       // 1 to kPanelTiles
  int32_t depth;       // k-tiles of its stages
  int32_t block;       // of token rows
  int32_t destinations[Config::kBlockRows];  // output row of each token row, -1: none
};

// Sums of parts of K on their way to the warp that adds them up: of unit u of the warps at position p (stream_loop.cuh).
template <class Config, bool kShared = (Config::kSplit > 1)>
struct StreamPartials {
  float4 partials[kTeamWarps][kTileBlocks][Config::kSplit - 1][Config::kBlockRows / 8][kWarpLanes];
};
template <class Config>
struct StreamPartials<Config, false> {};

template <class Config>
struct StreamStorage : StreamPartials<Config> {
  StreamStage<Config> stages[Config::kStages];
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
  Barrier described[Config::kStages];
  StreamInfo<Config> infos[Config::kStages];
};

template <class Config>
struct StreamRing : StageBarriers<Config> {
  StreamStorage<Config>& storage;
  uint32_t described;

  __device__ __forceinline__ explicit StreamRing(StreamStorage<Config>& s)
      : StageBarriers<Config>(s), storage(s), described(shared_address(s.described)) {}

  __device__ __forceinline__ uint32_t described_barrier(uint32_t index) const { return described + index * sizeof(Barrier); }

  __device__ __forceinline__ uint32_t weights(uint32_t index) const { return shared_address(storage.stages[index].weights); }
  __device__ __forceinline__ uint32_t activations(uint32_t index) const { return shared_address(storage.stages[index].activations); }
  __device__ __forceinline__ StreamInfo<Config>& info(uint32_t index) const { return storage.infos[index]; }
};

struct StreamThread {
  int position;  // of the warp in its team
  int part;      // which part of K
  int lane;
};

}  // namespace chord
