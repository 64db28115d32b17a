# SPDX-License-Identifier: Apache-2.0
"""Serving engines. Each module is the only importer of its engine."""
