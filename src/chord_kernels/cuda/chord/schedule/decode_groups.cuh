// SPDX-License-Identifier: Apache-2.0
// From router ids to work for warp decode: every CTA finds the same groups, each an expert and up to kTokens of the tokens that chose
// it, without a sort, a padding or a kernel of its own.
//
// Pairs (token, expert) have dense numbers, those of a group in the order of its tokens. A token that names an expert twice is one pair.
#pragma once
#include "chord/arch/barrier.cuh"
#include "chord/arch/grid.cuh"
#include "chord/arch/types.cuh"
#include "chord/schedule/token_routing.cuh"

namespace chord {

template <int kTokens>
struct DecodeGroup {
  uint8_t tokens[8];   // the first kTokens count
  int16_t expert;
  int16_t first_pair;  // of tokens[0]; those of the others follow
  int32_t count;       // of tokens, 1 to kTokens
};
static_assert(sizeof(DecodeGroup<8>) == 16);

template <class Config>
struct DecodeGroups {
  static constexpr int kPairs = Config::kMostPairs;
  uint64_t tokens_of[Config::kMostExperts];  // a bit each, up to 64
  int32_t first_of[Config::kMostExperts];  // pair in the low half, group in the high half
  int16_t pair_of[kPairs];  // of a slot; -1: none
  DecodeGroup<Config::kTokens> groups[kPairs];
  int32_t totals[Config::kThreads / kWarpLanes];
  int32_t count;

  // All threads of the CTA call begin(), which reads nothing that an earlier kernel wrote, and find().
  __device__ __forceinline__ void begin(const TokenRouting& routing) {
    if (few(routing)) return;
    for (int expert = threadIdx.x; expert < routing.experts; expert += Config::kThreads) tokens_of[expert] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ void find(const TokenRouting& routing) {
    if (few(routing)) {
      if (threadIdx.x < kWarpLanes) find_by_warp(routing, threadIdx.x);
      __syncthreads();
    } else {
      find_by_all(routing);
    }
  }

 private:
  __device__ __forceinline__ static bool few(const TokenRouting& routing) {
    return Config::kBatch <= Config::kTokens && routing.tokens * routing.top_k <= kWarpLanes;
  }

  // Few slots, one a lane, and no expert with more than one group. Groups are in the order of their first slots.
  __device__ __forceinline__ void find_by_warp(const TokenRouting& routing, int lane) {
    const bool used = lane < routing.tokens * routing.top_k;
    const int expert = used ? routing.expert(lane) : -1, token = lane / routing.top_k;
    const uint32_t before = (1u << lane) - 1, of_earlier_tokens = (1u << token * routing.top_k) - 1;
    const uint32_t same = __match_any_sync(kFullMask, expert);  // slots of this expert
    const uint32_t pairs = same & __ballot_sync(kFullMask, expert >= 0 && !(same & before & ~of_earlier_tokens));  // the first slot of each
    const bool leads = expert >= 0 && !(same & before);
    const uint32_t leaders = __ballot_sync(kFullMask, leads);
    const int own = leads ? __popc(pairs) : 0, through = sum_through(own, lane), leader = __ffs(same) - 1;
    const int first_pair = __shfl_sync(kFullMask, through - own, leader);
    const int position = __popc(pairs & of_earlier_tokens);
    if (expert >= 0) {
      auto& group = groups[__popc(leaders & ((1u << leader) - 1))];
      group.tokens[position] = static_cast<uint8_t>(token);
      group.expert = static_cast<int16_t>(expert);
      group.first_pair = static_cast<int16_t>(first_pair);
      group.count = __popc(pairs);
    }
    if (lane == 0) count = __popc(leaders);
    if (used) pair_of[lane] = static_cast<int16_t>(expert < 0 ? -1 : first_pair + position);
  }

  // A thread has a share of the slots and one of the experts.
  __device__ __forceinline__ void find_by_all(const TokenRouting& routing) {
    constexpr int kShare = (kPairs + Config::kThreads - 1) / Config::kThreads;
    const int thread = threadIdx.x, slots = routing.tokens * routing.top_k;
    int expert_of[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int slot = thread + i * Config::kThreads;
      expert_of[i] = slot < slots ? routing.expert(slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int token = (thread + i * Config::kThreads) / routing.top_k;
      if (expert_of[i] >= 0) atomicOr(reinterpret_cast<uint32_t*>(&tokens_of[expert_of[i]]) + token / 32, 1u << token % 32);
    }
    __syncthreads();
    const int share = (routing.experts + Config::kThreads - 1) / Config::kThreads;
    const int first = min(thread * share, routing.experts), last = min(first + share, routing.experts);
    int own = 0;  // pairs in the low half, groups in the high half
    for (int expert = first; expert < last; ++expert) own += load(expert);
    int before = sum_through(own, warp_lane());
    if (warp_lane() == kWarpLanes - 1) totals[thread / kWarpLanes] = before;
    before -= own;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < Config::kThreads / kWarpLanes; ++warp)
      if (warp < thread / kWarpLanes) before += totals[warp];
    if (thread == Config::kThreads - 1) count = (before + own) >> 16;
    for (int expert = first; expert < last; ++expert) first_of[expert] = before, before += load(expert);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int slot = thread + i * Config::kThreads, token = slot / routing.top_k, expert = expert_of[i];
      if (slot < slots) pair_of[slot] = static_cast<int16_t>(expert < 0 ? -1 : add(expert, token));
    }
    __syncthreads();
  }

  __device__ __forceinline__ int load(int expert) const {
    const int pairs = __popcll(tokens_of[expert]);
    return pairs | (pairs + Config::kTokens - 1) / Config::kTokens << 16;
  }
  // Tells the group of a pair of it; returns the pair's number.
  __device__ __forceinline__ int add(int expert, int token) {
    const uint64_t tokens = tokens_of[expert];
    const int position = __popcll(tokens & ((uint64_t{1} << token) - 1)), start = position / Config::kTokens * Config::kTokens;
    const int first_pair = first_of[expert] & 0xFFFF;
    DecodeGroup<Config::kTokens>& group = groups[(first_of[expert] >> 16) + position / Config::kTokens];
    group.tokens[position - start] = static_cast<uint8_t>(token);
    if (position == start) {
      group.expert = static_cast<int16_t>(expert);
      group.first_pair = static_cast<int16_t>(first_pair + start);
      group.count = min(__popcll(tokens) - start, Config::kTokens);
    }
    return first_pair + position;
  }
};

}  // namespace chord
