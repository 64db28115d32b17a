# SPDX-License-Identifier: Apache-2.0
"""Random inputs against FP64 of the same definition, at odd sizes, on poisoned and guarded outputs."""

from __future__ import annotations

import pytest
import torch
from support import by_id, compute, error_on_written, random_ids, random_weight, route, truth

import chord_kernels as chord
from chord_kernels import reference

CONTRACTS = ("indexed", "contiguous", "masked")
ROUNDING = 2.1e-3  # a BF16 output of a well-conditioned sum; a handful of values scatters up to there


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile kernel for every block; test_stream.py has the other one."""
    monkeypatch.setenv("CHORD_W4A16_KERNEL", "tile")


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("tokens", [1, 7, 9, 63, 65, 127, 129])
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("block_rows", "dequant"), [(8, "exact"), (32, "exact"), (32, "bf16"), (64, "bf16"), (96, "bf16"), (128, "bf16")])
@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
def test_odd_token_counts(tokens: int, contract: str, block_rows: int, dequant: str, epilogue: str) -> None:
    experts, n, k = 5, 192, 320
    weight = random_weight(experts, n, k, paired=True, device="cuda", seed=tokens)
    x = torch.randn((tokens, k), device="cuda").to(torch.bfloat16)
    routed = route(contract, x, random_ids(tokens, experts, 2, device="cuda", seed=tokens), experts, block_rows=block_rows)
    out = compute(routed, weight, epilogue=epilogue, dequant=dequant)
    limit = ROUNDING if tokens > 1 else 3e-3
    assert error_on_written(out, truth(routed, weight, epilogue=epilogue, dequant=dequant)) < limit


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("fuller", [False, True])
@pytest.mark.parametrize("block_rows", [16, 32, 64, 96, 128])
def test_every_token_width(block_rows: int, fuller: bool) -> None:
    """Blocks of one row to all of them, where the plan expects fuller ones and where it does not."""
    counts = [c + d for c in range(0, block_rows + 1, 8) for d in (0, 1) if 0 < c + d <= block_rows]
    experts = len(counts) if fuller else 4 * len(counts)  # the others have no rows
    if fuller:
        counts = [max(count, 9 * block_rows // 16) for count in counts]
    ids = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)], dtype=torch.int32, device="cuda")[:, None]
    weight = random_weight(experts, 192, 320, device="cuda")
    x = torch.randn((ids.numel(), 320), device="cuda").to(torch.bfloat16)
    routed = route("indexed", x, ids, experts, block_rows=block_rows)
    out = compute(routed, weight, dequant="bf16")
    assert error_on_written(out, truth(routed, weight, dequant="bf16")) < ROUNDING


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("n", [64, 128, 192, 512, 576])
@pytest.mark.parametrize("k", [64, 128, 192, 256, 448, 1024, 2048])
@pytest.mark.parametrize(("block_rows", "dequant"), [(16, "exact"), (96, "bf16"), (128, "bf16")])
def test_shapes(n: int, k: int, block_rows: int, dequant: str) -> None:
    """K in {192, 448} is no multiple of the stage; HAZARDS 29."""
    experts, tokens = 3, 150
    weight = random_weight(experts, n, k, device="cuda")
    x = torch.randn((tokens, k), device="cuda").to(torch.bfloat16)
    routed = route("indexed", x, random_ids(tokens, experts, 2, device="cuda"), experts, block_rows=block_rows)
    assert error_on_written(compute(routed, weight, dequant=dequant), truth(routed, weight, dequant=dequant)) < ROUNDING


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("block_rows", [16, 64, 96, 128])
def test_contracts_agree_bitwise(block_rows: int) -> None:
    experts, tokens, top_k = 6, 300, 2
    weight = random_weight(experts, 512, 512, paired=True, device="cuda")
    x = torch.randn((tokens, 512), device="cuda").to(torch.bfloat16)
    ids = random_ids(tokens, experts, top_k, device="cuda")
    results = []
    for contract in CONTRACTS:
        routed = route(contract, x, ids, experts, block_rows=block_rows)
        results.append(by_id(routed, compute(routed, weight, dequant="bf16", epilogue="swiglu"), tokens * top_k))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(("block_rows", "dequant"), [(8, "exact"), (32, "exact"), (128, "bf16")])
def test_a_token_alone_is_bitwise_the_token_among_others(block_rows: int, dequant: str) -> None:
    experts, tokens = 4, 100
    weight = random_weight(experts, 256, 1024, device="cuda")
    x = torch.randn((tokens, 1024), device="cuda").to(torch.bfloat16)
    ids = random_ids(tokens, experts, 2, device="cuda")
    together = chord.indexed(x, weight, chord.align_indexed(ids, experts, block_rows), dequant=dequant)
    for token in (0, 41, 99):
        alone = chord.indexed(
            x[token : token + 1], weight, chord.align_indexed(ids[token : token + 1], experts, block_rows), dequant=dequant
        )
        assert torch.equal(alone, together[2 * token : 2 * token + 2])


def test_repeated_runs_are_bitwise_equal() -> None:
    experts, tokens = 8, 500
    weight = random_weight(experts, 512, 1024, device="cuda")
    x = torch.randn((tokens, 1024), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(tokens, experts, 4, device="cuda"), experts, 128)
    first = chord.indexed(x, weight, routing)
    for _ in range(20):
        assert torch.equal(chord.indexed(x, weight, routing), first)


@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 9, 10, 16])
@pytest.mark.parametrize("experts", [128, 385, 896])
def test_many_experts_and_any_top_k(experts: int, top_k: int) -> None:
    """HAZARDS 40."""
    tokens, hidden, inter = 33, 128, 64
    gate_up = random_weight(experts, 2 * inter, hidden, paired=True, device="cuda")
    down = random_weight(experts, hidden, inter, device="cuda", seed=1)
    x = torch.randn((tokens, hidden), device="cuda").to(torch.bfloat16)
    ids = random_ids(tokens, experts, top_k, device="cuda")
    weights = torch.rand((tokens, top_k), device="cuda")
    value = chord.MoELayer(gate_up, down)(x, ids, weights)
    expected = reference.layer(x, gate_up, down, ids, weights, dtype=torch.float64, round_hidden=True)
    assert reference.relative_error(value, expected) < 3e-3


def test_terms_that_cancel_stay_in_fp32() -> None:
    """HAZARDS 40: large terms of opposite sign, then a small one that BF16 sums would lose."""
    codes = torch.full((1, 64, 64), 8, dtype=torch.uint8, device="cuda")
    codes[:, :, 0], codes[:, :, 1], codes[:, :, 40] = 15, 1, 9  # +7, -7, +1
    weight = chord.pack_w4a16(codes, torch.ones((1, 64, 2), dtype=torch.bfloat16, device="cuda"))
    x = torch.zeros((1, 64), dtype=torch.bfloat16, device="cuda")
    x[0, 0], x[0, 1], x[0, 40] = 4096.0, 4096.0, 0.5
    routing = chord.align_indexed(torch.zeros((1, 1), dtype=torch.int32, device="cuda"), 1, 8)
    for dequant in ("exact", "bf16"):
        assert torch.equal(
            chord.indexed(x, weight, routing, dequant=dequant), torch.full((1, 64), 0.5, dtype=torch.bfloat16, device="cuda")
        )
