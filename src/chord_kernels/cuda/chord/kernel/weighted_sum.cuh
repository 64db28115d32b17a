// SPDX-License-Identifier: Apache-2.0
// The end of a layer whose products are kernels of their own: out[t] = sum over slots of weights[t, s] * values[t * top_k + s], FP32 in
// slot order. Rows of slots that no expert here was sent are not read, so nobody has to clear them.
#pragma once
#include "chord/arch/bf16.cuh"
#include "chord/arch/grid.cuh"
#include "chord/schedule/token_routing.cuh"

namespace chord {

struct SumOperands {
  const uint8_t* values;  // [tokens * top_k, columns] BF16
  uint8_t* outputs;       // [tokens, columns] BF16
  int32_t columns;        // a multiple of 8
};

// A thread has 16 bytes of a token's row; a token has as many CTAs as cover its row.
template <class Config>
__device__ __forceinline__ void weighted_sum(const SumOperands& operands, const TokenRouting& routing) {
  constexpr int kValues = 8;   // of a piece
  constexpr int kAtOnce = 8;  // slots whose loads are on their way together
  const int pieces = operands.columns / kValues, ctas = (pieces + Config::kThreads - 1) / Config::kThreads;
  const int token = blockIdx.x / ctas, piece = blockIdx.x % ctas * Config::kThreads + threadIdx.x;
  grid_dependency_wait();
  grid_launch_dependents();
  if (piece >= pieces) return;

  const int64_t first = int64_t{token} * routing.top_k;
  float sum[kValues] = {};
  for (int start = 0; start < routing.top_k; start += kAtOnce) {
    uint4 value[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t slot = first + start + i;
      const bool used = start + i < routing.top_k && routing.expert(slot) >= 0;
      value[i] = used ? __ldcg(reinterpret_cast<const uint4*>(operands.values) + slot * pieces + piece) : uint4{0, 0, 0, 0};
      weight[i] = used ? routing.weights[slot] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t pairs[kValues / 2] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
      for (int j = 0; j < kValues / 2; ++j) {
        sum[2 * j] = fmaf(weight[i], low_bf16(pairs[j]), sum[2 * j]);
        sum[2 * j + 1] = fmaf(weight[i], high_bf16(pairs[j]), sum[2 * j + 1]);
      }
    }
  }
  reinterpret_cast<uint4*>(operands.outputs)[int64_t{token} * pieces + piece] = {
      round_bf16x2(sum[0], sum[1]), round_bf16x2(sum[2], sum[3]), round_bf16x2(sum[4], sum[5]), round_bf16x2(sum[6], sum[7])};
}

}  // namespace chord
