"""The array protocol on an NVIDIA GPU with weights in tiles: what surrounds a product is in its kernel.

Few rows, as in decode, go through `linear_tiles`, which reads the stored form; many rows, as in prefill, through the
library's product with weights that are made dense for it. A weight that has no tiles stays a dense tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from kvcore.backends.cuda.kernels.gate import gate_rows
from kvcore.backends.cuda.linear import (
    FEW_ROWS,
    WeightTiles,
    alike,
    linear_tiles,
    reasons_against,
    reasons_against_gated,
)
from kvcore.backends.cuda.ops import TORCH_DTYPES, TorchOps
from kvcore.ops import Norm
from kvcore.weights.types import Weight


class FusedOps(TorchOps):
    def prepare_linear(self, weight: Weight, dtype: str) -> Any:
        kind = TORCH_DTYPES[dtype]
        if reasons_against(weight, kind):
            return super().prepare_linear(weight, dtype)
        return WeightTiles.create([weight], self.device, kind)

    def prepare_projections(self, weights: Sequence[Weight], dtype: str) -> Any:
        kind = TORCH_DTYPES[dtype]
        if not alike(weights) or any(reasons_against(weight, kind) for weight in weights):
            return super().prepare_projections(weights, dtype)
        return WeightTiles.create(weights, self.device, kind)

    def prepare_gated(self, gate: Weight, up: Weight, dtype: str) -> Any:
        kind = TORCH_DTYPES[dtype]
        if reasons_against_gated(gate, up, kind):
            return super().prepare_gated(gate, up, dtype)
        return WeightTiles.create_gated(gate, up, self.device, kind)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.device.type == "cpu":
            return super().rms_norm(x, weight, eps)
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def linear(
        self,
        x: Tensor,
        weight: Any,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(weight, WeightTiles):
            return super().linear(x, weight, norm=norm, bias=bias, added=added)
        if _few(x):
            return linear_tiles(x, weight, norm=norm, bias=bias, added=added)
        y = self._dense(x, weight, norm, bias)
        return y if added is None else y.add_(added)

    def projections(
        self, x: Tensor, weight: Any, sizes: Sequence[int], *, norm: Norm | None = None, bias: Tensor | None = None
    ) -> Sequence[Tensor]:
        if not isinstance(weight, WeightTiles):
            return super().projections(x, weight, sizes, norm=norm, bias=bias)
        return self.linear(x, weight, norm=norm, bias=bias).split(list(sizes), -1)

    def gated(self, x: Tensor, weight: Any, *, norm: Norm | None = None, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, WeightTiles):
            return super().gated(x, weight, norm=norm, bias=bias)
        if _few(x):
            return linear_tiles(x, weight, norm=norm, bias=bias)
        return gate_rows(self._dense(x, weight, norm, bias))

    def embed(self, ids: Tensor, weight: Any) -> Tensor:
        return weight.rows(ids) if isinstance(weight, WeightTiles) else super().embed(ids, weight)

    def _dense(self, x: Tensor, weight: WeightTiles, norm: Norm | None, bias: Tensor | None) -> Tensor:
        x = x if norm is None else self.rms_norm(x, *norm)
        return F.linear(x, weight.rows(), bias)


def _few(x: Tensor) -> bool:
    return x.numel() <= FEW_ROWS * x.shape[-1]
