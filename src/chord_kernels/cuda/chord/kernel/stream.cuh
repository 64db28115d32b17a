// SPDX-License-Identifier: Apache-2.0
// The stream kernel, for few rows an expert on every architecture with mma.sync and bulk copies (sm_90a and later):
// out[row, n] = sum over k of x[row, k] * weight[expert(row), n, k].
//
// A persistent CTA computes pieces of the output (schedule/pieces.cuh): one block of token rows x up to four weight tiles of 64
// rows. Of W consumer warps, either every four have one of S parts of K (W = 4 S), or, where all of K is one stage, each has a 16-row
// block of the piece (W = 16, S = 1), and its token rows stay in registers while the pieces are of one block of them.
//
//   warp         | for every stage of up to 4 weight tiles x 4 k-tiles           | once a piece
//   0..W - 1     | wait full; load operands; release; mma.sync, scale in FP32    | add up parts of K; store outputs
//   the next one | wait empty; bulk copies of weight tiles                       | locate its block; write StreamInfo
//   one more     | wait described; gather of token rows                          | read StreamInfo
//
//   barrier      | count  | arrivals of one phase                                               | waited for by
//   full[s]      | 2 + 32 | lane 0 of the weights' warp, plus the bytes of its bulk copies;     | consumers, before
//                |        | every lane of the tokens' warp when its cp.async have landed, and   | reading stage s
//                |        | its lane 0 for what the warp has read                               |
//   empty[s]     | W      | lane 0 of every consumer warp, once the stage is in registers       | the weights' warp
//   described[s] | 1      | lane 0 of the weights' warp, when the stage is empty and a piece's  | the tokens' warp
//                |        | StreamInfo is in its first one                                      |
//   bar.sync 1   | 32 W   | all consumers, before and after they write sums of parts (S > 1)    | themselves
#pragma once
#include "chord/arch/grid.cuh"
#include "chord/epilogue/stream_store.cuh"
#include "chord/schedule/stream_producer.cuh"
#include "chord/tile/short_loop.cuh"

namespace chord {

template <class Config, int kUnits, int kOctets>
__device__ __forceinline__ void stream_piece(StreamStorage<Config>& storage, const StreamRing<Config>& ring, RingPosition<Config>& at,
                                             const Operands& operands, const StreamThread& self) {
  const StreamInfo<Config>& info = ring.info(at.stage);
  const int first_tile = info.first_tile, rows = info.rows, depth = info.depth;
  const bool busy = self.position * kUnits < info.tiles * kTileBlocks;
  int32_t destinations[kOctets];
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet) destinations[octet] = info.destinations[octet * 8 + self.lane / 4];
  StreamSums<kUnits, kOctets> sum;
  stream_accumulate<Config, kUnits, kOctets>(sum, ring, at, rows, depth, operands.k_tiles, busy, self);
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

// As many 16-row blocks a warp as the weight tiles of the piece need.
template <class Config>
__device__ __forceinline__ void stream_tiles(int rows, int tiles, StreamStorage<Config>& storage, const StreamRing<Config>& ring,
                                             RingPosition<Config>& at, const Operands& operands, const StreamThread& self) {
  if (tiles == 1)
    stream_rows<Config, 1>(rows, storage, ring, at, operands, self);
  else if (tiles == 2)
    stream_rows<Config, 2>(rows, storage, ring, at, operands, self);
  else
    stream_rows<Config, 4>(rows, storage, ring, at, operands, self);
}

// The 16-row block `block` of tile `tile` of a piece whose K is one stage.
template <class Config, int kOctets>
__device__ __forceinline__ void short_piece(const StageTokens<Config>& kept, const StreamRing<Config>& ring, uint32_t stage, int tile, int block,
                                            const Operands& operands, int lane) {
  const StreamInfo<Config>& info = ring.info(stage);
  const uint32_t weights = ring.weights(stage) + tile * kStreamKTiles * sizeof(WeightTile) + block * sizeof(WeightBlock);
  float sum[kOctets][4] = {};
  multiply_short<Config, kOctets>(sum, kept, ring, stage, weights, info.rows, operands.k_tiles, lane);
  const int row_tile = info.first_tile + tile;
  int32_t destinations[kOctets];
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet) destinations[octet] = info.destinations[octet * 8 + lane / 4];
  __syncwarp();
  ring.release(stage, lane);
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet)
    store_octet<Config>(sum[octet], row_tile, block, destinations[octet], operands, lane);
}

