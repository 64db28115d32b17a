# SPDX-License-Identifier: Apache-2.0
"""vLLM's modular MoE kernel on Chord's ops: how weights are packed at load, and two experts classes.

Imported by the plugin once a layer is Chord's (integrations/vllm.py).
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from .. import ops
from ..align import align_rows
from ..combine import weighted_sum
from ..decode import goes_to_warp_decode, warp_decode
from ..errors import ChordError
from ..formats import W4A16
from ..jit.compiler import build_all
from ..layer import MoELayer
from ..pack import pack_experts_into
from ..plan import layer_kernels
from ..rows import MaskedRows, int32_ids
from ..weights import PackedWeight, empty_weight
from .vllm import say

_WORD = 8  # INT4 codes of an int32


@lru_cache(maxsize=64)
def _building(arch: str, sm_count: int, contract: str, top_k: int, experts: int, hidden: int, intermediate: int) -> threading.Thread:
    """Compiles a layer shape's kernels while the engine reads weights. What fails here fails again where it is waited for, aloud."""
    shape = {"experts": experts, "hidden": hidden, "intermediate": intermediate, "sm_count": sm_count}
    plans = layer_kernels(arch, W4A16.name, contracts=(contract,), top_k=top_k, unfused=False, **shape)

    def build() -> None:
        with suppress(ChordError):
            build_all(plans)

    say(f"compiling {len(plans)} kernels for {experts} experts of {hidden} x {intermediate}, or reading them from the cache")
    thread = threading.Thread(target=build, name="chord-build", daemon=True)
    thread.start()
    return thread


class _Experts(mk.FusedMoEExpertsModular):
    """What both formats have in common. w1, w2: the packed data of gate/up [E, 2I, H] and down [E, H, I]."""

    @staticmethod
    def _supports_current_device() -> bool:
        return True  # integrations/scheme.py has said so

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kInt4Static32 and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        gate_up = PackedWeight(w1, True)
        return gate_up.experts, a1.shape[-2], gate_up.n, gate_up.k, topk_ids.shape[1]


