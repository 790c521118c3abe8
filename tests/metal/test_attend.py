"""Decode attention by the Metal kernels, against float64 attention over the rows that a cache stands for."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from metal_shim import Shim
from oracle import (
    DTYPES,
    NO_WINDOW,
    QUANTIZED,
    SMALL,
    cast,
    decode_planes,
    decoded,
    exact_attention,
    filled,
    gaussian,
    new_cache,
    relative_error,
)
from schedules import attended, compile_for

from kvcore.backends import Backend
from kvcore.backends.metal.attention import LONGEST, SHORTEST, attend, chunk_vectors, split_rows
from kvcore.backends.metal.capabilities import HEAD_DIMS, MAX_GROUP, MAX_ROWS
from kvcore.backends.reference import spec
from kvcore.cache import LayerCache
from kvcore.layout import KVView, WindowPolicy
from kvcore.modes import MODES

STORED = ("fp16", "int8", "int8-turbo4", "turbo4", "turbo4-asym", "turbo3-asym")  # one mode for each pair of codecs
RATIOS = (1, 3, 4, 7, 8)
# The design's limits; float32 is held to more than it asks.
LIMITS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 4e-3}

each_mode = pytest.mark.parametrize("mode", STORED)


@dataclass(frozen=True)
class Point:
    """One shape; dtypes, ratios and counts of rows go around so that each pair of values meets."""

    mode: str
    dim: int
    ratio: int
    dtype: str
    rows: int

    def __str__(self) -> str:
        return f"{self.mode}-D{self.dim}-{self.ratio}x-{self.dtype}-{self.rows}rows"

    def layer(self, host: Backend) -> LayerCache:
        k, v = (gaussian(2, 2, 110, self.dim, seed=seed, dtype=self.dtype) for seed in (0, 1))
        heads = (2 * self.ratio, 2)
        return filled(host, self.mode, k, v, heads=heads, dtype=self.dtype, window=SMALL).layers[0]

    def query(self) -> np.ndarray:
        return cast(gaussian(2, 2 * self.ratio, self.rows, self.dim, seed=2), self.dtype)


POINTS = [
    Point(mode, dim, RATIOS[(i + 2 * j) % 5], DTYPES[(i + j) % 3], (1, 1, 2)[(i + j // 2) % 3])
    for i, mode in enumerate(STORED)
    for j, dim in enumerate(HEAD_DIMS)
]
DEVIATIONS = [(rms, deviation) for rms in (1.0, 1e-2, 1e-3, 1e-5) for deviation in (1.0, 3.0)]


def single(host: Backend, mode: str, tokens: int, **settings: Any) -> LayerCache:
    """One KV head of 64 dimensions in float32 under two query heads: all of these share one compiled kernel."""
    k, v = gaussian(1, 1, tokens, 64), gaussian(1, 1, tokens, 64, seed=1)
    return filled(host, mode, k, v, heads=(2, 1), **{"window": SMALL, **settings}).layers[0]


def query(heads: int = 2, rows: int = 1, *, batch: int = 1, rms: float = 1.0) -> np.ndarray:
    return gaussian(batch, heads, rows, 64, seed=2, rms=rms)


@pytest.fixture(scope="module", autouse=True)
def _compiled(host: Backend) -> None:
    """Every kernel that this module launches, in one go."""

    def call(view: KVView, q: np.ndarray) -> Callable[..., Any]:
        return lambda run: attend(host.ops, q, view, 1.0, None, run)

    views = [(point.layer(host).view(), point.query()) for point in POINTS]
    for mode in STORED:
        view = single(host, mode, 110).view()
        views += [(view, query(vectors)) for vectors in ((2, 8) if mode in ("fp16", "turbo4") else (2,))]
    views += [(single(host, "fp16", 40).view(), query(vectors)) for vectors in (1, 3, 4, 5, 6, 7)]
    compile_for(call(*each) for each in views)


def error(host: Backend, layer: LayerCache, q: np.ndarray, window: int | None = None) -> float:
    scale = q.shape[-1] ** -0.5
    out = attended(host, q, layer.view(), scale, window)
    assert out.dtype == q.dtype
    return relative_error(out, exact_attention(host, layer, q, scale, window))


# Shapes


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_pair_of_codecs_at_every_head_size(host: Backend, point: Point) -> None:
    layer = point.layer(host)
    assert layer.rows_folded == (64 if MODES[point.mode].quantized else 0)
    assert error(host, layer, point.query()) <= LIMITS[point.dtype]


def test_the_points_hold_what_they_should() -> None:
    for name, values in (("ratio", RATIOS), ("dtype", DTYPES)):
        for other, others in (("mode", STORED), ("dim", HEAD_DIMS)):
            met = {(getattr(point, other), getattr(point, name)) for point in POINTS}
            assert len(met) == len(values) * len(others), (other, name)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 63, 64, 65, 67, 4097], ids=str)
@each_mode
def test_C5_lengths_at_the_borders_of_pages_and_tiles(host: Backend, mode: str, tokens: int) -> None:
    assert error(host, single(host, mode, tokens), query()) <= LIMITS["float32"]


@pytest.mark.parametrize("tokens", [256, 257, 515], ids=str)
@each_mode
def test_the_default_window(host: Backend, mode: str, tokens: int) -> None:
    layer = single(host, mode, tokens, window=WindowPolicy())
    assert layer.rows_sinks == (4 if MODES[mode].quantized else 0)
    assert error(host, layer, query()) <= LIMITS["float32"]


@pytest.mark.parametrize("tokens", [32, 96, 97], ids=str)
@each_mode
def test_without_a_window_no_raw_row_need_be_left(host: Backend, mode: str, tokens: int) -> None:
    layer = single(host, mode, tokens, window=NO_WINDOW)
    assert layer.rows_tail == (tokens % 32 if MODES[mode].quantized else tokens)
    assert error(host, layer, query()) <= LIMITS["float32"]


@pytest.mark.parametrize("ratio", range(1, MAX_GROUP + 1))
def test_C7_every_number_of_query_heads_for_a_KV_head(host: Backend, ratio: int) -> None:
    chunks, size = chunk_vectors(ratio)
    assert (chunks - 1) * size < ratio <= chunks * size <= ratio + chunks - 1
    layer = single(host, "fp16", 40)
    assert error(host, layer, query(ratio)) <= LIMITS["float32"]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, MAX_ROWS])
@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_every_number_of_query_rows_is_causal(host: Backend, mode: str, rows: int) -> None:
    assert error(host, single(host, mode, 70), query(rows=rows)) <= LIMITS["float32"]


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_more_query_rows_than_raw_ones_reach_into_the_pages(host: Backend, mode: str, rows: int) -> None:
    """After a trim to a page's end every query but the last hides quantized rows."""
    layer = single(host, mode, 110)
    layer.trim(110 - 65)
    assert error(host, layer, query(rows=rows)) <= LIMITS["float32"]


