"""Decode attention through MLX, mode by mode, beside MLX's own: interleaved, cold, checked before it is timed.

A run attends once in each of several layers whose rows together exceed the caches, and evaluates them in one go, so
that a launch costs what it costs in a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import mlx.core as mx
import numpy as np

from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.bench.shape import Shape
from kvcore.cache import Cache, CacheSpec
from kvcore.errors import KvcoreError
from kvcore.modes import MODES

COLUMNS = ("shape", "mode", "kernel", "dtype", "us", "us_p10", "us_p90", "speedup", "gb_per_s", "error")
COLD_BYTES = 256 << 20  # of the smallest mode: more than the last-level cache of an Apple GPU
MOST_BYTES = 16 << 30  # of the raw rows
LIMITS = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-4}
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to attend in every layer: ``run`` gives lazy outputs; ``kv_bytes`` are those of one layer."""

    mode: str
    kernel: str
    run: Callable[[], list[Any]]
    kv_bytes: int
    error: float


def run(
    backend: Backend,
    shapes: Sequence[Shape],
    modes: Sequence[str],
    *,
    dtype: str = "float16",
    repeats: int = 11,
    layers: int | None = None,
    policies: Sequence[str] = ("auto", "graph"),
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row per shape, mode and kernel, and one for `mx.fast.scaled_dot_product_attention` over raw rows, which the
    others are compared with. ``layers`` instead of as many as the caches ask for. KvcoreError where an error exceeds
    its limit: a wrong result is not timed."""
    rows = []
    for shape in shapes:
        count = layers or _layer_count(shape, modes, dtype)
        progress(f"{shape}: building {count} layers")
        variants = list(_variants(backend, shape, modes, dtype, count, policies))
        progress(f"{shape}: timing {len(variants)} variants")
        times = _interleaved([variant.run for variant in variants], repeats)
        base = median(times[0])
        rows += [
            _row(shape, variant, sample, count, base, dtype) for variant, sample in zip(variants, times, strict=True)
        ]
        del variants
        mx.clear_cache()
    return rows


def _layer_count(shape: Shape, modes: Sequence[str], dtype: str) -> int:
    rows = shape.batch * shape.tokens * shape.kv_heads
    layouts = [MODES[mode].layout(shape.head_dim) for mode in modes]
    smallest = min(layout.bytes_per_token(dtype) for layout in layouts) * rows
    fits = MOST_BYTES // (layouts[0].raw_bytes_per_token(dtype) * rows * (len(modes) + 1))
    return int(max(2, min(math.ceil(COLD_BYTES / smallest), fits, 64)))


def _variants(
    backend: Backend, shape: Shape, modes: Sequence[str], dtype: str, count: int, policies: Sequence[str]
) -> Iterator[Variant]:
    generator = np.random.default_rng(0)
    ops, heads = backend.ops, (shape.q_heads, shape.kv_heads, shape.kv_heads)
    rows = (1, shape.tokens, shape.tokens)
    q, k, v = (
        ops.asarray(generator.standard_normal((shape.batch, h, n, shape.head_dim), np.float32), dtype)
        for h, n in zip(heads, rows, strict=True)
    )
    scale = shape.head_dim**-0.5
    copies = [(k + 0, v + 0) for _ in range(count)]
    ops.evaluate(*(x for pair in copies for x in pair))
    dense_q, dense_k, dense_v = (ops.to_numpy(x).astype(np.float32) for x in (q, k, v))
    want = spec.attention(dense_q, dense_k, dense_v, scale)

    def library() -> list[Any]:
        return [mx.fast.scaled_dot_product_attention(q, a, b, scale=scale) for a, b in copies]

    raw_bytes = 2 * k.nbytes
    yield _checked(Variant("fp16", "mx.fast.sdpa", library, raw_bytes, _error(ops.to_numpy(library()[0]), want)), dtype)
    for mode in modes:
        seen: set[str] = set()
        for policy in policies:
            cache = _filled(backend, mode, shape, dtype, count, k, v, policy)
            kernel = cache.decisions[1].kernel
            if kernel in seen:
                continue
            seen.add(kernel)
            yield _checked(_variant(backend, cache, mode, kernel, q, scale), dtype)


def _filled(backend: Backend, mode: str, shape: Shape, dtype: str, count: int, k: Any, v: Any, policy: str) -> Cache:
    made = CacheSpec(MODES[mode], count, shape.q_heads, shape.kv_heads, shape.head_dim, dtype, batch=shape.batch)
    cache = make_cache(backend, made, kernels=policy)
    layers: list[Any] = list(cache.layers)
    for start in range(0, shape.tokens, _CHUNK):
        for layer in layers:
            layer.append(k[:, :, start : start + _CHUNK], v[:, :, start : start + _CHUNK])
        cache.commit()
        backend.ops.evaluate(*cache.arrays())
    cache.begin_decode()
    backend.ops.evaluate(*cache.arrays())
    return cache


def _variant(backend: Backend, cache: Cache, mode: str, kernel: str, q: Any, scale: float) -> Variant:
    layers: list[Any] = list(cache.layers)

    def attend() -> list[Any]:
        return [layer.attend(q, scale) for layer in layers]

    k, v = (backend.ops.to_numpy(x) for x in cache.dense(0))
    want = spec.attention(backend.ops.to_numpy(q).astype(np.float32), k, v, scale)
    error = _error(backend.ops.to_numpy(attend()[0]), want)
    return Variant(mode, kernel, attend, cache.stats().kv_bytes // len(layers), error)


def _checked(variant: Variant, dtype: str) -> Variant:
    if not variant.error <= LIMITS[dtype]:
        raise KvcoreError(
            f"{variant.mode}, {variant.kernel}: error {variant.error:.1e} exceeds {LIMITS[dtype]:.0e}: not timed"
        )
    return variant


def _error(out: np.ndarray, want: np.ndarray) -> float:
    """The worst ‖out − want‖ / ‖want‖ of a sequence and head."""
    difference = np.linalg.norm(out.astype(np.float64) - want, axis=(2, 3))
    return float((difference / np.linalg.norm(want, axis=(2, 3))).max())


def _interleaved(runs: Sequence[Callable[[], list[Any]]], repeats: int) -> list[list[float]]:
    """Microseconds of each run, the runs taking turns; three rounds of warm-up are dropped."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 3):
        for one, sample in zip(runs, times, strict=True):
            mx.synchronize()
            start = time.perf_counter()
            mx.eval(one())
            mx.synchronize()
            if repeat >= 3:
                sample.append((time.perf_counter() - start) * 1e6)
    return times


def _row(shape: Shape, variant: Variant, sample: list[float], layers: int, base: float, dtype: str) -> dict[str, Any]:
    us = median(sample) / layers
    deciles = quantiles(sample, n=10) if len(sample) > 1 else [sample[0]]
    return {
        "shape": str(shape),
        "mode": variant.mode,
        "kernel": variant.kernel,
        "dtype": dtype,
        "us": us,
        "us_p10": deciles[0] / layers,
        "us_p90": deciles[-1] / layers,
        "speedup": base / median(sample),
        "gb_per_s": variant.kv_bytes / us / 1e3,
        "error": variant.error,
        "layers": layers,
        "repeats": len(sample),
    }
