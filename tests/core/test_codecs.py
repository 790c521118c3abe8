"""The codecs as every backend runs them: quality, extremes, and values that must never spread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import (
    DTYPES,
    GAUSSIAN_MSE,
    HEAD_DIMS,
    assert_planes_follow_spec,
    cast,
    decode_planes,
    encode,
    encode_on,
    gaussian,
    relative_mse,
    to_numpy,
    unpack_bits,
)

from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.layout import CODECS, Rotation
from kvcore.modes import CODEC_FUNCTIONS

Planes = dict[str, np.ndarray]

each_codec = pytest.mark.parametrize("codec", GAUSSIAN_MSE)
turbo_codecs = pytest.mark.parametrize("codec", ["turbo4", "turbo3"])


def decoded(codec: str, planes: Planes, dim: int) -> np.ndarray:
    return decode_planes(planes, codec, 0, "k", dim)


def assert_int8_is_faithful(rows: np.ndarray, planes: Planes) -> None:
    """Every element within half a step, and the mean error that a Gaussian row has."""
    back = decoded("int8", planes, rows.shape[-1])
    scale = planes["scale"].astype(np.float64)
    assert (np.abs(back - rows) <= scale / 2 * (1 + 1e-6)).all()
    assert relative_mse(back, rows) < GAUSSIAN_MSE["int8"]


def scaled_to(absmax: float, dim: int, dtype: str = "float32") -> np.ndarray:
    rows = gaussian(1, 2, 64, dim)
    return cast(rows * (absmax / np.abs(rows).max(-1, keepdims=True)), dtype)


@each_codec
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_relative_mse_on_gaussian_rows_is_within_the_bound(backend: Backend, codec: str, dim: int) -> None:
    rows = gaussian(1, 2, 500, dim)
    assert relative_mse(decoded(codec, encode(backend, codec, rows), dim), rows) <= GAUSSIAN_MSE[codec]


@pytest.mark.parametrize(("dim", "expected"), [(64, 0.0089), (128, 0.0093)])
def test_turbo4_has_the_error_that_the_design_states(reference: Backend, dim: int, expected: float) -> None:
    rows = gaussian(1, 2, 2000, dim, seed=1)
    error = relative_mse(decoded("turbo4", encode(reference, "turbo4", rows), dim), rows)
    assert error == pytest.approx(expected, rel=0.01)


@each_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_have_the_shapes_and_dtypes_of_the_layout(backend: Backend, codec: str, dtype: str) -> None:
    planes = encode(backend, codec, gaussian(2, 3, 5, 80, dtype=dtype))
    assert list(planes) == [plane.name for plane in CODECS[codec].planes]
    for plane in CODECS[codec].planes:
        assert planes[plane.name].dtype == plane.dtype
        assert planes[plane.name].shape == (2, 3, 5, plane.width(80))


@each_codec
def test_decode_of_a_backend_is_that_of_the_specification(backend: Backend, codec: str) -> None:
    rows = backend.ops.asarray(gaussian(1, 2, 40, 96))
    planes = encode_on(backend, codec, rows, layer=3, part="v")
    rotation = Rotation.create(backend.ops, 3, "v", 96) if CODECS[codec].codebook else None
    got = backend.ops.to_numpy(CODEC_FUNCTIONS[codec].decode(backend.ops, planes, rotation))
    want = decode_planes(to_numpy(backend.ops, planes), codec, 3, "v", 96)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@turbo_codecs
@pytest.mark.parametrize("rms", [1.0, 1e-3])
def test_norm_correction_keeps_the_length_of_a_row(backend: Backend, codec: str, rms: float) -> None:
    rows = gaussian(1, 1, 200, 64, rms=rms)
    back = decoded(codec, encode(backend, codec, rows), 64)
    lengths = np.linalg.norm(back, axis=-1) / np.linalg.norm(rows.astype(np.float64), axis=-1)
    # fp16 has 11 bits down to 6.1e-5; a scale below that (rms 1e-3 gives 1.1e-4) keeps at least 10.
    np.testing.assert_allclose(lengths, 1, atol=2**-11 * 1.01)


@pytest.mark.parametrize("absmax", [20.0, 1.0, 1e-3, 1e-5])
def test_C1_int8_error_is_below_one_127th_of_absmax(backend: Backend, absmax: float) -> None:
    rows = scaled_to(absmax, 64)
    back = decoded("int8", encode(backend, "int8", rows), 64)
    assert (np.abs(back - rows).max(-1) <= absmax / 127).all()


@each_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_C1_zero_rows_decode_to_zero_beside_others(backend: Backend, codec: str, dtype: str) -> None:
    rows = gaussian(1, 2, 9, 64, dtype=dtype)
    rows[:, :, 4] = 0
    planes = encode(backend, codec, rows)
    back = decoded(codec, planes, 64)
    assert (back[:, :, 4] == 0).all()
    assert np.isfinite(back).all()
    others = np.delete(np.arange(9), 4)
    assert relative_mse(back[:, :, others], rows[:, :, others].astype(np.float64)) < 1.5 * GAUSSIAN_MSE[codec]


def test_a_zero_row_has_scale_1_in_int8_and_middle_codes_in_turbo(backend: Backend) -> None:
    """That tells it from a non-finite row, whose scale and codes are all 0."""
    zero = np.zeros((1, 1, 1, 64), np.float32)
    assert encode(backend, "int8", zero)["scale"] == 1
    for codec, bits, middle in (("turbo4", 4, 7), ("turbo3", 3, 3)):
        planes = encode(backend, codec, zero)
        assert planes["scale"] == 0
        assert (unpack_bits(planes["codes"], bits) == middle).all()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("absmax", [1e-3, 1e-2, 0.5, 4.0])
def test_B01_the_int8_scale_is_absmax_over_127_rounded_up(backend: Backend, absmax: float, dim: int) -> None:
    rows = scaled_to(absmax, dim)
    planes = encode(backend, "int8", rows)
    exact = np.abs(rows).max(-1, keepdims=True).astype(np.float64) / 127
    stored = planes["scale"].astype(np.float64)
    assert (stored >= exact * (1 - 2**-22)).all()
    below = np.nextafter(planes["scale"], np.float16(0)).astype(np.float64)
    assert (below < exact * (1 + 2**-22)).all()
    assert (np.abs(planes["codes"].astype(int)).max(-1) == (126 if absmax == 1e-3 else 127)).all()
    assert_int8_is_faithful(rows, planes)


@pytest.mark.parametrize("absmax", [1e-3, 1e-2, 0.5, 4.0])
def test_B01_a_scale_floored_at_1_fails_the_same_check(absmax: float) -> None:
    """The control: the historic defect, which the test above has to see at every magnitude."""
    rows = scaled_to(absmax, 64)
    codes, scale = spec.int8_encode(rows)
    assert_int8_is_faithful(rows, {"codes": codes, "scale": scale})
    floored = np.maximum(scale, np.float16(1))
    codes = np.rint(rows / floored.astype(np.float32)).astype(np.int8)
    with pytest.raises(AssertionError):
        assert_int8_is_faithful(rows, {"codes": codes, "scale": floored})


@each_codec
@pytest.mark.parametrize("rms", [1e-3, 1e-5])
def test_small_magnitudes_keep_their_quality(backend: Backend, codec: str, rms: float) -> None:
    """At 1e-5 the fp16 scale is subnormal: its step of 2^-24 is what remains of the error."""
    rows = gaussian(1, 2, 200, 64, rms=rms)
    planes = encode(backend, codec, rows)
    bits = {"int8": 127 / 3.5, "turbo4": 8.7331, "turbo3": 12.0378}[codec]  # scale ≈ rms / bits
    rounding = (2.0**-24 * bits / rms) ** 2
    assert relative_mse(decoded(codec, planes, 64), rows) <= 1.1 * GAUSSIAN_MSE[codec] + rounding


@pytest.mark.parametrize("absmax", [1e-20, 1e-30, 1e-38])
@each_codec
def test_B03_tiny_rows_are_finite_and_no_larger_than_a_step(backend: Backend, codec: str, absmax: float) -> None:
    """Their squares underflow in float32."""
    planes = encode(backend, codec, scaled_to(absmax, 64))
    assert np.isfinite(planes["scale"]).all()
    assert np.abs(decoded(codec, planes, 64)).max() <= 24 * 2.0**-24


@pytest.mark.parametrize("rms", [1e-18, 1e4, 1e19])
@turbo_codecs
def test_indices_do_not_depend_on_the_magnitude(backend: Backend, codec: str, rms: float) -> None:
    """Powers of two near ``rms``: squares would leave float32, indices must be those of the plain row."""
    factor = np.float32(2.0 ** np.round(np.log2(rms)))
    rows = gaussian(1, 1, 50, 64)
    want, got = encode(backend, codec, rows), encode(backend, codec, rows * factor)
    assert np.array_equal(want["codes"], got["codes"])


@turbo_codecs
def test_C2_an_outlier_leaves_other_rows_untouched(backend: Backend, codec: str) -> None:
    rows = gaussian(1, 2, 20, 64)
    plain = encode(backend, codec, rows)
    rows[0, 1, 7, 13] = 300
    planes = encode(backend, codec, rows)
    for name in ("codes", "scale"):
        same = (plain[name] == planes[name]).all(-1)
        assert same.sum() == same.size - 1
        assert not same[0, 1, 7]
    back = decoded(codec, planes, 64)[0, 1, 7]
    assert ((back - rows[0, 1, 7]) ** 2).sum() <= 0.05 * (rows[0, 1, 7] ** 2).sum()


def test_C2_an_outlier_costs_half_a_step_in_its_own_int8_row(backend: Backend) -> None:
    rows = gaussian(1, 2, 20, 64)
    plain = encode(backend, "int8", rows)
    rows[0, 1, 7, 13] = 300
    planes = encode(backend, "int8", rows)
    same = (plain["codes"] == planes["codes"]).all(-1) & (plain["scale"] == planes["scale"])[..., 0]
    assert same.sum() == same.size - 1
    error = np.abs(decoded("int8", planes, 64) - rows)
    assert error[0, 1, 7].max() <= 300 / 127 / 2 * 1.001
    assert error[0, 1, 7, 13] <= 300 / 127 / 2 * 1.001


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_C3_a_non_finite_row_becomes_scale_0_and_codes_0_alone(backend: Backend, codec: str, bad: float) -> None:
    rows = gaussian(2, 2, 20, 64)
    plain = encode(backend, codec, rows)
    rows[1, 0, 3, 5] = bad
    planes = encode(backend, codec, rows)
    assert (planes["scale"][1, 0, 3] == 0).all()
    assert (planes["codes"][1, 0, 3] == 0).all()
    for name in ("codes", "scale"):
        same = (plain[name] == planes[name]).all(-1)
        assert same.sum() == same.size - 1


@each_codec
@pytest.mark.parametrize("value", [1e5, 3e38])
def test_C10_bf16_beyond_fp16_stays_finite(backend: Backend, codec: str, value: float) -> None:
    rows = gaussian(1, 1, 20, 64, dtype="bfloat16")
    rows[0, 0, 4, 9] = value
    planes = encode(backend, codec, rows)
    assert np.isfinite(planes["scale"]).all()
    back = decoded(codec, planes, 64)
    assert np.isfinite(back).all()
    assert back[0, 0, 4, 9] > 9e4  # saturated at most, neither lost nor turned


@each_codec
def test_C10_bf16_rows_beyond_fp16_keep_their_quality(backend: Backend, codec: str) -> None:
    """Through fp16 every element above 65504 would have become infinite."""
    rows = gaussian(1, 2, 200, 64, rms=1e5, dtype="bfloat16")
    back = decoded(codec, encode(backend, codec, rows), 64)
    assert relative_mse(back, rows) <= 1.05 * GAUSSIAN_MSE[codec]


@pytest.mark.parametrize("dim", [64, 128])
def test_B04_an_outlier_channel_neither_clips_nor_ruins_plain_rows(backend: Backend, dim: int) -> None:
    rows = gaussian(1, 1, 512, dim)
    outliers = np.arange(0, 512, 2)
    rows[:, :, outliers, 11] *= 1000
    back = decoded("int8", encode(backend, "int8", rows), dim)
    assert (np.abs(back - rows) <= np.abs(rows).max(-1, keepdims=True) / 254 * 1.001).all()
    back = decoded("turbo4", encode(backend, "turbo4", rows), dim)
    error = ((back - rows) ** 2).sum(-1) / (rows.astype(np.float64) ** 2).sum(-1)
    far = np.zeros(512, bool)
    far[outliers] = np.abs(rows[0, 0, outliers, 11]) > 300  # where the draw itself is not near zero
    assert error[..., far].max() <= 0.02
    assert error.max() <= 0.05


@each_codec
@pytest.mark.parametrize("dim", [80, 96, 112])
@pytest.mark.parametrize("low", [5.0, -6.0])
def test_B100_a_width_that_is_no_power_of_two_pads_nothing(backend: Backend, codec: str, dim: int, low: float) -> None:
    rows = np.random.default_rng(0).uniform(low, low + 1, (1, 2, 40, dim)).astype(np.float32)
    assert_planes_follow_spec(codec, encode(backend, codec, rows), rows, near=1e-5)


def heavy_tails(dim: int) -> np.ndarray:
    """Student-t rows (df 4) with three channels 20 times the others."""
    rng = np.random.default_rng(0)
    rows = rng.standard_t(4, (1, 1, 4000, dim))
    rows[..., rng.permutation(dim)[:3]] *= 20
    return rows.astype(np.float32)


@turbo_codecs
@pytest.mark.parametrize("dim", [64, 128])
def test_B151_every_stage_of_turbo_is_alive(backend: Backend, codec: str, dim: int) -> None:
    ops, rows = backend.ops, heavy_tails(dim)
    array, book = ops.asarray(rows), CODECS[codec].codebook
    assert book is not None
    whole = encode(backend, codec, rows)
    error = relative_mse(decoded(codec, whole, dim), rows)
    limit, without_rotation = {
        ("turbo4", 64): (0.0095, 0.135),
        ("turbo4", 128): (0.0095, 0.233),
        ("turbo3", 64): (0.034, 0.275),
        ("turbo3", 128): (0.034, 0.389),
    }[codec, dim]
    assert error <= limit

    other_seed = encode(backend, codec, rows, layer=1)
    assert (other_seed["codes"] != whole["codes"]).mean() > 0.5
    assert relative_mse(decode_planes(other_seed, codec, 1, "k", dim), rows) <= limit

    rotation = Rotation.create(ops, 0, "k", dim)
    eye = ops.asarray(np.eye(dim, dtype=np.float32))
    identity = replace(rotation, signs=ops.asarray(np.ones(dim, np.float32)), matrix=eye, matrix_t=eye)
    unrotated = to_numpy(ops, CODEC_FUNCTIONS[codec].encode(ops, array, identity))
    assert (unrotated["codes"] != whole["codes"]).mean() > 0.5
    indices = unpack_bits(unrotated["codes"], book.bits)
    back = spec.turbo_decode(indices, unrotated["scale"], np.eye(dim), book)
    assert relative_mse(back, rows) == pytest.approx(without_rotation, rel=0.1)

    norm = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    uncorrected = (norm / (book.spread * np.sqrt(dim))).astype(np.float16)
    assert (uncorrected != whole["scale"]).mean() > 0.5
    plain = relative_mse(decoded(codec, {**whole, "scale": uncorrected}, dim), rows)
    assert error < plain < 1.1 * error


@pytest.mark.parametrize(("dim", "uniform"), [(64, 0.0275), (128, 0.0507)])
def test_B151_turbo4_beats_a_uniform_4_bit_grid_on_heavy_tails(reference: Backend, dim: int, uniform: float) -> None:
    rows = heavy_tails(dim)
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    step = (high - low) / 15
    error = relative_mse(np.rint((rows - low) / step) * step + low, rows)
    assert error == pytest.approx(uniform, rel=0.1)
    assert relative_mse(decoded("turbo4", encode(reference, "turbo4", rows), dim), rows) < error / 2
