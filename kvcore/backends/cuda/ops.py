"""The array protocol on torch: an NVIDIA GPU, or by explicit setting the CPU with the same graph operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from kvcore.ops import LinearByParts
from kvcore.weights.types import AffineWeight

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TorchOps(LinearByParts):
    name = "cuda"

    def __init__(self, device: str) -> None:
        self.device = device

    def asarray(self, x: Any, dtype: str | None = None) -> torch.Tensor:
        if isinstance(x, np.ndarray) and x.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
        elif isinstance(x, np.ndarray):
            tensor = torch.from_numpy(x if x.flags.writeable and x.flags.c_contiguous else x.copy())
        else:
            tensor = torch.as_tensor(x)
        return tensor.to(self.device, None if dtype is None else TORCH_DTYPES[dtype])

    def to_numpy(self, x: torch.Tensor) -> np.ndarray:
        if x.dtype == torch.bfloat16:
            return x.cpu().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return x.cpu().numpy()

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=TORCH_DTYPES[dtype], device=self.device)

    def evaluate(self, *arrays: torch.Tensor) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def dtype(self, x: torch.Tensor) -> str:
        return _NAMES[x.dtype]

    def astype(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.to(TORCH_DTYPES[dtype])

    def bitcast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.view(TORCH_DTYPES[dtype])

    def reshape(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return x.reshape(tuple(shape))

    def permute_dims(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.permute(*axes)

    def concat(self, arrays: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(list(arrays), axis)

    def stack(self, arrays: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.stack(list(arrays), axis)

    def take(self, x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
        if axis == 0 and x.ndim == 1:
            return x[indices.int()]
        if axis == 0 and x.ndim == 2:
            return torch.nn.functional.embedding(indices.int(), x)
        return torch.index_select(x, axis, indices.int())

    def write_rows(self, buffer: torch.Tensor, rows: torch.Tensor, start: int) -> torch.Tensor:
        buffer[:, :, start : start + rows.shape[2]] = rows
        return buffer

    def where(self, condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        return torch.where(condition, x, y)

    def abs(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()

    def maximum(self, x: torch.Tensor, y: Any) -> torch.Tensor:
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    def minimum(self, x: torch.Tensor, y: Any) -> torch.Tensor:
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    def log(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)

    def sqrt(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    def isfinite(self, x: torch.Tensor) -> torch.Tensor:
        return torch.isfinite(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)

    def sum(self, x: torch.Tensor, axis: int, keepdims: bool = False) -> torch.Tensor:
        return x.sum(dim=axis, keepdim=keepdims)

    def max(self, x: torch.Tensor, axis: int, keepdims: bool = False) -> torch.Tensor:
        return x.amax(dim=axis, keepdim=keepdims)

    def all(self, x: torch.Tensor, axis: int, keepdims: bool = False) -> torch.Tensor:
        return x.all(dim=axis, keepdim=keepdims)

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, y)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    def prepare_linear(self, weight: Any, dtype: str) -> torch.Tensor:
        """[out, in] in ``dtype`` on the device; affine weights are dequantized once."""
        wide = weight.dequantize() if isinstance(weight, AffineWeight) else weight.array
        return self.asarray(wide, dtype)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    def embed(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, weight)
