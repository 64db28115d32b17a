# SPDX-License-Identifier: Apache-2.0
"""Runs suites and writes what came out: result files, tables, a plot."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ..files import replacing
from . import humming, timing
from .suites import Case, make_inputs, recorded_peer_us, weights_for

Row = dict[str, Any]


def run_cases(cases: list[Case], *, peer: bool, samples: int, on_row: Callable[[Row], None]) -> None:
    """Time every case, cold, checked; with `peer`, humming in the same process on the same card."""
    for weight, members in weights_for(cases):
        rival = humming.HummingPeer(weight) if peer else None
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
    for column in ("us", "x floor", "GB/s", "TFLOP/s", "two products", "best recorded peer", "humming here", "error"):
        shown.add_column(column, justify="right")
    for row in rows:
        us = row.get("us", row.get("us_per_layer"))
        name = f"{row['section']} {row['stage']} {row['point']}" if "section" in row else f"{row['case']} {row['tokens']} tokens"
        if row.get("layer"):
            name = f"{row['layer']} {name}, {row['routing']}"
        floor, recorded, live = row.get("floor_us"), row.get("recorded_peer_us"), row.get("humming_us")
        shown.add_row(
            name,
            f"{us:.1f}",
            f"{us / floor:.2f}" if floor else "-",
            str(row.get("gbs", "-")),
            str(row.get("tflops", "-")),
            f"{row['two_products_us']:.1f}" if "two_products_us" in row else "-",
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
