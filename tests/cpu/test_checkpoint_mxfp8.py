# SPDX-License-Identifier: Apache-2.0
"""MXFP8 checkpoints: as the compressed-tensors library compresses them, and in ModelOpt's layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import chord_kernels as chord
from chord_kernels.checkpoint import Checkpoint
from chord_kernels.errors import CheckpointError
from chord_kernels.formats import MXFP8

EXPERTS, HIDDEN, INTER = 3, 128, 192
SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp8-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME, "input_activations": {"num_bits": 8, "dynamic": True}}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


def write(folder: Path, quantization: dict | None, *, scale: str = "weight_scale") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for proj, (n, k) in {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}.items():
            elements, scales = chord.quantize_mxfp8(torch.randn((n, k), generator=torch.Generator().manual_seed(10 * expert + len(proj))))
            prefix = f"model.layers.0.mlp.experts.{expert}.{proj}_proj."
            tensors |= {prefix + "weight": elements.view(torch.float8_e4m3fn), prefix + scale: scales}
    save_file(tensors, folder / "model.safetensors")
    config = {"num_experts_per_tok": 2} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def check(folder: Path, tensors: dict[str, Tensor], scale: str = "weight_scale") -> None:
    gate_up, down = chord.load_experts(folder, 0)
    assert gate_up.format is down.format is MXFP8
    for expert in range(EXPERTS):
        root = f"model.layers.0.mlp.experts.{expert}."
        for weight, projections in ((gate_up, ("gate", "up")), (down, ("down",))):
            elements = torch.cat([tensors[f"{root}{proj}_proj.weight"].view(torch.uint8) for proj in projections])
            scales = torch.cat([tensors[f"{root}{proj}_proj.{scale}"] for proj in projections])
            got_elements, got_scales = weight.unpack_expert(expert)
            assert torch.equal(got_elements, elements)
            assert torch.equal(got_scales, scales)


@pytest.mark.parametrize("quantization", [COMPRESSED, MODELOPT])
def test_elements_and_scales_are_the_files(tmp_path: Path, quantization: dict) -> None:
    check(tmp_path, write(tmp_path, quantization))


def test_a_config_of_modelopt_beside_the_models(tmp_path: Path) -> None:
    tensors = write(tmp_path, None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "MXFP8"}}))
    check(tmp_path, tensors)


def test_scales_of_the_other_name(tmp_path: Path) -> None:
    check(tmp_path, write(tmp_path, {"quant_method": "mxfp8"}, scale="weight_scale_inv"), "weight_scale_inv")


def test_what_the_library_compresses_is_what_it_decompresses(tmp_path: Path) -> None:
    """The values of a packed weight are the library's own."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    compressor = BaseCompressor.get_value_from_registry("mxfp8-quantized")
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": SCHEME})
    tensors = write(tmp_path, COMPRESSED)
    gate_up, _ = chord.load_experts(tmp_path, 0)
    root = "model.layers.0.mlp.experts.1.gate_proj."
    state = {"weight": tensors[root + "weight"], "weight_scale": tensors[root + "weight_scale"]}
    expected = compressor.decompress(state, scheme)["weight"]
    assert torch.equal(MXFP8.dequantize(*gate_up.unpack_expert(1))[:INTER], expected.float())


def test_tensor_and_expert_parallel_shards(tmp_path: Path) -> None:
    write(tmp_path, MODELOPT)
    gate_up, down = (weight.unpack() for weight in chord.load_experts(tmp_path, 0))
    cut = slice(64, 128)
    mine, mine_down = (weight.unpack() for weight in chord.load_experts(tmp_path, 0, tp=(1, 3)))
    for part, whole in zip(mine, gate_up, strict=True):
        assert torch.equal(part, torch.cat([whole[:, :INTER][:, cut], whole[:, INTER:][:, cut]], dim=1))
    assert torch.equal(mine_down[0], down[0][:, :, cut])
    assert torch.equal(mine_down[1], down[1][:, :, 2:4])
    layer = chord.MoELayer.from_checkpoint(tmp_path, 0, ep=(2, 3), device="cpu")
    assert layer.gate_up.format is MXFP8
    assert layer.expert_map.tolist() == [-1, -1, 0]
    x = torch.randn((3, HIDDEN)).to(torch.bfloat16)
    assert layer(x, torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.rand((3, 2)))[0].abs().max() == 0


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        ({"quant_method": "fp8"}, "quant_method is 'fp8'"),
        (COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "weights": SCHEME | {"group_size": 128}}}}, "group_size is 128"),
        (COMPRESSED | {"format": "float-quantized"}, "format 'float-quantized'"),
        (None, "no quantization_config"),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, quantization: dict | None, message: str) -> None:
    write(tmp_path, quantization)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    tensors = write(tmp_path, MODELOPT)
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale"
    save_file(tensors | {name: torch.zeros((INTER, 2), dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale is U8 \[192, 2\]; wanted U8 or F8_E8M0 \[192, 4\]"):
        chord.load_experts(tmp_path, 0)
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros((3, 384, 128), dtype=torch.uint8)}
    save_file(stacked, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensors named"):
        Checkpoint(tmp_path)
