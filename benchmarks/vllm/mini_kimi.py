# SPDX-License-Identifier: Apache-2.0
"""Writes a small Kimi-K2-style checkpoint: DeepseekV3 architecture, compressed-tensors INT4 experts in groups of 32, random weights.

Experts weigh what one rank's do in the real model (48 of 7168 x 2048, top 8). What a layer adds to the residual stream is a tenth of it:
with as much as the stream, twelve random layers turn BF16 rounding, by experts that change, into other predictions. The head is three
times as wide as would keep the variance, so that next-token probabilities are neither flat nor one token's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HEADS, DENSE_INTERMEDIATE = 16, 2048
ADDED = 0.1
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 512, 512, 128, 64, 128


def config(hidden: int, intermediate: int, experts: int, layers: int, vocabulary: int) -> dict[str, object]:
    """layers: of experts; one dense layer comes first."""
    weights = {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int", "dynamic": False, "actorder": None}
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "moe_intermediate_size": intermediate, "intermediate_size": DENSE_INTERMEDIATE,
        "n_routed_experts": experts, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_hidden_layers": layers + 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": vocabulary, "hidden_act": "silu",
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "attention_bias": False, "attention_dropout": 0.0,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "bos_token_id": 0, "eos_token_id": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "use_cache": True,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        },
    }  # fmt: skip


SPECIAL = ("<s>", "</s>")


def tokenizer(vocabulary: int) -> dict[str, object]:
    """Words t2, t3, ... are tokens 2, 3, ..."""
    words = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), vocabulary))]
    model = {"type": "WordLevel", "unk_token": SPECIAL[0], "vocab": {word: i for i, word in enumerate(words)}}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model, **nothing}


class Writer:
    """Random tensors from one seed, a file a layer."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._random = torch.Generator(device).manual_seed(0)
        self._tensors: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}

    def dense(self, name: str, rows: int, columns: int, *, scale: float = 1.0) -> None:
        values = torch.randn((rows, columns), generator=self._random, device=self._device) * (scale * columns**-0.5)
        self._tensors[name + ".weight"] = values.to(torch.bfloat16).cpu()

    def ones(self, name: str, count: int) -> None:
        self._tensors[name + ".weight"] = torch.ones(count, dtype=torch.bfloat16)

    def zeros(self, name: str, count: int) -> None:
        self._tensors[name] = torch.zeros(count)

    def int4(self, name: str, rows: int, columns: int, *, scale: float = 1.0) -> None:
        # Codes from 1 on: values from -7 to 7 have no mean. With one, all tokens would be alike after a few layers.
        codes = torch.randint(1, 16, (rows, columns // 8, 8), generator=self._random, device=self._device, dtype=torch.int32)
        words = (codes << 4 * torch.arange(8, device=self._device, dtype=torch.int32)).sum(-1, dtype=torch.int32)
        scales = (torch.rand((rows, columns // 32), generator=self._random, device=self._device) + 0.5) * (scale * columns**-0.5 / 4.6)
        self._tensors |= {
            name + ".weight_packed": words.cpu(),
            name + ".weight_scale": scales.to(torch.bfloat16).cpu(),
            name + ".weight_shape": torch.tensor([rows, columns]),
        }

    def flush(self) -> None:
        file = f"model-{len(set(self._files.values())):05d}.safetensors"
        save_file(self._tensors, self._folder / file)
        self._files |= dict.fromkeys(self._tensors, file)
        self._tensors = {}

    def finish(self) -> None:
        (self._folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": self._files}))


def write(folder: Path, *, hidden: int, intermediate: int, experts: int, layers: int, vocabulary: int, device: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(hidden, intermediate, experts, layers, vocabulary), indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocabulary)))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "unk_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    out = Writer(folder, device)
    out.dense("model.embed_tokens", vocabulary, hidden, scale=hidden**0.5)
    out.dense("lm_head", vocabulary, hidden, scale=3.0)
    out.ones("model.norm", hidden)
    for layer in range(layers + 1):
        at = f"model.layers.{layer}."
        out.ones(at + "input_layernorm", hidden)
        out.ones(at + "post_attention_layernorm", hidden)
        out.dense(at + "self_attn.q_a_proj", Q_RANK, hidden)
        out.ones(at + "self_attn.q_a_layernorm", Q_RANK)
        out.dense(at + "self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
        out.dense(at + "self_attn.kv_a_proj_with_mqa", KV_RANK + ROPE, hidden)
        out.ones(at + "self_attn.kv_a_layernorm", KV_RANK)
        out.dense(at + "self_attn.kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK)
        out.dense(at + "self_attn.o_proj", hidden, HEADS * VALUE, scale=ADDED)
        mlp, width = (at + "mlp.", DENSE_INTERMEDIATE) if layer == 0 else (at + "mlp.shared_experts.", intermediate)
        out.dense(mlp + "gate_proj", width, hidden)
        out.dense(mlp + "up_proj", width, hidden)
        out.dense(mlp + "down_proj", hidden, width, scale=ADDED)
        if layer > 0:
            out.dense(at + "mlp.gate", experts, hidden)
            out.zeros(at + "mlp.gate.e_score_correction_bias", experts)
            for expert in range(experts):
                named = f"{at}mlp.experts.{expert}."
                out.int4(named + "gate_proj", intermediate, hidden)
                out.int4(named + "up_proj", intermediate, hidden)
                out.int4(named + "down_proj", hidden, intermediate, scale=ADDED)
        out.flush()
    out.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, value in (("hidden", 7168), ("intermediate", 2048), ("experts", 48), ("layers", 12), ("vocabulary", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    given = vars(parser.parse_args())
    write(given.pop("folder"), **given)


if __name__ == "__main__":
    main()
