"""A cap on live rows: what queries see, what stays, and where the next token goes."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import SMALL, chunked, gaussian, relative_error

from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.cache import Cache, CacheSpec
from kvcore.errors import InputError
from kvcore.layout import Cap, WindowPolicy
from kvcore.modes import MODES

DEFAULT = WindowPolicy()
each_mode = pytest.mark.parametrize("mode", MODES)
windows = pytest.mark.parametrize("window", [DEFAULT, SMALL], ids=["128", "32"])
# ‖output - that over the raw rows‖ / ‖the latter‖
CLOSE = {"fp16": 1e-5, "int8": 0.02, "int8-turbo4": 0.1, "turbo4-asym": 0.1, "turbo4-delegated": 0.1}


def capped(backend: Backend, mode: str, cap: Cap, *, window: WindowPolicy = SMALL, batch: int = 1) -> Cache:
    return make_cache(backend, CacheSpec(MODES[mode], 2, 4, 2, 64, "float32", window, batch, cap=cap))


def visible(queries: np.ndarray, keys: np.ndarray, cap: Cap) -> np.ndarray:
    """The rule, bool [queries, keys]."""
    i, j = queries[:, None], keys[None, :]
    return (j <= i) & ((j < cap.keep) | (j > i - (cap.tokens - cap.keep)))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """float64 attention [B, Hq, n, D] of the queries over the rows that ``allowed`` [n, T] lets them see."""
    k, v = (np.repeat(x.astype(np.float64), q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = np.where(allowed, q.astype(np.float64) @ k.swapaxes(2, 3) * 0.125, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ v


def run(backend: Backend, cache: Cache, cap: Cap, chunks: list[int]) -> float:
    """Steps of these sizes; the largest error of an output against the rule over raw rows."""
    total, ops = sum(chunks), backend.ops
    q, k, v = (gaussian(cache.spec.batch, heads, total, 64, seed=i) for i, heads in enumerate((4, 2, 2)))
    worst = 0.0
    for part in chunked(total, chunks):
        cache.begin_step(part.stop - part.start)
        out = [layer.step(*(ops.asarray(x[:, :, part]) for x in (q, k, v)), 0.125) for layer in cache.layers][-1]
        cache.commit()
        keys = np.arange(part.stop)
        want = exact(q[:, :, part], k[:, :, : part.stop], v[:, :, : part.stop], visible(keys[part], keys, cap))
        worst = max(worst, relative_error(ops.to_numpy(out), want))
        assert (cache.offset, cache.tokens) == (part.stop, min(part.stop, cap.tokens))
        assert cache.stats().tokens == cache.tokens
    return worst


@pytest.mark.parametrize("keep", [0, 1, 4, 40, 99])
@pytest.mark.parametrize("chunks", [[300], [64] * 3, [95, *[1] * 12], [90, 1, 20, 1, 150]], ids=str)
def test_a_query_sees_the_kept_rows_and_the_newest(backend: Backend, keep: int, chunks: list[int]) -> None:
    """In prefill as in decode, whatever the chunking; chunks longer than the cap too."""
    cap = Cap(100, keep)
    cache = capped(backend, "fp16", cap, batch=2)
    assert run(backend, cache, cap, chunks) <= 1e-5


@windows
@each_mode
def test_every_mode_keeps_the_rule_and_folds(backend: Backend, mode: str, window: WindowPolicy) -> None:
    """Cap 300 of 700 tokens, then decode; with the default window too rows are folded."""
    cap = Cap(300)
    cache = capped(backend, mode, cap, window=window)
    close = CLOSE.get(mode, 0.2)
    assert run(backend, cache, cap, [128] * 5) <= close
    cache.begin_decode()
    assert (cache.offset, cache.tokens) == (640, 300)
    assert (cache.stats().rows_folded > 0) == MODES[mode].quantized
    k, _ = cache.dense(1)
    want = gaussian(1, 2, 640, 64, seed=1)
    got = backend.ops.to_numpy(k)
    kept = np.concatenate([want[:, :, :4], want[:, :, -296:]], 2)
    assert np.array_equal(got[:, :, :4], kept[:, :, :4]), "sinks stay raw"
    assert relative_error(got, kept) <= 0.15


@pytest.mark.parametrize("keep", [0, 2, 4, 60])
def test_the_middle_goes_from_every_region(backend: Backend, keep: int) -> None:
    """Until only raw rows are left behind the kept ones; the kept ones stay as they are stored."""
    cap = Cap(keep + 60, keep)
    cache = capped(backend, "int8", Cap(200, keep))
    run(backend, cache, Cap(200, keep), [200])
    before = [backend.ops.to_numpy(x)[:, :, :keep] for x in cache.dense(0)]
    sinks, folded = cache.layers[0].rows_sinks, cache.layers[0].rows_folded
    cache.drop(keep, 200 - cap.tokens)
    layer = cache.layers[0]
    assert (layer.rows_sinks, layer.rows_folded) == (min(sinks, keep), keep + folded - 140)
    assert (cache.tokens, cache.offset) == (cap.tokens, 200)
    for old, now in zip(before, cache.dense(0), strict=True):
        assert np.array_equal(old[:, :, 4:], backend.ops.to_numpy(now)[:, :, 4:keep])
        if keep >= 4:
            assert np.array_equal(old, backend.ops.to_numpy(now)[:, :, :keep])


def test_a_cap_below_the_window_keeps_every_row_raw(backend: Backend) -> None:
    """Once the rows of the prompt's pages are gone."""
    assert Cap(259).never_folds(DEFAULT)
    assert not Cap(260).never_folds(DEFAULT)
    for tokens, folded in ((67, False), (68, True)):
        cache = capped(backend, "int8", Cap(tokens))
        run(backend, cache, Cap(tokens), [60, 100, *[1] * 36])
        assert (cache.stats().rows_folded > 4) == folded
    assert Cap(67).never_folds(SMALL)


