# SPDX-License-Identifier: Apache-2.0
"""Print the tables of README and docs/performance.md from the committed result files.

usage: python tools/results_table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from chord_kernels.bench.suites import _peers  # noqa: E402

SECTIONS = ("decode", "masked", "prefill", "tp8", "contiguous")


def rows() -> list[dict]:
    return [row for path in sorted((ROOT / "benchmarks/results").glob("*.json")) for row in json.loads(path.read_text())["rows"]]


def gemm_table() -> None:
    print("| case | us | x floor | best recorded peer | peer / Chord |\n|--|--|--|--|--|")
    measured = {(row["section"], row["stage"], row["point"]): row for row in rows() if "section" in row}
    peers = {(row["section"], row["stage"], row["point"]): row for row in _peers()["cases"]}
    for section in SECTIONS:
        for point in sorted({key[2] for key in measured if key[0] == section}):
            if (section, "gate_up", point) not in peers:
                continue
            ours = [measured[section, stage, point] for stage in ("gate_up", "down")]
            theirs = [peers[section, stage, point] for stage in ("gate_up", "down")]
            us, floor = sum(row["us"] for row in ours), sum(row["floor_us"] for row in ours)
            sums = [
                (name, sum(row[f"{name}_us"] for row in theirs)) for name in ("humming", "chord") if all(r[f"{name}_us"] for r in theirs)
            ]
            name, best = min(sums, key=lambda item: item[1])
            title = {"humming": "humming", "chord": "published Chord"}[name]
            print(f"| {section} {point} | {us:.1f} | {us / floor:.2f} | {best:.0f} ({title}) | {best / us:.2f} |")


def small_table() -> None:
    print("\n| case | tokens | us a layer | x floor | humming | humming / Chord |\n|--|--|--|--|--|--|")
    for row in rows():
        if "case" in row and "humming_us" in row and "layer" not in row:
            us, peer = row["us_per_layer"], row["humming_us"]
            print(f"| {row['case']} | {row['tokens']} | {us:.1f} | {us / row['floor_us']:.2f} | {peer:.1f} | {peer / us:.2f} |")


def warp_decode_table() -> None:
    """Whole layers against humming's two products, alone and with what a layer needs around them, in the same process."""
    print("\n| case | tokens | us a layer | x floor | GB/s | two products of humming | / Chord | whole path with them | / Chord |")
    print("|--|--|--|--|--|--|--|--|--|")
    for row in rows():
        if row.get("layer") == "warp-decode" and row["routing"] == "uniform":
            us, peer, path = row["us_per_layer"], row["humming_us"], row["conventional_us"]
            against = f"{peer:.1f} | {peer / us:.2f} | {path:.1f} | {path / us:.2f}"
            print(f"| {row['case']} | {row['tokens']} | {us:.1f} | {us / row['floor_us']:.2f} | {row['gbs']} | {against} |")


def routing_table() -> None:
    """Warp decode where tokens share experts; docs/performance.md."""
    print("\n| case | tokens | routing | distinct experts | MB of them | MB of all slots | us a layer | x floor | whole path / Chord |")
    print("|--|--|--|--|--|--|--|--|--|")
    for row in rows():
        if row.get("layer") == "warp-decode" and row["routing"] != "uniform" and row["tokens"] in (8, 16, 32):
            us = row["us_per_layer"]
            read = f"{row['distinct_experts']} | {row['distinct_mb']} | {row['slots_mb']}"
            ratios = f"{us / row['floor_us']:.2f} | {row['conventional_us'] / us:.2f}"
            print(f"| {row['case']} | {row['tokens']} | {row['routing']} | {read} | {us:.1f} | {ratios} |")


def live_table() -> None:
    print("\n| case | Chord us | humming 0.1.20 us | humming / Chord |\n|--|--|--|--|")
    live = {(row["section"], row["stage"], row["point"]): row for row in rows() if "section" in row and "humming_us" in row}
    for section in ("decode", "prefill", "tp8", "masked", "contiguous"):
        for point in sorted({key[2] for key in live if key[0] == section}):
            pair = [live[section, stage, point] for stage in ("gate_up", "down")]
            us, peer = (sum(row[name] for row in pair) for name in ("us", "humming_us"))
            print(f"| {section} {point} | {us:.1f} | {peer:.1f} | {peer / us:.2f} |")


if __name__ == "__main__":
    gemm_table()
    small_table()
    live_table()
    warp_decode_table()
    routing_table()