class ChordExperts(_Experts):
    """Tokens as they come: warp decode for few, else blocks of an expert's rows. Weighted and reduced here."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, expert_tokens_meta: Any, activation: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (M, topk * N // 2), (M, topk * K), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        assert not apply_router_weight_on_input
        gate_up, down = PackedWeight(w1, True), PackedWeight(w2)
        tokens, top_k = topk_ids.shape
        known = gate_up.experts if expert_map is None else global_num_experts
        if goes_to_warp_decode(gate_up, tokens, top_k, known):
            warp_decode(hidden_states, gate_up, down, topk_ids, topk_weights, out=output, expert_map=expert_map)
            return
        block_rows = ops.block_rows_on(gate_up.device, tokens * top_k / known)
        topk_ids = int32_ids(topk_ids, known)
        routing = align_rows(topk_ids, gate_up.experts, block_rows, expert_map)
        hidden = _room(workspace13, tokens * top_k, gate_up.n // 2)
        values = _room(workspace2, tokens * top_k, gate_up.k)
        ops.indexed(hidden_states, gate_up, routing, epilogue="swiglu", out=hidden, dependent_launch=True)
        ops.indexed(hidden, down, routing.by_id(), out=values, dependent_launch="weights_first")
        values = values.view(tokens, top_k, -1)
        weighted_sum(values, topk_ids, topk_weights, experts=gate_up.experts, expert_map=expert_map, out=output)


class ChordBatchedExperts(_Experts):
    """Batches of an expert's rows (DeepEP low latency and alike): rows beyond an expert's count are neither read nor written."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, expert_tokens_meta: Any, activation: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        rows = (self.max_num_tokens or M) * (self.num_dispatchers or 1)
        return (0,), (local_num_experts, rows, N // 2), (local_num_experts, rows, K)  # the first lies where the output does

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        assert not apply_router_weight_on_input
        gate_up, down = PackedWeight(w1, True), PackedWeight(w2)
        experts, rows, _ = hidden_states.shape
        expected = -(-topk_ids.numel() // max(global_num_experts, 1))  # rows an expert, if routing were even
        routing = MaskedRows(expert_tokens_meta.expert_num_tokens, min(max(expected, 1), rows))
        hidden = _room(workspace2, experts * rows, gate_up.n // 2)
        ops.masked(hidden_states, gate_up, routing, epilogue="swiglu", out=hidden)
        ops.masked(hidden, down, routing, out=output.view(experts * rows, -1), dependent_launch="weights_first")


def _room(workspace: Tensor, rows: int, columns: int) -> Tensor:
    return workspace.view(-1)[: rows * columns].view(rows, columns)


class ChordMoEMethod(FusedMoEMethodBase):
    """Parameters as the checkpoint has them; packed at load, one expert at a time, in place of the originals."""

    def __init__(self, moe: Any, *, batched: bool) -> None:
        super().__init__(moe)
        self._experts = ChordBatchedExperts if batched else ChordExperts
        self._top_k = moe.experts_per_token
        self._packed: dict[str, PackedWeight] = {}

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, params_dtype: torch.dtype, **attrs: Any
    ) -> None:
        attrs |= {"is_transposed": False, "quant_method": "group"}
        inter, hidden = intermediate_size_per_partition, hidden_size
        for name, n, k in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
            shapes = {
                "weight_packed": ((num_experts, n, k // _WORD), torch.int32),
                "weight_scale": ((num_experts, n, k // W4A16.group), params_dtype),
                "weight_shape": ((num_experts, 2), params_dtype),
            }
            for part, (shape, dtype) in shapes.items():
                parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
                layer.register_parameter(f"{name}_{part}", parameter)
                set_weight_attrs(parameter, attrs)
        layer.a13_scale = layer.a2_scale = None
        if torch.cuda.is_available():
            self._build(num_experts, hidden, inter)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name, paired in (("w13", True), ("w2", False)):
            self._pack(layer, name, paired)
        layer.w13_weight, layer.w2_weight = self._packed["w13"].data, self._packed["w2"].data
        self._load_kernels()
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare = maybe_make_prepare_finalize(
            moe=self.moe, quant_config=self.moe_quant_config, routing_tables=layer._expert_routing_tables(), allow_new_interface=True
        )
        batched: dict[str, int] = {}
        if prepare.activation_format == mk.FusedMoEActivationFormat.BatchedExperts:
            batched = {"max_num_tokens": prepare.max_num_tokens_per_rank(), "num_dispatchers": prepare.num_dispatchers()}
        self.moe_kernel = mk.FusedMoEKernel(prepare, self._experts(moe_config=self.moe, quant_config=self.moe_quant_config, **batched))

    @property
    def _contract(self) -> str:
        return "masked" if self._experts is ChordBatchedExperts else "indexed"

    def _build(self, experts: int, hidden: int, intermediate: int) -> threading.Thread:
        return _building(*ops.device_arch(torch.cuda.current_device()), self._contract, self._top_k, experts, hidden, intermediate)

    def _load_kernels(self) -> None:
        gate_up, down = self._packed["w13"], self._packed["w2"]
        if gate_up.device.type != "cuda":
            return
        start = time.perf_counter()
        self._build(gate_up.experts, gate_up.k, down.k).join()
        kernels = MoELayer(gate_up, down).warmup((self._contract,), self._top_k)
        if (waited := time.perf_counter() - start) > 1:
            say(f"waited {waited:.1f} s for {kernels} kernels to be compiled; the next start finds them in the cache")

    def _pack(self, layer: Any, name: str, paired: bool) -> None:
        """Into the same memory when weights are loaded again."""
        words, scales = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
        experts, n, width = words.shape
        if name not in self._packed:
            self._packed[name] = empty_weight(W4A16, experts, n, width * _WORD, paired=paired, device=words.device)
        pack_experts_into(self._packed[name], words, scales)
        for part in ("weight_packed", "weight_scale"):
            replace_parameter(layer, f"{name}_{part}", torch.empty(0, dtype=torch.uint8, device=words.device))
        if words.is_cuda:
            del words, scales
            torch.cuda.empty_cache()  # others on the card, and the next layer's tensors, get what the originals had

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return int4_w4a16_moe_quant_config(w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, block_shape=[0, W4A16.group])

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None, shared_experts_input: Any = None
    ) -> Any:
        return self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
