"""Rows as attention sees them, from their stored form."""

from __future__ import annotations

from kvcore.layout import Codec, KVView, Rotation
from kvcore.layout.view import Planes
from kvcore.modes import CODEC_FUNCTIONS, pages_of_rows, plain_centers
from kvcore.ops import Array, Ops


def dense_rows(ops: Ops, view: KVView) -> tuple[Array, Array]:
    """K [B, Hkv, tokens, k_dim] and V, float32: sinks and tail raw, pages decoded."""
    layout = view.layout
    k = _dense(ops, view, layout.k, view.k_planes, view.sink_k, view.tail_k, view.k_rotation)
    return k, _dense(ops, view, layout.v, view.v_planes, view.sink_v, view.tail_v, view.v_rotation)


def _dense(
    ops: Ops, view: KVView, codec: Codec, planes: Planes, sinks: Array | None, tail: Array, rotation: Rotation | None
) -> Array:
    pieces = [ops.astype(tail, "float32")]
    if view.folded:
        pages = CODEC_FUNCTIONS[codec.name].decode(ops, planes, rotation)
        if codec.centred and rotation is not None:
            means = plain_centers(ops, view.k_centers, rotation)
            pages = pages + ops.take(means, pages_of_rows(ops, view.page_rows), 2)
        pieces = [pages[:, :, view.sinks :], *pieces]
    if sinks is not None:
        pieces = [ops.astype(sinks, "float32"), *pieces]
    return ops.concat(pieces, 2)
