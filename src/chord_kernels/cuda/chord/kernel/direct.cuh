// SPDX-License-Identifier: Apache-2.0
// The direct kernel, for batches so small that starting and ending is most of a call:
// out[row, n] = sum over k of x[row, k] * weight[expert(row), n, k].
//
// No ring and no roles: a CTA of kBlocks x kParts warps computes kBlocks 16-row blocks of weights for a block of token rows, kParts
// warps sharing K. Every warp copies its own weights, the first of them before it waits for the kernels before this one where it may
// (Operands::weights_first); token rows come into shared memory, kRowsAtOnce at a time. Two CTAs fit an SM, so that the next kernel's
// are there, and their weights on the way, when this one ends.
//
// __syncthreads: when the token rows are there; when the sums of parts are; when both have been read.
#pragma once
#include "chord/arch/grid.cuh"
#include "chord/epilogue/outputs.cuh"
#include "chord/tile/direct_loop.cuh"

namespace chord {

// Rows [first, first + rows) of a block to shared memory, by all threads. Rows that are missing keep what was there.
template <class Config>
__device__ __forceinline__ void direct_gather(DirectStorage<Config>& storage, const Rows<Config>& source, const Block& block, int first, int rows,
                                              const Operands& operands) {
  constexpr int kChunks = Config::kKTiles * kTokenBytes / 16;
  for (int i = threadIdx.x; i < rows * kChunks; i += Config::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int from = source.source(block.first_slot + first + row, block.expert);
    if (from >= 0)
      *reinterpret_cast<uint4*>(storage.activations[row] + chunk * 16) =
          *reinterpret_cast<const uint4*>(operands.activations + (int64_t{from} * kChunks + chunk) * 16);
  }
}

// Leaves the totals in the warps with part 0. All threads come here.
template <class Config>
__device__ __forceinline__ void direct_add_up(float (&sum)[4], DirectStorage<Config>& storage, const DirectThread& self) {
  auto& partials = storage.partials[self.place];
  if (self.part > 0) partials[self.part - 1][self.lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  if (self.part > 0) return;
#pragma unroll
  for (int part = 1; part < Config::kParts; ++part) {
    const float4 other = partials[part - 1][self.lane];
    sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
  }
}

template <class Config>
__device__ __forceinline__ void direct_kernel(const Operands& operands, const Routing& routing) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  static_assert(sizeof(DirectStorage<Config>) == Config::kSmemBytes, "the plan and direct_loop.cuh disagree");
  static_assert(Config::kThreads == kDirectWarps<Config> * kWarpLanes);
  static_assert(Config::kBlockRows == 8 && Config::kRowsAtOnce <= 8);
  auto& storage = *reinterpret_cast<DirectStorage<Config>*>(shared_memory);
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpLanes, 0);  // so the compiler sees that a warp never splits on it
  const DirectThread self{warp % Config::kBlocks, warp / Config::kBlocks, warp_lane()};
  if (threadIdx.x == 0) storage.zeros = make_uint4(0, 0, 0, 0);

  Rows<Config> rows(routing);
  Dependency dependency;
  if (!operands.weights_first) dependency.meet();
  const int weight_blocks = operands.row_tiles * 4, units = (weight_blocks + Config::kBlocks - 1) / Config::kBlocks;
  const int all = rows.start() * units;
  for (int unit = blockIdx.x; unit < all; unit += gridDim.x) {
    rows.fetch(unit / units);
    const Block block = rows.locate(unit / units);
    if (block.rows == 0) continue;
    const int weight_block = unit % units * Config::kBlocks + self.place;
    const bool busy = weight_block < weight_blocks;
    const int64_t tile = (int64_t{block.expert} * operands.row_tiles + weight_block / 4) * Config::kKTiles + self.part;
    DirectWeights<Config> weights;
    weights.slots = shared_address(storage.weights[warp]);
    weights.base = operands.weights + tile * sizeof(WeightTile) + weight_block % 4 * sizeof(WeightBlock) + self.lane * 16;
    weights.part = self.part, weights.lane = self.lane;
    for (int first = 0; first < block.rows; first += Config::kRowsAtOnce) {
      const int now = min(Config::kRowsAtOnce, block.rows - first);
      if (busy) {
#pragma unroll
        for (int step = 0; step < Config::kDepth; ++step) weights.fetch(step, step);
      }
      dependency.meet();  // only now: the weights are on their way while the earlier kernels end
      direct_gather<Config>(storage, rows, block, first, now, operands);
      __syncthreads();
      float sum[1][4] = {};
      if (busy) direct_accumulate<Config>(sum, weights, storage, now);
      if constexpr (Config::kParts > 1) direct_add_up<Config>(sum[0], storage, self);
      if (busy && self.part == 0) {
        const int token = self.lane / 4;
        const int to = token < now ? rows.destination(block.first_slot + first + token, block.expert) : -1;
        store_octet<Config>(sum[0], weight_block / 4, weight_block % 4, to, operands, self.lane);
      }
      __syncthreads();
    }
  }
  dependency.meet();
}

}  // namespace chord
