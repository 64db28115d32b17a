# SPDX-License-Identifier: Apache-2.0
"""MXFP8, the choice of warp decode's kernels, and its op on CPU tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support import random_ids, random_weight

import chord_kernels as chord
from chord_kernels import reference
from chord_kernels.decode_plan import (
    WARP_DECODE_BATCHES,
    WARP_DECODE_PRODUCTS,
    warp_decode_buckets,
    warp_decode_plan,
    warp_decodes,
    why_not_warp_decode,
)
from chord_kernels.errors import FormatError, UnsupportedError
from chord_kernels.formats import MXFP8
from chord_kernels.kernels import WarpDecodePlan
from chord_kernels.plan import ARCHITECTURES
from chord_kernels.weights import PackedWeight


def mxfp8(experts: int, n: int, k: int, *, paired: bool = False, seed: int = 0) -> PackedWeight:
    values = torch.randn((experts, n, k), generator=torch.Generator().manual_seed(seed)) * 0.05
    return chord.pack_mxfp8(*chord.quantize_mxfp8(values), gate_up=paired)


@pytest.mark.parametrize("paired", [False, True])
def test_packing_is_undone_exactly(paired: bool) -> None:
    elements = torch.randint(0, 256, (3, 128, 192), dtype=torch.uint8)
    elements[(elements & 0x7F) == 0x7F] = 0x80
    scales = torch.randint(0, 256, (3, 128, 6), dtype=torch.uint8)
    weight = chord.pack_mxfp8(elements.view(torch.float8_e4m3fn), scales, gate_up=paired)
    assert (weight.n, weight.k, weight.nbytes) == (128, 192, 3 * 128 * (192 + 6))
    assert all(torch.equal(a, b) for a, b in zip(weight.unpack(), (elements, scales), strict=True))


def test_a_word_is_what_the_layout_says() -> None:
    """Row g: sign 15, the rest at 10..4. Row g + 8: sign 11, exponent 14..12 and 3, mantissa 2..0. Low half: the smaller k."""
    elements = torch.zeros((1, 64, 64), dtype=torch.uint8)
    elements[0, 2, 34], elements[0, 10, 35] = 0b1_1010_011, 0b1_0111_101  # g = 2; k-step 2, k half 0, t = 1, pair elements 0 and 1
    data = chord.pack_mxfp8(elements, torch.full((1, 64, 2), 127, dtype=torch.uint8)).data[0, 0, 0]
    word = int(data[512 + (2 * 4 + 1) * 16 :][:4].view(torch.int32))
    assert word & 0xFFFF == 1 << 15 | 0b1010_011 << 4
    assert word >> 16 & 0xFFFF == 1 << 11 | 0b011 << 12 | 1 << 3 | 0b101


def test_an_element_nan_becomes_a_scale_nan() -> None:
    elements = torch.zeros((1, 64, 64), dtype=torch.uint8)
    elements[0, 5, 40] = 0xFF
    scales = chord.pack_mxfp8(elements, torch.full((1, 64, 2), 120, dtype=torch.uint8)).unpack()[1]
    assert scales[0, 5].tolist() == [120, 255]
    assert int((scales == 255).sum()) == 1


def test_21_quantizing_block_maxima() -> None:
    """HAZARDS 21: the documented rules; zeros stay zeros."""
    values = torch.zeros((8, 32))
    values[:, 3] = torch.tensor([447, 448, 449, 0, 2.0**-130, float("inf"), float("nan"), -448.5])
    for rule, scales in (("ocp", [127, 127, 127, 0, 0, 255, 255, 127]), ("round_up", [127, 127, 128, 0, 0, 255, 255, 128])):
        elements, found = chord.quantize_mxfp8(values, rule=rule)
        assert found.flatten().tolist() == scales
        back = MXFP8.dequantize(elements, found, dtype=torch.float64)
        assert not back[3].any()
        assert back[5].isnan().all()
        assert back[6].isnan().all()
        assert back[4, 3] == 2.0**-130
        assert (back[:3, 3] - values[:3, 3]).abs().max() <= 1
    with pytest.raises(FormatError, match="'ocp' or 'round_up'"):
        chord.quantize_mxfp8(values, rule="floor")


def test_20_scales_at_the_ends() -> None:
    codes = torch.tensor([[0, 1, 126, 127, 254, 255]], dtype=torch.uint8)
    values = MXFP8.dequantize(torch.full((1, 192), 0x38, dtype=torch.uint8), codes, dtype=torch.float64)[0, ::32]
    assert values[:5].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0**127]
    assert values[5].isnan()


def test_quantizing_loses_what_rounding_loses() -> None:
    values = torch.randn((4, 256))
    for rule in ("ocp", "round_up"):
        back = MXFP8.dequantize(*chord.quantize_mxfp8(values, rule=rule))
        assert reference.relative_error(back, values) < 0.04


@pytest.mark.parametrize("format_name", ["mxfp8", "w4a16"])
def test_the_op_is_the_reference(format_name: str) -> None:
    make = mxfp8 if format_name == "mxfp8" else random_weight
    gate_up, down = make(6, 256, 64, paired=True), make(6, 64, 128, seed=1)
    x, ids, weights = torch.randn((5, 64)).to(torch.bfloat16), random_ids(5, 6, 3), torch.rand((5, 3))
    ids[2, 1], ids[3, 0] = -1, 99
    value = chord.warp_decode(x, gate_up, down, ids, weights)
    expected = reference.layer(x, gate_up, down, ids, weights, dtype=torch.float64, round_hidden=True, round_products=False)
    assert reference.relative_error(value, expected) < 3e-3
    expert_map = torch.tensor([5, -1, 3, 0, 1, 2, 4], dtype=torch.int32)
    mapped = chord.warp_decode(x, gate_up, down, torch.full((5, 1), 2), torch.ones((5, 1)), expert_map=expert_map)
    assert torch.equal(mapped, chord.warp_decode(x, gate_up, down, torch.full((5, 1), 3), torch.ones((5, 1))))


def test_quantized_activations_are_further_off() -> None:
    """BF16 activations against MXFP8 ones, to FP64 without any rounding: 1.4 times is claimed."""
    gate_up, down = mxfp8(8, 512, 256, paired=True), mxfp8(8, 256, 256, seed=1)
    x, ids, weights = torch.randn((16, 256)).to(torch.bfloat16), random_ids(16, 8, 4), torch.rand((16, 4))
    truth = reference.layer(x, gate_up, down, ids, weights, dtype=torch.float64)
    ours = chord.warp_decode(x, gate_up, down, ids, weights)
    other = reference.layer(x, gate_up, down, ids, weights, round_hidden=True, quantize_activations=True).to(torch.bfloat16)
    assert reference.relative_error(other, truth) > 1.4 * reference.relative_error(ours, truth)
    assert 1 - torch.nn.functional.cosine_similarity(ours.double().flatten(), truth.flatten(), dim=0) < 4e-6


def test_34_opcheck_and_compile() -> None:
    gate_up, down = mxfp8(6, 128, 64, paired=True), mxfp8(6, 64, 64, seed=1)
    x, ids, weights = torch.randn((5, 64)).to(torch.bfloat16), random_ids(5, 6, 3), torch.rand((5, 3))
    arguments = (x, gate_up.data, down.data, "mxfp8", ids, weights, None, torch.empty_like(x))
    assert chord.warp_decode(*arguments[:1], gate_up, down, ids, weights).shape == x.shape  # the first use registers the op
    torch.library.opcheck(torch.ops.chord_kernels.warp_decode.default, arguments)
    layer = chord.MoELayer(gate_up, down)
    compiled = torch.compile(lambda *each: layer(*each), fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))


def test_a_layer_of_mxfp8_takes_any_number_of_tokens() -> None:
    gate_up, down = mxfp8(4, 128, 64, paired=True), mxfp8(4, 64, 64, seed=1)
    x, ids, weights = torch.randn((150, 64)).to(torch.bfloat16), random_ids(150, 4, 2), torch.rand((150, 2))
    layer = chord.MoELayer(gate_up, down)
    assert layer.numerics(150, 2) == "exact"
    assert torch.equal(layer(x, ids, weights)[64:128], chord.warp_decode(x[64:128], gate_up, down, ids[64:128], weights[64:128]))


def test_what_is_not_computed_is_refused() -> None:
    gate_up, down = mxfp8(4, 128, 64, paired=True), mxfp8(4, 64, 64)
    x, ids, weights = torch.zeros((2, 64), dtype=torch.bfloat16), torch.zeros((2, 1), dtype=torch.int32), torch.ones((2, 1))
    for options, message in (
        ({"x": x[:, :32]}, r"bfloat16 \[B, 64\]"),
        ({"x": x.float()}, "float32"),
        ({"topk_ids": ids.flatten()}, r"topk_ids is torch.int32 \[2\]"),
        ({"topk_weights": weights[:1]}, "both are"),
        ({"topk_ids": ids.float()}, "topk_ids is torch.float32"),
        ({"topk_weights": weights.double()}, "topk_weights is torch.float64"),
        ({"down": gate_up}, "without it"),
        ({"down": random_weight(4, 64, 64)}, "one format"),
        ({"down": mxfp8(4, 64, 128)}, r"down is \[E, H, I\]"),
        ({"out": x[:1]}, "out is"),
        ({"expert_map": torch.zeros(4)}, "expert_map is"),
    ):
        with pytest.raises(FormatError, match=message):
            chord.warp_decode(**({"x": x, "gate_up": gate_up, "down": down, "topk_ids": ids, "topk_weights": weights} | options))
    with pytest.raises(UnsupportedError, match="65 tokens"):
        chord.warp_decode(x[:1].expand(65, 64).contiguous(), gate_up, down, ids[:1].expand(65, 1), weights[:1].expand(65, 1))
    with pytest.raises(UnsupportedError, match="top_k = 17"):
        chord.warp_decode(x, gate_up, down, ids.expand(2, 17), weights.expand(2, 17))
    with pytest.raises(UnsupportedError, match="mxfp8"):
        chord.indexed(x, gate_up, chord.align_indexed(ids, 4, 8))
    for n, k in ((100, 64), (64, 96)):
        with pytest.raises(FormatError, match="multiple of 64"):
            chord.pack_mxfp8(torch.zeros((1, n, k), dtype=torch.uint8), torch.zeros((1, n, k // 32), dtype=torch.uint8))
    with pytest.raises(FormatError, match="cut along K"):
        chord.pack_mxfp8(torch.zeros((1, 64, 128), dtype=torch.uint8), torch.zeros((1, 64, 8), dtype=torch.uint8))
    assert "architecture sm_80" in str(why_not_warp_decode("sm_80", "mxfp8", 1, 8, 8, 64, 64))
    assert "1025 experts" in str(why_not_warp_decode("sm_90a", "mxfp8", 1, 8, 1025, 64, 64))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_plan_is_legal_and_warmed_up(arch: str) -> None:
    for format_name, sm_count, experts, hidden, inter in itertools.product(
        ("mxfp8", "w4a16"), (78, 132, 148), (1, 60, 128, 385, 1024), (64, 2048, 2880, 7168), (64, 192, 2048)
    ):
        built = {
            plan.name
            for plan in warp_decode_buckets(arch, format_name, experts=experts, hidden=hidden, intermediate=inter, sm_count=sm_count)
        }
        sizes = {"arch": arch, "sm_count": sm_count, "experts": experts, "hidden": hidden, "intermediate": inter}
        for product, tokens, top_k in itertools.product(WARP_DECODE_PRODUCTS, (1, 2, 3, 8, 20, 64), (1, 8, 16)):
            plan = warp_decode_plan(product, format_name, tokens=tokens, top_k=top_k, **sizes)
            assert plan.why_illegal() is None
            assert plan.name in built
            assert plan.batch >= tokens
            assert plan.most_pairs >= tokens * top_k
            k = hidden if product == "gate_up" else inter
            assert k // 64 % plan.k_tiles == 0
            rows = (2 * inter if product == "gate_up" else hidden) // 16
            assert rows % plan.blocks == 0
            assert 2 * (plan.smem_bytes + 1024) > 228 * 1024 or (plan.ctas == 2 and product == "gate_up")
            assert 65536 // (plan.threads * plan.ctas) >= 128  # registers


def test_products_of_few_bytes_share_their_sms() -> None:
    def pair(tokens: int, format_name: str = "mxfp8", hidden: int = 2048, inter: int = 768) -> list[WarpDecodePlan]:
        sizes = {"tokens": tokens, "top_k": 8, "experts": 128, "hidden": hidden, "intermediate": inter}
        return [warp_decode_plan(product, format_name, arch="sm_90a", sm_count=132, **sizes) for product in WARP_DECODE_PRODUCTS]

    for tokens, inter in itertools.product((1, 2), (64, 256, 768)):
        first, second = pair(tokens, inter=inter)
        assert (first.ctas, second.ctas) == (2, 2)
        assert first.fits_beside(second)
        assert first.last_stages >= 1
    assert pair(1)[0].last_stages == 5
    assert pair(1, "w4a16", 7168, 256)[0].last_stages == 7
    assert [plan.ctas for tokens in (4, 64) for plan in pair(tokens)] == [1] * 4
    assert [plan.ctas for plan in pair(1, hidden=4096, inter=1536)] == [1, 1]
    assert "know how many" in str(replace(pair(1)[0], draws=True).why_illegal())


def test_down_asks_early_where_it_has_many_stages() -> None:
    def down(tokens: int, format_name: str = "mxfp8", hidden: int = 2048, inter: int = 768) -> WarpDecodePlan:
        sizes = {"tokens": tokens, "top_k": 8, "experts": 128, "hidden": hidden, "intermediate": inter}
        return warp_decode_plan("down", format_name, arch="sm_90a", sm_count=132, **sizes)

    assert [down(tokens).early for tokens in (1, 2, 4, 64)] == [False, False, True, True]
    assert [down(tokens, "w4a16", 7168, 256).early for tokens in (1, 4, 8)] == [False, False, True]
    for plan in (down(1), down(64)):
        assert plan.constants()["kEarlyStages"] == plan.stages - (not plan.early)
    assert not warp_decode_plan(
        "gate_up", "mxfp8", arch="sm_90a", sm_count=132, tokens=64, top_k=8, experts=128, hidden=2048, intermediate=768
    ).early


def test_many_units_are_drawn() -> None:
    def draws(tokens: int, product: str = "gate_up", experts: int = 128, hidden: int = 2048, inter: int = 768) -> bool:
        sizes = {"tokens": tokens, "top_k": 8, "experts": experts, "hidden": hidden, "intermediate": inter}
        return warp_decode_plan(product, "mxfp8", arch="sm_90a", sm_count=132, **sizes).draws

    assert [draws(tokens) for tokens in (1, 8, 16, 64)] == [False, False, True, True]
    assert draws(8, hidden=4096)
    assert not draws(64, experts=8)
    assert not draws(64, product="down")
    assert [draws(64, inter=inter) for inter in (32768, 65536)] == [True, False]  # the latter has 2048 units a pair: quotients not exact


def test_columns_of_a_group_follow_rows_an_expert() -> None:
    def columns(tokens: int, experts: int) -> int:
        sizes = {"tokens": tokens, "top_k": 8, "experts": experts, "hidden": 7168, "intermediate": 256}
        return warp_decode_plan("down", "w4a16", arch="sm_90a", sm_count=132, **sizes).tokens

    assert [columns(tokens, 48) for tokens in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert [columns(tokens, 384) for tokens in (8, 16, 32)] == [4, 4, 8]


def test_a_unit_of_int4_down_is_as_wide_as_leaves_no_sm_idle() -> None:
    def blocks(hidden: int, tokens: int) -> int:
        sizes = {"tokens": tokens, "top_k": 8, "experts": 128, "hidden": hidden, "intermediate": 768}
        return warp_decode_plan("down", "w4a16", arch="sm_90a", sm_count=132, **sizes).blocks

    for tokens in (1, 2, 8, 32):
        assert [blocks(hidden, tokens) for hidden in (64, 2048, 2176, 4096, 4288, 7168)] == [1, 1, 2, 2, 4, 4]


def test_the_crossover() -> None:
    def most(experts: int, hidden: int, top_k: int = 8, **known: int) -> int:
        """Tokens up to which an INT4 layer's batches go there."""
        goes = [warp_decodes("w4a16", tokens, top_k, experts, hidden=hidden, **known) for tokens in range(1, 80)]
        assert goes == sorted(goes, reverse=True)
        return sum(goes)

    assert all(warp_decodes("mxfp8", tokens, 8, 128, hidden=2048) for tokens in (1, 64, 10_000))
    assert [most(experts, 7168) for experts in (12, 24, 48, 384)] == [5, 10, 21, 64]
    assert most(48, 7168, known=384) == 64
    assert most(384, 7168, top_k=16) == 32
    assert [most(128, hidden) for hidden in (2048, 4096)] == [56, 56]
    assert [most(128, hidden) for hidden in (3072, 5120, 6144)] == [16, 16, 16]  # 96, 80 and 96 units on 132 SMs
    assert WARP_DECODE_BATCHES[-1] == 64
