# SPDX-License-Identifier: Apache-2.0
"""The ops on CPU tensors: the reference against naive loops, contracts, torch's checks, refusals."""

from __future__ import annotations

import pytest
import torch
from support import compute, random_codes, random_ids, random_weight, route, truth

import chord_kernels as chord
from chord_kernels import reference
from chord_kernels.errors import FormatError, UnsupportedError
from chord_kernels.formats import W4A16
from chord_kernels.rows import ContiguousRows, MaskedRows

CONTRACTS = ("indexed", "contiguous", "masked")


def test_both_definitions_against_loops() -> None:
    codes, scales = random_codes(1, 64, 128)
    x = torch.randn(3, 128).to(torch.bfloat16)
    weights = {"exact": torch.zeros(64, 128, dtype=torch.float64), "bf16": torch.zeros(64, 128, dtype=torch.float64)}
    for row in range(64):
        for k in range(128):
            value = (int(codes[0, row, k]) - 8) * float(scales[0, row, k // 32])
            weights["exact"][row, k] = value
            weights["bf16"][row, k] = float(torch.tensor(value).to(torch.bfloat16))
    for dequant, weight in weights.items():
        expected = x.double() @ weight.T
        assert torch.allclose(reference.expert_product(x, codes[0], scales[0], dequant=dequant, dtype=torch.float64), expected, rtol=1e-12)
        in_fp32 = reference.expert_product(x, codes[0], scales[0], dequant=dequant)
        assert reference.relative_error(in_fp32, expected) < 1e-6
    with pytest.raises(FormatError, match="'fp8'"):
        reference.expert_product(x, codes[0], scales[0], dequant="fp8")


def test_a_rounded_weight_is_further_from_the_truth() -> None:
    codes, scales = random_codes(1, 256, 1024)
    x = torch.randn(16, 1024).to(torch.bfloat16)
    expected = reference.expert_product(x, codes[0], scales[0], dequant="exact", dtype=torch.float64)
    rounded = reference.expert_product(x, codes[0], scales[0], dequant="bf16", dtype=torch.float64)
    assert 1e-3 < reference.relative_error(rounded, expected) < 2e-3


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
def test_contracts_write_their_rows_and_nothing_else(contract: str, epilogue: str) -> None:
    weight = random_weight(4, 128, 64, paired=True)
    x = torch.randn(21, 64).to(torch.bfloat16)
    ids = random_ids(21, 4, 2)
    ids[3, 0] = -1
    routed = route(contract, x, ids, 4, block_rows=16)
    value = compute(routed, weight, epilogue=epilogue, dequant="exact")
    expected = truth(routed, weight, epilogue=epilogue)
    written = routed.ids >= 0
    assert torch.equal(torch.isnan(expected).all(1), ~written)
    assert reference.relative_error(value[written], expected[written]) < 2.5e-3


def test_layer_against_a_loop_over_tokens() -> None:
    """HAZARDS 16: weights that are distinct powers of two, applied once, in FP32."""
    gate_up, down = random_weight(5, 128, 64, paired=True), random_weight(5, 64, 64, seed=1)
    x = torch.randn(6, 64).to(torch.bfloat16)
    ids = random_ids(6, 5, 3)
    ids[2, 1] = -1
    weights = torch.exp2(torch.arange(18).float() - 9).view(6, 3)
    value = chord.MoELayer(gate_up, down)(x, ids, weights)
    for token in range(6):
        total = torch.zeros(64, dtype=torch.float64)
        for slot in range(3):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            w13 = W4A16.dequantize(*gate_up.unpack_expert(expert), rounded=False, dtype=torch.float64)
            w2 = W4A16.dequantize(*down.unpack_expert(expert), rounded=False, dtype=torch.float64)
            gate, up = (w13 @ x[token].double()).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).double()
            total += float(weights[token, slot]) * (w2 @ hidden).to(torch.bfloat16).double()
        assert reference.relative_error(value[token], total) < 4e-3


def test_bf16_router_weights_are_converted() -> None:
    gate_up, down = random_weight(4, 128, 64, paired=True), random_weight(4, 64, 64, seed=1)
    layer, x, ids = chord.MoELayer(gate_up, down), torch.randn(5, 64).to(torch.bfloat16), random_ids(5, 4, 2)
    weights = torch.rand(5, 2).to(torch.bfloat16)
    assert torch.equal(layer(x, ids, weights), layer(x, ids, weights.float()))
    with pytest.raises(FormatError, match=r"topk_weights is torch\.float64"):
        layer(x, ids, weights.double())


def test_layer_refusals() -> None:
    gate_up, down = random_weight(4, 128, 64, paired=True), random_weight(4, 64, 64)
    with pytest.raises(UnsupportedError, match="'relu'"):
        chord.MoELayer(gate_up, down, activation="relu")
    with pytest.raises(FormatError, match="packed with gate_up=True"):
        chord.MoELayer(down, down)
    with pytest.raises(FormatError, match=r"down is \[4, 64, 128\]"):
        chord.MoELayer(gate_up, random_weight(4, 64, 128))
    layer = chord.MoELayer(gate_up, down)
    with pytest.raises(FormatError, match=r"x is \[5, 65\]; give \[M, 64\]"):
        layer(torch.zeros(5, 65).to(torch.bfloat16), random_ids(5, 4, 2), torch.rand(5, 2))
    with pytest.raises(FormatError, match=r"topk_ids is torch.int32 \[10\]"):
        layer(torch.zeros(5, 64).to(torch.bfloat16), random_ids(5, 4, 2).flatten(), torch.rand(10))
    assert layer.warmup() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 64)}, "x is torch.float32"),
        ({"x": torch.zeros(4, 128).to(torch.bfloat16)}, "x has K = 128, the weight has K = 64"),
        ({"x": torch.zeros(64, 4).to(torch.bfloat16).T}, "strides"),
        ({"out": torch.zeros(8, 64).to(torch.bfloat16)}, r"give contiguous bfloat16 \[8, 128\]"),
        ({"epilogue": "relu"}, "epilogue 'relu' is not computed"),
        ({"epilogue": "swiglu", "weight": random_weight(4, 128, 64)}, "pack it with gate_up=True"),
    ],
)
def test_op_refusals(change: dict, message: str) -> None:
    arguments = {"x": torch.zeros(4, 64).to(torch.bfloat16), "weight": random_weight(4, 128, 64, paired=True)} | change
    routing = chord.align_indexed(random_ids(4, 4, 2), 4, 8)
    x, weight = arguments.pop("x"), arguments.pop("weight")
    with pytest.raises((FormatError, UnsupportedError), match=message):
        chord.indexed(x, weight, routing, **arguments)


