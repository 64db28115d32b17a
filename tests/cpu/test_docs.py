# SPDX-License-Identifier: Apache-2.0
"""Documents say what is true: examples run, links and figures exist."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest
from support import ROOT, SOURCES

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULES = ("weights", "ops", "layer")
RESULT_ROWS = [row for path in sorted((ROOT / "benchmarks/results").glob("*.json")) for row in json.loads(path.read_text())["rows"]]


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
