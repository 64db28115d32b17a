// SPDX-License-Identifier: Apache-2.0
// The ring of stages between the producer warpgroup and the consumers.
#pragma once
#include "chord/tile/storage.cuh"

namespace chord {

// A place in the ring. Producers start one phase ahead: a fresh `empty` barrier lets their first waits pass.
template <class Config>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity;

  __device__ __forceinline__ explicit RingPosition(uint32_t first_parity) : parity(first_parity) {}

  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A piece's place among those that are known. The producer fills one with the piece's first stage, when all consumers have
// begun a piece at most kStages before it, and so are done with the one that had the place.
template <class Config>
struct PieceSlot {
  uint32_t index = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kPieceSlots<Config>) index = 0;
  }
};

// The two barriers of every stage: full, what consumers wait for; empty, what the producer waits for.
template <class Config>
struct StageBarriers {
  uint32_t full, empty;

  template <class SharedStorage>
  __device__ __forceinline__ explicit StageBarriers(SharedStorage& storage)
      : full(shared_address(storage.full)), empty(shared_address(storage.empty)) {}

  __device__ __forceinline__ uint32_t full_barrier(uint32_t index) const { return full + index * sizeof(Barrier); }
  __device__ __forceinline__ uint32_t empty_barrier(uint32_t index) const { return empty + index * sizeof(Barrier); }

  __device__ __forceinline__ void wait_full(const RingPosition<Config>& at) const {
    barrier_wait(full_barrier(at.stage), at.parity);
  }
  __device__ __forceinline__ void wait_empty(const RingPosition<Config>& at) const {
    barrier_wait(empty_barrier(at.stage), at.parity);
  }
  // One arrival a consumer warp.
  __device__ __forceinline__ void release(uint32_t index, int lane) const {
    if (lane == 0) barrier_arrive(empty_barrier(index));
  }
};

template <class Config>
struct Ring : StageBarriers<Config> {
  uint32_t stages, tiles;

  __device__ __forceinline__ explicit Ring(Storage<Config>& storage)
      : StageBarriers<Config>(storage), stages(shared_address(storage.stages)), tiles(shared_address(storage.tiles)) {}

  __device__ __forceinline__ uint32_t stage(uint32_t index) const { return stages + index * sizeof(Stage<Config>); }
  __device__ __forceinline__ uint32_t weights(uint32_t index) const {
    return stage(index) + sizeof(Stage<Config>::activations);
  }
  __device__ __forceinline__ TileInfo tile(const PieceSlot<Config>& slot) const {
    const uint4 raw = load_shared_16(tiles + slot.index * sizeof(TileInfo));
    return {static_cast<int32_t>(raw.x), static_cast<int32_t>(raw.y), static_cast<int32_t>(raw.z), raw.w & 0xFFFFu, raw.w >> 16};
  }
};

}  // namespace chord
