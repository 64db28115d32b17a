# SPDX-License-Identifier: Apache-2.0
"""Problem -> Plan: which kernel, with which tile and ring. Pure: no torch, no CUDA, no environment.

A `Problem` holds static numbers only, so that the choice never waits for the device. `why_not` states each legality rule once
and answers with a reason; ops, CLI, layer and tests all ask it. `buckets` lists the finite set of kernels a layer can need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .decode_plan import warp_decode_buckets, warp_decodes
from .errors import UnsupportedError
from .kernels import (
    ARCHITECTURES,
    BLOCK_ROWS,
    EXACT_BLOCK_ROWS,
    MAX_STAGES,
    MOST_TOP_K,
    SMALL_BLOCK_ROWS,
    STREAM_BLOCK_ROWS,
    TILE_ARCHITECTURES,
    TILE_K,
    TILE_ROWS,
    WIDTHS_PER_KERNEL,
    AlignPlan,
    PackPlan,
    Plan,
    StreamPlan,
    TilePlan,
    WeightedSumPlan,
    smem_limit,
)

CONTRACTS = ("indexed", "contiguous", "masked")
EPILOGUES = ("store", "swiglu")
NUMERICS = ("bf16", "exact")
EXACT_ROWS_PER_EXPERT = 16.0  # up to which blocks of 32 rows are as fast with exact numerics
SHORT_K = 256  # up to which storing a piece takes about as long as computing it
FEW_TILES_OF_SM = {8: 2, 16: 1}  # by token rows a block: up to which the stream kernel is faster
NEVER_RUN = ("sm_100a", "sm_103a")  # compiled, never run: no such card was at hand

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class Problem:
    """One grouped product. `rows`: routed rows, a static upper bound or expectation; `block_rows`: None lets the plan choose."""

    arch: str
    sm_count: int
    contract: str
    epilogue: str
    paired: bool
    experts: int
    n: int
    k: int
    rows: int
    block_rows: int | None = None
    alignment: int = 128
    numerics: str = "auto"
    source_rows: int = 0  # rows of x, where known

    @property
    def rows_per_expert(self) -> float:
        return self.rows / max(self.experts, 1)


def why_not(problem: Problem) -> str | None:
    """Why no kernel computes this problem; None where one does."""
    p = problem
    if p.arch not in ARCHITECTURES:
        return (
            f"architecture {p.arch} has no kernel here; supported: {', '.join(ARCHITECTURES)} "
            "(Hopper: H100, H200, H20; Blackwell: B200, B300, whose kernels were compiled and never run)"
        )
    if p.contract not in CONTRACTS:
        return f"row contract {p.contract!r}; give one of {', '.join(CONTRACTS)}"
    if p.epilogue not in EPILOGUES:
        return f"epilogue {p.epilogue!r} is not computed; give one of {', '.join(EPILOGUES)} (activations other than SwiGLU are refused)"
    if p.epilogue == "swiglu" and not p.paired:
        return "SwiGLU needs a gate/up weight; pack it with gate_up=True"
    if p.numerics not in (*NUMERICS, "auto"):
        return f"dequant {p.numerics!r}; give one of {', '.join(NUMERICS)} or auto"
    if p.n < 1 or p.n % TILE_ROWS:
        return f"N = {p.n} is not a positive multiple of {TILE_ROWS}"
    if p.k < 1 or p.k % TILE_K:
        return f"K = {p.k} is not a positive multiple of {TILE_K}"
    if p.experts < 1:
        return f"{p.experts} experts; give at least one"
    if p.rows > INT32_MAX:
        return f"{p.rows} rows; row numbers are 32 bits"
    if p.source_rows * p.k // 8 >= UINT32_MAX:
        return f"x of {p.source_rows} x {p.k}; the kernel counts its 16-byte pieces in 32 bits, up to {8 * UINT32_MAX} elements"
    if p.block_rows is not None and p.block_rows not in BLOCK_ROWS:
        return f"blocks of {p.block_rows} rows; align the routing to one of {', '.join(map(str, BLOCK_ROWS))}"
    if p.contract == "contiguous" and p.alignment % (p.block_rows or 8):
        return f"an alignment of {p.alignment} with blocks of {p.block_rows or 8} rows; a block would hold two experts"
    if p.numerics == "exact" and p.block_rows is not None and p.block_rows > EXACT_BLOCK_ROWS:
        return f"exact numerics with blocks of {p.block_rows} rows; align the routing to at most {EXACT_BLOCK_ROWS}"
    if p.arch not in TILE_ARCHITECTURES and p.block_rows not in (None, *STREAM_BLOCK_ROWS):
        return (
            f"blocks of {p.block_rows} rows on {p.arch}, which only has the stream kernel; "
            f"align the routing to one of {', '.join(map(str, STREAM_BLOCK_ROWS))}"
        )
    return None


def block_rows_for(rows_per_expert: float, arch: str = "sm_90a") -> int:
    """Token rows a block, from the average rows an expert: wide enough that few experts need a second block, and the widest where all
    do, unless two of 96 hold them."""
    widths = ((8, 4.0), (16, 10.0), (32, 22.0), (64, 64.0), (128, 128.0), (96, 192.0))
    block = next((block for block, average in widths if rows_per_expert <= average), 128)
    return block if arch in TILE_ARCHITECTURES else min(block, max(STREAM_BLOCK_ROWS))


def width_step_for(block_rows: int, rows_per_expert: float) -> int:
    """Token widths are so far apart. A kernel has four: fine ones up from half a block where an expert's rows are one block that is
    mostly fuller than that (of two blocks of 96 the second one is), else a quarter of the block and its multiples."""
    if block_rows == 96:
        return 16
    mostly_full = block_rows / 2 < rows_per_expert <= block_rows
    return max(8, block_rows // (8 if mostly_full else WIDTHS_PER_KERNEL))


def numerics_for(block_rows: int, rows_per_expert: float) -> str:
    """What `auto` computes: exact wherever it costs no time. Its FP32 scaling is work for every eight rows; rounding a weight is the
    same work for any number of them."""
    exact = block_rows <= SMALL_BLOCK_ROWS or (block_rows <= EXACT_BLOCK_ROWS and rows_per_expert <= EXACT_ROWS_PER_EXPERT)
    return "exact" if exact else "bf16"


def _choose_block(problem: Problem) -> int:
    if problem.block_rows is not None:
        return problem.block_rows
    block = block_rows_for(problem.rows_per_expert, problem.arch)
    if problem.numerics == "exact":
        block = min(block, EXACT_BLOCK_ROWS)
    if problem.contract == "contiguous":
        return max(rows for rows in BLOCK_ROWS if rows <= block and problem.alignment % rows == 0)
    return block


def make_plan(problem: Problem, pins: Mapping[str, int | str] | None = None) -> Plan:
    """The plan for a problem. `pins` (settings.schedule_pins) override fields for experiments. Raises UnsupportedError."""
    if reason := why_not(problem):
        raise UnsupportedError(reason)
    pins = dict(pins or {})
    block = pins.get("block_rows", _choose_block(problem)) if problem.block_rows is None else problem.block_rows
    numerics = problem.numerics if problem.numerics != "auto" else numerics_for(block, problem.rows_per_expert)
    epilogue = "store_paired" if problem.epilogue == "store" and problem.paired else problem.epilogue
    plan: Plan
    if _streams(problem, block, numerics, pins.get("kernel")):
        plan = _stream_plan(problem, epilogue, block, numerics, pins)
    else:
        plan = _tile_plan(problem, epilogue, block, numerics, pins)
    if "stages" in pins:
        return plan
    return next(p for stages in range(MAX_STAGES, 0, -1) if (p := replace(plan, stages=stages)).why_illegal() is None)


def _streams(problem: Problem, block: int, numerics: str, kernel: str | None) -> bool:
    """Whether the stream kernel computes it: where there is no other, where it is faster, or where it is pinned and can."""
    if problem.arch not in TILE_ARCHITECTURES:
        return True
    if block not in STREAM_BLOCK_ROWS or kernel == "tile":
        return False
    return kernel == "stream" or (numerics == "exact" and (_one_stage(problem.k) or _few_tiles(problem, block)))


def _one_stage(k: int) -> bool:
    """All of K is one stage: a piece is over before its parts would pay."""
    return k <= StreamPlan.k_tiles * TILE_K


def _few_tiles(problem: Problem, block: int) -> bool:
    """An SM has so few weight tiles that half the warpgroups of a tile kernel, or more, would be idle."""
    return min(problem.experts, problem.rows) * (problem.n // TILE_ROWS) <= FEW_TILES_OF_SM[block] * problem.sm_count


def _stream_plan(problem: Problem, epilogue: str, block: int, numerics: str, pins: Mapping[str, int | str]) -> StreamPlan:
    # Parts of K: as many warps as their sums leave registers for.
    split = 1 if _one_stage(problem.k) else {8: 4, 16: 2}[block]
    return _legal(StreamPlan(problem.arch, problem.contract, epilogue, numerics, block, split, stages=pins.get("stages", 2)))


def _legal(plan: Plan) -> Plan:
    if reason := plan.why_illegal():
        raise UnsupportedError(f"{plan.name}: {reason}")
    return plan


def _tile_plan(problem: Problem, epilogue: str, block: int, numerics: str, pins: Mapping[str, int | str]) -> TilePlan:
    # Many warps with little state hide the latency of dequantization, and two tiles a warpgroup halve what goes with every wgmma. Large
    # blocks take the latter, unless their pieces are so short that others must multiply while one stores.
    most_rows = 96 if problem.k <= SHORT_K else EXACT_BLOCK_ROWS
    groups, row_tiles = (4, 1) if block <= most_rows else (2, 2)
    if "panel_rows" in pins:
        row_tiles = max(1, pins["panel_rows"] // (groups * TILE_ROWS))
    most_k_tiles = max(pins["stage_k"] // TILE_K, 1) if "stage_k" in pins else _most_k_tiles(block, numerics)
    plan = _legal(
        TilePlan(
            arch=problem.arch,
            contract=problem.contract,
            epilogue=epilogue,
            numerics=numerics,
            block_rows=block,
            width_step=width_step_for(block, problem.rows_per_expert),
            row_tiles=row_tiles,
            consumer_groups=groups,
            k_tiles=1,
            stages=pins.get("stages", 2),
            depth=3 if block <= EXACT_BLOCK_ROWS else 2,
        )
    )
    # Long stages first: each costs a barrier round trip and, with exact numerics, a drain of the tensor cores.
    depths = (t for t in range(most_k_tiles, 0, -1) if problem.k // TILE_K % t == 0)
    return next(longer for t in depths if (longer := replace(plan, k_tiles=t)).why_illegal() is None)


def _most_k_tiles(block_rows: int, numerics: str) -> int:
    if numerics == "exact":
        return 8
    return 4 if block_rows <= 64 else 2  # two long stages of more rows leave nothing in flight behind the one in use


def explain(problem: Problem, plan: Plan) -> list[str]:
    """Why this plan, a sentence each."""
    rows = problem.rows_per_expert
    lines = [
        f"{rows:{'.1f' if rows >= 1 else '.2g'}} rows an expert on average: blocks of {plan.block_rows} token rows",
        *_why_kernel(problem, plan),
        _why_numerics(plan),
    ]
    if plan.arch in NEVER_RUN:
        lines.append(f"{plan.arch}: compiled, never run")
    return lines


def _why_kernel(problem: Problem, plan: Plan) -> list[str]:
    memory = f"{plan.stages} stages of {plan.k_tiles * TILE_K} k = {plan.smem_bytes} of {smem_limit(plan.ctas)} bytes of shared memory"
    panels = f"{tiles(problem, plan)} panels at most on {problem.sm_count} SMs; those that do not fill a last round are cut narrower"
    if isinstance(plan, TilePlan):
        groups = f"{plan.consumer_groups} consumer warpgroups"
        widths = range(plan.least_width, plan.block_rows + 1, plan.width_step)
        if plan.row_tiles == 1 and plan.block_rows > EXACT_BLOCK_ROWS:
            groups += ", some of which multiply while others store"
        return [
            f"tile kernel: wgmma, panels of {plan.panel_tiles * TILE_ROWS} weight rows by {groups}",
            f"the tensor cores run at {', '.join(map(str, widths))} rows, whichever covers a block's",
            f"{panels}; SMs draw them from a counter, so that they end together",
            memory,
        ]
    if plan.split == 1:
        kernel = f"stream kernel: mma.sync; K = {problem.k} is one stage, and each of {plan.warps} warps has a 16-row block of a piece"
        panels = "each SM has a run of weight tiles, level to one tile"
    elif _few_tiles(problem, plan.block_rows):
        most = FEW_TILES_OF_SM[plan.block_rows]
        kernel = f"stream kernel: mma.sync; an SM has at most {most} 64-row weight tiles, whose K {plan.warps} warps share"
    else:
        kernel = f"stream kernel: mma.sync, panels of {plan.panel_tiles * TILE_ROWS} weight rows by {plan.warps} warps that share K"
    return [kernel, panels, memory]


def _why_numerics(plan: Plan) -> str:
    if plan.numerics == "exact":
        return "exact numerics: no weight is rounded, each 32-group is scaled in FP32, which so few rows afford"
    return "bf16 numerics: weights are RN_bf16((code - 8) * scale); scaling sums in FP32 would be work for every eight rows"


def tiles(problem: Problem, plan: Plan) -> int:
    """An upper bound on output tiles, from static numbers."""
    blocks = problem.rows // plan.block_rows + min(problem.experts, problem.rows)
    return blocks * -(-problem.n // (plan.panel_tiles * TILE_ROWS))


def buckets(
    *,
    arch: str,
    experts: int,
    hidden: int,
    intermediate: int,
    contracts: tuple[str, ...] = CONTRACTS,
    sm_count: int = 132,
    unfused: bool = True,
) -> list[Plan]:
    """Every kernel that the row contracts of a MoE layer of this shape can need. unfused: gate/up without SwiGLU too."""
    found: dict[str, Plan] = {}
    for problem in _layer_problems(arch, experts, hidden, intermediate, contracts, sm_count):
        if why_not(problem) is None and (unfused or problem.epilogue == "swiglu" or not problem.paired):
            plan = make_plan(problem)
            found[plan.name] = plan
    return list(found.values())


def _layer_problems(arch: str, experts: int, hidden: int, inter: int, contracts: tuple[str, ...], sm_count: int) -> Iterator[Problem]:
    for contract in contracts:
        for block in BLOCK_ROWS:
            for epilogue, paired, n, k in (
                ("swiglu", True, 2 * inter, hidden),
                ("store", True, 2 * inter, hidden),
                ("store", False, hidden, inter),
            ):
                # From few tiles through half-full blocks to full ones: wherever the choice turns.
                for rows in (1, experts * block // 2, experts * block):
                    yield Problem(arch, sm_count, contract, epilogue, paired, experts, n, k, rows, block_rows=block)


# Shapes whose kernels are shipped: CI compiles every one of them. (experts, hidden, intermediate)
SHIPPED_SHAPES = {
    "kimi-k2-ep8": (48, 7168, 2048),
    "kimi-k2-ep16": (24, 7168, 2048),
    "kimi-k2-ep32": (12, 7168, 2048),
    "kimi-k2-tp8": (384, 7168, 256),
}
SHIPPED_MXFP8_SHAPES = {
    "qwen3-30b": (128, 2048, 768),
    "qwen3-235b": (128, 4096, 1536),
}


def layer_kernels(
    arch: str,
    format_name: str,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    contracts: tuple[str, ...] = CONTRACTS,
    sm_count: int = 132,
    top_k: int | None = None,
    unfused: bool = True,
) -> list[Plan]:
    """Every kernel that a layer's batches can need: row contracts of INT4 experts and their weighted sum, and warp decode. What `chord
    compile` and CI build; a layer's warm-up leaves gate/up without SwiGLU out, which only the ops offer. top_k: None for any."""
    shape = {"experts": experts, "hidden": hidden, "intermediate": intermediate, "sm_count": sm_count}
    plans: list[Plan] = []
    if format_name == "w4a16":
        plans += buckets(arch=arch, contracts=contracts, unfused=unfused, **shape)
        plans += [PackPlan(arch), WeightedSumPlan(arch), align_plan(arch, experts)]
    if warp_decodes(format_name, 1, 1, experts, hidden=hidden, sm_count=sm_count):
        plans += warp_decode_buckets(arch, format_name, top_ks=(8, MOST_TOP_K) if top_k is None else (top_k,), **shape)
    return plans


def align_plan(arch: str, experts: int) -> AlignPlan:
    """The kernel that aligns the routing of so many experts of this rank."""
    return AlignPlan(arch, max(64, 1 << (experts - 1).bit_length()))


def shipped(arch: str) -> list[Plan]:
    """The distinct kernels of every shipped shape."""
    plans: dict[str, Plan] = {}
    for format_name, shapes in (("w4a16", SHIPPED_SHAPES), ("mxfp8", SHIPPED_MXFP8_SHAPES)):
        for experts, hidden, inter in shapes.values():
            needed = layer_kernels(arch, format_name, experts=experts, hidden=hidden, intermediate=inter, top_k=8)
            plans |= {plan.name: plan for plan in needed}
    return list(plans.values())
