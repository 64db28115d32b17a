# SPDX-License-Identifier: Apache-2.0
"""What every op computes, in torch, on any device. Readable as the specification.

Two exact definitions of a product with a W4A16 weight:

- dequant="bf16": weight = RN_bf16((code - 8) * scale), then products and sums. What checkpoints' own dequantizers compute.
- dequant="exact": products with code - 8 as an integer, each 32-group summed, then multiplied by the scale. No weight is rounded.

`dtype` is the arithmetic: float32 is the definition, float64 the yardstick that errors are measured against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import FormatError
from .formats import MXFP8, W4A16
from .rows import RowContract, row_table
from .weights import PackedWeight

DEQUANTS = ("bf16", "exact")


def expert_product(x: Tensor, codes: Tensor, scales: Tensor, *, dequant: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [m, K] times one expert's weight [N, K], transposed: [m, N] in `dtype`."""
    if dequant == "bf16":
        return x.to(dtype) @ W4A16.dequantize(codes, scales, rounded=True, dtype=dtype).T
    if dequant != "exact":
        raise FormatError(f"dequant = {dequant!r}; give one of {', '.join(DEQUANTS)}")
    total = torch.zeros((x.shape[0], codes.shape[0]), dtype=dtype, device=x.device)
    integers = codes.to(dtype) - W4A16.zero_point
    for group, start in enumerate(range(0, codes.shape[1], W4A16.group)):
        stop = start + W4A16.group
        total += (x[:, start:stop].to(dtype) @ integers[:, start:stop].T) * scales[:, group].to(dtype)
    return total


def product(x: Tensor, weight: PackedWeight, expert: int, *, dequant: str = "exact", dtype: torch.dtype = torch.float32) -> Tensor:
    """x [m, K] times one expert of a packed weight of either format, transposed: [m, N] in `dtype`. MXFP8 weights are never rounded."""
    if weight.format is MXFP8:
        return x.to(dtype) @ MXFP8.dequantize(*weight.unpack_expert(expert), dtype=dtype).T
    return expert_product(x, *weight.unpack_expert(expert), dequant=dequant, dtype=dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[.., gate | up] to silu(gate) * up, in the dtype given."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def grouped(
    x: Tensor,
    weight: PackedWeight,
    rows: RowContract,
    out: Tensor,
    *,
    epilogue: str = "store",
    dequant: str = "exact",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Every routed row times its expert's weight, written to its place in `out`; other rows of `out` keep their bytes.

    epilogue "swiglu" applies SwiGLU in `dtype`, before the one rounding to out's dtype.
    """
    x = x.reshape(-1, x.shape[-1])
    source, target, expert = row_table(rows, x.shape[0], weight.experts)
    for e in expert.unique().tolist():
        mine = expert == e
        value = product(x[source[mine]], weight, e, dequant=dequant, dtype=dtype)
        out[target[mine]] = (swiglu(value) if epilogue == "swiglu" else value).to(out.dtype)
    return out


def layer(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    dequant: str = "exact",
    dtype: torch.dtype = torch.float32,
    round_hidden: bool = False,
    round_products: bool | None = None,
    quantize_activations: bool = False,
) -> Tensor:
    """A MoE layer: sum over slots of weight[t, slot] * down(silu(gate(x)) * up(x)); [M, H] in `dtype`.

    A slot whose id is negative or not below E adds exactly 0. round_hidden rounds the SwiGLU output to BF16, round_products each
    expert's output (None: as round_hidden). A layer made of separate kernels rounds both, `warp_decode` the former alone.
    quantize_activations: x and the SwiGLU output go through MXFP8, as kernels with FP8 products need them.
    """
    round_products = round_hidden if round_products is None else round_products
    total = torch.zeros_like(x, dtype=dtype)
    x = _through_mxfp8(x) if quantize_activations else x
    for e in range(gate_up.experts):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = swiglu(product(x[token], gate_up, e, dequant=dequant, dtype=dtype))
        hidden = hidden.to(torch.bfloat16) if round_hidden else hidden
        hidden = _through_mxfp8(hidden) if quantize_activations else hidden
        value = product(hidden, down, e, dequant=dequant, dtype=dtype)
        value = value.to(torch.bfloat16).to(dtype) if round_products else value
        total.index_add_(0, token, value * topk_weights[token, slot].to(dtype).unsqueeze(-1))
    return total


def _through_mxfp8(values: Tensor) -> Tensor:
    return MXFP8.dequantize(*MXFP8.quantize(values), dtype=torch.float64).to(values.dtype)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth|| in float64. NaN never passes for small."""
    difference = torch.linalg.vector_norm(value.double() - truth.double())
    return float(difference / torch.linalg.vector_norm(truth.double()))
