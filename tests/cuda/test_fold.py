"""Folding on the device: the planes of the specification, and only where a page is due."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import (
    assert_centers_follow_spec,
    assert_planes_follow_spec,
    cast,
    decode_planes,
    encode,
    gaussian,
    means_of_rows,
    relative_mse,
    unpack_bits,
)

torch = pytest.importorskip("torch", reason="the package torch is not installed")
triton = pytest.importorskip("triton", reason="the package triton is not installed")

import triton.language as tl
from paging import Storage, int32, poison, storage

from kvcore.backends import load_backend
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.kernels.quantize import nearest_level
from kvcore.backends.cuda.kernels.rotate import rotation_matrices
from kvcore.backends.cuda.native import PAGE
from kvcore.backends.reference import spec
from kvcore.layout import CODECS, Layout

RECENT = 128
DUE = RECENT + PAGE  # raw rows at which the first page folds
MODE_DIMS = [
    (mode, dim)
    for mode in ("int8-turbo4", "turbo4", "int8", "turbo3-asym", "turbo4-asym", "fp16")
    for dim in (16, 64, 80, 96, 128, 256)
    if mode != "turbo3-asym" or dim % 64 == 0
]
each_codec = pytest.mark.parametrize(
    ("codec", "part", "dim"),
    [("int8", "k", 64), ("int8", "v", 80), ("turbo4", "k", 80), ("turbo4", "v", 64), ("turbo3", "v", 64)],
    ids=["int8-k-D64", "int8-v-D80", "turbo4-k-D80", "turbo4-v-D64", "turbo3-v-D64"],
)


def fold(pages: Storage, *, count: int = 1, recent: int = RECENT) -> None:
    """One launch for the whole storage."""
    device = pages.lengths.device.type
    launch = Fold.create(pages.native, pages.raw["k"].shape[0], device)
    fold_at = int32([recent + PAGE] * len(pages.lengths), device)
    tables = (pages.raw_table, pages.table, pages.lengths, pages.folded, fold_at)
    launch(pages.raw, pages.planes, *tables, pages=count)


def fill(pages: Storage, sequence: int, tail: int, dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Gaussian rows [layers, Hkv, tail, D] for K and V of a sequence; returns them."""
    layers, _, heads, _, _ = pages.raw["k"].shape
    rows = {}
    for number, part in enumerate("kv"):
        rows[part] = gaussian(layers, heads, tail, pages.codec(part)[1], seed=2 * seed + number, dtype=dtype)
        pages.write_rows(part, sequence, rows[part])
    return rows


def assert_page(pages: Storage, sequence: int, page: int, rows: dict[str, np.ndarray], first: int = 0) -> None:
    """Native page ``page`` of a sequence holds the rows ``first`` .. + 128 of its raw tail."""
    for part in "kv":
        codec, _ = pages.codec(part)
        got = pages.canonical(part, sequence, page)
        want = rows[part][:, :, first : first + PAGE]
        if not codec.quantized:
            assert np.array_equal(got["rows"], want)
            continue
        for layer in range(want.shape[0]):
            planes = {name: x[layer : layer + 1] for name, x in got.items()}
            own = want[layer : layer + 1]
            if codec.centred:
                own = less_center(own, pages.center(sequence, page)[layer], layer)
            assert_planes_follow_spec(codec.name, planes, own, layer=layer, part=part)


def less_center(rows: np.ndarray, center: np.ndarray, layer: int = 0) -> np.ndarray:
    """Rows [1, H, 128, D] less the stored centre [H, D], which follows the specification."""
    assert_centers_follow_spec(center[None, :, None], rows, layer, PAGE)
    return rows.astype(np.float64) - means_of_rows(center[None, :, None], (PAGE,), layer)


def folded_rows(codec: str, part: str, rows: np.ndarray, dtype: str, device: str) -> dict[str, np.ndarray]:
    """Canonical planes [1, 1, 128, width] of one page of ``rows`` [128, D], without a centre."""
    dim, other = rows.shape[-1], CODECS["raw"]
    layout = Layout(*((CODECS[codec], other) if part == "k" else (other, CODECS[codec])), dim, dim)
    pages = storage("", dim, [DUE], device, dtype=dtype, heads=1, layout=layout)
    fill(pages, 0, DUE, dtype)
    pages.write_rows(part, 0, cast(rows, dtype)[None, None])
    fold(pages)
    return pages.canonical(part, 0, 0)


