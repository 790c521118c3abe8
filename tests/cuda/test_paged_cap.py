"""A cap on pages: the same rows, positions and outputs as on contiguous rows, and pages that are given back."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from oracle import gaussian, relative_error

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, feed, live, no_attention, paged, storage_of

from kvcore.attention import make_cache
from kvcore.backends import Backend, load_backend
from kvcore.cache import Cache
from kvcore.errors import InputError
from kvcore.layout import Cap
from kvcore.modes import MODES

ONE = replace(SPEC, num_layers=1)
# Rows that a delegated cache drops before its hand-over leave holes in raw pages, which fold as they are: whole pages
# on pages, as many live rows elsewhere.
FOLDED_ALIKE = [mode for mode in MODES if mode != "turbo4-delegated"]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cuda", TORCH_DEVICE)


class Pair:
    """The same steps on pages and on contiguous rows."""

    def __init__(self, backend: Backend, mode: str, cap: Cap, batch: int = 1) -> None:
        self.backend, self.alike = backend, mode in FOLDED_ALIKE
        spec = replace(ONE, mode=MODES[mode], cap=cap, batch=batch)
        self.caches = paged(backend, spec), make_cache(backend, spec, kernels="graph")
        self.seed = 0

    def step(self, count: int) -> None:
        ops, batch = self.backend.ops, self.caches[0].spec.batch
        self.seed += 3
        rows = [
            gaussian(batch, heads, count, 64, seed=self.seed + i, dtype="float16") for i, heads in enumerate((2, 1, 1))
        ]
        outs = []
        for cache in self.caches:
            cache.begin_step(count)
            outs.append(ops.to_numpy(cache.layers[0].step(*map(ops.asarray, rows), 0.125)))
            cache.commit()
        assert relative_error(outs[0], outs[1].astype(np.float64)) <= (4e-3 if self.alike else 0.1)
        self.check()

    def check(self) -> None:
        pages, contiguous = self.caches
        assert (pages.offset, pages.tokens) == (contiguous.offset, contiguous.tokens)
        if self.alike:
            assert live(pages) == live(contiguous)

    def both_hold_the_same_rows(self) -> None:
        for got, want in zip(self.caches[0].dense(0), self.caches[1].dense(0), strict=True):
            assert float((got - want).norm() / want.norm()) <= (0.03 if self.alike else 0.1)


# Modes whose codecs others have too come in full alone: the interpreter takes its time.
@pytest.mark.parametrize(
    ("mode", "keep"),
    [
        *(pytest.param(mode, 4, marks=[pytest.mark.full] if mode.startswith("turbo4-") else []) for mode in MODES),
        ("int8", 0),
        ("turbo4-asym", 30),
    ],
)
def test_steps_under_a_cap_are_those_on_contiguous_rows(backend: Backend, mode: str, keep: int) -> None:
    """Prefill beyond the cap, steps of few and of one row, folded rows that are cut from their front."""
    pair = Pair(backend, mode, Cap(270 + keep, keep))
    for count in (260, 130, 1):
        pair.step(count)
    for cache in pair.caches:
        cache.begin_decode()
    for count in (5, 120, 1):
        pair.step(count)
    assert pair.caches[0].tokens == 270 + keep
    assert (pair.caches[0].stats().rows_folded > 0) == MODES[mode].quantized
    pair.both_hold_the_same_rows()
    for cache in pair.caches:
        cache.trim(200)
    pair.check()
    pair.step(1)


def test_a_batch_under_a_cap(backend: Backend) -> None:
    pair = Pair(backend, "turbo4", Cap(300), batch=2)
    for count in (290, 60, 1):
        pair.step(count)
    pair.both_hold_the_same_rows()


def test_positions_on_the_device_know_of_holes(backend: Backend) -> None:
    """After a load, a trim, a rewind to before a hole, and a trim of rows before which the newest were dropped."""

    def angle(cache: Cache) -> float:
        cache.begin_step(1)
        cos, sin = cache.angles(np.array([1e-3], np.float32), 1)  # type: ignore[misc]
        turn = 1e3 * float(torch.atan2(sin.flatten()[0], cos.flatten()[0]))
        cache.shorten(cache.tokens)
        return turn

    spec = replace(ONE, cap=Cap(300, 4))
    cache = paged(backend, spec, attend=no_attention)
    for count in (290, 60, 30):
        cache.begin_step(count)
        feed(backend, cache, count, count)
        cache.commit()
    loaded = paged(backend, spec, attend=no_attention)
    loaded.load(cache.export())
    assert loaded.offset == 380
    assert angle(loaded) == pytest.approx(380, abs=0.01)
    cache.rewind(300)
    assert (cache.offset, angle(cache)) == (300, pytest.approx(300, abs=0.01))
    cache.rewind(20)
    assert (cache.offset, angle(cache)) == (4, pytest.approx(4, abs=0.01))
    cache = paged(backend, ONE, attend=no_attention)
    feed(backend, cache, 50, 0)
    cache.commit()
    cache.drop(40, 10)
    assert (cache.offset, angle(cache)) == (50, pytest.approx(50, abs=0.01))
    cache.trim(5)
    assert (cache.offset, angle(cache)) == (35, pytest.approx(35, abs=0.01))


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_a_small_cap_with_rows_all_raw(backend: Backend, mode: str) -> None:
    """All in one or two pages, the page of the kept rows in the table twice."""
    pair = Pair(backend, mode, Cap(40))
    for count in (30, 36, 1, 17, 1, 36, 36, 1):
        pair.step(count)
    pair.both_hold_the_same_rows()
    assert pair.caches[0].stats().rows_folded == 0


def test_more_rows_than_the_window_takes(backend: Backend) -> None:
    cache = paged(backend, replace(ONE, mode=MODES["fp16"], cap=Cap(40)), attend=no_attention)
    with pytest.raises(
        InputError, match="50 new rows in a step: max_kv_size 40 with keep 4 takes at most 36 at a time"
    ):
        feed(backend, cache, 50)


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4-delegated"])
def test_a_capped_cache_takes_no_more_pages_however_long_it_runs(backend: Backend, mode: str) -> None:
    cap = Cap(400)
    cache = paged(backend, replace(ONE, mode=MODES[mode], cap=cap, capacity=100_000), attend=no_attention)
    allocated = cache.stats().kv_bytes_allocated
    for seed in range(4):
        cache.begin_step(300)
        feed(backend, cache, 300, seed)
    cache.begin_decode()
    for _ in range(140):
        cache.begin_step(1)
        feed(backend, cache, 1)
    storage = storage_of(cache)
    used = sum(pool.pages - pool.free_pages for pool in (storage.raw, storage.native) if pool is not None)
    assert (cache.offset, cache.tokens) == (1340, 400)
    assert used <= 7
    assert cache.stats().kv_bytes_allocated <= 2 * allocated
    cache.trim(400)
    assert storage.raw.free_pages == storage.raw.pages


def test_dropping_a_row_of_a_long_cache_is_cheap(backend: Backend) -> None:
    """32k tokens: no copy, and no look at every page."""
    cache = paged(backend, replace(ONE, mode=MODES["fp16"], capacity=33_000), attend=no_attention)
    tables = storage_of(cache).tables
    tables.extend({0: 32_768})
    planes = [plane.data_ptr() for plane in cache.arrays()]
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        tables.drop(0, 4, 1)
        seconds.append(time.perf_counter() - start)
    assert [plane.data_ptr() for plane in cache.arrays()] == planes
    assert min(seconds) < 50e-6
    assert tables.length(0) == 32_718


def test_rows_that_are_not_there_cannot_be_dropped(backend: Backend) -> None:
    cache: Cache = paged(backend, ONE, attend=no_attention)
    feed(backend, cache, 100)
    with pytest.raises(InputError, match="cannot drop 20 rows from row 90 on: the cache holds 100"):
        cache.drop(90, 20)
