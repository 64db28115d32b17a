# SPDX-License-Identifier: Apache-2.0
"""Row contracts: which rows of x belong to which expert, and where their outputs go.

===========  ================================  ==============================================  =================================
contract     input                             routing                                         output
===========  ================================  ==============================================  =================================
indexed      x [M, K]                          sorted_ids, expert_ids, num_tokens_padded       [M * top_k, N], row = sorted id
contiguous   x [m, K], experts' rows padded    m_indices int32 [m], -1 = padding               [m, N], padding untouched
masked       x [E, max_m, K] or [E * max_m, K]  masked_m int32 [E]; expected_m, a hint          [E * max_m, N], rest untouched
===========  ================================  ==============================================  =================================

The `align_*` functions build the routing from router ids with torch ops alone: on a GPU nothing is read back to the host,
and every shape depends on static numbers only, so that they can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import FormatError

CONTIGUOUS_ALIGNMENT = 128
_INT32_MAX = 2**31 - 1


def _need_int32(name: str, tensor: Tensor, ndim: int) -> None:
    if tensor.dtype != torch.int32 or tensor.ndim != ndim or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "non-contiguous"
        raise FormatError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, {layout}; give a contiguous int32 tensor with {ndim} dimension"
            f"{'s' if ndim != 1 else ''} (for example {name}.to(torch.int32).contiguous())"
        )


@dataclass(frozen=True, eq=False)
class IndexedRows:
    """The buffers of vLLM's `moe_align_block_size`.

    sorted_ids int32: ids (token * top_k + slot) grouped by expert and padded to blocks of `block_rows` with ids that are not
    below M * top_k. expert_ids int32: the expert of each block, -1 to skip it. num_tokens_padded int32 [1]: how much of
    sorted_ids is valid; the rest is never read.
    """

    sorted_ids: Tensor
    expert_ids: Tensor
    num_tokens_padded: Tensor
    top_k: int
    block_rows: int
    contract: ClassVar[str] = "indexed"

    def __post_init__(self) -> None:
        _need_int32("sorted_ids", self.sorted_ids, 1)
        _need_int32("expert_ids", self.expert_ids, 1)
        _need_int32("num_tokens_padded", self.num_tokens_padded, 1)
        if self.num_tokens_padded.numel() != 1:
            raise FormatError(f"num_tokens_padded has {self.num_tokens_padded.numel()} values; it holds one")
        if self.top_k < 1:
            raise FormatError(f"top_k = {self.top_k}; give the number of experts a token is sent to, at least 1")
        if self.block_rows < 1:
            raise FormatError(f"block_rows = {self.block_rows}; give the block size that sorted_ids was aligned to")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.sorted_ids, self.expert_ids, self.num_tokens_padded

    @property
    def max_blocks(self) -> int:
        """Blocks that the buffers can describe."""
        return min(self.sorted_ids.numel() // self.block_rows, self.expert_ids.numel())


@dataclass(frozen=True, eq=False)
class ContiguousRows:
    """m_indices int32 [m]: the expert of each row of x, -1 for padding. Each expert's rows begin at a multiple of `alignment`."""

    m_indices: Tensor
    alignment: int = CONTIGUOUS_ALIGNMENT
    contract: ClassVar[str] = "contiguous"

    def __post_init__(self) -> None:
        _need_int32("m_indices", self.m_indices, 1)
        if self.alignment < 1:
            raise FormatError(f"alignment = {self.alignment}; give the multiple at which every expert's rows begin")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.m_indices,)


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """masked_m int32 [E]: valid leading rows of each expert; counts beyond max_m are clamped to it.

    expected_m is a hint for the choice of schedule (rows an expert, on average), never a device read; results do not depend
    on it beyond the documented numerics of the schedule it selects.
    """

    masked_m: Tensor
    expected_m: int
    contract: ClassVar[str] = "masked"

    def __post_init__(self) -> None:
        _need_int32("masked_m", self.masked_m, 1)
        if self.expected_m < 0:
            raise FormatError(f"expected_m = {self.expected_m}; give the average rows an expert, a whole number from 0")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.masked_m,)


RowContract = IndexedRows | ContiguousRows | MaskedRows


# ---- routing from router ids ------------------------------------------------------------------------------------------------


