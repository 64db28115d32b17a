// SPDX-License-Identifier: Apache-2.0
// Warp decode: a MoE layer of up to 64 tokens in two launches, organised by outputs.
//
//   warp_gate_up: hidden[pair, i] = silu(gate_i . x[token]) * (up_i . x[token])         pair: a (token, expert) of the routing
//   warp_down:    out[token, n] = sum over the token's slots of weight * (down_n . hidden[pair])
//
// Every CTA finds the same groups of pairs from the router's ids (schedule/decode_groups.cuh), so that a distinct expert is read once
// for up to eight tokens and nothing is sorted, padded, gathered or scattered by another kernel. Each warp streams its own weights
// (tile/decode_ring.cuh). Activations stay BF16; sums are FP32.
//
// gate_up: a unit is kBlocks blocks of 16 paired rows of a group (schedule/decode_units.cuh); a CTA's warps share its K, and one after the
// other adds up their parts. down: a CTA has units of kBlocks blocks of 16 outputs for all tokens; its warps take the groups in turn. The order of a
// sum depends on the shape alone.
//
// Of a layer with few bytes an SM both kernels share the SMs (kCtas of 2): gate_up calls down when its warps have kLastStages stages left, and
// down's weights are there when the last output of gate_up is.
#pragma once
#include "chord/epilogue/outputs.cuh"
#include "chord/schedule/decode_units.cuh"

namespace chord {

template <class Config>
constexpr int kDecodeWarps = Config::kThreads / kWarpLanes;

template <class Config>
struct alignas(128) DecodeStorage {
  uint8_t stages[kDecodeWarps<Config>][Config::kStages][DecodeStage<Config>::kBytes];
  DecodeGroups<Config> groups;
};

// A warp's way through its tasks: every task has the same number of stages, and the copies are kStages - 1 stages ahead of the sums. Where two
// kernels share the SMs all places are on their way: one is filled again as soon as it was added. Tasks: valid(), next(), group(), row(), row_of(i).
template <class Config, class Tasks>
struct DecodeStream {
  static constexpr bool kWhole = Config::kCtas > 1;
  static constexpr int kAhead = Config::kStages - !kWhole;
  const DecodeOperands& operands;
  Tasks ahead;  // of the copies
  DecodeSource<Config> source;
  uint32_t ring;  // of this warp
  int first_k, stages;
  int lane;
  int at = 0;  // the stage to be added next
  bool more;
  bool refill = true;  // the place before it; false: all are on their way

  __device__ __forceinline__ DecodeStream(DecodeStorage<Config>& storage, const DecodeOperands& o, const Tasks& tasks, int k, int k_tiles, int warp, int l)
      : operands(o), ahead(tasks), ring(shared_address(storage.stages[warp])), first_k(k), stages(k_tiles / Config::kKTiles), lane(l) {
    more = stages > 0 && ahead.valid();
    if (more) aim();
  }

  __device__ __forceinline__ void aim() {
    const auto group = ahead.group();
    source.aim({group.expert, ahead.row()}, first_k, stages, operands, group.count, [&](int i) { return ahead.row_of(i); }, lane);
  }

  // Copies the next stage to place `place`; none is left: nothing.
  template <bool kWeights, bool kActivations>
  __device__ __forceinline__ void fill(int place) {
    if (!more) return;
    source.template copy<kWeights, kActivations>(ring + place * DecodeStage<Config>::kBytes, operands.activations, lane);
    if (source.left > 0) return;
    ahead.next();
    more = ahead.valid();
    if (more) aim();
  }

  // The first stages, one after the other: the first one's activations do not queue behind the weights of all.
  __device__ __forceinline__ void begin() {
#pragma unroll 1
    for (int place = 0; place < kAhead; ++place) {
      fill<true, true>(place);
      copy_async_commit();
    }
  }
  // The same, of activations that are there after `wait`. Weights of kEarlyStages places are on their way before: activations queue behind them,
  // so that few stages would all be added after the last byte has come.
  template <class Wait>
  __device__ __forceinline__ void begin(const Wait& wait) {
    constexpr bool kAll = Config::kEarlyStages == Config::kStages;
    DecodeStream weights(*this);
#pragma unroll 1
    for (int place = 0; place < Config::kEarlyStages; ++place) weights.template fill<true, false>(place);
    wait();
#pragma unroll 1
    for (int place = 0; place < Config::kStages - 1; ++place) {
      fill<false, true>(place);
      copy_async_commit();
    }
    if constexpr (kAll || kWhole) fill<!kAll, true>(Config::kStages - 1);  // where not kWhole, add() commits it
    if constexpr (kWhole) copy_async_commit();
    refill = !kAll;
  }

