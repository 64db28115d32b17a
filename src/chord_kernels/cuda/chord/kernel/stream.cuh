// SPDX-License-Identifier: Apache-2.0
// The stream kernel, for few rows an expert on every architecture with mma.sync and bulk copies (sm_90a and later):
// out[row, n] = sum over k of x[row, k] * weight[expert(row), n, k].
//
// A persistent CTA computes pieces of the output (schedule/pieces.cuh): one block of eight token rows x up to four weight tiles
// of 64 rows. Twenty warps:
//
//   warp      | for every stage of up to 4 weight tiles x 4 k-tiles              | once a piece
//   0..15     | wait full; load operands; release; mma.sync, scale in FP32       | add up quarters of K; store outputs
//   16        | wait empty; bulk copies of weight tiles; gather of token rows    | locate its block; write StreamInfo
//   17..19    | none: registers move between groups of four warps                |
//
// Warp w < 16 computes weight tile w % 4 of a piece over the k-tiles that are w / 4 modulo 4.
//
//   barrier     | count  | arrivals of one phase                                            | waited for by
//   full[s]     | 1 + 32 | lane 0 of warp 16, plus the bytes of its bulk copies; every lane | consumers, before
//               |        | of it when its cp.async have landed                              | reading stage s
//   empty[s]    | 16     | lane 0 of every consumer warp, once stage s is in its registers  | warp 16
//   bar.sync 1  | 512    | all consumers, before and after they write partial sums          | themselves
#pragma once
#include "chord/arch/grid.cuh"
#include "chord/epilogue/stream_store.cuh"
#include "chord/schedule/stream_producer.cuh"

namespace chord {

template <class Config>
__device__ __forceinline__ void stream_consume(StreamStorage<Config>& storage, const Operands& operands, const StreamThread& self) {
  const StreamRing<Config> ring(storage);
  RingPosition<Config> at(0);
  for (;;) {
    ring.wait_full(at);
    const StreamInfo& info = ring.info(at.stage);
    if (info.rows == 0) return;
    const int first_tile = info.first_tile, destination = info.destinations[self.lane / 4];
    const bool busy = self.tile < info.tiles;
    StreamSums sum;
    stream_accumulate<Config>(sum, ring, at, operands.k_tiles, busy, self);
    stream_store<Config>(sum, first_tile, destination, busy, storage, operands, self);
  }
}

template <class Config>
__device__ __forceinline__ void stream_kernel(const Operands& operands, const Routing& routing) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  static_assert(sizeof(StreamStorage<Config>) == Config::kSmemBytes, "the plan and stream_storage.cuh disagree");
  static_assert(Config::kThreads == kStreamWarps * kWarpLanes + kGroupThreads);
  auto& storage = *reinterpret_cast<StreamStorage<Config>*>(shared_memory);
  const int lane = threadIdx.x % kWarpLanes;
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpLanes, 0);  // so the compiler sees that a warp never splits on it
  if (warp == kStreamWarps) prefetch_routing<Config>(routing);
  if (threadIdx.x == 0) {
    const StreamRing<Config> ring(storage);
    for (int s = 0; s < Config::kStages; ++s) {
      barrier_init(ring.full_barrier(s), 1 + kWarpLanes);
      barrier_init(ring.empty_barrier(s), kStreamWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= kStreamWarps) {
    registers_lower<Config::kProducerRegisters>();
    if (warp == kStreamWarps) stream_produce<Config>(storage, operands, routing, lane);
  } else {
    registers_raise<Config::kConsumerRegisters>();
    stream_consume<Config>(storage, operands, {warp % 4, warp / 4, lane});
  }
}

}  // namespace chord
