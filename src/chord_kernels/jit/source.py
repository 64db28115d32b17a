# SPDX-License-Identifier: Apache-2.0
"""Plan -> translation unit: one Config struct, one include, one entry. And every header it can reach, for the cache key."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..kernels import Plan, WarpDecodePlan

CUDA_ROOT = Path(__file__).parent.parent / "cuda"
ENTRY = "chord_gemm"

Argument = tuple[str, str, Callable[[int], Any]]  # name, C type, how the launcher passes it (cuda.core passes an int as 8 bytes)

# One argument schema a family of kernels.
_GROUPED: tuple[Argument, ...] = (
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
_WARP_DECODE: tuple[Argument, ...] = (
    ("activations", "const chord::uint8_t* __restrict__", int),
    ("weights", "const chord::uint8_t* __restrict__", int),
    ("outputs", "chord::uint8_t* __restrict__", int),
    ("ids", "const chord::int32_t* __restrict__", int),
    ("expert_map", "const chord::int32_t* __restrict__", int),
    ("routing_weights", "const float* __restrict__", int),
    ("rows", "chord::int32_t", ctypes.c_int32),
    ("k_tiles", "chord::int32_t", ctypes.c_int32),
    ("tokens", "chord::int32_t", ctypes.c_int32),
    ("top_k", "chord::int32_t", ctypes.c_int32),
    ("experts", "chord::int32_t", ctypes.c_int32),
    ("map_size", "chord::int32_t", ctypes.c_int32),
)

_CONTRACT = {"indexed": "kIndexed", "contiguous": "kContiguous", "masked": "kMasked"}
_EPILOGUE = {"store": "kStore", "store_paired": "kStorePaired", "swiglu": "kSwiglu"}
_NUMERICS = {"bf16": "kBf16", "exact": "kExact"}


_FORMAT = {"w4a16": "kInt4", "mxfp8": "kMxfp8"}


def arguments(plan: Plan) -> tuple[Argument, ...]:
    return _WARP_DECODE if isinstance(plan, WarpDecodePlan) else _GROUPED


def translation_unit(plan: Plan) -> str:
    if isinstance(plan, WarpDecodePlan):
        enums = {"Format kFormat": _FORMAT[plan.format]}
        call = """{activations, weights, outputs, rows, k_tiles},
                             {ids, expert_map, routing_weights, tokens, top_k, experts, map_size}"""
    else:
        enums = {
            "Contract kContract": _CONTRACT[plan.contract],
            "Epilogue kEpilogue": _EPILOGUE[plan.epilogue],
            "Numerics kNumerics": _NUMERICS[plan.numerics],
        }
        call = """{activations, weights, outputs, counter, row_tiles, k_tiles, weights_first},
                             {routing_rows, routing_experts, routing_counts, limit, max_blocks, top_k, num_experts}"""
    members = [f"static constexpr chord::{name} = chord::{name.split()[0]}::{value};" for name, value in enums.items()]
    members += [f"static constexpr int {name} = {value};" for name, value in plan.constants().items()]
    parameters = ", ".join(f"{c_type} {name}" for name, c_type, _ in arguments(plan))
    return f"""\
// {plan.name}
#include "{plan.header}"

struct Config {{
{"".join(f"  {member}" + chr(10) for member in members)}}};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) {ENTRY}({parameters}) {{
  chord::{plan.function}<Config>({call});
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
