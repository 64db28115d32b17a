# SPDX-License-Identifier: Apache-2.0
"""The kernels that can be compiled: every field of a plan reaches the Config struct of its translation unit, nothing else does.

Pure, as plan.py is, which chooses among them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from .plain_kernels import AlignPlan, PackPlan, WeightedSumPlan

TILE_ARCHITECTURES = ("sm_90a",)  # with wgmma: the tile kernels beside the stream kernels
ARCHITECTURES = (*TILE_ARCHITECTURES, "sm_100a", "sm_103a")
TILE_ROWS = 64  # of the packed layout, formats.W4A16
TILE_K = 64
TILE_BYTES = 2304
TOKEN_BYTES = TILE_K * 2

SMEM_OF_SM = 228 * 1024  # bytes, on Hopper and on Blackwell
CTA_SMEM = 1024  # that every CTA takes beside its own
WIDTHS_PER_KERNEL = 4  # token widths compiled into one tile kernel; more make ptxas serialise the wgmma
BLOCK_ROWS = (8, 16, 32, 64, 96, 128)
EXACT_BLOCK_ROWS = 32  # beyond, the second set of accumulators does not fit the registers
SMALL_BLOCK_ROWS = 16  # up to here outputs go straight to memory
STREAM_BLOCK_ROWS = (8, 16)  # mma.sync takes twice as long for twice the tokens, wgmma hardly longer
MAX_STAGES = 8
BLOCK_BYTES = {"w4a16": 576, "mxfp8": 1056}  # of 16 x 64 packed weights
MOST_TOP_K = 16  # of warp decode
MOST_EXPERTS = 1024
LEAST_DECODE_STAGES = 2
LEAST_PRODUCER_REGISTERS = 56


def smem_limit(ctas: int) -> int:
    """Bytes of shared memory a CTA may have where `ctas` of them share an SM."""
    return SMEM_OF_SM // ctas - CTA_SMEM


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class TilePlan:
    """A tile kernel (kernel/tile_sm90.cuh): wgmma on panels of 64-row weight tiles."""

    arch: str
    contract: str
    epilogue: str  # store | store_paired | swiglu
    numerics: str
    block_rows: int
    width_step: int  # the tensor cores run at block_rows, or one to three steps less, whatever covers a block's rows
    row_tiles: int
    consumer_groups: int
    k_tiles: int
    stages: int
    depth: int  # k-steps of A in flight (bf16 numerics); more than this and ptxas serialises the wgmma

    ctas: ClassVar[int] = 1  # an SM
    draws: ClassVar[bool] = True  # its CTAs draw their work from a counter
    header: ClassVar[str] = "chord/kernel/tile_sm90.cuh"
    function: ClassVar[str] = "tile_kernel"

    @property
    def least_width(self) -> int:
        return max(self.width_step, self.block_rows - (WIDTHS_PER_KERNEL - 1) * self.width_step)

    @property
    def panel_tiles(self) -> int:
        return self.row_tiles * self.consumer_groups

    @property
    def threads(self) -> int:
        return 128 * (self.consumer_groups + 1)

    @property
    def consumer_registers(self) -> int:
        # The launch owns threads x (65536 / threads, in steps of 8) registers; setmaxnreg may only hand those around.
        spare = (self._registers_at_launch - LEAST_PRODUCER_REGISTERS) // self.consumer_groups // 8 * 8
        return min(self._registers_at_launch + spare, 232)

    @property
    def producer_registers(self) -> int:
        """What the consumers leave."""
        return self._registers_at_launch * (self.consumer_groups + 1) - self.consumer_registers * self.consumer_groups

    @property
    def _registers_at_launch(self) -> int:
        return 65536 // self.ctas // self.threads // 8 * 8

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
        if self.block_rows <= SMALL_BLOCK_ROWS:
            end = (self.stages + 1) * self.block_rows * 4
        else:
            end = self.consumer_groups * self.block_rows * (self.staging_bytes + 16)
        pieces, strips, barriers = (self.stages + 1) * 16, _align(6 * 4 + 3 * 4, 8), self.stages * (8 + 8)  # strips: and the one drawn
        bookkeeping = pieces + strips + barriers
        return _align(self.stages * self.stage_bytes + _align(end, 16) + bookkeeping, 1024)

    @property
    def piece_rows(self) -> int:
        """Weight rows of the narrowest piece of work."""
        return TILE_ROWS

    @property
    def name(self) -> str:
        return (
            f"tile_{self.contract}_{self.epilogue}_{self.numerics}_r{self.block_rows}by{self.width_step}_g{self.consumer_groups}x{self.row_tiles}"
            f"_k{self.k_tiles * TILE_K}_s{self.stages}_d{self.depth}_{self.arch}"
        )

    def constants(self) -> dict[str, int]:
        """The integers of its Config struct."""
        return {
            "kBlockRows": self.block_rows,
            "kWidthStep": self.width_step,
            "kLeastWidth": self.least_width,
            "kRowTiles": self.row_tiles,
            "kConsumerGroups": self.consumer_groups,
            "kPanelTiles": self.panel_tiles,
            "kKTiles": self.k_tiles,
            "kStages": self.stages,
            "kDepth": self.depth,
            "kStagingBytes": self.staging_bytes,
            "kThreads": self.threads,
            "kCtas": self.ctas,
            "kProducerRegisters": self.producer_registers,
            "kConsumerRegisters": self.consumer_registers,
            "kSmemBytes": self.smem_bytes,
        }

    def describe(self) -> dict[str, object]:
        derived = ("least_width", "panel_tiles", "threads", "stage_bytes", "smem_bytes")
        return {"name": self.name, **asdict(self), **{field: getattr(self, field) for field in derived}}

    def why_illegal(self) -> str | None:
        """Why the kernel could not be built with these fields; None where it can."""
        if self.block_rows not in BLOCK_ROWS:
            return f"a block of {self.block_rows} token rows; the kernel has {', '.join(map(str, BLOCK_ROWS))}"
        if self.width_step < 8 or self.width_step % 8 or self.block_rows % self.width_step:
            return f"token widths in steps of {self.width_step}; multiples of 8 that divide a block of {self.block_rows} rows are computed"
        if self.numerics == "exact" and self.block_rows > EXACT_BLOCK_ROWS:
            return f"exact numerics with blocks of {self.block_rows} rows; its second accumulators fit up to {EXACT_BLOCK_ROWS}"
        if self.numerics == "exact" and self.row_tiles != 1:
            return f"exact numerics with {self.row_tiles} weight tiles a warpgroup; its second accumulators fit for one"
        if self.stages < 2:
            return f"{self.stages} stages; a ring needs 2"
        if self.smem_bytes > (limit := smem_limit(self.ctas)):
            return f"{self.smem_bytes} bytes of shared memory; a CTA has {limit}"
        return None


@dataclass(frozen=True)
class StreamPlan:
    """A stream kernel (kernel/stream.cuh): mma.sync; four warps for every part of K, or one for every 16-row block of a short K."""

    arch: str
    contract: str
    epilogue: str  # store | store_paired | swiglu
    numerics: str
    block_rows: int
    split: int  # parts of K, which share every stage; 1: all of K is one stage
    stages: int

    ctas: ClassVar[int] = 1  # an SM
    draws: ClassVar[bool] = False
    header: ClassVar[str] = "chord/kernel/stream.cuh"
    function: ClassVar[str] = "stream_kernel"
    k_tiles: ClassVar[int] = 4  # as stream_storage.cuh has it
    panel_tiles: ClassVar[int] = 4

    @property
    def warps(self) -> int:
        """Consumers."""
        return 4 * self.split if self.split > 1 else 4 * self.panel_tiles

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 2)  # and two producer warps

    @property
    def stage_bytes(self) -> int:
        return _align(self.k_tiles * self.panel_tiles * TILE_BYTES + self.block_rows * (self.k_tiles * TOKEN_BYTES + 16), 128)

    @property
    def smem_bytes(self) -> int:
        """sizeof(StreamStorage<Config>), which the kernel asserts."""
        partials = 4 * 4 * (self.split - 1) * self.block_rows // 8 * 32 * 16
        return _align(self.stages * self.stage_bytes + partials + self.stages * (8 + 8 + 8 + 20 + 4 * self.block_rows), 128)

    @property
    def piece_rows(self) -> int:
        """Weight rows of the narrowest piece of work."""
        return TILE_ROWS

    @property
    def name(self) -> str:
        return f"stream_{self.contract}_{self.epilogue}_{self.numerics}_r{self.block_rows}_k{self.split}_s{self.stages}_{self.arch}"

    def constants(self) -> dict[str, int]:
        """The integers of its Config struct."""
        return {
            "kBlockRows": self.block_rows,
            "kPanelTiles": self.panel_tiles,
            "kSplit": self.split,
            "kWarps": self.warps,
            "kCtas": self.ctas,
            "kStages": self.stages,
            "kThreads": self.threads,
            "kSmemBytes": self.smem_bytes,
        }

    def describe(self) -> dict[str, object]:
        derived = ("threads", "panel_tiles", "stage_bytes", "smem_bytes")
        return {"name": self.name, **asdict(self), **{field: getattr(self, field) for field in derived}}

    def why_illegal(self) -> str | None:
        """Why the kernel could not be built with these fields; None where it can."""
        if self.block_rows not in STREAM_BLOCK_ROWS:
            return f"a block of {self.block_rows} token rows; the stream kernel has {', '.join(map(str, STREAM_BLOCK_ROWS))}"
        if self.stages < 2:
            return f"{self.stages} stages; a ring needs 2"
        if self.smem_bytes > (limit := smem_limit(self.ctas)):
            return f"{self.smem_bytes} bytes of shared memory; a CTA has {limit}"
        return None


@dataclass(frozen=True)
class WarpDecodePlan:
    """A kernel of warp decode (kernel/warp_decode.cuh): one of the two launches of a whole layer."""

    arch: str
    product: str  # gate_up | down
    format: str  # w4a16 | mxfp8
    batch: int  # tokens at most
    top_k: int  # at most
    experts: int  # at most
    blocks: int  # 16-row blocks of weights that a warp has at once
    k_tiles: int  # of a stage
    stages: int  # of a warp's ring
    tokens: int  # of a group, at most: the columns of an mma.sync
    warps: int
    draws: bool  # gate_up's CTAs draw their work from a counter
    early: bool = False  # down asks for weights for its whole ring before it waits for gate_up, else for all but one stage
    ctas: int = 1  # an SM: 2 where one of down comes beside one of gate_up
    last_stages: int = 0  # that no warp of gate_up may have more of, for down's CTAs to come beside it

    header: ClassVar[str] = "chord/kernel/warp_decode.cuh"

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def function(self) -> str:
        return f"warp_{self.product}"

    @property
    def most_pairs(self) -> int:
        return self.batch * self.top_k

    @property
    def stage_bytes(self) -> int:
        """Of one warp: weights, then rows of activations 16 bytes apart."""
        activations = self.tokens * (self.k_tiles * TOKEN_BYTES + 16)
        return _align(self.weight_bytes + activations, 128)

    @property
    def weight_bytes(self) -> int:
        return self.k_tiles * self.blocks * BLOCK_BYTES[self.format]

    @property
    def smem_bytes(self) -> int:
        """At least what the kernel needs, which it asserts, and more than half of an SM's: one that is free early must not get two CTAs
        of a product while others have none. Of two products beside each other that holds for down, and gate_up has what is left."""
        if self.ctas > 1 and self.product == "gate_up":
            return self._needed_bytes
        return max(self._needed_bytes, smem_limit(2) + 128)

    def fits_beside(self, other: WarpDecodePlan) -> bool:
        return self.smem_bytes + other.smem_bytes + 2 * CTA_SMEM <= SMEM_OF_SM

    @property
    def _needed_bytes(self) -> int:
        ring = self.warps * self.stages * self.stage_bytes
        groups = self.experts * (8 + 4) + self.most_pairs * (2 + 16) + (self.warps + 1) * 4
        units = _align(8 * (self.stages + 3), 16)
        sums = 2 * self.warps * self.blocks * 512 if self.product == "gate_up" else self.most_pairs * 4 * (1 + self.blocks * 16)
        return _align(ring + _align(groups, 128) + units + sums, 128)

    @property
    def name(self) -> str:
        last = self.last_stages or ""
        return (
            f"warp_{self.product}_{self.format}_b{self.batch}x{self.top_k}_e{self.experts}_m{self.blocks}_k{self.k_tiles * TILE_K}"
            f"_s{self.stages}_w{self.warps}_n{self.tokens}{'_drawn' if self.draws else ''}{'_early' if self.early else ''}"
            f"{f'_beside{last}' if self.ctas > 1 else ''}_{self.arch}"
        )

    def constants(self) -> dict[str, int]:
        """The integers of its Config struct."""
        return {
            "kBatch": self.batch,
            "kTokens": self.tokens,
            "kMostPairs": self.most_pairs,
            "kMostExperts": self.experts,
            "kBlocks": self.blocks,
            "kKTiles": self.k_tiles,
            "kStages": self.stages,
            "kThreads": self.threads,
            "kDraws": int(self.draws),
            "kCtas": self.ctas,
            "kLastStages": self.last_stages,
            "kEarlyStages": self.stages - (not self.early),
            "kSmemBytes": self.smem_bytes,
        }

    def describe(self) -> dict[str, object]:
        derived = ("most_pairs", "stage_bytes", "smem_bytes")
        return {"name": self.name, **asdict(self), **{field: getattr(self, field) for field in derived}}

    def why_illegal(self) -> str | None:
        """Why the kernel could not be built with these fields; None where it can."""
        if self.stages < LEAST_DECODE_STAGES:
            return f"{self.stages} stages; a ring needs {LEAST_DECODE_STAGES}"
        if self.k_tiles * TOKEN_BYTES > 512:
            return f"{self.k_tiles} k-tiles a stage; a warp copies a row of up to 4 at once"
        if self.ctas > 1 and self.draws:
            return "units drawn from a counter; a CTA has to know how many it has left, for another to come beside it"
        if self.smem_bytes > (limit := smem_limit(1)):
            return f"{self.smem_bytes} bytes of shared memory; a CTA has {limit}"
        return None


Plan = TilePlan | StreamPlan | WarpDecodePlan | WeightedSumPlan | AlignPlan | PackPlan