def _local_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """Flat int64 expert ids [M * top_k] on this rank; num_experts stands for 'none of ours'."""
    if topk_ids.ndim != 2:
        raise FormatError(f"topk_ids is {list(topk_ids.shape)}; give [M, top_k]")
    if topk_ids.dtype not in (torch.int32, torch.int64, torch.uint32):
        raise FormatError(f"topk_ids is {topk_ids.dtype}; give int32, int64 or uint32")
    flat = topk_ids.reshape(-1).to(torch.int64)
    if expert_map is not None:
        known = (flat >= 0) & (flat < expert_map.numel())
        flat = torch.where(known, expert_map.to(torch.int64)[flat.clamp(0, expert_map.numel() - 1)], -1)
    return torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)


def _ranks(local: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """For each flat id its rank among the ids of its expert, in id order; and the count of each expert."""
    order = torch.argsort(local, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=local.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(local)
    ranks[order] = torch.arange(local.numel(), device=local.device) - starts[local[order]]
    return ranks, counts[:num_experts]


def _padded_slots(local: Tensor, num_experts: int, alignment: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The slot of each flat id when every expert is padded to `alignment` (capacity: dropped); running padded ends."""
    ranks, counts = _ranks(local, num_experts)
    padded = (counts + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    starts = torch.cat([ends - padded, torch.full((1,), capacity, device=local.device)])
    slots = torch.where(local < num_experts, starts[local] + ranks, capacity)
    return slots, ends


def padded_capacity(ids: int, num_experts: int, alignment: int) -> int:
    """The most slots that `ids` routed rows can take when every expert's rows are padded to `alignment`."""
    worst = ids + min(num_experts, ids) * (alignment - 1)
    return worst // alignment * alignment


def align_indexed(topk_ids: Tensor, num_experts: int, block_rows: int, expert_map: Tensor | None = None) -> IndexedRows:
    """Group router ids [M, top_k] by expert in blocks of `block_rows`.

    num_experts counts the experts of this rank. expert_map [global experts] gives a global id's local one, or -1. Ids that
    are negative, too large or remote are dropped: their output rows stay untouched.
    """
    local = _local_experts(topk_ids, num_experts, expert_map)
    capacity = padded_capacity(local.numel(), num_experts, block_rows)
    slots, ends = _padded_slots(local, num_experts, block_rows, capacity)
    device = topk_ids.device
    sorted_ids = torch.full((capacity + 1,), local.numel(), dtype=torch.int32, device=device)
    sorted_ids[slots] = torch.arange(local.numel(), dtype=torch.int32, device=device)
    block_starts = torch.arange(0, capacity, block_rows, device=device)
    expert_ids = torch.searchsorted(ends, block_starts, right=True)
    expert_ids = torch.where(expert_ids < num_experts, expert_ids, -1)
    total = ends[-1:] if num_experts else torch.zeros(1, device=device)
    return IndexedRows(
        sorted_ids[:capacity], expert_ids.to(torch.int32), total.to(torch.int32), top_k=topk_ids.shape[1], block_rows=block_rows
    )


def align_contiguous(
    topk_ids: Tensor, num_experts: int, alignment: int = CONTIGUOUS_ALIGNMENT, expert_map: Tensor | None = None
) -> tuple[ContiguousRows, Tensor]:
    """Lay out one row per routed id, each expert's rows padded to `alignment`.

    Returns the contract and row_ids int32 [m]: the id (token * top_k + slot) of each row, -1 for padding.
    """
    local = _local_experts(topk_ids, num_experts, expert_map)
    capacity = padded_capacity(local.numel(), num_experts, alignment)
    slots, _ = _padded_slots(local, num_experts, alignment, capacity)
    device = topk_ids.device
    m_indices = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
    row_ids = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
    kept = local < num_experts
    m_indices[slots] = torch.where(kept, local, -1).to(torch.int32)
    row_ids[slots] = torch.where(kept, torch.arange(local.numel(), device=device), -1).to(torch.int32)
    return ContiguousRows(m_indices[:capacity], alignment), row_ids[:capacity]


def align_masked(topk_ids: Tensor, num_experts: int, max_m: int, expert_map: Tensor | None = None) -> tuple[MaskedRows, Tensor]:
    """Lay out every expert's routed ids in max_m rows; ids beyond max_m of an expert are dropped.

    Returns the contract and row_ids int32 [E * max_m]: the id of each row, -1 for none.
    """
    if max_m < 1 or num_experts * max_m > _INT32_MAX:
        raise FormatError(f"max_m = {max_m} with {num_experts} experts; give 1 <= max_m and E * max_m < 2**31")
    local = _local_experts(topk_ids, num_experts, expert_map)
    ranks, counts = _ranks(local, num_experts)
    capacity = num_experts * max_m
    kept = (local < num_experts) & (ranks < max_m)
    slots = torch.where(kept, local * max_m + ranks, capacity)
    row_ids = torch.full((capacity + 1,), -1, dtype=torch.int32, device=topk_ids.device)
    row_ids[slots] = torch.where(kept, torch.arange(local.numel(), device=topk_ids.device), -1).to(torch.int32)
    expected = -(-local.numel() // max(num_experts, 1))
    return MaskedRows(counts.clamp(max=max_m).to(torch.int32), expected), row_ids[:capacity]


# ---- which row is which, for the reference and for validation ---------------------------------------------------------------


def row_table(rows: RowContract, x_rows: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(source row, output row, expert), int64 [valid rows]: what a contract means, as a table. Synchronises."""
    if isinstance(rows, IndexedRows):
        blocks = min(int(rows.num_tokens_padded) // rows.block_rows, rows.max_blocks)
        ids = rows.sorted_ids[: blocks * rows.block_rows].to(torch.int64)
        experts = rows.expert_ids[:blocks].to(torch.int64).repeat_interleave(rows.block_rows)
        valid = (ids >= 0) & (ids < x_rows * rows.top_k) & (experts >= 0) & (experts < num_experts)
        return ids[valid] // rows.top_k, ids[valid], experts[valid]
    if isinstance(rows, ContiguousRows):
        experts = rows.m_indices.to(torch.int64)
        index = ((experts >= 0) & (experts < num_experts)).nonzero().flatten()
        return index, index, experts[index]
    max_m = x_rows // max(num_experts, 1)
    counts = rows.masked_m.to(torch.int64).clamp(0, max_m)
    index = torch.arange(num_experts * max_m, device=counts.device)
    index = index[index % max(max_m, 1) < counts[index // max(max_m, 1)]]
    return index, index, index // max(max_m, 1)


def validate(rows: RowContract, x_rows: int, num_experts: int) -> None:
    """Check routing values where they are, and name the first offence. Synchronises; meant for debugging."""
    if isinstance(rows, IndexedRows):
        padded = int(rows.num_tokens_padded)
        if padded % rows.block_rows or padded > rows.max_blocks * rows.block_rows or padded < 0:
            raise FormatError(
                f"num_tokens_padded = {padded} is not a multiple of block_rows = {rows.block_rows} within the "
                f"{rows.max_blocks} blocks that the buffers hold; align with the same block size"
            )
        experts = rows.expert_ids[: padded // rows.block_rows]
        bad = (experts < -1) | (experts >= num_experts)
        if bool(bad.any()):
            block = int(bad.nonzero()[0])
            raise FormatError(f"expert_ids[{block}] = {int(experts[block])}; give -1 or an expert below {num_experts}")
        ids = rows.sorted_ids[:padded]
        ids = ids[(ids >= 0) & (ids < x_rows * rows.top_k)]
        if ids.unique().numel() != ids.numel():
            raise FormatError("sorted_ids names an id twice: two blocks would write the same output row")
    elif isinstance(rows, ContiguousRows):
        experts = rows.m_indices
        bad = (experts < -1) | (experts >= num_experts)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise FormatError(f"m_indices[{row}] = {int(experts[row])}; give -1 or an expert below {num_experts}")
        for start in range(0, experts.numel(), rows.alignment):
            inside = experts[start : start + rows.alignment]
            inside = inside[inside >= 0].unique()
            if inside.numel() > 1:
                raise FormatError(
                    f"rows {start}..{start + rows.alignment - 1} belong to experts {inside.tolist()}; every expert's rows must "
                    f"begin at a multiple of {rows.alignment} (align_contiguous does that)"
                )
    else:
        max_m = x_rows // max(num_experts, 1)
        bad = (rows.masked_m < 0) | (rows.masked_m > max_m)
        if bool(bad.any()):
            expert = int(bad.nonzero()[0])
            raise FormatError(f"masked_m[{expert}] = {int(rows.masked_m[expert])}; give a count from 0 to max_m = {max_m}")
