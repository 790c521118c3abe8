"""The array protocol: the few operations that a mode, the cache and the model need from a framework.

A backend's arrays stay its own (NumPy, MLX or torch). Arithmetic, comparison, bit operators and slicing
are the arrays' own operators, which agree across the three; everything else goes through `Ops`. Dtypes are
names ("float32", "float16", "bfloat16", "int8", "uint8", "uint16", "int32"), so that no caller touches a framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = Any
Norm: TypeAlias = tuple[Array, float]  # weights [in] and epsilon of an RMSNorm

ITEMSIZE = {
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
}


class Ops(Protocol):
    """Array operations of one framework on one device. Shapes follow NumPy's rules."""

    name: str
    device: str

    def __hash__(self) -> int: ...

    # creation and transfer
    def asarray(self, x: Any, dtype: str | None = None) -> Array: ...
    def to_numpy(self, x: Array) -> np.ndarray: ...
    def zeros(self, shape: Sequence[int], dtype: str) -> Array: ...
    def evaluate(self, *arrays: Array) -> None:
        """Force pending work on ``arrays`` and wait for it (a no-op where execution is eager on the CPU)."""

    # dtypes
    def dtype(self, x: Array) -> str: ...
    def astype(self, x: Array, dtype: str) -> Array: ...
    def bitcast(self, x: Array, dtype: str) -> Array:
        """Reinterpret the bits of ``x`` as a dtype of the same width."""

    # shape
    def reshape(self, x: Array, shape: Sequence[int]) -> Array: ...
    def permute_dims(self, x: Array, axes: Sequence[int]) -> Array: ...
    def concat(self, arrays: Sequence[Array], axis: int) -> Array: ...
    def stack(self, arrays: Sequence[Array], axis: int) -> Array: ...
    def take(self, x: Array, indices: Array, axis: int) -> Array: ...
    def write_rows(self, buffer: Array, rows: Array, start: int) -> Array:
        """Put ``rows`` [B, H, n, W] at [:, :, start : start + n] of ``buffer`` [B, H, capacity, W].

        Returns the buffer to use from now on: written in place where the framework allows it.
        """

    # elementwise
    def where(self, condition: Array, x: Any, y: Any) -> Array: ...
    def abs(self, x: Array) -> Array: ...
    def maximum(self, x: Array, y: Any) -> Array: ...
    def minimum(self, x: Array, y: Any) -> Array: ...
    def exp(self, x: Array) -> Array: ...
    def log(self, x: Array) -> Array: ...
    def sqrt(self, x: Array) -> Array: ...
    def round(self, x: Array) -> Array:
        """Round to the nearest integer, halves to even; the dtype stays."""

    def isfinite(self, x: Array) -> Array: ...
    def silu(self, x: Array) -> Array: ...

    # reductions; ``axis`` is one axis, kept with length 1 where ``keepdims``
    def sum(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...
    def max(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...
    def all(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...

    # linear algebra; 16-bit inputs accumulate in float32 and return their own dtype
    def matmul(self, x: Array, y: Array) -> Array: ...
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...
    def prepare_linear(self, weight: Any, dtype: str) -> Any:
        """Bring a weight (`kvcore.weights.types`) into the form that `linear` and `embed` read fastest."""

    def prepare_projections(self, weights: Sequence[Any], dtype: str) -> Any:
        """The same for weights of the same inputs that `projections` takes together."""

    def prepare_gated(self, gate: Any, up: Any, dtype: str) -> Any:
        """The same for two weights of one shape that `gated` takes together."""

    def linear(
        self, x: Array, weight: Any, *, norm: Norm | None = None, bias: Array | None = None, added: Array | None = None
    ) -> Array:
        """``x`` [..., in] times the transpose of a prepared weight [out, in], plus ``bias`` [out] and ``added``
        [..., out] -> [..., out]; with ``norm``, RMSNorm of x comes first."""

    def projections(
        self, x: Array, weight: Any, sizes: Sequence[int], *, norm: Norm | None = None, bias: Array | None = None
    ) -> Sequence[Array]:
        """`linear` with each weight of `prepare_projections`, whose outputs are ``sizes``; ``bias`` [sum of sizes]."""

    def gated(self, x: Array, weight: Any, *, norm: Norm | None = None, bias: Array | None = None) -> Array:
        """silu(gate x) · (up x) [..., out] of a weight from `prepare_gated`; ``bias`` [2 · out], the gate's first."""

    def embed(self, ids: Array, weight: Any) -> Array:
        """Rows ``ids`` (int32, any shape) of a prepared weight [vocab, hidden] -> [..., hidden]."""


class LinearByParts:
    """What surrounds a product, as operations of their own: for a framework that has no kernel for all of it."""

    def product(self, x: Array, weight: Any) -> Array:
        """x [..., in] times the transpose of a prepared weight."""
        raise NotImplementedError

    def prepare_linear(self, weight: Any, dtype: str) -> Any:
        raise NotImplementedError

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        raise NotImplementedError

    def silu(self, x: Array) -> Array:
        raise NotImplementedError

    def prepare_projections(self, weights: Sequence[Any], dtype: str) -> Any:
        return tuple(self.prepare_linear(weight, dtype) for weight in weights)

    def prepare_gated(self, gate: Any, up: Any, dtype: str) -> Any:
        return self.prepare_projections((gate, up), dtype)

    def linear(
        self, x: Array, weight: Any, *, norm: Norm | None = None, bias: Array | None = None, added: Array | None = None
    ) -> Array:
        y = self.product(x if norm is None else self.rms_norm(x, *norm), weight)
        y = y if bias is None else y + bias
        return y if added is None else added + y

    def projections(
        self, x: Array, weight: Any, sizes: Sequence[int], *, norm: Norm | None = None, bias: Array | None = None
    ) -> Sequence[Array]:
        x = x if norm is None else self.rms_norm(x, *norm)
        ends = np.cumsum(sizes)
        parts = [None if bias is None else bias[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [self.linear(x, each, bias=part) for each, part in zip(weight, parts, strict=True)]

    def gated(self, x: Array, weight: Any, *, norm: Norm | None = None, bias: Array | None = None) -> Array:
        out = None if bias is None else bias.shape[0] // 2
        gate, up = self.projections(x, weight, (out or 0, out or 0), norm=norm, bias=bias)
        return self.silu(gate) * up
