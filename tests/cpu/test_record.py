# SPDX-License-Identifier: Apache-2.0
"""The committed GPU record must be of these sources, with tests that ran and none that failed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from support import RECORD, ROOT, sources_digest


def test_the_gpu_record_is_of_these_sources() -> None:
    record = json.loads(RECORD.read_text())
    assert record["sources"] == sources_digest(), "kernel, packing, plan or launch sources changed: run tests/gpu on a Hopper GPU"
    assert record["passed"] > 0
    assert record["failed"] == 0
    assert record["skipped"] <= 1, "only the test for two GPUs may be skipped"
    assert re.search(r"H\d+", record["card"])


def test_the_gpu_record_covers_every_gpu_test() -> None:
    """A partial run, or tests added since, cannot pass for the whole suite."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", "tests/gpu"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    record = json.loads(RECORD.read_text())
    assert record["passed"] + record["skipped"] == sum("::" in line for line in listed.splitlines())
