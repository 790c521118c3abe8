"""The array protocol on NumPy. 16-bit arrays are storage only: products are taken in float32 and rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvcore.ops import LinearByParts
from kvcore.weights.types import AffineWeight

_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(_DTYPES.get(name, name))


class NumpyOps(LinearByParts):
    name = "reference"
    device = "cpu"

    def asarray(self, x: Any, dtype: str | None = None) -> np.ndarray:
        return np.asarray(x, None if dtype is None else _dtype(dtype))

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        return x

    def zeros(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        return np.zeros(shape, _dtype(dtype))

    def evaluate(self, *arrays: np.ndarray) -> None:
        pass

    def dtype(self, x: np.ndarray) -> str:
        return x.dtype.name

    def astype(self, x: np.ndarray, dtype: str) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(_dtype(dtype), copy=False)

    def bitcast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x.view(_dtype(dtype))

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(shape)

    def permute_dims(self, x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        return x.transpose(axes)

    def concat(self, arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.concatenate(arrays, axis)

    def stack(self, arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
        return np.stack(arrays, axis)

    def take(self, x: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
        return np.take(x, indices, axis)

    def write_rows(self, buffer: np.ndarray, rows: np.ndarray, start: int) -> np.ndarray:
        buffer[:, :, start : start + rows.shape[2]] = rows
        return buffer

    def where(self, condition: np.ndarray, x: Any, y: Any) -> np.ndarray:
        return np.where(condition, x, y)

    def abs(self, x: np.ndarray) -> np.ndarray:
        return np.abs(x)

    def maximum(self, x: np.ndarray, y: Any) -> np.ndarray:
        return np.maximum(x, y)

    def minimum(self, x: np.ndarray, y: Any) -> np.ndarray:
        return np.minimum(x, y)

    def exp(self, x: np.ndarray) -> np.ndarray:
        return np.exp(x)

    def log(self, x: np.ndarray) -> np.ndarray:
        return np.log(x)

    def sqrt(self, x: np.ndarray) -> np.ndarray:
        return np.sqrt(x)

    def round(self, x: np.ndarray) -> np.ndarray:
        return np.rint(x)

    def isfinite(self, x: np.ndarray) -> np.ndarray:
        return np.isfinite(x)

    def silu(self, x: np.ndarray) -> np.ndarray:
        wide = x.astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            return (wide / (1 + np.exp(-wide))).astype(x.dtype, copy=False)

    def sum(self, x: np.ndarray, axis: int, keepdims: bool = False) -> np.ndarray:
        return np.sum(x, axis=axis, keepdims=keepdims)

    def max(self, x: np.ndarray, axis: int, keepdims: bool = False) -> np.ndarray:
        return np.max(x, axis=axis, keepdims=keepdims)

    def all(self, x: np.ndarray, axis: int, keepdims: bool = False) -> np.ndarray:
        return np.all(x, axis=axis, keepdims=keepdims)

    def matmul(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        wide = np.matmul(x.astype(np.float32, copy=False), y.astype(np.float32, copy=False))
        return wide.astype(x.dtype, copy=False)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        wide = x.astype(np.float32, copy=False)
        mean = np.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide / np.sqrt(mean + np.float32(eps)) * weight.astype(np.float32, copy=False)
        return normed.astype(x.dtype, copy=False)

    def prepare_linear(self, weight: Any, dtype: str) -> PreparedLinear:
        """float32 [out, in] with the values of ``dtype``: BLAS has no 16-bit product."""
        wide = weight.dequantize() if isinstance(weight, AffineWeight) else weight.array
        rounded = self.astype(wide, dtype)
        return PreparedLinear(np.ascontiguousarray(rounded, dtype=np.float32), dtype)

    def product(self, x: np.ndarray, weight: PreparedLinear) -> np.ndarray:
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
        product = rows @ weight.array.T
        return product.reshape(*x.shape[:-1], -1).astype(x.dtype, copy=False)

    def embed(self, ids: np.ndarray, weight: PreparedLinear) -> np.ndarray:
        return weight.array[ids].astype(_dtype(weight.dtype), copy=False)


@dataclass(frozen=True, slots=True)
class PreparedLinear:
    array: np.ndarray  # float32 [out, in]
    dtype: str
