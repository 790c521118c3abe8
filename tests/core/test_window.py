"""Which rows stay raw and which are folded, and when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    DTYPES,
    FOLDED_AT_ONCE,
    QUANTIZED,
    SMALL,
    assert_centers_follow_spec,
    assert_planes_follow_spec,
    cast,
    chunked,
    coded_rows,
    feed,
    gaussian,
    new_cache,
    to_numpy,
)

from kvcore.attention import attend_graph, encode_graph
from kvcore.backends import Backend
from kvcore.cache import Cache, LayerCache, LayerKernels
from kvcore.errors import InputError
from kvcore.layout import KVView, WindowPolicy
from kvcore.modes import MODES
from kvcore.ops import Array, Ops

DEFAULT = WindowPolicy()
windows = pytest.mark.parametrize("window", [DEFAULT, SMALL], ids=["128", "32"])


def regions(cache: Cache, layer: int = 0) -> tuple[int, int, int]:
    """(sinks, folded, tail) of one layer."""
    rows = cache.layers[layer]
    return rows.rows_sinks, rows.rows_folded, rows.rows_tail


def folded_by_the_rule(tokens: int, window: WindowPolicy) -> int:
    return window.page_size * max(0, (tokens - window.recent_tokens) // window.page_size)


def push(cache: Cache, ops: Ops, tokens: int, *, seed: int = 0, dim: int = 64) -> np.ndarray:
    rows = gaussian(1, 2, tokens, dim, seed=seed)
    feed(cache, ops, rows, rows)
    return rows


@windows
@pytest.mark.parametrize("chunk", [1, 7, 31, 128, 129, 256, 1000], ids=str)
def test_the_folded_count_does_not_depend_on_the_chunking(backend: Backend, window: WindowPolicy, chunk: int) -> None:
    cache, ops = new_cache(backend, "int8", window=window), backend.ops
    rows = ops.asarray(gaussian(1, 2, 700, 64))
    for part in chunked(700, chunk):
        cache.layers[0].append(rows[:, :, part], rows[:, :, part])
        cache.commit()
        folded = folded_by_the_rule(part.stop, window)
        assert regions(cache) == (4 if folded else 0, folded, part.stop - folded)
    assert cache.offset == 700


@settings(max_examples=150, deadline=None)
@given(
    page=st.integers(1, 40),
    recent=st.integers(0, 60),
    sinks=st.integers(0, 8),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=8),
)
def test_the_rule_holds_for_any_window_and_chunking(
    reference: Backend, page: int, recent: int, sinks: int, chunks: Sequence[int]
) -> None:
    window = WindowPolicy(min(sinks, page), recent, page)
    cache = new_cache(reference, "int8-turbo4", dim=8, window=window)
    total = 0
    for count in chunks:
        push(cache, reference.ops, count, dim=8)
        total += count
        folded = folded_by_the_rule(total, window)
        assert regions(cache) == (window.sink_tokens if folded else 0, folded, total - folded)


@pytest.mark.parametrize("mode", FOLDED_AT_ONCE)
def test_the_first_folds_are_at_256_and_384_tokens(backend: Backend, mode: str) -> None:
    cache, folded = new_cache(backend, mode, window=DEFAULT), {}
    for tokens in (255, 1, 127, 1):
        push(cache, backend.ops, tokens)
        folded[cache.offset] = cache.layers[0].rows_folded
    assert folded == {255: 0, 256: 128, 383: 128, 384: 256}


@pytest.mark.parametrize("mode", FOLDED_AT_ONCE)
def test_append_never_folds(backend: Backend, mode: str) -> None:
    cache = new_cache(backend, mode)
    rows = backend.ops.asarray(gaussian(1, 2, 500, 64))
    cache.layers[0].append(rows, rows)
    assert regions(cache) == (0, 0, 500)
    cache.commit()
    assert regions(cache) == (4, 448, 52)
    cache.commit()
    assert regions(cache) == (4, 448, 52)


def test_fp16_has_no_window(backend: Backend) -> None:
    cache = new_cache(backend, "fp16")
    push(cache, backend.ops, 500)
    cache.begin_decode()
    assert regions(cache) == (0, 0, 500)
    assert cache.stats().rows_raw == 500


@windows
def test_a_decode_step_sees_between_recent_plus_1_and_recent_plus_page_raw_rows(
    reference: Backend, window: WindowPolicy
) -> None:
    seen: list[int] = []

    def spy(ops: Ops, q: Array, view: KVView, scale: float, sliding: int | None) -> Array:
        seen.append(int(view.tail_k.shape[2]))
        return attend_graph(ops, q, view, scale, sliding)

    layer = LayerCache(
        reference.ops,
        MODES["int8"].layout(8),
        window,
        LayerKernels(encode_graph, spy),
        layer=0,
        batch=1,
        kv_heads=1,
        dtype="float32",
    )
    layer.append(gaussian(1, 1, 400, 8), gaussian(1, 1, 400, 8))
    layer.commit()
    for token in range(3 * window.page_size):
        row = gaussian(1, 1, 1, 8, seed=token)
        layer.append(row, row)
        layer.attend(row, 1.0)
        layer.commit()
    low, high = window.recent_tokens + 1, window.recent_tokens + window.page_size
    assert (min(seen), max(seen)) == (low, high)
    assert (low, high) == ((129, 256) if window is DEFAULT else (33, 64))


@pytest.mark.parametrize(("prompt", "chunk"), [(10, 1), (1000, 1), (1000, 7)], ids=["decode", "by-1", "by-7"])
def test_B105_rows_age_by_the_total_length_not_by_the_call(backend: Backend, prompt: int, chunk: int) -> None:
    cache = new_cache(backend, "int8", dtype="float16", layers=2, window=DEFAULT)
    rows = gaussian(1, 2, 1010, 64, dtype="float16")
    start = 0
    if prompt == 10:
        feed(cache, backend.ops, rows[:, :, :10], rows[:, :, :10])
        start = 10
    for stop in (*range(start + 100, 1010, 100), 1010):
        part = rows[:, :, start:stop]
        feed(cache, backend.ops, part, part, chunk=chunk)
        start = stop
        folded = 128 * max(0, (stop - 128) // 128)
        for layer in (0, 1):
            assert regions(cache, layer) == (4 if folded else 0, folded, stop - folded)
            assert stop < 256 or 128 <= stop - folded <= 255
    assert regions(cache) == (4, 768, 242)
    per_layer_and_head = (4 + 242) * 256 + 768 * 132
    assert cache.stats().kv_bytes == 2 * 2 * per_layer_and_head


@windows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", QUANTIZED)
def test_sinks_and_tail_are_bit_equal_to_the_rows_that_came(
    backend: Backend, mode: str, dtype: str, window: WindowPolicy
) -> None:
    ops, cache = backend.ops, new_cache(backend, mode, dtype=dtype, window=window)
    k, v = gaussian(1, 2, 520, 64, dtype=dtype), gaussian(1, 2, 520, 64, seed=1, dtype=dtype)
    feed(cache, ops, k, v, chunk=130)
    cache.begin_decode()
    view = cache.layers[0].view()
    assert view.folded == folded_by_the_rule(520, window) > 0
    for rows, sinks, tail in ((k, view.sink_k, view.tail_k), (v, view.sink_v, view.tail_v)):
        assert np.array_equal(ops.to_numpy(sinks), rows[:, :, :4])
        assert np.array_equal(ops.to_numpy(tail), rows[:, :, view.folded :])
        assert ops.dtype(sinks) == ops.dtype(tail) == dtype


@pytest.mark.parametrize("mode", QUANTIZED)
def test_pages_hold_the_codes_of_their_rows_sinks_included(backend: Backend, mode: str) -> None:
    ops, cache = backend.ops, new_cache(backend, mode, layers=2)
    k, v = gaussian(1, 2, 200, 64), gaussian(1, 2, 200, 64, seed=1)
    feed(cache, ops, k, v, chunk=45)
    cache.begin_decode()
    view = cache.layers[1].view()
    assert view.folded == 160
    for part, rows, planes in (("k", k, view.k_planes), ("v", v, view.v_planes)):
        codec, stored = getattr(MODES[mode], part), to_numpy(ops, planes)
        if codec == "raw":
            assert np.array_equal(stored["rows"], rows[:, :, :160])
        else:
            folded = coded_rows(ops, view, rows[:, :, :160], 1) if part == "k" else rows[:, :, :160]
            assert_planes_follow_spec(codec, stored, folded, layer=1, part=part)
    if view.layout.k.centred:
        assert_centers_follow_spec(ops.to_numpy(view.k_centers), k[:, :, :160], 1, 32)
        assert view.page_rows == (32,) * 5


@pytest.mark.parametrize("sinks", [0, 1, 32])
def test_any_number_of_sinks_up_to_a_page(backend: Backend, sinks: int) -> None:
    window = WindowPolicy(sinks, 32, 32)
    cache = new_cache(backend, "turbo4", window=window)
    rows = push(cache, backend.ops, 100)
    assert regions(cache) == (sinks, 64, 36)
    k, _ = cache.dense(0)
    raw = (backend.ops.to_numpy(k) == rows).all((0, 1, 3))
    assert raw.tolist() == [True] * sinks + [False] * (64 - sinks) + [True] * 36


@pytest.mark.parametrize("mode", QUANTIZED)
def test_boundary_layers_are_the_first_and_the_last_and_stay_raw(backend: Backend, mode: str) -> None:
    window = WindowPolicy(4, 32, 32, boundary_layers=2)
    cache = new_cache(backend, mode, layers=6, dtype="float16", window=window)
    push(cache, backend.ops, 100)
    cache.begin_decode()
    assert [layer.rows_folded for layer in cache.layers] == [0, 0, 64, 64, 0, 0]
    stats = cache.stats()
    assert (stats.rows_folded, stats.rows_raw) == (64, 40)
    quantized = 40 * 256 + MODES[mode].layout(64).folded_bytes("float16", 64, 2)
    assert stats.kv_bytes == 2 * (4 * 100 * 256 + 2 * quantized)
    assert stats.kv_bytes_raw == 2 * 6 * 100 * 256


def test_more_boundary_layers_than_layers_leave_all_raw(reference: Backend) -> None:
    cache = new_cache(reference, "int8", layers=3, window=WindowPolicy(4, 32, 32, boundary_layers=2))
    push(cache, reference.ops, 100)
    assert [layer.rows_folded for layer in cache.layers] == [0, 0, 0]
    assert cache.stats().kv_bytes == cache.stats().kv_bytes_raw


@windows
def test_delegated_folds_nothing_before_the_hand_over_then_all_but_the_window(
    backend: Backend, window: WindowPolicy
) -> None:
    cache, ops = new_cache(backend, "turbo4-delegated", layers=2, window=window), backend.ops
    push(cache, ops, 300)
    push(cache, ops, 345, seed=1)
    assert regions(cache) == (0, 0, 645)
    cache.begin_decode()
    folded = folded_by_the_rule(645, window)
    assert folded == (512 if window is DEFAULT else 608)
    assert regions(cache) == regions(cache, 1) == (4, folded, 645 - folded)
    for token in range(window.page_size):  # from now on page by page
        push(cache, ops, 1, seed=token)
        assert cache.layers[0].rows_folded == folded_by_the_rule(646 + token, window)


def test_the_hand_over_is_one_way_and_later_prompts_fold_in_prefill(backend: Backend) -> None:
    cache = new_cache(backend, "turbo4-delegated")
    push(cache, backend.ops, 20)
    cache.begin_decode()
    assert regions(cache) == (0, 0, 20)
    push(cache, backend.ops, 300, seed=1)  # a second prompt, without another call
    assert regions(cache) == (4, 288, 32)
    before = cache.stats()
    cache.begin_decode()
    assert cache.stats() == before


@pytest.mark.parametrize("mode", ["fp16", *FOLDED_AT_ONCE])
def test_begin_decode_changes_nothing_in_other_modes(backend: Backend, mode: str) -> None:
    cache = new_cache(backend, mode)
    push(cache, backend.ops, 100)
    before = cache.stats()
    cache.begin_decode()
    assert cache.stats() == before


def test_a_long_hand_over_is_folded_in_steps_to_the_same_planes(backend: Backend) -> None:
    """More rows than are encoded in one go: each row's codes are still its own."""
    cache, ops = new_cache(backend, "turbo4-delegated", heads=(1, 1), dim=8, window=DEFAULT), backend.ops
    v = gaussian(1, 1, 9000, 8)
    feed(cache, ops, v, v, chunk=2000)
    cache.begin_decode()
    view = cache.layers[0].view()
    assert view.folded == 8832
    assert_planes_follow_spec("turbo4", to_numpy(ops, view.v_planes), v[:, :, :8832], part="v")
    assert np.array_equal(ops.to_numpy(view.k_planes["rows"]), v[:, :, :8832])


