"""Attention through the cache: equal to float64 attention over the rows that the cache stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import (
    DTYPES,
    FOLDED_AT_ONCE,
    HEAD_DIMS,
    NO_WINDOW,
    QUANTIZED,
    SMALL,
    attend,
    cast,
    chunked,
    decoded,
    exact_attention,
    feed,
    fill_unused,
    filled,
    gaussian,
    means_of_rows,
    new_cache,
    relative_error,
)

from kvcore.attention import attend_graph
from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.layout import KVView, WindowPolicy
from kvcore.modes import CODEC_FUNCTIONS, MODES
from kvcore.ops import Array, Ops

DEFAULT = WindowPolicy()
FP32 = 1e-5  # the graph path in float32; the design asks for 1e-4
ROUNDED = {"float32": FP32, "float16": 1e-3, "bfloat16": 4e-3}  # the output in the query's own dtype

each_mode = pytest.mark.parametrize("mode", MODES)
windows = pytest.mark.parametrize("window", [DEFAULT, SMALL], ids=["128", "32"])


def rows_of(
    tokens: int, *, batch: int = 1, heads: int = 2, dim: int = 64, v_dim: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    return gaussian(batch, heads, tokens, dim), gaussian(batch, heads, tokens, v_dim or dim, seed=1)


def query(rows: int, *, batch: int = 1, heads: int = 4, dim: int = 64, rms: float = 1.0) -> np.ndarray:
    return gaussian(batch, heads, rows, dim, seed=2, rms=rms)


def with_planes(ops: Ops, view: KVView, part: str, factor: np.ndarray) -> KVView:
    """The same codes under other scales: each stored scale times ``factor`` [folded]."""
    planes = dict(view.k_planes if part == "k" else view.v_planes)
    planes["scale"] = ops.astype(planes["scale"] * ops.asarray(factor[:, None].astype(np.float16)), "float16")
    return replace(view, **{f"{part}_planes": planes})


# Token by token, by chunk, at each length


@each_mode
def test_token_by_token_attention_is_attention_over_the_dense_view(backend: Backend, mode: str) -> None:
    """200 tokens of prompt, then 200 steps, past the first folds at 256 and 384."""
    ops, (k, v), q = backend.ops, rows_of(400), query(400)
    cache = new_cache(backend, mode, window=DEFAULT)
    feed(cache, ops, k[:, :, :200], v[:, :, :200])
    cache.begin_decode()
    layer, worst = cache.layers[0], 0.0
    for i in range(200, 400):
        layer.append(ops.asarray(k[:, :, i : i + 1]), ops.asarray(v[:, :, i : i + 1]))
        step = q[:, :, i : i + 1]
        dense = (ops.to_numpy(x) for x in layer.dense())
        worst = max(worst, relative_error(attend(backend, layer, step, 0.125), spec.attention(step, *dense, 0.125)))
        cache.commit()
    assert worst <= FP32
    assert cache.stats().rows_folded == (256 if MODES[mode].quantized else 0)


@windows
@pytest.mark.parametrize("chunk", [1, 7, 64, 300], ids=str)
@each_mode
def test_prefill_by_chunks_sees_its_own_rows_raw_and_earlier_ones_as_committed(
    backend: Backend, mode: str, chunk: int, window: WindowPolicy
) -> None:
    tokens = 60 if chunk == 1 else 300
    ops, (k, v), q = backend.ops, rows_of(tokens), query(tokens)
    cache = new_cache(backend, mode, window=window)
    layer = cache.layers[0]
    for part in chunked(tokens, chunk):
        old = decoded(ops, layer)
        layer.append(ops.asarray(k[:, :, part]), ops.asarray(v[:, :, part]))
        seen = [np.concatenate([x, new[:, :, part]], 2) for x, new in zip(old, (k, v), strict=True)]
        out = attend(backend, layer, q[:, :, part], 0.125)
        assert relative_error(out, spec.attention(q[:, :, part], *seen, 0.125)) <= FP32
        cache.commit()


@windows
@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 63, 64, 65, 67, 127, 128, 129, 255, 256, 257, 259, 4097], ids=str)
@each_mode
def test_C5_lengths_at_the_borders_of_pages(backend: Backend, mode: str, tokens: int, window: WindowPolicy) -> None:
    cache = filled(backend, mode, *rows_of(tokens, heads=1), window=window)
    q = query(1, heads=2)
    out = attend(backend, cache.layers[0], q, 0.125)
    assert relative_error(out, exact_attention(backend, cache.layers[0], q, 0.125)) <= FP32


@each_mode
def test_without_a_window_every_row_may_be_folded(backend: Backend, mode: str) -> None:
    """No sinks and no recent rows: after a commit at a page's end no raw row is left to attend to."""
    cache = filled(backend, mode, *rows_of(96), window=NO_WINDOW)
    layer, q = cache.layers[0], query(5)
    assert layer.rows_tail == (0 if MODES[mode].quantized else 96)
    out = attend(backend, layer, q, 0.125)
    assert relative_error(out, exact_attention(backend, layer, q, 0.125)) <= FP32