@pytest.mark.parametrize("window", [1, 8, 50, 200])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_a_sliding_window(host: Backend, mode: str, rows: int, window: int) -> None:
    assert error(host, single(host, mode, 200), query(rows=rows), window) <= LIMITS["float32"]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_a_sliding_window_never_hides_the_rows_that_are_kept(host: Backend, mode: str, rows: int) -> None:
    layer, q = single(host, mode, 200), query(rows=rows)
    k, v = decoded(host.ops, layer)
    out = attended(host, q, replace(layer.view(), keep=6), 0.125, 40)
    for i in range(rows):
        own = 200 - rows + i
        seen = [j for j in range(own + 1) if j < 6 or j > own - 40]
        want = spec.attention(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], 0.125)
        assert relative_error(out[:, :, i : i + 1], want) <= LIMITS["float32"]


@each_mode
def test_B25_a_batch_equals_its_sequences_alone(host: Backend, mode: str) -> None:
    k, v, q = (gaussian(3, 2, 110, 64), gaussian(3, 2, 110, 64, seed=1), query(4, batch=3))
    whole = attended(host, q, filled(host, mode, k, v, heads=(4, 2), window=SMALL).layers[0].view(), 0.125)
    for i in range(3):
        alone = filled(host, mode, k[i : i + 1], v[i : i + 1], heads=(4, 2), window=SMALL).layers[0].view()
        np.testing.assert_allclose(attended(host, q[i : i + 1], alone, 0.125), whole[i : i + 1], rtol=1e-5, atol=1e-6)


