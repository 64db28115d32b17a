// SPDX-License-Identifier: Apache-2.0
// Which expert a slot of a token is sent to, from the router's own tables.
#pragma once
#include "chord/arch/copy.cuh"

namespace chord {

struct TokenRouting {
  const int32_t* ids;         // [tokens, top_k]; negative, too large or not in expert_map: nothing
  const int32_t* expert_map;  // [map_size] a global id's local expert or -1; null: ids are local
  const float* weights;       // [tokens, top_k]
  int32_t tokens;
  int32_t top_k;
  int32_t experts;   // local
  int32_t map_size;  // ids below this are known

  // Asks for the tables to be in L2; may come before what writes them is done, and changes nothing that the program can see.
  __device__ __forceinline__ void prefetch(int thread, int threads) const {
    constexpr int kLine = 128 / sizeof(int32_t);
    for (int entry = thread * kLine; entry < tokens * top_k; entry += threads * kLine) prefetch_line(ids + entry), prefetch_line(weights + entry);
    if (expert_map)
      for (int entry = thread * kLine; entry < map_size; entry += threads * kLine) prefetch_line(expert_map + entry);
  }
  // The local expert of an id; -1: none here.
  __device__ __forceinline__ int local(int id) const {
    if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(map_size)) return -1;
    const int mapped = expert_map ? expert_map[id] : id;
    return static_cast<uint32_t>(mapped) < static_cast<uint32_t>(experts) ? mapped : -1;
  }
  __device__ __forceinline__ int expert(int64_t slot) const { return local(ids[slot]); }
};

}  // namespace chord
