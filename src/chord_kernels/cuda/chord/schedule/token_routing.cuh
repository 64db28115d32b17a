// SPDX-License-Identifier: Apache-2.0
// Which expert a slot of a token is sent to, from the router's own tables.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

struct TokenRouting {
  const int32_t* ids;         // [tokens, top_k]; negative, too large or not in expert_map: nothing
  const int32_t* expert_map;  // [map_size] a global id's local expert or -1; null: ids are local
  const float* weights;       // [tokens, top_k]
  int32_t tokens;
  int32_t top_k;
  int32_t experts;   // local
  int32_t map_size;  // ids below this are known

  // -1: none here.
  __device__ __forceinline__ int expert(int64_t slot) const {
    const int id = ids[slot];
    if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(map_size)) return -1;
    const int local = expert_map ? expert_map[id] : id;
    return static_cast<uint32_t>(local) < static_cast<uint32_t>(experts) ? local : -1;
  }
};

}  // namespace chord