@each_mode
def test_C6_attention_over_no_rows_is_zero(backend: Backend, mode: str) -> None:
    cache = new_cache(backend, mode, batch=2)
    out = attend(backend, cache.layers[0], query(1, batch=2), 0.125)
    assert out.shape == (2, 4, 1, 64)
    assert (out == 0).all()


@each_mode
def test_C6_all_rows_trimmed_is_the_same_as_none(backend: Backend, mode: str) -> None:
    cache = filled(backend, mode, *rows_of(100), window=SMALL)
    cache.trim(100)
    assert (attend(backend, cache.layers[0], query(1), 0.125) == 0).all()


# Shapes: head sizes, head groups, batches


@pytest.mark.parametrize("dim", HEAD_DIMS)
@each_mode
def test_C4_every_head_size_works_in_every_mode(backend: Backend, mode: str, dim: int) -> None:
    cache = filled(backend, mode, *rows_of(100, dim=dim), window=SMALL)
    q, scale = query(3, dim=dim), dim**-0.5
    assert cache.stats().rows_folded == (64 if MODES[mode].quantized else 0)
    out = attend(backend, cache.layers[0], q, scale)
    assert relative_error(out, exact_attention(backend, cache.layers[0], q, scale)) <= FP32


@pytest.mark.parametrize("ratio", [1, 3, 4, 5, 6, 7, 8])
@each_mode
def test_C7_grouped_heads_equal_expanded_heads(backend: Backend, mode: str, ratio: int) -> None:
    k, v = rows_of(100)
    grouped = filled(backend, mode, k, v, window=SMALL, heads=(2 * ratio, 2))
    expanded = [np.repeat(x, ratio, axis=1) for x in (k, v)]
    whole = filled(backend, mode, *expanded, window=SMALL, heads=(2 * ratio, 2 * ratio))
    for rows in (1, 4):
        q = query(rows, heads=2 * ratio)
        outs = [attend(backend, cache.layers[0], q, 0.125) for cache in (grouped, whole)]
        assert relative_error(*outs) <= FP32
        assert relative_error(outs[0], exact_attention(backend, grouped.layers[0], q, 0.125)) <= FP32


@pytest.mark.parametrize("heads", [(9, 3), (40, 8), (7, 1), (4, 4), (12, 2)], ids=lambda h: f"{h[0]}-{h[1]}")
@each_mode
def test_B25_a_batch_equals_its_sequences_alone(backend: Backend, mode: str, heads: tuple[int, int]) -> None:
    (k, v), q = rows_of(100, batch=3, heads=heads[1]), query(4, batch=3, heads=heads[0])
    alone = [
        attend(backend, filled(backend, mode, k[i], v[i], window=SMALL, heads=heads).layers[0], q[i], 0.125)
        for i in (slice(n, n + 1) for n in range(3))
    ]
    for batch in (2, 3):
        cache = filled(backend, mode, k[:batch], v[:batch], window=SMALL, heads=heads)
        out = attend(backend, cache.layers[0], q[:batch], 0.125)
        assert relative_error(out, np.concatenate(alone[:batch])) <= FP32


