# SPDX-License-Identifier: Apache-2.0
"""A progress bar for work that lasts longer than two seconds; nothing on shorter work or where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 2.0


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` steps."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(description, total=total)
    started, shown = time.monotonic(), False

    def step() -> None:
        nonlocal shown
        bar.advance(task)
        if not shown and time.monotonic() - started > _PATIENCE_S:
            bar.start()
            shown = True

    try:
        yield step
    finally:
        if shown:
            bar.stop()
            sys.stderr.flush()
