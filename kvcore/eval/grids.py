"""Rounding to a grid, group by group, over the array protocol: the parts that baselines and trials are made of.

All take and return float32. What would be stored is rounded to float16 before it is used, as a file would hold it.
"""

from __future__ import annotations

from kvcore.ops import Array, Ops

E4M3_MAX = 448.0


def half(ops: Ops, x: Array) -> Array:
    """``x`` as a stored float16 gives it back."""
    return ops.astype(ops.astype(x, "float16"), "float32")


def clip(ops: Ops, x: Array, low: float, high: float) -> Array:
    return ops.minimum(ops.maximum(x, low), high)


def floor(ops: Ops, x: Array) -> Array:
    nearest = ops.round(x)
    return nearest - ops.astype(nearest > x, "float32")


def nonzero(ops: Ops, x: Array) -> Array:
    """A divisor: 1 where ``x`` is 0."""
    return ops.where(x == 0, 1.0, x)


def extremes(ops: Ops, x: Array, axis: int) -> tuple[Array, Array]:
    """Least and greatest along ``axis``, kept with length 1."""
    return -ops.max(-x, axis=axis, keepdims=True), ops.max(x, axis=axis, keepdims=True)


def min_max(ops: Ops, x: Array, bits: int, axis: int) -> Array:
    """Asymmetric rounding along ``axis``: zero = min, scale = (max − min) / (2^bits − 1), both stored as float16."""
    low, high = extremes(ops, x, axis)
    top = float(2**bits - 1)
    scale, zero = half(ops, (high - low) / top), half(ops, low)
    codes = clip(ops, ops.round((x - zero) / nonzero(ops, scale)), 0.0, top)
    return codes * scale + zero


def e4m3(ops: Ops, x: Array) -> Array:
    """The nearest fp8 e4m3 number (OCP FP8, "fn"): 4 significant bits, steps of 2^-9 below 2^-6, at most 448."""
    x = clip(ops, x, -E4M3_MAX, E4M3_MAX)
    wide = x * float(2**20 + 1)  # Veltkamp's splitting keeps the upper 4 of 24 bits, ties to even
    upper = wide - (wide - x)
    return ops.where(ops.abs(x) < 2.0**-6, ops.round(x * 512.0) / 512.0, upper)


def by_channels(ops: Ops, rows: Array, size: int) -> tuple[Array, tuple[int, ...]]:
    """Rows [B, H, T, D] as [B, H, T, D / size, size] float32, and their shape."""
    shape = tuple(int(n) for n in rows.shape)
    return ops.reshape(ops.astype(rows, "float32"), (*shape[:3], shape[3] // size, size)), shape


def by_tokens(ops: Ops, rows: Array, size: int) -> tuple[Array, tuple[int, ...]]:
    """Rows [B, H, T, D] as [B, H, ⌈T / size⌉, size, D] float32, and their shape; the last row fills up the last group,
    which changes no minimum and no maximum."""
    shape = tuple(int(n) for n in rows.shape)
    rows = ops.astype(rows, "float32")
    if missing := -shape[2] % size:
        rows = ops.concat([rows, *[rows[:, :, -1:]] * missing], 2)
    return ops.reshape(rows, (*shape[:2], (shape[2] + missing) // size, size, shape[3])), shape


def ungrouped(ops: Ops, groups: Array, shape: tuple[int, ...]) -> Array:
    """The way back from `by_channels` and `by_tokens`."""
    return ops.reshape(groups, (*shape[:2], -1, shape[3]))[:, :, : shape[2]]
