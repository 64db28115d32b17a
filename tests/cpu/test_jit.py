# SPDX-License-Identifier: Apache-2.0
"""Compiling without a GPU: every shipped kernel, and a cache that survives what happens to files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import ROOT

from chord_kernels import settings
from chord_kernels.errors import CompileError, FormatError
from chord_kernels.jit import compiler
from chord_kernels.jit.source import reachable_headers, translation_unit
from chord_kernels.kernels import TilePlan
from chord_kernels.plan import ARCHITECTURES, shipped

SMALL = TilePlan(
    "sm_90a", "indexed", "store", "exact", block_rows=8, width_step=8, row_tiles=1, consumer_groups=4, k_tiles=1, stages=2, depth=2
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shipped_kernel_compiles_without_a_fault(arch: str) -> None:
    """No spills, no stack frame, no serialised wgmma."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        reports = list(pool.map(lambda plan: (plan.name, compiler.compile_uncached(plan)), shipped(arch)))
    assert {name: report.fault for name, (_, report) in reports if report.fault} == {}
    for name, (code, report) in reports:
        assert code[:4] == b"\x7fELF", name
        assert 0 < report.registers <= 168, name


@pytest.mark.parametrize(
    ("log", "fault"),
    [
        ("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...", "serialised"),
        ("0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads", "12 bytes of spills"),
        ("16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "16 bytes of stack"),
    ],
)
def test_faults_are_read_from_the_log(log: str, fault: str) -> None:
    assert fault in (compiler._report(log).fault or "")
    assert compiler._report("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 90 registers").fault is None


def test_the_source_is_one_include_one_config_one_entry() -> None:
    text = translation_unit(SMALL)
    assert text.count("#include") == 1
    assert text.count('extern "C" __global__') == 1
    assert "chord/arch/wgmma.cuh" in reachable_headers(text)


def test_the_key_follows_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from chord_kernels.jit import source

    key = compiler.cache_key(SMALL)
    assert compiler.cache_key(SMALL) == key
    assert compiler.cache_key(replace(SMALL, stages=3)) != key
    headers = dict(source._header_texts())
    headers["chord/arch/copy.cuh"] += "\n// changed"
    monkeypatch.setattr(source, "_header_texts", lambda: headers)
    assert compiler.cache_key(SMALL) != key
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "_compiler_identity", lambda: "another NVRTC")
    assert compiler.cache_key(SMALL) != key


def test_a_hit_does_not_compile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compiler.cubin(SMALL)
    assert compiler.is_cached(SMALL)
    monkeypatch.setattr(compiler, "compile_uncached", lambda _: pytest.fail("compiled again"))
    assert compiler.cubin(SMALL) == code


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])])
def test_a_damaged_entry_is_a_miss(cache: Path, damage) -> None:
    code = compiler.cubin(SMALL)
    (entry,) = cache.glob("*.cubin")
    entry.write_bytes(damage(entry.read_bytes()))
    assert not compiler.is_cached(SMALL)
    assert compiler.cubin(SMALL) == code
    assert compiler.is_cached(SMALL)


BUILD = f"""
import sys
sys.path.insert(0, {str(ROOT / "src")!r})
sys.path.insert(0, {str(ROOT / "tests" / "cpu")!r})
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_jit import SMALL
from chord_kernels.jit import compiler
print(len(compiler.cubin(SMALL)))
"""


def test_processes_that_race_all_get_the_kernel(cache: Path) -> None:
    code = compiler.compile_uncached(SMALL)[0]
    racers = [subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [racer.communicate(timeout=120)[0] for racer in racers]
    assert answers == [f"{len(code)}\n"] * 4
    assert len(list(cache.glob("*.cubin"))) == 1
    assert len(compiler.cache_entries()) == 1


def test_a_killed_build_leaves_no_entry(cache: Path) -> None:
    program = BUILD.replace("print(", "import os, pathlib\npathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9)\nprint(")
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not list(cache.glob("*.cubin"))
    assert len(compiler.cache_entries()) == 1  # the leftover, which `chord cache clear` removes
    assert len(compiler.cubin(SMALL)) > 0
    assert compiler.clear_cache() > 0
    assert compiler.cache_entries() == []


def test_build_all_in_a_fresh_process_imports_safely(cache: Path) -> None:
    """The first import of cuda.core fails when several threads do it at once."""
    program = BUILD.replace(
        "print(len(compiler.cubin(SMALL)))",
        """
from dataclasses import replace
plans = [replace(SMALL, stages=stages) for stages in range(2, 8)]
compiler.build_all(plans, workers=6)
assert all(map(compiler.is_cached, plans))
""",
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_build_all_reports_each_kernel(cache: Path) -> None:
    done: list[str] = []
    compiler.build_all([SMALL], done=lambda plan: done.append(plan.name))
    assert done == [SMALL.name]


def test_a_broken_kernel_shows_the_compilers_log(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAZARDS 33."""
    monkeypatch.setattr(compiler, "translation_unit", lambda _: "this is no CUDA")
    with pytest.raises(CompileError, match=r"does not compile with NVRTC(.|\n)*error"):
        compiler.compile_uncached(SMALL)


def test_a_missing_nvrtc_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAZARDS 33."""
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    with pytest.raises(CompileError, match=r"libnvrtc.so.13(.|\n)*pip install 'nvidia-cuda-nvrtc"):
        compiler.cubin(SMALL)


@pytest.mark.parametrize("home", ["/", "/proc/nowhere", None])
def test_an_unwritable_home_gives_a_private_folder_and_one_warning(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAZARDS 32."""
    settings._resolve_cache.cache_clear()
    for name in ("CHORD_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    with pytest.warns(UserWarning, match="set CHORD_CACHE_DIR"):
        folder = settings.cache_dir()
    assert folder.stat().st_mode & 0o077 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings.cache_dir() == folder
    settings._resolve_cache.cache_clear()


def test_pins_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_W4A16_STAGES", "3")
    assert settings.schedule_pins() == {"stages": 3}
    monkeypatch.setenv("CHORD_W4A16_BK", "wide")
    with pytest.raises(FormatError, match="CHORD_W4A16_BK='wide'"):
        settings.schedule_pins()


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture) -> None:
    from chord_kernels.progress import progress

    with progress("work", 2) as step:
        step()
        step()
    assert capsys.readouterr().err == ""
