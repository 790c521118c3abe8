"""Centres of K's pages, against docs/modes.md read in float64: what they are, and how long they live."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from oracle import (
    DTYPES,
    SMALL,
    assert_centers_follow_spec,
    assert_planes_follow_spec,
    attend,
    cast,
    coded_rows,
    exact_attention,
    feed,
    filled,
    gaussian,
    new_cache,
    page_centers,
    relative_error,
    to_numpy,
)

from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.cache import Cache, CacheSpec
from kvcore.cache.part import Centers
from kvcore.cache.rows import RowBuffer
from kvcore.layout import CENTRED_TURBO4, CODECS, Layout, Rotation, WindowPolicy
from kvcore.layout.footprint import bytes_needed, live_bytes
from kvcore.modes import MODES, centred_rows
from kvcore.modes import page_centers as centers_of

OFFSET = 20 * gaussian(1, 2, 1, 64, seed=9)


def stored_centers(backend: Backend, cache: Cache, layer: int = 0) -> np.ndarray:
    return backend.ops.to_numpy(cache.layers[layer].view().k_centers)


# What a centre is


@pytest.mark.parametrize("page", [1, 2, 3, 8, 32, 128])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_centre_is_the_rotated_mean_of_a_pages_rows(backend: Backend, dim: int, page: int) -> None:
    """Without its first rows: four, or half of a page that is shorter than eight."""
    ops, rows = backend.ops, gaussian(2, 2, 3 * page, dim) + gaussian(1, 2, 1, dim, seed=3)
    rows[:, :, : min(4, page // 2)] = 1e4  # of page 0, as sinks
    rotation = Rotation.create(ops, 7, "k", dim)
    centers = centers_of(ops, ops.asarray(rows), rotation, page)
    assert_centers_follow_spec(ops.to_numpy(centers), rows, 7, page)
    left = ops.to_numpy(centred_rows(ops, ops.asarray(rows), centers, rotation, page))
    means = np.repeat(ops.to_numpy(centers).astype(np.float64) @ spec.rotation_matrix(7, "k", dim), page, 2)
    assert left.dtype == np.float32
    np.testing.assert_allclose(left, rows - means, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fold_stores_codes_of_what_is_left(backend: Backend, dtype: str) -> None:
    ops, rows = backend.ops, cast(gaussian(1, 2, 160, 64) + OFFSET, dtype)
    cache = new_cache(backend, "turbo4", dtype=dtype, layers=2, window=SMALL)
    feed(cache, ops, rows, rows, chunk=45)
    view, folded = cache.layers[1].view(), rows[:, :, :128]
    assert (view.folded, view.page_rows, ops.dtype(view.k_centers)) == (128, (32,) * 4, "float16")
    assert_centers_follow_spec(ops.to_numpy(view.k_centers), folded, 1, 32)
    assert_planes_follow_spec("turbo4", to_numpy(ops, view.k_planes), coded_rows(ops, view, folded, 1), layer=1)
    assert_planes_follow_spec("turbo4", to_numpy(ops, view.v_planes), folded, layer=1, part="v")


def test_pages_are_centred_alike_however_many_fold_at_once(backend: Backend) -> None:
    """A long prompt is encoded in pieces of whole pages, 40 rows each here."""
    window = WindowPolicy(sink_tokens=4, recent_tokens=0, page_size=40)
    rows = gaussian(1, 1, 4400, 16) + OFFSET[:, :1, :, :16]
    at_once, by_page = (new_cache(backend, "turbo4", heads=(1, 1), dim=16, window=window) for _ in range(2))
    feed(at_once, backend.ops, rows, rows)
    feed(by_page, backend.ops, rows, rows, chunk=40)
    assert at_once.layers[0].view().page_rows == by_page.layers[0].view().page_rows == (40,) * 110
    for cache in (at_once, by_page):
        assert_centers_follow_spec(stored_centers(backend, cache), rows, 0, 40)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4, 1e8, 1e30])
def test_rows_of_any_size(backend: Backend, size: float) -> None:
    """A centre stops at float16's range, and what it leaves is coded with the rows."""
    ops, rows = backend.ops, (size * (gaussian(1, 2, 64, 64) + OFFSET)).astype(np.float32)
    rotation = Rotation.create(ops, 0, "k", 64)
    centers = ops.to_numpy(centers_of(ops, ops.asarray(rows), rotation, 32))
    assert_centers_follow_spec(centers, rows, 0, 32)
    assert np.isfinite(centers).all()
    assert (np.abs(centers.astype(np.float64)).max() == 65504) == (size >= 1e4)
    assert (centers == 0).all() == (size < 1e-20)


