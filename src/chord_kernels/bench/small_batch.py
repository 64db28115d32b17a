# SPDX-License-Identifier: Apache-2.0
"""Small batches: gate_up and down over several layers with weights and routing of their own, in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops, reference
from ..plan import SHIPPED_SHAPES
from ..rows import IndexedRows, align_indexed
from ..weights import PackedWeight
from . import humming, timing
from .suites import TOP_K, Case, random_topk_ids, random_weight, recorded_small_batch

TOKENS = {"kimi-k2-ep8": (1, 2, 4, 8, 16, 20, 32, 50, 64), "kimi-k2-tp8": (1, 2, 4, 8, 16, 32, 64, 128)}
LAYERS_ROTATED = 6


@dataclass
class _Layer:
    """One layer's tensors for one batch. middle: the SwiGLU output of gate_up, and down's input."""

    gate_up: PackedWeight
    down: PackedWeight
    ids: Tensor
    x: Tensor
    routing: IndexedRows
    by_row: IndexedRows
    raw: Tensor
    middle: Tensor
    out: Tensor

    @classmethod
    def make(cls, gate_up: PackedWeight, down: PackedWeight, tokens: int, index: int) -> _Layer:
        experts, hidden, inter = gate_up.experts, gate_up.k, down.k
        block_rows = ops.block_rows_on(gate_up.device, tokens * TOP_K / experts)
        ids = random_topk_ids(tokens, experts, seed=1000 * index + tokens)
        routing = align_indexed(ids, experts, block_rows)
        x = torch.randn((tokens, hidden), device="cuda", generator=torch.Generator("cuda").manual_seed(index))

        def poisoned(columns: int) -> Tensor:
            return torch.full((tokens * TOP_K, columns), float("nan"), dtype=torch.bfloat16, device="cuda")

        return cls(
            gate_up,
            down,
            ids,
            x.to(torch.bfloat16),
            routing,
            routing.by_id(),
            poisoned(2 * inter),
            poisoned(inter),
            poisoned(hidden),
        )

    def fused(self) -> None:
        ops.indexed(self.x, self.gate_up, self.routing, out=self.middle, epilogue="swiglu", dependent_launch=True)
        ops.indexed(self.middle, self.down, self.by_row, out=self.out, dependent_launch="weights_first")

    def plain(self) -> None:
        """The two products without the activation between them."""
        ops.indexed(self.x, self.gate_up, self.routing, out=self.raw, dependent_launch=True)
        ops.indexed(self.middle, self.down, self.by_row, out=self.out, dependent_launch="weights_first")

    def error(self, first: Tensor, activate: bool) -> float:
        """Largest relative error of sampled rows: of gate_up's output `first`, and of down's of the middle that is there."""
        errors = []
        for row in {0, self.out.shape[0] // 2, self.out.shape[0] - 1}:
            expert = int(self.ids.flatten()[row])
            product = _product(self.x[row // TOP_K], self.gate_up, expert)
            errors.append(reference.relative_error(first[row], reference.swiglu(product)[0] if activate else product[0]))
            errors.append(reference.relative_error(self.out[row], _product(self.middle[row], self.down, expert)[0]))
        return max(errors)


def _product(x: Tensor, weight: PackedWeight, expert: int) -> Tensor:
    return reference.expert_product(x.unsqueeze(0), *weight.unpack_expert(expert), dequant="exact", dtype=torch.float64)


def run(names: Iterable[str], *, peer: bool, samples: int, on_row: Callable[[dict[str, Any]], None]) -> None:
    """A row a batch: us a layer with the fused SwiGLU, of the two products alone, and of humming's two where `peer` asks for it."""
    for name in names:
        experts, hidden, inter = SHIPPED_SHAPES[name]
        shapes = ((2 * inter, hidden), (hidden, inter))
        weights = [
            tuple(random_weight(experts, n, k, paired=k == hidden, seed=seed + 100 * (k == inter)) for n, k in shapes)
            for seed in range(LAYERS_ROTATED)
        ]
        rivals = [[humming.HummingPeer(weight) for weight in pair] for pair in weights] if peer else []
        for tokens in TOKENS[name]:
            layers = [_Layer.make(gate_up, down, tokens, index) for index, (gate_up, down) in enumerate(weights)]
            last = layers[-1]
            fused = timing.graph([layer.fused for layer in layers], lambda last=last: last.error(last.middle, True), samples=samples)
            plain = timing.graph([layer.plain for layer in layers], lambda last=last: last.error(last.raw, False), samples=samples)
            case = "int4-kimi-" + name.rsplit("-", 1)[1]
            row = {
                "case": case,
                "tokens": tokens,
                "us_per_layer": round(fused.us, 2),
                "two_products_us": round(plain.us, 2),
                "spread": round(fused.spread, 4),
                "error": max(fused.error, plain.error),
                "layers_rotated": LAYERS_ROTATED,
                "routing": "uniform",
                **recorded_small_batch(case, tokens),
            }
            if peer:
                calls = [_humming_layer(pair, layer, tokens) for pair, layer in zip(rivals, layers, strict=True)]
                row["humming_us"] = round(timing.graph(calls, lambda: 0.0, samples=samples).us, 2)
            on_row(row)
        del weights, rivals


def _humming_layer(pair: list[humming.HummingPeer], layer: _Layer, tokens: int) -> Callable[[], None]:
    """humming's two products for a layer's routing."""
    gate_up, down = layer.gate_up, layer.down
    first = pair[0].prepare(Case("small", "gate_up", tokens, gate_up.experts, gate_up.n, gate_up.k, "indexed"), layer.x, layer.ids)
    second = pair[1].prepare(Case("small", "down", tokens, down.experts, down.n, down.k, "indexed"), layer.middle, layer.ids)

    def call() -> None:
        first()
        second()

    return call
