# SPDX-License-Identifier: Apache-2.0
"""Plan -> cubin, by NVRTC through cuda.core, with a content-addressed cache on disk.

An entry's name is the hash of all that can change its bytes: the translation unit, every header it reaches, the options and
the exact NVRTC. Entries are published by atomic rename and begin with their own digest, so that a torn, truncated or
edited file is a miss and never a kernel.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import CompileError
from ..files import TEMPORARY_PREFIX, replacing
from ..kernels import Plan
from .source import CUDA_ROOT, reachable_headers, translation_unit

_DIGEST_BYTES = 32
_importing = threading.Lock()  # the first import of cuda.core fails in several threads at once
_INSTALL = "pip install 'nvidia-cuda-nvrtc>=13,<14'"


@dataclass(frozen=True)
class Report:
    """What ptxas said of a kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    serialized: bool
    log: str

    @property
    def fault(self) -> str | None:
        """Why this build must not ship; None where it may."""
        if self.serialized:
            return "ptxas serialised its wgmma instructions"
        if self.spill_bytes or self.stack_bytes:
            return f"{self.spill_bytes} bytes of spills, {self.stack_bytes} bytes of stack"
        return None


def nvrtc_version() -> str:
    """The loaded NVRTC, or CompileError with the way to get one."""
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except Exception as problem:  # the loader raises types of its own when the library is missing
        raise CompileError(f"NVRTC, CUDA's run-time compiler, was not found: {problem}. Get it with: {_INSTALL}") from problem
    if int(error) != 0:
        raise CompileError(f"NVRTC answers {error} to a version query; install it anew: {_INSTALL}")
    return f"{major}.{minor}"


def _compiler_identity() -> str:
    from importlib import metadata

    try:
        build = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        build = "system"
    return f"nvrtc {nvrtc_version()} ({build})"


def _options(plan: Plan) -> dict[str, Any]:
    """What ProgramOptions is told of a plan, and the cache key with it."""
    return {"arch": plan.arch, "std": "c++17", "ptxas_options": ["-v"]}


def cache_key(plan: Plan) -> str:
    text = translation_unit(plan)
    digest = hashlib.sha256()
    for part in (_compiler_identity(), repr(_options(plan)), text, *(f"{n}\0{t}" for n, t in reachable_headers(text).items())):
        digest.update(part.encode())
        digest.update(b"\0\0")
    return digest.hexdigest()


def compile_uncached(plan: Plan) -> tuple[bytes, Report]:
    """Run NVRTC. No GPU and no driver is needed. Raises CompileError with the compiler's log."""
    nvrtc_version()
    with _importing:
        from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(name=plan.name, include_path=[str(CUDA_ROOT)], **_options(plan))
    try:
        code = bytes(Program(translation_unit(plan), "c++", options).compile("cubin", logs=log).code)
    except Exception as problem:  # cuda.core raises several types; the text holds NVRTC's log
        raise CompileError(f"{plan.name} does not compile with NVRTC {nvrtc_version()}:\n{problem}\n{log.getvalue()}") from problem
    return code, _report(log.getvalue())


def _report(log: str) -> Report:
    def total(pattern: str) -> int:
        return sum(int(value) for value in re.findall(pattern, log))

    return Report(
        registers=max((int(value) for value in re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        serialized="C7510" in log or "C7511" in log or "C7512" in log or "serialized" in log,
        log=log,
    )


def _read(path: Path) -> bytes | None:
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    digest, code = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _publish(path: Path, code: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(hashlib.sha256(code).digest() + code)


def cubin(plan: Plan) -> bytes:
    """The plan's machine code, from the cache or compiled and published there. Safe between threads and processes."""
    path = settings.cache_dir() / f"{cache_key(plan)}.cubin"
    code = _read(path)
    if code is None:
        code, _ = compile_uncached(plan)
        _publish(path, code)
    return code


def is_cached(plan: Plan) -> bool:
    return _read(settings.cache_dir() / f"{cache_key(plan)}.cubin") is not None


def build_all(plans: Iterable[Plan], *, workers: int | None = None, done: Callable[[Plan], None] | None = None) -> None:
    """Compile what the cache lacks, side by side; NVRTC releases the interpreter lock. `done` is called after each."""

    def build(plan: Plan) -> Plan:
        cubin(plan)
        return plan

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for plan in pool.map(build, list(plans)):
            if done:
                done(plan)


def cache_entries() -> list[Path]:
    """Compiled kernels, and leftovers of builds that were killed."""
    folder = settings.cache_dir()
    return sorted([*folder.glob("*.cubin"), *folder.glob(f"{TEMPORARY_PREFIX}*")])


def clear_cache() -> int:
    """Remove every entry; returns the bytes freed."""
    freed = 0
    for path in cache_entries():
        freed += path.stat().st_size
        path.unlink(missing_ok=True)
    return freed
