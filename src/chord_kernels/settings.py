# SPDX-License-Identifier: Apache-2.0
"""The only reader of the environment.

=====================================  =================================================================
CHORD_CACHE_DIR                        where compiled kernels are kept (default: the user's cache folder)
CHORD_W4A16_BM, _BN, _BK, _STAGES      pin a schedule for experiments: token rows a block, weight rows a
                                       panel, k a stage, stages of the ring
CHORD_W4A16_KERNEL                     tile or stream: the kernel, where it computes a problem
CHORD_VLLM                             the vLLM plugin: on (default), off, or force (also where a backend was named)
=====================================  =================================================================
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

from .errors import FormatError

PINS = {"BM": "block_rows", "BN": "panel_rows", "BK": "stage_k", "STAGES": "stages"}


KERNELS = ("tile", "stream")
VLLM_MODES = ("on", "off", "force")


def schedule_pins() -> dict[str, int | str]:
    """Pinned schedule fields by plan field name, and "kernel"; empty where the environment pins nothing."""
    pins: dict[str, int | str] = {}
    if kernel := os.environ.get("CHORD_W4A16_KERNEL"):
        if kernel not in KERNELS:
            raise FormatError(f"CHORD_W4A16_KERNEL={kernel!r} is no kernel; unset it or give one of {', '.join(KERNELS)}")
        pins["kernel"] = kernel
    for suffix, field in PINS.items():
        text = os.environ.get(f"CHORD_W4A16_{suffix}")
        if not text:
            continue
        if not text.isdigit() or int(text) == 0:
            raise FormatError(f"CHORD_W4A16_{suffix}={text!r} is not a positive whole number; unset it or give one")
        pins[field] = int(text)
    return pins


def vllm_mode(configured: str | None = None) -> str:
    """on, off or force. configured: what the engine's own configuration says, where the environment says nothing."""
    name, mode = ("CHORD_VLLM", os.environ["CHORD_VLLM"]) if os.environ.get("CHORD_VLLM") else ("mode", configured or "on")
    if mode not in VLLM_MODES:
        raise FormatError(f"{name}={mode!r} is not known; leave it out or give one of {', '.join(VLLM_MODES)}")
    return mode


def vllm_plugins() -> tuple[str, ...] | None:
    """The plugins that vLLM will load; None: all that are installed."""
    listed = os.environ.get("VLLM_PLUGINS")
    return None if listed is None else tuple(name.strip() for name in listed.split(","))


def _user_cache() -> Path | None:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base) / "chord_kernels" if base else None
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "chord_kernels"
    home = os.environ.get("HOME")
    return Path(home) / ".cache" / "chord_kernels" if home and home != "/" else None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@lru_cache(maxsize=8)
def _resolve_cache(explicit: str | None, default: Path | None) -> Path:
    wanted = Path(explicit) if explicit else default
    if wanted is not None and _writable(wanted):
        return wanted
    private = Path(tempfile.mkdtemp(prefix="chord_kernels-"))
    warnings.warn(
        f"the kernel cache folder {wanted or '(no HOME)'} cannot be written: kernels compiled now are kept in {private} "
        "and compiled again by the next process; set CHORD_CACHE_DIR to a writable folder",
        stacklevel=3,
    )
    return private


def cache_dir() -> Path:
    """The folder of compiled kernels; created when missing. Falls back to a private temporary folder, with one warning."""
    return _resolve_cache(os.environ.get("CHORD_CACHE_DIR") or None, _user_cache())
