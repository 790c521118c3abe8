"""A file as read-only memory, with errors a user can act on."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The file's bytes as a read-only uint8 array, paged in on use; empty for an empty file."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
