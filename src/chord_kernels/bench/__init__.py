# SPDX-License-Identifier: Apache-2.0
"""The harness that every published figure comes from."""
