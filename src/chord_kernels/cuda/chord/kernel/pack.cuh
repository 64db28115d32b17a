// SPDX-License-Identifier: Apache-2.0
// INT4 weights of checkpoints -> packed tiles (layout: formats.py), without scratch: loaders hold most of a device's memory, and torch's
// allocator need not give small pieces twice.
#pragma once
#include "chord/tile/storage.cuh"

namespace chord {

struct PackOperands {
  const uint8_t* words;   // [experts, N, K / 8] of 4 bytes: nibble j is k = 8 * word + j
  const uint8_t* scales;  // [experts, N, K / 32] BF16
  WeightTile* tiles;      // [experts, N / 64, K / 64]
  uint32_t* largest;      // bits of the largest magnitude of a scale in FP32; NaN is above all numbers
  int32_t row_tiles;      // N / 64
  int32_t k_tiles;        // K / 64
  int32_t paired;         // rows are [gate | up]; a block has 8 gate rows and the 8 up rows that belong to them
  int32_t scale_floor;    // bits of the BF16 number below whose magnitude a scale becomes 0
};

// A CTA packs a tile, a warp a block of 16 rows, a lane the 16 bytes that it will have as a lane of a product.
template <class Config>
__device__ __forceinline__ void pack_tiles(const PackOperands& operands) {
  static_assert(Config::kThreads == 4 * kWarpLanes);
  const int lane = warp_lane(), block = threadIdx.x / kWarpLanes, g = lane / 4, t = lane % 4;
  const int64_t row_tile = blockIdx.x / operands.k_tiles, expert = row_tile / operands.row_tiles;
  const int k_tile = blockIdx.x % operands.k_tiles, rows = operands.row_tiles * 64;
  const int row_block = static_cast<int>(row_tile % operands.row_tiles) * 4 + block;
  const int64_t first = expert * rows + (operands.paired ? row_block * 8 : row_block * 16) + g;  // of the checkpoint
  const int64_t source[2] = {first, first + (operands.paired ? rows / 2 : 8)};

  uint32_t packed[4] = {};   // a word a k-step
  uint32_t scales[2], largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4* words = reinterpret_cast<const uint4*>(operands.words) + (source[half] * operands.k_tiles + k_tile) * 2;
    const uint4 low = __ldg(words), high = __ldg(words + 1);
    const uint32_t eights[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};  // [k-step][k half] of 8 codes
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = eights[i] >> 8 * t;  // of neighbours along K, in the low byte
      const int at = 4 * (i % 2 * 2 + half);
      packed[i / 2] |= (pair & 0x0F) << at | (pair & 0xF0) << (12 + at);
    }
    const uint32_t both = __ldg(reinterpret_cast<const uint32_t*>(operands.scales) + source[half] * operands.k_tiles + k_tile);
    scales[half] = 0;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const uint32_t scale = both >> 16 * group & 0xFFFF, magnitude = scale & 0x7FFF;
      if (magnitude >= static_cast<uint32_t>(operands.scale_floor)) scales[half] |= scale << 16 * group;
      largest = max(largest, magnitude << 16);
    }
  }
  WeightBlock& into = operands.tiles[row_tile * operands.k_tiles + k_tile].blocks[block];
  reinterpret_cast<uint4*>(into.codes)[lane] = {packed[0], packed[1], packed[2], packed[3]};
  if (t == 0) reinterpret_cast<uint2*>(into.scales)[g] = {scales[0], scales[1]};
  largest = __reduce_max_sync(kFullMask, largest);
  if (lane == 0 && largest > *operands.largest) atomicMax(operands.largest, largest);
}

}  // namespace chord
