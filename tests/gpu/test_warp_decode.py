# SPDX-License-Identifier: Apache-2.0
"""Warp decode against FP64 of its numerics, and the hazards of routing and of MXFP8."""

from __future__ import annotations

import pytest
import torch
from support import random_ids, random_weight
from torch import Tensor

import chord_kernels as chord
from chord_kernels import reference
from chord_kernels.bench.warp_decode import random_mxfp8
from chord_kernels.decode_plan import warp_decode_plan
from chord_kernels.formats import MXFP8
from chord_kernels.weights import PackedWeight

FORMATS = ("mxfp8", "w4a16")


def layer(format_name: str, experts: int, hidden: int, inter: int) -> tuple[PackedWeight, PackedWeight]:
    def make(n: int, k: int, *, paired: bool, seed: int) -> PackedWeight:
        if format_name == "mxfp8":
            return random_mxfp8(experts, n, k, paired=paired, seed=seed)
        return random_weight(experts, n, k, paired=paired, device="cuda", seed=seed)

    return make(2 * inter, hidden, paired=True, seed=0), make(hidden, inter, paired=False, seed=1)


def tokens_of(count: int, hidden: int) -> Tensor:
    return torch.randn((count, hidden), device="cuda", generator=torch.Generator("cuda").manual_seed(count)).to(torch.bfloat16)


def compute(x: Tensor, pair: tuple[PackedWeight, PackedWeight], ids: Tensor, weights: Tensor, **options: Tensor) -> Tensor:
    """On a poisoned output between poisoned rows, of which none may be written."""
    whole = torch.full((x.shape[0] + 4, x.shape[1]), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = whole[2:-2]
    chord.warp_decode(x, *pair, ids, weights, out=out, **options)
    assert whole[:2].isnan().all()
    assert whole[-2:].isnan().all()
    return out


def truth(x: Tensor, pair: tuple[PackedWeight, PackedWeight], ids: Tensor, weights: Tensor) -> Tensor:
    return reference.layer(x, *pair, ids, weights, dtype=torch.float64, round_hidden=True, round_products=False)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 9, 16, 31, 33, 64])
@pytest.mark.parametrize(
    ("experts", "hidden", "inter", "top_k"),
    [(16, 512, 192, 4), (128, 2048, 768, 8), (5, 320, 64, 1), (40, 64, 640, 16), (9, 4352, 64, 3), (20, 3072, 320, 8)],
)
def test_batches(format_name: str, tokens: int, experts: int, hidden: int, inter: int, top_k: int) -> None:
    pair = layer(format_name, experts, hidden, inter)
    x, ids = tokens_of(tokens, hidden), random_ids(tokens, experts, top_k, device="cuda", seed=tokens)
    weights = torch.rand((tokens, top_k), device="cuda")
    assert reference.relative_error(compute(x, pair, ids, weights), truth(x, pair, ids, weights)) < 2.3e-3


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_accuracy_to_fp64_without_any_rounding(format_name: str, tokens: int) -> None:
    """And against the path that quantizes activations to MXFP8."""
    pair = layer(format_name, 64, 2048, 768)
    x, ids = tokens_of(tokens, 2048), random_ids(tokens, 64, 8, device="cuda", seed=tokens)
    weights = torch.softmax(torch.randn((tokens, 8), device="cuda"), dim=1)
    value, exact = compute(x, pair, ids, weights).double(), reference.layer(x, *pair, ids, weights, dtype=torch.float64)
    quantized = reference.layer(x, *pair, ids, weights, dtype=torch.float64, round_hidden=True, quantize_activations=True)
    assert 1 - torch.nn.functional.cosine_similarity(value.flatten(), exact.flatten(), dim=0) < 4e-6
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().max())) - 7)
    assert (value - exact).abs().max() <= ulp
    assert reference.relative_error(quantized, exact) > 1.4 * reference.relative_error(value, exact)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("tokens", "experts"), [(2, 16), (8, 200), (64, 16)])