@pytest.mark.parametrize("mode", ["fp16", *FOLDED_AT_ONCE])
@pytest.mark.parametrize(("accepted", "folded"), [(0, 0), (1, 32), (3, 32), (8, 32)])
def test_commit_folds_accepted_rows_only(backend: Backend, mode: str, accepted: int, folded: int) -> None:
    """63 rows, then 8 drafted ones: the page is full from the first accepted one on."""
    cache, ops = new_cache(backend, mode, layers=2), backend.ops
    rows = push(cache, ops, 63)
    draft = gaussian(1, 2, 8, 64, seed=9)
    for layer in cache.layers:
        layer.append(ops.asarray(draft), ops.asarray(draft))
    assert cache.offset == 71
    cache.commit(accepted, pending=8)
    folded = folded if MODES[mode].quantized else 0
    assert cache.offset == 63 + accepted
    assert regions(cache) == regions(cache, 1) == (4 if folded else 0, folded, 63 + accepted - folded)
    kept = np.concatenate([rows, draft[:, :, :accepted]], 2)
    assert np.array_equal(ops.to_numpy(cache.dense(1)[0])[:, :, folded:], kept[:, :, folded:])


def test_a_rejected_row_is_never_folded(backend: Backend) -> None:
    """Its value would show in the page: 64 rows fold 32, the 64th being a rejected one must not count."""
    cache, ops = new_cache(backend, "int8"), backend.ops
    push(cache, ops, 60)
    draft = ops.asarray(gaussian(1, 2, 40, 64))
    cache.layers[0].append(draft, draft)
    cache.commit(3, pending=40)
    assert regions(cache) == (0, 0, 63)


@pytest.mark.parametrize(("accepted", "pending"), [(9, 8), (-1, 8), (1, None)], ids=str)
def test_commit_refuses_more_than_was_drafted(reference: Backend, accepted: int, pending: int | None) -> None:
    cache = new_cache(reference, "int8")
    push(cache, reference.ops, 20)
    with pytest.raises(InputError, match=f"cannot accept {accepted} of {pending}"):
        cache.commit(accepted, pending)
    assert cache.offset == 20


def test_rows_of_another_dtype_are_converted_once_on_the_way_in(backend: Backend) -> None:
    cache, ops = new_cache(backend, "turbo4-asym", dtype="bfloat16"), backend.ops
    rows = gaussian(1, 2, 100, 64)
    feed(cache, ops, rows, rows)
    view = cache.layers[0].view()
    want = cast(rows, "bfloat16")
    assert np.array_equal(ops.to_numpy(view.sink_v), want[:, :, :4])
    assert np.array_equal(ops.to_numpy(view.k_planes["rows"]), want[:, :, :64])
    assert_planes_follow_spec("turbo4", to_numpy(ops, view.v_planes), want[:, :, :64], part="v")
