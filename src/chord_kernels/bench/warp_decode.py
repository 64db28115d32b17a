# SPDX-License-Identifier: Apache-2.0
"""Warp decode: a whole layer for a small batch, over several layers with routing and memory of their own, in one CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..decode import warp_decode
from ..decode_plan import WARP_DECODE_BATCHES
from ..formats import MXFP8
from ..rows import align_indexed
from ..weights import PackedWeight
from . import humming, timing
from .suites import READ_GBS, TOP_K, random_topk_ids, random_weight, recorded_small_batch

ROUTINGS = ("uniform", "zipf", "same")
SLOW_GRAPHS = 2  # of a process, the first ones: with one token of 30B a replay took 13 us longer, 4 %, for no known reason (docs/facts.md)
Peers = list[humming.HummingPeer]  # of gate_up and down


@dataclass(frozen=True)
class Model:
    """One model's MoE layer on one GPU. layers: enough to read all weights from memory in every replay, and for what a replay itself
    takes (4 to 5 us) not to count."""

    format: str
    experts: int
    hidden: int
    intermediate: int
    layers: int


MODELS = {
    "mxfp8-qwen3-30b": Model("mxfp8", 128, 2048, 768, 24),
    "mxfp8-qwen3-235b": Model("mxfp8", 128, 4096, 1536, 12),
    "int4-kimi-ep8": Model("w4a16", 48, 7168, 2048, 24),
    "int4-kimi-tp8": Model("w4a16", 384, 7168, 256, 24),
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


def random_layers(model: Model) -> list[tuple[PackedWeight, PackedWeight]]:
    """gate_up and down of every layer: the same random numbers, each in memory of its own."""
    make = random_mxfp8 if model.format == MXFP8.name else random_weight
    inter, hidden = model.intermediate, model.hidden
    gate_up = make(model.experts, 2 * inter, hidden, paired=True, seed=0)
    down = make(model.experts, hidden, inter, paired=False, seed=1)

    def again(weight: PackedWeight) -> PackedWeight:
        return replace(weight, data=weight.data.clone())

    return [(gate_up, down)] + [(again(gate_up), again(down)) for _ in range(model.layers - 1)]


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
    conventional_out: Tensor | None = None

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
        """Relative error of the first, middle and last token, to FP64 of the same numerics."""
        return reference.relative_error(self.out[self.sampled], self.truth(round_hidden=True, round_products=False))

    def accuracy(self) -> dict[str, float]:
        """Against FP64 without any rounding: relative error, cosine, the largest difference in BF16 ulps of the largest magnitude, and
        how many times further off the path is that quantizes activations to MXFP8."""
        value, truth = self.out[self.sampled].double(), self.truth()
        error = reference.relative_error(value, truth)
        ulp = torch.exp2(torch.floor(torch.log2(truth.abs().max())) - 7)
        quantized = self.truth(round_hidden=True, quantize_activations=True)
        return {
            "error_fp64": error,
            "one_minus_cosine": 1 - float(torch.nn.functional.cosine_similarity(value.flatten(), truth.flatten(), dim=0)),
            "largest_difference_ulps": float((value - truth).abs().max() / ulp),
            "quantized_activations_error_ratio": reference.relative_error(quantized.to(torch.bfloat16), truth) / error,
        }

    @property
    def sampled(self) -> list[int]:
        return sorted({0, self.x.shape[0] // 2, self.x.shape[0] - 1})

    def truth(self, **options: bool) -> Tensor:
        picked = self.sampled
        return reference.layer(
            self.x[picked], self.gate_up, self.down, self.ids[picked], self.weights[picked], dtype=torch.float64, **options
        )

    def conventional(self, peers: Peers) -> Callable[[], None]:
        """The layer by separate kernels: alignment (torch operations), humming's product, activation, humming's product, weighted sum."""
        tokens, inter, slots = self.x.shape[0], self.down.k, self.ids.numel()
        (first_rows, first), (second_rows, second) = (peer.indexed(slots) for peer in peers)
        raw, products = self.x.new_empty((slots, 2 * inter)), self.x.new_empty((slots, self.x.shape[1]))

        def call() -> None:
            routing = align_indexed(self.ids, self.down.experts, first_rows)
            first(self.x, routing, raw)
            hidden = torch.nn.functional.silu(raw[:, :inter]) * raw[:, inter:]
            if second_rows != first_rows:
                routing = align_indexed(self.ids, self.down.experts, second_rows)
            second(hidden, replace(routing, top_k=1), products)
            self.conventional_out = (products.view(tokens, TOP_K, -1) * self.weights.unsqueeze(-1)).sum(1).to(torch.bfloat16)

        return call

    def conventional_error(self) -> float:
        """Of the conventional path's output, as `accuracy` takes it: against FP64 without any rounding."""
        return reference.relative_error(self.conventional_out[self.sampled], self.truth())

    def two_products(self, peers: Peers) -> Callable[[], None]:
        """humming's two products alone, aligned ahead of time."""
        slots = self.ids.numel()
        calls = [peer.indexed(slots) for peer in peers]
        aligned = [align_indexed(self.ids, self.down.experts, rows) for rows, _ in calls]
        hidden = self.x.new_zeros((slots, self.down.k))
        outs = [self.x.new_empty((slots, weight.n)) for weight in (self.gate_up, self.down)]

        def call() -> None:
            calls[0][1](self.x, aligned[0], outs[0])
            calls[1][1](hidden, replace(aligned[1], top_k=1), outs[1])

        return call


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


def run(wanted: Iterable[tuple[str, str, int]], *, peer: bool, samples: int, on_row: Callable[[dict[str, Any]], None]) -> None:
    """A row a case: us a whole layer, the bytes that it has to read, and of uniform routing the accuracy; with `peer`, us and error of the
    conventional path, and us of humming's two products alone, in the same process, on the same weights and activations."""
    fresh = SLOW_GRAPHS
    for name, of_model in itertools.groupby(wanted, key=lambda case: case[0]):
        model = MODELS[name]
        weights = random_layers(model)
        peers = [[humming.HummingPeer(weight) for weight in pair] for pair in weights] if peer else []
        for _, routing, batch in of_model:
            layers = [Layer.make(pair, batch, routing, index) for index, pair in enumerate(weights)]
            for _ in range(1 + fresh):
                measured = timing.graph([layer.call for layer in layers], layers[-1].error, samples=samples)
            fresh = 0
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
                row |= layers[-1].accuracy()
            if peer:
                for field, make in (("conventional_us", Layer.conventional), ("humming_us", Layer.two_products)):
                    calls = [make(layer, pair) for layer, pair in zip(layers, peers, strict=True)]
                    row[field] = round(timing.graph(calls, lambda: 0.0, samples=samples).us, 2)
                row["conventional_error_fp64"] = layers[-1].conventional_error()
            on_row(row)
        del weights, peers
