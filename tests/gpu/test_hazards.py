# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other kernels, by number."""

from __future__ import annotations

import pytest
import torch
from support import GUARD_ROWS, Guarded, compute, error_on_written, random_codes, random_ids, random_weight, route, truth

import chord_kernels as chord
from chord_kernels import reference
from chord_kernels.errors import FormatError, UnsupportedError
from chord_kernels.rows import ContiguousRows, IndexedRows, MaskedRows


def small_layer(experts: int = 6, hidden: int = 256, inter: int = 128, expert_map: torch.Tensor | None = None) -> chord.MoELayer:
    gate_up = random_weight(experts, 2 * inter, hidden, paired=True, device="cuda")
    return chord.MoELayer(gate_up, random_weight(experts, hidden, inter, device="cuda", seed=1), expert_map)


def layer_truth(layer: chord.MoELayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    numerics = layer.numerics(*ids.shape)
    return reference.layer(x, layer.gate_up, layer.down, ids, weights, dequant=numerics, dtype=torch.float64, round_hidden=True)


@pytest.mark.parametrize("mapped", [False, True])
def test_1_missing_ids_add_exactly_zero(mapped: bool) -> None:
    experts = 6
    expert_map = torch.arange(experts, dtype=torch.int32, device="cuda").flip(0) if mapped else None
    layer = small_layer(experts, expert_map=expert_map)
    x = torch.randn((40, 256), device="cuda").to(torch.bfloat16)
    ids, weights = random_ids(40, experts, 3, device="cuda"), torch.rand((40, 3), device="cuda")
    ids[::4, 1] = -1
    ids[5] = -1
    weights[5] = float("nan")
    poison = torch.full((1 << 22,), float("nan"), device="cuda")  # what a caching allocator hands out next
    del poison
    value = layer(x, ids, weights)
    local = torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()], -1) if mapped else ids
    assert torch.equal(value[5], torch.zeros_like(value[5]))
    assert reference.relative_error(value, layer_truth(layer, x, local, torch.nan_to_num(weights))) < 3e-3


@pytest.mark.parametrize("max_m", [1, 7, 8, 16, 33, 63])
@pytest.mark.parametrize("hint", [0, 1, 16, 64, 500])
def test_2_masked_touches_only_its_rows(max_m: int, hint: int) -> None:
    """And 41: any hint is right."""
    counts = [max_m, 0, 1, max_m]
    weight = random_weight(4, 192, 128, device="cuda")
    x = torch.randn((4, max_m, 128), device="cuda").to(torch.bfloat16)
    routing = MaskedRows(torch.tensor(counts, dtype=torch.int32, device="cuda"), hint)
    guarded = Guarded.make(4 * max_m, 192, "cuda")
    chord.masked(x, weight, routing, out=guarded.out, validate=True)
    valid = torch.arange(max_m, device="cuda") < torch.tensor(counts, device="cuda")[:, None]
    guarded.assert_only_written(valid.flatten())
    expected = torch.full((4 * max_m, 192), float("nan"), dtype=torch.float64, device="cuda")
    reference.grouped(x, weight, routing, expected, dequant="exact", dtype=torch.float64)
    assert error_on_written(guarded.out, expected) < 2.5e-3


def test_2_counts_beyond_max_m_are_clamped_or_refused() -> None:
    weight = random_weight(2, 64, 64, device="cuda")
    x = torch.randn((2, 4, 64), device="cuda").to(torch.bfloat16)
    routing = MaskedRows(torch.tensor([9, -3], dtype=torch.int32, device="cuda"), 4)
    guarded = Guarded.make(8, 64, "cuda")
    chord.masked(x, weight, routing, out=guarded.out)
    guarded.assert_only_written(torch.arange(8, device="cuda") < 4)
    with pytest.raises(FormatError, match=r"masked_m\[0\] = 9"):
        chord.masked(x, weight, routing, validate=True)


