// SPDX-License-Identifier: Apache-2.0
// The tile kernel for sm_90a: out[row, n] = sum over k of x[row, k] * weight[expert(row), n, k].
//
// A persistent CTA draws strips of the output (schedule/draws.cuh) and computes them in pieces; a piece is one block of token rows x
// up to kPanelTiles * 64 weight rows. Three or more warpgroups:
//
//   warpgroup        | for every stage of kKTiles * 64 k                    | once a piece
//   consumers 0..C-1 | wait full; dequantize A; wgmma; release              | width from TileInfo; store outputs
//   producer C       | wait empty; bulk copies of weights; gather of tokens | write TileInfo; once a strip: draw the next, locate its block
//
//   barrier        | count   | arrivals of one phase                                    | waited for by
//   full[s]        | 128 + 1 | every producer thread when its cp.async have landed;     | consumers, before
//                  |         | thread 0 with the bytes of the bulk copies               | reading stage s
//   empty[s]       | 4 * C   | lane 0 of every consumer warp, when no wgmma of it reads | producers, before
//                  |         | stage s any more                                         | writing stage s
//   bar.sync 1 + g | 128     | warpgroup g around its staging rows (large blocks)       | itself
//   bar.sync 1 + C | 128     | the producer around the strip that thread 0 has drawn    | itself
//
// Only the producer knows the schedule. The last stage it fills says rows = 0, and the consumers leave.
#pragma once
#include "chord/arch/grid.cuh"
#include "chord/epilogue/store.cuh"
#include "chord/schedule/producer.cuh"
#include "chord/tile/bf16.cuh"
#include "chord/tile/exact.cuh"

namespace chord {

template <class Config>
__device__ __forceinline__ void consume(Storage<Config>& storage, const Operands& operands, const Routing& routing,
                                        const ConsumerThread& self) {
  const Ring<Config> ring(storage);
  RingPosition<Config> at(0);
  const int k_stages = operands.k_tiles / Config::kKTiles;
  for (PieceSlot<Config> slot;; slot.advance()) {
    ring.wait_full(at);
    const TileInfo tile = ring.tile(slot);
    if (tile.rows == 0) return;
    const OutputRows<Config> to(tile, routing, slot, self);
    Accumulators<Config> sum;
    if constexpr (Config::kNumerics == Numerics::kExact) {
      exact_piece<Config>(tile, sum, ring, at, k_stages, self);
    } else {
      static_assert(Config::kNumerics == Numerics::kBf16);
      bf16_piece<Config>(tile, sum, ring, at, k_stages, self);
    }
    store_tiles<Config>(sum, ring, slot, to, storage, operands, self);
  }
}

template <class Config>
__device__ __forceinline__ void tile_kernel(const Operands& operands, const Routing& routing) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  static_assert(sizeof(Storage<Config>) == Config::kSmemBytes, "plan.py and storage.cuh disagree");
  static_assert(Config::kThreads == (Config::kConsumerGroups + 1) * kGroupThreads);
  static_assert(Config::kPanelTiles == Config::kConsumerGroups * Config::kRowTiles);
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared_memory);
  const Ring<Config> ring(storage);
  if (threadIdx.x / kWarpLanes == Config::kConsumerGroups * 4) prefetch_routing<Config>(routing);
  if (threadIdx.x == 0) {
    if (ring.stages % alignof(Storage<Config>) != 0) trap();  // the swizzle would read other bytes than were written
    for (int s = 0; s < Config::kStages; ++s) {
      barrier_init(ring.full_barrier(s), kGroupThreads + 1);
      barrier_init(ring.empty_barrier(s), Config::kConsumerGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int group = threadIdx.x / kGroupThreads;
  if (group == Config::kConsumerGroups) {
    registers_lower<Config::kProducerRegisters>();
    produce<Config>(storage, operands, routing, threadIdx.x % kGroupThreads);
  } else {
    registers_raise<Config::kConsumerRegisters>();
    consume<Config>(storage, operands, routing,
                    {group, static_cast<int>(threadIdx.x / kWarpLanes % 4), static_cast<int>(threadIdx.x % kWarpLanes)});
  }
}

}  // namespace chord
