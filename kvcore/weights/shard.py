"""Parts of a weight: rows, and columns where the form allows it."""

from __future__ import annotations

import numpy as np

from kvcore.weights.types import AffineWeight, DenseWeight, Weight


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """Outputs ``start`` to ``stop`` of a matrix [out, in], or of a bias [out]; still packed. Rows beyond the last one
    are zeros."""
    out = weight.shape[0]
    index = slice(min(start, out), min(stop, out))
    missing = (stop - start) - (index.stop - index.start)
    if isinstance(weight, DenseWeight):
        return DenseWeight(_padded(weight.array[index], missing))
    part = weight.rows(index)
    planes = (_padded(plane, missing) for plane in (part.codes, part.scales, part.biases))
    codes, scales, biases = planes
    return AffineWeight(codes, scales, biases, weight.bits, weight.group_size)


def columns(weight: Weight, start: int, stop: int) -> Weight:
    """Inputs ``start`` to ``stop`` of a matrix [out, in]. Affine weights stay packed where both ends are group
    boundaries; a part that begins or ends within a group is dequantized."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.array[:, start:stop])
    if not on_groups(weight, start, stop):
        return DenseWeight(weight.dequantize()[:, start:stop])
    words, groups = weight.bits, weight.group_size  # 32 codes fill ``bits`` words; a group is a multiple of 32
    return AffineWeight(
        weight.codes[:, start // 32 * words : stop // 32 * words],
        weight.scales[:, start // groups : stop // groups],
        weight.biases[:, start // groups : stop // groups],
        weight.bits,
        weight.group_size,
    )


def on_groups(weight: AffineWeight, start: int, stop: int) -> bool:
    return start % weight.group_size == 0 and stop % weight.group_size == 0


def _padded(array: np.ndarray, missing: int) -> np.ndarray:
    if not missing:
        return array
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