def test_3_offsets_beyond_32_bits_in_rows() -> None:
    tokens, top_k, n, k = 37_500, 8, 7168, 64
    weight = random_weight(8, n, k, device="cuda")
    x = torch.randn((tokens * top_k, k), device="cuda").to(torch.bfloat16)
    ids = torch.arange(8, dtype=torch.int32, device="cuda").expand(tokens, 8).contiguous()
    aligned = chord.align_indexed(ids, 8, 128)
    routing = IndexedRows(aligned.sorted_ids, aligned.expert_ids, aligned.num_tokens_padded, 1, 128)
    out = chord.indexed(x, weight, routing)
    assert out.numel() > 2**31
    for row in (0, tokens * top_k // 2, tokens * top_k - 1):
        expected = reference.expert_product(x[row : row + 1], *weight.unpack_expert(row % 8), dequant="bf16", dtype=torch.float64)
        assert reference.relative_error(out[row], expected[0]) < 2.5e-3


def test_3_offsets_beyond_32_bits_in_weights() -> None:
    experts, n, k = 140, 4096, 7168
    from chord_kernels.formats import W4A16
    from chord_kernels.weights import empty_weight, pack_expert_into

    weight = empty_weight(W4A16, experts, n, k, device="cuda")
    for expert in range(73, experts):
        pack_expert_into(weight, expert, *(part[0] for part in random_codes(1, n, k, device="cuda", seed=expert)))
    assert weight.nbytes > 2**31
    x = torch.randn((9, k), device="cuda").to(torch.bfloat16)
    ids = torch.tensor([[73], [79], [110], [132], [133], [135], [137], [138], [139]], dtype=torch.int32, device="cuda")
    for block_rows in (8, 128):
        routed = route("indexed", x, ids, experts, block_rows=block_rows)
        dequant = "exact" if block_rows == 8 else "bf16"
        assert error_on_written(compute(routed, weight), truth(routed, weight, dequant=dequant)) < 2.5e-3


def test_5_graph_replay_survives_larger_calls() -> None:
    layer = small_layer()
    layer.warmup()
    x = torch.randn((8, 256), device="cuda").to(torch.bfloat16)
    ids, weights = random_ids(8, 6, 2, device="cuda"), torch.rand((8, 2), device="cuda")
    out = torch.empty_like(x)
    layer(x, ids, weights, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, ids, weights, out=out)
    big = torch.randn((700, 256), device="cuda").to(torch.bfloat16)
    bystander = torch.full((1 << 20,), 5.0, device="cuda")
    layer(big, random_ids(700, 6, 2, device="cuda"), torch.rand((700, 2), device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
    assert bool((bystander == 5.0).all())
    # New routing in the same buffers: the graph reads it on the device.
    ids.copy_(random_ids(8, 6, 2, device="cuda", seed=9))
    graph.replay()
    assert reference.relative_error(out, layer_truth(layer, x, ids, weights)) < 3e-3


def test_6_every_token_remote_under_capture() -> None:
    expert_map = torch.tensor([-1] * 6 + [0, 1], dtype=torch.int32, device="cuda")
    layer = small_layer(2, expert_map=expert_map)
    layer.warmup()
    x = torch.randn((8, 256), device="cuda").to(torch.bfloat16)
    ids, weights = random_ids(8, 6, 2, device="cuda"), torch.rand((8, 2), device="cuda")
    out = torch.full_like(x, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, ids, weights, out=out)
    graph.replay()
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("tail", [128, 1024])
def test_7_contiguous_paddings(tail: int) -> None:
    blocks = [
        torch.tensor([0] * 128),
        torch.full((128,), -1),
        torch.tensor([1] * 5 + [-1] * 123),
        torch.tensor([-1] * 3 + [2] * 4 + [-1] * 121),
        torch.full((tail,), -1),
    ]
    m_indices = torch.cat(blocks).to(torch.int32).cuda()
    weight = random_weight(3, 192, 128, device="cuda")
    x = torch.randn((m_indices.numel(), 128), device="cuda").to(torch.bfloat16)
    x[m_indices < 0] = float("nan")
    routing = ContiguousRows(m_indices)
    guarded = Guarded.make(m_indices.numel(), 192, "cuda")
    chord.contiguous(x, weight, routing, out=guarded.out, validate=True)
    guarded.assert_only_written(m_indices >= 0)
    expected = torch.full(guarded.out.shape, float("nan"), dtype=torch.float64, device="cuda")
    reference.grouped(x, weight, routing, expected, dequant="bf16", dtype=torch.float64)
    assert error_on_written(guarded.out, expected) < 2.5e-3


def test_7_a_boundary_off_the_alignment_is_refused_on_request_and_never_hangs() -> None:
    m_indices = torch.tensor([0] * 70 + [1] * 58, dtype=torch.int32, device="cuda")
    weight = random_weight(2, 64, 64, device="cuda")
    x = torch.randn((128, 64), device="cuda").to(torch.bfloat16)
    guarded = Guarded.make(128, 64, "cuda")
    chord.contiguous(x, weight, ContiguousRows(m_indices), out=guarded.out)
    torch.cuda.synchronize()
    assert torch.isnan(guarded.whole[:GUARD_ROWS]).all()
    with pytest.raises(FormatError, match="experts \\[0, 1\\]"):
        chord.contiguous(x, weight, ContiguousRows(m_indices), validate=True)


@pytest.mark.parametrize("top_k", [1, 2])
def test_8_padding_rows_of_a_graph_do_not_leak(top_k: int) -> None:
    """top_k 1 goes to warp decode, 2 to the aligned blocks."""
    layer = small_layer()
    assert layer.warp_decodes(16, top_k) == (top_k == 1)
    x = torch.randn((16, 256), device="cuda").to(torch.bfloat16)
    ids, weights = random_ids(16, 6, top_k, device="cuda"), torch.rand((16, top_k), device="cuda")
    clean = layer(x, ids, weights)[:10]
    x[10:] = float("nan")
    ids[10:] = torch.tensor([6, 2**31 - 1, -5], dtype=torch.int32, device="cuda")[:top_k]
    assert torch.equal(layer(x, ids, weights)[:10], clean)


def test_9_nothing_to_do() -> None:
    layer = small_layer()
    empty = torch.empty((0, 256), dtype=torch.bfloat16, device="cuda")
    ids = torch.empty((0, 2), dtype=torch.int32, device="cuda")
    assert layer(empty, ids, torch.empty((0, 2), device="cuda")).shape == (0, 256)
    assert chord.indexed(empty, layer.gate_up, chord.align_indexed(ids, 6, 8)).shape == (0, 256)
    none = torch.empty((0,), dtype=torch.int32, device="cuda")
    assert chord.contiguous(empty, layer.gate_up, ContiguousRows(none)).shape == (0, 256)
    counts = torch.zeros(6, dtype=torch.int32, device="cuda")
    assert chord.masked(empty.view(6, 0, 256), layer.gate_up, MaskedRows(counts, 0)).shape == (0, 256)
    guarded = Guarded.make(6 * 4, 256, "cuda")
    x = torch.randn((6, 4, 256), device="cuda").to(torch.bfloat16)
    chord.masked(x, layer.gate_up, MaskedRows(counts, 4), out=guarded.out)
    guarded.assert_only_written(torch.zeros(24, dtype=torch.bool, device="cuda"))


def test_12_two_streams_at_once() -> None:
    layer = small_layer()
    layer.warmup()
    inputs = []
    for seed in range(2):
        x = torch.randn((24, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(torch.bfloat16)
        inputs.append((x, random_ids(24, 6, 2, device="cuda", seed=seed), torch.rand((24, 2), device="cuda")))
    expected = [layer(*each) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(500):
        for side, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[side].append(layer(*inputs[side]))
    torch.cuda.synchronize()
    for side in range(2):
        assert all(torch.equal(value, expected[side]) for value in results[side])


@pytest.mark.parametrize("block_rows", [8, 16, 32, 64, 96, 128])
def test_14_the_largest_routing(block_rows: int) -> None:
    experts, tokens, n, k = 384, 16384, 256, 256
    weight = random_weight(experts, n, k, device="cuda")
    x = torch.randn((tokens, k), device="cuda").to(torch.bfloat16)
    ids = random_ids(tokens, experts, 8, device="cuda")
    out = chord.indexed(x, weight, chord.align_indexed(ids, experts, block_rows), validate=True)
    assert not torch.isnan(out).any()
    dequant = "exact" if block_rows <= 16 else "bf16"
    for row in (0, 4096, tokens * 8 - 1):
        expert = int(ids.flatten()[row])
        expected = reference.expert_product(x[row // 8].unsqueeze(0), *weight.unpack_expert(expert), dequant=dequant, dtype=torch.float64)
        assert reference.relative_error(out[row], expected[0]) < 2.5e-3


def test_18_19_what_is_not_computed_is_refused_by_name() -> None:
    layer = small_layer()
    with pytest.raises(UnsupportedError, match="'gelu'"):
        chord.MoELayer(layer.gate_up, layer.down, activation="gelu")
    x = torch.randn((2, 256), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(2, 6, 2, device="cuda"), 6, 8)
    with pytest.raises(UnsupportedError, match="'gelu'"):
        chord.indexed(x, layer.gate_up, routing, epilogue="gelu")
    with pytest.raises(TypeError, match="apply_router_weight_on_input"):
        layer(x, random_ids(2, 6, 2, device="cuda"), torch.rand((2, 2), device="cuda"), apply_router_weight_on_input=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_22_id_dtypes(dtype: torch.dtype) -> None:
    layer = small_layer()
    x = torch.randn((12, 256), device="cuda").to(torch.bfloat16)
    ids, weights = random_ids(12, 6, 2, device="cuda"), torch.rand((12, 2), device="cuda")
    strided = ids.to(dtype).repeat_interleave(2, dim=1)[:, ::2] if dtype != torch.uint32 else ids.to(dtype)
    assert torch.equal(layer(x, strided, weights), layer(x, ids, weights))
    routing = chord.align_indexed(ids, 6, 8)
    with pytest.raises(FormatError, match="sorted_ids"):
        IndexedRows(routing.sorted_ids.to(torch.int64), routing.expert_ids, routing.num_tokens_padded, 2, 8)


def test_31_tiny_and_huge_scales_stay_finite() -> None:
    codes, _ = random_codes(1, 64, 64, device="cuda")
    for scale in (1e-7, 6e4, 1e-40):
        weight = chord.pack_w4a16(codes, torch.full((1, 64, 2), scale, device="cuda"))
        x = torch.ones((1, 64), dtype=torch.bfloat16, device="cuda")
        routing = chord.align_indexed(torch.zeros((1, 1), dtype=torch.int32, device="cuda"), 1, 8)
        out = chord.indexed(x, weight, routing)
        expected = reference.expert_product(x, *weight.unpack_expert(0), dequant="exact", dtype=torch.float64)
        assert torch.isfinite(out).all()
        if scale == 1e-40:
            assert not bool(out.any())
        else:
            assert reference.relative_error(out, expected) < 3e-3
        if scale == 6e4:
            assert float(out.abs().max()) > 65504
    with pytest.raises(FormatError, match="not finite"):
        chord.pack_w4a16(codes, torch.full((1, 64, 2), float("inf"), device="cuda"))


def test_36_packing_peaks_at_input_output_and_one_expert() -> None:
    experts, n, k = 12, 4096, 7168
    codes = torch.randint(-(2**31), 2**31 - 1, (experts, n, k // 8), dtype=torch.int32, device="cuda")
    scales = torch.rand((experts, n, k // 32), device="cuda").to(torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight = chord.pack_w4a16(codes, scales, gate_up=True)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= weight.nbytes * (1 + 1 / experts) + n * k
    assert torch.cuda.memory_allocated() - before <= weight.nbytes + (1 << 20)


def test_38_swapping_experts_swaps_results() -> None:
    weight = random_weight(4, 128, 128, device="cuda")
    swapped = chord.PackedWeight(weight.data[[1, 0, 2, 3]].contiguous())
    x = torch.randn((20, 128), device="cuda").to(torch.bfloat16)
    ids = random_ids(20, 4, 2, device="cuda")
    exchanged = torch.where(ids == 0, 1, torch.where(ids == 1, 0, ids)).to(torch.int32)
    one = chord.indexed(x, weight, chord.align_indexed(ids, 4, 8))
    other = chord.indexed(x, swapped, chord.align_indexed(exchanged, 4, 8))
    assert torch.equal(one, other)


def test_one_expert_takes_every_token() -> None:
    weight = random_weight(16, 256, 256, device="cuda")
    x = torch.randn((513, 256), device="cuda").to(torch.bfloat16)
    ids = torch.full((513, 1), 11, dtype=torch.int32, device="cuda")
    for contract in ("indexed", "contiguous", "masked"):
        for block_rows in (8, 128):
            routed = route(contract, x, ids, 16, block_rows=block_rows)
            dequant = "exact" if block_rows == 8 else "bf16"
            assert error_on_written(compute(routed, weight, dequant=dequant), truth(routed, weight, dequant=dequant)) < 2.2e-3


def test_only_the_valid_prefix_of_over_allocated_buffers_is_read() -> None:
    weight = random_weight(4, 128, 128, device="cuda")
    x = torch.randn((10, 128), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(10, 4, 2, device="cuda"), 4, 16)
    used = int(routing.num_tokens_padded)
    expected = chord.indexed(x, weight, routing)
    garbage = torch.randint(0, 20, (4096,), dtype=torch.int32, device="cuda")
    sorted_ids = torch.cat([routing.sorted_ids[:used], garbage])
    expert_ids = torch.cat([routing.expert_ids[: used // 16], garbage[:512]])
    out = Guarded.make(20, 128, "cuda")
    chord.indexed(x, weight, IndexedRows(sorted_ids, expert_ids, routing.num_tokens_padded, 2, 16), out=out.out)
    assert torch.equal(out.out, expected)


def test_blocks_of_expert_minus_one_are_skipped() -> None:
    weight = random_weight(4, 128, 128, device="cuda")
    x = torch.randn((10, 128), device="cuda").to(torch.bfloat16)
    ids = random_ids(10, 4, 2, device="cuda")
    routing = chord.align_indexed(ids, 4, 16)
    expert_ids = routing.expert_ids.clone()
    expert_ids[expert_ids == 2] = -1
    expert_ids[expert_ids == 3] = 77
    out = Guarded.make(20, 128, "cuda")
    chord.indexed(x, weight, IndexedRows(routing.sorted_ids, expert_ids, routing.num_tokens_padded, 2, 16), out=out.out)
    out.assert_only_written(ids.flatten() < 2)
