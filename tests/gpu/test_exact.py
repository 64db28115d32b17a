# SPDX-License-Identifier: Apache-2.0
"""One-hot activations and power-of-two scales: the output is the weight matrix, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support import compute, power_scales, random_codes, route

import chord_kernels as chord
from chord_kernels.formats import W4A16

CONTRACTS = ("indexed", "contiguous", "masked")
SCHEDULES = [(8, "exact"), (16, "exact"), (32, "exact"), (8, "bf16"), (16, "bf16"), (32, "bf16"), (64, "bf16"), (96, "bf16"), (128, "bf16")]


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile kernel for every block; test_stream.py has the other one."""
    monkeypatch.setenv("CHORD_W4A16_KERNEL", "tile")


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("block_rows", "dequant"), SCHEDULES)
def test_one_hot_gives_the_weight(contract: str, block_rows: int, dequant: str, paired: bool) -> None:
    experts, n, k = 3, 320, 192  # five row tiles: the last panel is partial for every panel height
    codes, _ = random_codes(experts, n, k, device="cuda")
    scales = power_scales(experts, n, k, device="cuda")
    weight = chord.pack_w4a16(codes, scales, gate_up=paired)
    x = torch.eye(k, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(experts, dtype=torch.int32, device="cuda").expand(k, experts).contiguous()
    routed = route(contract, x, ids, experts, block_rows=block_rows)
    out = compute(routed, weight, dequant=dequant)
    values = W4A16.dequantize(codes, scales, rounded=False, dtype=torch.float32)
    expected = torch.stack([values[e].T for e in range(experts)], dim=1).reshape(k * experts, n)
    written = routed.ids >= 0
    assert torch.equal(out[written].float(), expected[routed.ids[written]])


@pytest.mark.parametrize("scale", [2.0**-97, 2.0**-40 * 1.2421875, 0.01, 2.0**22 * 1.9921875])
@pytest.mark.parametrize(("block_rows", "dequant"), [(16, "exact"), (32, "bf16"), (64, "bf16"), (128, "bf16")])
def test_scales_of_any_size_that_packing_takes(scale: float, block_rows: int, dequant: str) -> None:
    codes, _ = random_codes(1, 64, 128, device="cuda")
    scales = torch.full((1, 64, 4), scale, device="cuda").to(torch.bfloat16)
    x = torch.eye(128, dtype=torch.bfloat16, device="cuda")
    routing = chord.align_indexed(torch.zeros((128, 1), dtype=torch.int32, device="cuda"), 1, block_rows)
    out = chord.indexed(x, chord.pack_w4a16(codes, scales), routing, dequant=dequant)
    values = W4A16.dequantize(codes, scales, rounded=True, dtype=torch.float32)
    assert torch.equal(out.float(), values[0].T)


@pytest.mark.parametrize("dequant", ["exact", "bf16"])
def test_all_codes_in_order(dequant: str) -> None:
    """HAZARDS 30: codes 0..15 with scale 1 are -8..7."""
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(64, 4).unsqueeze(0)
    weight = chord.pack_w4a16(codes, torch.ones((1, 64, 2), dtype=torch.bfloat16, device="cuda"))
    x = torch.eye(64, dtype=torch.bfloat16, device="cuda")
    routing = chord.align_indexed(torch.zeros((64, 1), dtype=torch.int32, device="cuda"), 1, 32)
    out = chord.indexed(x, weight, routing, dequant=dequant)
    assert torch.equal(out[:, 0].float(), torch.arange(-8, 8, device="cuda").repeat(4).float())


def test_gate_comes_first() -> None:
    """HAZARDS 17: gate rows +3, up rows -1."""
    inter, hidden = 64, 64
    codes = torch.cat([torch.full((1, inter, hidden), 11), torch.full((1, inter, hidden), 7)], dim=1).to(torch.uint8).cuda()
    weight = chord.pack_w4a16(codes, torch.ones((1, 2 * inter, 2), dtype=torch.bfloat16, device="cuda"), gate_up=True)
    x = torch.zeros((1, hidden), dtype=torch.bfloat16, device="cuda")
    x[0, 5] = 1.0
    routing = chord.align_indexed(torch.zeros((1, 1), dtype=torch.int32, device="cuda"), 1, 8)
    raw = chord.indexed(x, weight, routing)
    assert torch.equal(raw[0].float(), torch.cat([torch.full((inter,), 3.0), torch.full((inter,), -1.0)]).cuda())
    fused = chord.indexed(x, weight, routing, epilogue="swiglu")
    wanted = -torch.nn.functional.silu(torch.tensor(3.0)).to(torch.bfloat16)
    assert torch.equal(fused[0].cpu(), wanted.expand(inter))


def test_gpu_packing_is_bitwise_the_cpu_one() -> None:
    codes, scales = random_codes(3, 256, 448)
    for paired in (False, True):
        on_cpu = chord.pack_w4a16(codes, scales, gate_up=paired)
        words = W4A16.words_of_codes(codes)
        for on_gpu in (
            chord.pack_w4a16(codes.cuda(), scales.cuda(), gate_up=paired),
            chord.pack_w4a16(words.cuda(), scales.cuda(), gate_up=paired),
        ):
            assert torch.equal(on_gpu.data.cpu(), on_cpu.data)
