"""NumPy on the CPU: the specification that every other backend is compared with."""

from __future__ import annotations

import numpy as np

from kvcore.backends.load import Backend
from kvcore.backends.reference.ops import NumpyOps
from kvcore.errors import InputError


def load(device: str | None = None) -> Backend:
    if device not in (None, "cpu"):
        raise InputError(f"--device {device}: backend reference runs on cpu only")
    return Backend(
        name="reference",
        ops=NumpyOps(),
        device="cpu",
        arch="cpu",
        versions={"numpy": np.__version__},
        default_dtype="float32",
        raise_on_nonfinite=True,
        row_block=16,
    )
