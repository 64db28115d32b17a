# SPDX-License-Identifier: Apache-2.0
"""Plan -> translation unit: one Config struct, one include, one entry. And every header it can reach, for the cache key."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..kernels import AlignPlan, PackPlan, Plan, WarpDecodePlan, WeightedSumPlan

CUDA_ROOT = Path(__file__).parent.parent / "cuda"
ENTRY = "chord_gemm"

Argument = tuple[str, str, Callable[[int], Any]]  # name, C type, how the launcher passes it (cuda.core passes an int as 8 bytes)


def _pointers(c_type: str, *names: str) -> tuple[Argument, ...]:
    return tuple((name, f"{c_type}* __restrict__", int) for name in names)


def _counts(*names: str) -> tuple[Argument, ...]:
    return tuple((name, "chord::int32_t", ctypes.c_int32) for name in names)


_BYTES = "const chord::uint8_t"
_OPERANDS = (
    *_pointers(_BYTES, "activations", "weights"),
    *_pointers("chord::uint8_t", "outputs"),
    *_pointers("chord::int32_t", "counter"),
)
# A router's tables and what they are of (schedule/token_routing.cuh).
_ROUTER_TABLES = (*_pointers("const chord::int32_t", "ids", "expert_map"), *_pointers("const float", "routing_weights"))
_ROUTER_COUNTS = _counts("tokens", "top_k", "experts", "map_size")

# One argument schema a family of kernels.
_GROUPED = (
    *_OPERANDS,
    *_pointers("const chord::int32_t", "routing_rows", "routing_experts", "routing_counts"),
    *_counts("row_tiles", "k_tiles", "weights_first", "limit", "max_blocks", "top_k", "num_experts"),
)
_WARP_DECODE = (*_OPERANDS, *_ROUTER_TABLES, *_counts("rows", "k_tiles"), *_ROUTER_COUNTS)
_WEIGHTED_SUM = (
    *_pointers(_BYTES, "values"),
    *_pointers("chord::uint8_t", "outputs"),
    *_ROUTER_TABLES,
    *_counts("columns"),
    *_ROUTER_COUNTS,
)
_ALIGN = (
    *_pointers("chord::int32_t", "sorted_ids", "expert_ids", "padded"),
    *_ROUTER_TABLES[:2],
    *_counts("block_rows"),
    *_ROUTER_COUNTS,
)
_PACK = (
    *_pointers(_BYTES, "words", "scales"),
    *_pointers("chord::WeightTile", "tiles"),
    *_pointers("chord::uint32_t", "largest"),
    *_counts("row_tiles", "k_tiles", "paired", "scale_floor"),
)

_CONTRACT = {"indexed": "kIndexed", "contiguous": "kContiguous", "masked": "kMasked"}
_EPILOGUE = {"store": "kStore", "store_paired": "kStorePaired", "swiglu": "kSwiglu"}
_NUMERICS = {"bf16": "kBf16", "exact": "kExact"}
_FORMAT = {"w4a16": "kInt4", "mxfp8": "kMxfp8"}
_TOKEN_ROUTING = "{ids, expert_map, routing_weights, tokens, top_k, experts, map_size}"


def arguments(plan: Plan) -> tuple[Argument, ...]:
    if isinstance(plan, WarpDecodePlan):
        return _WARP_DECODE
    if isinstance(plan, AlignPlan):
        return _ALIGN
    if isinstance(plan, PackPlan):
        return _PACK
    return _WEIGHTED_SUM if isinstance(plan, WeightedSumPlan) else _GROUPED


def _enums_and_operands(plan: Plan) -> tuple[dict[str, str], tuple[str, ...]]:
    """The enumerations of the Config struct, and how the entry's parameters become the structs of the kernel."""
    if isinstance(plan, WarpDecodePlan):
        return {"Format kFormat": _FORMAT[plan.format]}, ("{activations, weights, outputs, counter, rows, k_tiles}", _TOKEN_ROUTING)
    if isinstance(plan, WeightedSumPlan):
        return {}, ("{values, outputs, columns}", _TOKEN_ROUTING)
    if isinstance(plan, PackPlan):
        return {}, ("{words, scales, tiles, largest, row_tiles, k_tiles, paired, scale_floor}",)
    if isinstance(plan, AlignPlan):
        return {}, ("{sorted_ids, expert_ids, padded, block_rows}", "{ids, expert_map, nullptr, tokens, top_k, experts, map_size}")
    enums = {
        "Contract kContract": _CONTRACT[plan.contract],
        "Epilogue kEpilogue": _EPILOGUE[plan.epilogue],
        "Numerics kNumerics": _NUMERICS[plan.numerics],
    }
    return enums, (
        "{activations, weights, outputs, counter, row_tiles, k_tiles, weights_first}",
        "{routing_rows, routing_experts, routing_counts, limit, max_blocks, top_k, num_experts}",
    )


def translation_unit(plan: Plan) -> str:
    enums, operands = _enums_and_operands(plan)
    members = [f"static constexpr chord::{name} = chord::{name.split()[0]}::{value};" for name, value in enums.items()]
    members += [f"static constexpr int {name} = {value};" for name, value in plan.constants().items()]
    parameters = ", ".join(f"{c_type} {name}" for name, c_type, _ in arguments(plan))
    return f"""\
// {plan.name}
#include "{plan.header}"

struct Config {{
{"".join(f"  {member}" + chr(10) for member in members)}}};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtas) {ENTRY}({parameters}) {{
  chord::{plan.function}<Config>({", ".join(operands)});
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
