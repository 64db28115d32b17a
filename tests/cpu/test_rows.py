# SPDX-License-Identifier: Apache-2.0
"""Alignment against plain Python, and what validation says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chord_kernels.errors import FormatError
from chord_kernels.rows import (
    ContiguousRows,
    IndexedRows,
    MaskedRows,
    align_contiguous,
    align_indexed,
    align_masked,
    padded_capacity,
    row_table,
    validate,
)

ROUTINGS = st.integers(1, 6).flatmap(
    lambda top_k: st.lists(st.lists(st.sampled_from([-5, -1, 0, 1, 2, 3, 4, 5, 2**31 - 1]), min_size=top_k, max_size=top_k), max_size=12)
)


def tensor(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1 if rows else 1)


def members(rows: list[list[int]], expert_of: dict[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for position, value in enumerate(value for row in rows for value in row):
        if value in expert_of:
            found.setdefault(expert_of[value], []).append(position)
    return found


@settings(max_examples=60, deadline=None)
@given(ROUTINGS, st.sampled_from([1, 3, 8, 16]), st.booleans())
def test_indexed(rows: list[list[int]], block: int, mapped: bool) -> None:
    experts = 3
    expert_map = torch.tensor([2, -1, 0, -1, 1]) if mapped else None
    expert_of = {0: 2, 2: 0, 4: 1} if mapped else {0: 0, 1: 1, 2: 2}
    ids = tensor(rows)
    routing = align_indexed(ids, experts, block, expert_map)
    padded = int(routing.num_tokens_padded)
    expected = members(rows, expert_of)
    wanted_ids, wanted_experts = [], []
    for expert, positions in sorted(expected.items()):
        fill = -len(positions) % block
        wanted_ids += positions + [ids.numel()] * fill
        wanted_experts += [expert] * ((len(positions) + fill) // block)
    assert padded == len(wanted_ids)
    assert routing.sorted_ids[:padded].tolist() == wanted_ids
    assert routing.expert_ids[: padded // block].tolist() == wanted_experts
    assert routing.max_blocks * block >= padded
    validate(routing, max(len(rows), 1), experts)


@settings(max_examples=60, deadline=None)
@given(ROUTINGS, st.sampled_from([1, 4, 128]))
def test_contiguous(rows: list[list[int]], alignment: int) -> None:
    ids = tensor(rows)
    routing, row_ids = align_contiguous(ids, 3, alignment)
    validate(routing, routing.m_indices.numel(), 3)
    expected = members(rows, {0: 0, 1: 1, 2: 2})
    for expert, positions in expected.items():
        mine = (routing.m_indices == expert).nonzero().flatten()
        assert row_ids[mine].tolist() == positions
        assert int(mine[0]) % alignment == 0
    assert int((row_ids >= 0).sum()) == sum(map(len, expected.values()))
    assert torch.equal(row_ids >= 0, routing.m_indices >= 0)


@settings(max_examples=60, deadline=None)
@given(ROUTINGS, st.sampled_from([1, 2, 64]))
def test_masked(rows: list[list[int]], max_m: int) -> None:
    routing, row_ids = align_masked(tensor(rows), 3, max_m)
    expected = members(rows, {0: 0, 1: 1, 2: 2})
    for expert in range(3):
        positions = expected.get(expert, [])[:max_m]
        assert int(routing.masked_m[expert]) == len(positions)
        assert row_ids[expert * max_m : expert * max_m + len(positions)].tolist() == positions


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(1, 40), st.sampled_from([1, 8, 128]), st.integers(0, 2**31))
def test_capacity_holds_every_distribution(ids: int, experts: int, alignment: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.bincount(torch.randint(0, experts, (ids,), generator=generator), minlength=experts)
    needed = int(((counts + alignment - 1) // alignment * alignment).sum())
    assert needed <= padded_capacity(ids, experts, alignment)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_id_dtypes_and_strides_give_the_same_routing(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 2], [1, 2], [2, 0]], dtype=torch.int32)
    strided = ids.to(dtype).T.contiguous().T
    assert torch.equal(align_indexed(strided, 3, 8).sorted_ids, align_indexed(ids, 3, 8).sorted_ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: IndexedRows(i.long(), i, i[:1], 2, 8), "sorted_ids is torch.int64"),
        (lambda i: IndexedRows(i, i[::2], i[:1], 2, 8), "expert_ids is torch.int32 .* non-contiguous"),
        (lambda i: IndexedRows(i, i, i[:2], 2, 8), "num_tokens_padded has 2 values"),
        (lambda i: IndexedRows(i, i, i[:1], 0, 8), "top_k = 0"),
        (lambda i: IndexedRows(i, i, i[:1], 1, 0), "block_rows = 0"),
        (lambda i: ContiguousRows(i.view(2, -1)), r"m_indices is torch.int32 \[2, 4\]"),
        (lambda i: ContiguousRows(i, 0), "alignment = 0"),
        (lambda i: MaskedRows(i.float(), 1), "masked_m is torch.float32"),
        (lambda i: MaskedRows(i, -1), "expected_m = -1"),
        (lambda i: align_indexed(i, 4, 8), r"topk_ids is torch.int32 \[8\]; give int32 .* \[M, top_k\]"),
        (lambda i: align_indexed(i.float().view(4, 2), 4, 8), "topk_ids is torch.float32"),
        (lambda i: align_masked(i.view(4, 2), 4, 0), "max_m = 0"),
    ],
)
def test_wrong_arguments_are_named(make, message: str) -> None:
    """HAZARDS 22, 46."""
    with pytest.raises(FormatError, match=message):
        make(torch.arange(8, dtype=torch.int32))


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (IndexedRows(torch.arange(16).int(), torch.tensor([0, 9]).int(), torch.tensor([16]).int(), 1, 8), r"expert_ids\[1\] = 9"),
        (IndexedRows(torch.arange(16).int(), torch.tensor([0, 1]).int(), torch.tensor([12]).int(), 1, 8), "num_tokens_padded = 12"),
        (IndexedRows(torch.zeros(16).int(), torch.tensor([0, 1]).int(), torch.tensor([16]).int(), 1, 8), "names an id twice"),
        (ContiguousRows(torch.tensor([0] * 70 + [1] * 58).int()), r"rows 0..127 belong to experts \[0, 1\]"),
        (ContiguousRows(torch.tensor([0] * 127 + [7]).int()), r"m_indices\[127\] = 7"),
        (MaskedRows(torch.tensor([1, 99]).int(), 1), r"masked_m\[1\] = 99"),
    ],
)
def test_validation_names_the_first_offence(routing, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        validate(routing, 128, 2)


def test_the_table_ignores_what_is_not_valid() -> None:
    routing = IndexedRows(
        torch.tensor([3, 0, 8, 1, 2, -4, 9, 9, 5, 5]).int(), torch.tensor([1, -1, 0]).int(), torch.tensor([8]).int(), 2, 4
    )
    source, target, expert = row_table(routing, 4, 2)
    assert target.tolist() == [3, 0, 1]
    assert source.tolist() == [1, 0, 0]
    assert expert.tolist() == [1, 1, 1]


def test_expected_rows_are_this_ranks_share() -> None:
    ids = torch.arange(40).view(10, 4) % 16
    expert_map = torch.full((16,), -1, dtype=torch.int32)
    expert_map[:4] = torch.arange(4, dtype=torch.int32)
    assert align_indexed(ids, 16, 8).expected_rows == 40
    assert align_indexed(ids, 4, 8, expert_map).expected_rows == 10
    second = align_indexed(ids, 4, 8, expert_map).by_id()
    assert (second.top_k, second.expected_rows, second.block_rows) == (1, 10, 8)
