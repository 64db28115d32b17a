# SPDX-License-Identifier: Apache-2.0
"""Problem -> Plan: which kernel, with which tile and ring. Pure: no torch, no CUDA, no environment.

A `Problem` holds static numbers only, so that the choice never waits for the device. `why_not` states each legality rule once
and answers with a reason; ops, CLI, layer and tests all ask it. `buckets` lists the finite set of kernels a layer can need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from .errors import UnsupportedError

CONTRACTS = ("indexed", "contiguous", "masked")
EPILOGUES = ("store", "swiglu")
NUMERICS = ("bf16", "exact")
ARCHITECTURES = ("sm_90a",)

TILE_ROWS = 64  # of the packed layout, formats.W4A16
TILE_K = 64
TILE_BYTES = 2304
TOKEN_BYTES = TILE_K * 2

SMEM_LIMIT = 232_448  # bytes a CTA may have on Hopper
WIDTHS_PER_KERNEL = 4  # token widths compiled into one kernel; more make ptxas serialise the wgmma
BLOCK_ROWS = (8, 16, 32, 64, 128)
EXACT_BLOCK_ROWS = 32  # beyond, the second set of accumulators does not fit the registers
MAX_STAGES = 8
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


@dataclass(frozen=True)
class Plan:
    """One compiled kernel. Every field reaches its Config struct; nothing else does."""

    arch: str
    contract: str
    epilogue: str  # store | store_paired | swiglu
    numerics: str
    block_rows: int
    row_tiles: int
    consumer_groups: int
    k_tiles: int
    stages: int
    depth: int  # k-steps of A in flight (bf16 numerics); more than this and ptxas serialises the wgmma

    @property
    def width_step(self) -> int:
        return max(8, self.block_rows // WIDTHS_PER_KERNEL)

    @property
    def panel_tiles(self) -> int:
        return self.row_tiles * self.consumer_groups

    @property
    def threads(self) -> int:
        return 128 * (self.consumer_groups + 1)

    @property
    def producer_registers(self) -> int:
        return 40

    @property
    def consumer_registers(self) -> int:
        # The launch owns threads x (65536 / threads, in steps of 8) registers; setmaxnreg may only hand those around.
        at_launch = 65536 // self.threads // 8 * 8
        spare = (at_launch - self.producer_registers) // self.consumer_groups // 8 * 8
        return min(at_launch + spare, 232)

    @property
    def staging_bytes(self) -> int:
        """Of one token's outputs of one 64-row tile."""
        return 64 if self.epilogue == "swiglu" else 128

    @property
    def stage_bytes(self) -> int:
        return _align(self.k_tiles * (self.block_rows * TOKEN_BYTES + self.panel_tiles * TILE_BYTES), 1024)

    @property
    def smem_bytes(self) -> int:
        """sizeof(Storage<Config>), which the kernel asserts."""
        staging = self.consumer_groups * self.block_rows * (self.staging_bytes + 16)
        bookkeeping = self.stages * (16 + 8 + 8)
        return _align(self.stages * self.stage_bytes + _align(staging, 16) + bookkeeping, 1024)

    @property
    def name(self) -> str:
        return (
            f"tile_{self.contract}_{self.epilogue}_{self.numerics}_r{self.block_rows}_p{self.panel_tiles * TILE_ROWS}"
            f"_k{self.k_tiles * TILE_K}_s{self.stages}_d{self.depth}_{self.arch}"
        )

    def describe(self) -> dict[str, object]:
        derived = ("width_step", "panel_tiles", "threads", "stage_bytes", "smem_bytes")
        return {"name": self.name, **asdict(self), **{field: getattr(self, field) for field in derived}}

    def why_illegal(self) -> str | None:
        """Why the kernel could not be built with these fields; None where it can."""
        if self.block_rows not in BLOCK_ROWS:
            return f"a block of {self.block_rows} token rows; the kernel has {', '.join(map(str, BLOCK_ROWS))}"
        if self.numerics == "exact" and self.block_rows > EXACT_BLOCK_ROWS:
            return f"exact numerics with blocks of {self.block_rows} rows; its second accumulators fit up to {EXACT_BLOCK_ROWS}"
        if self.panel_tiles & (self.panel_tiles - 1):
            return f"panels of {self.panel_tiles} weight tiles; the schedule halves them, so a power of two is needed"
        if self.stages < 2:
            return f"{self.stages} stages; a ring needs 2"
        if self.smem_bytes > SMEM_LIMIT:
            return f"{self.smem_bytes} bytes of shared memory; a CTA has {SMEM_LIMIT}"
        return None


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def why_not(problem: Problem) -> str | None:
    """Why no kernel computes this problem; None where one does."""
    p = problem
    if p.arch not in ARCHITECTURES:
        return f"architecture {p.arch} has no kernel here; supported: {', '.join(ARCHITECTURES)} (Hopper: H100, H200, H20)"
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
    return None


def block_rows_for(rows_per_expert: float) -> int:
    """Token rows a block, from the average rows an expert: wide enough that few experts need a second block."""
    for block, average in ((8, 3.5), (32, 22.0), (64, 64.0)):
        if rows_per_expert <= average:
            return block
    return 128


