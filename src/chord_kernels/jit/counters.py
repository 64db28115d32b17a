# SPDX-License-Identifier: Apache-2.0
"""Counters in device memory that the CTAs of a launch draw work from: an int32 each, 0 whenever no launch uses it.

Launches on one stream follow each other and share a counter. A captured launch has one of its own, since its graph can be replayed on
any stream, beside other graphs.
"""

from __future__ import annotations

import threading

from ..errors import UnsupportedError

CHUNK = 1 << 14
_BYTES = 4


class Counters:
    """Of one kernel on one device, which must be the current one where this is made or `of` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_stream: dict[int, int] = {}
        self._free: list[int] = []
        self._add_chunk()

    def of(self, stream: int, *, capturing: bool) -> int:
        """Address of the counter of a launch on a stream."""
        if not capturing and (counter := self._of_stream.get(stream)) is not None and len(self._free) > CHUNK // 2:
            return counter
        with self._lock:
            if capturing:
                return self._take()
            if len(self._free) <= CHUNK // 2:
                self._add_chunk()
            if stream not in self._of_stream:
                self._of_stream[stream] = self._take()
            return self._of_stream[stream]

    def _take(self) -> int:
        if not self._free:
            raise UnsupportedError(
                f"all {CHUNK} counters of this kernel are held by captured launches; run it once outside the capture, which makes more"
            )
        return self._free.pop()

    def _add_chunk(self) -> None:
        # Kept until the process ends, as graphs may be; and cleared before any stream can use it.
        self._free += range(first := _zeros(CHUNK * _BYTES), first + CHUNK * _BYTES, _BYTES)


def _zeros(size: int) -> int:
    from cuda.bindings import driver

    error, address = driver.cuMemAlloc(size)
    if int(error) == 0:
        (error,) = driver.cuMemsetD8(address, 0, size)
    if int(error) == 0:
        (error,) = driver.cuCtxSynchronize()
    if int(error) != 0:
        raise UnsupportedError(f"{size} bytes of device memory for counters: {error}; free some memory on the device")
    return int(address)
