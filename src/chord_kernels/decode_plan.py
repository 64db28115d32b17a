# SPDX-License-Identifier: Apache-2.0
"""Which kernels warp decode of a layer takes. Pure, as plan.py is."""

from __future__ import annotations

import itertools
from dataclasses import replace

from .kernels import (
    ARCHITECTURES,
    BLOCK_BYTES,
    CTA_SMEM,
    MOST_EXPERTS,
    MOST_TOP_K,
    SMEM_OF_SM,
    TILE_ARCHITECTURES,
    TILE_K,
    TILE_ROWS,
    WarpDecodePlan,
)

WARP_DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
WARP_DECODE_PRODUCTS = ("gate_up", "down")
WARP_DECODE_ROWS_PER_EXPERT = 6.0  # of INT4; beyond, a group is read again for every four or eight of an expert's tokens
_IN_FLIGHT = 36 << 10  # bytes of weights an SM; with more, copies hold up the loads from shared memory that they share a path with


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


def warp_decodes(format_name: str, tokens: int, top_k: int, experts: int) -> bool:
    """Whether a layer's batch goes to warp decode: all of MXFP8, in parts of 64 tokens; of INT4 where it is faster than aligned blocks."""
    if format_name != "w4a16":
        return True
    return (
        tokens <= WARP_DECODE_BATCHES[-1]
        and top_k <= MOST_TOP_K
        and experts <= MOST_EXPERTS
        and tokens * top_k / experts <= WARP_DECODE_ROWS_PER_EXPERT
    )


def warp_decode_plan(
    product: str,
    format_name: str,
    *,
    arch: str,
    sm_count: int,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
) -> WarpDecodePlan:
    """The kernel of one product for batches of up to the next of WARP_DECODE_BATCHES tokens.

    A warp has several k-tiles or blocks at once, so that one's loads and products fill the other's waits: INT4 blocks lie four to a tile,
    and are taken by two where that many tiles would leave SMs idle; MXFP8 ones are two or four in gate/up, where they share its
    activations, and in down one, which has few rows, or from 16 tokens on two where that leaves no SM idle: its activations are read
    again for every block or two. One CTA an SM, but where both launches of a layer fit beside each other: down's first weights are then
    on their way while gate/up ends.
    """
    layer = (format_name, arch, sm_count, tokens, top_k, experts, hidden, intermediate)
    plan = _alone(product, *layer)
    if product == "gate_up":
        return plan
    beside, gate_up = replace(plan, beside=True), _alone("gate_up", *layer)
    return beside if beside.smem_bytes + gate_up.smem_bytes + 2 * CTA_SMEM <= SMEM_OF_SM else plan


def _alone(
    product: str, format_name: str, arch: str, sm_count: int, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int
) -> WarpDecodePlan:
    batch = next(b for b in WARP_DECODE_BATCHES if tokens <= b)
    slots = 8 if top_k <= 8 else MOST_TOP_K
    if format_name == "w4a16":
        few = batch * slots * 2 * intermediate // TILE_ROWS <= sm_count // 2
        blocks, k_tiles = 2 if few else 4, 2
    elif product == "gate_up":
        blocks, k_tiles = (2, 2) if batch <= 8 else (4, 1)
    elif batch > 8 and 5 * (hidden // 32) >= 4 * sm_count:
        blocks, k_tiles = 2, 1
    else:
        blocks, k_tiles = 1, 4 if batch in (4, 8) else 2
    while (hidden if product == "gate_up" else intermediate) // TILE_K % k_tiles:
        k_tiles //= 2
    widest = WarpDecodePlan(
        arch=arch,
        product=product,
        format=format_name,
        batch=batch,
        top_k=slots,
        experts=max(64, 1 << (experts - 1).bit_length()),
        blocks=blocks,
        k_tiles=k_tiles,
        stages=3,
        tokens=max(2, min(batch, 8 if batch > 16 else 4)),
        beside=False,
    )
    narrower = (replace(widest, blocks=blocks >> shift) for shift in range(blocks.bit_length()))
    plan = next(plan for plan in narrower if plan.why_illegal() is None)
    copied = plan.warps * plan.weight_bytes
    for stages in range(1 + -(-_IN_FLIGHT // copied), 2, -1):
        if (longer := replace(plan, stages=stages)).why_illegal() is None:
            return longer
    return plan


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
    at_once = f"{plan.blocks} blocks of 16 weight rows x {plan.k_tiles * TILE_K} k at once, {plan.stages} stages of its own"
    if plan.product == "gate_up":
        lines.append(f"a unit is {plan.blocks * 16} paired rows of a group, whose K the 8 warps of a CTA share; a warp has {at_once}")
    else:
        lines.append(
            f"a unit is {plan.blocks * 16} outputs of all tokens; the 8 warps of a CTA take the groups in turn; a warp has {at_once}"
        )
    memory = f"{plan.smem_bytes} bytes of shared memory"
    lines.append(f"{memory}: fits an SM beside gate_up, and its first weights are on their way while that ends" if plan.beside else memory)
    if plan.arch not in TILE_ARCHITECTURES:
        lines.append(f"{plan.arch}: compiled, never run")
    return lines
