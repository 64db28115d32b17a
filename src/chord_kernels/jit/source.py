# SPDX-License-Identifier: Apache-2.0
"""Plan -> translation unit: one Config struct, one include, one entry. And every header it can reach, for the cache key."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from pathlib import Path

from ..kernels import Plan

CUDA_ROOT = Path(__file__).parent.parent / "cuda"
ENTRY = "chord_gemm"

# The one argument schema: name, C type, how the launcher passes it (cuda.core passes an int as 8 bytes).
ARGUMENTS = (
    ("activations", "const chord::uint8_t* __restrict__", int),
    ("weights", "const chord::uint8_t* __restrict__", int),
    ("outputs", "chord::uint8_t* __restrict__", int),
    ("counter", "chord::int32_t* __restrict__", int),
    ("routing_rows", "const chord::int32_t* __restrict__", int),
    ("routing_experts", "const chord::int32_t* __restrict__", int),
    ("routing_counts", "const chord::int32_t* __restrict__", int),
    ("row_tiles", "chord::int32_t", ctypes.c_int32),
    ("k_tiles", "chord::int32_t", ctypes.c_int32),
    ("weights_first", "chord::int32_t", ctypes.c_int32),
    ("limit", "chord::int32_t", ctypes.c_int32),
    ("max_blocks", "chord::int32_t", ctypes.c_int32),
    ("top_k", "chord::int32_t", ctypes.c_int32),
    ("num_experts", "chord::int32_t", ctypes.c_int32),
)

_CONTRACT = {"indexed": "kIndexed", "contiguous": "kContiguous", "masked": "kMasked"}
_EPILOGUE = {"store": "kStore", "store_paired": "kStorePaired", "swiglu": "kSwiglu"}
_NUMERICS = {"bf16": "kBf16", "exact": "kExact"}


def translation_unit(plan: Plan) -> str:
    constants = "\n".join(f"  static constexpr int {name} = {value};" for name, value in plan.constants().items())
    parameters = ", ".join(f"{c_type} {name}" for name, c_type, _ in ARGUMENTS)
    return f"""\
// {plan.name}
#include "{plan.header}"

struct Config {{
  static constexpr chord::Contract kContract = chord::Contract::{_CONTRACT[plan.contract]};
  static constexpr chord::Epilogue kEpilogue = chord::Epilogue::{_EPILOGUE[plan.epilogue]};
  static constexpr chord::Numerics kNumerics = chord::Numerics::{_NUMERICS[plan.numerics]};
{constants}
}};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) {ENTRY}({parameters}) {{
  chord::{plan.function}<Config>({{activations, weights, outputs, counter, row_tiles, k_tiles, weights_first}},
                             {{routing_rows, routing_experts, routing_counts, limit, max_blocks, top_k, num_experts}});
}}
"""


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@lru_cache(maxsize=1)
def _header_texts() -> dict[str, str]:
    return {path.relative_to(CUDA_ROOT).as_posix(): path.read_text() for path in sorted(CUDA_ROOT.rglob("*.cuh"))}


def reachable_headers(text: str) -> dict[str, str]:
    """Path under cuda/ -> content of every header that `text` includes, directly or not."""
    headers, found, queue = _header_texts(), {}, _INCLUDE.findall(text)
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = headers[name]
            queue += _INCLUDE.findall(headers[name])
    return dict(sorted(found.items()))
