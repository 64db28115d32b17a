# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by the compressed-tensors library, read back exactly; and everything that must be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import ROOT, quantization_config, write_checkpoint

import chord_kernels as chord
from chord_kernels.checkpoint import Checkpoint
from chord_kernels.errors import CheckpointError
from chord_kernels.formats import W4A16

EXPERTS, HIDDEN, INTER = 4, 256, 384


@pytest.fixture(scope="module")
def library_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library") / "checkpoint"
    sizes = ["--experts", str(EXPERTS), "--hidden", str(HIDDEN), "--inter", str(INTER), "--layers", "2", "--shards", "3"]
    script = ROOT / "examples" / "write_checkpoint.py"
    subprocess.run([sys.executable, str(script), str(folder), *sizes], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def library_values(library_checkpoint: Path) -> dict[str, torch.Tensor]:
    """Each projection as the library itself decompresses it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors: dict[str, torch.Tensor] = {}
    for file in library_checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    config = json.loads((library_checkpoint / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    values = {}
    for name in {key.rsplit(".", 1)[0] for key in tensors}:
        state = {part: tensors[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
        values[name] = compressor.decompress(state, scheme)["weight"]
    return values


def dequantized(weight: chord.PackedWeight, expert: int) -> torch.Tensor:
    return W4A16.dequantize(*weight.unpack_expert(expert), rounded=True, dtype=torch.bfloat16)


def test_values_are_the_librarys(library_checkpoint: Path, library_values: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint(library_checkpoint)
    assert checkpoint.layers == [0, 1]
    for layer, gate_up, down in checkpoint.load_all():
        assert gate_up.paired
        assert not down.paired
        for expert in range(EXPERTS):
            root = f"model.layers.{layer}.mlp.experts.{expert}."
            both = torch.cat([library_values[root + "gate_proj"], library_values[root + "up_proj"]])
            assert torch.equal(dequantized(gate_up, expert), both)
            assert torch.equal(dequantized(down, expert), library_values[root + "down_proj"])


@pytest.mark.parametrize("size", [2, 3, 6])
def test_tp_shards_are_slices_of_the_whole(library_checkpoint: Path, size: int) -> None:
    gate_up, down = chord.load_experts(library_checkpoint, 1)
    codes, scales = gate_up.unpack()
    down_codes, down_scales = down.unpack()
    part = INTER // size
    for rank in range(size):
        cut = slice(rank * part, (rank + 1) * part)
        mine, mine_down = chord.load_experts(library_checkpoint, 1, tp=(rank, size))
        got_codes, got_scales = mine.unpack()
        assert torch.equal(got_codes, torch.cat([codes[:, :INTER][:, cut], codes[:, INTER:][:, cut]], dim=1))
        assert torch.equal(got_scales, torch.cat([scales[:, :INTER][:, cut], scales[:, INTER:][:, cut]], dim=1))
        got_codes, got_scales = mine_down.unpack()
        assert torch.equal(got_codes, down_codes[:, :, cut])
        assert torch.equal(got_scales, down_scales[:, :, rank * part // 32 : (rank + 1) * part // 32])


def test_ep_shards_are_slices_of_the_whole(library_checkpoint: Path) -> None:
    whole = chord.load_experts(library_checkpoint, 0)
    for rank in range(2):
        part = chord.load_experts(library_checkpoint, 0, ep=(rank, 2))
        for mine, all_experts in zip(part, whole, strict=True):
            assert torch.equal(mine.data, all_experts.data[2 * rank : 2 * rank + 2])
    layer = chord.MoELayer.from_checkpoint(library_checkpoint, 0, ep=(1, 2), device="cpu")
    assert layer.expert_map.tolist() == [-1, -1, 0, 1]


def test_tp_that_cuts_a_tile_is_refused_before_any_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAZARDS 27."""
    write_checkpoint(tmp_path, layers=1, experts=1, inter=640)
    monkeypatch.setattr("chord_kernels.checkpoint.pack_expert_into", lambda *_: pytest.fail("packed before checking"))
    with pytest.raises(CheckpointError, match=r"intermediate size 640 over TP 3 .* multiple of 64 .* multiple of 192"):
        chord.load_experts(tmp_path, 1, tp=(0, 3))
    with pytest.raises(CheckpointError, match="1 experts do not divide over 2 EP ranks"):
        chord.load_experts(tmp_path, 1, ep=(0, 2))
    with pytest.raises(CheckpointError, match="rank 2 of 2"):
        chord.load_experts(tmp_path, 1, ep=(2, 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("symmetric", False),
        ("num_bits", 8),
        ("group_size", 128),
        ("strategy", "channel"),
        ("type", "float"),
        ("actorder", "group"),
        ("dynamic", True),
    ],
)
def test_config_fields_are_refused_by_name_and_value(tmp_path: Path, field: str, value: object) -> None:
    """HAZARDS 30, 35."""
    write_checkpoint(tmp_path, layers=1, experts=1, **{field: value})
    with pytest.raises(CheckpointError, match=rf"weights\.{field}.*{value}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("actorder", ["static", "weight", None])
def test_orders_that_keep_columns_are_accepted(tmp_path: Path, actorder: str | None) -> None:
    write_checkpoint(tmp_path, layers=1, experts=1, actorder=actorder)
    assert Checkpoint(tmp_path).layers == [1]


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"format": "int-quantized"}, "format 'int-quantized'"),
        ({"config_groups": {}}, "targets model.layers.1.mlp.experts.0.gate_proj"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    write_checkpoint(tmp_path, layers=1, experts=1)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_quantized_activations_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1, experts=1)
    groups = quantization_config()["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    edit_config(tmp_path, config_groups=groups)
    with pytest.raises(CheckpointError, match="input_activations"):
        Checkpoint(tmp_path)


def test_the_group_that_names_experts_wins(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1, experts=1, num_bits=8)
    groups = quantization_config(num_bits=8)["config_groups"]
    groups["experts"] = quantization_config()["config_groups"]["group_0"] | {"targets": ["re:.*mlp\\.experts.*"]}
    edit_config(tmp_path, config_groups=groups)
    assert Checkpoint(tmp_path).layers == [1]


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


NAME = "model.layers.1.mlp.experts.1.up_proj."


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("weight_shape", torch.tensor([128, 64]), r"says \[128, 64\].*\[128, 128\]"),
        ("weight_scale", torch.ones((128, 8), dtype=torch.bfloat16), r"weight_scale is BF16 \[128, 8\].*\[128, 4\]"),
        ("weight_packed", torch.zeros((128, 16), dtype=torch.int64), r"weight_packed is I64"),
        ("weight_packed", torch.zeros((64, 16), dtype=torch.int32), r"\[64, 16\]; wanted I32 \[128, 16\]"),
        ("weight_zero_point", torch.zeros((16, 4), dtype=torch.int32), "zero points"),
        ("weight_g_idx", torch.zeros(128, dtype=torch.int32), "column order"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, tensor: str, value: torch.Tensor, message: str) -> None:
    """HAZARDS 43."""
    tensors = write_checkpoint(tmp_path, layers=1)
    rewrite(tmp_path, tensors | {NAME + tensor: value})
    with pytest.raises(CheckpointError, match=message):
        chord.load_experts(tmp_path, 1)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, layers=1)
    without = {name: tensor for name, tensor in tensors.items() if name != NAME + "weight_scale"}
    rewrite(tmp_path, without)
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.1.mlp.experts.1.up_proj.weight_scale"):
        chord.load_experts(tmp_path, 1)
    rewrite(tmp_path, {name: tensor for name, tensor in tensors.items() if ".experts.2." not in name})
    with pytest.raises(CheckpointError, match="up to 3 but not expert 2"):
        chord.load_experts(tmp_path, 1)
    with pytest.raises(CheckpointError, match="no quantized experts in layer 7; layers with experts: 1"):
        chord.load_experts(tmp_path, 7)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        Checkpoint(tmp_path)


def test_weight_shape_may_be_absent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1, with_shape=False)
    gate_up, down = chord.load_experts(tmp_path, 1)
    assert (gate_up.n, gate_up.k, down.n, down.k) == (256, 128, 128, 128)


def test_an_index_that_names_absent_files_is_refused(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, layers=1)
    index = {"weight_map": dict.fromkeys(tensors, "gone.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks 1 of its files"):
        Checkpoint(tmp_path)
