// SPDX-License-Identifier: Apache-2.0
// Which output a CTA computes, where CTAs draw their work, so that they end together whatever it takes: blocks have few token rows or
// many, and SMs are not equally far from memory.
#pragma once
#include "chord/schedule/pieces.cuh"
#include "chord/schedule/rows.cuh"

namespace chord {

// The strips of a CTA: the first by its number, the others from a counter in device memory, which is 0 before and after a launch.
// Every strip that is done is followed by one draw, so that the last draw is known. Thread 0 of the producer warpgroup draws, and tells
// the others through shared memory; all of its threads call these.
template <class Config>
struct DrawnSchedule {
  Storage<Config>& storage;
  int32_t* counter;
  int32_t number;  // thread 0: of the next strip; as it was drawn, where it was: what is done with it waits for it
  bool is_drawn = false;

  __device__ __forceinline__ DrawnSchedule(int blocks, int row_tiles, int strip_tiles, Storage<Config>& s, int32_t* c, int thread)
      : storage(s), counter(c), number(blockIdx.x) {
    if (thread == 0) storage.strips = Strips(blocks, row_tiles, strip_tiles, Config::kPanelTiles);
  }

  // Shortly before a strip is done: asks for the number of the next, which is there by the time of next(). The kernels before this one
  // may draw from the same counter until they are done.
  __device__ __forceinline__ void draw(Dependency& dependency, int thread) {
    number = storage.strips.count;
    is_drawn = number > static_cast<int>(gridDim.x);  // or every strip is a CTA's first
    if (!is_drawn) return;
    dependency.meet();
    if (thread == 0) number = draw_number(counter);
  }

  // The strip that was drawn; of no tiles: there is none.
  __device__ __forceinline__ Piece next(int thread) {
    if (thread == 0) {
      if (is_drawn && number == storage.strips.count - 1) *counter = 0;  // the last draw
      storage.drawn = storage.strips.at(number + (is_drawn ? static_cast<int>(gridDim.x) : 0));
    }
    named_barrier_sync(1 + Config::kConsumerGroups, kGroupThreads);
    const Piece strip = storage.drawn;
    named_barrier_sync(1 + Config::kConsumerGroups, kGroupThreads);
    return strip;
  }
};

}  // namespace chord
