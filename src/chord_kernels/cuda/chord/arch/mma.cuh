// SPDX-License-Identifier: Apache-2.0
// Warp-level tensor instructions, on every architecture from Ampere on. Lane L is (g, t) = (L / 4, L % 4) in all of them.
#pragma once
#include "chord/arch/types.cuh"

namespace chord {

// mma m16n8k16, BF16 in, FP32 out: D[16, 8] = A[16, 16] x B[16, 8] + C.
// a: rows g | g + 8 alternating, k 2 t then 2 t + 8; b: column g, k 2 t then 2 t + 8; c, d: row g columns 2 t, 2 t + 1, then row g + 8.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Four 8x8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&values)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address));
}

// The transpose of an 8x8 matrix of 16-bit elements that a warp holds as row g, columns 2 t and 2 t + 1.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t value) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(value));
  return transposed;
}

}  // namespace chord
