"""The fixed rotation of the turbo codecs: R = (H ⊗ C)·diag(signs).

H is the orthonormal Walsh–Hadamard matrix (Sylvester order) of the largest power of two that divides the head
size, C the orthonormal DCT-II of the odd rest, so that 80, 96 or 112 work as well as powers of two. The signs
depend on the layer and on K or V, and come from SplitMix64, so that every backend derives the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvcore.ops import Array, Ops

_SEED = 0x6B76636F7265  # "kvcore"
ROTATION = f"hadamard-dct, signs of splitmix64 {_SEED:#x}"  # what files name it by
_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=1024)
def rotation_signs(layer: int, part: str, head_dim: int) -> np.ndarray:
    """±1 as float32 [head_dim] for the model's global ``layer`` index and ``part`` "k" or "v"."""
    state = _SEED + 2 * layer + (part == "v")
    outputs = (_splitmix64((state + _GAMMA * (d + 1)) & _MASK) for d in range(head_dim))
    signs = np.array([-1.0 if z >> 63 else 1.0 for z in outputs], np.float32)
    signs.flags.writeable = False
    return signs


@lru_cache(maxsize=16)
def hadamard_dct(head_dim: int) -> np.ndarray:
    """H ⊗ C, orthonormal, float32 [head_dim, head_dim], rows are the output coordinates."""
    power = head_dim & -head_dim
    odd = head_dim // power
    hadamard = np.ones((1, 1))
    while hadamard.shape[0] < power:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    frequency, position = np.arange(odd)[:, None], np.arange(odd)[None, :]
    dct = np.cos(np.pi * (position + 0.5) * frequency / odd) * np.sqrt(2 / odd)
    dct[0] = np.sqrt(1 / odd)
    matrix = (np.kron(hadamard / np.sqrt(power), dct)).astype(np.float32)
    matrix.flags.writeable = False
    return matrix


@dataclass(frozen=True, slots=True)
class Rotation:
    """R of one layer and part on a device: ``signs`` [D] and ``matrix`` [D, D], float32."""

    signs: Array
    matrix: Array
    matrix_t: Array

    @classmethod
    def create(cls, ops: Ops, layer: int, part: str, head_dim: int) -> Rotation:
        matrix = hadamard_dct(head_dim)
        signs = ops.asarray(rotation_signs(layer, part, head_dim))
        return cls(signs, ops.asarray(matrix), ops.asarray(np.ascontiguousarray(matrix.T)))

    def apply(self, ops: Ops, x: Array) -> Array:
        """R x along the last axis; ``x`` float32 [..., D]."""
        return ops.matmul(x * self.signs, self.matrix_t)

    def undo(self, ops: Ops, x: Array) -> Array:
        """Rᵀ x along the last axis; ``x`` float32 [..., D]."""
        return ops.matmul(x, self.matrix) * self.signs
