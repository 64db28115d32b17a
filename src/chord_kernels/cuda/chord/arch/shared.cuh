// SPDX-License-Identifier: Apache-2.0
// Shared memory by 32-bit address. A generic pointer would compile to LD, which first finds out which memory it means.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

__device__ __forceinline__ int32_t load_shared_4(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared_4(uint32_t address, int32_t value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// stmatrix with .trans: a lane's two values are neighbours in a column, so memory rows are the fragment's columns.
// Lanes 8i..8i+7 give the row addresses of matrix i.
template <int kMatrices>
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&values)[kMatrices]) {
  if constexpr (kMatrices == 1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(values[0]) : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(values[0]),
                 "r"(values[1])
                 : "memory");
  } else {
    static_assert(kMatrices == 4, "stmatrix stores 1, 2 or 4 matrices");
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
                 "r"(values[1]), "r"(values[2]), "r"(values[3])
                 : "memory");
  }
}

}  // namespace chord
