# SPDX-License-Identifier: Apache-2.0
"""The weighted sum on CPU, its checks, and its place among a layer's kernels."""

from __future__ import annotations

import pytest
import torch

import chord_kernels as chord
from chord_kernels.errors import FormatError
from chord_kernels.plain_kernels import WeightedSumPlan
from chord_kernels.plan import layer_kernels


def test_slots_without_an_expert_are_not_read() -> None:
    values = torch.ones((2, 3, 8), dtype=torch.bfloat16)
    ids = torch.tensor([[0, -1, 4], [2**40, 3, 1]])
    values[0, 1:] = float("nan")
    values[1, 0] = float("inf")
    out = chord.weighted_sum(values, ids, torch.tensor([[0.5, 1.0, float("nan")], [1.0, 2.0, 0.25]]), experts=4)
    assert out[:, 0].tolist() == [0.5, 2.25]


def test_expert_map_and_nothing_to_do() -> None:
    values, ids = torch.ones((1, 2, 8), dtype=torch.bfloat16), torch.tensor([[5, 7]], dtype=torch.int32)
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[7] = 0
    assert chord.weighted_sum(values, ids, torch.tensor([[1.0, 3.0]]), experts=1, expert_map=expert_map)[0, 0] == 3
    assert chord.weighted_sum(values[:0], ids[:0], torch.ones((0, 2)), experts=1).shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": torch.ones(1, 2, 12, dtype=torch.bfloat16)}, "multiple of 8"),
        ({"values": torch.ones(1, 2, 8)}, "bfloat16"),
        ({"topk_ids": torch.zeros(1, 3, dtype=torch.int32)}, "both are"),
        ({"topk_ids": torch.zeros(1, 2)}, "int32"),
        ({"topk_weights": torch.zeros(1, 2, dtype=torch.float64)}, "float32"),
        ({"expert_map": torch.zeros(3)}, "expert_map"),
        ({"out": torch.zeros(1, 9, dtype=torch.bfloat16)}, "out is"),
    ],
)
def test_errors_name_value_and_rule(change: dict[str, torch.Tensor], words: str) -> None:
    given = {
        "values": torch.ones(1, 2, 8, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(1, 2, dtype=torch.int32),
        "topk_weights": torch.ones(1, 2),
    }
    with pytest.raises(FormatError, match=words):
        chord.weighted_sum(**(given | change), experts=2)


def test_a_layer_of_int4_experts_builds_it() -> None:
    int4 = layer_kernels("sm_90a", "w4a16", experts=8, hidden=256, intermediate=128)
    mxfp8 = layer_kernels("sm_90a", "mxfp8", experts=8, hidden=256, intermediate=128)
    assert WeightedSumPlan("sm_90a") in int4
    assert WeightedSumPlan("sm_90a") not in mxfp8