def test_all_tokens_of_the_same_experts(format_name: str, tokens: int, experts: int) -> None:
    """With 200 experts groups have four tokens: an expert of eight has two."""
    pair = layer(format_name, experts, 512, 192)
    x, weights = tokens_of(tokens, 512), torch.rand((tokens, 4), device="cuda")
    ids = torch.tensor([3, 9, 0, 15], dtype=torch.int32, device="cuda").repeat(tokens, 1)
    assert reference.relative_error(compute(x, pair, ids, weights), truth(x, pair, ids, weights)) < 2.3e-3


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_dropped_repeated_and_remote_ids(format_name: str, tokens: int) -> None:
    """HAZARDS 1, 6, 8: they add exactly 0, or twice; poisoned activations of such tokens reach nobody else."""
    experts, known = 12, 48
    pair = layer(format_name, experts, 512, 128)
    x, weights = tokens_of(tokens, 512), torch.rand((tokens, 8), device="cuda")
    expert_map = torch.full((known,), -1, dtype=torch.int32, device="cuda")
    expert_map[20 : 20 + experts] = torch.arange(experts, dtype=torch.int32, device="cuda")
    ids = torch.randint(15, 40, (tokens, 8), dtype=torch.int32, device="cuda")
    ids[:, 0] = torch.tensor([-1, 48, 2**31 - 1, -5, 20, 20, 31], dtype=torch.int32, device="cuda").repeat(6)[:tokens]
    ids[:, 2] = ids[:, 1]
    local = torch.where((ids >= 0) & (ids < known), expert_map[ids.clamp(0, known - 1).long()], -1)
    value = compute(x, pair, ids, weights, expert_map=expert_map)
    assert reference.relative_error(value, truth(x, pair, local, weights)) < 2.5e-3
    ids[tokens // 2], x[tokens // 2] = -1, float("nan")
    again = compute(x, pair, ids, weights, expert_map=expert_map)
    others = torch.arange(tokens, device="cuda") != tokens // 2
    assert torch.equal(again[others], value[others])
    assert not again[tokens // 2].any()


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_token_alone_is_bitwise_the_token_among_others(format_name: str) -> None:
    """Under one batch bucket: the others have no experts."""
    pair = layer(format_name, 16, 1024, 256)
    x, ids, weights = tokens_of(64, 1024), random_ids(64, 16, 4, device="cuda"), torch.rand((64, 4), device="cuda")
    together = compute(x, pair, ids, weights)
    for token in (0, 17, 63):
        alone = torch.full_like(ids, -1)
        alone[token] = ids[token]
        assert torch.equal(compute(x, pair, alone, weights)[token], together[token])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 24])
