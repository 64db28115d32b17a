# SPDX-License-Identifier: Apache-2.0
"""All experts of a checkpoint's tensor at once, on CPU; the kernel has tests of its own."""

from __future__ import annotations

import pytest
import torch

import chord_kernels as chord
from chord_kernels.errors import FormatError
from chord_kernels.formats import MXFP8, W4A16
from chord_kernels.pack import _FLOOR_BITS, pack_experts_into
from chord_kernels.plain_kernels import PackPlan
from chord_kernels.plan import layer_kernels
from chord_kernels.weights import empty_weight


@pytest.mark.parametrize("paired", [False, True])
def test_as_one_by_one(paired: bool) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, 128, 16), dtype=torch.int32)
    scales = torch.rand((3, 128, 4)) + 0.1
    weight = empty_weight(W4A16, 3, 128, 128, paired=paired)
    pack_experts_into(weight, words, scales)
    assert torch.equal(weight.data, chord.pack_w4a16(words, scales, gate_up=paired).data)


def test_what_is_refused() -> None:
    words, scales = torch.zeros((2, 64, 8), dtype=torch.int32), torch.ones((2, 64, 2))
    weight = empty_weight(W4A16, 2, 64, 64)
    for wrong in ((words[:1], scales), (words, scales[:, :, :1]), (words.to(torch.uint8), scales)):
        with pytest.raises(FormatError, match=r"takes int32 \[2, 64, 8\] and \[2, 64, 2\]"):
            pack_experts_into(weight, *wrong)
    with pytest.raises(FormatError, match="must be w4a16"):
        pack_experts_into(empty_weight(MXFP8, 2, 64, 64), words, scales)
    with pytest.raises(FormatError, match="device"):
        pack_experts_into(weight, words.to("meta"), scales)
    with pytest.raises(FormatError, match="not finite"):
        pack_experts_into(weight, words, scales * float("inf"))


def test_the_kernel_is_built_with_a_layers_others() -> None:
    assert PackPlan("sm_90a") in layer_kernels("sm_90a", "w4a16", experts=8, hidden=256, intermediate=128)
    floor = torch.tensor([_FLOOR_BITS, _FLOOR_BITS - 1], dtype=torch.int16).view(torch.bfloat16)
    assert floor[0] == W4A16.scale_floor
    assert floor[1] < W4A16.scale_floor
