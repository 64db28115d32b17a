// SPDX-License-Identifier: Apache-2.0
// Row contracts: for block b, which expert, how many rows, where row i is read and where its outputs go. A "slot" is a
// contract's own name for a row: an index into sorted_ids (indexed), or the row of x itself (contiguous, masked).
// start() gives the number of blocks; fetch() asks for what locate() of the same block will need, so that the answer is there by
// then. Both are called by whole warps, in pairs, with rising b below the number of blocks. No contract reads a count back to
// the host.
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/arch/grid.cuh"
#include "chord/tile/storage.cuh"

namespace chord {

struct Operands {
  const uint8_t* activations;  // [rows, K] BF16
  const uint8_t* weights;      // [E, N/64, K/64] WeightTile
  uint8_t* outputs;            // [rows, N or N/2] BF16
  int32_t* counter;            // 0 before and after every launch; no other launch uses it meanwhile
  int32_t row_tiles;           // N / 64
  int32_t k_tiles;             // K / 64
  int32_t weights_first;       // the kernel before this one writes no routing: weights may stream in before it is done
};

// Programmatic dependent launch, for the threads of a producer; no other thread reads what an earlier kernel wrote, or writes
// anything, before a producer has handed it rows. Only once the earlier kernels are done may later ones start, so that what is
// done for one kernel is done for all that follow it.
struct Dependency {
  bool met = false;

  __device__ __forceinline__ void meet() {
    if (met) return;
    grid_dependency_wait();
    grid_launch_dependents();
    met = true;
  }
};

struct Block {
  int32_t expert;
  int32_t first_slot;
  int32_t rows;  // up to the last valid one; 0: nothing to do
};

struct Routing {
  const int32_t* rows;     // sorted_ids | m_indices | -
  const int32_t* experts;  // expert_ids | - | -
  const int32_t* counts;   // num_tokens_padded | - | masked_m
  int32_t limit;           // M * top_k valid ids | m rows of x | max_m rows an expert
  int32_t max_blocks;      // blocks that the routing buffers can describe | ceil(m / block) | -
  int32_t top_k;           // indexed only
  int32_t num_experts;
};

// Has a warp ask for the routing tables (of a small batch, all of them) to be in L2, so that reading one after the other costs
// one trip to memory.
template <class Config>
__device__ __forceinline__ void prefetch_routing(const Routing& routing) {
  const auto prefetch = [](const int32_t* table, int entries) {
    const int first = warp_lane() * 32;  // of a line of 128 bytes
    if (first < entries) prefetch_line(table + first);
  };
  if constexpr (Config::kContract == Contract::kIndexed) {
    prefetch(routing.counts, 1);
    prefetch(routing.experts, routing.max_blocks);
    prefetch(routing.rows, routing.max_blocks * Config::kBlockRows);
  } else if constexpr (Config::kContract == Contract::kContiguous) {
    prefetch(routing.rows, routing.limit);
  } else {
    static_assert(Config::kContract == Contract::kMasked);
    prefetch(routing.counts, routing.num_experts);
  }
}

// The position after the last lane-visited row for which valid(i) holds, over i in [0, kRows).
template <int kRows, class Valid>
__device__ __forceinline__ int rows_up_to_last(Valid valid) {
  int rows = 0;
#pragma unroll
  for (int base = 0; base < kRows; base += kWarpLanes) {
    const int i = base + warp_lane();
    const uint32_t votes = __ballot_sync(kFullMask, i < kRows && valid(i));
    if (votes) rows = base + kWarpLanes - __clz(votes);
  }
  return rows;
}

template <class Config>
struct IndexedRows {
  static constexpr int kIds = (Config::kBlockRows + kWarpLanes - 1) / kWarpLanes;
  const Routing& routing;
  int32_t expert;
  int32_t ids[kIds];  // of the block's rows, one a lane

  __device__ __forceinline__ explicit IndexedRows(const Routing& r) : routing(r) {}

  __device__ __forceinline__ int start() { return min(*routing.counts / Config::kBlockRows, routing.max_blocks); }

  __device__ __forceinline__ void fetch(int block) {
    expert = routing.experts[block];
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const int row = i * kWarpLanes + warp_lane();
      ids[i] = row < Config::kBlockRows ? routing.rows[block * Config::kBlockRows + row] : -1;
    }
  }
  __device__ __forceinline__ Block locate(int block) const {
    const bool known = static_cast<uint32_t>(expert) < static_cast<uint32_t>(routing.num_experts);
    const int rows = rows_up_to_last<Config::kBlockRows>([&](int i) { return valid(ids[i / kWarpLanes]); });
    return {expert, block * Config::kBlockRows, known ? rows : 0};
  }
  __device__ __forceinline__ bool valid(int id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(routing.limit); }
  __device__ __forceinline__ int destination(int slot, int) const {
    const int id = routing.rows[slot];
    return valid(id) ? id : -1;
  }
  __device__ __forceinline__ int source(int slot, int expert) const {
    const int id = destination(slot, expert);
    return id < 0 ? -1 : id / routing.top_k;
  }
};

