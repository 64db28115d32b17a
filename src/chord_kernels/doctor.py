# SPDX-License-Identifier: Apache-2.0
"""What this machine has, and what Chord can do on it: facts for `chord doctor`. Never raises for what is missing."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from . import __version__, settings
from .errors import ChordError
from .integrations.vllm import TESTED
from .plan import CONTRACTS, EPILOGUES, NEVER_RUN, SHIPPED_SHAPES, Problem, why_not

_PACKAGES = (
    "torch",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "safetensors",
    "compressed-tensors",
    "humming-kernels",
    "vllm",
)


def facts() -> list[tuple[str, str]]:
    """(what, value) in the order a reader wants them."""
    found = [("chord-kernels", __version__), ("Python", f"{platform.python_version()} on {platform.machine()}")]
    for package in _PACKAGES:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            found.append((package, "not installed"))
    found += [("NVRTC", _nvrtc()), ("CUDA driver", _driver()), *_gpus(), ("kernel cache", _cache())]
    return [*found, ("vLLM plugin", _plugin())]


def _nvrtc() -> str:
    from .jit.compiler import nvrtc_version

    try:
        return nvrtc_version()
    except ChordError as error:
        return str(error)


def _driver() -> str:
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except Exception as problem:  # the loader raises types of its own when libcuda is missing
        return f"none ({type(problem).__name__}): CPU only"
    return f"supports CUDA {version // 1000}.{version % 1000 // 10}" if int(error) == 0 else f"{error}"


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none that torch can use: ops run on CPU through the reference")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        text = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, {gib:.0f} GiB"
        found.append((f"GPU {index}", text))
    return found


def _cache() -> str:
    from .jit.compiler import cache_entries

    entries = cache_entries()
    size = sum(path.stat().st_size for path in entries) / 2**20
    return f"{settings.cache_dir()}: {len(entries)} kernels, {size:.1f} MiB"


def _plugin() -> str:
    """Whether vLLM, as it is installed and set here, would leave INT4 experts to Chord."""
    group, name = "vllm.general_plugins", "chord_kernels"
    try:
        version, mode, plugins = metadata.version("vllm"), settings.vllm_mode(), settings.vllm_plugins()
    except metadata.PackageNotFoundError:
        return "vLLM is not installed"
    except ChordError as error:
        return str(error)
    if mode == "off":
        return "off (CHORD_VLLM=off)"
    if plugins is not None and name not in plugins:
        return f"not loaded: VLLM_PLUGINS={','.join(plugins)} leaves {name} out"
    if name not in metadata.entry_points(group=group).names:
        return f"not found: chord-kernels is importable, but not installed with its entry point in {group} (pip install it)"
    tested = "tested" if version.startswith(TESTED) else f"not tested; tested: {', '.join(known + 'x' for known in TESTED)}"
    return f"takes INT4 experts of compressed-tensors checkpoints from vLLM {version} ({tested}; mode {mode})"


def support() -> list[tuple[str, str, str]]:
    """(op, epilogue, 'yes' or the reason) on the current GPU, for a Kimi K2 expert; the CPU reference computes all."""
    if not torch.cuda.is_available():
        return [(contract, epilogue, "CPU only (reference)") for contract in CONTRACTS for epilogue in EPILOGUES]
    from .ops import device_arch

    arch, sm_count = device_arch(torch.cuda.current_device())
    experts, hidden, inter = SHIPPED_SHAPES["kimi-k2-ep8"]
    answers = []
    for contract in CONTRACTS:
        for epilogue in EPILOGUES:
            reason = why_not(Problem(arch, sm_count, contract, epilogue, True, experts, 2 * inter, hidden, rows=experts))
            answers.append((contract, epilogue, reason or ("compiled, never run on this family" if arch in NEVER_RUN else "yes")))
    return answers
