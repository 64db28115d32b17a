# SPDX-License-Identifier: Apache-2.0
"""One error root. A message gives the value, the rule it breaks and the way out."""

from __future__ import annotations


class ChordError(Exception):
    """Everything that chord_kernels raises on purpose."""


class FormatError(ChordError, ValueError):
    """A tensor, a file or a routing object does not have the shape, dtype or content that it must have."""


class CheckpointError(ChordError, ValueError):
    """A checkpoint holds something that this package does not read, or lacks something that it needs."""


class UnsupportedError(ChordError, NotImplementedError):
    """A correct request that no kernel here computes."""


class CompileError(ChordError, RuntimeError):
    """NVRTC refused a kernel, or it may not be compiled now. The compiler's log is in the message."""


class CheckError(ChordError, AssertionError):
    """A measured output is not close enough to its reference, so its time is not reported."""