  // Adds a task's stages, in order; when one is there, calls `before` with the number of those left, it among them.
  template <class Before>
  __device__ __forceinline__ void add(DecodeSums<Config>& sums, int rows, const Before& before) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      copy_async_wait<kAhead - 1>();
      __syncwarp();
      if constexpr (!kWhole) {
        if (refill) fill<true, true>(at == 0 ? Config::kStages - 1 : at - 1);  // whose sums are made
        refill = true;
        copy_async_commit();
      }
      before(stages - stage);
      sums.add(ring + at * DecodeStage<Config>::kBytes, rows, lane);
      if constexpr (kWhole) {
        __syncwarp();
        fill<true, true>(at);
        copy_async_commit();
      }
      at = at + 1 == Config::kStages ? 0 : at + 1;
    }
  }
};

template <class Config>
__device__ __forceinline__ void warp_gate_up(const DecodeOperands& operands, const TokenRouting& routing) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  constexpr int kWarps = kDecodeWarps<Config>;
  constexpr bool kBeside = Config::kCtas > 1;  // down's CTAs come to this one's SM while its warps still have kLastStages stages to add
  struct Storage {
    DecodeStorage<Config> common;
    typename GateUpUnits<Config>::Storage units;
    float4 parts[2][kWarps][Config::kBlocks][kWarpLanes];
  };
  static_assert(sizeof(Storage) <= Config::kSmemBytes, "plan and kernel disagree");
  auto& storage = *reinterpret_cast<Storage*>(shared_memory);
  const int lane = warp_lane(), warp = __shfl_sync(kFullMask, threadIdx.x / kWarpLanes, 0);

  const int stages = operands.k_tiles / Config::kKTiles;
  const int first_k = stages * warp / kWarps * Config::kKTiles, k_tiles = stages * (warp + 1) / kWarps * Config::kKTiles - first_k;
  const UnitDeal deal(operands.rows / Config::kBlocks, blockIdx.x, gridDim.x);
  routing.prefetch(threadIdx.x, Config::kThreads);
  storage.common.groups.begin(routing);
  grid_dependency_wait();  // ids and x
  storage.common.groups.find(routing);

  GateUpUnits<Config> tasks(storage.common.groups, storage.units, operands.counter, deal, stages / kWarps);
  DecodeStream<Config, GateUpUnits<Config>> stream(storage.common, operands, tasks, first_k, k_tiles, warp, lane);
  stream.begin();
  int later = kBeside && tasks.valid() ? tasks.later() : -1;  // units after this one
  if (!kBeside || (later + 1) * stream.stages <= Config::kLastStages) grid_launch_dependents();

  for (int turn = 0; tasks.valid(); tasks.next(), --later, ++turn) {
    tasks.draw();
    const auto group = tasks.group();
    const int row = tasks.row();
    DecodeSums<Config> sums;
    sums.clear();
    stream.add(sums, group.count, [&](int left) {
      if (kBeside && later * stream.stages + left <= Config::kLastStages) grid_launch_dependents();
    });
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block)
      storage.parts[turn % 2][warp][block][lane] = {sums.value(block, 0), sums.value(block, 1), sums.value(block, 2), sums.value(block, 3)};
    __syncthreads();
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if ((turn * Config::kBlocks + block) % kWarps != warp) continue;
      float total[4] = {};
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        const float4 value = storage.parts[turn % 2][part][block][lane];
        total[0] += value.x, total[1] += value.y, total[2] += value.z, total[3] += value.w;
      }
      // Rows g are gate rows, g + 8 their up rows.
      const int neuron = (row + block) * 8 + lane / 4, neurons = operands.rows * 8;
      const uint32_t pair = round_bf16x2(silu(total[0]) * total[2], silu(total[1]) * total[3]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = lane % 4 * 2 + i;
        if (token < group.count)
          *reinterpret_cast<int16_t*>(operands.outputs + (int64_t{group.first_pair + token} * neurons + neuron) * 2) =
              static_cast<int16_t>(pair >> i * 16);
      }
    }
  }
  tasks.end();
}

