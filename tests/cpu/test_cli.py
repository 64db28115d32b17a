# SPDX-License-Identifier: Apache-2.0
"""The `chord` command as a person uses it, on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, write_checkpoint
from typer.testing import CliRunner

from chord_kernels.cli import app

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


def chord(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def failing(*arguments: str) -> str:
    """Standard error of a command that must fail with status 1 and no traceback."""
    result = subprocess.run([sys.executable, "-m", "chord_kernels.cli", *arguments], capture_output=True, text=True, cwd=ROOT / "src")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def test_doctor_names_versions_and_reasons() -> None:
    output = chord("doctor")
    for word in ("torch", "NVRTC", "kernel cache", "indexed", "contiguous", "masked"):
        assert word in output


@ON_CPU
def test_run_checks_a_checkpoint_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1)
    output = chord("run", str(tmp_path), "--tokens", "3")
    assert "CPU reference" in output
    assert "e-03" in output


def test_plan_explains() -> None:
    for arguments in (("--tokens", "16"), ("--tokens", "16", "--contract", "indexed"), ("--tokens", "200")):
        output = chord("plan", "--shape", "kimi-k2-ep8", *arguments)
        assert "gate_up" in output
        assert "rows an expert" in output
        assert ("warp decode" in output) == (arguments == ("--tokens", "16"))
    assert "CTAs take them in turn" in chord("plan", "--shape", "qwen3-30b", "--tokens", "1")
    assert "draws its next" in chord("plan", "--shape", "qwen3-30b", "--tokens", "64")


def test_plan_as_json_has_every_field() -> None:
    import json

    plans = [json.loads(line) for line in chord("plan", "--json", "--tokens", "3").splitlines()]
    assert [(plan["product"], plan["batch"]) for plan in plans] == [("gate_up", 4), ("down", 4)]
    plans = [json.loads(line) for line in chord("plan", "--json", "--contract", "indexed").splitlines()]
    assert [plan["stage"] for plan in plans] == ["gate_up", "down"]
    assert all(plan["smem_bytes"] <= 232_448 and plan["block_rows"] == 8 for plan in plans)


def test_compile_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("chord_kernels.plan.BLOCK_ROWS", (8,))
    monkeypatch.setattr("chord_kernels.decode_plan.WARP_DECODE_BATCHES", (2,))
    assert "22 kernels for sm_90a are in the cache" in chord("compile", "--shape", "kimi-k2-tp8")
    assert "22 files" in chord("cache", "show")
    assert "freed" in chord("cache", "clear")
    assert "0 files" in chord("cache", "show")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "either a checkpoint folder or --shape"),
        (("run", "/nowhere"), "config.json is missing"),
        (("run", "--shape", "gpt-5"), "shape 'gpt-5' is not known; give one of kimi-k2-ep8"),
        (("run", "--shape", "kimi-k2-ep8", "--phase", "training"), "phase 'training' is not known"),
        (("run", "--shape", "kimi-k2-ep8", "--device", "tpu"), "device 'tpu' is not known"),
        (("plan", "--arch", "sm_80"), "architecture sm_80 has no kernel"),
        (("plan", "--arch", "sm_80", "--contract", "masked"), "architecture sm_80 has no kernel"),
        (("plan", "--shape", "qwen3-30b", "--contract", "masked"), "only warp decode computes"),
        (("compile", "--arch", "sm_75"), "architecture 'sm_75' has no kernels"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    error = failing(*arguments)
    assert message in error
    assert len(error.strip().splitlines()) == 1


@ON_CPU
def test_bench_without_a_gpu_says_so() -> None:
    assert "need a CUDA GPU" in failing("bench")
