# SPDX-License-Identifier: Apache-2.0
"""One MoE layer: route -> gate/up + SwiGLU -> down -> weighted sum."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .align import align_rows
from .combine import weighted_sum
from .decode import goes_to_warp_decode, warp_decode
from .decode_plan import WARP_DECODE_BATCHES
from .errors import FormatError, UnsupportedError
from .formats import W4A16
from .plan import layer_kernels, numerics_for
from .progress import progress
from .rows import check_routing
from .weights import PackedWeight, check_layer


@dataclass(frozen=True, eq=False)
class MoELayer:
    """Packed experts of one layer.

    gate_up: [E, 2I, H], packed with gate_up=True (gate rows first). down: [E, H, I]. activation: "silu" only.
    expert_map: int tensor [global experts], a global id's local expert or -1; None where ids are local already.
    """

    gate_up: PackedWeight
    down: PackedWeight
    expert_map: Tensor | None = None
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.activation != "silu":
            raise UnsupportedError(f"activation {self.activation!r} is not computed; only 'silu' (SwiGLU without clamp or alpha) is")
        check_layer(self.gate_up, self.down)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        layer: int,
        *,
        tp: tuple[int, int] = (0, 1),
        ep: tuple[int, int] = (0, 1),
        device: torch.device | str = "cuda",
    ) -> MoELayer:
        """Load one layer of a compressed-tensors INT4 checkpoint. tp, ep: (rank, size). Under EP, ids stay global."""
        from .checkpoint import Checkpoint

        checkpoint = Checkpoint(path)
        gate_up, down = checkpoint.load(layer, tp=tp, ep=ep, device=device)
        if ep[1] == 1:
            return cls(gate_up, down)
        expert_map = torch.full((checkpoint.experts(layer),), -1, dtype=torch.int32)
        first = ep[0] * gate_up.experts
        expert_map[first : first + gate_up.experts] = torch.arange(gate_up.experts, dtype=torch.int32)
        return cls(gate_up, down, expert_map.to(device))

    @property
    def hidden(self) -> int:
        return self.gate_up.k

    @property
    def intermediate(self) -> int:
        return self.down.k

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """sum over slots of topk_weights[t, s] * down(silu(gate(x[t])) * up(x[t])) with the experts topk_ids[t, s].

        x: BF16 [M, H]. topk_ids: int32, int64 or uint32 [M, top_k]; ids that are negative, too large or remote add exactly 0.
        topk_weights: float32, bfloat16 or float16 [M, top_k], used in FP32. out: BF16 [M, H]. The SwiGLU output is rounded to BF16
        once, and each expert's output too unless the batch goes to `warp_decode`; the sum over slots is FP32. Nothing is read back
        to the host. MXFP8 goes to `warp_decode` in parts of 64 tokens, INT4 on a GPU where experts have few rows.
        """
        if x.ndim != 2 or x.shape[1] != self.hidden:
            raise FormatError(f"x is {list(x.shape)}; give [M, {self.hidden}]")
        check_routing(topk_ids, topk_weights, tokens=x.shape[0])
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous()):
            raise FormatError(f"out is {out.dtype} {list(out.shape)}, strides {out.stride()}; give contiguous {x.dtype} {list(x.shape)}")
        tokens, top_k = topk_ids.shape
        if tokens == 0 or top_k == 0:
            return out.zero_() if out is not None else torch.zeros_like(x)
        if self.warp_decodes(tokens, top_k):
            return self._warp_decode(x.contiguous(), topk_ids, topk_weights, out)
        block_rows, experts = self._block_rows(tokens, top_k), self.gate_up.experts
        routing = align_rows(topk_ids, experts, block_rows, self._expert_map())
        values = x.new_empty((tokens * top_k, self.hidden))  # rows of dropped ids stay unwritten, and are not read
        hidden = ops.indexed(x.contiguous(), self.gate_up, routing, epilogue="swiglu")
        ops.indexed(hidden, self.down, routing.by_id(), out=values, dependent_launch="weights_first")
        return weighted_sum(values.view(tokens, top_k, -1), topk_ids, topk_weights, experts=experts, expert_map=self._expert_map(), out=out)

    def numerics(self, tokens: int, top_k: int) -> str:
        """Which definition of `reference` a batch of this size computes: "exact" or "bf16"."""
        if self.gate_up.device.type == "cpu" or self.warp_decodes(tokens, top_k):
            return "exact"
        return numerics_for(self._block_rows(tokens, top_k), tokens * top_k / self._known_experts)

    def warp_decodes(self, tokens: int, top_k: int) -> bool:
        """Whether a batch of this size goes to `warp_decode`. On CPU INT4 keeps the path of large batches."""
        here = self.gate_up.format is not W4A16 or self.gate_up.device.type == "cuda"
        return here and goes_to_warp_decode(self.gate_up, tokens, top_k, self._known_experts)

    def _warp_decode(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        expert_map = self._expert_map()
        for first in range(0, x.shape[0], WARP_DECODE_BATCHES[-1]):
            part = slice(first, first + WARP_DECODE_BATCHES[-1])
            warp_decode(x[part], self.gate_up, self.down, topk_ids[part], topk_weights[part], out=out[part], expert_map=expert_map)
        return out

    def _expert_map(self) -> Tensor | None:
        return None if self.expert_map is None else self.expert_map.to(torch.int32)

    def _block_rows(self, tokens: int, top_k: int) -> int:
        return ops.block_rows_on(self.gate_up.device, tokens * top_k / self._known_experts)

    @property
    def _known_experts(self) -> int:
        """That the tokens' slots are spread over, of all ranks."""
        return self.gate_up.experts if self.expert_map is None else self.expert_map.numel()

    def warmup(self, contracts: tuple[str, ...] = ("indexed",), top_k: int | None = None) -> int:
        """Compile and load every kernel that any batch can need on the weights' device; returns how many. contracts: beyond warp decode,
        those of the ops that will be called; the layer itself calls `indexed`. top_k: of every batch, if it is known."""
        device = self.gate_up.device
        if device.type != "cuda":
            return 0
        from .jit.compiler import build_all
        from .jit.launch import load

        arch, sm_count = ops.device_arch(device.index)
        shape = {"experts": self.gate_up.experts, "hidden": self.hidden, "intermediate": self.intermediate}
        plans = layer_kernels(arch, self.gate_up.format.name, contracts=contracts, sm_count=sm_count, top_k=top_k, unfused=False, **shape)
        with progress("compiling kernels", len(plans)) as step:
            build_all(plans, done=lambda _: step())
        with torch.cuda.device(device):  # loading makes its device the current one
            for plan in plans:
                load(plan, device.index)
        return len(plans)
