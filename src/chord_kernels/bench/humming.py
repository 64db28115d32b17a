# SPDX-License-Identifier: Apache-2.0
"""The live peer: humming-kernels' own layer and heuristics, on a case's weights and inputs. Needs `pip install humming-kernels`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import torch
from torch import Tensor

from ..formats import MXFP8, W4A16
from ..rows import IndexedRows
from ..weights import PackedWeight
from .suites import TOP_K, Case, random_topk_ids


def available() -> bool:
    return importlib.util.find_spec("humming") is not None


_WEIGHTS: dict[str, dict[str, object]] = {
    W4A16.name: {"dtype": "uint4", "group_size": 32, "scale_dtype": "bfloat16", "has_zero_point": False, "is_fp_zero_point": False},
    MXFP8.name: {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0", "has_zero_point": False, "is_fp_zero_point": False},
}


class HummingPeer:
    """The experts of a packed weight in humming's layout."""

    def __init__(self, weight: PackedWeight) -> None:
        from humming.layer import HummingLayer

        layer = HummingLayer(
            shape_n=weight.n,
            shape_k=weight.k,
            num_experts=weight.experts,
            weight_config=_WEIGHTS[weight.format.name],
            input_config={"dtype": "bfloat16", "group_size": 0},
            torch_dtype=torch.bfloat16,
        ).cuda()
        for expert in range(weight.experts):
            values, scales = weight.unpack_expert(expert)
            words = W4A16.words_of_codes(values) if weight.format is W4A16 else values.view(torch.int32)
            layer.weight.data[expert] = words
            layer.weight_scale.data[expert] = scales.view(layer.weight_scale.dtype)
        layer.transform()
        self._layer = layer

    def prepare(self, case: Case, x: Tensor, ids: Tensor | None = None) -> Callable[[], Tensor]:
        """A call that computes the case with humming, routed the same way; ids: of indexed cases, drawn as Chord's if not given."""
        from humming.testing.data import generate_moe_tensors
        from humming.tune import get_heuristics_config

        gemm_type = {"indexed": "indexed", "contiguous": "grouped_contiguous", "masked": "grouped_masked"}[case.contract]
        config = get_heuristics_config(
            layer_config=self._layer.humming_config, shape_m=case.routed_rows, use_f16_accum=False, gemm_type=gemm_type
        )
        arguments: dict[str, object] = {
            "compute_config": json.dumps({"use_f16_accum": False, "gemm_type": gemm_type}),
            "tuning_config": json.dumps(config),
        }
        if case.contract == "indexed":
            ids = random_topk_ids(case.tokens, case.experts) if ids is None else ids
            _, _, sorted_ids, expert_ids, padded = generate_moe_tensors(ids, case.experts, gemm_type, config["block_shape"][0])
            top_k = TOP_K if case.stage == "gate_up" else 1
            arguments |= {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": padded, "top_k": top_k}
        elif case.contract == "contiguous":
            arguments["expert_layout"] = torch.arange(0, case.routed_rows + 1, case.point, device="cuda", dtype=torch.int64)
        else:
            arguments["expert_layout"] = torch.full((case.experts,), case.point, dtype=torch.int32, device="cuda")
        arguments["outputs"] = torch.empty((case.routed_rows, case.n), dtype=torch.bfloat16, device="cuda")
        return lambda: self._layer(inputs=x, **arguments)

    def indexed(self, routed_rows: int) -> tuple[int, Callable[[Tensor, IndexedRows, Tensor], Tensor]]:
        """Block rows that humming wants its routing aligned to, and a call (x, routing, out) that reads the routing on the device."""
        from humming.tune import get_heuristics_config

        config = get_heuristics_config(
            layer_config=self._layer.humming_config, shape_m=routed_rows, use_f16_accum=False, gemm_type="indexed"
        )
        fixed = {"compute_config": json.dumps({"use_f16_accum": False, "gemm_type": "indexed"}), "tuning_config": json.dumps(config)}

        def call(x: Tensor, routing: IndexedRows, out: Tensor) -> Tensor:
            return self._layer(
                inputs=x,
                sorted_ids=routing.sorted_ids,
                expert_ids=routing.expert_ids,
                num_tokens_padded=routing.num_tokens_padded,
                top_k=routing.top_k,
                outputs=out,
                **fixed,
            )

        return config["block_shape"][0], call
