# SPDX-License-Identifier: Apache-2.0
"""The compressed-tensors config that the plugin registers. A class of a module: vLLM's processes send each other its instances."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config

from .vllm import method_for


class ChordCompressedTensorsConfig(get_quantization_config("compressed-tensors")):
    """compressed-tensors, but for the MoE layers that Chord computes."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts) and (method := method_for(self, layer, prefix)):
            return method
        return super().get_quant_method(layer, prefix)
