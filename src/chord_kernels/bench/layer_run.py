# SPDX-License-Identifier: Apache-2.0
"""One whole MoE layer, checked against FP64 and timed: what `chord run` does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import decode, ops, reference
from ..checkpoint import Checkpoint
from ..errors import FormatError, UnsupportedError
from ..formats import W4A16
from ..layer import MoELayer
from . import timing
from .suites import READ_GBS, TENSOR_TFLOPS, TOP_K, random_weight
from .warp_decode import random_mxfp8

TOKENS = {"decode": (1, 8, 20, 64), "prefill": (512, 2048)}
CHECKED_TOKENS = 16
ERROR_LIMIT = 2.5e-3  # against FP64 of the layer's own definition: two BF16 roundings


@dataclass(frozen=True)
class LayerRow:
    """error: against FP64 of the definition that the layer documents for this batch; unrounded: with unrounded weights."""

    tokens: int
    numerics: str
    us: float
    error: float
    unrounded: float
    bytes_moved: float
    flops: float
    on_gpu: bool

    @property
    def floor_us(self) -> float:
        return max(self.bytes_moved / READ_GBS / 1e3, self.flops / TENSOR_TFLOPS / 1e6)

    def as_result(self, case: str) -> dict[str, Any]:
        """A whole-layer row of a result file: one layer, replayed from a graph after an L2 flush."""
        return {
            "case": f"layer {case}",
            "tokens": self.tokens,
            "us_per_layer": round(self.us, 2),
            "floor_us": round(self.floor_us, 2),
            "numerics": self.numerics,
            "error": self.error,
            "error_to_unrounded_weights": self.unrounded,
            "method": "cold",
            "layers_rotated": 1,
            "routing": "uniform",
        }


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "cpu"
    if name not in ("cuda", "cpu"):
        raise FormatError(f"device {name!r} is not known; give auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise FormatError("torch sees no CUDA GPU; use --device cpu")
    return name


def from_checkpoint(path: Path, layer: int | None, device: str) -> tuple[str, MoELayer, int]:
    checkpoint = Checkpoint(path)
    layer = checkpoint.layers[0] if layer is None else layer
    moe = MoELayer(*checkpoint.load(layer, device=device))
    top_k = min(int(checkpoint.config.get("num_experts_per_tok", TOP_K)), moe.gate_up.experts)
    return f"{path.name}, layer {layer}", moe, top_k


def from_shape(name: str, format_name: str, experts: int, hidden: int, inter: int, device: str) -> tuple[str, MoELayer, int]:
    make = random_weight if format_name == W4A16.name else random_mxfp8
    gate_up = make(experts, 2 * inter, hidden, paired=True, device=device)
    down = make(experts, hidden, inter, paired=False, device=device, seed=1)
    return name, MoELayer(gate_up, down), TOP_K


def run(moe: MoELayer, top_k: int, token_counts: Iterable[int]) -> Iterator[LayerRow]:
    """Uniform routing, fresh inputs; every row's output is checked before its time is given."""
    device = moe.gate_up.device
    if reason := _why_not_here(moe, top_k):
        raise UnsupportedError(reason)
    moe.warmup()
    for tokens in token_counts:
        generator = torch.Generator(device).manual_seed(tokens)
        x = torch.randn((tokens, moe.hidden), device=device, generator=generator).to(torch.bfloat16)
        scores = torch.randn((tokens, moe.gate_up.experts), device=device, generator=generator)
        values, ids = scores.topk(top_k, dim=1)
        weights = torch.softmax(values, dim=1)
        out = torch.full_like(x, float("nan"))
        numerics = moe.numerics(tokens, top_k)

        def call(x=x, ids=ids, weights=weights, out=out) -> Tensor:
            return moe(x, ids, weights, out=out)

        def check(x=x, ids=ids, weights=weights, out=out, numerics=numerics) -> float:
            return sampled_error(moe, x, ids, weights, out, numerics)

        if device.type == "cuda":
            measured = timing.cold(timing.captured(call), check, limit=ERROR_LIMIT, samples=20)
            us, error = measured.us, measured.error
        else:
            us, error = _on_cpu(call, check)
        unrounded = error if numerics == "exact" else sampled_error(moe, x, ids, weights, out, "exact")
        yield LayerRow(tokens, numerics, us, error, unrounded, *_work(moe, ids), device.type == "cuda")


def _why_not_here(moe: MoELayer, top_k: int) -> str | None:
    if moe.gate_up.format is not W4A16:
        return decode.why_not_here(moe.gate_up, moe.down, 1, top_k)
    return ops.why_not_here(moe.gate_up, "indexed", "swiglu") or ops.why_not_here(moe.down, "indexed")


def _on_cpu(call: Callable[[], Tensor], check: Callable[[], float]) -> tuple[float, float]:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6, timing.checked(check, ERROR_LIMIT)


def sampled_error(moe: MoELayer, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, dequant: str) -> float:
    """Relative error of some tokens, first to last, against FP64 of the layer's definition with its roundings to BF16."""
    picked = torch.linspace(0, x.shape[0] - 1, min(CHECKED_TOKENS, x.shape[0]), device=x.device).long().unique()
    truth = reference.layer(
        x[picked],
        moe.gate_up,
        moe.down,
        ids[picked],
        weights[picked],
        dequant=dequant,
        dtype=torch.float64,
        round_hidden=True,
        round_products=not moe.warp_decodes(*ids.shape),
    )
    return reference.relative_error(out[picked], truth)


def _work(moe: MoELayer, ids: Tensor) -> tuple[float, float]:
    """Bytes that a layer must move (each distinct expert once, x and out once) and floating-point operations."""
    distinct = int(ids.unique().numel())
    weights = sum(one.nbytes / one.experts for one in (moe.gate_up, moe.down)) * distinct
    flops = sum(2.0 * ids.numel() * one.n * one.k for one in (moe.gate_up, moe.down))
    return weights + 4.0 * ids.shape[0] * moe.hidden, flops


def table(title: str, rows: Iterable[LayerRow], *, format_name: str = W4A16.name) -> Any:
    from rich.table import Table

    shown = Table(title=f"{'INT4' if format_name == W4A16.name else format_name.upper()} MoE layer: {title}")
    shown.add_column("tokens", justify="right")
    shown.add_column("numerics")
    for column in ("us", "GB/s", "TFLOP/s", "x floor", "error", "with unrounded weights"):
        shown.add_column(column, justify="right")
    where = "CPU reference"
    for row in rows:
        where = "CUDA kernels, replayed from a graph after an L2 flush" if row.on_gpu else where
        shown.add_row(
            str(row.tokens),
            row.numerics,
            f"{row.us:.1f}",
            f"{row.bytes_moved / row.us / 1e3:.1f}",
            f"{row.flops / row.us / 1e6:.2f}",
            f"{row.us / row.floor_us:.2f}" if row.on_gpu else "-",
            f"{row.error:.2e}",
            f"{row.unrounded:.2e}",
        )
    shown.caption = (
        f"{where}. Alignment, gate/up, SwiGLU, down and weighted sum; floor of an H200's memory and tensor ceilings; "
        "errors relative to FP64 of these numerics, and of unrounded weights."
    )
    return shown
