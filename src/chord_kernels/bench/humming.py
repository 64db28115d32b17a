# SPDX-License-Identifier: Apache-2.0
"""The live peer: humming-kernels' own layer with its own heuristics, on the inputs of a case. Needs `pip install humming-kernels`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import torch
from torch import Tensor

from ..rows import IndexedRows
from .suites import TOP_K, Case, random_topk_ids


def available() -> bool:
    return importlib.util.find_spec("humming") is not None


_WEIGHTS: dict[str, dict[str, object]] = {
    "w4a16": {"dtype": "uint4", "group_size": 32, "scale_dtype": "bfloat16", "has_zero_point": False, "is_fp_zero_point": False},
    "mxfp8": {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0", "has_zero_point": False, "is_fp_zero_point": False},
}


class HummingPeer:
    """One expert weight of random codes in humming's layout, shared by the cases of a shape."""

    def __init__(self, experts: int, n: int, k: int, *, format_name: str = "w4a16") -> None:
        from humming.layer import HummingLayer

        layer = HummingLayer(
            shape_n=n,
            shape_k=k,
            num_experts=experts,
            weight_config=_WEIGHTS[format_name],
            input_config={"dtype": "bfloat16", "group_size": 0},
            torch_dtype=torch.bfloat16,
        ).cuda()
        for parameter in layer.parameters():
            if parameter.dtype == torch.int32:
                parameter.data.random_(-(2**31), 2**31 - 1)
            elif parameter.element_size() == 1:
                _fill_bytes(parameter.data)
            else:
                parameter.data.normal_(std=0.01)
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


def _fill_bytes(data: Tensor) -> None:
    """Bytes that are E4M3 numbers between 0.25 and 1 and E8M0 scales of 2^-79 to 2^-64 alike: finite as either."""
    data.view(torch.uint8).random_(0x28, 0x38)
