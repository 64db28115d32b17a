# SPDX-License-Identifier: Apache-2.0
"""How checkpoints keep quantized experts: which tensors, and what their configs must say. What is not supported is refused with the
field and its value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError
from .formats import MXFP8, W4A16, Format


@dataclass(frozen=True)
class Stored:
    """The tensors of one projection [N, K]: weight [N, K / per_entry], scale [N, K / 32]."""

    format: Format
    weight: str
    weight_dtypes: tuple[str, ...]
    per_entry: int  # of K, in an entry of the weight
    scale: str
    scale_dtypes: tuple[str, ...]


INT4 = Stored(W4A16, "weight_packed", ("I32",), 8, "weight_scale", ("BF16", "F16", "F32"))
MX8 = Stored(MXFP8, "weight", ("F8_E4M3",), 1, "weight_scale", ("U8", "F8_E8M0"))
MX8_INVERSE = Stored(MXFP8, "weight", ("F8_E4M3",), 1, "weight_scale_inv", ("U8", "F8_E8M0"))  # the name alone: values are not inverted

_WEIGHTS = {
    "pack-quantized": (INT4, {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": W4A16.group}),
    "mxfp8-quantized": (MX8, {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": MXFP8.group}),
}
_ACTORDER = (None, False, "static", "weight")  # orders that leave columns where they are


def stored_of(config: dict[str, Any], beside: dict[str, Any], module: str) -> Stored:
    """What the config (config.json, and hf_quant_config.json beside it, {} where there is none) says of `module`'s tensors."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is None:
        quantization = (config.get("text_config") or {}).get("quantization_config")
    if quantization is None and beside:
        quantization = {"quant_method": "modelopt", **(beside.get("quantization") or {})}
    if quantization is None:
        raise CheckpointError("config.json has no quantization_config; this reader takes INT4 and MXFP8 checkpoints")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, module)
    if method == "mxfp8":
        return MX8_INVERSE
    if method == "modelopt":
        algorithm = quantization.get("quant_algo")
        if str(algorithm).upper() != "MXFP8":
            raise CheckpointError(f"quantization_config.quant_algo is {algorithm!r}; of ModelOpt's, 'MXFP8' is read")
        return MX8
    raise CheckpointError(f"quantization_config.quant_method is {method!r}; wanted 'compressed-tensors', 'modelopt' or 'mxfp8'")


def _compressed_tensors(quantization: dict[str, Any], module: str) -> Stored:
    """Quantized activations of an MXFP8 scheme are left out: they stay BF16 here, which is closer to the unquantized model."""
    groups = {name: g for name, g in (quantization.get("config_groups") or {}).items() if isinstance(g, dict)}
    matching = {name: group for name, group in groups.items() if _targets(group, module)}
    if not matching:
        raise CheckpointError(f"no entry of quantization_config.config_groups targets {module}")
    # The most specific group wins over one that targets every Linear.
    name = next((n for n, g in matching.items() if "Linear" not in (g.get("targets") or [])), next(iter(matching)))
    group, where = matching[name], f"quantization_config.config_groups.{name}"
    kind = group.get("format") or quantization.get("format")
    if kind not in _WEIGHTS:
        raise CheckpointError(f"{where} has format {kind!r}; wanted {' or '.join(map(repr, _WEIGHTS))}")
    stored, supported = _WEIGHTS[kind]
    if group.get("input_activations") and stored.format is W4A16:
        raise CheckpointError(f"{where}.input_activations is {group['input_activations']}; activations are BF16 here (W4A16)")
    weights = group.get("weights") or {}
    for field, wanted in supported.items():
        if weights.get(field) != wanted:
            raise CheckpointError(f"{where}.weights.{field} is {weights.get(field)!r}; supported: {wanted!r}")
    if weights.get("actorder") not in _ACTORDER:
        raise CheckpointError(
            f"{where}.weights.actorder is {weights['actorder']!r}, which shuffles columns; supported: null, static, weight"
        )
    if weights.get("dynamic"):
        raise CheckpointError(f"{where}.weights.dynamic is {weights['dynamic']!r}; weights are quantized ahead of time here")
    return stored


def _targets(group: dict[str, Any], module: str) -> bool:
    for target in group.get("targets") or []:
        if target.startswith("re:") and re.match(target[3:], module):
            return True
        if target == "Linear" or module == target or module.endswith("." + target):
            return True
    return False
