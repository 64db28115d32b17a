# SPDX-License-Identifier: Apache-2.0
"""Results of engine.py beside each other: speed, and predictions against those of the first file, vLLM's `emulation` backend."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any


def flat(rows: list[list[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def apart(truth: dict[str, Any], found: dict[str, Any]) -> list[float]:
    return [abs(a - b) for a, b in zip(flat(truth["logprobs"]), flat(found["logprobs"]), strict=True)]


def peers_noise(truth: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """The largest difference of a log-probability that vLLM's own backends have: what is judged by it must not set it."""
    peers = [row for row in rows if row["backend"] != "chord"]
    if not peers:
        raise SystemExit("no backend but chord and the truth; the noise is taken from vLLM's own, such as humming or marlin")
    return max(max(apart(truth["predictions"], row["predictions"])) for row in peers)


def differences(truth: dict[str, Any], found: dict[str, Any], noise: float) -> dict[str, float | int]:
    """Choices count where the truth's lead is above the noise."""
    distances = apart(truth, found)
    places = list(zip(flat(truth["choices"]), flat(found["choices"]), flat(truth["leads"]), strict=True))
    left_at = []  # of every greedy text that is another, the truth's lead where it leaves; behind that place nothing is to be compared
    for a, b, leads in zip(truth["greedy"], found["greedy"], truth["greedy_leads"], strict=True):
        left_at += next(([lead] for x, y, lead in zip(a, b, leads, strict=True) if x != y), [])
    return {
        "mean": statistics.fmean(distances),
        "largest": max(distances),
        "noise": noise,
        "clear": sum(lead > noise for *_, lead in places),
        "clear_wrong": sum(a != b and lead > noise for a, b, lead in places),
        "wrong": sum(a != b for a, b, _ in places),
        "greedy_left": len(left_at),
        "greedy_left_at_most": max(left_at, default=0.0),
        "greedy_clear_wrong": sum(lead > noise for lead in left_at),
    }


def label(row: dict[str, Any]) -> str:
    return " ".join([row["backend"], *(f"{name}={value}" for name, value in row["options"].items())])


def print_predictions(truth: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    greedy = flat(truth["predictions"]["greedy"])
    print(f"noise of vLLM's own backends: {rows[0]['differences']['noise']:.4f}")
    print(f"{len(truth['predictions']['greedy'])} prompts; {len(set(greedy))} different tokens among {len(greedy)} greedy ones\n")
    texts = "other greedy texts, the largest lead where one leaves | at a clear lead |"
    print(f"| backend | log-probabilities differ by, mean, most | other choice | at a clear lead, of | {texts}\n|--|--|--|--|--|--|")
    for row in rows:
        d = row["differences"]
        texts = f"{d['greedy_left']}, {d['greedy_left_at_most']:.4f} | {d['greedy_clear_wrong']}"
        counts = f"{d['wrong']} | {d['clear_wrong']}, {d['clear']} | {texts}"
        print(f"| {label(row)} | {d['mean']:.4f}, {d['largest']:.4f} | {counts} |")


def print_speed(rows: list[dict[str, Any]]) -> None:
    batches = list(rows[0]["decode_ms"])
    memory_of = ("weights_gib", "weights_peak_gib", "weights_held_gib")
    titles = ["backend", f"decode ms a token, batch {', '.join(batches)}", "prefill tokens/s", "loading, s"]
    print("\n|", " | ".join([*titles, "GiB after, most while loading, of the card then"]), "|")
    print("|--|--|--|--|--|")
    for row in rows:
        decode = ", ".join(f"{statistics.median(row['decode_ms'][b]):.3f}" for b in batches)
        memory = ", ".join(f"{row[name]:.2f}" for name in memory_of)
        print(f"| {label(row)} | {decode} | {statistics.median(row['prefill_tokens_s']):,.0f} | {row['weights_s']} | {memory} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("truth", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="write all but the predictions themselves")
    given = parser.parse_args()
    truth, *rows = (json.loads(file.read_text()) for file in (given.truth, *given.others))
    noise = peers_noise(truth, rows)
    for row in rows:
        row["differences"] = differences(truth["predictions"], row["predictions"], noise)
    print_predictions(truth, rows)
    if timed := [row for row in rows if "decode_ms" in row]:
        print_speed(timed)
    if given.out:
        shared = {name: truth[name] for name in ("card", "date", "versions", "commit")}
        for row in rows:
            row["compared_with"] = truth["backend"]
            for name in (*shared, "predictions"):
                del row[name]
        given.out.write_text(json.dumps(shared | {"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
