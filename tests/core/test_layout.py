"""Layouts as data: the table of bytes, the codebooks, and the settings of the window."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from kvcore.errors import InputError, UnsupportedError
from kvcore.layout import CODECS, TURBO3, TURBO4, Codebook, WindowPolicy
from kvcore.modes import MODES

# Bytes of a folded token and head at D=128 with 16-bit raw rows (design, section 1).
TABLE = {
    "fp16": 512,
    "int8": 260,
    "turbo4-asym": 322,
    "turbo3-asym": 306,
    "turbo4": 134,
    "turbo4-delegated": 322,
    "int8-turbo4": 196,
}
each_book = pytest.mark.parametrize("book", [TURBO4, TURBO3], ids=["turbo4", "turbo3"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bytes_per_token_is_the_table(dtype: str) -> None:
    assert {name: mode.layout(128).bytes_per_token(dtype) for name, mode in MODES.items()} == TABLE


def test_float32_raw_elements_count_4_bytes() -> None:
    got = {name: mode.layout(128).bytes_per_token("float32") for name, mode in MODES.items()}
    assert got == {
        "fp16": 1024,
        "int8": 260,
        "turbo4-asym": 578,
        "turbo3-asym": 562,
        "turbo4": 134,
        "turbo4-delegated": 578,
        "int8-turbo4": 196,
    }


@pytest.mark.parametrize(("mode", "expected"), [("fp16", 23040), ("int8", 11880), ("turbo4", 6210)])
def test_B78_bytes_per_token_of_smollm2(mode: str, expected: int) -> None:
    """30 layers with 3 KV heads of D=64."""
    assert 30 * 3 * MODES[mode].layout(64).bytes_per_token("float16") == expected


def test_a_centre_is_shared_by_the_rows_of_its_page() -> None:
    """A figure for one token is rounded up, bytes of rows are exact."""
    layout = MODES["turbo4"].layout(80, 64)
    assert [layout.bytes_per_token("float16", page) for page in (128, 32, 1)] == [76 + 2, 76 + 5, 76 + 160]
    assert layout.folded_bytes("float16", 256, 3) == 256 * 76 + 3 * 160
    assert MODES["int8-turbo4"].layout(80).folded_bytes("float16", 256, 3) == 256 * (82 + 42)
    assert (layout.k.centred, layout.v.centred) == (True, False)
    assert layout.describe()["k_center"] == "mean of a page"
    assert "k_center" not in MODES["turbo4-asym"].layout(80).describe()


def test_k_and_v_of_different_widths_are_counted_apart() -> None:
    layout = MODES["int8-turbo4"].layout(192, 128)
    assert layout.bytes_per_token("float16") == (192 + 2) + (128 // 2 + 2)
    assert layout.raw_bytes_per_token("bfloat16") == 2 * (192 + 128)


@pytest.mark.parametrize(("mode", "k_dim", "v_dim"), [("turbo4", 100, 64), ("turbo3-asym", 64, 60)])
def test_C4_a_width_that_is_no_multiple_of_8_is_a_reason(mode: str, k_dim: int, v_dim: int) -> None:
    bad = k_dim if k_dim % 8 else v_dim
    with pytest.raises(UnsupportedError, match=f"head_dim {bad}: turbo. needs a multiple of 8") as caught:
        MODES[mode].layout(k_dim, v_dim)
    assert len(caught.value.reasons) == 1
    assert caught.value.exit_code == 2
    assert "use fp16 or int8" in str(caught.value)


def test_C4_two_bad_widths_are_two_reasons() -> None:
    with pytest.raises(UnsupportedError) as caught:
        MODES["turbo4"].layout(100, 60)
    assert [reason.split(":")[0] for reason in caught.value.reasons] == ["head_dim 100", "head_dim 60"]


def test_int8_and_fp16_take_any_width() -> None:
    assert MODES["int8"].layout(100).bytes_per_token("float16") == 204
    assert MODES["fp16"].layout(100).bytes_per_token("float16") == 400


def test_plane_widths_in_elements() -> None:
    widths = {name: [plane.width(96) for plane in codec.planes] for name, codec in CODECS.items()}
    assert widths == {"raw": [96], "int8": [96, 1], "turbo4": [48, 1], "turbo3": [36, 1]}


@each_book
def test_levels_are_exact_in_every_dtype_that_may_hold_them(book: Codebook) -> None:
    levels = book.as_array()
    assert len(levels) == 2**book.bits
    assert (np.diff(levels) > 0).all()
    assert np.array_equal(levels, -levels[::-1])
    for dtype in (ml_dtypes.float8_e4m3fn, np.float16, ml_dtypes.bfloat16):
        assert np.array_equal(levels.astype(dtype).astype(np.float32), levels)


@pytest.mark.parametrize(
    ("book", "mse", "above_optimum"),
    [(TURBO4, 0.009567, 0.007), (TURBO3, 0.034589, 0.0012)],
    ids=["turbo4", "turbo3"],
)
def test_a_codebook_is_near_the_lloyd_max_optimum(book: Codebook, mse: float, above_optimum: float) -> None:
    """Mean squared error on a unit Gaussian, by integration. Optima for 16 and 8 levels: Max (1960)."""
    x = np.linspace(-9, 9, 400_001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    back = book.as_array()[np.searchsorted(book.midpoints, x * book.spread)] / book.spread
    error = float(((x - back) ** 2 * density).sum() * (x[1] - x[0]))
    assert error == pytest.approx(mse, abs=2e-6)
    optimum = {4: 0.009501, 3: 0.034548}[book.bits]
    assert error / optimum - 1 == pytest.approx(above_optimum, abs=6e-4)


@each_book
def test_midpoints_lie_halfway_and_zero_is_one_of_them(book: Codebook) -> None:
    levels = book.as_array()
    assert np.array_equal(np.array(book.midpoints, np.float32), (levels[1:] + levels[:-1]) / 2)
    assert book.midpoints[2 ** (book.bits - 1) - 1] == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sink_tokens": -1}, "sink_tokens -1"),
        ({"recent_tokens": -5}, "recent_tokens -5"),
        ({"boundary_layers": -2}, "boundary_layers -2"),
        ({"page_size": 0}, "page_size 0"),
        ({"sink_tokens": 33, "page_size": 32}, "sink_tokens 33: must not exceed page_size 32"),
    ],
    ids=["sinks", "recent", "boundary", "page", "sinks-beyond-page"],
)
def test_an_impossible_window_is_refused_by_name(settings: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=named):
        WindowPolicy(**settings)
