# SPDX-License-Identifier: Apache-2.0
"""Times that can be trusted: cold by construction, medians, and never of an unchecked output."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckError

FLUSH_BYTES = 1 << 30  # many times the largest L2, and long enough for the host to stay ahead of short kernels


@dataclass(frozen=True)
class Measurement:
    """us: median microseconds a call (or a layer). spread: half the distance between the quartiles, over the median."""

    us: float
    spread: float
    method: str  # cold | graph
    samples: int
    error: float  # of the output that was timed, relative to FP64


def _summary(times: Sequence[float], method: str, error: float) -> Measurement:
    quartiles = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return Measurement(median * 1e3, (quartiles[2] - quartiles[0]) / 2 / median, method, len(times), error)


def checked(check: Callable[[], float], limit: float) -> float:
    error = check()
    if not error <= limit:
        raise CheckError(f"the output is {error:.3e} from FP64, relative; the limit is {limit:.1e}. Its time is not reported")
    return error


def cold(
    call: Callable[[], object], check: Callable[[], float], *, limit: float = 2.5e-3, samples: int = 50, warmup: int = 5
) -> Measurement:
    """Median time of single calls, each after the L2 was overwritten. `check` returns the relative error of the last output.

    The host stays ahead of the device as long as a call takes it less than the flush, about 250 us.
    """
    for _ in range(warmup):
        call()
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for start, stop in pairs:
        flush.zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    error = checked(check, limit)
    return _summary([start.elapsed_time(stop) for start, stop in pairs], "cold", error)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """`call` as one CUDA graph, so that a sequence of short kernels is not timed by its launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        call()
    return recording.replay


def graph(layers: Sequence[Callable[[], object]], check: Callable[[], float], *, limit: float = 2.5e-3, samples: int = 50) -> Measurement:
    """Median time a layer, of replays of one CUDA graph over several layers with weights of their own.

    Use enough layers for their weights to exceed the L2 several times: a replay then reads them from memory.
    """

    def all_layers() -> None:
        for layer in layers:
            layer()

    replay = captured(all_layers)
    for _ in range(3):
        replay()
    times = []
    for _ in range(samples):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / len(layers))
    error = checked(check, limit)
    return _summary(times, "graph", error)


def card(device: int = 0) -> dict[str, object]:
    """What the figures were taken on: name, SMs, capability, driver, clocks now and at most."""
    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, object] = {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", str(properties.uuid)]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        try:
            text = subprocess.run(query[:-2], capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return facts
    return facts | dict(zip(fields, (part.strip() for part in text.splitlines()[0].split(",")), strict=False))
