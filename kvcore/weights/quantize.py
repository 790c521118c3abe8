"""Bring a weight into another stored form: MLX affine codes, or another float dtype."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.weights.affine import affine_quantize, pack
from kvcore.weights.mlx import AffineFormat
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

ROWS_AT_ONCE = 2**22  # elements in float32 at a time: an embedding of a billion weights must not need 10 GB


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """float32, float16 or bfloat16 as NumPy (with ml_dtypes) has it."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def affine_format(weight: Weight) -> AffineFormat | None:
    return AffineFormat(weight.bits, weight.group_size) if isinstance(weight, AffineWeight) else None


def quantize_weight(weight: Weight, wanted: AffineFormat, dtype: str) -> AffineWeight:
    """A matrix [out, in] in affine form, as ``mlx.core.quantize`` does it; scales and biases in ``dtype``."""
    out, width = weight.shape
    codes = np.empty((out, width * wanted.bits // 32), np.uint32)
    scales = np.empty((out, width // wanted.group_size), numpy_dtype(dtype))
    biases = np.empty_like(scales)
    for rows, values in _float_rows(weight):
        found, scale, bias = affine_quantize(values, wanted.bits, wanted.group_size)
        codes[rows] = pack(found, wanted.bits)
        scales[rows], biases[rows] = scale, bias
    return AffineWeight(codes, scales, biases, wanted.bits, wanted.group_size)


def dense_weight(weight: Weight, dtype: str) -> DenseWeight:
    """The values rounded once to ``dtype``."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.array.astype(numpy_dtype(dtype), copy=False))
    array = np.empty(weight.shape, numpy_dtype(dtype))
    for rows, values in _float_rows(weight):
        array[rows] = values
    return DenseWeight(array)


def narrowed(weight: DenseWeight, dtype: str) -> DenseWeight:
    """In ``dtype`` if that changes no value, else as it is."""
    array = weight.array.astype(numpy_dtype(dtype))
    exact = np.array_equal(array.astype(np.float32), weight.array.astype(np.float32))
    return DenseWeight(array) if exact else weight


def _float_rows(weight: Weight) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    out, width = weight.shape
    step = max(1, ROWS_AT_ONCE // width)
    for start in range(0, out, step):
        rows = slice(start, start + step)
        if isinstance(weight, AffineWeight):
            yield rows, weight.rows(rows).dequantize()
        else:
            yield rows, weight.array[rows].astype(np.float32)
