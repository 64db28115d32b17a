# SPDX-License-Identifier: Apache-2.0
"""Alignment by one kernel against the one of torch operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chord_kernels.align import align_rows
from chord_kernels.rows import IndexedRows, align_indexed, validate


def blocks(routing: IndexedRows) -> tuple[int, list[int], list[list[int]]]:
    """(padded length, expert of each block, ids of each expert in order)."""
    padded = int(routing.num_tokens_padded)
    experts = routing.expert_ids[: padded // routing.block_rows].tolist()
    ids = routing.sorted_ids[:padded].view(-1, routing.block_rows).tolist()
    of: dict[int, list[int]] = {}
    for expert, block in zip(experts, ids, strict=True):
        of.setdefault(expert, []).extend(block)
    return padded, experts, [sorted(of[expert]) for expert in sorted(of)]


def same(ids: Tensor, experts: int, block_rows: int, expert_map: Tensor | None = None) -> None:
    found = align_rows(ids, experts, block_rows, expert_map)
    validate(found, ids.shape[0], experts)
    assert blocks(found) == blocks(align_indexed(ids, experts, block_rows, expert_map))


@pytest.mark.parametrize("block_rows", [8, 32, 96, 128])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (3, 8, 48), (64, 8, 384), (700, 2, 5), (40, 6, 1500), (3000, 8, 48)])
def test_groups_are_those_of_the_torch_operations(tokens: int, top_k: int, experts: int, block_rows: int) -> None:
    g = torch.Generator("cuda").manual_seed(tokens)
    ids = torch.randint(-2, experts + 3, (tokens, top_k), device="cuda", generator=g, dtype=torch.int32)
    same(ids, experts, block_rows)
    same(ids.clamp(0, experts - 1), experts, block_rows)
    same(torch.full_like(ids, experts - 1), experts, block_rows)
    same(torch.full_like(ids, -1), experts, block_rows)


def test_expert_map_and_wide_ids() -> None:
    ids = torch.randint(-1, 20, (50, 4), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expert_map = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    expert_map[4:10] = torch.arange(6, dtype=torch.int32, device="cuda")
    same(ids, 6, 16, expert_map)
    same(ids + (ids < 0) * 2**40, 6, 16, expert_map)


def test_in_a_graph() -> None:
    ids = torch.zeros((30, 4), dtype=torch.int32, device="cuda")
    align_rows(ids, 10, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = align_rows(ids, 10, 8)
    ids.copy_(torch.randint(0, 10, (30, 4), device="cuda"))
    graph.replay()
    assert blocks(routing) == blocks(align_indexed(ids, 10, 8))