@each_mode
def test_C6_attention_over_no_rows_is_zero(host: Backend, mode: str) -> None:
    out = attended(host, query(), new_cache(host, mode, heads=(2, 1)).layers[0].view(), 0.125)
    assert out.shape == (1, 2, 1, 64)
    assert not out.any()


# Values


@pytest.mark.parametrize(("v_rms", "deviation"), DEVIATIONS)
@each_mode
def test_error_over_magnitudes_of_v_and_spreads_of_logits(
    host: Backend, mode: str, v_rms: float, deviation: float
) -> None:
    k, v = gaussian(1, 1, 150, 64), gaussian(1, 1, 150, 64, seed=1, rms=v_rms)
    layer = filled(host, mode, k, v, heads=(2, 1), window=SMALL).layers[0]
    assert error(host, layer, query(rms=deviation)) <= LIMITS["float32"]


@pytest.mark.parametrize("large", ["k", "v"])
@each_mode
def test_error_with_one_page_100_times_the_others(host: Backend, mode: str, large: str) -> None:
    rows = {"k": gaussian(1, 1, 150, 64), "v": gaussian(1, 1, 150, 64, seed=1)}
    rows[large][:, :, 32:64] *= 100
    layer = filled(host, mode, rows["k"], rows["v"], heads=(2, 1), window=SMALL).layers[0]
    assert error(host, layer, query(rms=0.1 if large == "k" else 1.0)) <= LIMITS["float32"]


@each_mode
def test_C9_logits_of_70000_stay_finite(host: Backend, mode: str) -> None:
    layer, q = single(host, mode, 110), query(rms=1e5)
    out = attended(host, q, layer.view(), 0.125)
    assert np.isfinite(out).all()
    assert relative_error(out, exact_attention(host, layer, q, 0.125)) <= 1e-3


@pytest.mark.parametrize("mode", QUANTIZED)
def test_B99_stored_scales_are_what_attention_reads(host: Backend, mode: str) -> None:
    layer, q = single(host, mode, 96, window=NO_WINDOW), query()
    view = layer.view()
    before = attended(host, q, view, 0.125)

    def scaled(part: str, factor: float | np.ndarray) -> KVView:
        planes = dict(getattr(view, f"{part}_planes"))
        planes["scale"] = (planes["scale"] * np.float16(factor)).astype(np.float16)
        return replace(view, **{f"{part}_planes": planes})

    def stored(row: int) -> np.ndarray:
        planes = {name: plane[:, :, row : row + 1] for name, plane in view.k_planes.items()}
        return decode_planes(planes, view.layout.k.name, layer.layer, "k", 64)[:, :, 0]

    np.testing.assert_allclose(attended(host, q, scaled("v", 2.0), 0.125), 2 * before, rtol=1e-6)
    if view.layout.k.quantized:
        twice = scaled("k", 2.0)
        if view.k_centers is not None:
            twice = replace(twice, k_centers=2 * view.k_centers)
        doubled = attended(host, q, twice, 0.125)
        np.testing.assert_allclose(doubled, attended(host, 2 * q, view, 0.125), rtol=1e-5, atol=1e-6)
        assert relative_error(doubled, before) > 0.1
        one = np.ones((96, 1))
        one[40] = 0
        k, v = decoded(host.ops, layer)
        k[:, :, 40] -= stored(40)  # what is left is its page's centre, if there is one
        want = spec.attention(q, k, v, 0.125)
        assert relative_error(attended(host, q, scaled("k", one), 0.125), want) <= LIMITS["float32"]


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_a_hidden_row_that_is_not_finite_adds_nothing(host: Backend, mode: str) -> None:
    """Query row 0 does not see row 1's V; row 1 does."""
    layer, q = single(host, mode, 70), query(rows=2)
    view = layer.view()
    tail_v = np.array(view.tail_v)
    tail_v[:, :, -1] = np.nan
    out = attended(host, q, replace(view, tail_v=tail_v), 0.125)
    want = exact_attention(host, layer, q, 0.125)
    assert relative_error(out[:, :, :1], want[:, :, :1]) <= LIMITS["float32"]
    assert np.isnan(out[:, :, 1:]).all()


