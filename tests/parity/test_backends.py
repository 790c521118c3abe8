"""The same rows give the same planes and the same attention on every backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import (
    DTYPES,
    GAUSSIAN_MSE,
    HEAD_DIMS,
    SMALL,
    assert_planes_follow_spec,
    attend,
    cast,
    decode_planes,
    decoded,
    encode,
    exact_attention,
    feed,
    filled,
    fp16_steps,
    gaussian,
    new_cache,
    relative_error,
    relative_mse,
)

from kvcore.attention import attend_graph
from kvcore.backends import Backend
from kvcore.modes import MODES

each_codec = pytest.mark.parametrize("codec", GAUSSIAN_MSE)
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@each_codec
def test_planes_follow_the_specification_at_every_head_size(backend: Backend, codec: str, dim: int) -> None:
    rows = gaussian(2, 2, 150, dim)
    for layer, part in ((0, "k"), (7, "v")):
        planes = encode(backend, codec, rows, layer=layer, part=part)
        assert_planes_follow_spec(codec, planes, rows, layer=layer, part=part)


@pytest.mark.parametrize("rms", [1e4, 30.0, 1.0, 1e-2, 1e-3])
@each_codec
def test_planes_follow_the_specification_at_every_magnitude(backend: Backend, codec: str, rms: float) -> None:
    rows = gaussian(1, 2, 150, 64, rms=rms)
    rows[0, 0, 5] = 0
    rows[0, 1, 6, 9] = 50 * rms
    assert_planes_follow_spec(codec, encode(backend, codec, rows), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@each_codec
def test_B34_planes_of_16_bit_rows_are_those_of_their_exact_float32_values(
    backend: Backend, codec: str, dtype: str
) -> None:
    """Through fp16, bf16 rows at 1e5 would be infinite and at 1e-7 would be zero."""
    for rms in (1e5, 1.0, 1e-7) if dtype == "bfloat16" else (1.0,):
        rows = gaussian(1, 2, 100, 128, rms=rms, dtype=dtype)
        planes, wide = encode(backend, codec, rows), encode(backend, codec, rows.astype(np.float32))
        assert all(np.array_equal(planes[name], wide[name]) for name in planes)
        if rms >= 1:
            assert_planes_follow_spec(codec, planes, rows)


@each_codec
def test_planes_of_two_backends_differ_in_the_last_place_only(backend: Backend, reference: Backend, codec: str) -> None:
    rows = gaussian(2, 2, 500, 96, dtype="bfloat16")
    got, want = encode(backend, codec, rows), encode(reference, codec, rows)
    assert fp16_steps(got["scale"], want["scale"]).max() <= 1
    assert (got["codes"] != want["codes"]).mean() < 1e-4
    decoded = [decode_planes(planes, codec, 0, "k", 96) for planes in (got, want)]
    assert relative_mse(*decoded) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@each_mode
def test_a_cache_with_a_history_is_the_same_on_every_backend(
    backend: Backend, reference: Backend, mode: str, dtype: str
) -> None:
    """Appends, a hand-over, a trim into the pages, appends: regions, bytes and rows agree, and each backend's
    attention is float64's over its own rows: an index on the other side of a midpoint moves a row, not the sum."""
    first, second = ([gaussian(2, 2, 220, 64, seed=s + i, dtype=dtype) for i in range(2)] for s in (0, 5))
    both = (reference, backend)
    caches = [new_cache(each, mode, batch=2, dtype=dtype, window=SMALL, layers=2) for each in both]
    for each, cache in zip(both, caches, strict=True):
        feed(cache, each.ops, *first, chunk=33)
        cache.begin_decode()
        cache.trim(100)
        feed(cache, each.ops, *second, chunk=40)
    assert caches[1].stats() == caches[0].stats()
    layers = [cache.layers[1] for cache in caches]
    stored = [decoded(each.ops, layer) for each, layer in zip(both, layers, strict=True)]
    for want, got in zip(*stored, strict=True):
        sinks, folded = layers[0].rows_sinks, layers[0].rows_folded
        assert np.array_equal(want[:, :, :sinks], got[:, :, :sinks])
        assert np.array_equal(want[:, :, folded:], got[:, :, folded:])
        # Now and then an index falls on the other side of a midpoint: one step of one element. Or an element of a
        # centre is rounded to the other float16, and shows in all rows of its page.
        near = 1e-3 if want is stored[0][0] and layers[0].layout.k.centred else 1e-5
        assert ((want - got) ** 2).sum() <= 1e-5 * (want**2).sum()
        assert (np.abs(want - got).max(-1) > near).sum() <= 0.01 * want[..., 0].size
    q = cast(gaussian(2, 4, 3, 64, seed=3), dtype)
    limit = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}[dtype]
    for each, layer in zip(both, layers, strict=True):
        assert relative_error(attend(each, layer, q, 0.125), exact_attention(each, layer, q, 0.125)) <= limit


@pytest.mark.parametrize("rows", [1, 4])
@each_mode
def test_attention_over_the_same_planes_agrees_across_backends(
    backend: Backend, reference: Backend, mode: str, rows: int
) -> None:
    """The reference's planes, moved bit by bit: what is left is the arithmetic of attention."""
    k, v = gaussian(1, 3, 300, 80), gaussian(1, 3, 300, 80, seed=1)
    view = filled(reference, mode, k, v, window=SMALL, heads=(9, 3)).layers[0].view()
    own = filled(backend, mode, k, v, window=SMALL, heads=(9, 3)).layers[0].view()
    ops = backend.ops
    arrays = ("sink_k", "sink_v", "tail_k", "tail_v")
    moved = replace(
        own,
        **{name: ops.asarray(getattr(view, name)) for name in arrays if getattr(view, name) is not None},
        **{f"{p}_planes": {n: ops.asarray(x) for n, x in getattr(view, f"{p}_planes").items()} for p in "kv"},
    )
    q = gaussian(1, 9, rows, 80, seed=2)
    want = attend_graph(reference.ops, q, view, 80**-0.5)
    got = ops.to_numpy(attend_graph(ops, ops.asarray(q), moved, 80**-0.5))
    assert relative_error(got, want) <= 1e-5
