"""One layer's rows as a library wants to handle them: filled from a view, reordered, attended under a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kvcore.attention import (
    SCORE_ELEMENTS,
    _attend_pages,
    _attend_raw,
    _merge,
    decide,
    default_registry,
    layer_kernels,
)
from kvcore.backends import Backend
from kvcore.cache import CacheSpec, CacheStats, LayerCache
from kvcore.errors import UnsupportedError
from kvcore.layout import CODECS, KVView, Layout
from kvcore.ops import Array, Ops


class Rows(LayerCache):
    """A `LayerCache` that can start from a view, pick sequences of its batch, and take a mask."""

    def fill(self, view: KVView) -> None:
        """Take over the rows of ``view``; this layer is empty and has its layout, batch and heads."""
        for part, planes, sinks, tail in (
            (self._k, view.k_planes, view.sink_k, view.tail_k),
            (self._v, view.v_planes, view.sink_v, view.tail_v),
        ):
            part.tail.append(tail)
            if sinks is not None:
                part.sinks.append(sinks)
            for name, plane in planes.items():
                part.folded[name].append(plane[:, :, : view.folded])
        self._load_centers(view)
        self._folded_rows = view.folded

    @property
    def batch(self) -> int:
        return self._shape[0]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self._shape[1]

    def raw_bytes(self) -> int:
        """What the live tokens would cost with every row raw."""
        batch, heads = self._shape
        return batch * heads * self.tokens * self.layout.raw_bytes_per_token(self.dtype)

    def like(self, batch: int) -> Rows:
        """Empty rows of the same layer and settings for another batch."""
        rows = Rows(
            self._ops,
            self.layout,
            self._window,
            self._kernels,
            layer=self.layer,
            batch=batch,
            kv_heads=self._shape[1],
            dtype=self.dtype,
            raise_on_nonfinite=self._raise_on_nonfinite,
        )
        rows.folding = self.folding
        return rows

    def selected(self, indices: Array) -> Rows:
        """The sequences ``indices`` (int [n]) of the batch, in that order; one may come twice. A copy."""
        rows = self.like(int(indices.shape[0]))
        rows._first_rows = self._first_rows
        rows.fill(select(self._ops, self.view(), indices))
        return rows

    def copy(self) -> Rows:
        """The same rows, in the same arrays until one of the two writes."""
        rows = self.like(self.batch)
        rows._k, rows._v = self._k.fork(), self._v.fork()
        rows._folded_rows, rows._first_rows = self._folded_rows, self._first_rows
        return rows

    def attend_masked(self, q: Array, scale: float, allowed: Array) -> Array:
        """Attention of ``q`` [B, Hq, n, k_dim] over the live rows that ``allowed`` names; zeros where it names none.

        ``allowed`` bool [B or 1, Hq or 1, n, tokens], oldest row first.
        """
        return attend_masked(self._ops, q, self.view(), scale, allowed)


def attend_masked(ops: Ops, q: Array, view: KVView, scale: float, allowed: Array) -> Array:
    """`kvcore.attention.attend_graph` under a mask for each sequence."""
    batch, q_heads, rows, dim = (int(n) for n in q.shape)
    kv_heads = int(view.tail_k.shape[1])
    group = q_heads // kv_heads
    grouped = ops.reshape(ops.astype(q, "float32") * scale, (batch, kv_heads, group * rows, dim))
    step = max(128, SCORE_ELEMENTS // (batch * q_heads * rows))
    mask = cast(Any, _GivenMask(ops, _by_group(ops, allowed, kv_heads, group)))
    found = (part(ops, grouped, view, mask, step) for part in (_attend_pages, _attend_raw))
    partials = [partial for partial in found if partial is not None]
    merged = partials[0] if len(partials) == 1 else _merge(ops, *partials)
    out = merged.out / ops.where(merged.total == 0, 1.0, merged.total)
    return ops.astype(ops.reshape(out, (batch, q_heads, rows, int(out.shape[-1]))), ops.dtype(q))


def _by_group(ops: Ops, allowed: Array, kv_heads: int, group: int) -> Array:
    """[B or 1, Hkv or 1, group · n, tokens] of a mask [B or 1, Hq or 1, n, tokens]."""
    batch, heads, rows, tokens = (int(n) for n in allowed.shape)
    if heads == 1:
        return allowed if group == 1 else ops.concat([allowed] * group, 2)
    return ops.reshape(allowed, (batch, kv_heads, group * rows, tokens))


@dataclass(frozen=True, slots=True)
class _GivenMask:
    """A mask as the blocks of attention ask for it."""

    ops: Ops
    allowed: Array

    def block(self, positions: np.ndarray) -> Array:
        return self.ops.take(self.allowed, self.ops.asarray(positions.astype(np.int32)), 3)


def open_rows(backend: Backend, spec: CacheSpec, layer: int, *, kernels: str = "auto") -> Rows:
    """Empty rows of the model's layer number ``layer``; raw where the window has boundary layers.

    They are contiguous: kernels for pages do not serve them, graph operations do instead. UnsupportedError under the
    policy "fused" where no fused kernel for contiguous rows serves them.
    """
    decisions = decide(backend, default_registry(backend), spec, kernels)
    if decisions[0].storage == "paged":
        if kernels == "fused":
            why = f"{decisions[1].kernel} works on pages, and these rows are contiguous"
            raise UnsupportedError(f"{why}: use kernels='auto'", [why])
        decisions = decide(backend, default_registry(backend), spec, "graph")
    shape = spec.shape()
    layout = shape.layout
    if shape.window.is_raw_layer(layer, shape.num_layers):
        layout = Layout(CODECS["raw"], CODECS["raw"], layout.k_dim, layout.v_dim)
    rows = Rows(
        backend.ops,
        layout,
        shape.window,
        layer_kernels(decisions),
        layer=layer,
        batch=shape.batch,
        kv_heads=shape.num_kv_heads,
        dtype=shape.dtype,
        raise_on_nonfinite=backend.raise_on_nonfinite,
    )
    if shape.delegated:
        rows.folding = False
    return rows


def select(ops: Ops, view: KVView, indices: Array) -> KVView:
    """The same rows for the sequences ``indices`` of the batch, in that order; one may come twice."""

    def pick(array: Array | None) -> Array | None:
        return None if array is None else ops.take(array, indices, 0)

    return KVView(
        layout=view.layout,
        sinks=view.sinks,
        folded=view.folded,
        sink_k=pick(view.sink_k),
        sink_v=pick(view.sink_v),
        k_planes={name: pick(plane) for name, plane in view.k_planes.items()},
        v_planes={name: pick(plane) for name, plane in view.v_planes.items()},
        tail_k=pick(view.tail_k),
        tail_v=pick(view.tail_v),
        k_rotation=view.k_rotation,
        v_rotation=view.v_rotation,
        k_centers=pick(view.k_centers),
        page_rows=view.page_rows,
    )


def stats(layers: Sequence[Rows], tokens: int) -> CacheStats:
    """What the layers hold together. Rows are those of the first layer that quantizes, ``tokens`` those seen."""
    shown = next((layer for layer in layers if layer.layout.quantized), layers[0])
    return CacheStats(
        tokens=tokens,
        rows_raw=shown.rows_tail + shown.rows_sinks,
        rows_folded=shown.rows_folded,
        kv_bytes=sum(layer.live_bytes() for layer in layers),
        kv_bytes_raw=sum(layer.raw_bytes() for layer in layers),
        kv_bytes_allocated=sum(layer.allocated_bytes() for layer in layers),
        nonfinite_rows=sum(layer.nonfinite_rows() for layer in layers),
    )
