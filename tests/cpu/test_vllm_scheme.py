# SPDX-License-Identifier: Apache-2.0
"""Which layers of vLLM Chord takes; the rules alone, without vLLM (tests/vllm_plugin has it inside the package)."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest

from chord_kernels import doctor, settings
from chord_kernels.errors import FormatError
from chord_kernels.integrations.scheme import LayerFacts, why_not_layer

KIMI = LayerFacts(
    format="pack-quantized",
    num_bits=4,
    type="int",
    symmetric=True,
    strategy="group",
    group_size=32,
    actorder=None,
    quantized_activations=False,
    dtype="bfloat16",
    activation="silu",
    clamped=False,
    bias=False,
    lora=False,
    expert_balancing=False,
    weight_on_input=False,
    backend="auto",
    batched=False,
    experts=384,
    hidden=7168,
    intermediate=256,
    arch="sm_90a",
)


def test_a_kimi_layer_is_taken() -> None:
    assert why_not_layer(KIMI) is None
    assert why_not_layer(replace(KIMI, batched=True, experts=48, intermediate=2048)) is None
    assert why_not_layer(replace(KIMI, actorder="static")) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "int-quantized"}, "format is 'int-quantized'; Chord computes 'pack-quantized'"),
        ({"group_size": 128}, "group size is 128; Chord computes 32"),
        ({"type": "float"}, "type is 'float'"),
        ({"strategy": "channel"}, "strategy is 'channel'"),
        ({"actorder": "group"}, "actorder is 'group', which shuffles columns"),
        ({"quantized_activations": True}, "quantized activations is True"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"clamped": True}, "clamped is True"),
        ({"lora": True}, "lora is True"),
        ({"expert_balancing": True}, "expert balancing is True"),
        ({"backend": "marlin"}, "'marlin' was asked for; CHORD_VLLM=force"),
        ({"arch": None}, "no CUDA GPU"),
        ({"arch": "sm_80"}, "architecture sm_80 has no kernel"),
        ({"arch": "sm_100a"}, "never run; CHORD_VLLM=force"),
        ({"hidden": 96}, "K = 96 is not a positive multiple of 64"),
        ({"intermediate": 100}, "N = 200 is not a positive multiple of 64"),
    ],
)
def test_why_a_layer_is_left(changes: dict, reason: str) -> None:
    assert reason in str(why_not_layer(replace(KIMI, **changes)))


def test_force_takes_named_backends_and_kernels_that_never_ran() -> None:
    assert why_not_layer(replace(KIMI, backend="humming"), force=True) is None
    assert why_not_layer(replace(KIMI, arch="sm_103a"), force=True) is None
    assert why_not_layer(replace(KIMI, group_size=64), force=True) is not None


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.vllm_mode() == "on"
    monkeypatch.setenv("CHORD_VLLM", "force")
    assert settings.vllm_mode() == "force"
    monkeypatch.setenv("CHORD_VLLM", "yes")
    with pytest.raises(FormatError, match="on, off, force"):
        settings.vllm_mode()


@pytest.mark.parametrize(
    ("version", "environment", "entry_points", "words"),
    [
        (None, {}, ("chord_kernels",), "not installed"),
        ("0.33.0", {}, ("chord_kernels",), "vLLM 0.33.0 (tested; mode on)"),
        ("0.34.1", {"CHORD_VLLM": "force"}, ("chord_kernels",), "not tested; tested: 0.26.x, 0.33.x; mode force"),
        ("0.33.0", {"CHORD_VLLM": "off"}, ("chord_kernels",), "CHORD_VLLM=off"),
        ("0.33.0", {"CHORD_VLLM": "maybe"}, ("chord_kernels",), "'maybe' is not known"),
        ("0.33.0", {"VLLM_PLUGINS": "lora, other"}, ("chord_kernels",), "VLLM_PLUGINS=lora,other leaves chord_kernels out"),
        ("0.33.0", {}, (), "pip install"),
    ],
)
def test_doctor_says_what_the_plugin_would_do(
    version: str | None, environment: dict[str, str], entry_points: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    for name in ("CHORD_VLLM", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(metadata, "entry_points", lambda group: SimpleNamespace(names=entry_points))
    assert words in doctor._plugin()
