# SPDX-License-Identifier: Apache-2.0
"""The kernels around the products, which have next to nothing to choose: alignment, packing, the weighted sum. Pure, as kernels.py is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

MOST_ALIGNED_EXPERTS = 8192  # counts of so many fit the shared memory that needs no asking for


@dataclass(frozen=True)
class _PlainPlan:
    """A kernel with nothing to choose but what its fields say."""

    arch: str

    ctas: ClassVar[int] = 1
    draws: ClassVar[bool] = False
    header: ClassVar[str]
    function: ClassVar[str]
    threads: ClassVar[int]
    smem_bytes: ClassVar[int] = 0  # beyond what is static

    @property
    def name(self) -> str:
        return f"{self.function}_{self.arch}"

    def constants(self) -> dict[str, int]:
        """The integers of its Config struct."""
        return {"kThreads": self.threads, "kCtas": self.ctas}

    def describe(self) -> dict[str, object]:
        return {"name": self.name, **asdict(self), "threads": self.threads}

    def why_illegal(self) -> str | None:
        """Why the kernel could not be built with these fields; None where it can."""


@dataclass(frozen=True)
class WeightedSumPlan(_PlainPlan):
    """The kernel that weighs and adds a token's rows (kernel/weighted_sum.cuh)."""

    header: ClassVar[str] = "chord/kernel/weighted_sum.cuh"
    function: ClassVar[str] = "weighted_sum"
    threads: ClassVar[int] = 128


@dataclass(frozen=True)
class PackPlan(_PlainPlan):
    """The kernel that packs INT4 weights of checkpoints (kernel/pack.cuh)."""

    header: ClassVar[str] = "chord/kernel/pack.cuh"
    function: ClassVar[str] = "pack_tiles"
    threads: ClassVar[int] = 128


@dataclass(frozen=True)
class AlignPlan(_PlainPlan):
    """The kernel that groups router ids by expert (kernel/align.cuh)."""

    experts: int  # at most
    header: ClassVar[str] = "chord/kernel/align.cuh"
    function: ClassVar[str] = "align_rows"
    threads: ClassVar[int] = 1024

    @property
    def name(self) -> str:
        return f"align_rows_e{self.experts}_{self.arch}"

    def constants(self) -> dict[str, int]:
        return {"kMostExperts": self.experts, **super().constants()}

    def why_illegal(self) -> str | None:
        return None if self.experts <= MOST_ALIGNED_EXPERTS else f"{self.experts} experts; alignment on a GPU has {MOST_ALIGNED_EXPERTS}"
