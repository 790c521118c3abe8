"""Scalar codebooks of the turbo codecs: Lloyd–Max levels of a unit Gaussian, scaled to small binary numbers.

TurboQuant (arXiv 2504.19874, the MSE variant): after a random rotation each coordinate of a vector is close to
Gaussian, so one fixed scalar quantizer serves every coordinate. Levels are scaled so that each is exact in
fp8 e4m3, fp16 and bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Codebook:
    """``levels`` ascend and are antisymmetric, in units of one standard deviation divided by ``spread``."""

    bits: int
    spread: float
    levels: tuple[float, ...]

    @property
    def midpoints(self) -> tuple[float, ...]:
        """The decision boundaries: an index is the number of midpoints strictly below a value."""
        return tuple((a + b) / 2 for a, b in zip(self.levels, self.levels[1:], strict=False))

    def packed_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def as_array(self) -> np.ndarray:
        return np.array(self.levels, np.float32)


def _antisymmetric(*positive: float) -> tuple[float, ...]:
    return (*(-x for x in reversed(positive)), *positive)


TURBO4 = Codebook(4, 8.7331, _antisymmetric(1.125, 3.25, 5.5, 8, 11, 14, 18, 24))
TURBO3 = Codebook(3, 12.0378, _antisymmetric(3, 9, 16, 26))
