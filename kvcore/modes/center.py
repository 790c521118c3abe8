"""Centres of K's pages: docs/modes.md, "Centres". Rows [B, H, n · page, D] of any float dtype, arithmetic in float32.

A page is the rows that one fold makes a page of. Its centre stands in K's rotated basis, so that attention adds
R q · centre to the logits of its rows.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvcore.layout import Rotation
from kvcore.layout.planes import center_skips
from kvcore.modes.int8 import FP16_MAX
from kvcore.ops import Array, Ops


def page_centers(ops: Ops, rows: Array, rotation: Rotation, page: int) -> Array:
    """R times each page's mean, float16 [B, H, n, D]; rows that are not finite stay out of it."""
    pages = _by_pages(ops, rows, page)[:, :, :, center_skips(page) :]
    finite = ops.all(ops.isfinite(pages), axis=-1, keepdims=True)
    total = ops.sum(ops.where(finite, pages, 0.0), axis=-2)
    count = ops.sum(ops.astype(finite, "float32"), axis=-2)
    center = rotation.apply(ops, total / ops.maximum(count, 1.0))
    center = ops.where(ops.isfinite(center), center, 0.0)
    return ops.astype(ops.minimum(ops.maximum(center, -FP16_MAX), FP16_MAX), "float16")


def centred_rows(ops: Ops, rows: Array, centers: Array, rotation: Rotation, page: int) -> Array:
    """What is quantized: the rows minus Rᵀ times their page's centre, float32 [B, H, n · page, D]."""
    batch, heads, count, dim = (int(n) for n in rows.shape)
    means = ops.reshape(plain_centers(ops, centers, rotation), (batch, heads, count // page, 1, dim))
    return ops.reshape(_by_pages(ops, rows, page) - means, (batch, heads, count, dim))


def plain_centers(ops: Ops, centers: Array, rotation: Rotation) -> Array:
    """Rᵀ times the centres, float32: in the basis of the rows."""
    return rotation.undo(ops, ops.astype(centers, "float32"))


@lru_cache(maxsize=32)
def pages_of_rows(ops: Ops, page_rows: tuple[int, ...]) -> Array:
    """The page of each folded row, int32 [folded]; the same for all layers, and for steps until a page folds."""
    return ops.asarray(np.repeat(np.arange(len(page_rows), dtype=np.int32), page_rows))


def _by_pages(ops: Ops, rows: Array, page: int) -> Array:
    """float32 [B, H, n, page, D]."""
    batch, heads, count, dim = (int(n) for n in rows.shape)
    return ops.reshape(ops.astype(rows, "float32"), (batch, heads, count // page, page, dim))
