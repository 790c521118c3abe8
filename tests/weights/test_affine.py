"""Affine packing and quantization against mlx.core, and on their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.weights.affine import AFFINE_BITS, AFFINE_GROUP_SIZES, affine_quantize, pack, unpack
from kvcore.weights.types import AffineWeight

each_bits = pytest.mark.parametrize("bits", AFFINE_BITS, ids=lambda bits: f"{bits}bit")


def awkward_rows(columns: int) -> np.ndarray:
    """Gaussian rows, and rows of zeros, tiny, one-sided and large values."""
    rows = np.random.default_rng(0).standard_normal((7, columns)).astype(np.float32)
    rows[0] = 0
    rows[1] *= 1e-9
    rows[2] = np.abs(rows[2])
    rows[3] = -np.abs(rows[3])
    rows[4] *= 1e4
    return rows


@given(bits=st.sampled_from(AFFINE_BITS), rows=st.integers(1, 4), words=st.integers(1, 6), seed=st.integers(0, 99))
def test_unpack_undoes_pack(bits: int, rows: int, words: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, words * 32), dtype=np.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == np.uint32
    assert packed.shape == (rows, words * bits)
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@given(bits=st.sampled_from(AFFINE_BITS), column=st.integers(0, 63), data=st.data())
def test_code_i_holds_bits_i_times_bits_of_the_row(bits: int, column: int, data: st.DataObject) -> None:
    code = data.draw(st.integers(0, 2**bits - 1))
    codes = np.zeros((1, 64), np.uint8)
    codes[0, column] = code
    stream = int.from_bytes(pack(codes, bits).tobytes(), "little")
    assert stream == code << (column * bits)


@each_bits
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("group_size", AFFINE_GROUP_SIZES, ids=lambda size: f"g{size}")
def test_quantizes_as_mlx_does(bits: int, group_size: int, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    matrix = mx.array(awkward_rows(384)).astype(getattr(mx, dtype))
    codes, scales, biases = mx.quantize(matrix, group_size, bits)

    def float32(array: object) -> np.ndarray:
        return np.array(array.astype(mx.float32))  # type: ignore[attr-defined]

    mine = affine_quantize(float32(matrix), bits, group_size)
    np.testing.assert_array_equal(pack(mine[0], bits), np.array(codes))
    np.testing.assert_array_equal(float32(mx.array(mine[1]).astype(scales.dtype)), float32(scales))
    np.testing.assert_array_equal(float32(mx.array(mine[2]).astype(scales.dtype)), float32(biases))


@each_bits
def test_dequantizes_as_mlx_does(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    codes, scales, biases = mx.quantize(mx.array(awkward_rows(256)), 64, bits)
    weight = AffineWeight(np.array(codes), np.array(scales), np.array(biases), bits, 64)
    assert weight.shape == (7, 256)
    expected = np.array(mx.dequantize(codes, scales, biases, 64, bits))
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@each_bits
def test_error_is_at_most_a_step(bits: int) -> None:
    rows = awkward_rows(128)
    codes, scales, biases = affine_quantize(rows, bits, 32)
    value = AffineWeight(pack(codes, bits), scales, biases, bits, 32).dequantize()
    groups = rows.reshape(7, 4, 32)
    step = np.repeat(np.ptp(groups, axis=-1) / (2**bits - 1), 32, axis=-1)
    # Meeting one edge exactly stretches the steps, so at the other end more than half a step may be lost.
    assert np.all(np.abs(value - rows) <= step + 1e-6 * np.abs(rows) + 1e-7)
    assert np.mean(np.abs(value - rows) <= 0.5 * step + 1e-7) > 0.8


def test_float16_scales_give_exact_products() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (4, 64), dtype=np.uint8)
    scales, biases = (rng.standard_normal((4, 2)).astype(np.float16) for _ in range(2))
    value = AffineWeight(pack(codes, 8), scales, biases, 8, 32).dequantize()
    grouped = codes.reshape(4, 2, 32).astype(np.float64)
    exact = grouped * scales.astype(np.float64)[..., None] + biases.astype(np.float64)[..., None]
    np.testing.assert_array_equal(value, exact.reshape(4, 64).astype(np.float32))


def test_rows_move_with_their_scales() -> None:
    codes, scales, biases = affine_quantize(awkward_rows(64), 4, 32)
    weight = AffineWeight(pack(codes, 4), scales, biases, 4, 32)
    order = np.array([3, 0, 6])
    np.testing.assert_array_equal(weight.rows(order).dequantize(), weight.dequantize()[order])


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need scales and biases \(2, 2\), got \(2, 1\)"):
        AffineWeight(np.zeros((2, 8), np.uint32), np.zeros((2, 1)), np.zeros((2, 1)), 4, 32)