def numerics_for(block_rows: int) -> str:
    """What `auto` computes: exact wherever its second set of accumulators fits."""
    return "exact" if block_rows <= EXACT_BLOCK_ROWS else "bf16"


def _choose_block(problem: Problem) -> int:
    if problem.block_rows is not None:
        return problem.block_rows
    block = block_rows_for(problem.rows_per_expert)
    if problem.numerics == "exact":
        block = min(block, EXACT_BLOCK_ROWS)
    if problem.contract == "contiguous":
        while problem.alignment % block:
            block //= 2
    return block


def make_plan(problem: Problem, pins: Mapping[str, int] | None = None) -> Plan:
    """The plan for a problem. `pins` (settings.schedule_pins) override fields for experiments. Raises UnsupportedError."""
    if reason := why_not(problem):
        raise UnsupportedError(reason)
    pins = dict(pins or {})
    block = pins.get("block_rows", _choose_block(problem)) if problem.block_rows is None else problem.block_rows
    numerics = problem.numerics if problem.numerics != "auto" else numerics_for(block)
    epilogue = "store_paired" if problem.epilogue == "store" and problem.paired else problem.epilogue
    # Exact: many warps with little state hide the latency of dequantization. BF16: few warps with large tiles.
    groups, row_tiles = (4, 1) if numerics == "exact" else (2, 2)
    if "panel_rows" in pins:
        row_tiles = max(1, pins["panel_rows"] // (groups * TILE_ROWS))
    most_k_tiles = max(pins["stage_k"] // TILE_K, 1) if "stage_k" in pins else _most_k_tiles(block, numerics)
    plan = Plan(
        arch=problem.arch,
        contract=problem.contract,
        epilogue=epilogue,
        numerics=numerics,
        block_rows=block,
        row_tiles=row_tiles,
        consumer_groups=groups,
        k_tiles=1,
        stages=pins.get("stages", 2),
        depth=3 if block == 64 else 2,
    )
    if reason := plan.why_illegal():
        raise UnsupportedError(f"{plan.name}: {reason}")
    # Long stages first: each costs a barrier round trip and, with exact numerics, a drain of the tensor cores. Then as many
    # of them as fit.
    depths = (t for t in range(most_k_tiles, 0, -1) if problem.k // TILE_K % t == 0)
    plan = next(longer for t in depths if (longer := replace(plan, k_tiles=t)).why_illegal() is None)
    while "stages" not in pins and plan.stages < MAX_STAGES and (more := replace(plan, stages=plan.stages + 1)).why_illegal() is None:
        plan = more
    return plan


def _most_k_tiles(block_rows: int, numerics: str) -> int:
    if numerics == "exact":
        return 8
    return 2 if block_rows == 128 else 4  # two long stages of 128 rows leave nothing in flight behind the one in use


def explain(problem: Problem, plan: Plan) -> list[str]:
    """Why this plan, a sentence each."""
    return [
        f"{problem.rows_per_expert:.1f} rows an expert on average: blocks of {plan.block_rows} token rows; the tensor cores run at "
        f"the next multiple of {plan.width_step} of a block's valid rows",
        f"{plan.numerics} numerics: "
        + (
            "no weight is rounded, each 32-group is scaled in FP32"
            if plan.numerics == "exact"
            else "weights are RN_bf16((code - 8) * scale)"
        ),
        f"{plan.panel_tiles * TILE_ROWS} weight rows a tile by {plan.consumer_groups} consumer warpgroups; "
        f"{tiles(problem, plan)} tiles at most on {problem.sm_count} SMs",
        f"{plan.stages} stages of {plan.k_tiles * TILE_K} k = {plan.smem_bytes} of {SMEM_LIMIT} bytes of shared memory",
    ]


def tiles(problem: Problem, plan: Plan) -> int:
    """An upper bound on output tiles, from static numbers."""
    blocks = problem.rows // plan.block_rows + min(problem.experts, problem.rows)
    return blocks * -(-problem.n // (plan.panel_tiles * TILE_ROWS))


def buckets(
    *, arch: str, experts: int, hidden: int, intermediate: int, contracts: tuple[str, ...] = CONTRACTS, sm_count: int = 132
) -> list[Plan]:
    """Every kernel a MoE layer of this shape can need: what warm-up, `chord compile` and CI build."""
    found: dict[str, Plan] = {}
    for problem in _layer_problems(arch, experts, hidden, intermediate, contracts, sm_count):
        if why_not(problem) is None:
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
                yield Problem(arch, sm_count, contract, epilogue, paired, experts, n, k, rows=experts * block, block_rows=block)


# Shapes whose kernels are shipped: CI compiles every one of them. (experts, hidden, intermediate)
SHIPPED_SHAPES = {
    "kimi-k2-ep8": (48, 7168, 2048),
    "kimi-k2-ep16": (24, 7168, 2048),
    "kimi-k2-ep32": (12, 7168, 2048),
    "kimi-k2-tp8": (384, 7168, 256),
}


def shipped(arch: str) -> list[Plan]:
    """The distinct kernels of every shipped shape."""
    plans = {}
    for experts, hidden, inter in SHIPPED_SHAPES.values():
        plans |= {plan.name: plan for plan in buckets(arch=arch, experts=experts, hidden=hidden, intermediate=inter)}
    return list(plans.values())
