"""Contiguous storage: every layer's rows side by side, in buffers that grow. For graph operations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from kvcore.cache.layer import LayerCache, LayerKernels, fold_due
from kvcore.layout import CODECS, CacheShape, CacheStats, KVView, Layout
from kvcore.layout.footprint import FOREVER, Rows, rows_needed
from kvcore.ops import Array, Ops


class ContiguousStorage:
    """A `Storage` on any backend. The first and last ``boundary_layers`` layers stay raw."""

    def __init__(self, ops: Ops, shape: CacheShape, kernels: LayerKernels, *, raise_on_nonfinite: bool = False) -> None:
        self._shape = shape
        raw = Layout(CODECS["raw"], CODECS["raw"], shape.layout.k_dim, shape.layout.v_dim)
        layouts = [
            raw if shape.window.is_raw_layer(i, shape.num_layers) else shape.layout for i in range(shape.num_layers)
        ]
        self.layers = [
            LayerCache(
                ops,
                layout,
                shape.window,
                kernels,
                layer=layer,
                batch=shape.batch,
                kv_heads=shape.num_kv_heads,
                dtype=shape.dtype,
                cap=shape.cap,
                room=_room(shape, layout)[0],
                raise_on_nonfinite=raise_on_nonfinite,
            )
            for layer, layout in enumerate(layouts)
        ]
        if shape.delegated:
            for layer in self.layers:
                layer.folding = False

    @property
    def rows_folded(self) -> int:
        return max(layer.rows_folded for layer in self.layers)

    @property
    def live_bytes(self) -> int:
        return sum(layer.live_bytes() for layer in self.layers)

    def commit(self) -> None:
        fold_due(self.layers)

    def hand_over(self) -> None:
        for layer in self.layers:
            room = _room(self._shape, layer.layout)[1]
            # Layer by layer: one gives its raw rows back before the next takes room for quantized ones.
            layer.hand_over(None if room is None else room.tail)

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
            kv_bytes=self.live_bytes,
            kv_bytes_raw=sum(layer.tokens for layer in self.layers) * raw_row * heads,
            kv_bytes_allocated=sum(layer.allocated_bytes() for layer in self.layers),
            nonfinite_rows=sum(layer.nonfinite_rows() for layer in self.layers),
        )

    def arrays(self) -> list[Array]:
        return [array for layer in self.layers for array in layer.arrays()]


def _room(shape: CacheShape, layout: Layout) -> tuple[Rows | None, Rows | None]:
    """Rows that a layer takes room for at once, before and after a hand-over; None without a budget."""
    if shape.budget is None:
        return None, None
    tokens = FOREVER if shape.capacity is None else shape.capacity
    return rows_needed(replace(shape, layout=layout), tokens)