@pytest.mark.parametrize("mode", QUANTIZED)
def test_a_row_that_was_not_finite_when_it_was_folded_counts_as_zeros(host: Backend, mode: str) -> None:
    layer = single(host, mode, 96, window=NO_WINDOW)
    view = layer.view()
    for planes in (view.k_planes, view.v_planes):
        if "scale" in planes:
            planes["scale"][:, :, 50] = 0
            planes["codes"][:, :, 50] = 0
    assert error(host, layer, query()) <= LIMITS["float32"]


# Memory


@each_mode
def test_B138_planes_are_read_where_they_lie_in_their_buffers(host: Backend, mode: str) -> None:
    """The live rows of grown buffers, whose other rows are NaN: nothing is copied, nothing else is read."""
    k, v, q = gaussian(2, 2, 150, 64), gaussian(2, 2, 150, 64, seed=1), query(4, batch=2)
    layer = filled(host, mode, k, v, heads=(4, 2), window=SMALL).layers[0]
    assert not layer.view().tail_k.flags.c_contiguous
    assert error(host, layer, q) <= LIMITS["float32"]


def test_B138_queries_may_be_a_transposed_view(host: Backend) -> None:
    layer = single(host, "turbo4", 110)
    q = query(2, 4)
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    assert not turned.flags.c_contiguous
    np.testing.assert_array_equal(attended(host, turned, layer.view(), 0.125), attended(host, q, layer.view(), 0.125))


def far_apart(x: np.ndarray) -> np.ndarray:
    """``x`` [B, H, ...] with its heads more than 2^31 elements apart, in memory of which a few pages are touched."""
    gap = (1 << 31) + 4096
    size = (x.shape[1] - 1) * gap * x.itemsize + x[0, 0].nbytes
    memory = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), x.dtype)
    inner = np.zeros(x.shape[2:], x.dtype).strides
    far = np.lib.stride_tricks.as_strided(memory, x.shape, (0, gap * x.itemsize, *inner))
    far[...] = x
    return far


def test_C8_offsets_beyond_32_bits(host: Backend) -> None:
    k, v, q = gaussian(1, 2, 110, 64), gaussian(1, 2, 110, 64, seed=1), query(4)
    layer = filled(host, "int8", k, v, heads=(4, 2), window=SMALL).layers[0]
    view = layer.view()
    far = {
        name: {**planes, "codes": far_apart(planes["codes"])}
        for name, planes in (("k_planes", view.k_planes), ("v_planes", view.v_planes))
    }
    out = np.asarray(attend(host.ops, q, replace(view, **far), 0.125, None, Shim().run))
    assert relative_error(out, exact_attention(host, layer, q, 0.125)) <= LIMITS["float32"]


# Launches


@pytest.mark.parametrize(("mode", "launches"), [("fp16", 2), ("int8", 2), ("turbo4-asym", 2), ("turbo4", 3)])
def test_B147_a_step_is_two_launches_and_one_for_rotated_keys(host: Backend, mode: str, launches: int) -> None:
    shim = Shim()
    attend(host.ops, query(), single(host, mode, 110).view(), 0.125, None, shim.run)
    assert sum(shim.launches.values()) == launches


def test_32k_tokens_are_cut_into_enough_threadgroups() -> None:
    """Eight KV heads, a step of one row: several threadgroups for each core of an 80-core GPU, none of them tiny."""
    split = split_rows(32640 - 4, 132, 8)
    assert 8 * split.count >= 480
    assert split.rows >= 2 * SHORTEST
    assert split.pages * split.rows >= 32636 > (split.pages - 1) * split.rows
    assert split.raw == 1


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 100_000, 3_000_000])
@pytest.mark.parametrize("parallel", [1, 8, 4096])
def test_splits_cover_the_rows_and_no_more(rows: int, parallel: int) -> None:
    split = split_rows(rows, 0, parallel)
    assert split.rows % SHORTEST == 0
    assert SHORTEST <= split.rows <= LONGEST
    assert split.raw == 0
    assert (split.pages - 1) * split.rows < rows <= split.pages * split.rows
