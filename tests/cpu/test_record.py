# SPDX-License-Identifier: Apache-2.0
"""The committed GPU record must be of these sources, with tests that ran and none that failed."""

from __future__ import annotations

import json

from support import RECORD, sources_digest


def test_the_gpu_record_is_of_these_sources() -> None:
    record = json.loads(RECORD.read_text())
    assert record["sources"] == sources_digest(), "kernel, packing, plan or launch sources changed: run tests/gpu on a Hopper GPU"
    assert record["passed"] > 0
    assert record["failed"] == 0
    assert record["skipped"] <= 1, "only the test for two GPUs may be skipped"
    assert "H" in record["card"]
