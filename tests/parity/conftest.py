"""Parity tests run Triton's kernels too: the import decides how, before any kernel is imported."""

import triton_device  # noqa: F401
