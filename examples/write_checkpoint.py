# SPDX-License-Identifier: Apache-2.0
"""Write a small INT4 MoE checkpoint with the compressed-tensors library: real format, random weights.

usage: python examples/write_checkpoint.py FOLDER [--experts 8 --hidden 512 --inter 256 --layers 2 --shards 2 --seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def expert_model(layers: int, experts: int, hidden: int, inter: int) -> torch.nn.Module:
    """Modules with the names that MoE checkpoints use: layers.N.mlp.experts.E.{gate,up,down}_proj."""

    def linear(n: int, k: int) -> torch.nn.Linear:
        return torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)

    def expert() -> torch.nn.Module:
        shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
        return torch.nn.ModuleDict({name: linear(*shape) for name, shape in shapes.items()})

    def layer() -> torch.nn.Module:
        return torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleList(expert() for _ in range(experts))})})

    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layer() for _ in range(layers))})})


def quantize(model: torch.nn.Module) -> dict:
    """Quantize and compress in place; returns the quantization_config of config.json."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    scheme = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    }
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="frozen")
    apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            groups = module.weight.detach().float().unflatten(1, (-1, 32))
            module.weight_scale.data.copy_(groups.abs().amax(-1) / 7.5)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    written = compressor.quantization_config.model_dump(mode="json")
    return {**written, "quant_method": "compressed-tensors"}


def write(folder: Path, *, layers: int, experts: int, hidden: int, inter: int, shards: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = expert_model(layers, experts, hidden, inter)
    quantization = quantize(model)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    names, index = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(mine, file)
    config = {
        "model_type": "chord_demo",
        "hidden_size": hidden,
        "moe_intermediate_size": inter,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(4, experts),
        "num_hidden_layers": layers,
        "quantization_config": quantization,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    print(f"wrote {folder}: {layers} layers x {experts} experts, hidden {hidden}, intermediate {inter}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, default in (("layers", 2), ("experts", 8), ("hidden", 512), ("inter", 256), ("shards", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    write(options.pop("folder"), **options)