// A warp's groups, every kDecodeWarps-th, for each of a CTA's units of kBlocks blocks, every gridDim.x-th.
template <class Config>
struct DownTasks {
  using Group = DecodeGroup<Config::kTokens>;
  const DecodeGroups<Config>& groups;
  int warp, count;  // of groups
  int units, unit, index;

  __device__ __forceinline__ DownTasks(const DecodeGroups<Config>& g, int all_units, int w)
      : groups(g), warp(w), count(g.count), units(all_units), unit(static_cast<int>(blockIdx.x)), index(w) {}
  __device__ __forceinline__ bool valid() const { return unit < units && warp < count; }
  __device__ __forceinline__ void next() {
    index += kDecodeWarps<Config>;
    if (index >= count) index = warp, unit += static_cast<int>(gridDim.x);
  }
  __device__ __forceinline__ Group group() const { return groups.groups[index]; }
  __device__ __forceinline__ int row() const { return unit * Config::kBlocks; }
  __device__ __forceinline__ int row_of(int i) const { return groups.groups[index].first_pair + i; }
};

template <class Config>
__device__ __forceinline__ void warp_down(const DecodeOperands& operands, const TokenRouting& routing) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  constexpr int kUnitRows = Config::kBlocks * 16;
  struct Storage {
    DecodeStorage<Config> common;
    float weights[Config::kMostPairs];
    float products[Config::kMostPairs][kUnitRows];  // of every pair, with the rows of a unit
  };
  static_assert(sizeof(Storage) <= Config::kSmemBytes, "plan and kernel disagree");
  auto& storage = *reinterpret_cast<Storage*>(shared_memory);
  const int lane = warp_lane(), warp = __shfl_sync(kFullMask, threadIdx.x / kWarpLanes, 0);

  // warp_gate_up, which lets this kernel start, has waited for what wrote the routing.
  constexpr int kShare = (Config::kMostPairs + Config::kThreads - 1) / Config::kThreads;
  float slot_weights[kShare];  // asked for beside the ids: behind the first stages they would come after them
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int slot = threadIdx.x + i * Config::kThreads;
    slot_weights[i] = slot < routing.tokens * routing.top_k ? routing.weights[slot] : 0.0f;
  }
  storage.common.groups.begin(routing);
  storage.common.groups.find(routing);
#pragma unroll
  for (int i = 0; i < kShare; ++i)
    if (const int slot = threadIdx.x + i * Config::kThreads; slot < Config::kMostPairs) storage.weights[slot] = slot_weights[i];

  const int units = operands.rows / Config::kBlocks;
  DownTasks<Config> tasks(storage.common.groups, units, warp);
  DecodeStream<Config, DownTasks<Config>> stream(storage.common, operands, tasks, 0, operands.k_tiles, warp, lane);
  stream.begin([] {
    grid_dependency_wait();
    grid_launch_dependents();
  });

  for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
    for (; tasks.valid() && tasks.unit == unit; tasks.next()) {
      const auto group = tasks.group();
      DecodeSums<Config> sums;
      sums.clear();
      stream.add(sums, group.count, [](int) {});
#pragma unroll
      for (int block = 0; block < Config::kBlocks; ++block)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int token = lane % 4 * 2 + c % 2;
          if (token < group.count) storage.products[group.first_pair + token][block * 16 + c / 2 * 8 + lane / 4] = sums.value(block, c);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < routing.tokens * (kUnitRows / 2); i += Config::kThreads) {
      const int token = i / (kUnitRows / 2), row = i % (kUnitRows / 2) * 2;
      float total[2] = {};
#pragma unroll
      for (int choice = 0; choice < Config::kMostPairs / Config::kBatch; ++choice) {
        const int slot = token * routing.top_k + choice;
        const int pair = choice < routing.top_k ? storage.common.groups.pair_of[slot] : -1;
        if (pair < 0) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) total[j] = fmaf(storage.weights[slot], storage.products[pair][row + j], total[j]);
      }
      *reinterpret_cast<uint32_t*>(operands.outputs + ((int64_t{token} * operands.rows + unit * Config::kBlocks) * 16 + row) * 2) =
          round_bf16x2(total[0], total[1]);
    }
    __syncthreads();
  }
}

}  // namespace chord
