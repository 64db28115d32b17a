# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM that remembers what loading the weights took. Imported in the worker's process before it loads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

_GIB = 2**30
_found: dict[str, float] = {}
_load_model = Worker.load_model


@contextmanager
def _peaks() -> Iterator[list[tuple[int, int]]]:
    """Bytes of tensors at most, and of the device that torch holds for them, also before vLLM starts these counts anew."""
    found: list[tuple[int, int]] = []

    def remember(device: Any = None) -> None:
        found.append((torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)))

    reset = torch.cuda.reset_peak_memory_stats

    def remembering(device: Any = None) -> None:
        remember(device)
        reset(device)

    torch.cuda.reset_peak_memory_stats = remembering
    try:
        yield found
    finally:
        torch.cuda.reset_peak_memory_stats = reset
        remember()


def _watched(self: Any, *args: Any, **named: Any) -> Any:
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with _peaks() as peaks:
        result = _load_model(self, *args, **named)
    torch.cuda.synchronize()
    _found["weights_s"] = round(time.perf_counter() - start, 2)
    _found["weights_gib"] = round(torch.cuda.memory_allocated() / _GIB, 3)
    for name, bytes_ in zip(("weights_peak_gib", "weights_held_gib"), map(max, zip(*peaks, strict=True)), strict=True):
        _found[name] = round(bytes_ / _GIB, 3)
    return result


Worker.load_model = _watched


class WatchedLoading:
    def loading(self) -> dict[str, float]:
        return dict(_found)
