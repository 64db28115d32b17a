# SPDX-License-Identifier: Apache-2.0
"""The plugin inside the real vLLM package, on a GPU if there is one, else on CPU tensors. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support import quantization_config, random_codes, random_ids
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm.model_executor.layers.quantization import get_quantization_config

import chord_kernels as chord
from chord_kernels import reference
from chord_kernels.formats import W4A16
from chord_kernels.integrations import vllm as plugin
from chord_kernels.integrations.scheme import why_not_layer
from chord_kernels.integrations.vllm_moe import ChordMoEMethod

EXPERTS, HIDDEN, INTER, TOP_K = 8, 256, 128, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import workspace

    if DEVICE == "cpu":
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # vLLM calls it where its buffers grow
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device(DEVICE))


def config(**changes: Any) -> FusedMoEConfig:
    return FusedMoEConfig(
        **{
            "num_experts": EXPERTS,
            "experts_per_token": TOP_K,
            "hidden_dim": HIDDEN,
            "intermediate_size": INTER,
            "num_local_experts": EXPERTS,
            "num_logical_experts": EXPERTS,
            "activation": MoEActivation.SILU,
            "device": DEVICE,
            "routing_method": RoutingMethodType.Renormalize,
            "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
            "in_dtype": torch.bfloat16,
        }
        | changes
    )


class Layer(torch.nn.Module):
    """What the method reads of vLLM's RoutedExperts."""

    def __init__(self, moe: FusedMoEConfig, expert_map: torch.Tensor | None = None) -> None:
        super().__init__()
        self.moe_config, self.activation = moe, MoEActivation.SILU
        self.global_num_experts, self.expert_map = moe.num_experts, expert_map
        self.apply_router_weight_on_input = False

    def _expert_routing_tables(self) -> None:
        return None


def loaded(method: ChordMoEMethod, layer: Layer) -> tuple[chord.PackedWeight, chord.PackedWeight]:
    """The layer with random weights; and the same, packed by hand."""
    local = layer.moe_config.num_local_experts
    with torch.device(DEVICE):
        method.create_weights(layer, local, HIDDEN, INTER, torch.bfloat16, weight_loader=None)
    packed = []
    for seed, (name, n, k) in enumerate((("w13", 2 * INTER, HIDDEN), ("w2", HIDDEN, INTER))):
        codes, scales = random_codes(local, n, k, device=DEVICE, seed=seed)
        getattr(layer, f"{name}_weight_packed").data.copy_(W4A16.words_of_codes(codes))
        getattr(layer, f"{name}_weight_scale").data.copy_(scales)
        packed.append(chord.pack_w4a16(codes, scales, gate_up=name == "w13"))
    method.process_weights_after_loading(layer)
    return packed[0], packed[1]


def test_registration_is_idempotent_and_keeps_the_class() -> None:
    before = get_quantization_config("compressed-tensors")
    plugin.register()
    first = get_quantization_config("compressed-tensors")
    plugin.register()
    assert get_quantization_config("compressed-tensors") is first
    assert issubclass(first, before)


def test_processes_can_send_each_other_the_config() -> None:
    """`vllm serve` starts its engines by spawn: what the config is an instance of is imported there."""
    config = real_config()
    assert type(config).__module__.startswith("chord_kernels")
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer).quant_format)"
    other = subprocess.run([sys.executable, "-c", read], input=pickle.dumps(config), capture_output=True, check=True)
    assert other.stdout.decode().strip().endswith("pack-quantized")


def test_off_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_VLLM", "off")
    called = []
    monkeypatch.setattr(plugin, "_register", lambda: called.append(True))
    before = get_quantization_config("compressed-tensors")
    plugin.register()
    assert get_quantization_config("compressed-tensors") is before
    assert not called


