# SPDX-License-Identifier: Apache-2.0
"""Router ids to blocks of an expert's rows, in one kernel where `rows.align_indexed` takes a dozen torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import device_arch, has_kernels
from .ops import library as _library
from .plain_kernels import MOST_ALIGNED_EXPERTS
from .plan import align_plan
from .rows import IndexedRows, align_indexed, check_routing, expected_rows, int32_ids, padded_capacity, router_arguments

_library.define(
    "align_rows(Tensor topk_ids, Tensor? expert_map, int experts, int block_rows, Tensor(a!) sorted_ids, Tensor(b!) expert_ids, "
    "Tensor(c!) padded) -> ()"
)


def align_rows(topk_ids: Tensor, experts: int, block_rows: int, expert_map: Tensor | None = None) -> IndexedRows:
    """`align_indexed`, but for the order of an expert's ids, which is any: no output depends on it. One launch on a GPU.

    topk_ids: int32, int64 or uint32 [M, top_k]. experts: of this rank. expert_map: int32 [global experts], a global id's local expert or
    -1. CUDA-graph capturable, a programmatic dependent launch. Raises FormatError, CompileError.
    """
    check_routing(topk_ids, expert_map=expert_map)
    if not (has_kernels(topk_ids.device) and 1 <= experts <= MOST_ALIGNED_EXPERTS):
        return align_indexed(topk_ids, experts, block_rows, expert_map)
    ids = int32_ids(topk_ids, experts if expert_map is None else expert_map.numel())
    capacity = padded_capacity(ids.numel(), experts, block_rows)
    sorted_ids = ids.new_empty(capacity)
    expert_ids = ids.new_empty(capacity // block_rows)
    padded = ids.new_empty(1)
    torch.ops.chord_kernels.align_rows(ids, expert_map, experts, block_rows, sorted_ids, expert_ids, padded)
    return IndexedRows(sorted_ids, expert_ids, padded, ids.shape[1], block_rows, expected_rows(ids.numel(), experts, expert_map))


def _align_rows_cuda(
    ids: Tensor, expert_map: Tensor | None, experts: int, block_rows: int, sorted_ids: Tensor, expert_ids: Tensor, padded: Tensor
) -> None:
    from .jit.launch import load

    index = ids.device.index
    with torch.cuda.device(index):
        kernel = load(align_plan(device_arch(index)[0], experts), index, capturing=torch.cuda.is_current_stream_capturing)
        (*tables, _), counts = router_arguments(ids, expert_map, None, experts)
        addresses = (sorted_ids.data_ptr(), expert_ids.data_ptr(), padded.data_ptr(), *tables)
        stream = torch.cuda.current_stream(index).cuda_stream
        kernel.launch(stream, 1, (*addresses, block_rows, *counts), dependent=True)


_library.impl("align_rows", _align_rows_cuda, "CUDA")
torch.library.register_fake("chord_kernels::align_rows", lambda *args: None, lib=_library)
