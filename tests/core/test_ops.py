"""The array protocol: each operation gives NumPy's answer on every backend, in the dtypes it is used with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, cast, gaussian

from kvcore.backends import Backend
from kvcore.ops import ITEMSIZE, Ops
from kvcore.weights.affine import affine_quantize, pack
from kvcore.weights.types import AffineWeight, DenseWeight

X = gaussian(2, 3, 4, 8)
Y = gaussian(2, 3, 4, 8, seed=1)
ODD = np.array([-np.inf, np.inf, np.nan, 0.0, -0.0, 1.5, 2.5, -2.5, 1e-30, 3e38], np.float32)

Operation = Callable[[Any, Any], Any]
ELEMENTWISE: dict[str, tuple[Operation, Callable[[], np.ndarray]]] = {
    "where": (lambda o, x: o.where(x > 0, x, -1.0), lambda: np.where(X > 0, X, -1)),
    "abs": (lambda o, x: o.abs(x), lambda: np.abs(X)),
    "maximum": (lambda o, x: o.maximum(x, 0.25), lambda: np.maximum(X, 0.25)),
    "minimum": (lambda o, x: o.minimum(x, 0.25), lambda: np.minimum(X, 0.25)),
    "exp": (lambda o, x: o.exp(x), lambda: np.exp(X)),
    "log": (lambda o, x: o.log(o.abs(x)), lambda: np.log(np.abs(X))),
    "sqrt": (lambda o, x: o.sqrt(o.abs(x)), lambda: np.sqrt(np.abs(X))),
    "silu": (lambda o, x: o.silu(x), lambda: X / (1 + np.exp(-X.astype(np.float64)))),
    "sum": (lambda o, x: o.sum(x, 2), lambda: X.sum(2)),
    "sum-keep": (lambda o, x: o.sum(x, -1, keepdims=True), lambda: X.sum(-1, keepdims=True)),
    "max": (lambda o, x: o.max(x, 1), lambda: X.max(1)),
    "max-keep": (lambda o, x: o.max(x, -1, keepdims=True), lambda: X.max(-1, keepdims=True)),
    "reshape": (lambda o, x: o.reshape(x, (6, -1)), lambda: X.reshape(6, 32)),
    "permute_dims": (lambda o, x: o.permute_dims(x, (0, 2, 1, 3)), lambda: X.transpose(0, 2, 1, 3)),
    "concat": (lambda o, x: o.concat([x, x[:, :1]], 1), lambda: np.concatenate([X, X[:, :1]], 1)),
    "stack": (lambda o, x: o.stack([x, x], -1), lambda: np.stack([X, X], -1)),
}


def test_each_backend_has_every_operation_of_the_protocol(backend: Backend) -> None:
    wanted = {name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")}
    for name in wanted:
        declared, given = (
            inspect.signature(getattr(Ops, name)),
            inspect.signature(getattr(type(backend.ops), name)),
        )
        assert list(declared.parameters) == list(given.parameters), name
    assert backend.ops.device


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_operation_gives_numpy_s_answer(backend: Backend, name: str) -> None:
    run, expected = ELEMENTWISE[name]
    got = run(backend.ops, backend.ops.asarray(X))
    assert backend.ops.dtype(got) == "float32"
    np.testing.assert_allclose(backend.ops.to_numpy(got), expected(), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("pair", ["maximum", "minimum"])
def test_maximum_and_minimum_take_two_arrays(backend: Backend, pair: str) -> None:
    got = getattr(backend.ops, pair)(backend.ops.asarray(X), backend.ops.asarray(Y))
    assert np.array_equal(backend.ops.to_numpy(got), getattr(np, pair)(X, Y))


def test_all_reduces_one_axis(backend: Backend) -> None:
    ops, x = backend.ops, backend.ops.asarray(X)
    assert np.array_equal(ops.to_numpy(ops.all(x > -1, -1)), (X > -1).all(-1))
    kept = ops.to_numpy(ops.all(x > -1, 2, keepdims=True))
    assert np.array_equal(kept, (X > -1).all(2, keepdims=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_round_takes_halves_to_even(backend: Backend, dtype: str) -> None:
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5, 0.49999997, 3.2], dtype)
    got = backend.ops.round(backend.ops.asarray(halves))
    assert backend.ops.dtype(got) == dtype
    assert backend.ops.to_numpy(got).tolist() == np.rint(halves).tolist()


def test_isfinite_and_max_see_nan_and_infinity(backend: Backend) -> None:
    ops = backend.ops
    assert ops.to_numpy(ops.isfinite(ops.asarray(ODD))).tolist() == np.isfinite(ODD).tolist()
    for length in (3, 64, 100):  # vectorized reductions have a tail of their own
        for at in (0, length // 2, length - 1):
            row = np.zeros((1, length), np.float32)
            row[0, at] = np.nan
            assert np.isnan(ops.to_numpy(ops.max(ops.asarray(row), axis=-1)))[0]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_zeros_and_transfer_keep_shape_dtype_and_bits(backend: Backend, dtype: str) -> None:
    ops = backend.ops
    zeros = ops.zeros((2, 0, 3), dtype)
    assert ops.to_numpy(zeros).shape == (2, 0, 3)
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array = ops.asarray(values)
    assert ops.dtype(array) == ops.dtype(zeros) == dtype
    back = ops.to_numpy(array)
    assert back.dtype == values.dtype
    assert back.dtype.itemsize == ITEMSIZE[dtype]
    assert np.array_equal(back, values)
    assert (ops.to_numpy(ops.zeros((4,), dtype)) == 0).all()


def test_asarray_takes_strided_read_only_and_plain_python(backend: Backend) -> None:
    ops = backend.ops
    frozen = X.copy()
    frozen.flags.writeable = False
    assert np.array_equal(ops.to_numpy(ops.asarray(frozen)), X)
    assert np.array_equal(
        ops.to_numpy(ops.asarray(X[:, ::2, ::-1].transpose(0, 2, 1, 3))), X[:, ::2, ::-1].swapaxes(1, 2)
    )
    assert np.array_equal(ops.to_numpy(ops.asarray([[1, 2], [3, 4]], "int32")), [[1, 2], [3, 4]])
    strided = cast(X, "bfloat16")[:, ::-1, ::2]
    assert np.array_equal(ops.to_numpy(ops.asarray(strided)), strided)
    assert ops.dtype(ops.asarray(X, "bfloat16")) == "bfloat16"


@pytest.mark.parametrize("dtype", DTYPES)
def test_astype_rounds_to_nearest_even(backend: Backend, dtype: str) -> None:
    ops = backend.ops
    x = np.concatenate([X.ravel(), X.ravel() * 1e-6, [1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 65504, 65519]]).astype("f4")
    got = ops.astype(ops.asarray(x), dtype)
    assert np.array_equal(ops.to_numpy(got), cast(x, dtype))
    assert np.array_equal(ops.to_numpy(ops.astype(got, "float32")), cast(x, dtype).astype(np.float32))


def test_float_to_int8_and_back_is_exact(backend: Backend) -> None:
    ops, codes = backend.ops, np.arange(-127, 128, dtype=np.float32)
    got = ops.astype(ops.asarray(codes), "int8")
    assert ops.to_numpy(got).dtype == np.int8
    assert ops.to_numpy(got).tolist() == codes.tolist()


def test_bitcast_keeps_the_bits(backend: Backend) -> None:
    ops = backend.ops
    numbers = np.array([1.0, -2.0, 6.1e-5, 65504], np.float16)
    bits = ops.bitcast(ops.asarray(numbers), "uint16")
    assert ops.to_numpy(bits).tolist() == numbers.view(np.uint16).tolist()
    assert np.array_equal(ops.to_numpy(ops.bitcast(bits, "float16")), numbers)


def test_uint8_shifts_drop_the_bits_above(backend: Backend) -> None:
    ops, x = backend.ops, backend.ops.asarray(np.array([0x07, 0xFF, 0x81], np.uint8))
    for got, want in ((x << 6, [0xC0, 0xC0, 0x40]), (x >> 2, [1, 0x3F, 0x20]), (x & 15, [7, 15, 1])):
        assert ops.dtype(got) == "uint8"
        assert ops.to_numpy(got).tolist() == want


@pytest.mark.parametrize("axis", [0, 1])
def test_take_gathers_by_integer_indices(backend: Backend, axis: int) -> None:
    ops, table = backend.ops, gaussian(5, 7)
    got = ops.take(ops.asarray(table), ops.asarray(np.array([4, 0, 0], np.int32)), axis)
    assert np.array_equal(ops.to_numpy(got), np.take(table, [4, 0, 0], axis))


def test_take_from_a_vector_has_the_shape_of_the_indices(backend: Backend) -> None:
    ops, levels = backend.ops, gaussian(16)
    for dtype in ("int32", "uint8"):
        indices = np.random.default_rng(0).integers(0, 16, (2, 3, 8)).astype(dtype)
        got = ops.take(ops.asarray(levels), ops.asarray(indices), 0)
        assert np.array_equal(ops.to_numpy(got), levels[indices])


def test_write_rows_changes_these_rows_and_no_others(backend: Backend) -> None:
    ops = backend.ops
    got = ops.write_rows(ops.asarray(np.full((2, 3, 9, 8), 7, np.float32)), ops.asarray(X), 2)
    want = np.full((2, 3, 9, 8), 7, np.float32)
    want[:, :, 2:6] = X
    assert np.array_equal(ops.to_numpy(got), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_sums_in_float32(backend: Backend, dtype: str) -> None:
    """4096 products of 16-bit numbers: a 16-bit sum would be off by percents."""
    ops = backend.ops
    x, y = gaussian(1, 2, 3, 4096, dtype=dtype), gaussian(1, 2, 4096, 5, seed=1, dtype=dtype)
    got = ops.matmul(ops.asarray(x), ops.asarray(y))
    assert ops.dtype(got) == dtype
    want = x.astype(np.float64) @ y.astype(np.float64)
    step = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(ops.to_numpy(got).astype(np.float64), want, rtol=step, atol=64 * step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_silu_keep_the_dtype(backend: Backend, dtype: str) -> None:
    ops, x, weight = backend.ops, cast(X * 30, dtype), cast(1 + 0.1 * Y[0, 0, 0], dtype)
    wide = x.astype(np.float64)
    norm = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    step = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for got, want in (
        (ops.rms_norm(ops.asarray(x), ops.asarray(weight), 1e-5), norm),
        (ops.silu(ops.asarray(x)), wide / (1 + np.exp(-wide))),
    ):
        assert ops.dtype(got) == dtype
        np.testing.assert_allclose(ops.to_numpy(got).astype(np.float64), want, rtol=step, atol=step)


def test_silu_of_large_numbers_is_finite(backend: Backend) -> None:
    got = backend.ops.to_numpy(backend.ops.silu(backend.ops.asarray(np.array([-1e4, -200.0, 1e4], np.float32))))
    np.testing.assert_allclose(got, [0, 0, 1e4], atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "affine"])
def test_a_prepared_weight_multiplies_and_embeds(backend: Backend, kind: str, dtype: str) -> None:
    ops, matrix = backend.ops, gaussian(48, 64, seed=4)
    weight: DenseWeight | AffineWeight = DenseWeight(matrix)
    if kind == "affine":
        codes, scales, biases = affine_quantize(matrix, 4, 32)
        weight = AffineWeight(pack(codes, 4), scales, biases, 4, 32)
    values = cast(weight.dequantize(), dtype).astype(np.float64)
    prepared = ops.prepare_linear(weight, dtype)
    x = gaussian(2, 3, 64, dtype=dtype)
    got = ops.linear(ops.asarray(x), prepared)
    assert ops.dtype(got) == dtype
    step = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    want = x.astype(np.float64) @ values.T
    np.testing.assert_allclose(ops.to_numpy(got).astype(np.float64), want, rtol=2 * step, atol=8 * step)
    ids = np.array([[3, 0, 47], [3, 3, 11]], np.int32)
    rows = ops.embed(ops.asarray(ids), prepared)
    assert ops.dtype(rows) == dtype
    assert np.array_equal(ops.to_numpy(rows).astype(np.float64), values[ids])
