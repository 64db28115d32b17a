# SPDX-License-Identifier: Apache-2.0
"""Results of engine.py beside each other: speed, and predictions against those of the first file, vLLM's `emulation` backend."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def flat(rows: list[list[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def differences(truth: dict[str, Any], found: dict[str, Any]) -> dict[str, float | int]:
    """noise: the largest difference of a log-probability. Choices count where the truth's lead is above it."""
    apart = [abs(a - b) for a, b in zip(flat(truth["logprobs"]), flat(found["logprobs"]), strict=True)]
    noise = max(apart)
    places = list(zip(flat(truth["choices"]), flat(found["choices"]), flat(truth["leads"]), strict=True))
    greedy_wrong = 0
    for a, b, leads in zip(truth["greedy"], found["greedy"], truth["greedy_leads"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)  # behind it the texts differ
        greedy_wrong += first is not None and leads[first] > noise
    return {
        "mean": statistics.fmean(apart),
        "largest": noise,
        "clear": sum(lead > noise for *_, lead in places),
        "clear_wrong": sum(a != b and lead > noise for a, b, lead in places),
        "wrong": sum(a != b for a, b, _ in places),
        "greedy_clear_wrong": greedy_wrong,
    }


def main() -> None:
    truth, *others = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    greedy = truth["predictions"]["greedy"]
    print(f"{len(greedy)} prompts; {len(set(flat(greedy)))} different tokens among {len(flat(greedy))} greedy ones\n")
    print("| backend | log-probabilities differ by, mean, most | other choice | at a clear lead, of | greedy texts that leave at one |")
    print("|--|--|--|--|--|")
    for row in others:
        d = differences(truth["predictions"], row["predictions"])
        counts = f"{d['wrong']} | {d['clear_wrong']}, {d['clear']} | {d['greedy_clear_wrong']}"
        print(f"| {row['backend']} | {d['mean']:.4f}, {d['largest']:.4f} | {counts} |")
    timed = [row for row in others if "decode_ms" in row]
    batches = list(timed[0]["decode_ms"]) if timed else []
    print(f"\n| backend | decode ms a token, batch {', '.join(batches)} | prefill tokens/s | loading, s | GiB after, most while loading |")
    print("|--|--|--|--|--|")
    for row in timed:
        decode = ", ".join(f"{statistics.median(row['decode_ms'][b]):.3f}" for b in batches)
        memory = f"{row['weights_gib']:.2f}, {row['weights_peak_gib']:.2f}"
        print(f"| {row['backend']} | {decode} | {statistics.median(row['prefill_tokens_s']):,.0f} | {row['weights_s']} | {memory} |")


if __name__ == "__main__":
    main()
