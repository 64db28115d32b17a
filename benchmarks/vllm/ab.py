# SPDX-License-Identifier: Apache-2.0
"""Chord beside vLLM's own backends: an engine each on one card, started together, measured one after the other; then the comparison.

The predictions of all are held against those of vLLM's `emulation` backend, which computes with dequantized BF16 weights, compiled as
the others are: what torch.compile fuses moves predictions too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
POLL_S = 0.5


def start(model: str, backend: str, out: Path, options: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(HERE / "engine.py"), model, backend, "--out", str(out / f"{backend}.json"), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=(out / f"{backend}.log").open("w"), stderr=subprocess.STDOUT, text=True)


def ready(engine: subprocess.Popen, mark: Path) -> bool:
    """Whether it became ready before it ended."""
    while not mark.exists() and engine.poll() is None:
        time.sleep(POLL_S)
    return mark.exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="folder for a JSON file and a log of each engine")
    parser.add_argument("--backends", default="chord,humming,marlin")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    backends = given.backends.split(",")
    common = ["--commit", given.commit]
    truth = start(given.model, "emulation", given.out, [*common, "--repeats", "0"])
    options = [*common, "--wait", "--repeats", str(given.repeats)]
    engines = {backend: start(given.model, backend, given.out, options) for backend in backends}
    truth.communicate()
    for backend, engine in engines.items():
        print(backend, "is ready" if ready(engine, given.out / f"{backend}.ready") else f"ended: see {backend}.log", flush=True)
    for backend, engine in engines.items():
        engine.communicate("go\n" if engine.poll() is None else None)
        print(backend, "measured" if engine.returncode == 0 else f"ended: see {backend}.log", flush=True)
    done = [backend for backend in backends if engines[backend].returncode == 0]
    files = [str(given.out / f"{backend}.json") for backend in ("emulation", *done)]
    subprocess.run([sys.executable, str(HERE / "compare.py"), *files, "--out", str(given.out / "comparison.json")], check=True)


if __name__ == "__main__":
    main()
