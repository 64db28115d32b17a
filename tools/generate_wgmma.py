# SPDX-License-Identifier: Apache-2.0
"""Write cuda/chord/arch/wgmma.cuh: one wrapper per token width, each with its own register list.

usage: python tools/generate_wgmma.py
"""

from pathlib import Path

WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
TARGET = Path(__file__).parent.parent / "src/chord_kernels/cuda/chord/arch/wgmma.cuh"

HEAD = """\
// SPDX-License-Identifier: Apache-2.0
// Written by tools/generate_wgmma.py: PTX names every accumulator register, so each width needs its own text.
// wgmma.mma_async m64nNk16, BF16 in, FP32 out: D[64, N] (+)= A[64, 16] from registers x B[16, N] from shared memory.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

// Orders this thread's register writes before the wgmma that follows.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most kGroups committed groups are still running.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// B as K-major rows of 128 bytes in the 128-byte swizzle: 8-row groups are 1024 bytes apart. Only the low word of the
// descriptor depends on the address, in units of 16 bytes, and no addition within shared memory carries out of it.
__device__ __forceinline__ uint32_t wgmma_operand_base(uint32_t address) {
  constexpr uint32_t kUnusedStride = 1u << 16;
  return kUnusedStride | (address >> 4);
}

__device__ constexpr uint32_t wgmma_operand_step(uint32_t bytes) { return bytes >> 4; }

__device__ __forceinline__ uint64_t wgmma_operand(uint32_t low) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kGroupStride | low;
}

template <int kWidth>
struct Wgmma {
  static_assert(kWidth < 0, "tools/generate_wgmma.py writes no wrapper of this width");
};
"""

BODY = """
template <>
struct Wgmma<{n}> {{
  __device__ __forceinline__ static void issue(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{flag}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
{registers}
        "{{%{a0}, %{a1}, %{a2}, %{a3}}}, %{b}, p, 1, 1, 0; }}"
{outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }}
}};
"""


def rows(items, per_row, separator):
    return [separator.join(items[i : i + per_row]) for i in range(0, len(items), per_row)]


def wrapper(n: int) -> str:
    count = n // 2
    names = rows([f"%{i}" for i in range(count)], 16, ", ")
    quoted = [f'        "{"{" if i == 0 else ""}{row}{"}, " if i == len(names) - 1 else ", "}"' for i, row in enumerate(names)]
    operands = rows([f'"+f"(d[{i}])' for i in range(count)], 8, ", ")
    outputs = [f"        {':' if i == 0 else ' '} {row}{',' if i < len(operands) - 1 else ''}" for i, row in enumerate(operands)]
    return BODY.format(
        n=n,
        flag=count + 5,
        b=count + 4,
        **{f"a{i}": count + i for i in range(4)},
        registers="\n".join(quoted),
        outputs="\n".join(outputs),
    )


def text() -> str:
    return HEAD + "".join(wrapper(n) for n in WIDTHS) + "\n}  // namespace chord\n"


if __name__ == "__main__":
    TARGET.write_text(text())
