# SPDX-License-Identifier: Apache-2.0
"""Quantized Mixture-of-Experts kernels that run at the limit of the GPU.

Names are imported on first use: `import chord_kernels` touches neither CUDA nor the disk.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ChordError": "errors",
    "CompileError": "errors",
    "ContiguousRows": "rows",
    "IndexedRows": "rows",
    "MaskedRows": "rows",
    "MoELayer": "layer",
    "PackedWeight": "weights",
    "align_contiguous": "rows",
    "align_indexed": "rows",
    "align_masked": "rows",
    "contiguous": "ops",
    "indexed": "ops",
    "load_experts": "checkpoint",
    "masked": "ops",
    "pack_mxfp8": "weights",
    "pack_w4a16": "weights",
    "pack_w4a16_grouped": "weights",
    "quantize_mxfp8": "weights",
    "warp_decode": "decode",
    "weighted_sum": "combine",
}

__all__ = sorted([*_PUBLIC, "reference"])


def __getattr__(name: str) -> Any:
    if name == "reference":
        return import_module(".reference", __name__)
    if name in _PUBLIC:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
