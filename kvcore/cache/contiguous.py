"""Contiguous storage: every layer's rows side by side, in buffers that grow. For graph operations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from kvcore.cache.layer import LayerCache, LayerKernels
from kvcore.layout import CODECS, CacheShape, CacheStats, KVView, Layout
from kvcore.ops import Array, Ops


class ContiguousStorage:
    """A `Storage` on any backend. The first and last ``boundary_layers`` layers stay raw."""

    def __init__(self, ops: Ops, shape: CacheShape, kernels: LayerKernels, *, raise_on_nonfinite: bool = False) -> None:
        self._shape = shape
        raw = Layout(CODECS["raw"], CODECS["raw"], shape.layout.k_dim, shape.layout.v_dim)
        self.layers = [
            LayerCache(
                ops,
                raw if shape.window.is_raw_layer(layer, shape.num_layers) else shape.layout,
                shape.window,
                kernels,
                layer=layer,
                batch=shape.batch,
                kv_heads=shape.num_kv_heads,
                dtype=shape.dtype,
                cap=shape.cap,
                raise_on_nonfinite=raise_on_nonfinite,
            )
            for layer in range(shape.num_layers)
        ]
        if shape.delegated:
            for layer in self.layers:
                layer.folding = False

    def commit(self) -> None:
        for layer in self.layers:
            layer.commit()

    def hand_over(self) -> None:
        for layer in self.layers:
            layer.folding = layer.layout.quantized
        self.commit()

    def trim(self, count: int) -> None:
        for layer in self.layers:
            layer.trim(count)

    def drop(self, first: int, count: int) -> None:
        for layer in self.layers:
            layer.drop(first, count)

    def load(self, views: Sequence[KVView], first_rows: int, folding: bool) -> None:
        for layer, view in zip(self.layers, views, strict=True):
            layer.load(view, first_rows, folding)

    def fork(self) -> ContiguousStorage:
        other = copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    def shorten(self, tokens: int) -> None:
        for layer in self.layers:
            layer.trim(max(0, layer.tokens - tokens))

    def stats(self) -> CacheStats:
        shown = next((layer for layer in self.layers if layer.layout.quantized), self.layers[0])
        raw_row = shown.layout.raw_bytes_per_token(self._shape.dtype)
        heads = self._shape.batch * self._shape.num_kv_heads
        return CacheStats(
            tokens=self.layers[-1].tokens,
            rows_raw=shown.rows_tail + shown.rows_sinks,
            rows_folded=shown.rows_folded,
            kv_bytes=sum(layer.live_bytes() for layer in self.layers),
            kv_bytes_raw=sum(layer.tokens for layer in self.layers) * raw_row * heads,
            kv_bytes_allocated=sum(layer.allocated_bytes() for layer in self.layers),
            nonfinite_rows=sum(layer.nonfinite_rows() for layer in self.layers),
        )

    def arrays(self) -> list[Array]:
        return [array for layer in self.layers for array in layer.arrays()]
