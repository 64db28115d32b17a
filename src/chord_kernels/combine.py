# SPDX-License-Identifier: Apache-2.0
"""The end of a layer whose two products are ops of their own: each token's rows, weighed and added."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import FormatError, UnsupportedError
from .kernels import ARCHITECTURES
from .ops import device_arch, has_kernels
from .ops import library as _library
from .plain_kernels import WeightedSumPlan
from .rows import check_routing, int32_ids, local_experts, router_arguments

_library.define("weighted_sum(Tensor values, Tensor topk_ids, Tensor topk_weights, int experts, Tensor? expert_map, Tensor(a!) out) -> ()")
_AT_ONCE = 256 << 20  # bytes of FP32 products that the sum on CPU holds
_COLUMNS = 8


def weighted_sum(
    values: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    experts: int,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t] = sum over slots of topk_weights[t, s] * values[t, s].

    values: BF16 [M, top_k, H], H a multiple of 8: what `indexed` wrote for every slot. Slots whose id is negative, too large or not in
    expert_map add exactly 0, and their rows are not read. topk_ids: int32, int64 or uint32 [M, top_k]. topk_weights: float32, bfloat16
    or float16 [M, top_k], used in FP32. experts: of this rank. expert_map: int32 [global experts], a global id's local expert or -1.
    out: BF16 [M, H]. The sum is FP32 in slot order, rounded once. CUDA-graph capturable, a programmatic dependent launch. Raises
    FormatError, UnsupportedError, CompileError.

    >>> import torch, chord_kernels as chord
    >>> values = torch.ones(2, 2, 64, dtype=torch.bfloat16)
    >>> chord.weighted_sum(values, torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), 0.5), experts=2)[:, 0].tolist()
    [1.0, 0.5]
    """
    if values.dtype != torch.bfloat16 or values.ndim != 3 or not values.is_contiguous() or values.shape[2] % _COLUMNS:
        raise FormatError(
            f"values is {values.dtype} {list(values.shape)}; give contiguous bfloat16 [M, top_k, H], H a multiple of {_COLUMNS}"
        )
    tokens, top_k, hidden = values.shape
    check_routing(topk_ids, topk_weights, expert_map, tokens=tokens)
    if topk_ids.shape[1] != top_k:
        raise FormatError(f"topk_ids is {list(topk_ids.shape)}; values has [M, top_k] = [{tokens}, {top_k}]")
    if out is None:
        out = values.new_empty((tokens, hidden))
    elif out.shape != (tokens, hidden) or out.dtype != values.dtype or not out.is_contiguous():
        raise FormatError(f"out is {out.dtype} {list(out.shape)}, strides {out.stride()}; give contiguous bfloat16 {[tokens, hidden]}")
    tensors = [t for t in (topk_ids, topk_weights, expert_map, out) if t is not None]
    if any(t.device != values.device for t in tensors):
        raise FormatError(
            f"values is on {values.device}, other tensors on {sorted({str(t.device) for t in tensors})}; put all on one device"
        )
    if values.device.type == "cuda" and not has_kernels(values.device):
        arch = device_arch(values.device.index)[0]
        raise UnsupportedError(f"architecture {arch} has no kernel here; supported: {', '.join(ARCHITECTURES)}")
    if tokens and hidden:
        known = experts if expert_map is None else expert_map.numel()
        _ops.weighted_sum(values, int32_ids(topk_ids, known), topk_weights.to(torch.float32).contiguous(), experts, expert_map, out)
    return out


def _weighted_sum_cuda(values: Tensor, ids: Tensor, weights: Tensor, experts: int, expert_map: Tensor | None, out: Tensor) -> None:
    from .jit.launch import load

    tokens, hidden = values.shape[0], values.shape[2]
    index = values.device.index
    plan = WeightedSumPlan(device_arch(index)[0])
    grid = tokens * -(-hidden // (_COLUMNS * plan.threads))
    with torch.cuda.device(index):
        kernel = load(plan, index, capturing=torch.cuda.is_current_stream_capturing)
        tables, counts = router_arguments(ids, expert_map, weights, experts)
        stream = torch.cuda.current_stream(index).cuda_stream
        kernel.launch(stream, grid, (values.data_ptr(), out.data_ptr(), *tables, hidden, *counts), dependent=True)


def _weighted_sum_cpu(values: Tensor, ids: Tensor, weights: Tensor, experts: int, expert_map: Tensor | None, out: Tensor) -> None:
    tokens, top_k, hidden = values.shape
    used = (local_experts(ids, experts, expert_map) < experts).unsqueeze(-1)
    at_once = max(1, _AT_ONCE // (4 * max(top_k, 1) * hidden))
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        out[part] = torch.where(used[part], values[part] * weights[part].unsqueeze(-1), 0.0).sum(dim=1)


_library.impl("weighted_sum", _weighted_sum_cuda, "CUDA")
_library.impl("weighted_sum", _weighted_sum_cpu, "CPU")
torch.library.register_fake("chord_kernels::weighted_sum", lambda *args: None, lib=_library)

_ops = torch.ops.chord_kernels
