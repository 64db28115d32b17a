# SPDX-License-Identifier: Apache-2.0
"""Cubin -> launches. Integers in, nothing of torch: the caller names device, stream and addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import CompileError, UnsupportedError
from ..kernels import Plan
from .compiler import cubin
from .counters import Counters
from .source import ENTRY, arguments

_WHOLE_PERCENT = 100
_lock = threading.Lock()
_loaded: dict[tuple[Plan, int], LoadedKernel] = {}


class LoadedKernel:
    """A plan's kernel on one device."""

    def __init__(self, plan: Plan, device: int) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        self.plan, self._device = plan, device
        Device(device).set_current()
        self._code = ObjectCode.from_cubin(cubin(plan))
        self._kernel = self._code.get_kernel(ENTRY)
        attribute = driver.CUfunction_attribute
        for name, value in (
            (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, plan.smem_bytes),
            # All that an SM has, whatever this kernel needs: another split would have to wait until the SM is idle.
            (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _WHOLE_PERCENT),
        ):
            (error,) = driver.cuKernelSetAttribute(name, value, int(self._kernel.handle), device)
            if int(error) != 0:
                raise UnsupportedError(
                    f"{plan.name} needs {plan.smem_bytes} bytes of shared memory, which device {device} refuses: {error}"
                )
        self._counters = Counters() if plan.draws else None
        self._types = tuple(c_type for _, _, c_type in arguments(plan))
        self._configs: dict[tuple[int, bool], Any] = {}

    def counter(self, stream: int, capturing: Callable[[], bool]) -> int:
        """Address of the counter that a launch on this stream draws work from; 0 where the kernel draws none."""
        return 0 if self._counters is None else self._counters.of(stream, capturing=capturing())

    def launch(self, stream: int, grid: int, values: tuple[int, ...], *, dependent: bool) -> None:
        """dependent: programmatic dependent launch; the kernel waits for the one before it by itself."""
        from cuda.core import LaunchConfig, launch

        config = self._configs.get((grid, dependent))
        if config is None:
            config = LaunchConfig(
                grid=grid, block=self.plan.threads, shmem_size=self.plan.smem_bytes, programmatic_stream_serialization=dependent
            )
            self._configs[grid, dependent] = config
        launch(
            _stream(self._device, stream),
            config,
            self._kernel,
            *(convert(value) for convert, value in zip(self._types, values, strict=True)),
        )


@lru_cache(maxsize=64)
def _stream(device: int, handle: int) -> Any:
    """One object a stream: making it anew costs as much as the launch. Every device has a default stream of handle 0."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def load(plan: Plan, device: int, *, capturing: Callable[[], bool] = lambda: False) -> LoadedKernel:
    """The kernel of a plan, compiled and loaded once a device, which becomes the current one.

    During graph capture nothing may be compiled or loaded.
    """
    kernel = _loaded.get((plan, device))
    if kernel is not None:
        return kernel
    if capturing():
        raise CompileError(
            f"{plan.name} is not loaded yet and a CUDA graph is being captured; run the layer's warmup(), "
            "or the same call once outside the capture"
        )
    with _lock:
        if (plan, device) not in _loaded:
            _loaded[plan, device] = LoadedKernel(plan, device)
        return _loaded[plan, device]
