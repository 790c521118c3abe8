"""Quantization in registers: rows and coordinates in float32 to codes, as `kvcore.modes` defines them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import triton
import triton.language as tl

from kvcore.backends.cuda.kernels.gl import INTERPRET
from kvcore.layout import TURBO3, TURBO4, Codebook

FP16_MAX = tl.constexpr(65504.0)
INFINITY = tl.constexpr(float("inf"))
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it rounds half to even


def _above_asm(midpoint: float) -> str:
    """1 where $1 is greater than ``midpoint``, else 0: the difference times 2^100 is 0, or beyond 1 either way."""
    huge, rest = (np.float32(x * 2.0**100).view(np.uint32) for x in (1.0, -midpoint))
    return f"fma.rn.sat.f32 $0, $1, 0f{huge:08X}, 0f{rest:08X};"


def _midpoints(book: Codebook) -> tuple[float, ...]:
    return tuple(x for x in book.midpoints if x > 0)


def _steps(book: Codebook) -> tuple[float, ...]:
    """What each positive level adds to 2048 · its number + its square. Sums are exact in float32, and squares stay below
    1024, half of 2048, so that rounding separates the two."""
    return tuple(
        2048.0 * (i > 0) + b * b - a * a for i, (a, b) in enumerate(pairwise((0.0, *(x for x in book.levels if x > 0))))
    )


MIDPOINTS4, MIDPOINTS3 = tl.constexpr(_midpoints(TURBO4)), tl.constexpr(_midpoints(TURBO3))
ABOVE4, ABOVE3 = (tl.constexpr(tuple(map(_above_asm, x.value))) for x in (MIDPOINTS4, MIDPOINTS3))
STEPS4, STEPS3 = tl.constexpr(_steps(TURBO4)), tl.constexpr(_steps(TURBO3))
# float32 numbers near it are 2048 apart: a sum with it is rounded to such a multiple, whose number is its lowest bits.
NUMBERS = tl.constexpr(1.5 * 2.0**34)


@triton.jit
def finite_rows(x):
    """x float32 with rows that hold a NaN or an infinity as zeros, and which rows are whole."""
    whole = tl.min((tl.abs(x) < INFINITY).to(tl.int32), 1) == 1
    return tl.where(whole[:, None], x, 0.0), whole


@triton.jit
def power_of_two_under(x):
    """1 / 2^floor(log2 x) for float32 x >= 0, kept within 2^-126 .. 2^95, where products with it stay finite."""
    exponent = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 32), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def int8_codes(x):
    """Finite rows x float32 -> codes int32 in [-127, 127]; scale [rows]: absmax / 127 rounded up to fp16, 1 for zeros."""
    exact = tl.minimum(tl.div_rn(tl.max(tl.abs(x), 1), 127.0), FP16_MAX)
    nearest = exact.to(tl.float16)
    below = nearest.to(tl.float32) < exact
    scale = (nearest.to(tl.int16, bitcast=True) + below.to(tl.int16)).to(tl.float16, bitcast=True).to(tl.float32)
    scale = tl.where(scale == 0, 1.0, scale)
    ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return tl.minimum(tl.maximum(ratio + ROUNDER - ROUNDER, -127.0), 127.0).to(tl.int32), scale


@triton.jit
def nearest_level(z, BITS: tl.constexpr):
    """Magnitude 0, 1, ..., sign (1 below the middle) and squared level of each finite z; ties go down.

    On multiply-add units, which have less to do than those that compare and select.
    """
    MIDPOINTS: tl.constexpr = MIDPOINTS4 if BITS == 4 else MIDPOINTS3
    ABOVE: tl.constexpr = ABOVE4 if BITS == 4 else ABOVE3
    STEPS: tl.constexpr = STEPS4 if BITS == 4 else STEPS3
    sign = (z <= 0).to(tl.int32)
    # Below zero a tie means the larger magnitude: the next number turns > into >=.
    size = (tl.abs(z).to(tl.int32, bitcast=True) + sign).to(tl.float32, bitcast=True)
    both = z * 0 + STEPS[0]
    for i in tl.static_range((1 << BITS - 1) - 1):
        if INTERPRET:
            above = (size > MIDPOINTS[i]).to(tl.float32)
        else:
            above = tl.inline_asm_elementwise(ABOVE[i], "=f,f", [size], dtype=tl.float32, is_pure=True, pack=1)
        both += above * STEPS[i + 1]
    numbers = both + NUMBERS
    return numbers.to(tl.int32, bitcast=True) & 7, sign, both - (numbers - NUMBERS)
