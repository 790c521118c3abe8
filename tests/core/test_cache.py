"""The cache's life: what it stands for, what it costs, what it forgets."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from oracle import (
    DTYPES,
    QUANTIZED,
    SMALL,
    assert_centers_follow_spec,
    attend,
    decoded,
    exact_attention,
    feed,
    filled,
    gaussian,
    means_of_rows,
    new_cache,
    relative_error,
)

from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.cache import Cache, RowBuffer
from kvcore.errors import InputError, NonFiniteError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

DEFAULT = WindowPolicy()
each_mode = pytest.mark.parametrize("mode", MODES)
windows = pytest.mark.parametrize("window", [DEFAULT, SMALL], ids=["128", "32"])


def bytes_by_hand(cache: Cache) -> int:
    """Rows times bytes; sinks and the page rows that they shadow both count."""
    spec_ = cache.spec
    total = 0
    for layer in cache.layers:
        raw = layer.layout.raw_bytes_per_token(spec_.dtype) * (layer.rows_sinks + layer.rows_tail)
        pages = -(-layer.rows_folded // spec_.window.page_size)
        total += raw + layer.layout.folded_bytes(spec_.dtype, layer.rows_folded, pages)
    return total * spec_.batch * spec_.num_kv_heads


@pytest.mark.parametrize("dtype", DTYPES)
@each_mode
def test_the_dense_view_is_what_the_stored_planes_say(backend: Backend, mode: str, dtype: str) -> None:
    k, v = gaussian(2, 2, 150, 64, dtype=dtype), gaussian(2, 2, 150, 64, seed=1, dtype=dtype)
    cache = filled(backend, mode, k, v, dtype=dtype, window=SMALL, layers=2)
    assert cache.stats().rows_folded == (96 if MODES[mode].quantized else 0)
    for got, want in zip(cache.dense(1), decoded(backend.ops, cache.layers[1]), strict=True):
        assert backend.ops.dtype(got) == "float32"
        np.testing.assert_allclose(backend.ops.to_numpy(got), want, atol=2e-6 * np.abs(want).max())


@each_mode
def test_an_empty_cache_holds_nothing(backend: Backend, mode: str) -> None:
    cache = new_cache(backend, mode, layers=2, batch=3)
    cache.commit()
    cache.begin_decode()
    k, v = (backend.ops.to_numpy(x) for x in cache.dense(0))
    assert k.shape == v.shape == (3, 2, 0, 64)
    assert set(cache.stats().to_dict().values()) == {0}


@pytest.mark.parametrize("dtype", DTYPES)
@each_mode
def test_live_bytes_are_rows_times_the_bytes_of_the_layout(backend: Backend, mode: str, dtype: str) -> None:
    rows = gaussian(2, 3, 150, 96, dtype=dtype)
    cache = filled(backend, mode, rows, rows, dtype=dtype, layers=2, window=SMALL)
    stats = cache.stats()
    assert stats.kv_bytes == bytes_by_hand(cache)
    live = 0
    for layer in cache.layers:
        view = layer.view()
        arrays = [view.sink_k, view.sink_v, view.tail_k, view.tail_v]
        arrays += [*view.k_planes.values(), *view.v_planes.values(), view.k_centers]
        live += sum(backend.ops.to_numpy(array).nbytes for array in arrays if array is not None)
    assert stats.kv_bytes == live
    assert live <= stats.kv_bytes_allocated == sum(backend.ops.to_numpy(a).nbytes for a in cache.arrays())
    assert stats.kv_bytes_raw == 2 * 3 * 2 * 150 * 2 * 96 * (4 if dtype == "float32" else 2)


@each_mode
def test_L12_marginal_bytes_per_token_are_the_table(backend: Backend, mode: str) -> None:
    """Between two lengths with equal tails each further token costs a folded row."""
    rows = gaussian(1, 1, 128, 128, dtype="float16")
    cache = new_cache(backend, mode, heads=(1, 1), dim=128, dtype="float16", window=DEFAULT)
    feed(cache, backend.ops, rows, rows)
    cache.begin_decode()
    sizes = []
    for _ in range(5):
        feed(cache, backend.ops, rows, rows)
        sizes.append(cache.stats().kv_bytes)
    assert cache.mode.name == mode
    assert (cache.stats().rows_folded > 0) == MODES[mode].quantized
    table = {
        "fp16": 512,
        "int8": 260,
        "turbo4-asym": 322,
        "turbo3-asym": 306,
        "turbo4": 134,
        "turbo4-delegated": 322,
        "int8-turbo4": 196,
    }
    assert np.diff(sizes).tolist()[1:] == [128 * table[mode]] * 3


@pytest.mark.parametrize(
    ("mode", "ratio"),
    [("int8", 1.96), ("turbo4-asym", 1.59), ("turbo3-asym", 1.67), ("int8-turbo4", 2.60), ("turbo4", 3.78)],
)
def test_B134_the_saving_at_32k_is_what_the_mode_promises(reference: Backend, mode: str, ratio: float) -> None:
    cache = new_cache(reference, mode, heads=(1, 1), dim=128, dtype="float16", window=DEFAULT)
    rows = gaussian(1, 1, 4096, 128, dtype="float16")
    for _ in range(8):
        feed(cache, reference.ops, rows, rows)
    stats = cache.stats()
    assert (stats.tokens, stats.rows_folded, stats.rows_raw) == (32768, 32640, 132)
    assert stats.kv_bytes_raw / stats.kv_bytes == pytest.approx(ratio, rel=0.03)
    assert stats.kv_bytes_allocated <= 1.6 * stats.kv_bytes


# Growth


def buffers(cache: Cache) -> Iterator[RowBuffer]:
    return (buffer for layer in cache.layers for buffer in layer.buffers())


def decode_rows(cache: Cache, backend: Backend, tokens: int) -> None:
    row = backend.ops.asarray(gaussian(1, 1, 1, 64))
    for _ in range(tokens):
        for layer in cache.layers:
            layer.append(row, row)
            layer.commit()
        backend.ops.evaluate(*cache.arrays())


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_B129_20000_appends_cost_what_they_store(backend: Backend, mode: str) -> None:
    """Growth is geometric: at most 20 reallocations, and three times the final bytes copied. A fold moves the
    raw rows that it leaves, once a page: at most one row for each that came."""
    cache = new_cache(backend, mode, heads=(1, 1), window=DEFAULT)
    decode_rows(cache, backend, 20_000)
    assert cache.offset == 20_000
    tails = {id(part) for layer in cache.layers for part in (layer._k.tail, layer._v.tail)}
    for buffer in buffers(cache):
        assert buffer.reallocations <= 20
        final = buffer.length * buffer.row_bytes
        if MODES[mode].quantized and id(buffer) in tails:
            final = 20_000 * buffer.row_bytes
        assert buffer.bytes_copied <= 3 * final
    assert cache.stats().kv_bytes_allocated <= 1.6 * cache.stats().kv_bytes


@pytest.mark.full
@each_mode
def test_B129_every_mode_grows_geometrically(backend: Backend, mode: str) -> None:
    test_B129_20000_appends_cost_what_they_store(backend, mode)


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_B129_peak_memory_is_close_to_what_is_stored(reference: Backend, mode: str) -> None:
    """By the allocator, not by the cache's own counters: old and new buffers alive at once would show."""
    cache = new_cache(reference, mode, heads=(1, 1), window=DEFAULT)
    tracemalloc.start()
    decode_rows(cache, reference, 20_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 2.1 * cache.stats().kv_bytes


def test_B129_one_buffer_s_peak_is_old_plus_new(reference: Backend) -> None:
    buffer = RowBuffer(reference.ops, 1, 1, 64, "float32")
    row = gaussian(1, 1, 1, 64)
    tracemalloc.start()
    for _ in range(20_000):
        buffer.append(row)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    final = 20_000 * buffer.row_bytes
    assert buffer.reallocations <= 20
    assert buffer.bytes_copied <= 3 * final
    assert peak <= 2.1 * final
    assert np.array_equal(buffer.live(), np.broadcast_to(row, (1, 1, 20_000, 64)))


def test_appends_copy_linearly_in_their_number(reference: Backend) -> None:
    copied, row = [], gaussian(1, 1, 1, 8)
    for tokens in (2_500, 5_000, 10_000, 20_000):
        buffer = RowBuffer(reference.ops, 1, 1, 8, "float32")
        for _ in range(tokens):
            buffer.append(row)
        copied.append(buffer.bytes_copied / (tokens * buffer.row_bytes))
    assert max(copied) <= 3
    assert copied[-1] <= 1.5 * copied[0]


def test_an_append_writes_in_place(backend: Backend) -> None:
    """Its time does not follow the capacity: a copy of 40 MB takes a hundred times as long as a row's write."""
    ops, row = backend.ops, backend.ops.asarray(gaussian(1, 4, 1, 128))
    seconds = []
    for capacity in (100, 20_000):
        buffer = RowBuffer(ops, 1, 4, 128, "float32", first_capacity=capacity)
        times = []
        for _ in range(30):
            start = time.perf_counter()
            buffer.append(row)
            ops.evaluate(*buffer.arrays())
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    assert seconds[1] <= 10 * seconds[0] + 1e-3


# Trimming


@each_mode
def test_L1_trim_reaches_every_region(backend: Backend, mode: str) -> None:
    """Prefill 253, trim to 17, append 20. The default window has folded nothing by 253, the small one 192."""
    for window, folded in ((DEFAULT, 0), (SMALL, 192)):
        k, v = gaussian(1, 2, 273, 64, dtype="float16"), gaussian(1, 2, 273, 64, seed=1, dtype="float16")
        cache = filled(backend, mode, k[:, :, :253], v[:, :, :253], dtype="float16", window=window)
        assert cache.stats().rows_folded == (folded if MODES[mode].quantized else 0)
        before = [x[:, :, :17] for x in decoded(backend.ops, cache.layers[0])]
        cache.trim(236)
        assert cache.offset == 17
        feed(cache, backend.ops, k[:, :, 253:], v[:, :, 253:])
        assert cache.offset == 37
        assert cache.stats().kv_bytes == bytes_by_hand(cache)
        still_folded = 17 if folded and MODES[mode].quantized else 0
        assert (cache.stats().rows_folded, cache.layers[0].rows_tail) == (still_folded, 37 - still_folded)
        for old, new, now in zip(before, (k, v), decoded(backend.ops, cache.layers[0]), strict=True):
            assert np.array_equal(now, np.concatenate([old, new[:, :, 253:]], 2))
        if not folded:
            kept = [np.concatenate([x[:, :, :17], x[:, :, 253:]], 2) for x in (k, v)]
            q = gaussian(1, 4, 1, 64, seed=2)
            fresh = filled(backend, mode, *kept, dtype="float16", window=window)
            assert np.array_equal(*(attend(backend, c.layers[0], q, 0.125) for c in (cache, fresh)))


@windows
@pytest.mark.parametrize("count", [1, 130, 300, 696, 698, 700])
@each_mode
def test_B104_trim_moves_all_regions_together(backend: Backend, mode: str, count: int, window: WindowPolicy) -> None:
    """700 rows, batch of 3; 698 cuts into the sinks. Then 50 more, with attention before and after commit."""
    k, v = gaussian(3, 1, 750, 64), gaussian(3, 1, 750, 64, seed=1)
    cache = filled(backend, mode, k[:, :, :700], v[:, :, :700], window=window, heads=(2, 1))
    layer = cache.layers[0]
    old = [x[:, :, : 700 - count] for x in decoded(backend.ops, layer)]
    folded = layer.rows_folded
    cache.trim(count)
    assert layer.tokens == cache.offset == 700 - count
    assert layer.rows_folded == min(folded, 700 - count)
    assert layer.rows_sinks == (min(4, layer.rows_folded) if folded else 0)
    new = [x[:, :, 700:] for x in (k, v)]
    layer.append(*(backend.ops.asarray(x) for x in new))
    rows = [np.concatenate(pair, 2) for pair in zip(old, new, strict=True)]
    q = gaussian(3, 2, 50, 64, seed=2)
    assert relative_error(attend(backend, layer, q, 0.125), spec.attention(q, *rows, 0.125)) <= 1e-5
    for got, want in zip(decoded(backend.ops, layer), rows, strict=True):
        assert np.array_equal(got, want)
    cache.commit()
    assert relative_error(attend(backend, layer, q, 0.125), exact_attention(backend, layer, q, 0.125)) <= 1e-5


@pytest.mark.parametrize("mode", QUANTIZED)
def test_sinks_that_were_cut_are_not_made_up(backend: Backend, mode: str) -> None:
    """Cut to 2 tokens, inside the sinks: those two stay raw, and rows that come after them fold like any other."""
    first, second = gaussian(1, 2, 200, 64), gaussian(1, 2, 200, 64, seed=5)
    cache = filled(backend, mode, first, first, window=SMALL)
    cache.trim(198)
    assert (cache.layers[0].rows_sinks, cache.layers[0].rows_folded, cache.offset) == (2, 2, 2)
    feed(cache, backend.ops, second, second, chunk=50)
    layer = cache.layers[0]
    assert (layer.rows_sinks, layer.rows_folded, layer.rows_tail) == (2, 2 + 160, 40)
    k, v = (backend.ops.to_numpy(x) for x in cache.dense(0))
    for rows in (k, v):
        assert np.array_equal(rows[:, :, :2], first[:, :, :2])
        assert np.array_equal(rows[:, :, -40:], second[:, :, -40:])
        assert relative_error(rows[:, :, 2:162], second[:, :, :160]) < 0.2


@pytest.mark.parametrize("mode", QUANTIZED)
def test_trimming_never_touches_stored_codes(backend: Backend, mode: str) -> None:
    rows = gaussian(1, 2, 300, 64)
    cache = filled(backend, mode, rows, rows, window=SMALL)
    view = cache.layers[0].view()
    before = {n: backend.ops.to_numpy(x)[:, :, :100].copy() for n, x in view.v_planes.items()}
    cache.trim(200)
    feed(cache, backend.ops, rows[:, :, :150], rows[:, :, :150], chunk=30)
    after = {n: backend.ops.to_numpy(x)[:, :, :100] for n, x in cache.layers[0].view().v_planes.items()}
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("count", [-1, 101])
def test_trim_refuses_what_is_not_there(reference: Backend, count: int) -> None:
    rows = gaussian(1, 2, 100, 64)
    cache = filled(reference, "int8", rows, rows, window=SMALL)
    with pytest.raises(InputError, match=f"cannot trim {count} rows: the cache holds 100"):
        cache.trim(count)
    assert cache.offset == 100


def test_L10_an_offset_read_before_stays_what_it_was(backend: Backend) -> None:
    rows = gaussian(1, 2, 100, 64)
    cache = filled(backend, "int8", rows, rows, window=SMALL)
    offset, stats = cache.offset, cache.stats()
    feed(cache, backend.ops, rows, rows)
    assert (offset, cache.offset) == (100, 200)
    assert (stats.tokens, stats.rows_folded) == (100, 64)


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_L10_rows_read_before_an_append_stay_what_they_were(backend: Backend, mode: str) -> None:
    rows = gaussian(1, 2, 70, 64)
    cache = filled(backend, mode, rows, rows, window=SMALL)
    k, _ = cache.dense(0)
    before = backend.ops.to_numpy(k).copy()
    feed(cache, backend.ops, rows, rows, chunk=10)
    assert np.array_equal(backend.ops.to_numpy(k), before)


# Rows that are not finite


def with_bad_row(value: float = np.nan) -> np.ndarray:
    rows = gaussian(2, 2, 300, 64)
    rows[1, 0, 40, 3] = value
    return rows


@pytest.mark.parametrize(
    ("mode", "part"),
    [(name, part) for name in QUANTIZED for part in "kv" if getattr(MODES[name], part) != "raw"],
)
def test_C3_the_reference_names_layer_head_and_position(reference: Backend, mode: str, part: str) -> None:
    """And it changes nothing: the cache is as it was before the commit."""
    rows = {"k": gaussian(2, 2, 300, 64, seed=1), "v": gaussian(2, 2, 300, 64, seed=1), part: with_bad_row()}
    cache = new_cache(reference, mode, batch=2)
    layer = cache.layers[0]
    layer.append(rows["k"], rows["v"])
    named = f"{part.upper()} of layer 0, head 0, position 40, sequence 1 is not finite"
    with pytest.raises(NonFiniteError, match=named):
        (cache.begin_decode if MODES[mode].delegated else cache.commit)()
    assert (layer.rows_sinks, layer.rows_folded, layer.rows_tail) == (0, 0, 300)
    for got, want in zip(cache.dense(0), (rows["k"], rows["v"]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_C3_the_position_counts_from_the_start_of_the_sequence(reference: Backend) -> None:
    cache = new_cache(reference, "int8", layers=3)
    rows = gaussian(1, 2, 100, 64)
    feed(cache, reference.ops, rows, rows)
    bad = gaussian(1, 2, 100, 64)
    bad[0, 1, 7] = np.inf
    for layer in cache.layers:
        layer.append(bad, rows)
    with pytest.raises(NonFiniteError, match="layer 0, head 1, position 107, sequence 0"):
        cache.commit()


@pytest.mark.parametrize("mode", QUANTIZED)
def test_C3_a_bad_row_folds_to_nothing_of_its_own_is_counted_and_does_not_spread(backend: Backend, mode: str) -> None:
    backend = replace(backend, raise_on_nonfinite=False)  # what the other backends do, on the reference too
    good, bad = gaussian(2, 2, 300, 64), with_bad_row()
    q = gaussian(2, 4, 1, 64, seed=2)
    clean = filled(backend, mode, good, good, window=SMALL)
    cache = filled(backend, mode, bad, bad, window=SMALL)
    quantized = [part for part in "kv" if getattr(MODES[mode], part) != "raw"]
    assert clean.stats().nonfinite_rows == 0
    assert cache.stats().nonfinite_rows == len(quantized)
    for part, got in zip("kv", cache.dense(0), strict=True):
        row = backend.ops.to_numpy(got)[1, 0, 40]
        if part == "k" and cache.layers[0].layout.k.centred:
            centers = backend.ops.to_numpy(cache.layers[0].view().k_centers)
            assert_centers_follow_spec(centers, bad[:, :, :256], 0, 32)
            np.testing.assert_allclose(row, means_of_rows(centers, (32,) * 8, 0)[1, 0, 40], atol=1e-6)
        else:
            assert (row == 0).all() if part in quantized else np.isnan(row[3])
    out, want = attend(backend, cache.layers[0], q, 0.125), attend(backend, clean.layers[0], q, 0.125)
    same = [(s, h) for s in range(2) for h in range(4) if (s, h // 2) != (1, 0)]
    assert all(np.array_equal(out[i], want[i]) for i in same)
    if quantized == ["k", "v"]:
        exact = exact_attention(backend, cache.layers[0], q, 0.125)
        assert relative_error(out, exact) <= 1e-5


def test_C3_zero_rows_are_not_counted_as_non_finite(backend: Backend) -> None:
    for mode in ("int8", "turbo4", "turbo3-asym"):
        zero = np.zeros((1, 2, 100, 64), np.float32)
        assert filled(backend, mode, zero, zero, window=SMALL).stats().nonfinite_rows == 0


# What a cache says about itself


def test_stats_and_description_are_plain_values(backend: Backend) -> None:
    rows = gaussian(1, 2, 100, 64)
    cache = filled(backend, "int8-turbo4", rows, rows, window=SMALL)
    stats = json.loads(json.dumps(cache.stats().to_dict()))
    assert (stats["tokens"], stats["rows_folded"], stats["rows_raw"]) == (100, 64, 40)
    about = json.loads(json.dumps(cache.describe()))
    assert about["mode"] == "int8-turbo4"
    assert about["window"] == {"sink_tokens": 4, "recent_tokens": 32, "page_size": 32, "boundary_layers": 0}
    assert [(k["op"], k["kernel"], k["kind"]) for k in about["kernels"]] == [
        ("encode", "encode-graph", "graph"),
        ("attend", "attend-graph", "graph"),
    ]


def _state(backend: Backend, cache: Cache) -> list[object]:
    """What a cache holds, layer by layer."""
    views = [layer.view() for layer in cache.layers]
    rows = [tuple(backend.ops.to_numpy(x).tobytes() for x in cache.dense(i)) for i in range(len(views))]
    return [
        (view.sinks, view.folded, view.tokens, view.page_rows, held) for view, held in zip(views, rows, strict=True)
    ]


def _failing(cache: Cache, at: int) -> list[int]:
    """Let the ``at``-th quantization from now on find no memory; the list counts them."""
    calls: list[int] = []

    def failing(encode: object) -> object:
        def run(*args: object) -> object:
            calls.append(1)
            if len(calls) == at:
                raise MemoryError("no room")
            return encode(*args)  # type: ignore[operator]

        return run

    for layer in cache.layers:
        layer._kernels = replace(layer._kernels, encode=failing(layer._kernels.encode))
    return calls


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [20, 60])
def test_a_fold_that_fails_changes_nothing(backend: Backend, first: int, at: int) -> None:
    """The first fold or a later one, in K or V of either layer; where there is room again it goes on as ever."""
    rows = [gaussian(1, 2, 100, 64, seed=i) for i in range(2)]
    caches = [new_cache(backend, "turbo4", layers=2, window=WindowPolicy(4, 0, 32)) for _ in range(2)]
    for cache in caches:
        feed(cache, backend.ops, *(x[:, :, :first] for x in rows))
        for layer in cache.layers:
            layer.append(*(backend.ops.asarray(x[:, :, first:]) for x in rows))
    broken, whole = caches
    before = _state(backend, broken)
    calls = _failing(broken, at)
    with pytest.raises(MemoryError):
        broken.commit()
    assert len(calls) == at
    assert _state(backend, broken) == before
    broken.commit()
    whole.commit()
    assert _state(backend, broken) == _state(backend, whole)


@pytest.mark.parametrize("at", [1, 2])
def test_a_hand_over_that_fails_is_made_by_the_next_call(backend: Backend, at: int) -> None:
    """Of a delegated mode, in whose layers V alone is quantized."""
    rows = [gaussian(1, 2, 100, 64, seed=i) for i in range(2)]
    broken, whole = (new_cache(backend, "turbo4-delegated", layers=2) for _ in range(2))
    for cache in (broken, whole):
        feed(cache, backend.ops, *rows)
    before = _state(backend, broken)
    _failing(broken, 2 * at)
    with pytest.raises(MemoryError):
        broken.begin_decode()
    assert not broken.handed_over
    assert _state(backend, broken)[at - 1 :] == before[at - 1 :]
    assert [layer.tokens for layer in broken.layers] == [100, 100]
    for cache in (broken, whole):
        cache.begin_decode()
    assert _state(backend, broken) == _state(backend, whole)


def test_a_step_that_fails_between_k_and_v_is_taken_back(backend: Backend) -> None:
    cache = new_cache(backend, "int8", layers=2, window=SMALL)
    feed(cache, backend.ops, gaussian(1, 2, 50, 64), gaussian(1, 2, 50, 64, seed=1))
    before = _state(backend, cache)
    undo, new = cache.checkpoint(), backend.ops.asarray(gaussian(1, 2, 3, 64))
    cache.layers[0].append(new, new)
    cache.layers[1]._k.tail.append(new)  # and V's found no room
    undo()
    assert _state(backend, cache) == before


def test_a_row_that_cannot_be_quantized_stops_every_layer(reference: Backend) -> None:
    cache = new_cache(reference, "int8", layers=2, window=SMALL)
    good, bad = gaussian(1, 2, 100, 64), gaussian(1, 2, 100, 64)
    bad[0, 1, 7, 3] = np.nan
    cache.layers[0].append(good, good)
    cache.layers[1].append(good, bad)
    before = [(layer.rows_folded, layer.rows_tail) for layer in cache.layers]
    with pytest.raises(NonFiniteError, match="V of layer 1"):
        cache.commit()
    assert [(layer.rows_folded, layer.rows_tail) for layer in cache.layers] == before


def test_an_exact_tail_keeps_its_place_when_its_front_folds(backend: Backend) -> None:
    """With a budget the tail has its size for good: a fold takes no room for another one."""
    exact = RowBuffer(backend.ops, 1, 2, 64, "float32", 96, exact=True)
    rows = gaussian(1, 2, 90, 64)
    exact.append(backend.ops.asarray(rows))
    rest = exact.without_front(64)
    assert (rest.length, rest.capacity, rest.reallocations, rest.bytes_copied) == (26, 96, 0, 0)
    assert rest.arrays()[0] is exact.arrays()[0]
    more = gaussian(1, 2, 30, 64, seed=1)
    rest.append(backend.ops.asarray(more))
    np.testing.assert_array_equal(backend.ops.to_numpy(rest.live()), np.concatenate([rows[:, :, 64:], more], 2))
    assert exact.without_front(90).length == exact.without_front(90).start == 0


def test_a_rewind_into_a_hole_at_the_end_goes_before_it(backend: Backend) -> None:
    cache = new_cache(backend, "fp16")
    feed(cache, backend.ops, gaussian(1, 2, 10, 64), gaussian(1, 2, 10, 64, seed=1))
    cache.drop(7, 3)
    assert cache.offset == 10
    assert (cache.rewind(8), cache.offset, cache.tokens, cache.holes) == (7, 7, 7, ())
