// SPDX-License-Identifier: Apache-2.0
// Fixed-width names. No CUDA or C++ header is included anywhere below cuda/: NVRTC alone compiles every kernel.
#pragma once

namespace chord {

using uint8_t = unsigned char;
using int16_t = short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

static_assert(sizeof(int64_t) == 8 && sizeof(void*) == 8);

constexpr int kWarpLanes = 32;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr uint32_t kFullMask = 0xFFFFFFFFu;

__device__ __forceinline__ int warp_lane() { return threadIdx.x % kWarpLanes; }

// Of the warp's lanes up to this one.
__device__ __forceinline__ int sum_through(int value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const int before = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

}  // namespace chord
