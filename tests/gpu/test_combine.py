# SPDX-License-Identifier: Apache-2.0
"""The weighted sum that ends a layer made of separate products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import chord_kernels as chord


def case(tokens: int, top_k: int, hidden: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(tokens + top_k)
    values = torch.randn((tokens, top_k, hidden), device="cuda", generator=g).to(torch.bfloat16)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), device="cuda", generator=g, dtype=torch.int32)
    return values, ids, torch.rand((tokens, top_k), device="cuda", generator=g)


def truth(values: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    used = ((ids >= 0) & (ids < experts)).unsqueeze(-1)
    return torch.where(used, values.double() * weights.double().unsqueeze(-1), 0.0).sum(dim=1)


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
@pytest.mark.parametrize(("top_k", "hidden"), [(1, 8), (8, 7168), (2, 1032), (11, 2048), (17, 64)])
def test_against_fp64_with_poison_where_nothing_may_be_read_or_written(tokens: int, top_k: int, hidden: int) -> None:
    values, ids, weights = case(tokens, top_k, hidden, experts=9)
    values[(ids < 0) | (ids >= 9)] = float("nan")
    weights[(ids < 0) | (ids >= 9)] = float("nan")
    whole = torch.full((tokens + 2, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    chord.weighted_sum(values, ids, weights, experts=9, out=whole[1:-1])
    assert whole[0].isnan().all()
    assert whole[-1].isnan().all()
    expected = truth(values.nan_to_num(), ids, weights.nan_to_num(), 9)
    error = (whole[1:-1].double() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + 1e-6 * top_k).all()


def test_expert_map_id_types_and_graph() -> None:
    values, ids, weights = case(40, 4, 512, experts=12)
    expert_map = torch.full((12,), -1, dtype=torch.int32, device="cuda")
    expert_map[3:9] = torch.arange(6, dtype=torch.int32, device="cuda")
    expected = chord.weighted_sum(values.cpu(), ids.cpu(), weights.cpu(), experts=6, expert_map=expert_map.cpu())
    found = chord.weighted_sum(values, ids, weights, experts=6, expert_map=expert_map)
    torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=1e-6)
    for other in (ids.to(torch.int64), ids.to(torch.int64) + (ids < 0) * 2**40):
        assert torch.equal(chord.weighted_sum(values, other, weights, experts=6, expert_map=expert_map), found)
    out, graph = torch.zeros_like(found), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chord.weighted_sum(values, ids, weights, experts=6, expert_map=expert_map, out=out)
    graph.replay()
    assert torch.equal(out, found)