// Pieces whose K is one stage, from the one that is ready on to the last.
template <class Config>
__device__ __forceinline__ void short_pieces(const StreamRing<Config>& ring, RingPosition<Config>& at, const Operands& operands, int warp, int lane) {
  static_assert(Config::kWarps == Config::kPanelTiles * kTileBlocks);
  StageTokens<Config> tokens;
  int held = -1;  // the block whose rows are in `tokens`
  for (;;) {
    const StreamInfo<Config>& info = ring.info(at.stage);
    const int rows = info.rows;
    if (rows == 0) return;
    if (info.block != held) tokens.keep(ring, at.stage, rows, operands.k_tiles, lane);
    held = info.block;
    const int tile = warp / kTileBlocks, block = warp % kTileBlocks;
    if (tile >= info.tiles) {
      __syncwarp();
      ring.release(at.stage, lane);
    } else if (Config::kBlockRows == 8 || rows <= 8) {
      short_piece<Config, 1>(tokens, ring, at.stage, tile, block, operands, lane);
    } else if constexpr (Config::kBlockRows == 16) {
      short_piece<Config, 2>(tokens, ring, at.stage, tile, block, operands, lane);
    }
    at.advance();
    ring.wait_full(at);
  }
}

template <class Config>
__device__ __forceinline__ void stream_consume(StreamStorage<Config>& storage, const Operands& operands, int warp, int lane) {
  const StreamRing<Config> ring(storage);
  RingPosition<Config> at(0);
  ring.wait_full(at);
  if constexpr (Config::kSplit == 1) {
    short_pieces<Config>(ring, at, operands, warp, lane);
  } else {
    const StreamThread self{warp % kTeamWarps, warp / kTeamWarps, lane};
    while (const int rows = ring.info(at.stage).rows) {
      stream_tiles<Config>(rows, ring.info(at.stage).tiles, storage, ring, at, operands, self);
      ring.wait_full(at);
    }
  }
}

template <class Config>
__device__ __forceinline__ void stream_kernel(const Operands& operands, const Routing& routing) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  static_assert(sizeof(StreamStorage<Config>) == Config::kSmemBytes, "the plan and stream_storage.cuh disagree");
  static_assert(Config::kPanelTiles == 4 && Config::kWarps == (Config::kSplit == 1 ? 16 : kTeamWarps * Config::kSplit));
  static_assert(Config::kThreads == (Config::kWarps + 2) * kWarpLanes);
  auto& storage = *reinterpret_cast<StreamStorage<Config>*>(shared_memory);
  const int lane = warp_lane();
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpLanes, 0);  // so the compiler sees that a warp never splits on it
  if (warp == Config::kWarps) prefetch_routing<Config>(routing);
  if (threadIdx.x == 0) {
    const StreamRing<Config> ring(storage);
    for (int s = 0; s < Config::kStages; ++s) {
      barrier_init(ring.full_barrier(s), 2 + kWarpLanes);
      barrier_init(ring.empty_barrier(s), Config::kWarps);
      barrier_init(ring.described_barrier(s), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp < Config::kWarps)
    stream_consume<Config>(storage, operands, warp, lane);
  else if (warp == Config::kWarps)
    stream_weights<Config>(storage, operands, routing, lane);
  else
    stream_tokens<Config>(storage, operands, routing, lane);
}

}  // namespace chord