def test_graph_replays_follow_their_inputs(format_name: str, tokens: int) -> None:
    pair = layer(format_name, 32, 1024, 256)
    x, ids, weights = tokens_of(tokens, 1024), random_ids(tokens, 32, 4, device="cuda"), torch.rand((tokens, 4), device="cuda")
    out = torch.empty_like(x)
    chord.warp_decode(x, *pair, ids, weights, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            chord.warp_decode(x, *pair, ids, weights, out=out)
    for seed in range(20):
        x.copy_(torch.randn_like(x, dtype=torch.float32))
        ids.copy_(random_ids(tokens, 32, 4, device="cuda", seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        assert reference.relative_error(out, truth(x, pair, ids, weights)) < 2.5e-3


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("format_name", "experts", "hidden", "inter"), [("mxfp8", 128, 2048, 768), ("w4a16", 96, 7168, 256)])
def test_products_beside_each_other(format_name: str, experts: int, hidden: int, inter: int, tokens: int) -> None:
    """Layer after layer on two streams at once, each with hidden rows, ids and outputs of its own."""
    sizes = {"tokens": tokens, "top_k": 8, "experts": experts, "hidden": hidden, "intermediate": inter}
    assert warp_decode_plan("down", format_name, arch="sm_90a", sm_count=132, **sizes).ctas == 2
    pair = layer(format_name, experts, hidden, inter)
    weights = torch.rand((tokens, 8), device="cuda")
    batches = [(tokens_of(tokens, hidden) * scale, random_ids(tokens, experts, 8, device="cuda", seed=scale)) for scale in range(1, 9)]
    outs = [torch.full_like(x, float("nan")) for x, _ in batches]
    chord.warp_decode(batches[0][0], *pair, batches[0][1], weights)
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(20):
        for index, (out, (x, ids)) in enumerate(zip(outs, batches, strict=True)):
            with torch.cuda.stream(streams[index % 2]):
                chord.warp_decode(x, *pair, ids, weights, out=out)
    torch.cuda.synchronize()
    for out, (x, ids) in zip(outs, batches, strict=True):
        assert reference.relative_error(out, truth(x, pair, ids, weights)) < 2.3e-3


def test_any_number_of_units_where_they_are_drawn() -> None:
    """As many as SMs and fewer, and none: the counter that they are drawn from is 0 for the next launch."""
    pair = layer("mxfp8", 128, 2048, 768)
    x, weights = tokens_of(64, 2048), torch.rand((64, 8), device="cuda")
    every = random_ids(64, 128, 8, device="cuda")
    assert warp_decode_plan(
        "gate_up", "mxfp8", arch="sm_90a", sm_count=132, tokens=64, top_k=8, experts=128, hidden=2048, intermediate=768
    ).draws
    for slots in (512, 0, 1, 9, 512, 20, 64, 512):
        ids = torch.where(torch.arange(512, device="cuda").view(64, 8) < slots, every, -1)
        value = compute(x, pair, ids, weights)
        assert reference.relative_error(value, truth(x, pair, ids, weights)) < 2.3e-3 if slots else not value.any()


def test_other_types_of_ids_and_weights() -> None:
    """HAZARDS 22: the same result; an int64 id that does not fit 32 bits is nobody's."""
    pair = layer("mxfp8", 16, 512, 128)
    x, ids, weights = tokens_of(5, 512), random_ids(5, 16, 4, device="cuda"), torch.rand((5, 4), device="cuda")
    expected = compute(x, pair, ids, weights)
    wide = torch.stack((ids, ids), dim=-1).to(torch.int64)[..., 0]  # not contiguous
    assert torch.equal(compute(x, pair, wide, weights), expected)
    assert torch.equal(compute(x, pair, ids.view(torch.uint32), weights), expected)
    dropped = ids.clone()
    dropped[2, 1] = -1
    wide = ids.to(torch.int64)
    wide[2, 1] = 2**32 + 3
    assert torch.equal(compute(x, pair, wide, weights), compute(x, pair, dropped, weights))


def identity_down(experts: int, hidden: int, inter: int) -> PackedWeight:
    """down[n, k] = 1 where n == k."""
    elements = torch.zeros((experts, hidden, inter), dtype=torch.uint8, device="cuda")
    elements[:, torch.arange(min(hidden, inter)), torch.arange(min(hidden, inter))] = 0x38  # 1.0
    return chord.pack_mxfp8(elements, torch.full((experts, hidden, inter // 32), 127, dtype=torch.uint8, device="cuda"))


def gate_of(up_elements: Tensor, up_scales: Tensor) -> PackedWeight:
    """gate/up [1, 2 I, H] whose gate rows give 8192 for any one-hot x of 1, where silu is the identity: hidden = 8192 * up . x."""
    gate = torch.full_like(up_elements, 0x38)
    scales = torch.full_like(up_scales, 127 + 13)
    return chord.pack_mxfp8(torch.cat((gate, up_elements))[None], torch.cat((scales, up_scales))[None], gate_up=True)


def test_every_element_and_scale_is_exact() -> None:
    """HAZARDS 10: one-hot activations; all 254 finite elements, and scales of powers that differ by row and group."""
    inter, hidden = 64, 512
    elements = torch.arange(hidden, dtype=torch.int32, device="cuda").expand(inter, hidden) % 256
    elements = torch.where((elements & 0x7F) == 0x7F, 0, elements).to(torch.uint8)
    row, group = torch.meshgrid(torch.arange(inter), torch.arange(hidden // 32), indexing="ij")
    scales = (100 + (8 * row + group) % 50).to(torch.uint8).cuda()
    pair = gate_of(elements, scales), identity_down(1, hidden, inter)
    values = MXFP8.dequantize(elements, scales, dtype=torch.float64) * 8192
    for first in range(0, hidden, 64):
        x = torch.zeros((64, hidden), dtype=torch.bfloat16, device="cuda")
        x[torch.arange(64), first + torch.arange(64)] = 1.0
        ids = torch.zeros((64, 1), dtype=torch.int32, device="cuda")
        out = compute(x, pair, ids, torch.ones((64, 1), device="cuda"))
        assert torch.equal(out[:, :inter].double(), values[:, first : first + 64].T.to(torch.bfloat16).double())


@pytest.mark.parametrize("tokens", [1, 8])
def test_extreme_scales(tokens: int) -> None:
    """HAZARDS 20: 2^-127 is not 0, 2^127 is finite, 255 gives NaN in its row's output only; so does an element NaN."""
    size, picked = 64, 40  # of down [64, 64]; hidden is 1 there, else 0
    up = torch.zeros((size, size), dtype=torch.uint8, device="cuda")
    up[picked, 0] = 0x38
    gate_up = gate_of(up, torch.full((size, size // 32), 127 - 13, dtype=torch.uint8, device="cuda"))
    codes = torch.tensor([0, 1, 126, 127, 254, 255], dtype=torch.uint8, device="cuda").repeat(11)[:size]
    scales = torch.full((1, size, size // 32), 127, dtype=torch.uint8, device="cuda")
    scales[0, :, picked // 32] = codes
    elements = torch.full((1, size, size), 0x38, dtype=torch.uint8, device="cuda")
    elements[0, 60, 7] = 0x7F
    x = torch.zeros((tokens, size), dtype=torch.bfloat16, device="cuda")
    x[:, 0] = 1.0
    ids = torch.zeros((tokens, 1), dtype=torch.int32, device="cuda")
    out = compute(x, (gate_up, chord.pack_mxfp8(elements, scales)), ids, torch.ones((tokens, 1), device="cuda"))
    bad = (codes == 255) | (torch.arange(size, device="cuda") == 60)
    expected = torch.ldexp(torch.ones(size, dtype=torch.float64, device="cuda"), codes.int() - 127).to(torch.float32).to(torch.bfloat16)
    assert out[:, bad].isnan().all()
    assert torch.equal(out[:, ~bad], expected[~bad].expand(tokens, -1))


def test_an_empty_batch_launches_nothing() -> None:
    pair = layer("mxfp8", 4, 128, 64)
    x = torch.empty((0, 128), dtype=torch.bfloat16, device="cuda")
    assert chord.warp_decode(x, *pair, torch.empty((0, 2), dtype=torch.int32, device="cuda"), torch.empty((0, 2), device="cuda")).shape == (
        0,
        128,
    )
