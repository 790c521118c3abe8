"""What the tests compare with: rows, caches and attention, written independently of the code under test."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.cache import Cache, CacheSpec, LayerCache, RowBuffer
from kvcore.layout import CODECS, KVView, Rotation, WindowPolicy
from kvcore.modes import CODEC_FUNCTIONS, MODES
from kvcore.ops import Array, Ops

# test id -> backend, device, package. nox -s tests-cuda names a GPU.
BACKENDS = {
    "reference": ("reference", None, "numpy"),
    "mlx": ("metal", None, "mlx"),
    "torch": ("cuda", os.environ.get("KVCORE_TEST_CUDA_DEVICE", "cpu"), "torch"),
}

QUANTIZED = tuple(name for name, mode in MODES.items() if mode.quantized)
FOLDED_AT_ONCE = tuple(name for name in QUANTIZED if not MODES[name].delegated)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
DTYPES = ("float32", "float16", "bfloat16")
SMALL = WindowPolicy(sink_tokens=4, recent_tokens=32, page_size=32)
NO_WINDOW = WindowPolicy(sink_tokens=0, recent_tokens=0, page_size=32)

# Largest mean relative squared error of a codec on Gaussian rows (design, section 1; int8 by B01).
GAUSSIAN_MSE = {"int8": 1e-4, "turbo4": 0.0095, "turbo3": 0.0349}


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def gaussian(*shape: int, seed: int = 0, rms: float = 1.0, dtype: str = "float32") -> np.ndarray:
    return cast(np.random.default_rng(seed).standard_normal(shape) * rms, dtype)


def relative_mse(decoded: np.ndarray, rows: np.ndarray) -> float:
    """Mean over the rows of ‖decoded - row‖² / ‖row‖²."""
    wide, want = decoded.astype(np.float64), rows.astype(np.float64)
    return float((((wide - want) ** 2).sum(-1) / (want**2).sum(-1)).mean())


def relative_error(out: Any, reference: np.ndarray) -> float:
    """‖out - reference‖ / ‖reference‖ of [B, H, n, D] over n and D, of the worst sequence and head."""
    got, want = np.asarray(out).astype(np.float64), reference.astype(np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float((np.linalg.norm(got - want, axis=(2, 3)) / np.linalg.norm(want, axis=(2, 3))).max())


def new_cache(
    backend: Backend,
    mode: str,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    v_dim: int | None = None,
    dtype: str = "float32",
    window: WindowPolicy = SMALL,
    layers: int = 1,
    batch: int = 1,
    kernels: str = "auto",
) -> Cache:
    """``heads``: query heads and KV heads."""
    shape = CacheSpec(MODES[mode], layers, *heads, dim, dtype, window, batch, v_dim)
    return make_cache(backend, shape, kernels=kernels)


def chunked(tokens: int, sizes: int | Iterable[int]) -> Iterator[slice]:
    """Slices that cover ``tokens`` in steps of ``sizes`` (the last one is cut)."""
    start = 0
    steps = iter(()) if isinstance(sizes, int) else iter(sizes)
    while start < tokens:
        stop = min(tokens, start + (sizes if isinstance(sizes, int) else next(steps)))
        yield slice(start, stop)
        start = stop


def feed(cache: Cache, ops: Ops, k: np.ndarray, v: np.ndarray, *, chunk: int | Sequence[int] = 1 << 20) -> None:
    """Append the same rows to every layer, a chunk at a time, and commit after each."""
    for part in chunked(k.shape[2], chunk):
        for layer in cache.layers:
            layer.append(ops.asarray(k[:, :, part]), ops.asarray(v[:, :, part]))
        cache.commit()
        ops.evaluate(*cache.arrays())


def filled(backend: Backend, mode: str, k: np.ndarray, v: np.ndarray, **settings: Any) -> Cache:
    """A cache that holds ``k`` and ``v``, with the hand-over made where the mode has one."""
    settings.setdefault("heads", (2 * k.shape[1], k.shape[1]))
    shape = {"dim": k.shape[-1], "v_dim": v.shape[-1], "batch": k.shape[0]}
    cache = new_cache(backend, mode, **shape, **settings)
    feed(cache, backend.ops, k, v)
    cache.begin_decode()
    return cache


def attend(backend: Backend, layer: LayerCache, q: np.ndarray, scale: float, window: int | None = None) -> np.ndarray:
    return backend.ops.to_numpy(layer.attend(backend.ops.asarray(q), scale, window))


def exact_attention(
    backend: Backend, layer: LayerCache, q: np.ndarray, scale: float, window: int | None = None
) -> np.ndarray:
    """float64 attention over the rows that the cache stands for."""
    return spec.attention(q, *decoded(backend.ops, layer), scale, window)


def decoded(ops: Ops, layer: LayerCache) -> tuple[np.ndarray, np.ndarray]:
    """K and V as the stored planes say, by the specification: float64 [B, Hkv, tokens, D]."""
    view = layer.view()
    k = _decoded(ops, view, view.layout.k.name, layer.layer, "k", view.layout.k_dim)
    return k, _decoded(ops, view, view.layout.v.name, layer.layer, "v", view.layout.v_dim)


def _decoded(ops: Ops, view: KVView, codec: str, layer: int, part: str, dim: int) -> np.ndarray:
    planes, sinks, tail = (
        (view.k_planes, view.sink_k, view.tail_k) if part == "k" else (view.v_planes, view.sink_v, view.tail_v)
    )
    pieces = [ops.to_numpy(tail).astype(np.float64)]
    if view.folded:
        pages = decode_planes({name: ops.to_numpy(plane) for name, plane in planes.items()}, codec, layer, part, dim)
        if part == "k" and view.layout.k.centred:
            pages = pages + means_of_rows(ops.to_numpy(view.k_centers), view.page_rows, layer)
        pieces.insert(0, pages[:, :, view.sinks :])
    if view.sinks:
        pieces.insert(0, ops.to_numpy(sinks).astype(np.float64))
    return np.concatenate(pieces, 2)


def decode_planes(planes: dict[str, np.ndarray], codec: str, layer: int, part: str, dim: int) -> np.ndarray:
    """Canonical planes to rows, by the specification."""
    if codec == "raw":
        return planes["rows"].astype(np.float64)
    if codec == "int8":
        return spec.int8_decode(planes["codes"], planes["scale"]).astype(np.float64)
    book = CODECS[codec].codebook
    assert book is not None
    indices = unpack_bits(planes["codes"], book.bits)
    return spec.turbo_decode(indices, planes["scale"], spec.rotation_matrix(layer, part, dim), book)


def page_centers(rows: np.ndarray, layer: int, page: int) -> np.ndarray:
    """What is rounded to a float16 centre, float64 [B, H, n, D], by docs/modes.md, one page at a time."""
    batch, heads, count, dim = rows.shape
    rotation, centers = spec.rotation_matrix(layer, "k", dim), np.zeros((batch, heads, count // page, dim))
    for b, h, p in np.ndindex(centers.shape[:3]):
        counted = rows[b, h, p * page + min(4, page // 2) : (p + 1) * page].astype(np.float64)
        counted = counted[np.isfinite(counted).all(-1)]
        if len(counted):
            centers[b, h, p] = rotation @ counted.mean(0)
    return np.clip(centers, -65504, 65504)


def assert_centers_follow_spec(centers: np.ndarray, rows: np.ndarray, layer: int, page: int) -> None:
    """Within half a float16 step, and what a float32 mean of those rows may be off."""
    want = page_centers(rows, layer, page)
    assert centers.dtype == np.float16
    assert centers.shape == want.shape
    size = np.abs(np.where(np.isfinite(rows), rows, 0).astype(np.float64)).max(initial=0)
    step = np.maximum(np.abs(want) * 2.0**-11, 2.0**-25)
    assert (np.abs(centers.astype(np.float64) - want) <= step + 2e-6 * size).all()


def means_of_rows(centers: np.ndarray, page_rows: Sequence[int], layer: int) -> np.ndarray:
    """Rᵀ · centre of each folded row's page, float64 [B, H, folded, D]."""
    means = centers.astype(np.float64) @ spec.rotation_matrix(layer, "k", centers.shape[-1])
    return np.repeat(means, page_rows, axis=2)


