# SPDX-License-Identifier: Apache-2.0
"""Inputs that tests share. Everything runs on CPU and CUDA alike."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import chord_kernels as chord
from chord_kernels import ops, reference
from chord_kernels.formats import W4A16
from chord_kernels.rows import IndexedRows, MaskedRows, RowContract
from chord_kernels.weights import PackedWeight

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "chord_kernels"
RECORD = ROOT / "tests" / "gpu_record.json"
OPS = {"indexed": ops.indexed, "contiguous": ops.contiguous, "masked": ops.masked}
GUARD_ROWS = 3


def recorded_sources() -> list[Path]:
    """What decides a kernel's output: a change to any of these asks for a new GPU record."""
    names = (
        "formats.py",
        "weights.py",
        "rows.py",
        "kernels.py",
        "plain_kernels.py",
        "decode_plan.py",
        "plan.py",
        "ops.py",
        "decode.py",
        "align.py",
        "combine.py",
        "pack.py",
        "layer.py",
    )
    return sorted([*(SOURCES / name for name in names), *(SOURCES / "jit").glob("*.py"), *(SOURCES / "cuda").rglob("*.cuh")])


def sources_digest() -> str:
    digest = hashlib.sha256()
    for path in recorded_sources():
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def random_codes(experts: int, n: int, k: int, *, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand((experts, n, k // 32), device=device, generator=generator) * 0.02 + 0.005
    return codes, scales.to(torch.bfloat16)


def power_scales(experts: int, n: int, k: int, device: str = "cpu") -> Tensor:
    """BF16 powers of two, different for neighbouring experts, rows and groups."""
    e, row, group = torch.meshgrid(torch.arange(experts), torch.arange(n), torch.arange(k // 32), indexing="ij")
    return torch.exp2(((5 * e + 3 * row + 7 * group) % 17 - 8).float()).to(torch.bfloat16).to(device)


def random_weight(experts: int, n: int, k: int, *, paired: bool = False, device: str = "cpu", seed: int = 0) -> PackedWeight:
    return chord.pack_w4a16(*random_codes(experts, n, k, device=device, seed=seed), gate_up=paired)


def random_ids(tokens: int, experts: int, top_k: int, *, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn((tokens, experts), device=device, generator=generator).topk(top_k, dim=1).indices.to(torch.int32)


@dataclass
class Routed:
    """One contract's view of the same routed rows. `ids`: the flat id of each output row that is written, -1 elsewhere."""

    contract: str
    x: Tensor
    routing: RowContract
    ids: Tensor


def route(contract: str, x: Tensor, topk_ids: Tensor, experts: int, *, block_rows: int, max_m: int | None = None) -> Routed:
    """x [M, K] sent to topk_ids [M, top_k] under a contract; block_rows steers the schedule of every contract."""
    top_k = topk_ids.shape[1]
    if contract == "indexed":
        routing: RowContract = chord.align_indexed(topk_ids, experts, block_rows)
        flat = torch.arange(topk_ids.numel(), device=x.device)
        valid = (topk_ids.reshape(-1) >= 0) & (topk_ids.reshape(-1) < experts)
        return Routed(contract, x, routing, torch.where(valid, flat, -1))
    if contract == "contiguous":
        routing, ids = chord.align_contiguous(topk_ids, experts)
    else:
        most = int(torch.bincount(topk_ids.reshape(-1).long().clamp(min=0), minlength=1).max()) if topk_ids.numel() else 1
        routing, ids = chord.align_masked(topk_ids, experts, max_m or max(most, 1))
        routing = MaskedRows(routing.masked_m, block_rows)
    rows = x[(ids.clamp(min=0) // top_k).long()] if x.shape[0] else x.new_empty((ids.numel(), x.shape[1]))
    return Routed(contract, torch.where((ids >= 0)[:, None], rows, float("nan")).contiguous(), routing, ids.long())


@dataclass
class Guarded:
    """An output between guard rows, all poisoned with NaN."""

    whole: Tensor
    out: Tensor

    @classmethod
    def make(cls, rows: int, columns: int, device: str) -> Guarded:
        whole = torch.full((rows + 2 * GUARD_ROWS, columns), float("nan"), dtype=torch.bfloat16, device=device)
        return cls(whole, whole[GUARD_ROWS : GUARD_ROWS + rows])

    def assert_only_written(self, written: Tensor) -> None:
        """Exactly the rows in `written` (bool) hold numbers; every other byte still holds the poison."""
        numbers = ~torch.isnan(self.whole)
        expected = torch.zeros(self.whole.shape[0], dtype=torch.bool, device=self.whole.device)
        expected[GUARD_ROWS : GUARD_ROWS + self.out.shape[0]] = written
        assert torch.equal(numbers, expected[:, None].expand_as(numbers))


def out_rows(routed: Routed) -> int:
    return routed.x.shape[0] * routed.routing.top_k if isinstance(routed.routing, IndexedRows) else routed.x.shape[0]


def compute(routed: Routed, weight: PackedWeight, *, epilogue: str = "store", dequant: str = "auto") -> Tensor:
    """Run the op on a guarded, poisoned output and check that nothing but the routed rows was written."""
    columns = weight.n // 2 if epilogue == "swiglu" else weight.n
    guarded = Guarded.make(out_rows(routed), columns, str(routed.x.device))
    OPS[routed.contract](routed.x, weight, routed.routing, epilogue=epilogue, dequant=dequant, out=guarded.out)
    guarded.assert_only_written(routed.ids >= 0)
    return guarded.out


def truth(routed: Routed, weight: PackedWeight, *, epilogue: str = "store", dequant: str = "exact") -> Tensor:
    """FP64 of the same definition, NaN where nothing is written."""
    columns = weight.n // 2 if epilogue == "swiglu" else weight.n
    out = torch.full((out_rows(routed), columns), float("nan"), dtype=torch.float64, device=routed.x.device)
    return reference.grouped(routed.x, weight, routed.routing, out, epilogue=epilogue, dequant=dequant, dtype=torch.float64)


def error_on_written(value: Tensor, expected: Tensor) -> float:
    written = ~torch.isnan(expected)
    if not bool(written.any()):
        return 0.0
    return reference.relative_error(value[written], expected[written])


def by_id(routed: Routed, value: Tensor, ids: int) -> Tensor:
    """Output rows reordered by flat id, so that contracts can be compared."""
    result = torch.full((ids, value.shape[1]), float("nan"), dtype=value.dtype, device=value.device)
    written = routed.ids >= 0
    result[routed.ids[written]] = value[written]
    return result


def quantization_config(**weights: object) -> dict:
    """The quantization_config of a Kimi-style checkpoint; keyword arguments change its weight arguments."""
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**arguments, **weights}, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def write_checkpoint(
    folder: Path, *, layers: int = 2, experts: int = 4, hidden: int = 128, inter: int = 128, with_shape: bool = True, **weights: object
) -> dict[str, Tensor]:
    """A checkpoint folder written without the compressed-tensors library; returns every tensor by name."""
    tensors: dict[str, Tensor] = {}
    for layer in range(1, layers + 1):
        for expert in range(experts):
            for proj, (n, k) in {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}.items():
                codes, scales = random_codes(1, n, k, seed=100 * layer + 10 * expert + len(proj))
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj."
                tensors[prefix + "weight_packed"] = W4A16.words_of_codes(codes[0])
                tensors[prefix + "weight_scale"] = scales[0]
                if with_shape:
                    tensors[prefix + "weight_shape"] = torch.tensor([n, k])
    config = {"num_experts_per_tok": 2, "quantization_config": quantization_config(**weights)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
