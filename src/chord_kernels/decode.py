# SPDX-License-Identifier: Apache-2.0
"""Warp decode: a whole MoE layer of up to 64 tokens in two launches, organised by outputs (kernel/warp_decode.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .decode_plan import warp_decode_plans, warp_decodes, why_not_warp_decode
from .errors import FormatError, UnsupportedError
from .formats import FORMATS
from .ops import device_arch
from .ops import library as _library
from .rows import check_routing, int32_ids, router_arguments
from .weights import PackedWeight, check_layer

_library.define(
    "warp_decode(Tensor x, Tensor gate_up, Tensor down, str format, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, "
    "Tensor(a!) out) -> ()"
)


def warp_decode(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    out: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """out[t] = sum over slots of topk_weights[t, s] * down(silu(gate(x[t])) * up(x[t])) with the experts topk_ids[t, s].

    x: BF16 [B, H], B from 0 to 64. gate_up: [E, 2I, H] packed with gate_up=True; down: [E, H, I]; both INT4 or both MXFP8, E up to 1024,
    H and I multiples of 64. topk_ids: int32, int64 or uint32 [B, top_k], top_k from 1 to 16; ids that are negative, too large or remote
    add exactly 0, an expert named twice counts twice. topk_weights: float32, bfloat16 or float16 [B, top_k], used in FP32. expert_map:
    int32 [global experts], a global id's local expert or -1. out: BF16 [B, H].

    Numerics: activations stay BF16, no weight is rounded, every sum is FP32; silu(gate) * up is rounded to BF16 once, the output once.
    A token's output is bitwise the same alone and among others of one batch bucket (1, 2, 4, 8, 16, 32, 64 tokens). CUDA-graph capturable,
    nothing is read back. Both launches are programmatic dependent ones. Raises FormatError, UnsupportedError, CompileError.

    >>> import torch, chord_kernels as chord
    >>> gate_up = chord.pack_mxfp8(*chord.quantize_mxfp8(torch.randn(4, 256, 64)), gate_up=True)
    >>> down = chord.pack_mxfp8(*chord.quantize_mxfp8(torch.randn(4, 64, 128)))
    >>> x = torch.randn(2, 64, dtype=torch.bfloat16)
    >>> chord.warp_decode(x, gate_up, down, torch.tensor([[0, 3], [3, 1]]), torch.rand(2, 2)).shape
    torch.Size([2, 64])
    """
    tokens = _check(x, gate_up, down, topk_ids, topk_weights, out, expert_map)
    if out is None:
        out = torch.empty_like(x)
    if tokens:
        known = gate_up.experts if expert_map is None else expert_map.numel()
        _ops.warp_decode(
            x, gate_up.data, down.data, gate_up.format.name, int32_ids(topk_ids, known), topk_weights.to(torch.float32).contiguous(),
            expert_map, out,
        )  # fmt: skip
    return out


def why_not_here(gate_up: PackedWeight, down: PackedWeight, tokens: int, top_k: int) -> str | None:
    """Why warp decode cannot run on the weights' device; None where it can. CPU takes what some GPU would."""
    device = gate_up.device
    arch = device_arch(device.index)[0] if device.type == "cuda" else "sm_90a"
    if device.type not in ("cuda", "cpu"):
        return f"device {device} has no kernels; use CUDA or CPU tensors"
    return why_not_warp_decode(arch, gate_up.format.name, tokens, top_k, gate_up.experts, gate_up.k, down.k)


def goes_to_warp_decode(gate_up: PackedWeight, tokens: int, top_k: int, known: int | None = None) -> bool:
    """`warp_decodes` of these experts on their device; on CPU, as on the card that was measured."""
    here = {"sm_count": device_arch(gate_up.device.index)[1]} if gate_up.device.type == "cuda" else {}
    return warp_decodes(gate_up.format.name, tokens, top_k, gate_up.experts, hidden=gate_up.k, known=known, **here)


def _check(
    x: Tensor, gate_up: PackedWeight, down: PackedWeight, ids: Tensor, weights: Tensor, out: Tensor | None, expert_map: Tensor | None
) -> int:
    """Checks that need no device; returns the number of tokens."""
    check_layer(gate_up, down)
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != gate_up.k or not x.is_contiguous():
        raise FormatError(f"x is {x.dtype} {list(x.shape)}, strides {x.stride()}; give contiguous bfloat16 [B, {gate_up.k}]")
    check_routing(ids, weights, expert_map, tokens=x.shape[0])
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous()):
        raise FormatError(f"out is {out.dtype} {list(out.shape)}, strides {out.stride()}; give contiguous {x.dtype} {list(x.shape)}")
    tensors = [t for t in (gate_up.data, down.data, ids, weights, out, expert_map) if t is not None]
    if any(t.device != x.device for t in tensors):
        raise FormatError(f"x is on {x.device}, other tensors on {sorted({str(t.device) for t in tensors})}; put all on one device")
    if reason := why_not_here(gate_up, down, *ids.shape):
        raise UnsupportedError(reason)
    return ids.shape[0]


def _warp_decode_cuda(
    x: Tensor, gate_up: Tensor, down: Tensor, format_name: str, ids: Tensor, weights: Tensor, expert_map: Tensor | None, out: Tensor
) -> None:
    from .jit.launch import load

    arch, sm_count = device_arch(x.device.index)
    form = FORMATS[format_name]
    tokens, top_k = ids.shape
    experts, intermediate = down.shape[0], down.shape[2] * form.tile_k
    hidden = x.new_empty((tokens * top_k, intermediate))  # of the pairs (token, expert)
    index, capturing = x.device.index, torch.cuda.is_current_stream_capturing
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        routing, counts = router_arguments(ids, expert_map, weights, experts)
        sizes = {"tokens": tokens, "top_k": top_k, "experts": experts, "hidden": x.shape[1], "intermediate": intermediate}
        first, second = warp_decode_plans(format_name, arch=arch, sm_count=sm_count, **sizes)
        down_shape = (down.shape[1] * form.tile_rows // 16, down.shape[2])  # 16-row blocks, k-tiles
        down_grid = min(sm_count, down_shape[0] // second.blocks)
        for plan, source, weight, target, grid in ((first, x, gate_up, hidden, sm_count), (second, hidden, down, out, down_grid)):
            kernel = load(plan, index, capturing=capturing)
            operands = (source.data_ptr(), weight.data_ptr(), target.data_ptr(), kernel.counter(stream, capturing))
            shape = (weight.shape[1] * form.tile_rows // 16, weight.shape[2])
            kernel.launch(stream, grid, (*operands, *routing, *shape, *counts), dependent=True)


def _warp_decode_cpu(
    x: Tensor, gate_up: Tensor, down: Tensor, format_name: str, ids: Tensor, weights: Tensor, expert_map: Tensor | None, out: Tensor
) -> None:
    form, experts = FORMATS[format_name], down.shape[0]
    known = experts if expert_map is None else expert_map.numel()
    local = torch.where((ids >= 0) & (ids < known), ids, -1)
    if expert_map is not None:
        local = torch.where(local >= 0, expert_map[local.clamp(min=0).long()], -1)
    packed = PackedWeight(gate_up, True, form), PackedWeight(down, False, form)
    out.copy_(reference.layer(x, *packed, local, weights, round_hidden=True, round_products=False))


_library.impl("warp_decode", _warp_decode_cuda, "CUDA")
_library.impl("warp_decode", _warp_decode_cpu, "CPU")
torch.library.register_fake("chord_kernels::warp_decode", lambda *args: None, lib=_library)

_ops = torch.ops.chord_kernels