def test_positions_after_trims(backend: Backend) -> None:
    """Back to behind the last row that stays; a hole that is cut away is not counted any more."""
    cap = Cap(100)
    cache = capped(backend, "turbo4", cap)
    run(backend, cache, cap, [100, 50, 100])
    cache.trim(30)
    assert (cache.tokens, cache.offset) == (70, 220)
    cache.trim(66)
    assert (cache.tokens, cache.offset) == (4, 4)
    cache.trim(0)
    cache.trim(4)
    assert (cache.tokens, cache.offset) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "keep", "message"),
    [
        (0, 0, "max_kv_size 0: must be 1 or more"),
        (10, -1, "keep -1: must be 0 or more"),
        (4, 4, "keep 4: must be below max_kv_size 4, so that newer tokens have room"),
    ],
)
def test_a_cap_that_cannot_be(tokens: int, keep: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cap(tokens, keep)


@pytest.mark.parametrize(("first", "count"), [(-1, 5), (0, -1), (90, 20), (101, 0)])
def test_drop_refuses_what_is_not_there(backend: Backend, first: int, count: int) -> None:
    cache = capped(backend, "int8", Cap(100))
    run(backend, cache, Cap(100), [100])
    with pytest.raises(InputError, match=f"cannot drop {count} rows from row {first} on: the cache holds 100"):
        cache.drop(first, count)
    assert cache.offset == 100


@pytest.mark.parametrize("mode", ["int8", "turbo4", "turbo4-delegated"])
@windows
def test_B14_a_capped_quantized_cache_never_grows(reference: Backend, mode: str, window: WindowPolicy) -> None:
    """2,000 tokens one by one under a cap of 300: live rows stay, and bytes move with the raw tail alone."""
    cache, ops = capped(reference, mode, Cap(300), window=window), reference.ops
    cache.begin_decode()
    rows = gaussian(1, 2, 1, 64)
    sizes, allocated = [], []
    for step in range(2000):
        cache.begin_step(1)
        for layer in cache.layers:
            layer.append(ops.asarray(rows), ops.asarray(rows))
        cache.commit()
        assert cache.tokens == min(step + 1, 300)
        if step >= 600:
            sizes.append(cache.stats().kv_bytes)
            allocated.append(cache.stats().kv_bytes_allocated)
    assert cache.stats().rows_folded > 0
    raw_row = MODES[mode].layout(64).raw_bytes_per_token("float32") * 2 * 2
    assert max(sizes) - min(sizes) <= window.page_size * raw_row
    assert max(allocated[700:]) == max(allocated[:700])


@pytest.mark.parametrize("dim", [80, 96, 112])
@pytest.mark.parametrize("mode", ["turbo4", "int8", "int8-turbo4"])
def test_B103_odd_widths_shift_without_touching_what_stays(reference: Backend, mode: str, dim: int) -> None:
    """Kept quantized rows are the same bytes after every trim."""
    cache = make_cache(reference, CacheSpec(MODES[mode], 1, 4, 2, dim, "float32", SMALL, cap=Cap(150, 40)))
    layer, before = cache.layers[0], None
    for seed in range(40):
        rows = gaussian(1, 2, 7, dim, seed=seed)
        cache.begin_step(7)
        out = layer.step(gaussian(1, 4, 7, dim, seed=seed), rows, rows, dim**-0.5)
        cache.commit()
        assert np.isfinite(out).all()
        if cache.offset > 160:
            kept = {name: plane[:, :, 4:40].copy() for name, plane in layer.view().k_planes.items()}
            before = before or kept
            assert all(np.array_equal(kept[name], before[name]) for name in kept)
    assert (cache.tokens, cache.offset) == (150, 280)
    assert before is not None
    assert layer.rows_folded > 40


@each_mode
@pytest.mark.parametrize("keep", [0, 4, 16])
def test_B111_kept_rows_live_and_sinks_stay_raw(reference: Backend, mode: str, keep: int) -> None:
    """In the cache, in a fork, in a restored snapshot: the first rows are those that came first."""
    cap = Cap(200, keep)
    cache = capped(reference, mode, cap)
    run(reference, cache, cap, [90] * 6)
    restored = capped(reference, mode, cap)
    restored.load(cache.export())
    first, sinks = gaussian(1, 2, 540, 64, seed=1)[:, :, :keep], min(keep, 4)
    for each in (cache, cache.fork(), restored):
        assert (each.tokens, each.offset, each.spec.cap) == (200, 540, cap)
        k, _ = each.dense(1)
        assert np.array_equal(k[:, :, :sinks], first[:, :, :sinks])
        assert relative_error(k[:, :, :keep], first) <= 0.15 if keep else True
