"""A model's fingerprint: its configuration, and of each weight name, dtype, shape and both ends of its bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from kvcore.models.config import LlamaConfig
from kvcore.weights import AffineWeight, Weight

END_BYTES = 4096


class Fingerprint:
    """Fed with the weights in the order of use, so that no file is read twice."""

    def __init__(self, config: LlamaConfig) -> None:
        self._hash = hashlib.blake2b(json.dumps(asdict(config), sort_keys=True).encode(), digest_size=16)

    def add(self, name: str, weight: Weight) -> None:
        """Take in one weight: `load_params` calls this as ``seen``."""
        if isinstance(weight, AffineWeight):
            self._hash.update(f"{name} affine {weight.bits} {weight.group_size}".encode())
            parts = {"codes": weight.codes, "scales": weight.scales, "biases": weight.biases}
        else:
            parts = {"": weight.array}
        for part, array in parts.items():
            self._hash.update(f"{name} {part} {array.dtype} {array.shape}".encode())
            for end in _ends(array):
                self._hash.update(end)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _ends(array: npt.NDArray[np.generic]) -> tuple[bytes, bytes]:
    """The first and the last 4 KiB, without a copy of the rest."""
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(-1, 1)
    count = -(-END_BYTES // max(1, rows.shape[1] * rows.itemsize))
    first, last = (np.ascontiguousarray(part).tobytes() for part in (rows[:count], rows[-count:]))
    return first[:END_BYTES], last[-END_BYTES:]
