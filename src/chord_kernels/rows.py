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

from dataclasses import dataclass, replace
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
    sorted_ids is valid; the rest is never read. expected_rows: how many ids this rank's experts have if routing is even, a hint for the
    choice of schedule as `MaskedRows.expected_m` is; None: all M * top_k.
    """

    sorted_ids: Tensor
    expert_ids: Tensor
    num_tokens_padded: Tensor
    top_k: int
    block_rows: int
    expected_rows: int | None = None
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

    def by_id(self) -> IndexedRows:
        """The same blocks for a product whose input has a row for every id: the second one of a layer."""
        return replace(self, top_k=1)

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
#
# A decode layer is captured in a graph, where every torch operation costs a few microseconds: one sort, and as little around
# it as will do.


def check_routing(
    topk_ids: Tensor, topk_weights: Tensor | None = None, expert_map: Tensor | None = None, *, tokens: int | None = None
) -> None:
    """Of a router's tables, what needs no device. tokens: that they must be of; None: any number. Raises FormatError."""
    if topk_ids.ndim != 2 or topk_ids.dtype not in (torch.int32, torch.int64, torch.uint32):
        raise FormatError(f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; give int32 (or int64, uint32) [M, top_k]")
    if tokens is not None and topk_ids.shape[0] != tokens:
        raise FormatError(f"topk_ids is {list(topk_ids.shape)}; give [M, top_k] with M = {tokens}")
    if topk_weights is not None and topk_weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise FormatError(f"topk_weights is {topk_weights.dtype}; give float32 (or bfloat16, float16)")
    if topk_weights is not None and topk_weights.shape != topk_ids.shape:
        raise FormatError(f"topk_weights is {list(topk_weights.shape)}, topk_ids {list(topk_ids.shape)}; both are [M, top_k]")
    if expert_map is not None and (expert_map.dtype != torch.int32 or expert_map.ndim != 1 or not expert_map.is_contiguous()):
        raise FormatError(f"expert_map is {expert_map.dtype} {list(expert_map.shape)}; give contiguous int32 [global experts]")


def int32_ids(ids: Tensor, known: int) -> Tensor:
    """As int32; what does not fit becomes -1, which is nobody's id either."""
    if ids.dtype == torch.uint32:
        ids = ids.to(torch.int64)
    if ids.dtype == torch.int64:
        ids = torch.where((ids >= 0) & (ids < known), ids, -1).to(torch.int32)
    return ids.contiguous()


def router_arguments(
    ids: Tensor, expert_map: Tensor | None, weights: Tensor | None, experts: int
) -> tuple[tuple[int, int, int], tuple[int, int, int, int]]:
    """A router's int32 ids and its other tables as kernels take them: addresses (ids, expert_map, weights; 0: none), and counts (tokens,
    top_k, experts of this rank, known ids)."""
    addresses = (ids.data_ptr(), 0 if expert_map is None else expert_map.data_ptr(), 0 if weights is None else weights.data_ptr())
    return addresses, (*ids.shape, experts, experts if expert_map is None else expert_map.numel())


def local_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> Tensor:
    """Expert ids [M, top_k] on this rank as int64; num_experts stands for 'none of ours' (negative, too large, remote)."""
    check_routing(topk_ids)
    ids = topk_ids.to(torch.int64)
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.to(torch.int64)[ids.clamp(0, expert_map.numel() - 1)], -1)
    # -1 and num_experts, the two ends of the clamp, are both num_experts modulo num_experts + 1.
    return ids.clamp(-1, num_experts).remainder(num_experts + 1)


