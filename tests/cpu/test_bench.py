# SPDX-License-Identifier: Apache-2.0
"""The harness: its cases, floors and refusals, and every committed result file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import ROOT

from chord_kernels.bench import humming, report, timing
from chord_kernels.bench.suites import Case, all_cases, make_inputs, random_weight, recorded_peer_us
from chord_kernels.bench.warp_decode import random_mxfp8
from chord_kernels.errors import CheckError
from chord_kernels.formats import W4A16

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PEERS = json.loads((ROOT / "src/chord_kernels/bench/peers-h200.json").read_text())
OURS = {(case.section, case.stage, case.point): case for case in all_cases()}


def test_every_recorded_peer_case_is_one_of_ours() -> None:
    for row in PEERS["cases"]:
        case = OURS[row["section"], row["stage"], row["point"]]
        assert (case.experts, case.n, case.k, case.routed_rows) == (row["experts"], row["N"], row["K"], row["routed_rows"])
        assert case.floor_us == pytest.approx(row["floor_us"], rel=0.01, abs=0.1)
        assert recorded_peer_us(case) == min(row[name] for name in ("humming_us", "chord_us") if row[name])


@pytest.mark.parametrize("contract", ["indexed", "contiguous", "masked"])
@pytest.mark.parametrize("stage", ["gate_up", "down"])
def test_inputs_compute_and_check_on_cpu(contract: str, stage: str) -> None:
    case = Case("tiny", stage, 128 if contract == "contiguous" else 9, 9, 128, 64, contract)
    weight = random_weight(9, 128, 64, paired=stage == "gate_up", device="cpu")
    for epilogue in ("store", "swiglu") if stage == "gate_up" else ("store",):
        inputs = make_inputs(case, weight, epilogue=epilogue)
        assert torch.isnan(inputs.out).all()
        inputs.call()
        assert inputs.check() < 2.5e-3
        inputs.out[:] = 1.0
        assert inputs.check() > 0.5


def test_an_unchecked_output_has_no_time() -> None:
    with pytest.raises(CheckError, match="Its time is not reported"):
        timing.checked(lambda: float("nan"), 1e-3)
    assert timing.checked(lambda: 1e-4, 1e-3) == 1e-4


def test_tables_and_plots_take_result_rows(tmp_path: Path) -> None:
    rows = [
        {
            "section": "decode",
            "stage": "down",
            "point": 20,
            "us": 100.0,
            "floor_us": 86.4,
            "gbs": 1,
            "tflops": 2.0,
            "recorded_peer_us": 111.0,
            "error": 1e-3,
        },
        {"case": "int4-kimi-ep8", "tokens": 1, "us_per_layer": 60.0, "error": 1e-3},
    ]
    assert report.table(rows, "card").row_count == 2
    report.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_results_exist() -> None:
    assert RESULTS, "benchmarks/results holds no figures"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_files_have_what_a_figure_needs(path: Path) -> None:
    result = json.loads(path.read_text())
    assert set(result) == {"card", "date", "versions", "commit", "command", "rows"}
    assert result["card"]["name"]
    assert result["commit"] != "unknown"
    assert result["rows"]
    for row in result["rows"]:
        assert 0 < row["error"] < 5e-3
        if "section" in row:
            assert (row["section"], row["stage"], row["point"]) in OURS
            assert row["method"] in ("cold", "graph")
            assert row["us"] > row["floor_us"] * 0.9
        else:
            assert row["us_per_layer"] > 0
            assert row["layers_rotated"] >= (1 if row.get("method") == "cold" else 6)
            assert row["routing"]


def test_every_case_of_the_peers_file_has_a_figure() -> None:
    measured = [row for path in RESULTS for row in json.loads(path.read_text())["rows"]]
    found = {(row["section"], row["stage"], row["point"]) for row in measured if "section" in row}
    assert {(row["section"], row["stage"], row["point"]) for row in PEERS["cases"]} <= found
    small = {(row["case"], row["tokens"]) for row in measured if "case" in row}
    assert {(row["case"], row["tokens"]) for row in PEERS["small_batch_graph"]["rows"] if row["case"].startswith("int4")} <= small


@pytest.mark.parametrize("make", [random_weight, random_mxfp8])
def test_the_peer_has_the_same_weights(monkeypatch: pytest.MonkeyPatch, make) -> None:
    """In the checkpoint's layout, which humming's own transform starts from."""

    class Layer(torch.nn.Module):
        def __init__(self, *, shape_n: int, shape_k: int, num_experts: int, weight_config: dict, **_: object) -> None:
            super().__init__()
            bits, scale = {"uint4": (4, torch.bfloat16), "float8e4m3": (8, torch.float8_e8m0fnu)}[weight_config["dtype"]]
            words = torch.zeros((num_experts, shape_n, shape_k * bits // 32), dtype=torch.int32)
            self.weight = torch.nn.Parameter(words, requires_grad=False)
            self.weight_scale = torch.nn.Parameter(torch.zeros((num_experts, shape_n, shape_k // 32)).to(scale), requires_grad=False)

        def cuda(self) -> Layer:
            return self

        def transform(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=Layer))
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    weight = make(3, 128, 256, paired=True, device="cpu")
    layer = humming.HummingPeer(weight)._layer
    values, scales = weight.unpack()
    words = layer.weight.data
    assert torch.equal(W4A16.codes_of_words(words) if weight.format is W4A16 else words.view(torch.uint8), values)
    assert torch.equal(layer.weight_scale.data.view(scales.dtype), scales)
