# SPDX-License-Identifier: Apache-2.0
"""The published import path of the packing functions."""

from .weights import pack_w4a16, pack_w4a16_grouped

__all__ = ["pack_w4a16", "pack_w4a16_grouped"]
