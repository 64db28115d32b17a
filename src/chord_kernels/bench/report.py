# SPDX-License-Identifier: Apache-2.0
"""Runs suites and writes what came out: result files, tables, a plot."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..files import replacing
from ..plan import SHIPPED_SHAPES
from ..rows import IndexedRows, align_indexed
from ..weights import PackedWeight
from . import humming, timing
from .suites import (
    TOP_K,
    Case,
    make_inputs,
    random_topk_ids,
    random_weight,
    recorded_peer_us,
    recorded_small_batch,
    weights_for,
)

Row = dict[str, Any]
SMALL_BATCH_TOKENS = {"kimi-k2-ep8": (1, 2, 4, 8, 16, 20, 32, 50, 64), "kimi-k2-tp8": (1, 2, 4, 8, 16, 32, 64, 128)}
LAYERS_ROTATED = 6


def run_cases(cases: list[Case], *, peer: bool, samples: int, on_row: Callable[[Row], None]) -> None:
    """Time every case, cold, checked; with `peer`, humming in the same process on the same card."""
    for weight, members in weights_for(cases):
        rival = humming.HummingPeer(weight.experts, weight.n, weight.k) if peer else None
        for case in members:
            inputs = make_inputs(case, weight)
            measured = timing.cold(inputs.call, inputs.check, samples=samples)
            row: Row = {
                "section": case.section,
                "stage": case.stage,
                "point": case.point,
                "us": round(measured.us, 2),
                "spread": round(measured.spread, 4),
                "method": measured.method,
                "error": measured.error,
                "floor_us": round(case.floor_us, 2),
                "gbs": round(case.bytes_moved(inputs.distinct_experts) / measured.us / 1e3),
                "tflops": round(case.flops / measured.us / 1e6, 1),
                "recorded_peer_us": recorded_peer_us(case),
            }
            if rival:
                other = rival.prepare(case, inputs.x)
                row["humming_us"] = round(timing.cold(other, lambda: 0.0, samples=samples).us, 2)
            on_row(row)
        del weight, rival


def run_small_batches(names: Iterable[str], *, samples: int, on_row: Callable[[Row], None]) -> None:
    """gate_up with SwiGLU, then down, over several layers with weights and routing of their own in one CUDA graph."""
    for name in names:
        experts, hidden, inter = SHIPPED_SHAPES[name]
        layers = [
            (
                random_weight(experts, 2 * inter, hidden, paired=True, seed=seed),
                random_weight(experts, hidden, inter, paired=False, seed=100 + seed),
            )
            for seed in range(LAYERS_ROTATED)
        ]
        for tokens in SMALL_BATCH_TOKENS[name]:
            calls, check = _small_batch_layers(layers, tokens, hidden)
            measured = timing.graph(calls, check, samples=samples)
            case = "int4-kimi-" + name.rsplit("-", 1)[1]
            row = {
                "case": case,
                "tokens": tokens,
                "us_per_layer": round(measured.us, 2),
                "spread": round(measured.spread, 4),
                "error": measured.error,
                "layers_rotated": LAYERS_ROTATED,
                "routing": "uniform",
                **recorded_small_batch(case, tokens),
            }
            on_row(row)
        del layers


def _small_batch_layers(
    layers: list[tuple[PackedWeight, PackedWeight]], tokens: int, hidden: int
) -> tuple[list[Callable[[], object]], Callable[[], float]]:
    from .. import reference

    experts = layers[0][0].experts
    block_rows = ops.block_rows_on(layers[0][0].device, tokens * TOP_K / experts)
    calls: list[Callable[[], object]] = []
    states = []
    for index, (gate_up, down) in enumerate(layers):
        x = torch.randn((tokens, hidden), device="cuda", generator=torch.Generator("cuda").manual_seed(index)).to(torch.bfloat16)
        ids = random_topk_ids(tokens, experts, seed=1000 * index + tokens)
        routing = align_indexed(ids, experts, block_rows)
        by_row = IndexedRows(routing.sorted_ids, routing.expert_ids, routing.num_tokens_padded, 1, block_rows)
        middle = torch.full((tokens * TOP_K, down.k), float("nan"), dtype=torch.bfloat16, device="cuda")
        out = torch.full((tokens * TOP_K, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
        states.append((x, ids, middle, out))

        def call(x=x, gate_up=gate_up, routing=routing, middle=middle, down=down, by_row=by_row, out=out) -> None:
            ops.indexed(x, gate_up, routing, out=middle, epilogue="swiglu", dependent_launch=True)
            ops.indexed(middle, down, by_row, out=out, dependent_launch="weights_first")

        calls.append(call)

    def check() -> float:
        """Down's output of the last layer against FP64 of the SwiGLU output that the kernel wrote, and that against FP64."""
        x, ids, middle, out = states[-1]
        gate_up, down = layers[-1]
        errors = []
        for row in {0, (tokens * TOP_K) // 2, tokens * TOP_K - 1}:
            expert = int(ids.flatten()[row])
            first = reference.expert_product(
                x[row // TOP_K].unsqueeze(0), *gate_up.unpack_expert(expert), dequant="exact", dtype=torch.float64
            )
            errors.append(reference.relative_error(middle[row], reference.swiglu(first)[0]))
            second = reference.expert_product(middle[row].unsqueeze(0), *down.unpack_expert(expert), dequant="exact", dtype=torch.float64)
            errors.append(reference.relative_error(out[row], second[0]))
        return max(errors)

    return calls, check


# ---- what is written --------------------------------------------------------------------------------------------------------


def commit() -> str:
    """The commit of the sources, or 'unknown' outside a checkout."""
    folder = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "humming-kernels"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    from ..jit.compiler import nvrtc_version

    return found | {"nvrtc": nvrtc_version()}


def result_file(rows: list[Row], *, commit_id: str | None = None) -> dict[str, Any]:
    return {
        "card": timing.card(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "commit": commit_id or commit(),
        # A result is the same wherever it was written: names of files, not their folders.
        "command": "chord " + shlex.join(Path(word).name if word.startswith("/") else word for word in sys.argv[1:]),
        "rows": rows,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def table(rows: list[Row], title: str) -> Any:
    """A rich table: times as ratios to the floor and to peers."""
    from rich.table import Table

    shown = Table(title=title)
    shown.add_column("case")
    for column in ("us", "x floor", "GB/s", "TFLOP/s", "best recorded peer", "humming here", "error"):
        shown.add_column(column, justify="right")
    for row in rows:
        us = row.get("us", row.get("us_per_layer"))
        name = f"{row['section']} {row['stage']} {row['point']}" if "section" in row else f"{row['case']} {row['tokens']} tokens"
        floor, recorded, live = row.get("floor_us"), row.get("recorded_peer_us"), row.get("humming_us")
        shown.add_row(
            name,
            f"{us:.1f}",
            f"{us / floor:.2f}" if floor else "-",
            str(row.get("gbs", "-")),
            str(row.get("tflops", "-")),
            f"{recorded / us:.2f} x" if recorded else "-",
            f"{live / us:.2f} x" if live else "-",
            f"{row['error']:.2e}",
        )
    return shown


def plot(rows: list[Row], path: Path) -> None:
    """Ratio of gate_up + down to the floor, ours and the recorded best peer's, a panel a section. Needs the extra 'plot'."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if "section" in row:
            sections.setdefault(row["section"], {}).setdefault(row["point"], []).append(row)
    columns = 3
    lines = -(-len(sections) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(12, 2.7 * lines), squeeze=False)
    for axis, (name, points) in zip(axes.flat, sections.items(), strict=False):
        floors = [sum(row["floor_us"] for row in both) for both in points.values()]
        axis.plot(
            [sum(row["us"] for row in both) / floor for both, floor in zip(points.values(), floors, strict=True)], "o-", label="Chord"
        )
        if all(row["recorded_peer_us"] for both in points.values() for row in both):
            peers = [sum(row["recorded_peer_us"] for row in both) / floor for both, floor in zip(points.values(), floors, strict=True)]
            axis.plot(peers, "s--", color="gray", label="best recorded peer of each GEMM")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(title=name, ylabel="x floor", ylim=(0.9, None), xticks=list(range(len(points))))
        axis.set_xticklabels([str(point) for point in points], rotation=45 if len(points) > 6 else 0)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(sections) :]:
        axis.remove()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
