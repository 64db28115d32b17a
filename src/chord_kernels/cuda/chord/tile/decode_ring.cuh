// SPDX-License-Identifier: Apache-2.0
// A warp's own ring of stages: some k-tiles of 16-row blocks of weights and the activations that they are multiplied with, copied by its
// lanes and read by none but itself, so that warps never wait for each other here.
#pragma once
#include "chord/arch/copy.cuh"
#include "chord/arch/mma.cuh"
#include "chord/tile/decode_blocks.cuh"

namespace chord {

struct DecodeOperands {
  const uint8_t* activations;  // [rows, K] BF16
  const uint8_t* weights;      // packed blocks
  uint8_t* outputs;
  int32_t* counter;  // 0 before and after every launch that draws work; no other launch uses it meanwhile
  int32_t rows;     // 16-row blocks of an expert
  int32_t k_tiles;  // K / 64
};

template <class Config>
struct DecodeStage {
  using Block = DecodeBlock<Config::kFormat>;
  static constexpr int kKTiles = Config::kKTiles;
  static constexpr int kRowBytes = kKTiles * kTokenBytes;
  static constexpr int kPitch = kRowBytes + 16;  // of an activation row: ldmatrix meets no bank twice
  // Weights that lie together in memory: blocks of a k-tile that are neighbours, or k-tiles of a block.
  static constexpr bool kTogether = Block::kBytes == Block::kKStride;
  static constexpr int kRuns = kTogether ? Config::kBlocks : kKTiles;
  static constexpr int kRunBytes = kTogether ? kKTiles * Block::kBytes : Config::kBlocks * Block::kBytes;
  static constexpr int kWeightBytes = kRuns * kRunBytes;
  // Whole lines: a copy whose 32-byte sectors are split in shared memory takes longer.
  static constexpr int kBytes = (kWeightBytes + Config::kTokens * kPitch + 127) / 128 * 128;
  static constexpr int kLaneBytes = kWarpLanes * 16;

  // Where block `block` of k-tile `k_tile` lies.
  __device__ __forceinline__ static constexpr uint32_t weight(int block, int k_tile) {
    return (kTogether ? block * kKTiles + k_tile : k_tile * Config::kBlocks + block) * Block::kBytes;
  }
};

// What a warp streams: all stages of kBlocks blocks of one expert over a part of K, and the same part of some activation rows.
struct DecodeTask {
  int32_t expert;
  int32_t row;  // the first block
};

// Where a lane's copies for the next stage come from.
template <class Config>
struct DecodeSource {
  using Stage = DecodeStage<Config>;
  static constexpr int kLanes = Stage::kRowBytes / 16;  // that an activation row's pieces take
  static_assert(kWarpLanes % kLanes == 0);
  static constexpr int kRowsAtOnce = kWarpLanes / kLanes;
  static constexpr int kRowCopies = (Config::kTokens + kRowsAtOnce - 1) / kRowsAtOnce;
  const uint8_t* weights;     // at the lane's first 16 bytes
  int64_t run;                // from one run to the next
  uint32_t rows[kRowCopies];  // of activations, every kRowsAtOnce-th, in 16-byte pieces, to the lane's piece; those from `count` on: undefined
  int32_t count;              // of rows
  int32_t left;               // stages

  // row_of(i): activation row i. The part of K begins with k-tile first_k.
  template <class RowOf>
  __device__ __forceinline__ void aim(const DecodeTask& task, int first_k, int stages, const DecodeOperands& operands, int rows_of_task,
                                      const RowOf& row_of, int lane) {
    using Block = typename Stage::Block;
    weights = operands.weights + Block::offset(task.expert, task.row, operands.rows, operands.k_tiles, first_k) + lane * 16;
    run = Stage::kTogether ? int64_t{operands.k_tiles} * Block::kBytes : Block::kKStride;
    count = rows_of_task, left = stages;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      if (const int row = i * kRowsAtOnce + lane / kLanes; row < count)
        rows[i] = (row_of(row) * operands.k_tiles + first_k) * (kTokenBytes / 16) + lane % kLanes;
  }

  template <bool kWeights, bool kActivations>
  __device__ __forceinline__ void copy(uint32_t to, const uint8_t* activations, int lane) {
    if constexpr (kWeights) {
#pragma unroll
      for (int r = 0; r < Stage::kRuns; ++r)
#pragma unroll
        for (int at = 0; at < Stage::kRunBytes; at += Stage::kLaneBytes)
          if (at + Stage::kLaneBytes <= Stage::kRunBytes || lane * 16 < Stage::kRunBytes - at)
            copy_async_16(to + r * Stage::kRunBytes + at + lane * 16, weights + r * run + at);
    }
    if constexpr (kActivations) {
      const uint32_t piece = to + Stage::kWeightBytes + lane / kLanes * Stage::kPitch + lane % kLanes * 16;
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i)
        if (i * kRowsAtOnce + lane / kLanes < count) copy_async_16(piece + i * kRowsAtOnce * Stage::kPitch, activations + int64_t{16} * rows[i]);
    }
    weights += Config::kKTiles * Stage::Block::kKStride;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) rows[i] += kLanes;
    --left;
  }
};

// Sums of a task: of every block rows g and g + 8, activation rows 2 t and 2 t + 1.
template <class Config>
struct DecodeSums {
  using Stage = DecodeStage<Config>;
  float sum[Config::kBlocks][4];
  uint32_t nan_found[Config::kBlocks];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      nan_found[block] = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[block][c] = 0.0f;
    }
  }

  // Adds a stage. Activation rows from `rows` on read another's, and count for nothing.
  __device__ __forceinline__ void add(uint32_t stage, int rows, int lane) {
    const uint32_t tokens = stage + Stage::kWeightBytes + (lane % 8 < rows ? lane % 8 : 0) * Stage::kPitch + lane / 8 * 16;
#pragma unroll
    for (int k_tile = 0; k_tile < Config::kKTiles; ++k_tile) {
      uint32_t b[2][4];  // of each 32-group
#pragma unroll
      for (int group = 0; group < 2; ++group) load_matrices(b[group], tokens + k_tile * kTokenBytes + group * (kTokenBytes / 2));
      float start[2][4];
      Stage::Block::prepare(b, start);
#pragma unroll
      for (int block = 0; block < Config::kBlocks; ++block) {
        typename Stage::Block weight;
        weight.load(stage + Stage::weight(block, k_tile), lane);
        weight.look_for_nan(nan_found[block]);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          float part[4];
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            uint32_t a[4];
            weight.decode(a, group * 2 + step);
            mma_m16n8k16(part, a, b[group] + step * 2, step ? part : start[group]);
          }
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (c % 2 < Config::kTokens) sum[block][c] = fmaf(weight.scale(c / 2, group), part[c], sum[block][c]);
        }
      }
    }
  }

  // In units of one, with NaN where a scale was.
  __device__ __forceinline__ float value(int block, int c) const { return sum[block][c] * Stage::Block::unit(nan_found[block], c / 2); }
};

}  // namespace chord
