// SPDX-License-Identifier: Apache-2.0
// From router ids to work for warp decode: every CTA finds the same groups, each an expert and up to kTokens of the tokens that chose
// it, without a sort, a padding or a kernel of its own.
//
// Pairs (token, expert) have dense numbers, those of a group in the order of its tokens. A token that names an expert twice is one pair.
#pragma once
#include "chord/arch/barrier.cuh"
#include "chord/arch/bits.cuh"
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
  uint64_t tokens_of[Config::kMostExperts];  // a bit each, up to 64; of few slots, the slots themselves
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
  static constexpr int kFew = 2 * kWarpLanes;
  __device__ __forceinline__ static bool few(const TokenRouting& routing) { return kPairs <= kFew || routing.tokens * routing.top_k <= kFew; }

  // Few slots, one or two a lane. Groups are in the order of their experts' first slots.
  __device__ __forceinline__ void find_by_warp(const TokenRouting& routing, int lane) {
    constexpr int kShare = kPairs > kWarpLanes ? 2 : 1;
    using Slots = BitsOf<kShare * kWarpLanes>;
    const int slots = routing.tokens * routing.top_k;
    int expert_of[kShare], token_of[kShare];
    load_slots(expert_of, token_of, routing, lane, kWarpLanes);
    Slots same[kShare];  // slots of the slot's expert
    if constexpr (kShare == 1) {
      same[0] = __match_any_sync(kFullMask, expert_of[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        if (expert_of[i] >= 0) tokens_of[expert_of[i]] = 0;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        if (expert_of[i] >= 0) atomicOr(reinterpret_cast<uint32_t*>(&tokens_of[expert_of[i]]) + i, 1u << lane);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kShare; ++i) same[i] = expert_of[i] >= 0 ? tokens_of[expert_of[i]] : 0;
    }
    Slots firsts = 0, of_earlier_tokens[kShare];  // firsts: slots whose token has not named their expert before
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      of_earlier_tokens[i] = bits_below<Slots>(token_of[i] * routing.top_k);
      const bool is_first = expert_of[i] >= 0 && !(same[i] & bits_below<Slots>(lane + i * kWarpLanes) & ~of_earlier_tokens[i]);
      firsts |= Slots{__ballot_sync(kFullMask, is_first)} << i * kWarpLanes;
    }
    int position[kShare], leader[kShare];  // among the pairs of the expert; its first slot
    Slots starts = 0;  // slots whose pair is the first of a group
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      position[i] = count_bits(same[i] & firsts & of_earlier_tokens[i]);
      leader[i] = first_bit(same[i]);
      const bool starts_one = firsts >> (lane + i * kWarpLanes) & 1 && position[i] % Config::kTokens == 0;
      starts |= Slots{__ballot_sync(kFullMask, starts_one)} << i * kWarpLanes;
    }
    Slots earlier[kShare];  // slots of the experts before
    less<kShare == 1 ? 5 : 6>(earlier, leader);
    if (lane == 0) count = count_bits(starts);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int slot = lane + i * kWarpLanes;
      if (slot >= slots) continue;
      const int first = count_bits(firsts & earlier[i]) | count_bits(starts & earlier[i]) << 16;
      pair_of[slot] = static_cast<int16_t>(expert_of[i] < 0 ? -1 : put(expert_of[i], first, token_of[i], position[i], count_bits(same[i] & firsts)));
    }
  }

  // Of every slot, those whose value, of kBits bits, is less than its own. Votes do not wait for each other, as the steps of a scan do.
  template <int kBits, class Slots, int kShare>
  __device__ __forceinline__ static void less(Slots (&less)[kShare], const int (&value)[kShare]) {
    Slots equal[kShare];  // in the bits so far
#pragma unroll
    for (int i = 0; i < kShare; ++i) less[i] = 0, equal[i] = ~Slots{0};
#pragma unroll
    for (int bit = kBits - 1; bit >= 0; --bit) {
      Slots set = 0;
#pragma unroll
      for (int i = 0; i < kShare; ++i) set |= Slots{__ballot_sync(kFullMask, value[i] >> bit & 1)} << i * kWarpLanes;
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        const bool own = value[i] >> bit & 1;
        if (own) less[i] |= equal[i] & ~set;
        equal[i] &= own ? set : ~set;
      }
    }
  }

  // A thread has a share of the slots and one of the experts.
  __device__ __forceinline__ void find_by_all(const TokenRouting& routing) {
    constexpr int kShare = (kPairs + Config::kThreads - 1) / Config::kThreads;
    const int thread = threadIdx.x, slots = routing.tokens * routing.top_k;
    int expert_of[kShare], token_of[kShare];
    load_slots(expert_of, token_of, routing, thread, Config::kThreads);
#pragma unroll
    for (int i = 0; i < kShare; ++i)
      if (expert_of[i] >= 0) atomicOr(reinterpret_cast<uint32_t*>(&tokens_of[expert_of[i]]) + token_of[i] / 32, 1u << token_of[i] % 32);
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
      const int slot = thread + i * Config::kThreads, expert = expert_of[i];
      if (slot < slots) pair_of[slot] = static_cast<int16_t>(expert < 0 ? -1 : add(expert, token_of[i]));
    }
    __syncthreads();
  }

  // Experts, -1 behind the last slot, and tokens of slots `first`, `first` + step, .... All ids are asked for before one is looked at, and the
  // tokens found while they are on their way.
  template <int kShare>
  __device__ __forceinline__ static void load_slots(int (&expert_of)[kShare], int (&token_of)[kShare], const TokenRouting& routing, int first,
                                                    int step) {
    const int slots = routing.tokens * routing.top_k;
#pragma unroll
    for (int i = 0; i < kShare; ++i) expert_of[i] = first + i * step < slots ? routing.ids[first + i * step] : -1;
#pragma unroll
    for (int i = 0; i < kShare; ++i) token_of[i] = static_cast<int>(static_cast<uint32_t>(first + i * step) / static_cast<uint32_t>(routing.top_k));
#pragma unroll
    for (int i = 0; i < kShare; ++i) expert_of[i] = routing.local(expert_of[i]);
  }

  // What an expert with so many pairs adds to the numbers of pairs and of groups.
  __device__ __forceinline__ static int load_of(int pairs) { return pairs | (pairs + Config::kTokens - 1) / Config::kTokens << 16; }
  __device__ __forceinline__ int load(int expert) const { return load_of(count_bits(tokens_of[expert])); }

  __device__ __forceinline__ int add(int expert, int token) {
    const uint64_t tokens = tokens_of[expert];
    return put(expert, first_of[expert], token, count_bits(tokens & bits_below<uint64_t>(token)), count_bits(tokens));
  }
  // Tells the group of an expert's pair number `position` of `pairs`; returns the pair's number among all. first: as in first_of.
  __device__ __forceinline__ int put(int expert, int first, int token, int position, int pairs) {
    const int start = position / Config::kTokens * Config::kTokens;
    const int first_pair = first & 0xFFFF;
    DecodeGroup<Config::kTokens>& group = groups[(first >> 16) + position / Config::kTokens];
    group.tokens[position - start] = static_cast<uint8_t>(token);
    if (position == start) {
      group.expert = static_cast<int16_t>(expert);
      group.first_pair = static_cast<int16_t>(first_pair + start);
      group.count = min(pairs - start, Config::kTokens);
    }
    return first_pair + position;
  }
};

}  // namespace chord
