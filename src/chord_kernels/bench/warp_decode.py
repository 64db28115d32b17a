# SPDX-License-Identifier: Apache-2.0
"""Warp decode: a whole layer for a small batch, over several layers with weights and routing of their own, in one CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..decode import warp_decode
from ..decode_plan import WARP_DECODE_BATCHES
from ..formats import MXFP8
from ..weights import PackedWeight
from . import timing
from .suites import READ_GBS, TOP_K, random_topk_ids, random_weight, recorded_small_batch

ROUTINGS = ("uniform", "zipf", "same")


@dataclass(frozen=True)
class Model:
    """One model's MoE layer on one GPU. layers: enough to read all weights from memory in every replay."""

    format: str
    experts: int
    hidden: int
    intermediate: int
    layers: int


MODELS = {
    "mxfp8-qwen3-30b": Model("mxfp8", 128, 2048, 768, 24),
    "mxfp8-qwen3-235b": Model("mxfp8", 128, 4096, 1536, 6),
    "int4-kimi-ep8": Model("w4a16", 48, 7168, 2048, 6),
    "int4-kimi-tp8": Model("w4a16", 384, 7168, 256, 6),
}


def random_mxfp8(experts: int, n: int, k: int, *, paired: bool, device: str = "cuda", seed: int = 0) -> PackedWeight:
    """Uniform element bits but for NaN, scales 2^-15 to 2^-11, packed expert by expert."""
    generator = torch.Generator(device).manual_seed(seed)
    data = torch.empty(MXFP8.packed_shape(experts, n, k), dtype=torch.uint8, device=device)
    for expert in range(experts):
        elements = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device, generator=generator)
        elements[(elements & 0x7F) == 0x7F] = 0
        scales = torch.randint(112, 117, (n, k // MXFP8.group), dtype=torch.uint8, device=device, generator=generator)
        MXFP8.pack_expert(data[expert], elements, scales, paired=paired)
    return PackedWeight(data, paired, MXFP8)


def _random(model: Model, seed: int) -> tuple[PackedWeight, PackedWeight]:
    make = random_mxfp8 if model.format == MXFP8.name else random_weight
    inter, hidden = model.intermediate, model.hidden
    return (
        make(model.experts, 2 * inter, hidden, paired=True, seed=2 * seed),
        make(model.experts, hidden, inter, paired=False, seed=2 * seed + 1),
    )


def routed(routing: str, tokens: int, experts: int, seed: int) -> Tensor:
    """Router ids int32 [tokens, TOP_K]: uniform; zipf (an expert's chance falls with its rank); the same for all tokens."""
    if routing == "uniform":
        return random_topk_ids(tokens, experts, seed=seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    if routing == "same":
        return torch.randperm(experts, device="cuda", generator=generator)[:TOP_K].to(torch.int32).repeat(tokens, 1)
    chances = 1.0 / torch.arange(1, experts + 1, device="cuda")
    return torch.multinomial(chances.expand(tokens, experts), TOP_K, generator=generator).to(torch.int32)


@dataclass
class Layer:
    """One layer's tensors for one batch."""

    gate_up: PackedWeight
    down: PackedWeight
    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor

    @classmethod
    def make(cls, weights: tuple[PackedWeight, PackedWeight], tokens: int, routing: str, index: int) -> Layer:
        generator = torch.Generator("cuda").manual_seed(index)
        x = torch.randn((tokens, weights[0].k), device="cuda", generator=generator).to(torch.bfloat16)
        chosen = torch.rand((tokens, TOP_K), device="cuda", generator=generator)
        ids = routed(routing, tokens, weights[0].experts, 1000 * index + tokens)
        return cls(*weights, x, ids, chosen / chosen.sum(1, keepdim=True), torch.full_like(x, float("nan")))

    def call(self) -> None:
        warp_decode(self.x, self.gate_up, self.down, self.ids, self.weights, out=self.out)

    def error(self) -> float:
        """The largest relative error of the first, middle and last token, to FP64 of the same numerics."""
        return max(reference.relative_error(self.out[t], self.truth(t)) for t in {0, self.x.shape[0] // 2, self.x.shape[0] - 1})

    def truth(self, token: int) -> Tensor:
        total = torch.zeros(self.x.shape[1], dtype=torch.float64, device=self.x.device)
        for expert, weight in zip(self.ids[token].tolist(), self.weights[token].double(), strict=True):
            hidden = reference.swiglu(reference.product(self.x[token][None], self.gate_up, expert, dtype=torch.float64)).to(torch.bfloat16)
            total += weight * reference.product(hidden, self.down, expert, dtype=torch.float64)[0]
        return total


def bytes_of(layers: list[Layer], *, distinct: bool) -> float:
    """Weight bytes a layer: each distinct expert once, or every (token, slot) anew."""
    experts = sum(layer.ids.unique().numel() if distinct else layer.ids.numel() for layer in layers) / len(layers)
    return experts * (layers[0].gate_up.nbytes + layers[0].down.nbytes) / layers[0].gate_up.experts


def cases(tokens: Iterable[str] | None = None) -> Iterator[tuple[str, str, int]]:
    """(model, routing, tokens) of every case, or of those with one of these numbers of tokens."""
    wanted = None if tokens is None else set(tokens)
    for name, routing, batch in itertools.product(MODELS, ROUTINGS, WARP_DECODE_BATCHES):
        if wanted is None or str(batch) in wanted:
            yield name, routing, batch


def run(wanted: Iterable[tuple[str, str, int]], *, samples: int, on_row: Callable[[dict[str, Any]], None]) -> None:
    """A row a case: us a whole layer, and the bytes that it has to read."""
    for name, of_model in itertools.groupby(wanted, key=lambda case: case[0]):
        model = MODELS[name]
        weights = [_random(model, seed) for seed in range(model.layers)]
        for _, routing, batch in of_model:
            layers = [Layer.make(pair, batch, routing, index) for index, pair in enumerate(weights)]
            measured = timing.graph([layer.call for layer in layers], layers[-1].error, samples=samples)
            read = bytes_of(layers, distinct=True)
            row = {
                "layer": "warp-decode",
                "case": name,
                "tokens": batch,
                "routing": routing,
                "us_per_layer": round(measured.us, 2),
                "spread": round(measured.spread, 4),
                "error": measured.error,
                "layers_rotated": model.layers,
                "distinct_experts": round(sum(layer.ids.unique().numel() for layer in layers) / len(layers), 1),
                "distinct_mb": round(read / 1e6, 1),
                "slots_mb": round(bytes_of(layers, distinct=False) / 1e6, 1),
                "floor_us": round(read / READ_GBS / 1e3, 2),
                "gbs": round(read / measured.us / 1e3),
            }
            if routing == "uniform":
                row |= {k: v for k, v in recorded_small_batch(name, batch).items() if k != "floor_us"}
            on_row(row)
        del weights
