"""The kernels' inline assembly against what its twins compute: the interpreter runs twins, and this the assembly."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from ptx import run

from kvcore.backends.cuda.kernels import codes, fragments, quantize

E4M3_TURBO4 = [1.125, 3.25, 5.5, 8.0, 11.0, 14.0, 18.0, 24.0]
TURBO3 = [3.0, 9.0, 16.0, 26.0]


def words(count: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32)]


def numbers(registers: list[int], dtype: type = np.float16) -> list[float]:
    return np.array(registers, np.uint32).view(np.uint16).view(dtype).astype(float).tolist()


def nibble_pairs(word: int) -> Iterator[tuple[int, int, int]]:
    for pair in range(4):
        yield pair, word >> 4 * pair & 15, word >> 16 + 4 * pair & 15


@pytest.mark.parametrize("bf16", [False, True], ids=["float16", "bfloat16"])
def test_nibbles(bf16: bool) -> None:
    asm, dtype = (codes.NIBBLES_BF16, ml_dtypes.bfloat16) if bf16 else (codes.NIBBLES_F16, np.float16)
    for first, second in zip(words(64), words(64, 1), strict=True):
        want = [
            code + (128.0 if bf16 else (1024.0, 64.0)[pair % 2])
            for word in (first, second)
            for pair, *both in nibble_pairs(word)
            for code in both
        ]
        assert numbers(run(asm.value, [first, second], 8), dtype) == want


def test_bytes() -> None:
    for first, second in zip(words(64), words(64, 1), strict=True):
        want = [1024.0 + (word >> 8 * i & 255) for word in (first, second) for i in range(4)]
        assert numbers(run(codes.BYTES_ASM.value, [first, second], 4)) == want
        signed = [(word >> 8 * i & 255) - 128.0 for word in (first, second) for i in range(4)]
        assert numbers(run(fragments.INT8_ASM.value, [first, second], 4)) == signed


@pytest.mark.parametrize("bf16", [False, True], ids=["float16", "bfloat16"])
def test_a_product_with_a_norm_s_weights(bf16: bool) -> None:
    asm, dtype = (codes.WEIGHTED_BF16, ml_dtypes.bfloat16) if bf16 else (codes.WEIGHTED_F16, np.float16)
    x, weight = np.random.default_rng(0).standard_normal((2, 64, 2)).astype(dtype)
    for a, b in zip(x, weight, strict=True):
        got = run(asm.value, [int(y.view(np.uint16).view(np.uint32)[0]) for y in (a, b)], 1)
        want = (a.astype(np.float64) * b.astype(np.float64) / 8).astype(np.float32).astype(dtype)
        assert numbers(got, dtype) == want.astype(float).tolist()


@pytest.mark.parametrize("bf16", [False, True], ids=["float16", "bfloat16"])
def test_codes_to_numbers(bf16: bool) -> None:
    """Every code of eight bits, or of four where they stand under 64 or 128, by scales of any size."""
    asm, dtype = (codes.AFFINE_BF16, ml_dtypes.bfloat16) if bf16 else (codes.AFFINE_F16, np.float16)
    rng = np.random.default_rng(0)
    for bits, more in ((8, 0.0), (4, 128.0)) if bf16 else ((8, 1024.0), (4, 64.0)):
        for pair in np.arange(1 << bits).reshape(-1, 2):
            scale = (rng.standard_normal(2) * 2.0 ** rng.integers(-12, 4, 2)).astype(dtype)
            bias = (rng.standard_normal(2) * 2.0 ** rng.integers(-12, 4, 2)).astype(dtype)
            offset = np.full(2, -more if bf16 else more).astype(dtype)
            inputs = [(pair + more).astype(dtype), offset, scale, bias]
            got = run(asm.value, [int(x.view(np.uint16).view(np.uint32)[0]) for x in inputs], 1)
            want = pair.astype(np.float32) * scale.astype(np.float32) + bias.astype(np.float32)
            assert numbers(got, dtype) == want.astype(dtype).astype(float).tolist()


@pytest.mark.parametrize("asm", ["TURBO4_ASM", "TURBO4_ASM_SM80"])
def test_turbo4(asm: str) -> None:
    def value(word: int, c: int) -> float:
        sign = word >> 8 * (c % 4) + (7 if c < 4 else 3) & 1
        return E4M3_TURBO4[word >> 4 * c & 7] * (-1 if sign else 1)

    table = fragments.TURBO4_LOW
    for first, second in zip(words(64), words(64, 1), strict=True):
        want = [value(word, c) for word in (first, second) for c in range(8)]
        got = run(getattr(fragments, asm).value, [first, second, table, table], 8)
        assert numbers(got) == want


@pytest.mark.parametrize("asm", ["TURBO3_ASM", "TURBO3_ASM_SM80"])
def test_turbo3(asm: str) -> None:
    def value(index: int, signs: int, word: int, mtile: int, c: int) -> float:
        sign = signs >> 8 * (c % 4) + 7 - (2 * (2 * word + mtile) + c // 4) & 1
        return TURBO3[index >> 4 * c + 2 * mtile & 3] * (-1 if sign else 1)

    table = fragments.TURBO3_MAGNITUDES
    for first, second, signs in zip(words(64), words(64, 1), words(64, 2), strict=True):
        want = [
            value(index, signs, word, mtile, c)
            for word, index in enumerate((first, second))
            for mtile in range(2)
            for c in range(8)
        ]
        got = run(getattr(fragments, asm).value, [first, second, signs, signs, table, table], 16)
        assert numbers(got) == want


def test_a_row_is_spread_from_the_lane_that_holds_it() -> None:
    """Lane 4 g + t of an accumulator holds row g of its columns 2 t and 2 t + 1."""
    for lane in range(32):
        assert [run(fragments.SPREAD_ASM.value, [7, row], 1, lane) for row in range(8)] == [
            [4 * row + lane % 4] for row in range(8)
        ]


def test_what_is_held_and_what_is_halved_stays_as_it_is() -> None:
    for lane, word in enumerate(words(32)):
        assert run(fragments.HOLD_ASM.value, [word], 1, lane) == [word]
        assert run(fragments.HALVES_ASM.value, [word, 5], 2, lane) == [word, 5]


@pytest.mark.parametrize("bits", [3, 4])
def test_above_a_midpoint_is_one(bits: int) -> None:
    """Exactly: at the midpoint and one number beside it too."""
    midpoints = getattr(quantize, f"MIDPOINTS{bits}").value
    for midpoint, asm in zip(midpoints, getattr(quantize, f"ABOVE{bits}").value, strict=True):
        near = [np.nextafter(np.float32(midpoint), np.float32(side)) for side in (0, np.inf)]
        for x in (*near, midpoint, 0.0, 1e-45, 1e30):
            got = run(asm, [int(np.float32(x).view(np.uint32))], 1)
            assert got == [int(np.float32(x > midpoint).view(np.uint32))]