def coded_rows(ops: Ops, view: KVView, rows: np.ndarray, layer: int = 0) -> np.ndarray:
    """What K's codec was given of ``rows``, the folded ones: themselves, or without the centres of ``view``."""
    if not view.layout.k.centred:
        return rows
    means = means_of_rows(ops.to_numpy(view.k_centers), view.page_rows, layer)
    return (rows.astype(np.float64) - means).astype(np.float32)


def unpack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `spec.pack_bits`: a little-endian stream of ``bits``-wide numbers per row."""
    stream = np.unpackbits(codes, axis=-1, bitorder="little")
    return stream.reshape(*codes.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def fill_unused(buffer: RowBuffer, byte: int) -> None:
    """Set every byte of the capacity beyond the live rows: 0xff is NaN in every float dtype."""
    ops = buffer._ops
    unused = buffer.capacity - buffer.length
    if unused == 0:
        return
    (array,) = buffer.arrays()
    like = ops.to_numpy(array)[:, :, :unused]
    rows = np.full((*like.shape[:-1], like.shape[-1] * like.itemsize), byte, np.uint8).view(like.dtype)
    buffer._buffer = ops.write_rows(array, ops.asarray(rows), buffer.length)


def to_numpy(ops: Ops, planes: Any) -> dict[str, np.ndarray]:
    return {name: ops.to_numpy(plane) for name, plane in planes.items()}


def encode(backend: Backend, codec: str, rows: np.ndarray, *, layer: int = 0, part: str = "k") -> dict[str, np.ndarray]:
    """Planes of ``rows`` [B, H, T, D] by the backend's graph operations, on the host."""
    return to_numpy(backend.ops, encode_on(backend, codec, backend.ops.asarray(rows), layer=layer, part=part))