@pytest.mark.parametrize("widths", [(192, 128), (64, 128)], ids=lambda w: f"{w[0]}-{w[1]}")
@each_mode
def test_B102_k_and_v_of_different_widths(backend: Backend, mode: str, widths: tuple[int, int]) -> None:
    cache = filled(backend, mode, *rows_of(100, dim=widths[0], v_dim=widths[1]), window=SMALL)
    for rows in (1, 4):
        q, scale = query(rows, dim=widths[0]), widths[0] ** -0.5
        out = attend(backend, cache.layers[0], q, scale)
        assert out.shape == (1, 4, rows, widths[1])
        assert relative_error(out, exact_attention(backend, cache.layers[0], q, scale)) <= FP32


# Magnitudes


@pytest.mark.parametrize("deviation", [1.0, 3.0])
@pytest.mark.parametrize("v_rms", [1.0, 1e-2, 1e-3, 1e-5])
@each_mode
def test_error_over_magnitudes_of_v_and_spreads_of_logits(
    backend: Backend, mode: str, v_rms: float, deviation: float
) -> None:
    """Each dtype of rows; the output in float32, so that the sums are judged and not the last rounding."""
    q = query(2, rms=deviation)
    for dtype in DTYPES:
        k, v = gaussian(1, 2, 200, 64, dtype=dtype), gaussian(1, 2, 200, 64, seed=1, rms=v_rms, dtype=dtype)
        layer = filled(backend, mode, k, v, window=SMALL, dtype=dtype).layers[0]
        assert relative_error(attend(backend, layer, q, 0.125), exact_attention(backend, layer, q, 0.125)) <= FP32