template <class Config>
struct ContiguousRows {
  static constexpr int kExperts = (Config::kBlockRows + kWarpLanes - 1) / kWarpLanes;
  const Routing& routing;
  int32_t experts[kExperts];  // of the block's rows, one a lane

  __device__ __forceinline__ explicit ContiguousRows(const Routing& r) : routing(r) {}

  __device__ __forceinline__ int start() { return routing.max_blocks; }

  __device__ __forceinline__ void fetch(int block) {
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      const int row = i * kWarpLanes + warp_lane(), slot = block * Config::kBlockRows + row;
      experts[i] = row < Config::kBlockRows && slot < routing.limit ? routing.rows[slot] : -1;
    }
  }
  __device__ __forceinline__ Block locate(int block) const {
    int found = -1;
    // The first valid row names the expert: rows of -1 may also come first.
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      const uint32_t votes =
          __ballot_sync(kFullMask, static_cast<uint32_t>(experts[i]) < static_cast<uint32_t>(routing.num_experts));
      if (votes && found < 0) found = __shfl_sync(kFullMask, experts[i], __ffs(votes) - 1);
    }
    const int rows = rows_up_to_last<Config::kBlockRows>([&](int i) { return experts[i / kWarpLanes] == found; });
    return {found, block * Config::kBlockRows, found < 0 ? 0 : rows};
  }
  // A row of another expert in this block (a broken alignment) is left untouched.
  __device__ __forceinline__ int destination(int slot, int expert) const {
    return slot < routing.limit && routing.rows[slot] == expert ? slot : -1;
  }
  __device__ __forceinline__ int source(int slot, int expert) const { return destination(slot, expert); }
};

template <class Config>
struct MaskedRows {
  const Routing& routing;
  int32_t first_expert;  // of the 32 whose counts the warp holds
  int32_t first_block;   // of first_expert
  int32_t blocks_up_to;  // through this lane's expert, from first_block on

  __device__ __forceinline__ explicit MaskedRows(const Routing& r) : routing(r) {}

  __device__ __forceinline__ int start() {
    int blocks = 0;
#pragma unroll 1  // or it takes registers that producers do not have
    for (int expert = 0; expert < routing.num_experts; expert += kWarpLanes) {
      load(expert);
      blocks += __shfl_sync(kFullMask, blocks_up_to, kWarpLanes - 1);
    }
    first_block = 0;
    load(0);
    return blocks;
  }
  __device__ __forceinline__ int count(int expert) const { return max(0, min(routing.counts[expert], routing.limit)); }

  __device__ __forceinline__ void load(int expert) {
    first_expert = expert;
    const int mine = expert + warp_lane();
    blocks_up_to = mine < routing.num_experts ? (count(mine) + Config::kBlockRows - 1) / Config::kBlockRows : 0;
#pragma unroll
    for (int step = 1; step < kWarpLanes; step *= 2) {
      const int before = __shfl_up_sync(kFullMask, blocks_up_to, step);
      if (warp_lane() >= step) blocks_up_to += before;
    }
  }
  __device__ __forceinline__ void fetch(int) const {}

  __device__ __forceinline__ Block locate(int block) {
    uint32_t later;
    while (!(later = __ballot_sync(kFullMask, block - first_block < blocks_up_to))) {
      first_block += __shfl_sync(kFullMask, blocks_up_to, kWarpLanes - 1);
      load(first_expert + kWarpLanes);
    }
    const int lane = __ffs(later) - 1;
    const int before = __shfl_sync(kFullMask, blocks_up_to, max(lane - 1, 0));
    const int row = (block - first_block - (lane ? before : 0)) * Config::kBlockRows;
    const int expert = first_expert + lane;
    return {expert, expert * routing.limit + row, min(count(expert) - row, Config::kBlockRows)};
  }
  // Only rows below Block::rows are asked for, and all of them are valid.
  __device__ __forceinline__ int destination(int slot, int) const { return slot; }
  __device__ __forceinline__ int source(int slot, int) const { return slot; }
};

template <class Config, Contract kContract>
struct RowsOf;
template <class Config>
struct RowsOf<Config, Contract::kIndexed> {
  using Type = IndexedRows<Config>;
};
template <class Config>
struct RowsOf<Config, Contract::kContiguous> {
  using Type = ContiguousRows<Config>;
};
template <class Config>
struct RowsOf<Config, Contract::kMasked> {
  using Type = MaskedRows<Config>;
};
template <class Config>
using Rows = typename RowsOf<Config, Config::kContract>::Type;

}  // namespace chord
