# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin (entry point `vllm.general_plugins`): INT4 experts of compressed-tensors checkpoints go to Chord.

`register` replaces the compressed-tensors config by a subclass of whatever is registered, and leaves every layer that Chord does not
compute to it, with one line in the log for each reason. It touches no GPU, may be called any number of times and never raises.
CHORD_VLLM=off leaves vLLM as it is; force also takes layers for which a backend was named. Where it is not set, the engine's
`additional_config={"chord_kernels": {"mode": "off"}}` says the same.
"""

from __future__ import annotations

import logging
from typing import Any

from .. import settings
from ..errors import FormatError
from .scheme import LayerFacts, why_not_layer

TESTED = ("0.26.", "0.33.")
_CLAMPS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")

_logger = logging.getLogger("vllm.chord_kernels")  # under vLLM's own handler
_said: set[str] = set()


def say(text: str, *, first: str | None = None) -> None:
    """Once a process, naming the first layer that it is true of."""
    if text not in _said:
        _said.add(text)
        _logger.info("chord_kernels: %s%s", text, f" (first: {first})" if first else "")


def register() -> None:
    """The entry point; vLLM calls it in every process."""
    try:
        if settings.vllm_mode() == "off":
            say("off (CHORD_VLLM=off)")
        else:
            _register()
    except Exception:  # a plugin must not take the server with it
        _logger.exception("chord_kernels: not active")


def _register() -> None:
    import vllm
    from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config

    from .vllm_config import ChordCompressedTensorsConfig

    if issubclass(get_quantization_config("compressed-tensors"), ChordCompressedTensorsConfig):
        return  # this one, or another plugin's on top of it
    if not vllm.__version__.startswith(TESTED):
        say(f"vLLM {vllm.__version__} was not tested (tested: {', '.join(version + 'x' for version in TESTED)})")
    register_quantization_config("compressed-tensors")(ChordCompressedTensorsConfig)
    say("registered for compressed-tensors INT4 experts")


def _mode() -> str:
    """As the environment says, or the configuration of the engine that is being built."""
    from vllm.config import get_current_vllm_config_or_none

    engine = get_current_vllm_config_or_none()
    additional = getattr(engine, "additional_config", None) or {}
    given = additional.get("chord_kernels", {}) if isinstance(additional, dict) else {}
    if unknown := set(given) - {"mode"}:
        raise FormatError(f"additional_config gives chord_kernels {sorted(unknown)}; it takes 'mode'")
    return settings.vllm_mode(given.get("mode"))


def _why_not(config: Any, layer: Any, prefix: str) -> tuple[LayerFacts | None, str | None]:
    mode = _mode()
    if mode == "off":
        return None, "switched off"
    facts = _facts(config, layer, prefix)
    return facts, "its projections have different schemes, or none" if facts is None else why_not_layer(facts, force=mode == "force")


def method_for(config: Any, layer: Any, prefix: str) -> Any:
    """Chord's method for a MoE layer; None leaves it to vLLM."""
    try:
        facts, reason = _why_not(config, layer, prefix)
        if facts is None or reason is not None:
            say(f"MoE layers are left to vLLM: {reason}", first=prefix)
            return None
        from .vllm_moe import ChordMoEMethod

        say("computes MoE layers", first=prefix)
        return ChordMoEMethod(layer.moe_config, batched=facts.batched)
    except Exception as problem:  # another version's surprise: vLLM's own method is right
        say(f"MoE layers are left to vLLM: {type(problem).__name__}: {problem}", first=prefix)
        return None


def _facts(config: Any, layer: Any, prefix: str) -> LayerFacts | None:
    from vllm.platforms import current_platform

    config._add_fused_moe_to_target_scheme_map()
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}_proj") for name in ("gate", "up", "down")]
    if schemes[0] is None or any(scheme != schemes[0] for scheme in schemes):
        return None
    weights, moe = schemes[0]["weights"], layer.moe_config
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None

    def text(value: Any) -> Any:
        return getattr(value, "value", value)

    return LayerFacts(
        format=text(schemes[0].get("format")),
        num_bits=weights.num_bits,
        type=text(weights.type),
        symmetric=bool(weights.symmetric),
        strategy=text(weights.strategy),
        group_size=weights.group_size,
        actorder=text(weights.actorder),
        quantized_activations=schemes[0].get("input_activations") is not None,
        dtype=str(moe.in_dtype).removeprefix("torch."),
        activation=text(moe.activation),
        clamped=any(getattr(moe, name, None) is not None for name in _CLAMPS),
        bias=bool(moe.has_bias),
        lora=bool(moe.is_lora_enabled),
        expert_balancing=bool(moe.moe_parallel_config.enable_eplb),
        weight_on_input=bool(layer.apply_router_weight_on_input),
        backend=text(moe.moe_backend),
        batched=bool(moe.moe_parallel_config.use_batched_activation_format),
        experts=moe.num_local_experts,
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size_per_partition,
        arch=None if capability is None else f"sm_{capability.major}{capability.minor}{'a' if capability.major >= 9 else ''}",
    )