@dataclass(frozen=True, eq=False)
class _Grouped:
    """Flat ids sorted by local expert, in id order within one; 'none of ours' comes last."""

    ids: Tensor  # int64 [M * top_k]
    experts: Tensor  # int64 [M * top_k]
    starts: Tensor  # int64 [E + 1], of each expert among `ids`
    positions: Tensor  # int64 [M * top_k], 0, 1, 2, ...

    @classmethod
    def of(cls, local: Tensor, num_experts: int) -> _Grouped:
        experts, ids = torch.sort(local.reshape(-1), stable=True)
        starts = torch.searchsorted(experts, torch.arange(num_experts + 1, device=local.device))
        return cls(ids, experts, starts, torch.arange(ids.numel(), device=local.device))

    def padded(self, alignment: int) -> tuple[Tensor, Tensor]:
        """The slot of each sorted id when every expert is padded to `alignment`, and the padded ends int64 [E].

        Slots of 'none of ours' follow the last padded end.
        """
        counts = self.starts[1:] - self.starts[:-1]
        ends = ((counts + (alignment - 1)) // alignment * alignment).cumsum(0)
        shifts = torch.nn.functional.pad(ends, (1, 0)) - self.starts
        return self.positions + shifts[self.experts], ends


def expected_rows(ids: int, num_experts: int, expert_map: Tensor | None) -> int:
    """How many of so many ids this rank's experts have if routing is even."""
    return ids if expert_map is None else -(-ids * num_experts // max(expert_map.numel(), 1))


def padded_capacity(ids: int, num_experts: int, alignment: int) -> int:
    """The most slots that `ids` routed rows can take when every expert's rows are padded to `alignment`."""
    worst = ids + min(num_experts, ids) * (alignment - 1)
    return worst // alignment * alignment


def align_indexed(topk_ids: Tensor, num_experts: int, block_rows: int, expert_map: Tensor | None = None) -> IndexedRows:
    """Group router ids [M, top_k] by expert in blocks of `block_rows`.

    num_experts counts the experts of this rank. expert_map [global experts] gives a global id's local one, or -1. Ids that
    are negative, too large or remote are dropped: their output rows stay untouched. What the buffers hold beyond
    num_tokens_padded is not specified.
    """
    local = local_experts(topk_ids, num_experts, expert_map)
    count = local.numel()
    capacity = padded_capacity(count, num_experts, block_rows)
    grouped = _Grouped.of(local, num_experts)
    slots, ends = grouped.padded(block_rows)
    # Slots of dropped ids reach at most `count` beyond the padded ends.
    sorted_ids = torch.full((capacity + count,), count, dtype=torch.int32, device=local.device)
    sorted_ids[slots] = grouped.ids.to(torch.int32)
    block_starts = torch.arange(0, capacity, block_rows, device=local.device)
    expert_ids = torch.searchsorted(ends, block_starts, right=True, out_int32=True)
    expected = expected_rows(count, num_experts, expert_map)
    return IndexedRows(sorted_ids[:capacity], expert_ids, ends[-1:].to(torch.int32), local.shape[1], block_rows, expected)


def align_contiguous(
    topk_ids: Tensor, num_experts: int, alignment: int = CONTIGUOUS_ALIGNMENT, expert_map: Tensor | None = None
) -> tuple[ContiguousRows, Tensor]:
    """Lay out one row per routed id, each expert's rows padded to `alignment`.

    Returns the contract and row_ids int32 [m]: the id (token * top_k + slot) of each row, -1 for padding.
    """
    local = local_experts(topk_ids, num_experts, expert_map)
    count = local.numel()
    capacity = padded_capacity(count, num_experts, alignment)
    grouped = _Grouped.of(local, num_experts)
    slots, _ = grouped.padded(alignment)
    ours = grouped.experts < num_experts
    m_indices = torch.full((capacity + count,), -1, dtype=torch.int32, device=topk_ids.device)
    row_ids = torch.full((capacity + count,), -1, dtype=torch.int32, device=topk_ids.device)
    m_indices[slots] = torch.where(ours, grouped.experts, -1).to(torch.int32)
    row_ids[slots] = torch.where(ours, grouped.ids, -1).to(torch.int32)
    return ContiguousRows(m_indices[:capacity], alignment), row_ids[:capacity]


def align_masked(topk_ids: Tensor, num_experts: int, max_m: int, expert_map: Tensor | None = None) -> tuple[MaskedRows, Tensor]:
    """Lay out every expert's routed ids in max_m rows; ids beyond max_m of an expert are dropped.

    Returns the contract and row_ids int32 [E * max_m]: the id of each row, -1 for none.
    """
    if max_m < 1 or num_experts * max_m > _INT32_MAX:
        raise FormatError(f"max_m = {max_m} with {num_experts} experts; give 1 <= max_m and E * max_m < 2**31")
    grouped = _Grouped.of(local_experts(topk_ids, num_experts, expert_map), num_experts)
    ranks = grouped.positions - grouped.starts[grouped.experts]
    capacity = num_experts * max_m
    kept = (grouped.experts < num_experts) & (ranks < max_m)
    row_ids = torch.full((capacity + 1,), -1, dtype=torch.int32, device=topk_ids.device)
    slots = torch.where(kept, grouped.experts * max_m + ranks, capacity)
    row_ids[slots] = torch.where(kept, grouped.ids, -1).to(torch.int32)
    counts = (grouped.starts[1:] - grouped.starts[:-1]).clamp(max=max_m).to(torch.int32)
    return MaskedRows(counts, -(-topk_ids.numel() // max(num_experts, 1))), row_ids[:capacity]


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