def test_a_broken_setting_does_not_raise(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CHORD_VLLM", "perhaps")
    plugin.register()


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_layer_computes_what_the_reference_does(tokens: int) -> None:
    method, layer = ChordMoEMethod(config(), batched=False), Layer(config())
    gate_up, down = loaded(method, layer)
    x, ids = torch.randn((tokens, HIDDEN), device=DEVICE).to(torch.bfloat16), random_ids(tokens, EXPERTS, TOP_K, device=DEVICE)
    weights = torch.rand((tokens, TOP_K), device=DEVICE)
    value = method.apply(layer, x, weights, ids)
    expected = reference.layer(x, gate_up, down, ids, weights, dtype=torch.float64, round_hidden=True)
    assert reference.relative_error(value, expected) < 4e-3


def test_batched_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepEP's format, driven by vLLM's own reference of it."""
    method, layer = ChordMoEMethod(config(), batched=True), Layer(config())
    prepare = BatchedPrepareAndFinalize(max_num_tokens=64, num_local_experts=EXPERTS, num_dispatchers=1, rank=0)
    monkeypatch.setattr("chord_kernels.integrations.vllm_moe.maybe_make_prepare_finalize", lambda **_: prepare)
    gate_up, down = loaded(method, layer)
    x, ids = torch.randn((33, HIDDEN), device=DEVICE).to(torch.bfloat16), random_ids(33, EXPERTS, TOP_K, device=DEVICE)
    weights = torch.rand((33, TOP_K), device=DEVICE)
    value = method.apply(layer, x, weights, ids)
    expected = reference.layer(x, gate_up, down, ids, weights, dtype=torch.float64, round_hidden=True)
    assert reference.relative_error(value, expected) < 5e-3


def test_weights_take_no_more_than_the_originals() -> None:
    method, layer = ChordMoEMethod(config(), batched=False), Layer(config())
    gate_up, down = loaded(method, layer)
    left = sum(parameter.numel() * parameter.element_size() for name, parameter in layer.named_parameters() if "shape" not in name)
    assert left == 0
    assert torch.equal(layer.w13_weight, gate_up.data)
    assert torch.equal(layer.w2_weight, down.data)


def test_workspaces_grow_with_the_tokens() -> None:
    """vLLM locks them after its largest batch."""
    experts = ChordMoEMethod(config(), batched=False)._experts
    shapes = [
        experts.workspace_shapes(None, tokens, 2 * INTER, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, None) for tokens in (1, 64, 65, 8192)
    ]
    for smaller, larger in pairwise(shapes):
        assert all(a[0] < b[0] and a[1:] == b[1:] for a, b in zip(smaller, larger, strict=True))


def test_reloaded_weights_lie_where_the_old_ones_did() -> None:
    """Captured graphs hold their addresses."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    method, layer = ChordMoEMethod(config(), batched=False), Layer(config())
    layer.quant_method = method
    with torch.device(DEVICE):
        method.create_weights(layer, EXPERTS, HIDDEN, INTER, torch.bfloat16, weight_loader=default_weight_loader)
        layerwise.record_metadata_for_reloading(layer)
    checkpoints = []
    for seed in (0, 2):
        tensors = {}
        for offset, (name, n, k) in enumerate((("w13", 2 * INTER, HIDDEN), ("w2", HIDDEN, INTER))):
            codes, scales = random_codes(EXPERTS, n, k, device=DEVICE, seed=seed + offset)
            shape = torch.ones((EXPERTS, 2), dtype=torch.bfloat16, device=DEVICE)
            tensors |= {f"{name}_weight_packed": W4A16.words_of_codes(codes), f"{name}_weight_scale": scales, f"{name}_weight_shape": shape}
        checkpoints.append(tensors)

    def load(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor)

    load(checkpoints[0])
    method.process_weights_after_loading(layer)
    places = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    before = layer.w13_weight.clone()
    layerwise.initialize_layerwise_reload(layer)
    load(checkpoints[1])
    assert (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()) == places
    assert not torch.equal(layer.w13_weight, before)
    x, weights = torch.randn((4, HIDDEN), device=DEVICE).to(torch.bfloat16), torch.rand((4, TOP_K), device=DEVICE)
    ids = random_ids(4, EXPERTS, TOP_K, device=DEVICE)
    again = Layer(config())
    fresh = ChordMoEMethod(config(), batched=False)
    with torch.device(DEVICE):
        fresh.create_weights(again, EXPERTS, HIDDEN, INTER, torch.bfloat16, weight_loader=default_weight_loader)
    for name, tensor in checkpoints[1].items():
        getattr(again, name).data.copy_(tensor)
    fresh.process_weights_after_loading(again)
    assert torch.equal(method.apply(layer, x, weights, ids), fresh.apply(again, x, weights, ids))


@pytest.mark.parametrize(
    ("given", "outcome"),
    [({"mode": "off"}, "switched off"), ({"mode": "never"}, "mode='never' is not known"), ({"speed": 2}, "it takes 'mode'")],
)
def test_the_engines_configuration(given: dict, outcome: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import vllm.config

    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: SimpleNamespace(additional_config={"chord_kernels": given}))
    plugin._said.clear()
    with caplog.at_level("INFO"):
        assert plugin.method_for(real_config(), FakeRoutedExperts(config()), "model.layers.1") is None
    assert outcome in caplog.text


class FakeRoutedExperts(Layer):
    """vLLM finds a scheme by the name of the layer's class."""


def real_config(**weights: Any) -> Any:
    return get_quantization_config("compressed-tensors").from_config(quantization_config(**weights))


def test_facts_are_read_from_vllms_own_config() -> None:
    facts = plugin._facts(real_config(), FakeRoutedExperts(config()), "model.layers.1.mlp.experts")
    assert facts is not None
    assert (facts.arch is None) == (DEVICE == "cpu")
    assert why_not_layer(replace(facts, arch=None)) == "no CUDA GPU"
    assert why_not_layer(replace(facts, arch="sm_90a")) is None


@pytest.mark.parametrize(
    ("weights", "changes", "reason"),
    [
        ({"group_size": 128}, {}, "group size is 128"),
        ({"num_bits": 8}, {}, "num bits is 8"),
        ({"symmetric": False}, {}, "symmetric is False"),
        ({}, {"has_bias": True}, "bias is True"),
        ({}, {"is_lora_enabled": True}, "lora is True"),
        ({}, {"moe_backend": "humming"}, "'humming' was asked for"),
        ({}, {"activation": MoEActivation.GELU}, "activation is 'gelu'"),
        ({}, {"swiglu_limit": 7.0}, "clamped is True"),
        ({}, {"in_dtype": torch.float16}, "dtype is 'float16'"),
        ({}, {"hidden_dim": 96}, "K = 96 is not a positive multiple of 64"),
    ],
)
def test_other_layers_are_left_to_vllm(weights: dict, changes: dict, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    facts = plugin._facts(real_config(**weights), FakeRoutedExperts(config(**changes)), "model.layers.1.mlp.experts")
    assert reason in str(why_not_layer(replace(facts, arch="sm_90a")))
    plugin._said.clear()
    with caplog.at_level("INFO"):
        assert plugin.method_for(real_config(**weights), FakeRoutedExperts(config(**changes)), "model.layers.1") is None
        assert plugin.method_for(real_config(**weights), FakeRoutedExperts(config(**changes)), "model.layers.2") is None
    assert caplog.text.count("left to vLLM") == 1


def test_weights_on_the_input_are_left_to_vllm() -> None:
    layer = FakeRoutedExperts(config())
    layer.apply_router_weight_on_input = True
    facts = plugin._facts(real_config(), layer, "model.layers.1.mlp.experts")
    assert "weight on input is True" in str(why_not_layer(replace(facts, arch="sm_90a")))


def test_a_surprise_falls_through(caplog: pytest.LogCaptureFixture) -> None:
    plugin._said.clear()
    with caplog.at_level("INFO"):
        assert plugin.method_for(object(), FakeRoutedExperts(config()), "model.layers.1") is None
    assert "left to vLLM: AttributeError" in caplog.text
