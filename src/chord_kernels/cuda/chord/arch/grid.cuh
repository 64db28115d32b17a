// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch, draws from a counter, register hand-over between warpgroups, and the trap.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

// Returns when every kernel this one depends on has finished and flushed; at once if launched without the attribute.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Every warp of a warpgroup executes these. The sum over warpgroups must fit what the launch allocated, or they wait forever.
template <int kRegisters>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// Adds one to a number in device memory and returns what it was, which is waited for where it is used. An addition would be compiled to one for
// the warp, whose result is shuffled to its threads at once.
__device__ __forceinline__ int32_t draw_number(int32_t* counter) {
  int32_t number;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(number) : "l"(counter) : "memory");
  return number;
}

}  // namespace chord
