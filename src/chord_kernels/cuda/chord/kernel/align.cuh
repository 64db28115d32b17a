// SPDX-License-Identifier: Apache-2.0
// Router ids -> the buffers of the indexed contract, by one CTA: ids grouped by expert, each expert's rows padded to whole blocks. Ids of
// an expert come in any order, on which no output depends.
#pragma once
#include "chord/arch/grid.cuh"
#include "chord/schedule/token_routing.cuh"

namespace chord {

struct AlignedRows {
  int32_t* ids;      // slots by expert; what fills a block up is the number of slots
  int32_t* experts;  // of each block
  int32_t* padded;   // how many of `ids` there are
  int32_t block_rows;
};

template <class Config>
__device__ __forceinline__ void align_rows(const AlignedRows& rows, const TokenRouting& routing) {
  constexpr int kThreads = Config::kThreads, kWarps = kThreads / kWarpLanes;
  static_assert(kWarps <= kWarpLanes);
  __shared__ int32_t count_of[Config::kMostExperts];  // then: where an expert's next id goes
  __shared__ int32_t totals[kWarps];
  const int thread = threadIdx.x, lane = warp_lane(), slots = routing.tokens * routing.top_k;
  const int share = (routing.experts + kThreads - 1) / kThreads;  // experts a thread
  const int first = min(thread * share, routing.experts), last = min(first + share, routing.experts);
  const auto blocks_of = [&](int expert) { return (count_of[expert] + rows.block_rows - 1) / rows.block_rows; };

  for (int expert = thread; expert < routing.experts; expert += kThreads) count_of[expert] = 0;
  __syncthreads();
  grid_dependency_wait();
  grid_launch_dependents();
  for (int slot = thread; slot < slots; slot += kThreads) {
    const int expert = routing.expert(slot);
    if (expert >= 0) atomicAdd(&count_of[expert], 1);
  }
  __syncthreads();

  int own = 0;  // blocks
  for (int expert = first; expert < last; ++expert) own += blocks_of(expert);
  int before = sum_through(own, lane);
  if (lane == kWarpLanes - 1) totals[thread / kWarpLanes] = before;
  before -= own;
  __syncthreads();
  const int warps_before = sum_through(lane < kWarps ? totals[lane] : 0, lane);
  if (thread / kWarpLanes > 0) before += __shfl_sync(kFullMask, warps_before, thread / kWarpLanes - 1);
  if (thread == kThreads - 1) *rows.padded = (before + own) * rows.block_rows;
  for (int expert = first; expert < last; ++expert) {
    const int blocks = blocks_of(expert), start = before * rows.block_rows;
    for (int block = 0; block < blocks; ++block) rows.experts[before + block] = expert;
    for (int row = count_of[expert]; row < blocks * rows.block_rows; ++row) rows.ids[start + row] = slots;
    count_of[expert] = start;
    before += blocks;
  }
  __syncthreads();
  for (int slot = thread; slot < slots; slot += kThreads) {
    const int expert = routing.expert(slot);
    if (expert >= 0) rows.ids[atomicAdd(&count_of[expert], 1)] = slot;
  }
}

}  // namespace chord