def test_contract_refusals() -> None:
    weight, x = random_weight(4, 128, 64), torch.zeros(8, 64).to(torch.bfloat16)
    with pytest.raises(FormatError, match="m_indices has 4 entries for x with 8 rows"):
        chord.contiguous(x, weight, ContiguousRows(torch.zeros(4).int()))
    with pytest.raises(FormatError, match="masked_m has 3 counts for 4 experts"):
        chord.masked(x, weight, MaskedRows(torch.zeros(3).int(), 1))
    with pytest.raises(FormatError, match="7 rows, not a multiple of 4 experts"):
        chord.masked(x[:7], weight, MaskedRows(torch.zeros(4).int(), 1))
    with pytest.raises(FormatError, match=r"x is \[2, 4, 64\] for 4 experts"):
        chord.masked(x.view(2, 4, 64), weight, MaskedRows(torch.zeros(4).int(), 1))


def test_nothing_to_do() -> None:
    """HAZARDS 9."""
    weight = random_weight(4, 128, 64, paired=True)
    x = torch.empty(0, 64).to(torch.bfloat16)
    assert chord.indexed(x, weight, chord.align_indexed(torch.empty(0, 2).int(), 4, 8), epilogue="swiglu").shape == (0, 64)
    assert chord.contiguous(x, weight, ContiguousRows(torch.empty(0).int())).shape == (0, 128)
    assert chord.masked(x.view(4, 0, 64), weight, MaskedRows(torch.zeros(4).int(), 0)).shape == (0, 128)
    layer = chord.MoELayer(weight, random_weight(4, 64, 64))
    assert layer(x, torch.empty(0, 2).int(), torch.empty(0, 2)).shape == (0, 64)


def test_opcheck() -> None:
    weight, x = random_weight(4, 128, 64), torch.randn(32, 64).to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(32, 4, 1), 4, 16)
    common, out = (weight.data, False, "store", "auto", False), torch.empty(32, 128).to(torch.bfloat16)
    indexed = (x, *common, *routing.tensors, 1, 16, 32, out)
    torch.library.opcheck(torch.ops.chord_kernels.w4a16_indexed.default, indexed)
    torch.library.opcheck(torch.ops.chord_kernels.w4a16_contiguous.default, (x, *common, torch.zeros(32).int(), 128, out))
    torch.library.opcheck(torch.ops.chord_kernels.w4a16_masked.default, (x, *common, torch.full((4,), 8).int(), 8, out))


def test_fullgraph_compile_with_dynamic_tokens() -> None:
    """HAZARDS 34."""
    weight = random_weight(4, 128, 64, paired=True)

    def forward(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return chord.indexed(x, weight, chord.align_indexed(ids, 4, 16), epilogue="swiglu") * 2

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 17, 1, 0):
        x, ids = torch.randn(tokens, 64).to(torch.bfloat16), random_ids(tokens, 4, 2)
        assert torch.equal(compiled(x, ids), forward(x, ids))
    with torch.device("meta"):
        meta = chord.PackedWeight(torch.empty(weight.data.shape, dtype=torch.uint8), True)
        counts = MaskedRows(torch.empty(4, dtype=torch.int32), 8)
        assert chord.masked(torch.empty(32, 64, dtype=torch.bfloat16), meta, counts, epilogue="swiglu").shape == (32, 64)
