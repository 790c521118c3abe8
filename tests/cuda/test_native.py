"""The native form of pages: a literal reading of its definition, round trips, and bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import unpack_bits

torch = pytest.importorskip("torch", reason="the package torch is not installed")

from kvcore.backends.cuda.native import (
    PAGE,
    NativeLayout,
    mtile_group,
    reasons_against,
    to_canonical,
    to_native,
)
from kvcore.errors import UnsupportedError
from kvcore.layout import CODECS
from kvcore.modes import MODES

HEAD_DIMS = (64, 80, 96, 128, 256)
STORED = [(codec, part) for codec in ("turbo4", "int8") for part in "kv"] + [("turbo3", "v")]
CASES = [(codec, part, dim) for codec, part in STORED for dim in HEAD_DIMS if codec != "turbo3" or dim % 64 == 0]
each_case = pytest.mark.parametrize(
    ("codec", "part", "dim"), CASES, ids=[f"{codec}-{part}-D{dim}" for codec, part, dim in CASES]
)


def random_planes(codec: str, dim: int, seed: int, lead: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    width = CODECS[codec].planes[0].width(dim)
    if codec == "int8":
        codes = rng.integers(-127, 128, (*lead, PAGE, width)).astype(np.int8)
    else:
        codes = rng.integers(0, 256, (*lead, PAGE, width)).astype(np.uint8)
    scale = rng.standard_normal((*lead, PAGE, 1)).astype(np.float16)
    return {"codes": torch.from_numpy(codes), "scale": torch.from_numpy(scale)}


# The definition, sentence by sentence, one bit field at a time


def magnitude_and_negative(index: int, half: int) -> tuple[int, int]:
    return (half - 1 - index, 1) if index < half else (index - half, 0)


def turbo4_field(c: int, index: int) -> int:
    """Magnitude at bits 4c..4c+2; the sign of c < 4 at bit 8c+7, of c >= 4 at bit 8(c-4)+3."""
    magnitude, negative = magnitude_and_negative(index, 8)
    return magnitude << 4 * c | negative << (8 * c + 7 if c < 4 else 8 * (c - 4) + 3)


def k_words(codec: str, numbers: np.ndarray) -> Iterator[int]:
    """Row-major by token: turbo4 word w holds d = 8w + c, int8 word w holds d = 4w + b."""
    for row in numbers.tolist():
        if codec == "turbo4":
            for w in range(len(row) // 8):
                yield sum(turbo4_field(c, row[8 * w + c]) for c in range(8))
        else:
            for w in range(len(row) // 4):
                yield sum(row[4 * w + b] << 8 * b for b in range(4))


def v_words(codec: str, numbers: np.ndarray) -> Iterator[int]:
    """Words in stored order: [tile][m-tile // group][lane][m-tile % group], for int8 then [r]; turbo3 its own way."""
    if codec == "turbo3":
        yield from turbo3_words(numbers)
        return
    x, mtiles = numbers.tolist(), numbers.shape[1] // 16
    group = next(n for n in ((4, 2, 1) if codec == "turbo4" else (2, 1)) if mtiles % n == 0)
    for tile in range(PAGE // 16):
        for first in range(0, mtiles, group):
            for g, t in lanes():
                for mtile in range(first, first + group):
                    if codec == "turbo4":
                        yield sum(
                            turbo4_field(
                                4 * r + 2 * k8 + half, x[16 * tile + 8 * k8 + 2 * t + half][16 * mtile + 8 * r + g]
                            )
                            for r in range(2)
                            for k8 in range(2)
                            for half in range(2)
                        )
                        continue
                    for r in range(2):
                        yield sum(
                            x[16 * tile + 8 * k8 + 2 * t + half][16 * mtile + 8 * r + g] << 8 * (2 * k8 + half)
                            for k8 in range(2)
                            for half in range(2)
                        )


def turbo3_words(numbers: np.ndarray) -> Iterator[int]:
    """[tile][group of 4 m-tiles][I0, I1, S][lane]."""
    x = numbers.tolist()
    for tile in range(PAGE // 16):
        for first in range(0, numbers.shape[1] // 16, 4):
            words = [[0] * 32 for _ in range(3)]
            for lane, (g, t) in enumerate(lanes()):
                for j in range(4):
                    for r, k8, half in np.ndindex(2, 2, 2):
                        index = x[16 * tile + 8 * k8 + 2 * t + half][16 * (first + j) + 8 * r + g]
                        magnitude, negative = magnitude_and_negative(index, 4)
                        c = 4 * r + 2 * k8 + half
                        words[j >> 1][lane] |= magnitude << 4 * c + 2 * (j & 1)
                        words[2][lane] |= negative << 8 * (c & 3) + 7 - (2 * j + (c >> 2))
            yield from (word for kind in words for word in kind)


def lanes() -> Iterator[tuple[int, int]]:
    return ((g, t) for g in range(8) for t in range(4))


def numbers_of(codec: str, codes: torch.Tensor) -> np.ndarray:
    """Turbo indices, or int8 codes biased by 128: [128, D]."""
    if codec == "int8":
        return codes.numpy().astype(int) + 128
    return unpack_bits(codes.numpy(), {"turbo4": 4, "turbo3": 3}[codec])


@each_case
def test_words_are_those_of_the_definition(codec: str, part: str, dim: int) -> None:
    planes = random_planes(codec, dim, seed=dim)
    numbers = numbers_of(codec, planes["codes"])
    assert numbers.shape == (PAGE, dim)
    want = list(k_words(codec, numbers) if part == "k" else v_words(codec, numbers))
    got = to_native(CODECS[codec], part, planes)["codes"]
    assert got.dtype == torch.int32
    assert got.numpy().view(np.uint32).tolist() == want


@each_case
def test_scales_stand_where_lanes_look_for_them(codec: str, part: str, dim: int) -> None:
    """Token 16·tile + 8·r + g at position 16·g + 2·tile + r."""
    planes = random_planes(codec, dim, seed=1)
    got = to_native(CODECS[codec], part, planes)["scale"]
    assert got.shape == (PAGE,)
    for tile in range(PAGE // 16):
        for r in range(2):
            for g in range(8):
                assert got[16 * g + 2 * tile + r] == planes["scale"][16 * tile + 8 * r + g, 0]


@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**32 - 1), lead=st.sampled_from([(), (1,), (3, 2), (2, 0, 1)]))
@settings(max_examples=60, deadline=None)
def test_pages_survive_the_way_there_and_back(case: tuple[str, str, int], seed: int, lead: tuple[int, ...]) -> None:
    name, part, dim = case
    planes = random_planes(name, dim, seed, lead)
    native = to_native(CODECS[name], part, planes)
    assert native["codes"].shape == (*lead, PAGE * dim * {"turbo4": 4, "int8": 8, "turbo3": 3}[name] // 32)
    back = to_canonical(CODECS[name], part, native, dim)
    for plane, values in planes.items():
        assert torch.equal(back[plane], values)
        assert back[plane].dtype == values.dtype


@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_every_bit_of_a_native_page_means_something(case: tuple[str, str, int], seed: int) -> None:
    """Any words come back: the form has no unused bits (int8 -128 apart, which no code is)."""
    name, part, dim = case
    rng = np.random.default_rng(seed)
    count = PAGE * dim * {"turbo4": 4, "int8": 8, "turbo3": 3}[name] // 32
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, count).astype(np.int32))
    scale = torch.from_numpy(rng.standard_normal(PAGE).astype(np.float16))
    native = {"codes": words, "scale": scale}
    back = to_native(CODECS[name], part, to_canonical(CODECS[name], part, native, dim))
    assert torch.equal(back["codes"], words)
    assert torch.equal(back["scale"], scale)


def test_raw_rows_stay_as_they_are() -> None:
    rows = {"rows": torch.randn(2, PAGE, 64)}
    assert to_native(CODECS["raw"], "k", rows)["rows"] is rows["rows"]
    assert to_canonical(CODECS["raw"], "k", rows, 64)["rows"] is rows["rows"]


@pytest.mark.parametrize(("codec", "dim", "group"), [("turbo4", 80, 1), ("turbo4", 96, 2), ("int8", 256, 2)])
def test_m_tiles_side_by_side(codec: str, dim: int, group: int) -> None:
    assert mtile_group(codec, dim) == group


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_page_has_exactly_the_bytes_of_its_layout(dtype: str, dim: int) -> None:
    for name, mode in MODES.items():
        if name == "turbo3-asym" and dim % 64:
            continue
        native = NativeLayout(mode.layout(dim), dtype)
        assert sum(plane.nbytes for plane in native.planes) == mode.layout(dim).folded_bytes(dtype, PAGE, 1)
        assert sum(p.nbytes for p in native.raw_planes) == PAGE * mode.layout(dim).raw_bytes_per_token(dtype)


def test_planes_are_named_and_shaped_as_kernels_take_them() -> None:
    native = NativeLayout(MODES["int8-turbo4"].layout(128), "bfloat16")
    assert [(p.name, p.shape, p.dtype) for p in native.planes] == [
        ("k", (PAGE * 32,), "int32"),
        ("k_scale", (PAGE,), "float16"),
        ("v", (PAGE * 16,), "int32"),
        ("v_scale", (PAGE,), "float16"),
    ]
    asym = NativeLayout(MODES["turbo4-asym"].layout(64), "bfloat16")
    assert [(p.name, p.dtype) for p in asym.planes] == [("k", "bfloat16"), ("v", "int32"), ("v_scale", "float16")]
    assert [p.shape for p in asym.raw_planes] == [(PAGE, 64), (PAGE, 64)]


@pytest.mark.parametrize(
    ("mode", "dim", "page", "reasons"),
    [
        ("turbo4", 128, 128, []),
        ("turbo3-asym", 192, 128, []),
        ("turbo3-asym", 80, 128, ["head_dim 80: turbo3 pages need a multiple of 64"]),
        ("int8", 100, 128, ["head_dim 100: int8 pages need a multiple of 16"]),
        ("fp16", 72, 128, ["head_dim 72: raw pages need a multiple of 16"]),
        (
            "int8-turbo4",
            40,
            32,
            [
                "page_size 32: needs 128",
                "head_dim 40: int8 pages need a multiple of 16",
                "head_dim 40: turbo4 pages need a multiple of 16",
            ],
        ),
    ],
    ids=["turbo4-128", "turbo3-192", "turbo3-80", "int8-100", "fp16-72", "three-reasons"],
)
def test_what_has_no_native_form_says_why(mode: str, dim: int, page: int, reasons: list[str]) -> None:
    assert reasons_against(MODES[mode].layout(dim), page) == reasons


def test_a_layout_without_native_form_is_refused_with_every_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"multiple of 16.*--kernels graph") as caught:
        NativeLayout(MODES["int8-turbo4"].layout(40), "float16")
    assert len(caught.value.reasons) == 2
