// SPDX-License-Identifier: Apache-2.0
// Global to shared copies that no register passes through.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

// `bytes` (a multiple of 16, both addresses 16-byte aligned) arrive on `barrier` when they have landed.
__device__ __forceinline__ void copy_bulk(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Asks for the line at `address` to be in L2; changes nothing that the program can see.
__device__ __forceinline__ void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// 16 bytes, past L1.
__device__ __forceinline__ void copy_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// This thread's copies so far are a group, also if there are none; wait until at most kGroups later groups are on their way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace chord
