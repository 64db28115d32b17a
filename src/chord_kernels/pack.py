# SPDX-License-Identifier: Apache-2.0
"""INT4 experts of checkpoints into a packed weight, all in one launch on a GPU: what `weights.pack_expert_into` does one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import FormatError
from .formats import W4A16
from .ops import device_arch, has_kernels
from .plain_kernels import PackPlan
from .weights import PackedWeight, pack_expert_into

_FLOOR_BITS = int(torch.tensor(W4A16.scale_floor, dtype=torch.bfloat16).view(torch.int16))


def pack_experts_into(weight: PackedWeight, words: Tensor, scales: Tensor) -> None:
    """Fill every expert of an INT4 `weight`.

    words: int32 [E, N, K/8], nibble j of a word is k = 8 * word + j. scales: BF16 [E, N, K/32], or FP16, FP32, which are rounded to BF16
    once. Both on the weight's device. On a supported GPU no scratch is taken, and the host waits once, for the largest scale. Scales that
    are not finite, or beyond what kernels take, raise FormatError, when the weight has been written.
    """
    experts, n, k = weight.experts, weight.n, weight.k
    wanted = (experts, n, k // 8), (experts, n, k // W4A16.group)
    if weight.format is not W4A16 or words.dtype != torch.int32 or (tuple(words.shape), tuple(scales.shape)) != wanted:
        raise FormatError(
            f"words are {words.dtype} {list(words.shape)}, scales {list(scales.shape)}; this {weight.format.name} weight takes int32 "
            f"{list(wanted[0])} and {list(wanted[1])}, and must be w4a16"
        )
    if words.device != weight.device or scales.device != weight.device:
        raise FormatError(f"words are on {words.device}, scales on {scales.device}; put both on the weight's device, {weight.device}")
    if not has_kernels(weight.device):
        for expert in range(experts):
            pack_expert_into(weight, expert, words[expert], scales[expert])
        return
    W4A16.check_largest_scale(_launch(weight, words.contiguous(), W4A16.rounded_scales(scales).contiguous()))


def _launch(weight: PackedWeight, words: Tensor, scales: Tensor) -> float:
    """Returns the largest magnitude of a scale, NaN if there is one."""
    from .jit.launch import load

    index = weight.device.index
    largest = torch.zeros(1, dtype=torch.float32, device=weight.device)
    row_tiles, k_tiles = weight.n // W4A16.tile_rows, weight.k // W4A16.tile_k
    with torch.cuda.device(index):
        kernel = load(PackPlan(device_arch(index)[0]), index)
        addresses = (words.data_ptr(), scales.data_ptr(), weight.data.data_ptr(), largest.data_ptr())
        stream = torch.cuda.current_stream(index).cuda_stream
        grid = weight.experts * row_tiles * k_tiles
        kernel.launch(stream, grid, (*addresses, row_tiles, k_tiles, int(weight.paired), _FLOOR_BITS), dependent=False)
    return float(largest)
