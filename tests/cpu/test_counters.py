# SPDX-License-Identifier: Apache-2.0
"""Who shares a counter that CTAs draw work from. Device memory is a number here."""

from __future__ import annotations

import pytest

from chord_kernels.errors import UnsupportedError
from chord_kernels.jit import counters
from chord_kernels.jit.counters import CHUNK, Counters


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counters:
    addresses = iter(range(1 << 20, 1 << 40, 1 << 20))
    monkeypatch.setattr(counters, "_zeros", lambda size: next(addresses))
    return Counters()


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other(made: Counters) -> None:
    first, second = made.of(0, capturing=False), made.of(7, capturing=False)
    assert first != second
    assert [made.of(0, capturing=False), made.of(7, capturing=False)] == [first, second]


def test_every_captured_launch_has_one_of_its_own(made: Counters) -> None:
    captured = [made.of(0, capturing=True) for _ in range(100)]
    assert len({*captured, made.of(0, capturing=False), made.of(1, capturing=False)}) == 102
    assert all(address % 4 == 0 for address in captured)


def test_a_call_outside_a_capture_makes_more(made: Counters) -> None:
    of_stream = made.of(0, capturing=False)
    seen = {of_stream}
    for _ in range(3):
        seen |= {made.of(0, capturing=True) for _ in range(CHUNK // 2)}
        assert made.of(0, capturing=False) == of_stream
    assert len(seen) == 1 + 3 * (CHUNK // 2)


def test_none_left_says_what_to_do(made: Counters) -> None:
    for _ in range(CHUNK):
        made.of(0, capturing=True)
    with pytest.raises(UnsupportedError, match="outside the capture"):
        made.of(0, capturing=True)
