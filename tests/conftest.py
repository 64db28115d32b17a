# SPDX-License-Identifier: Apache-2.0
"""tests/support.py is importable from every test, and compiled kernels of the tests stay out of the user's cache."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("CHORD_CACHE_DIR", tempfile.mkdtemp(prefix="chord-tests-"))
