// SPDX-License-Identifier: Apache-2.0
// The stream kernel, for few rows an expert on every architecture with mma.sync and bulk copies (sm_90a and later):
// out[row, n] = sum over k of x[row, k] * weight[expert(row), n, k].
//
// A persistent CTA computes pieces of the output (schedule/pieces.cuh): one block of token rows x up to four weight tiles of 64
// rows. Consumers come in teams of four warps for every part of K:
//
//   warp          | for every stage of up to 4 weight tiles x 4 k-tiles           | once a piece
//   0..4 S T - 1  | wait full; load operands; release; mma.sync, scale in FP32    | add up parts of K; store outputs
//   the next one  | wait empty; bulk copies of weight tiles; gather of token rows | locate its block; write StreamInfo
//   three more    | none: registers move between groups of four warps             |
//
// Either the S = kSplit parts share every stage, part s computing the k-tiles that are s modulo S, or T = kTeams teams take turns
// with pieces of a single stage each: a short K leaves nothing to share.
//
//   barrier     | count  | arrivals of one phase                                               | waited for by
//   full[s]     | 1 + 32 | lane 0 of the producer, plus the bytes of its bulk copies; every    | consumers, before
//               |        | lane of it when its cp.async have landed                            | reading stage s
//   empty[s]    | 4 S    | lane 0 of every consumer warp of the stage, once it is in registers | the producer
//   bar.sync 1  | 128 S  | all consumers, before and after they write sums of parts (S > 1)    | themselves
#pragma once
#include "chord/arch/grid.cuh"
#include "chord/epilogue/stream_store.cuh"
#include "chord/schedule/stream_producer.cuh"

namespace chord {

template <class Config, int kUnits, int kOctets>
__device__ __forceinline__ void stream_piece(StreamStorage<Config>& storage, const StreamRing<Config>& ring, RingPosition<Config>& at,
                                             const Operands& operands, const StreamThread& self) {
  const StreamInfo<Config>& info = ring.info(at.stage);
  const int first_tile = info.first_tile;
  const bool busy = self.position * kUnits < info.tiles * kTileBlocks;
  int32_t destinations[kOctets];
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet) destinations[octet] = info.destinations[octet * 8 + self.lane / 4];
  StreamSums<kUnits, kOctets> sum;
  stream_accumulate<Config, kUnits, kOctets>(sum, ring, at, operands.k_tiles, busy, self);
  stream_store<Config, kUnits, kOctets>(sum, first_tile, destinations, busy, storage, operands, self);
}

// As many octets as hold the piece's rows.
template <class Config, int kUnits, int kOctets = 1>
__device__ __forceinline__ void stream_rows(int rows, StreamStorage<Config>& storage, const StreamRing<Config>& ring, RingPosition<Config>& at,
                                            const Operands& operands, const StreamThread& self) {
  if constexpr (kOctets < Config::kBlockRows / 8) {
    if (rows > kOctets * 8) {
      stream_rows<Config, kUnits, kOctets + 1>(rows, storage, ring, at, operands, self);
      return;
    }
  }
  stream_piece<Config, kUnits, kOctets>(storage, ring, at, operands, self);
}

template <class Config>
__device__ __forceinline__ void stream_consume(StreamStorage<Config>& storage, const Operands& operands, int team, const StreamThread& self) {
  const StreamRing<Config> ring(storage);
  RingPosition<Config> at(0);
  at.stage = team;
  for (;;) {
    ring.wait_full(at);
    const int rows = ring.info(at.stage).rows, tiles = ring.info(at.stage).tiles;
    if (rows == 0) return;
    if (tiles == 1)
      stream_rows<Config, 1>(rows, storage, ring, at, operands, self);
    else if (Config::kPanelTiles == 2 || tiles == 2)
      stream_rows<Config, 2>(rows, storage, ring, at, operands, self);
    else if constexpr (Config::kPanelTiles == 4)
      stream_rows<Config, 4>(rows, storage, ring, at, operands, self);
  }
}

template <class Config>
__device__ __forceinline__ void stream_kernel(const Operands& operands, const Routing& routing) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  static_assert(sizeof(StreamStorage<Config>) == Config::kSmemBytes, "the plan and stream_storage.cuh disagree");
  static_assert(Config::kThreads == kStreamWarps<Config> * kWarpLanes + kGroupThreads);
  static_assert(Config::kSplit == 1 || Config::kTeams == 1);
  static_assert(Config::kStages % Config::kTeams == 0, "a barrier's phases are told apart by parity, so a stage belongs to one team");
  auto& storage = *reinterpret_cast<StreamStorage<Config>*>(shared_memory);
  const int lane = threadIdx.x % kWarpLanes;
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpLanes, 0);  // so the compiler sees that a warp never splits on it
  if (warp == kStreamWarps<Config>) prefetch_routing<Config>(routing);
  if (threadIdx.x == 0) {
    const StreamRing<Config> ring(storage);
    for (int s = 0; s < Config::kStages; ++s) {
      barrier_init(ring.full_barrier(s), 1 + kWarpLanes);
      barrier_init(ring.empty_barrier(s), kTeamWarps * Config::kSplit);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= kStreamWarps<Config>) {
    registers_lower<Config::kProducerRegisters>();
    if (warp == kStreamWarps<Config>) stream_produce<Config>(storage, operands, routing, lane);
  } else {
    registers_raise<Config::kConsumerRegisters>();
    const int group = warp / kTeamWarps;
    stream_consume<Config>(storage, operands, group / Config::kSplit, {warp % kTeamWarps, group % Config::kSplit, lane});
  }
}

}  // namespace chord