def encode_on(backend: Backend, codec: str, rows: Array, *, layer: int = 0, part: str = "k") -> Any:
    ops = backend.ops
    rotation = Rotation.create(ops, layer, part, int(rows.shape[-1])) if CODECS[codec].codebook else None
    return CODEC_FUNCTIONS[codec].encode(ops, rows, rotation)


def fp16_steps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many fp16 numbers lie between two arrays of fp16 numbers, none negative."""
    steps: np.ndarray = np.abs(a.view(np.int16).astype(int) - b.view(np.int16).astype(int))
    return steps


def assert_planes_follow_spec(
    codec: str,
    planes: dict[str, np.ndarray],
    rows: np.ndarray,
    *,
    layer: int = 0,
    part: str = "k",
    near: float = 1e-4,
) -> None:
    """Design, section 4: what may differ from the specification, and where."""
    wide = rows.astype(np.float32)
    if codec == "int8":
        _assert_int8_follows_spec(planes, wide)
        return
    book = CODECS[codec].codebook
    assert book is not None
    z = spec.turbo_normalize(wide, spec.rotation_matrix(layer, part, rows.shape[-1]), book)
    want = np.searchsorted(np.array(book.midpoints), z, side="left")
    got = unpack_bits(planes["codes"], book.bits)
    distance = np.abs(z[..., None] - np.array(book.midpoints)).min(-1)
    assert np.abs(got - want).max() <= 1
    assert distance[got != want].max(initial=0) <= near
    length = np.linalg.norm(book.as_array()[got].astype(np.float64), axis=-1, keepdims=True)
    norm = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    assert fp16_steps(planes["scale"], np.minimum(norm / length, 65504).astype(np.float16)).max() <= 1


def _assert_int8_follows_spec(planes: dict[str, np.ndarray], rows: np.ndarray) -> None:
    codes, scale = spec.int8_encode(rows)
    steps = fp16_steps(planes["scale"], scale)
    exact = np.abs(rows.astype(np.float64)).max(-1, keepdims=True) / 127
    closest = np.minimum(*(np.abs(exact - s.astype(np.float64)) for s in (scale, planes["scale"])))
    assert steps.max() <= 1
    assert (closest[steps > 0] <= 2.0**-22 * exact[steps > 0]).all()
    ratio = rows.astype(np.float64) / planes["scale"].astype(np.float64)
    equal = np.broadcast_to(steps == 0, codes.shape)
    differs = (planes["codes"] != codes) & equal
    assert np.abs(planes["codes"].astype(int) - codes)[equal].max(initial=0) <= 1
    assert np.abs(np.abs(ratio - np.trunc(ratio)) - 0.5)[differs].max(initial=0) <= 1e-5
