"""The array protocol on MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from kvcore.ops import LinearByParts
from kvcore.weights.types import AffineWeight

_DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int8": mx.int8,
    "uint8": mx.uint8,
    "uint16": mx.uint16,
    "int32": mx.int32,
    "uint32": mx.uint32,
    "bool": mx.bool_,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class MlxOps(LinearByParts):
    name = "metal"

    def __init__(self, device: str, quantized_linear: bool) -> None:
        """``quantized_linear``: keep affine weights packed and multiply them with `mx.quantized_matmul`."""
        self.device = device
        self._quantized_linear = quantized_linear

    def asarray(self, x: Any, dtype: str | None = None) -> mx.array:
        if isinstance(x, np.ndarray):
            x = np.asarray(x, order="C")  # MLX refuses negative strides
            if x.dtype == ml_dtypes.bfloat16:
                array = mx.array(x.view(np.uint16)).view(mx.bfloat16)
            else:
                array = mx.array(x)
        else:
            array = x if isinstance(x, mx.array) else mx.array(x)
        return array if dtype is None else array.astype(_DTYPES[dtype])

    def to_numpy(self, x: mx.array) -> np.ndarray:
        if x.dtype == mx.bfloat16:
            return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(x)

    def zeros(self, shape: Sequence[int], dtype: str) -> mx.array:
        return mx.zeros(tuple(shape), _DTYPES[dtype])

    def evaluate(self, *arrays: mx.array) -> None:
        mx.eval(*arrays)

    def dtype(self, x: mx.array) -> str:
        return _NAMES[x.dtype]

    def astype(self, x: mx.array, dtype: str) -> mx.array:
        return x.astype(_DTYPES[dtype])

    def bitcast(self, x: mx.array, dtype: str) -> mx.array:
        return x.view(_DTYPES[dtype])

    def reshape(self, x: mx.array, shape: Sequence[int]) -> mx.array:
        return x.reshape(tuple(shape))

    def permute_dims(self, x: mx.array, axes: Sequence[int]) -> mx.array:
        return x.transpose(*axes)

    def concat(self, arrays: Sequence[mx.array], axis: int) -> mx.array:
        return mx.concatenate(list(arrays), axis)

    def stack(self, arrays: Sequence[mx.array], axis: int) -> mx.array:
        return mx.stack(list(arrays), axis)

    def take(self, x: mx.array, indices: mx.array, axis: int) -> mx.array:
        return mx.take(x, indices, axis)

    def write_rows(self, buffer: mx.array, rows: mx.array, start: int) -> mx.array:
        buffer[:, :, start : start + rows.shape[2]] = rows
        return buffer

    def where(self, condition: mx.array, x: Any, y: Any) -> mx.array:
        return mx.where(condition, x, y)

    def abs(self, x: mx.array) -> mx.array:
        return mx.abs(x)

    def maximum(self, x: mx.array, y: Any) -> mx.array:
        return mx.maximum(x, y)

    def minimum(self, x: mx.array, y: Any) -> mx.array:
        return mx.minimum(x, y)

    def exp(self, x: mx.array) -> mx.array:
        return mx.exp(x)

    def log(self, x: mx.array) -> mx.array:
        return mx.log(x)

    def sqrt(self, x: mx.array) -> mx.array:
        return mx.sqrt(x)

    def round(self, x: mx.array) -> mx.array:
        return mx.round(x)

    def isfinite(self, x: mx.array) -> mx.array:
        return mx.isfinite(x)

    def silu(self, x: mx.array) -> mx.array:
        return x * mx.sigmoid(x)

    def sum(self, x: mx.array, axis: int, keepdims: bool = False) -> mx.array:
        return mx.sum(x, axis=axis, keepdims=keepdims)

    def max(self, x: mx.array, axis: int, keepdims: bool = False) -> mx.array:
        return mx.max(x, axis=axis, keepdims=keepdims)

    def all(self, x: mx.array, axis: int, keepdims: bool = False) -> mx.array:
        return mx.all(x, axis=axis, keepdims=keepdims)

    def matmul(self, x: mx.array, y: mx.array) -> mx.array:
        return mx.matmul(x, y)

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, weight, eps)

    def prepare_linear(self, weight: Any, dtype: str) -> PackedLinear | DenseLinear:
        if isinstance(weight, AffineWeight) and self._quantized_linear:
            packed = PackedLinear(
                mx.array(weight.codes),
                self.asarray(weight.scales, dtype),
                self.asarray(weight.biases, dtype),
                weight.bits,
                weight.group_size,
            )
            mx.eval(packed.codes, packed.scales, packed.biases)
            return packed
        wide = weight.dequantize() if isinstance(weight, AffineWeight) else weight.array
        # MLX's matrix product on the CPU is twice as fast on a [in, out] operand.
        dense = DenseLinear(self.asarray(np.ascontiguousarray(wide.T), dtype))
        mx.eval(dense.array)
        return dense

    def product(self, x: mx.array, weight: PackedLinear | DenseLinear) -> mx.array:
        if isinstance(weight, DenseLinear):
            return x @ weight.array
        return mx.quantized_matmul(
            x, weight.codes, weight.scales, weight.biases, group_size=weight.group_size, bits=weight.bits
        )

    def embed(self, ids: mx.array, weight: PackedLinear | DenseLinear) -> mx.array:
        if isinstance(weight, DenseLinear):
            return mx.take(weight.array, ids, 1).transpose(*range(1, ids.ndim + 1), 0)
        return mx.dequantize(
            weight.codes[ids],
            weight.scales[ids],
            weight.biases[ids],
            group_size=weight.group_size,
            bits=weight.bits,
        )


@dataclass(frozen=True, slots=True)
class DenseLinear:
    array: mx.array  # [in, out]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """MLX's affine form: codes uint32 [out, in·bits/32], scales and biases [out, in/group_size]."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int
