# SPDX-License-Identifier: Apache-2.0
"""Which kernels warp decode of a layer takes. Pure, as plan.py is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .kernels import (
    ARCHITECTURES,
    BLOCK_BYTES,
    LEAST_DECODE_STAGES,
    MOST_EXPERTS,
    MOST_TOP_K,
    TILE_ARCHITECTURES,
    TILE_K,
    TILE_ROWS,
    WarpDecodePlan,
)

WARP_DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
WARP_DECODE_PRODUCTS = ("gate_up", "down")
# Of INT4, where an alignment, two products and a sum take as long: beyond, groups are read again for every four or eight of an expert's
# tokens, or are many.
WARP_DECODE_ROWS_PER_EXPERT = 3.5
WARP_DECODE_SLOTS = 512  # of this rank
_SLOTS_OF_FEW_UNITS = 128  # the same, where units of down leave a fifth of the SMs idle
_IN_FLIGHT = 40 << 10  # bytes of weights an SM; with more, copies hold up the loads from shared memory that they share a path with
_DRAWN_STAGES = 40  # a CTA's of gate/up, from which on its units are drawn: levels their ends, and costs up to 0.9 us
_SHORT_K = 512  # of INT4 down
_DOWN_STAGE = 4  # blocks of 16 x 64 at least, that a warp of down has at once
_BESIDE_BYTES = 600 << 10  # of a layer, an SM: up to here waiting between the products costs more than rings in half the memory
_ARRIVAL_BYTES = {"w4a16": 128 << 10, "mxfp8": 168 << 10}  # that an SM still has to add when down is called
_BESIDE_STAGES = 3  # of down's ring
_MANY_RINGS = 3  # of down's stages, beyond which its whole ring is asked for before gate/up is waited for


def why_not_warp_decode(arch: str, format_name: str, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int) -> str | None:
    """Why warp decode does not compute this layer; None where it does."""
    if arch not in ARCHITECTURES:
        return f"architecture {arch} has no kernel here; supported: {', '.join(ARCHITECTURES)}"
    if format_name not in BLOCK_BYTES:
        return f"weights in {format_name}; give one of {', '.join(BLOCK_BYTES)}"
    if not 0 <= tokens <= WARP_DECODE_BATCHES[-1]:
        return f"{tokens} tokens; warp decode takes up to {WARP_DECODE_BATCHES[-1]}, larger batches go to MoELayer's other path"
    if not 1 <= top_k <= MOST_TOP_K:
        return f"top_k = {top_k}; warp decode takes 1 to {MOST_TOP_K}"
    if not 1 <= experts <= MOST_EXPERTS:
        return f"{experts} experts; warp decode takes 1 to {MOST_EXPERTS} on a GPU"
    if hidden < 64 or hidden % 64 or intermediate < 64 or intermediate % 64:
        return f"hidden size {hidden}, intermediate size {intermediate}; both must be multiples of 64"
    return None


def warp_decodes(
    format_name: str, tokens: int, top_k: int, experts: int, *, hidden: int, sm_count: int = 132, known: int | None = None
) -> bool:
    """Whether a layer's batch goes to warp decode: all of MXFP8, in parts of 64 tokens; of INT4 where it is faster than aligned blocks.

    experts: of this rank. known: of all ranks, which the tokens are spread over; None: the same.
    """
    if format_name != "w4a16":
        return True
    rows = tokens * top_k / (known or experts)
    units = hidden // 16 // _down_blocks(hidden, sm_count)
    return (
        tokens <= WARP_DECODE_BATCHES[-1]
        and top_k <= MOST_TOP_K
        and experts <= MOST_EXPERTS
        and rows <= WARP_DECODE_ROWS_PER_EXPERT
        and rows * experts <= (WARP_DECODE_SLOTS if 5 * units >= 4 * sm_count else _SLOTS_OF_FEW_UNITS)
    )


def _down_blocks(hidden: int, sm_count: int) -> int:
    """Of a unit of INT4 down: a tile's four, or fewer where every unit still has an SM for itself. In more than one round narrow units
    cost more than they level."""
    blocks = 4
    while blocks > 1 and hidden // 16 // (blocks // 2) <= sm_count:
        blocks //= 2
    return blocks


@lru_cache(maxsize=4096)
def warp_decode_plans(
    format_name: str, *, arch: str, sm_count: int, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int
) -> tuple[WarpDecodePlan, WarpDecodePlan]:
    """The kernels of WARP_DECODE_PRODUCTS for batches of up to the next of WARP_DECODE_BATCHES tokens.

    A warp has several k-tiles or blocks at once, so that one's loads and products fill the other's waits. INT4 blocks lie four to a tile;
    gate/up takes them by two where that many tiles would leave SMs idle, down by two or one where each of these has an SM. MXFP8 ones are
    two in gate/up, or four beyond 16 tokens, where they share its activations, and in down, which has few rows, one, or two where that
    leaves no SM idle. Where a group's part of down is no more than a stage or two, 16 warps take twice as many groups at once, if there
    are as many; its ring is no longer than that part.

    Where an SM has few bytes of a layer, down's CTAs come beside gate/up's before these end, each with a part of the shared memory.
    """
    batch = next(b for b in WARP_DECODE_BATCHES if tokens <= b)
    shape = _Shape(format_name, arch, sm_count, batch, top_k, experts, hidden, intermediate)
    return shape.beside() or (shape.alone("gate_up"), shape.alone("down"))


def warp_decode_plan(product: str, format_name: str, **shape: Any) -> WarpDecodePlan:
    """One of `warp_decode_plans`."""
    return warp_decode_plans(format_name, **shape)[WARP_DECODE_PRODUCTS.index(product)]


@dataclass(frozen=True)
class _Shape:
    """What a layer's plans follow from."""

    format_name: str
    arch: str
    sm_count: int
    batch: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int

    @property
    def slots(self) -> int:
        return 8 if self.top_k <= 8 else MOST_TOP_K

    def alone(self, product: str) -> WarpDecodePlan:
        """The plan of a product that has its SMs for itself."""
        warps = 8
        if self.format_name == "w4a16":
            short = self.intermediate <= _SHORT_K and self.batch * self.slots >= 16
            few = self.batch * self.slots * 2 * self.intermediate // TILE_ROWS <= self.sm_count // 2
            warps, k_tiles = (16, 1) if short else (8, 2)
            blocks = (2 if few else 4) if product == "gate_up" else _down_blocks(self.hidden, self.sm_count)
            k_tiles = k_tiles if product == "gate_up" else max(k_tiles, _DOWN_STAGE // blocks)
        elif product == "gate_up":
            blocks, k_tiles = (2, 2 if self.batch <= 2 else 4) if self.batch <= 16 else (4, 2)
        else:
            blocks, k_tiles = (2, 2) if self.batch > 16 and 5 * (self.hidden // 32) >= 4 * self.sm_count else (1, _DOWN_STAGE)
        plan = self._plan(product, blocks, k_tiles, warps)
        if product == "gate_up" and self._draws(plan):
            plan = replace(plan, draws=True)
        return self._early(_longest(plan, min(1 + _in_flight(plan), self._k(product) // TILE_K // plan.k_tiles)))

    def beside(self) -> tuple[WarpDecodePlan, WarpDecodePlan] | None:
        """Plans of both products for an SM that they share; None where an SM has too many bytes to do with half the memory, or it does not
        suffice."""
        pairs = min(self.experts, self.batch * self.slots)
        layer = 3 * pairs * (self.hidden // TILE_K) * (self.intermediate // 16) * BLOCK_BYTES[self.format_name]
        if layer > _BESIDE_BYTES * self.sm_count:
            return None
        first = self._plan("gate_up", 2, 2, 8)
        last_stages = max(1, round(_ARRIVAL_BYTES[self.format_name] / (first.warps * first.weight_bytes)))
        first = replace(first, ctas=2, last_stages=last_stages, stages=max(LEAST_DECODE_STAGES, _in_flight(first)))
        blocks = _down_blocks(self.hidden, self.sm_count) if self.format_name == "w4a16" else 1
        second = self._plan("down", blocks, _DOWN_STAGE // blocks, 8)
        second = self._early(_longest(replace(second, ctas=2), min(_BESIDE_STAGES, self.intermediate // TILE_K // second.k_tiles)))
        return (first, second) if first.why_illegal() is None and first.fits_beside(second) else None

    def _early(self, plan: WarpDecodePlan) -> WarpDecodePlan:
        """With down's whole ring asked for before gate/up is waited for, where a warp has many rings to do; elsewhere activations, which
        come behind it, would come too late."""
        if plan.product == "gate_up":
            return plan
        units = -(-(self.hidden // 16 // plan.blocks) // self.sm_count)
        groups = -(-min(self.experts, self.batch * self.slots) // plan.warps)
        stages = units * groups * (self.intermediate // TILE_K // plan.k_tiles)
        return replace(plan, early=stages > _MANY_RINGS * plan.stages)

    def _k(self, product: str) -> int:
        return self.hidden if product == "gate_up" else self.intermediate

    def _plan(self, product: str, blocks: int, k_tiles: int, warps: int) -> WarpDecodePlan:
        """With as many blocks and k-tiles a stage as K and the shared memory have room for, and the shortest ring."""
        k = self._k(product) // TILE_K // (warps if product == "gate_up" else 1)  # tiles of a warp
        while k_tiles > 1 and (self._k(product) // TILE_K % k_tiles or k < k_tiles):
            k_tiles //= 2
        widest = WarpDecodePlan(
            arch=self.arch,
            product=product,
            format=self.format_name,
            batch=self.batch,
            top_k=self.slots,
            experts=max(64, 1 << (self.experts - 1).bit_length()),
            blocks=blocks,
            k_tiles=k_tiles,
            stages=LEAST_DECODE_STAGES,
            tokens=min(self.batch, 8 if 2 * self.batch * self.slots >= self.experts else 4),
            warps=warps,
            draws=False,
        )
        return next(plan for plan in _narrower(widest) if plan.why_illegal() is None)

    def _draws(self, plan: WarpDecodePlan) -> bool:
        """Whether gate/up's units are many, with every pair an expert of its own. A drawn one's group is the high half of a product, exact
        while number x units of a group is below 2^32; only a wide layer of many pairs has more."""
        pairs, of_group = self.batch * self.slots, self.intermediate // 8 // plan.blocks
        many = min(self.experts, pairs) * of_group * self._stages(plan) >= _DRAWN_STAGES * self.sm_count
        return many and pairs * of_group**2 < 1 << 31

    def _stages(self, plan: WarpDecodePlan) -> int:
        """A warp's of a unit of gate/up."""
        return max(1, self.hidden // TILE_K // (plan.warps * plan.k_tiles))


def _in_flight(plan: WarpDecodePlan) -> int:
    """Stages that are on their way when _IN_FLIGHT bytes are."""
    return -(-_IN_FLIGHT // (plan.warps * plan.weight_bytes))


def _longest(plan: WarpDecodePlan, most: int) -> WarpDecodePlan:
    """With the most stages, of up to `most`, that are legal."""
    for stages in range(most, LEAST_DECODE_STAGES, -1):
        if (longer := replace(plan, stages=stages)).why_illegal() is None:
            return longer
    return plan


def _narrower(plan: WarpDecodePlan) -> Iterator[WarpDecodePlan]:
    """With less and less of the weights at once."""
    yield plan
    while plan.blocks * plan.k_tiles > 1:
        plan = replace(plan, blocks=plan.blocks // 2) if plan.blocks > 1 else replace(plan, k_tiles=plan.k_tiles // 2)
        yield plan


def warp_decode_buckets(
    arch: str,
    format_name: str,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    sm_count: int = 132,
    top_ks: tuple[int, ...] = (8, MOST_TOP_K),  # one of each that the kernels tell apart
) -> list[WarpDecodePlan]:
    """Every kernel that warp decode of a layer can need."""
    found: dict[str, WarpDecodePlan] = {}
    for product, batch, top_k in itertools.product(WARP_DECODE_PRODUCTS, WARP_DECODE_BATCHES, top_ks):
        plan = warp_decode_plan(
            product,
            format_name,
            arch=arch,
            sm_count=sm_count,
            tokens=batch,
            top_k=top_k,
            experts=experts,
            hidden=hidden,
            intermediate=intermediate,
        )
        found[plan.name] = plan
    return list(found.values())


def explain_warp_decode(plan: WarpDecodePlan, *, tokens: int, top_k: int, experts: int) -> list[str]:
    """Why this kernel, a sentence each."""
    rows = tokens * top_k / experts
    average = f"{rows:{'.1f' if rows >= 1 else '.2g'}} rows an expert on average"
    lines = [
        f"{tokens} tokens, {average}: warp decode, a layer in two launches",
        f"groups of an expert and up to {plan.tokens} of its tokens; a distinct expert is read once for each group",
    ]
    if plan.product == "gate_up":
        lines.append(f"a unit is {plan.blocks * 16} paired rows of a group; the {plan.warps} warps of a CTA share its K")
        lines.append("units are many: a CTA draws its next from a counter" if plan.draws else "units are few: CTAs take them in turn")
        if plan.ctas > 1:
            lines.append(f"few bytes an SM: the CTAs of down come beside these when none has more than {plan.last_stages} stages left")
    else:
        lines.append(f"a unit is {plan.blocks * 16} outputs of all tokens; the {plan.warps} warps of a CTA take the groups in turn")
    lines.append(f"a warp has {plan.blocks} blocks of 16 weight rows x {plan.k_tiles * TILE_K} k at once, {plan.stages} stages of its own")
    lines.append(f"{plan.smem_bytes} bytes of shared memory")
    if plan.arch not in TILE_ARCHITECTURES:
        lines.append(f"{plan.arch}: compiled, never run")
    return lines
