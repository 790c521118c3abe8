"""Caches in pages, and what the tests ask of them."""

from __future__ import annotations

from typing import Any

from oracle import gaussian
from triton_device import DEVICE

from kvcore.backends import Backend
from kvcore.backends.cuda.paged import PagedStorage
from kvcore.cache import Cache, CacheSpec
from kvcore.modes import MODES

TORCH_DEVICE = None if DEVICE == "cuda" else "cpu"  # as `load_backend` takes it
SPEC = CacheSpec(MODES["turbo4"], num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=64, dtype="float16")


def paged(backend: Backend, spec: CacheSpec, **settings: Any) -> Cache:
    """A cache in pages whatever the device: the interpreter needs no GPU, which the registry would ask for."""
    return Cache(backend.ops, spec, PagedStorage(spec.shape(), backend.device, **settings))


def storage_of(cache: Cache) -> PagedStorage:
    assert isinstance(cache.storage, PagedStorage)
    return cache.storage


def live(cache: Cache) -> tuple[int, ...]:
    """Everything that two kinds of storage have to agree on."""
    stats = cache.stats()
    return stats.tokens, stats.rows_raw, stats.rows_folded, stats.kv_bytes, stats.kv_bytes_raw, stats.nonfinite_rows


def no_attention(q: Any, *_: Any, **__: Any) -> Any:
    """Stands for attention where that is not the question."""
    return q


def feed(backend: Backend, cache: Cache, count: int, seed: int = 0, *, commit: bool = True) -> None:
    """Rows into every layer, the same for the same seed and shape."""
    spec, ops = cache.spec, backend.ops
    shape = spec.batch, spec.num_kv_heads, count, spec.head_dim
    k, v = (ops.asarray(gaussian(*shape, seed=2 * seed + i, dtype=spec.dtype)) for i in range(2))
    give(backend, cache, k, v)
    if commit:
        cache.commit()


def give(backend: Backend, cache: Cache, k: Any, v: Any) -> None:
    """Rows k and v [B, Hkv, n, D] into every layer."""
    spec = cache.spec
    q = backend.ops.zeros((spec.batch, spec.num_q_heads, int(k.shape[2]), spec.head_dim), spec.dtype)
    for layer in cache.layers:
        if isinstance(cache.storage, PagedStorage):
            layer.step(q, k, v, 0.125)
        else:
            layer.append(k, v)
