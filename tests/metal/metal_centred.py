"""Views whose K is centred, and what attention over them is: both from the specification, in float64 and NumPy."""

from __future__ import annotations

import numpy as np
from oracle import cast, decode_planes, gaussian

from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.layout import CENTRED_TURBO4, CODECS, TURBO4, KVView, Layout, Rotation

LAYER = 3


def centred_view(
    host: Backend,
    page_rows: tuple[int, ...],
    *,
    dim: int = 64,
    batch: int = 1,
    heads: int = 1,
    tail: int = 5,
    sinks: int = 4,
    size: float = 1.0,
    dtype: str = "float32",
    v_codec: str = "turbo4",
) -> KVView:
    """Pages of ``page_rows`` rows around centres of ``size`` times a row's norm, with their strides in buffers of NaN.

    The codes that the sinks shadow have infinite scales.
    """
    folded, shape = sum(page_rows), (batch, heads)
    k, v = (gaussian(*shape, folded + tail, dim, seed=seed, dtype=dtype) for seed in (0, 1))
    centers = (size * gaussian(*shape, len(page_rows), dim, seed=2)).astype(np.float16)
    indices, scale = spec.turbo_encode(k[:, :, :folded], spec.rotation_matrix(LAYER, "k", dim), TURBO4)
    k_planes = {"codes": spec.pack_bits(indices, 4), "scale": scale}
    if v_codec == "int8":
        v_planes = dict(zip(("codes", "scale"), spec.int8_encode(v[:, :, :folded]), strict=True))
    else:
        indices, scale = spec.turbo_encode(v[:, :, :folded], spec.rotation_matrix(LAYER, "v", dim), TURBO4)
        v_planes = {"codes": spec.pack_bits(indices, 4), "scale": scale}
    for planes in (k_planes, v_planes):
        planes["scale"][:, :, :sinks] = np.inf
    rotations = (Rotation.create(host.ops, LAYER, part, dim) for part in ("k", "v"))
    k_rotation, v_rotation = (r if c != "int8" else None for r, c in zip(rotations, ("turbo4", v_codec), strict=True))
    return KVView(
        Layout(CENTRED_TURBO4, CODECS[v_codec], dim, dim),
        sinks,
        folded,
        *((cast(gaussian(*shape, sinks, dim, seed=seed), dtype) for seed in (3, 4)) if sinks else (None, None)),
        *({name: within(plane) for name, plane in planes.items()} for planes in (k_planes, v_planes)),
        within(k[:, :, folded:]),
        within(v[:, :, folded:]),
        k_rotation,
        v_rotation,
        k_centers=within(centers),
        page_rows=page_rows,
    )


def within(x: np.ndarray) -> np.ndarray:
    """``x`` [B, H, n, W] as the live rows of a larger buffer of NaN, or of ones in every bit."""
    buffer = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] * x.itemsize), 0xFF, np.uint8).view(x.dtype)
    buffer[:, :, : x.shape[2]] = x
    return buffer[:, :, : x.shape[2]]


def centred_attention(q: np.ndarray, view: KVView, scale: float, window: int | None = None) -> np.ndarray:
    """The definition, one sequence, head and query row after another: float64 [B, Hq, n, D].

    A folded row's logit is (R q · levels) · scale + R q · centre of its page.
    """
    batch, q_heads, rows, dim = q.shape
    group, tail, tokens = q_heads // view.tail_k.shape[1], view.tail_k.shape[2], view.tokens
    rotation = spec.rotation_matrix(LAYER, "k", dim)
    codes = view.k_planes["codes"]
    levels = np.array(TURBO4.levels)[np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:3], dim)]
    with np.errstate(invalid="ignore"):  # of rows that the sinks shadow
        v = decode_planes(dict(view.v_planes), view.layout.v.name, LAYER, "v", dim)
    page = [number for number, count in enumerate(view.page_rows) for _ in range(count)]
    out = np.zeros(q.shape, np.float64)
    for b, h, i in np.ndindex(batch, q_heads, rows):
        own, kv = tokens - rows + i, h // group
        wide = q[b, h, i].astype(np.float64)
        turned = rotation @ wide
        logits, values = [], []
        for row in range(tokens):
            if row > own or (window is not None and row <= own - window and row >= view.keep):
                continue
            if row < view.sinks:
                logits.append(wide @ view.sink_k[b, kv, row].astype(np.float64))
                values.append(view.sink_v[b, kv, row].astype(np.float64))
            elif row < view.folded:
                around = turned @ levels[b, kv, row] * float(view.k_planes["scale"][b, kv, row, 0])
                logits.append(around + turned @ view.k_centers[b, kv, page[row]].astype(np.float64))
                values.append(v[b, kv, row])
            else:
                assert row - view.folded < tail
                logits.append(wide @ view.tail_k[b, kv, row - view.folded].astype(np.float64))
                values.append(view.tail_v[b, kv, row - view.folded].astype(np.float64))
        weights = np.exp(scale * (np.array(logits) - max(logits)))
        out[b, h, i] = weights @ np.array(values) / weights.sum()
    return out
