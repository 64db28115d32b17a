# SPDX-License-Identifier: Apache-2.0
"""Documents say what is true: examples run, links and figures exist."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import statistics
from pathlib import Path

import pytest
from support import ROOT, SOURCES

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULES = ("weights", "ops", "decode", "layer")
RESULTS = ROOT / "benchmarks" / "results"
RESULT_ROWS = [row for path in sorted(RESULTS.glob("*.json")) for row in json.loads(path.read_text())["rows"]]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(f"chord_kernels.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_run(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(block, str(path), "exec"), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_at_files(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_documents_name_sources_that_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:[\w]+/)+[\w]+\.(?:py|cuh))`", path.read_text()):
            candidates = (ROOT / name, SOURCES / name, SOURCES / "cuda" / name, SOURCES / "cuda" / "chord" / name)
            assert any(candidate.exists() for candidate in candidates), f"{path.name}: {name}"


def test_the_readme_table_is_the_result_files() -> None:
    """Rows `| decode 20 | 330.1 | ... |`: the sum of gate_up and down of the committed figures."""
    rows = re.findall(r"^\| (decode|masked|prefill|tp8|contiguous) (\d+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows
    for section, point, us in rows:
        parts = {row["stage"]: row["us"] for row in RESULT_ROWS if row.get("section") == section and row["point"] == int(point)}
        assert float(us) == pytest.approx(parts["gate_up"] + parts["down"], abs=0.6)


def test_the_readmes_small_batches_are_the_result_files() -> None:
    """Both sides of one process."""
    pattern = r"^\| (int4-[\w-]+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(pattern, (ROOT / "README.md").read_text(), re.MULTILINE)
    measured = {(row["case"], row["tokens"]): row for row in RESULT_ROWS if "case" in row and "humming_us" in row and "layer" not in row}
    assert rows
    for case, tokens, us, humming, ratio in rows:
        row = measured[case, int(tokens)]
        assert float(us) == pytest.approx(row["us_per_layer"], abs=0.06)
        assert float(humming) == pytest.approx(row["humming_us"], abs=0.06)
        assert float(ratio) == pytest.approx(row["humming_us"] / row["us_per_layer"], abs=0.006)


def test_the_warp_decode_table_is_the_result_files() -> None:
    rows = re.findall(
        r"^\| ((?:int4|mxfp8)-[\w-]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    uniform = [row for row in RESULT_ROWS if row.get("layer") == "warp-decode" and row["routing"] == "uniform"]
    measured = {(row["case"], row["tokens"]): row for row in uniform}
    assert len(rows) == len(measured)
    for case, tokens, us, ratio, gbs, products, path in rows:
        row = measured[case, int(tokens)]
        assert float(us) == pytest.approx(row["us_per_layer"], abs=0.06)
        assert float(ratio) == pytest.approx(row["us_per_layer"] / row["floor_us"], abs=0.006)
        assert int(gbs) == row["gbs"]
        assert float(products) == pytest.approx(row["humming_us"], abs=0.06)
        assert float(path) == pytest.approx(row["conventional_us"], abs=0.06)


def test_the_table_of_routings_is_the_result_file() -> None:
    pattern = r"^\| ([\w-]+) \| (\d+) \| (zipf|same) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|$"
    shown = re.findall(pattern, (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE)
    measured = {(row["case"], row["tokens"], row["routing"]): row for row in RESULT_ROWS if row.get("layer") == "warp-decode"}
    assert len(shown) == 24
    for case, tokens, routing, experts, us, path in shown:
        row = measured[case, int(tokens), routing]
        assert float(experts) == row["distinct_experts"]
        assert float(us) == pytest.approx(row["us_per_layer"], abs=0.06)
        assert float(path) == pytest.approx(row["conventional_us"] / row["us_per_layer"], abs=0.006)


def test_the_live_comparison_is_the_result_files() -> None:
    """docs/performance.md: rows `| decode 1 | ours | humming | ratio |`, both sums of one process."""
    text = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| (\w+) (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert rows
    for section, point, us, humming, ratio in rows:
        pair = [row for row in RESULT_ROWS if "humming_us" in row and (row.get("section"), row.get("point")) == (section, int(point))]
        assert {row["stage"] for row in pair} == {"gate_up", "down"}
        ours, theirs = (sum(row[name] for row in pair) for name in ("us", "humming_us"))
        assert float(us) == pytest.approx(ours, abs=0.06)
        assert float(humming) == pytest.approx(theirs, abs=0.06)
        assert float(ratio) == pytest.approx(theirs / ours, abs=0.006)


def test_the_layer_table_is_what_chord_run_printed() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    printed = (RESULTS / "2026-11-30-h200-chord-run.txt").read_text()
    rows = re.findall(r"^\| kimi-k2-\w+ \| (\d+) \| (exact|bf16) \| (\d+) \|", text, re.MULTILINE)
    measured = {(int(t), n, round(float(us))) for t, n, us in re.findall(r"│\s+(\d+) │ (exact|bf16)\s+│\s+([\d.]+) │", printed)}
    assert rows
    for tokens, numerics, us in rows:
        assert (int(tokens), numerics, int(us)) in measured


def test_the_engines_table_is_the_result_file() -> None:
    """docs/vllm.md: medians of the engines that were measured side by side."""
    rows = re.findall(
        r"^\| (chord|humming|marlin) \| ([\d.]+ \| .*) \| ([\d,]+) \|$", (ROOT / "docs" / "vllm.md").read_text(), re.MULTILINE
    )
    measured = {row["backend"]: row for row in json.loads((RESULTS / "vllm" / "2026-11-30-h200.json").read_text())["rows"]}
    assert {backend for backend, *_ in rows} == set(measured)
    for backend, decode, prefill in rows:
        row = measured[backend]
        for shown, times in zip(decode.split(" | "), row["decode_ms"].values(), strict=True):
            assert float(shown) == pytest.approx(statistics.median(times), abs=0.006)
        assert int(prefill.replace(",", "")) == statistics.median(row["prefill_tokens_s"])
