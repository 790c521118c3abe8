"""The Metal kernel that folds rows, against the specification."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import (
    DTYPES,
    GAUSSIAN_MSE,
    assert_planes_follow_spec,
    cast,
    decode_planes,
    encode,
    fp16_steps,
    gaussian,
    relative_mse,
)
from schedules import compile_for, encoded, rotation_of

from kvcore.backends import Backend
from kvcore.backends.metal.capabilities import HEAD_DIMS
from kvcore.backends.metal.encode import encode as encode_launches
from kvcore.layout import CODECS

each_codec = pytest.mark.parametrize("codec", GAUSSIAN_MSE)


@pytest.fixture(scope="module", autouse=True)
def _compiled(host: Backend) -> None:
    def call(codec: str, dim: int, dtype: str):
        rows, rotation = gaussian(1, 1, 1, dim, dtype=dtype), rotation_of(host, codec, dim)
        return lambda run: encode_launches(host.ops, CODECS[codec], rows, rotation, run)

    shapes = [(dim, "float32") for dim in HEAD_DIMS] + [(128, dtype) for dtype in DTYPES]
    compile_for(call(codec, *shape) for codec in GAUSSIAN_MSE for shape in shapes)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@each_codec
def test_planes_follow_the_specification_at_every_head_size(host: Backend, codec: str, dim: int) -> None:
    rows = gaussian(2, 3, 35, dim)
    for layer, part in ((0, "k"), (7, "v")):
        planes = encoded(host, codec, rows, layer=layer, part=part)
        assert_planes_follow_spec(codec, planes, rows, layer=layer, part=part)
    assert relative_mse(decode_planes(planes, codec, 7, "v", dim), rows) <= GAUSSIAN_MSE[codec]


@pytest.mark.parametrize("rms", [1e4, 30.0, 1.0, 1e-2, 1e-3, 1e-5])
@each_codec
def test_planes_follow_the_specification_at_every_magnitude(host: Backend, codec: str, rms: float) -> None:
    rows = gaussian(1, 2, 60, 64, rms=rms)
    rows[0, 1, 6, 9] = 50 * rms
    assert_planes_follow_spec(codec, encoded(host, codec, rows), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@each_codec
def test_B34_planes_of_16_bit_rows_are_those_of_their_exact_float32_values(
    host: Backend, codec: str, dtype: str
) -> None:
    for rms in (1e5, 1.0, 1e-7) if dtype == "bfloat16" else (1.0,):
        rows = gaussian(1, 2, 40, 128, rms=rms, dtype=dtype)
        planes, wide = encoded(host, codec, rows), encoded(host, codec, rows.astype(np.float32))
        assert all(np.array_equal(planes[name], wide[name]) for name in planes)
        if rms >= 1:
            assert_planes_follow_spec(codec, planes, rows)


@pytest.mark.parametrize("dim", [80, 128])
@each_codec
def test_planes_are_those_of_the_graph_but_for_the_last_place(host: Backend, codec: str, dim: int) -> None:
    rows = gaussian(1, 2, 100, dim)
    got, want = encoded(host, codec, rows), encode(host, codec, rows)
    assert got.keys() == want.keys()
    assert {n: (p.shape, p.dtype) for n, p in got.items()} == {n: (p.shape, p.dtype) for n, p in want.items()}
    assert fp16_steps(got["scale"], want["scale"]).max() <= 1
    assert (got["codes"] != want["codes"]).mean() < 1e-3


@each_codec
def test_zero_and_nonfinite_rows(host: Backend, codec: str) -> None:
    rows = gaussian(1, 2, 9, 128)
    rows[0, 0, 2] = 0
    rows[0, 0, 4, 100], rows[0, 1, 5, 3], rows[0, 1, 8, 0] = np.nan, np.inf, -np.inf
    planes = encoded(host, codec, rows)
    for head, row in ((0, 4), (1, 5), (1, 8)):
        assert planes["scale"][0, head, row, 0] == 0
        assert not planes["codes"][0, head, row].any()
    assert planes["scale"][0, 0, 2, 0] == (1 if codec == "int8" else 0)
    assert not decode_planes(planes, codec, 0, "k", 128)[0, 0, 2].any()
    marked = (planes["scale"] == 0)[..., 0] & ~planes["codes"].any(-1)
    assert marked.sum() == 3
    rows[~np.isfinite(rows).all(-1)] = 0
    good = np.isfinite(rows).all(-1) & rows.any(-1)
    alone = {name: plane[good][None, None] for name, plane in planes.items()}
    assert_planes_follow_spec(codec, alone, rows[good][None, None])


def test_B01_small_rows_keep_their_scale(host: Backend) -> None:
    for dim in (64, 128):
        for absmax in (1e-3, 1e-2, 0.5, 4.0):
            rows = gaussian(1, 1, 20, dim)
            rows *= np.float32(absmax) / np.abs(rows).max(-1, keepdims=True)
            planes = encoded(host, "int8", rows)
            assert_planes_follow_spec("int8", planes, rows)
            assert np.abs(planes["codes"].astype(int)).max(-1).min() >= 126
            assert relative_mse(decode_planes(planes, "int8", 0, "k", dim), rows) < 1e-4
    assert (planes["scale"] < 1).all()


@each_codec
def test_B138_rows_may_be_a_transposed_view_of_a_larger_buffer(host: Backend, codec: str) -> None:
    """Strides are followed: what lies between the rows is NaN, and the buffer ends where they end."""
    rows = gaussian(2, 3, 21, 64)
    buffer = np.full((2, 40, 3, 64), np.nan, np.float32)
    buffer[:, 5:26] = rows.swapaxes(1, 2)
    view = buffer[:, 5:26].swapaxes(1, 2)
    compact, strided = encoded(host, codec, rows), encoded(host, codec, view)
    assert all(np.array_equal(compact[name], strided[name]) for name in compact)


@each_codec
def test_no_rows_give_empty_planes_without_a_launch(host: Backend, codec: str) -> None:
    def refuse(*_):
        raise AssertionError("launched")

    rows = np.zeros((1, 2, 0, 64), np.float32)
    planes = encode_launches(host.ops, CODECS[codec], rows, rotation_of(host, codec, 64), refuse)
    want = encode(host, codec, rows)
    assert {n: (p.shape, p.dtype) for n, p in planes.items()} == {n: (p.shape, p.dtype) for n, p in want.items()}


def test_raw_rows_are_kept_without_a_launch(host: Backend) -> None:
    rows = cast(gaussian(1, 2, 3, 64), "bfloat16")
    assert encode_launches(host.ops, CODECS["raw"], rows, None, lambda *_: [])["rows"] is rows
