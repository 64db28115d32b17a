# SPDX-License-Identifier: Apache-2.0
"""Plan -> translation unit -> cubin -> launch. Nothing with tensors crosses into this package."""