def scaled_to(absmax: float, dim: int) -> np.ndarray:
    rows = gaussian(PAGE, dim).astype(np.float64)
    return (rows * (absmax / np.abs(rows).max(-1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize(("mode", "dim"), MODE_DIMS, ids=[f"{mode}-D{dim}" for mode, dim in MODE_DIMS])
def test_a_folded_page_is_that_of_the_specification(device: str, mode: str, dim: int) -> None:
    pages = storage(mode, dim, [DUE], device, heads=1 if dim == 256 else 2)
    rows = fill(pages, 0, DUE)
    fold(pages)
    assert_page(pages, 0, 0, rows)


@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["turbo4", "int8"])
def test_16_bit_rows_are_quantized_in_float32(device: str, mode: str, dtype: str, dim: int) -> None:
    pages = storage(mode, dim, [DUE], device, dtype=dtype, heads=1)
    rows = fill(pages, 0, DUE, dtype)
    fold(pages)
    assert_page(pages, 0, 0, rows)


def test_only_sequences_that_cross_a_page_fold_and_only_there(device: str) -> None:
    lengths = [0, 1, DUE - 1, DUE, 3 * PAGE + DUE + 7, 2 * PAGE + RECENT]
    folded = [0, 0, 0, 0, 3 * PAGE, 2 * PAGE]
    pages = storage("turbo4", 64, lengths, device, folded=folded, heads=1)
    rows = [fill(pages, i, lengths[i] - folded[i], seed=i) for i in range(len(lengths))]
    untouched = {name: poison(torch.empty_like(plane)) for name, plane in pages.planes.items()}
    raw = {name: plane.clone() for name, plane in pages.raw.items()}
    fold(pages)
    assert_page(pages, 3, 0, rows[3])
    assert_page(pages, 4, 3, rows[4])
    written = [int(pages.table[3, 0]), int(pages.table[4, 3])]
    for name, plane in pages.planes.items():
        others = [page for page in range(plane.shape[1]) if page not in written]
        assert torch.equal(plane[:, others].view(torch.uint8), untouched[name][:, others].view(torch.uint8))
    for name, plane in pages.raw.items():
        assert torch.equal(plane.view(torch.uint8), raw[name].view(torch.uint8))


def test_a_prefilled_chunk_folds_all_its_pages_at_once(device: str) -> None:
    """Sequences with 2, 0 and 1 complete pages beyond the window, in one launch; recent 0."""
    lengths = [2 * PAGE + 5, PAGE - 1, PAGE]
    pages = storage("int8-turbo4", 64, lengths, device, heads=1)
    rows = [fill(pages, i, length, seed=i) for i, length in enumerate(lengths)]
    fold(pages, count=3, recent=0)
    assert_page(pages, 0, 0, rows[0])
    assert_page(pages, 0, 1, rows[0], first=PAGE)
    assert_page(pages, 2, 0, rows[2])
    at = int(pages.table[1, 0])
    assert (pages.planes["k"][:, at] == -1).all()


@pytest.mark.parametrize("mode", ["turbo4", "turbo3-asym"])
def test_each_layer_has_its_own_rotation(device: str, mode: str) -> None:
    pages = storage(mode, 64, [DUE], device, layers=3, heads=1)
    rows = fill(pages, 0, DUE)
    for part in "kv":  # the same rows in each layer
        rows[part] = np.broadcast_to(rows[part][:1], rows[part].shape)
        pages.write_rows(part, 0, rows[part])
    fold(pages)
    assert_page(pages, 0, 0, rows)
    codes = pages.canonical("v", 0, 0)["codes"]
    assert not np.array_equal(codes[0], codes[1])


@each_codec
def test_the_graph_codec_stores_the_same_planes(device: str, codec: str, part: str, dim: int) -> None:
    """`kvcore.modes` on torch; a turbo index differs only next to a midpoint, which random rows hardly meet."""
    rows = gaussian(PAGE, dim, seed=3)
    got = folded_rows(codec, part, rows, "float32", device)
    want = encode(load_backend("cuda", "cpu"), codec, rows[None, None], part=part)
    assert (got["codes"] != want["codes"]).mean() < 1e-4
    assert np.abs(got["scale"].view(np.int16).astype(int) - want["scale"].view(np.int16)).max() <= 1


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_C3_a_non_finite_row_becomes_scale_0_and_codes_0_alone(
    device: str, codec: str, part: str, dim: int, bad: float
) -> None:
    rows = gaussian(PAGE, dim)
    plain = folded_rows(codec, part, rows, "float16", device)
    rows[77, 5] = bad
    planes = folded_rows(codec, part, rows, "float16", device)
    assert (planes["scale"][0, 0, 77] == 0).all()
    assert (planes["codes"][0, 0, 77] == 0).all()
    others = np.delete(np.arange(PAGE), 77)
    for name in ("codes", "scale"):
        assert np.array_equal(planes[name][:, :, others], plain[name][:, :, others])


@each_codec
def test_a_row_of_zeros_decodes_to_zeros(device: str, codec: str, part: str, dim: int) -> None:
    rows = gaussian(PAGE, dim)
    rows[[0, 64, 127]] = 0
    planes = folded_rows(codec, part, rows, "float32", device)
    zero, scale = planes["codes"][0, 0, [0, 64, 127]], planes["scale"][0, 0, [0, 64, 127]]
    if codec == "int8":
        assert (zero == 0).all()
        assert (scale == 1).all()
    else:
        bits = CODECS[codec].planes[0].bits
        assert bits is not None
        assert (unpack_bits(zero, bits) == 2 ** (bits - 1) - 1).all()
        assert (scale == 0).all()


@each_codec
@pytest.mark.parametrize("absmax", [1e-5, 1e-18])
def test_small_rows_follow_the_specification(device: str, codec: str, part: str, dim: int, absmax: float) -> None:
    """The squares of 1e-18 underflow in fp16, those of a part of the row in float32."""
    rows = scaled_to(absmax, dim)
    assert_planes_follow_spec(codec, folded_rows(codec, part, rows, "float32", device), rows[None, None], part=part)


@each_codec
@pytest.mark.parametrize("absmax", [1e-20, 1e-38, 1e-42])
def test_B03_tiny_rows_are_finite_and_no_larger_than_a_step(
    device: str, codec: str, part: str, dim: int, absmax: float
) -> None:
    """Their squares underflow in float32; 1e-42 is subnormal itself."""
    planes = folded_rows(codec, part, scaled_to(absmax, dim), "float32", device)
    assert np.isfinite(planes["scale"]).all()
    assert np.abs(decode_planes(planes, codec, 0, part, dim)).max() <= 24 * 2.0**-24


@each_codec
@pytest.mark.parametrize("value", [1e5, 3e38])
def test_C10_bf16_beyond_fp16_stays_finite(device: str, codec: str, part: str, dim: int, value: float) -> None:
    rows = gaussian(PAGE, dim)
    rows[4, 9] = value
    planes = folded_rows(codec, part, rows, "bfloat16", device)
    assert np.isfinite(planes["scale"]).all()
    back = decode_planes(planes, codec, 0, part, dim)
    assert back[0, 0, 4, 9] > 9e4  # saturated at most, neither lost nor turned
    assert relative_mse(back[:, :, 5:], cast(rows, "bfloat16")[None, None, 5:]) < 0.04


def test_bf16_rows_beyond_fp16_keep_their_codes(device: str) -> None:
    rows = gaussian(PAGE, 64, rms=1e5, dtype="bfloat16")
    for codec in ("int8", "turbo4"):
        assert_planes_follow_spec(codec, folded_rows(codec, "k", rows, "bfloat16", device), rows[None, None])


@pytest.mark.parametrize("dim", [80, 96])
@pytest.mark.parametrize("low", [5.0, -6.0])
def test_B100_padded_lanes_influence_nothing(device: str, dim: int, low: float) -> None:
    """All values in [5, 6] or [-6, -5]: a lane that counts as 0 would stretch the range or the norm."""
    rows = np.random.default_rng(0).uniform(low, low + 1, (PAGE, dim)).astype(np.float32)
    for codec, part in (("int8", "k"), ("int8", "v"), ("turbo4", "k"), ("turbo4", "v")):
        planes = folded_rows(codec, part, rows, "float32", device)
        assert_planes_follow_spec(codec, planes, rows[None, None], part=part, near=1e-5)


def folded_centred(rows: np.ndarray, dtype: str, device: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Canonical planes [1, 1, 128, width] of K of a turbo4 page ``rows`` [128, D], and its centre [1, D]."""
    pages = storage("turbo4", rows.shape[-1], [DUE], device, dtype=dtype, heads=1)
    fill(pages, 0, DUE, dtype)
    pages.write_rows("k", 0, cast(rows, dtype)[None, None])
    fold(pages)
    return pages.canonical("k", 0, 0), pages.center(0, 0)[0]


def offset_rows(dim: int, offset: float, dtype: str = "float32") -> np.ndarray:
    """Rows [128, D] around a mean of that size."""
    rows: np.ndarray = gaussian(PAGE, dim, seed=4, dtype=dtype) + gaussian(1, dim, rms=offset, seed=5, dtype=dtype)
    return cast(rows, dtype)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("offset", [0.0, 3.0, 50.0])
def test_a_centred_page_is_that_of_the_specification(device: str, dtype: str, dim: int, offset: float) -> None:
    rows = offset_rows(dim, offset, dtype)
    rows[:4] = 1000  # sinks, which stay out of the mean
    planes, center = folded_centred(rows, dtype, device)
    near = 1e-4 * max(1.0, offset)
    assert_planes_follow_spec("turbo4", planes, less_center(rows[None, None], center), near=near)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("dim", "dtype"), [(64, "float16"), (80, "float16"), (128, "float32"), (256, "bfloat16")])
def test_C3_a_non_finite_row_stays_out_of_the_centre(device: str, bad: float, dim: int, dtype: str) -> None:
    rows = offset_rows(dim, 3.0, dtype)
    rows[77, 5] = bad
    planes, center = folded_centred(rows, dtype, device)
    assert (planes["scale"][0, 0, 77] == 0).all()
    assert (planes["codes"][0, 0, 77] == 0).all()
    less = less_center(rows[None, None], center)
    others = np.delete(np.arange(PAGE), 77)
    assert_planes_follow_spec("turbo4", {name: x[:, :, others] for name, x in planes.items()}, less[:, :, others])


def test_a_page_of_nothing_finite_has_no_centre(device: str) -> None:
    planes, center = folded_centred(np.full((PAGE, 64), np.inf, np.float32), "float32", device)
    assert not center.any()
    assert not planes["scale"].any()


def test_rows_that_are_their_mean_decode_to_it(device: str) -> None:
    rows = np.broadcast_to(np.linspace(-2, 2, 64, dtype=np.float32), (PAGE, 64)).copy()
    planes, center = folded_centred(rows, "float32", device)
    back = decode_planes(planes, "turbo4", 0, "k", 64) + means_of_rows(center[None, :, None], (PAGE,), 0)
    assert np.abs(back[0, 0] - rows).max() < 4e-3  # half a step of the centre, and what is left of it


@pytest.mark.parametrize("value", [1e5, 3e38])
def test_C10_a_centre_beyond_fp16_stays_finite(device: str, value: float) -> None:
    rows = offset_rows(64, 3.0)
    rows[:, 9] = value
    planes, center = folded_centred(rows, "bfloat16", device)
    assert np.isfinite(planes["scale"]).all()
    assert np.abs(center).max() <= 65504


@pytest.mark.parametrize("absmax", [1e-5, 1e-18, 1e-42])
def test_B03_small_rows_have_a_centre_no_larger(device: str, absmax: float) -> None:
    planes, center = folded_centred(scaled_to(absmax, 64), "float32", device)
    assert np.isfinite(planes["scale"]).all()
    assert np.abs(center).max() <= max(absmax, 2.0**-24)


def test_B01_int8_scales_are_rounded_up_and_nothing_clips(device: str) -> None:
    rows = gaussian(PAGE, 64) * 10.0 ** np.linspace(-4, 3, PAGE, dtype=np.float32)[:, None]
    planes = folded_rows("int8", "v", rows, "float32", device)
    exact = np.abs(rows).max(-1).astype(np.float64) / 127
    stored = planes["scale"][0, 0, :, 0]
    assert (stored.astype(np.float64) >= exact * (1 - 2**-22)).all()
    assert (np.nextafter(stored, np.float16(0)).astype(np.float64) < exact * (1 + 2**-22)).all()
    error = np.abs(decode_planes(planes, "int8", 0, "v", 64)[0, 0] - rows)
    assert (error <= stored.astype(np.float64)[:, None] / 2 * (1 + 1e-6)).all()


@triton.jit
def _nearest_level_kernel(Z, MAGNITUDE, SIGN, SQUARE, N: tl.constexpr, BITS: tl.constexpr):
    at = tl.arange(0, N)
    magnitude, sign, square = nearest_level(tl.load(Z + at), BITS)
    tl.store(MAGNITUDE + at, magnitude)
    tl.store(SIGN + at, sign)
    tl.store(SQUARE + at, square)


@pytest.mark.parametrize("codec", ["turbo4", "turbo3"])
def test_an_index_counts_the_midpoints_strictly_below(device: str, codec: str) -> None:
    """At each midpoint, one float32 number beside it on both sides, at ±0 and far outside: ties go down."""
    book = CODECS[codec].codebook
    assert book is not None
    midpoints = np.array(book.midpoints, np.float32)
    near = [midpoints, np.nextafter(midpoints, np.float32(np.inf)), np.nextafter(midpoints, np.float32(-np.inf))]
    z = np.concatenate([*near, np.array([-0.0, 1e30, -1e30, 1e-45, -1e-45], np.float32)])
    z = np.pad(z, (0, 64 - len(z)))
    magnitude, sign = (torch.empty(64, dtype=torch.int32, device=device) for _ in range(2))
    square = torch.empty(64, device=device)
    _nearest_level_kernel[(1,)](torch.from_numpy(z).to(device), magnitude, sign, square, N=64, BITS=book.bits)
    want, half = np.searchsorted(midpoints, z, side="left"), len(book.levels) // 2
    got = np.where(sign.cpu() == 1, half - 1 - magnitude.cpu(), half + magnitude.cpu())
    assert np.array_equal(got, want)
    assert np.array_equal(square.cpu(), book.as_array()[want] ** 2)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_split_rotation_matrix_is_the_rotation(dtype: str, dim: int) -> None:
    """√D·Rᵀ as a sum of 16-bit terms, within 2^-21 of its largest element; exact where D is a power of two."""
    terms = rotation_matrices(3, "v", dim, getattr(torch, dtype), "cpu").double().sum(1)
    for layer in range(3):
        want = spec.rotation_matrix(layer, "v", dim).T * np.sqrt(dim)
        error = np.abs(terms[layer].numpy() - want).max()
        assert error <= (0.5 * 2.0**-22 if dim & (dim - 1) == 0 else 2.0**-21)


def test_B31_pages_beyond_2_to_the_31_elements_are_reached(device: str) -> None:
    """Offsets are 64-bit. K and V share a pool of which two pages are touched, so that it takes little memory."""
    pages = storage("fp16", 256, [PAGE], device, dtype="float16", heads=1)
    count = 2**31 // (PAGE * 256) + 2
    large = torch.empty(1, count, 1, PAGE, 256, dtype=torch.float16, device=device)
    pages.raw = pages.planes = {"k": large, "v": large}
    pages.raw_table[:], pages.table[:] = count - 1, count - 2
    rows = gaussian(1, 1, PAGE, 256, dtype="float16")
    pages.write_rows("k", 0, rows)
    fold(pages, recent=0)
    assert np.array_equal(pages.canonical("k", 0, 0)["rows"], rows)
