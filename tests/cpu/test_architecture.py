# SPDX-License-Identifier: Apache-2.0
"""The layer diagrams of the sources, held by tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, SOURCES

CUDA = SOURCES / "cuda" / "chord"
CUDA_LAYERS = ("arch", "tile", "schedule", "epilogue", "kernel")
# Lower layers first; a module imports only from layers before its own, or from its own.
PYTHON_LAYERS = (
    ("errors", "settings", "files", "progress"),
    ("formats", "kernels", "plain_kernels"),
    ("checkpoint_formats",),
    ("decode_plan",),
    ("plan",),
    ("weights", "rows", "jit.source", "jit.counters"),
    ("checkpoint", "reference", "jit.compiler"),
    ("jit.launch",),
    ("ops",),
    ("decode", "align", "combine", "pack"),
    ("layer", "operator"),
    ("integrations",),
    ("bench.timing", "bench.suites"),
    ("bench.humming",),
    ("bench.report", "bench.small_batch", "bench.warp_decode", "bench.layer_run", "doctor"),
    ("cli",),
)
PYTHON = sorted(SOURCES.rglob("*.py"))


def tracked() -> list[Path]:
    suffixes = (".py", ".cuh")
    return [
        path
        for folder in ("src", "tests", "tools", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    ]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> int:
    for index, members in enumerate(PYTHON_LAYERS):
        if any(module == member or module.startswith(member + ".") for member in members):
            return index
    raise AssertionError(f"{module} has no place in the layer diagram")


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports, at any depth."""
    package = module_name(path).split(".")[:-1] if path.name != "__init__.py" else module_name(path).split(".")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1]
        target = base + (node.module.split(".") if node.module else [])
        for name in node.names:
            whole = [*target, name.name]
            file = SOURCES.joinpath(*whole)
            found.add(".".join(whole if file.with_suffix(".py").exists() or file.is_dir() else target))
    return found - {""}


@pytest.mark.parametrize("path", [p for p in PYTHON if p.name != "__init__.py"], ids=module_name)
def test_python_imports_point_down(path: Path) -> None:
    own = layer_of(module_name(path))
    for module in imported(path):
        assert layer_of(module) <= own, f"{module_name(path)} imports {module}"


def test_cuda_includes_point_left() -> None:
    for path in CUDA.rglob("*.cuh"):
        own = CUDA_LAYERS.index(path.parent.name)
        for name in re.findall(r'#include "chord/(\w+)/', path.read_text()):
            assert CUDA_LAYERS.index(name) <= own, f"{path.name} includes from {name}/"
        assert "#include <" not in path.read_text(), f"{path.name}: NVRTC alone compiles the kernels"


def test_assembly_lives_in_arch() -> None:
    for path in CUDA.rglob("*.cuh"):
        if path.parent.name != "arch":
            assert not re.search(r"\basm\b", path.read_text()), path


def test_no_macros() -> None:
    for path in CUDA.rglob("*.cuh"):
        assert "#define" not in path.read_text(), path


def test_only_settings_reads_the_environment() -> None:
    for path in PYTHON:
        if module_name(path) != "settings":
            assert not re.search(r"os\.environ|getenv", path.read_text()), path


def test_only_the_integration_imports_its_engine() -> None:
    for path in PYTHON:
        if "integrations" not in path.parts:
            assert not re.search(r"^\s*(import|from) vllm", path.read_text(), re.MULTILINE), path


def test_jit_sees_no_tensors() -> None:
    for path in (SOURCES / "jit").glob("*.py"):
        assert "import torch" not in path.read_text()
    assert "import torch" not in (SOURCES / "plan.py").read_text()


def test_every_source_names_its_licence() -> None:
    for path in tracked():
        assert "SPDX-License-Identifier: Apache-2.0" in path.read_text().splitlines()[0], path


def test_files_stay_small() -> None:
    generated = CUDA / "arch" / "wgmma.cuh"
    for path in tracked():
        if path != generated:
            assert len(path.read_text().splitlines()) <= 400, path


def test_the_generated_header_is_its_generators() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import generate_wgmma
    finally:
        sys.path.pop(0)
    assert generate_wgmma.TARGET.read_text() == generate_wgmma.text()


def test_plan_and_formats_agree_on_the_layout() -> None:
    from chord_kernels import kernels
    from chord_kernels.formats import W4A16

    assert (W4A16.tile_rows, W4A16.tile_k, W4A16.tile_bytes) == (kernels.TILE_ROWS, kernels.TILE_K, kernels.TILE_BYTES)


def test_import_touches_nothing(tmp_path: Path) -> None:
    program = """
import builtins, os, sys
before = set(sys.modules)
import chord_kernels
assert not {'torch', 'cuda', 'numpy', 'rich', 'typer'} & (set(sys.modules) - before), 'heavy import'
dir(chord_kernels)
for name in chord_kernels.__all__:
    getattr(chord_kernels, name)
import torch
assert not torch.cuda.is_initialized()
assert 'cuda.core' not in sys.modules
"""
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_names_are_attribute_errors() -> None:
    import chord_kernels

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = chord_kernels.nothing