def test_a_mean_that_overflows_is_no_centre(backend: Backend) -> None:
    ops, rows = backend.ops, np.full((1, 1, 32, 64), 3e38, np.float32)
    rotation = Rotation.create(ops, 0, "k", 64)
    with np.errstate(over="ignore", invalid="ignore"):
        centers = centers_of(ops, ops.asarray(rows), rotation, 32)
        left = centred_rows(ops, ops.asarray(rows), centers, rotation, 32)
    assert (ops.to_numpy(centers) == 0).all()
    assert np.array_equal(ops.to_numpy(left), rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_stay_out_of_the_mean_and_decode_to_it(backend: Backend, value: float) -> None:
    backend = replace(backend, raise_on_nonfinite=False)
    rows = gaussian(1, 2, 96, 64) + OFFSET
    rows[0, 0, 40:50, 3] = value  # some of page 1
    rows[0, 1, 32:64] = value  # all of page 1, in the other head
    cache = filled(backend, "turbo4", rows, gaussian(1, 2, 96, 64), window=SMALL)
    centers = stored_centers(backend, cache)
    assert_centers_follow_spec(centers, rows[:, :, :64], 0, 32)
    assert (centers[0, 1, 1] == 0).all()
    assert cache.stats().nonfinite_rows == 10 + 32
    dense = backend.ops.to_numpy(cache.dense(0)[0])
    mean = centers[0, 0, 1].astype(np.float64) @ spec.rotation_matrix(0, "k", 64)
    np.testing.assert_allclose(dense[0, 0, 40:50], np.tile(mean, (10, 1)), rtol=1e-5, atol=1e-4)
    assert (dense[0, 1, 32:64] == 0).all()
    layer, q = cache.layers[0], gaussian(1, 4, 3, 64, seed=2)
    assert relative_error(attend(backend, layer, q, 0.01), exact_attention(backend, layer, q, 0.01)) <= 1e-4


# How long it lives


def test_a_page_keeps_its_centre_while_its_rows_go(backend: Backend) -> None:
    """Trims and holes shorten pages; one without a row goes; later pages have centres of their own."""
    ops, rows = backend.ops, gaussian(1, 2, 300, 64) + OFFSET
    cache = filled(backend, "turbo4", rows[:, :, :200], rows[:, :, :200], window=SMALL)
    first = stored_centers(backend, cache).copy()
    assert cache.layers[0].view().page_rows == (32,) * 5
    fork = cache.fork()
    cache.trim(200 - 70)
    assert cache.layers[0].view().page_rows == (32, 32, 6)
    feed(cache, ops, rows[:, :, 70:166], rows[:, :, 70:166])
    assert cache.layers[0].view().page_rows == (32, 32, 6, 32, 32)
    assert np.array_equal(stored_centers(backend, cache)[:, :, :3], first[:, :, :3])
    assert_centers_follow_spec(stored_centers(backend, cache)[:, :, 3:], rows[:, :, 70:134], 0, 32)
    cache.drop(20, 52)  # the end of page 0, all of 1 and 2, two rows of the next
    view = cache.layers[0].view()
    assert view.page_rows == (20, 30, 32)
    kept = stored_centers(backend, cache)
    assert np.array_equal(kept[:, :, 0], first[:, :, 0])
    loaded = make_cache(backend, cache.spec)
    loaded.load(cache.export())
    for each in (cache, loaded):
        layer, q = each.layers[0], gaussian(1, 4, 2, 64, seed=2)
        assert relative_error(attend(backend, layer, q, 0.02), exact_attention(backend, layer, q, 0.02)) <= 1e-5
        assert each.layers[0].view().page_rows == (20, 30, 32)
    cache.trim(cache.tokens)
    assert cache.layers[0].view().page_rows == ()
    assert np.array_equal(stored_centers(backend, fork), first)


def test_any_rows_may_go(reference: Backend) -> None:
    """Against a list of the page of each row."""
    ops, pages = reference.ops, [page for page, count in enumerate((3, 1, 4, 2)) for _ in range(count)]
    for first, last in combinations_with_replacement(range(len(pages) + 1), 2):
        centers = Centers(RowBuffer(ops, 1, 1, 1, "float16"))
        centers.append(ops.asarray(np.arange(4, dtype=np.float16).reshape(1, 1, 4, 1)), (3, 1, 4, 2))
        centers.drop(first, last - first)
        left = Counter(pages[:first] + pages[last:])
        assert centers.page_rows == tuple(left.values())
        assert ops.to_numpy(centers.buffer.live()).flatten().tolist() == list(left)


def test_centres_count_as_bytes_of_their_pages(backend: Backend) -> None:
    rows = gaussian(1, 2, 100, 80, dtype="float16")
    shape = {"heads": (4, 2), "dim": 80, "dtype": "float16"}
    cache = new_cache(backend, "turbo4", **shape, window=SMALL)
    feed(cache, backend.ops, rows, rows)
    by_hand = 2 * (40 * 320 + 64 * (40 + 2) * 2 + 2 * 160)
    assert cache.stats().kv_bytes == cache.live_bytes == live_bytes(cache.spec.shape(), 100) == by_hand
    cache.trim(40)  # within the second page
    assert cache.stats().kv_bytes == 2 * (4 * 320 + 60 * (40 + 2) * 2 + 2 * 160)


def test_pages_of_paged_storage_have_room_for_their_centre() -> None:
    shape = CacheSpec(MODES["turbo4"], 3, 4, 2, 80, "float16", WindowPolicy()).shape()
    plain = replace(shape, layout=Layout(CODECS["turbo4"], CODECS["turbo4"], 80, 80))
    pages = (10_000 - 128) // 128
    assert bytes_needed(shape, 10_000, "paged") - bytes_needed(plain, 10_000, "paged") == 3 * 2 * pages * 160


# What it is good for


def test_centres_take_a_common_offset_off_the_error_of_attention(backend: Backend) -> None:
    """Keys with an offset, as models have them: without centres attention is twenty times as far off."""
    k, v = gaussian(1, 2, 640, 64) + OFFSET, gaussian(1, 2, 640, 64, seed=1)
    q = gaussian(1, 4, 8, 64, seed=2)
    want = spec.attention(q, k, v, 0.125)
    errors = []
    for codec in (CENTRED_TURBO4, CODECS["turbo4"]):
        layout = Layout(codec, CODECS["turbo4"], 64, 64)
        cache = new_cache(backend, "turbo4", window=SMALL)
        layer = type(cache.layers[0])(
            backend.ops, layout, SMALL, cache.layers[0]._kernels, layer=0, batch=1, kv_heads=2, dtype="float32"
        )
        layer.append(backend.ops.asarray(k), backend.ops.asarray(v))
        layer.commit()
        assert (layer.view().k_centers is not None) == codec.centred
        errors.append(relative_error(attend(backend, layer, q, 0.125), want))
    assert errors[1] > 20 * errors[0]


def test_the_oracle_knows_the_first_rows(reference: Backend) -> None:
    """What the tests compare with: the mean of rows 4 to 31."""
    rows = gaussian(1, 1, 32, 16)
    want = spec.rotation_matrix(0, "k", 16) @ rows[0, 0, 4:].astype(np.float64).mean(0)
    np.testing.assert_allclose(page_centers(rows, 0, 32)[0, 0, 0], want, rtol=1e-12)
