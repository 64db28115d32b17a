# SPDX-License-Identifier: Apache-2.0
"""The stream kernel, also where the plan would choose another: the one that Blackwell has must be right on Hopper first."""

from __future__ import annotations

import pytest
import torch
from support import by_id, compute, error_on_written, power_scales, random_codes, random_ids, random_weight, route, truth

import chord_kernels as chord
from chord_kernels.formats import W4A16
from chord_kernels.rows import IndexedRows

CONTRACTS = ("indexed", "contiguous", "masked")


@pytest.fixture(autouse=True, params=[("stream", 8), ("stream", 16)], ids=lambda param: f"{param[0]}{param[1]}")
def rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Token rows a block."""
    kernel, block_rows = request.param
    monkeypatch.setenv("CHORD_W4A16_KERNEL", kernel)
    monkeypatch.setenv("CHORD_W4A16_BM", str(block_rows))  # for contracts whose routing does not fix the block
    return block_rows


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_one_hot_gives_the_weight(contract: str, paired: bool, rows: int) -> None:
    experts, n, k = 3, 320, 192
    codes, _ = random_codes(experts, n, k, device="cuda")
    scales = power_scales(experts, n, k, device="cuda")
    weight = chord.pack_w4a16(codes, scales, gate_up=paired)
    x = torch.eye(k, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(experts, dtype=torch.int32, device="cuda").expand(k, experts).contiguous()
    routed = route(contract, x, ids, experts, block_rows=rows)
    out = compute(routed, weight, dequant="exact")
    values = W4A16.dequantize(codes, scales, rounded=False, dtype=torch.float32)
    expected = torch.stack([values[e].T for e in range(experts)], dim=1).reshape(k * experts, n)
    written = routed.ids >= 0
    assert torch.equal(out[written].float(), expected[routed.ids[written]])


@pytest.mark.parametrize("magnitude", [2.0**-40, 1.0, 2.0**40])
def test_powers_of_two_of_any_usual_size_are_exact(magnitude: float, rows: int) -> None:
    codes, _ = random_codes(1, 64, 128, device="cuda")
    scales = torch.ones((1, 64, 4), dtype=torch.bfloat16, device="cuda")
    x = torch.eye(128, device="cuda").mul(magnitude).to(torch.bfloat16)
    routing = chord.align_indexed(torch.zeros((128, 1), dtype=torch.int32, device="cuda"), 1, rows)
    out = chord.indexed(x, chord.pack_w4a16(codes, scales), routing)
    assert torch.equal(out.float(), (codes[0].float() - 8).T * magnitude)


@pytest.mark.parametrize("tokens", [1, 7, 9, 65, 129])
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("epilogue", "dequant"), [("store", "bf16"), ("swiglu", "exact")])
def test_odd_token_counts(tokens: int, contract: str, epilogue: str, dequant: str, rows: int) -> None:
    experts, n, k = 5, 192, 320
    weight = random_weight(experts, n, k, paired=True, device="cuda", seed=tokens)
    x = torch.randn((tokens, k), device="cuda").to(torch.bfloat16)
    routed = route(contract, x, random_ids(tokens, experts, 2, device="cuda", seed=tokens), experts, block_rows=rows)
    out = compute(routed, weight, epilogue=epilogue, dequant=dequant)
    assert error_on_written(out, truth(routed, weight, epilogue=epilogue, dequant=dequant)) < (2.1e-3 if tokens > 1 else 3e-3)


@pytest.mark.parametrize("n", [64, 128, 192, 448, 512, 7168])
@pytest.mark.parametrize("k", [64, 128, 192, 256, 448, 1088, 4160])
def test_shapes(n: int, k: int, rows: int) -> None:
    """Every width of a piece, partial panels and partial stages; enough tiles for whole runs, pairs and single ones."""
    experts, tokens = 9, 60
    weight = random_weight(experts, n, k, device="cuda")
    x = torch.randn((tokens, k), device="cuda").to(torch.bfloat16)
    routed = route("indexed", x, random_ids(tokens, experts, 2, device="cuda"), experts, block_rows=rows)
    assert error_on_written(compute(routed, weight, dequant="exact"), truth(routed, weight)) < 2.1e-3


def test_a_short_k_with_many_pieces_a_cta(rows: int) -> None:
    experts, tokens, top_k = 64, 96, 8
    weight = random_weight(experts, 7168, 256, device="cuda")
    x = torch.randn((tokens, 256), device="cuda").to(torch.bfloat16)
    ids = random_ids(tokens, experts, top_k, device="cuda")
    routed = route("indexed", x, ids, experts, block_rows=rows)
    for dequant in ("exact", "bf16"):
        out = compute(routed, weight, dequant=dequant)
        assert error_on_written(out, truth(routed, weight, dequant=dequant)) < 2.1e-3


def test_contracts_batches_and_runs_agree_bitwise(rows: int) -> None:
    experts, tokens, top_k = 6, 90, 2
    weight = random_weight(experts, 1024, 4096, paired=True, device="cuda")
    x = torch.randn((tokens, 4096), device="cuda").to(torch.bfloat16)
    ids = random_ids(tokens, experts, top_k, device="cuda")
    results = []
    for contract in (*CONTRACTS, "indexed"):
        routed = route(contract, x, ids, experts, block_rows=rows)
        results.append(by_id(routed, compute(routed, weight, dequant="exact", epilogue="swiglu"), tokens * top_k))
    for other in results[1:]:
        assert torch.equal(results[0], other)
    for token in (0, 41, 89):
        one = slice(token, token + 1)
        alone = chord.indexed(x[one], weight, chord.align_indexed(ids[one], experts, rows), epilogue="swiglu", dequant="exact")
        assert torch.equal(alone, results[0][2 * token : 2 * token + 2])


def test_blocks_of_expert_minus_one_and_empty_counts_are_skipped(rows: int) -> None:
    experts, k = 4, 512
    weight = random_weight(experts, 512, k, device="cuda")
    x = torch.randn((40, k), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(40, experts, 1, device="cuda"), experts, rows)
    full = chord.indexed(x, weight, routing)
    remote = IndexedRows(routing.sorted_ids, routing.expert_ids.clone(), routing.num_tokens_padded, 1, rows)
    remote.expert_ids[::2] = -1
    out = torch.full_like(full, float("nan"))
    chord.indexed(x, weight, remote, out=out)
    kept = ~torch.isnan(out[:, 0])
    assert 0 < int(kept.sum()) < 40
    assert torch.equal(out[kept], full[kept])
    nothing = torch.full((experts * rows, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
    chord.masked(torch.ones((experts * rows, k), dtype=torch.bfloat16, device="cuda"), weight, chord.MaskedRows(counts, rows), out=nothing)
    assert bool(torch.isnan(nothing).all())


def test_graphs_streams_and_eager_calls_at_once(rows: int) -> None:
    """HAZARDS 12: launches at once share nothing."""
    experts, tokens = 16, 20
    weight = random_weight(experts, 2048, 4096, device="cuda")
    x = torch.randn((tokens, 4096), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(tokens, experts, 4, device="cuda"), experts, rows)
    expected = chord.indexed(x, weight, routing)
    outs = [torch.full_like(expected, float("nan")) for _ in range(4)]
    graphs = []
    for out in outs[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chord.indexed(x, weight, routing, out=out)
            chord.indexed(x, weight, routing, out=out)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in outs]
    torch.cuda.synchronize()
    for _ in range(250):
        for graph, stream in zip(graphs, streams[:2], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for out, stream in zip(outs[2:], streams[2:], strict=True):
            with torch.cuda.stream(stream):
                chord.indexed(x, weight, routing, out=out)
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)
