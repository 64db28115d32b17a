# SPDX-License-Identifier: Apache-2.0
"""GPU tests: skipped without a Hopper GPU; a whole run with one writes tests/gpu_record.json."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import RECORD, sources_digest

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
_outcomes: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not HOPPER:
        for item in items:
            if "/gpu/" in item.nodeid or item.nodeid.startswith("gpu/"):
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU; the committed GPU record covers these sources"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
        _outcomes[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    options = session.config.option
    selected = options.keyword or options.markexpr or getattr(options, "deselect", None) or getattr(options, "lf", False)
    whole = [Path(argument).resolve() for argument in session.config.args] == [Path(__file__).parent]
    is_worker = hasattr(session.config, "workerinput")
    if not HOPPER or is_worker or selected or not whole:
        return
    from chord_kernels.bench.report import versions

    record = {
        "sources": sources_digest(),
        "card": torch.cuda.get_device_properties(0).name,
        "gpus": torch.cuda.device_count(),
        "versions": versions(),
        "passed": _outcomes["passed"],
        "failed": _outcomes["failed"],
        "skipped": _outcomes["skipped"],
        "date": datetime.date.today().isoformat(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture(autouse=True)
def _synchronize_after():
    """A fault belongs to the test that caused it."""
    yield
    if HOPPER:
        torch.cuda.synchronize()
