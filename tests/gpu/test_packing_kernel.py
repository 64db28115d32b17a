# SPDX-License-Identifier: Apache-2.0
"""Packing by one kernel against packing by torch operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import chord_kernels as chord
from chord_kernels.errors import FormatError
from chord_kernels.formats import W4A16
from chord_kernels.pack import pack_experts_into
from chord_kernels.weights import PackedWeight, empty_weight


def checkpoint(experts: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(n)
    words = torch.randint(-(2**31), 2**31, (experts, n, k // 8), device="cuda", generator=g, dtype=torch.int64).to(torch.int32)
    scales = torch.randn((experts, n, k // 32), device="cuda", generator=g) * 0.02
    scales[:, ::7] *= 1e-30  # below the floor, and near it
    return words, scales.to(torch.bfloat16)


def packed(words: Tensor, scales: Tensor, *, paired: bool) -> PackedWeight:
    """Between poisoned bytes, of which none may be written."""
    experts, n, width = words.shape
    shape = W4A16.packed_shape(experts + 2, n, width * 8)
    whole = torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda")
    weight = PackedWeight(whole[1:-1], paired)
    pack_experts_into(weight, words, scales)
    assert (whole[0] == 0xA5).all()
    assert (whole[-1] == 0xA5).all()
    return weight


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("experts", "n", "k"), [(1, 64, 64), (3, 128, 192), (5, 192, 7168), (48, 4096, 256), (2, 7168, 2048)])
def test_bits_are_those_of_the_torch_operations(paired: bool, experts: int, n: int, k: int) -> None:
    words, scales = checkpoint(experts, n, k)
    right = chord.pack_w4a16(words, scales, gate_up=paired)
    assert torch.equal(packed(words, scales, paired=paired).data, right.data)
    assert torch.equal(packed(words, scales.float(), paired=paired).data, right.data)


def test_slices_of_a_stacked_checkpoint() -> None:
    words, scales = checkpoint(6, 128, 256)
    assert torch.equal(packed(words[::2], scales[::2], paired=False).data, chord.pack_w4a16(words[::2], scales[::2]).data)


@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "not finite"), (float("-inf"), "not finite"), (2.0**23, "reach"), (-(2.0**30), "reach")]
)
def test_scales_that_kernels_do_not_take(value: float, why: str) -> None:
    words, scales = checkpoint(3, 128, 128)
    scales[2, 77, 3] = value
    with pytest.raises(FormatError, match=why):
        packed(words, scales, paired=True)


def test_no_scratch() -> None:
    words, scales = checkpoint(8, 1024, 1024)
    weight = empty_weight(W4A16, 8, 1024, 1024, device="cuda")
    pack_experts_into(weight, words, scales)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pack_experts_into(weight, words, scales)
    assert torch.cuda.max_memory_allocated() - before <= 1024
