"""Quantization in registers: rows and coordinates in float32 to codes, as `kvcore.modes` defines them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import triton
import triton.language as tl

from kvcore.layout import TURBO3, TURBO4, Codebook

FP16_MAX = tl.constexpr(65504.0)
INFINITY = tl.constexpr(float("inf"))
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it rounds half to even


def _midpoint_bits(book: Codebook) -> tuple[int, ...]:
    """The positive midpoints as float32 bits, which are ordered like the numbers."""
    return tuple(int(np.float32(x).view(np.int32)) for x in book.midpoints if x > 0)


def _square_steps(book: Codebook) -> tuple[float, ...]:
    """What the square of each positive level adds to that of the one below it. All are exact in float32."""
    return tuple(b * b - a * a for a, b in pairwise((0.0, *(x for x in book.levels if x > 0))))


MIDPOINTS4, MIDPOINTS3 = tl.constexpr(_midpoint_bits(TURBO4)), tl.constexpr(_midpoint_bits(TURBO3))
SQUARES4, SQUARES3 = tl.constexpr(_square_steps(TURBO4)), tl.constexpr(_square_steps(TURBO3))


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
    """Magnitude 0, 1, ..., sign (1 below the middle) and squared level of each z; ties go down."""
    MIDPOINTS: tl.constexpr = MIDPOINTS4 if BITS == 4 else MIDPOINTS3
    SQUARES: tl.constexpr = SQUARES4 if BITS == 4 else SQUARES3
    sign = (z <= 0).to(tl.int32)
    # Below zero a tie means the larger magnitude: one more in the bits turns > into >=.
    bits = tl.abs(z).to(tl.int32, bitcast=True) + sign
    magnitude = sign * 0
    square = z * 0 + SQUARES[0]
    for i in tl.static_range((1 << BITS - 1) - 1):
        above = bits > MIDPOINTS[i]
        magnitude += above.to(tl.int32)
        square += tl.where(above, SQUARES[i + 1], 0.0)
    return magnitude, sign, square