@pytest.mark.parametrize("large", ["k", "v"])
@each_mode
def test_error_with_one_page_100_times_the_others(backend: Backend, mode: str, large: str) -> None:
    """A large page of K has logits of ±300, which float32 holds to 2e-5 and no better."""
    k, v = rows_of(200)
    (k if large == "k" else v)[:, :, 64:96] *= 100
    layer, q = filled(backend, mode, k, v, window=SMALL).layers[0], query(2)
    error = relative_error(attend(backend, layer, q, 0.125), exact_attention(backend, layer, q, 0.125))
    assert error <= (1e-4 if large == "k" else FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@each_mode
def test_the_output_has_the_dtype_of_the_query_and_its_rounding_alone(backend: Backend, mode: str, dtype: str) -> None:
    k, v = (cast(x, dtype) for x in rows_of(200))
    layer, q = filled(backend, mode, k, v, window=SMALL, dtype=dtype).layers[0], cast(query(3), dtype)
    out = attend(backend, layer, q, 0.125)
    assert out.dtype == q.dtype
    assert relative_error(out, exact_attention(backend, layer, q, 0.125)) <= ROUNDED[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@each_mode
def test_C9_logits_of_70000_stay_finite(backend: Backend, mode: str, dtype: str) -> None:
    """q·k reaches 7e4 before the scale: above fp16's range, and with the scale a softmax over few rows."""
    k, v = rows_of(200)
    q = query(2)
    factor = np.sqrt(7e4 / np.abs(q @ np.repeat(k, 2, 1).swapaxes(2, 3)).max())
    k, v, q = (cast(x, dtype) for x in (k * factor, v, q * factor))
    layer = filled(backend, mode, k, v, window=SMALL, dtype=dtype).layers[0]
    for scale in (0.125, 1e-4):
        error = relative_error(attend(backend, layer, q, scale), exact_attention(backend, layer, q, scale))
        assert error <= max(ROUNDED[dtype], 1e-3 if scale == 0.125 else 0)


@pytest.mark.parametrize("mode", ["int8", "turbo4"])
def test_B98_products_are_not_summed_in_16_bits(backend: Backend, mode: str) -> None:
    """q and k of norm 400 in fp16, D=128, 600 rows: logits of about 1.4e4 before the scale."""
    q, k = query(1, dim=128), gaussian(1, 2, 600, 128)
    q, k = (cast(400 * x / np.linalg.norm(x, axis=-1, keepdims=True), "float16") for x in (q, k))
    v = gaussian(1, 2, 600, 128, seed=1, dtype="float16")
    cache = filled(backend, mode, k, v, window=DEFAULT, dtype="float16", kernels="graph")
    assert cache.stats().rows_folded == 384
    out = attend(backend, cache.layers[0], q, 128**-0.5)
    assert relative_error(out, exact_attention(backend, cache.layers[0], q, 128**-0.5)) <= 2e-3


@each_mode
def test_B04_large_key_channels_do_not_saturate(backend: Backend, mode: str) -> None:
    k, v = rows_of(512)
    k[..., 11] *= 1000
    layer, q = filled(backend, mode, k, v, window=NO_WINDOW).layers[0], query(1)
    q[..., 11] /= 1000
    out = attend(backend, layer, q, 0.125)
    assert relative_error(out, exact_attention(backend, layer, q, 0.125)) <= 1e-4


@each_mode
def test_C10_bf16_keys_beyond_fp16(backend: Backend, mode: str) -> None:
    k, v = (cast(x, "bfloat16") for x in rows_of(200))
    k[:, :, ::3, 5] = 1e5
    q = query(1)
    q[..., 5] = 1e-5
    layer = filled(backend, mode, k, v, window=SMALL, dtype="bfloat16").layers[0]
    assert np.isfinite(np.concatenate(decoded(backend.ops, layer))).all()
    error = relative_error(attend(backend, layer, q, 0.125), exact_attention(backend, layer, q, 0.125))
    # Rotated, the large channel's share of a logit is spread over all channels and cancels only in the sum.
    assert error <= (2e-3 if MODES[mode].k == "turbo4" else 1e-4)


@each_mode
def test_B03_zero_values_give_zero_and_zero_keys_the_mean(backend: Backend, mode: str) -> None:
    (k, v), q = rows_of(150), query(1)
    layer = filled(backend, mode, k, np.zeros_like(v), window=NO_WINDOW).layers[0]
    assert (attend(backend, layer, q, 0.125) == 0).all()
    layer = filled(backend, mode, np.zeros_like(k), v, window=NO_WINDOW).layers[0]
    mean = decoded(backend.ops, layer)[1].mean(2, keepdims=True)
    assert relative_error(attend(backend, layer, q, 0.125), np.repeat(mean, 2, 1)) <= FP32


# Masks


@pytest.mark.parametrize("chunk", [40, 7, 1])
@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_B27_a_sliding_window_of_8_is_8_keys_in_prefill_and_in_decode(backend: Backend, mode: str, chunk: int) -> None:
    """V is the identity, so the output of a query is its weights."""
    ops, tokens = backend.ops, 40
    k, v = gaussian(1, 1, tokens, 64), np.eye(tokens, 64, dtype=np.float32)[None, None]
    cache = new_cache(backend, mode, heads=(1, 1), window=NO_WINDOW)
    seen = []
    for part in chunked(tokens, chunk):
        cache.layers[0].append(ops.asarray(k[:, :, part]), ops.asarray(v[:, :, part]))
        seen.append(attend(backend, cache.layers[0], query(part.stop - part.start, heads=1), 0.125, window=8)[0, 0])
        cache.commit()
    seen_keys = np.concatenate(seen)[:, :tokens] > 0
    want = [[max(0, i - 7) <= j <= i for j in range(tokens)] for i in range(tokens)]
    assert seen_keys.tolist() == want


@pytest.mark.parametrize("window", [1, 8, 50, 200])
@pytest.mark.parametrize("rows", [1, 5, 90])
@each_mode
def test_a_sliding_window_over_folded_rows(backend: Backend, mode: str, rows: int, window: int) -> None:
    layer, q = filled(backend, mode, *rows_of(200), window=SMALL).layers[0], query(rows)
    out = attend(backend, layer, q, 0.125, window)
    assert relative_error(out, exact_attention(backend, layer, q, 0.125, window)) <= FP32


def test_scores_are_tiled_without_changing_the_result(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 keys instead of one: pages, sinks and tail each span several."""
    layer, q = (
        filled(backend, "int8-turbo4", *rows_of(700), window=WindowPolicy(4, 300, 100)).layers[0],
        query(40),
    )
    whole = attend(backend, layer, q, 0.125)
    monkeypatch.setattr("kvcore.attention.SCORE_ELEMENTS", 1)
    tiled = attend(backend, layer, q, 0.125)
    assert relative_error(tiled, whole) <= FP32
    assert relative_error(tiled, exact_attention(backend, layer, q, 0.125)) <= FP32


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_no_block_of_scores_exceeds_the_limit(backend: Backend, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, largest = 1 << 16, 0
    layer, q = filled(backend, mode, *rows_of(1500), window=SMALL).layers[0], query(64)
    matmul = type(backend.ops).matmul

    def measured(self: Ops, x: Array, y: Array) -> Array:
        nonlocal largest
        out = matmul(self, x, y)
        if out.shape[-1] != 64:
            largest = max(largest, int(np.prod(out.shape)))
        return out

    monkeypatch.setattr("kvcore.attention.SCORE_ELEMENTS", limit)
    monkeypatch.setattr(type(backend.ops), "matmul", measured)
    attend(backend, layer, q, 0.125)
    assert 0 < largest <= limit


# Memory: what is unused, strided or scaled


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 99], ids=str)
@each_mode
def test_B96_what_lies_in_unused_capacity_never_shows(backend: Backend, mode: str, tokens: int) -> None:
    cache = filled(backend, mode, *rows_of(tokens, batch=2), window=NO_WINDOW, dtype="float16")
    q, outs = query(1, batch=2), []
    for byte in (0x00, 0xFF, 0x7E):
        for buffer in cache.layers[0].buffers():
            fill_unused(buffer, byte)
        outs.append(attend(backend, cache.layers[0], q, 0.125))
        outs.extend(backend.ops.to_numpy(x) for x in cache.dense(0))
    assert all(np.isfinite(out).all() for out in outs)
    assert all(np.array_equal(outs[i], outs[i % 3]) for i in range(9))


@pytest.mark.parametrize("rows", [1, 6], ids=["decode", "prefill"])
@pytest.mark.parametrize("mode", QUANTIZED)
def test_B99_stored_scales_are_what_attention_reads(backend: Backend, mode: str, rows: int) -> None:
    """V's scales doubled: twice the output. K's doubled: twice the logits. A K scale of 0: a logit of 0. Centred keys
    move about their centre instead."""
    ops, q = backend.ops, query(rows)
    layer = filled(backend, mode, *rows_of(64), window=NO_WINDOW).layers[0]
    view = layer.view()
    assert view.folded == view.tokens == 64

    def run(changed: KVView) -> np.ndarray:
        return ops.to_numpy(attend_graph(ops, ops.asarray(q), changed, 0.125))

    plain, (k, v) = run(view), decoded(ops, layer)
    np.testing.assert_allclose(run(with_planes(ops, view, "v", np.full(64, 2.0))), 2 * plain, rtol=1e-6)
    if MODES[mode].k == "raw":
        return
    means = means_of_rows(ops.to_numpy(view.k_centers), view.page_rows, 0) if view.layout.k.centred else 0 * k
    doubled = run(with_planes(ops, view, "k", np.full(64, 2.0)))
    assert relative_error(doubled, spec.attention(q, 2 * k - means, v, 0.125)) <= 1e-4
    assert relative_error(doubled, plain) > 1e-2
    without = np.ones(64)
    without[20] = 0
    k[:, :, 20] = means[:, :, 20]
    assert relative_error(run(with_planes(ops, view, "k", without)), spec.attention(q, k, v, 0.125)) <= FP32


@each_mode
def test_B138_views_of_a_larger_buffer_equal_compact_copies(backend: Backend, mode: str) -> None:
    """Capacity beyond the live rows, batch of 2: neither decoding nor attention may assume contiguous rows."""
    ops = backend.ops
    k, v = rows_of(750, batch=2)
    cache = filled(backend, mode, k[:, :, :700], v[:, :, :700], window=SMALL)
    feed(cache, ops, k[:, :, 700:], v[:, :, 700:], chunk=1)
    layer, q = cache.layers[0], query(1, batch=2)
    assert any(buffer.capacity > buffer.length for buffer in layer.buffers())
    view = layer.view()

    def compact(array: Array) -> Array:
        return ops.asarray(np.ascontiguousarray(ops.to_numpy(array)))

    copies = {name: compact(getattr(view, name)) for name in ("tail_k", "tail_v")}
    if view.sinks:
        copies |= {name: compact(getattr(view, name)) for name in ("sink_k", "sink_v")}
    planes = {name: {n: compact(x) for n, x in getattr(view, name).items()} for name in ("k_planes", "v_planes")}
    for codec, name, rotation in (
        (view.layout.k, "k_planes", view.k_rotation),
        (view.layout.v, "v_planes", view.v_rotation),
    ):
        decode = CODEC_FUNCTIONS[codec.name].decode
        pair = (decode(ops, source, rotation) for source in (getattr(view, name), planes[name]))
        assert np.array_equal(*(ops.to_numpy(x) for x in pair))
    same = replace(view, **copies, **planes)
    outs = [ops.to_numpy(attend_graph(ops, ops.asarray(q), each, 0.125)) for each in (view, same)]
    assert relative_error(*outs) <= 1e-6


@each_mode
def test_B138_rows_and_queries_may_be_transposed_views(backend: Backend, mode: str) -> None:
    """[B, T, H, D] in memory, as a projection leaves them."""
    ops, (k, v), q = backend.ops, rows_of(150, batch=2), query(3, batch=2)

    def transposed(x: np.ndarray) -> Array:
        return ops.permute_dims(ops.asarray(np.ascontiguousarray(x.swapaxes(1, 2))), (0, 2, 1, 3))

    plain = filled(backend, mode, k, v, window=SMALL)
    cache = new_cache(backend, mode, batch=2, window=SMALL)
    cache.layers[0].append(transposed(k), transposed(v))
    cache.commit()
    cache.begin_decode()
    for one, other in zip(decoded(ops, cache.layers[0]), decoded(ops, plain.layers[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    out = ops.to_numpy(cache.layers[0].attend(transposed(q), 0.125))
    assert relative_error(out, attend(backend, plain.layers[0], q, 0.125)) <= FP32


@pytest.mark.parametrize("dtype", DTYPES)
@each_mode
def test_B34_every_mode_takes_every_dtype_of_rows_in_every_dtype_of_cache(
    backend: Backend, mode: str, dtype: str
) -> None:
    for given in DTYPES:
        k, v = (cast(x, given) for x in rows_of(100))
        layer = filled(backend, mode, k, v, window=SMALL, dtype=dtype).layers[0]
        q = cast(query(1), given)
        out = attend(backend, layer, q, 0.125)
        assert out.dtype == q.dtype
        assert layer.rows_folded == (64 if MODES[mode].quantized else 0)
        assert relative_error(out, exact_attention(backend, layer, q, 0.125)) <= ROUNDED[given]


@pytest.mark.parametrize("mode", FOLDED_AT_ONCE)
def test_a_quantized_cache_is_close_to_a_raw_one(backend: Backend, mode: str) -> None:
    """Not only to its own dense view: the rows that it stands for are those that came."""
    (k, v), q = rows_of(300), query(1)
    raw = spec.attention(q, k, v, 0.125)
    layer = filled(backend, mode, k, v, window=SMALL).layers[0]
    limit = {"int8": 0.012, "int8-turbo4": 0.12, "turbo4-asym": 0.12, "turbo3-asym": 0.24, "turbo4": 0.16}[mode]
    assert relative_error(attend(backend, layer, q, 0.125), raw) <= limit
