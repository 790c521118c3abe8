"""Codes in registers to the words of a native page (`native.py` says where each bit lies).

Codes come as [rows, columns]: tokens from ``token`` and dimensions from ``column`` on. Each is shifted to its place in
its word; then the codes of a word, which have no bit in common, are brought side by side and added up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore.backends.cuda.kernels.gl import constexpr_function
from kvcore.backends.cuda.native import PAGE

PAGE_TOKENS = tl.constexpr(PAGE)


@triton.jit
def store_scale(SCALE, scale, token):
    t = token + tl.arange(0, scale.shape[0])
    tl.store(SCALE + t % 8 * (PAGE_TOKENS // 8) + t // 8, scale)


@triton.jit
def store_int8(WORDS, codes, token, GROUP: tl.constexpr, D: tl.constexpr):
    """Codes 0..255 of whole rows. GROUP 0 is K, others V."""
    if GROUP == 0:
        d = tl.arange(0, codes.shape[1])
        _store_rows(WORDS, codes << (d % 4 * 8)[None, :], token, 0, 4, D)
    else:
        t = token + tl.arange(0, codes.shape[0])
        _store_fragments(WORDS, codes << (_token_code(t) * 8)[:, None], token, 0, GROUP, 4, D)


@triton.jit
def store_turbo(WORDS, magnitude, sign, token, column, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Magnitudes and signs of some columns, a multiple of 16. GROUP 0 is K (4 bits only), others V."""
    t = token + tl.arange(0, magnitude.shape[0])
    d = column + tl.arange(0, magnitude.shape[1])
    if GROUP == 0:
        code = (d % 8)[None, :]
    else:
        code = (d // 8 % 2 * 4)[None, :] + _token_code(t)[:, None]
    if BITS == 3:
        mtile = (d // 16 % 4)[None, :]
        magnitude = magnitude << (4 * code + mtile % 2 * 2)
        sign = sign << (code % 4 * 8 + 7 - (mtile * 2 + code // 4))
        _store_turbo3(WORDS, magnitude, sign, token, column, D)
    else:
        fields = (magnitude << (4 * code)) + (sign << (code % 4 * 8 + 7 - code // 4 * 4))
        if GROUP == 0:
            _store_rows(WORDS, fields, token, column, 8, D)
        else:
            _store_fragments(WORDS, fields, token, column, GROUP, 8, D)


@triton.jit
def _token_code(t):
    """The part of a code's number within its word of V that its token decides: 2·k8 + half."""
    return t // 8 % 2 * 2 + t % 2


@constexpr_function
def halvings(n):
    return n.bit_length() - 1


@triton.jit
def _sum_last(x):
    """The sum of each row of x [n, a power of two], two numbers at a time."""
    # Triton 3.6 adds up wrongly along an axis in both lanes and warps, or in lanes that are no neighbours.
    for _ in tl.static_range(halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.numel // 2, 2]), 1)
    return x


@triton.jit
def _store_rows(WORDS, fields, token, column, PER_WORD: tl.constexpr, D: tl.constexpr):
    """Token by token, PER_WORD neighbours along d to a word."""
    rows: tl.constexpr = fields.shape[0]
    words: tl.constexpr = fields.shape[1] // PER_WORD
    word = tl.reshape(_sum_last(tl.reshape(fields, [rows * words, PER_WORD])), [rows, words])
    t = token + tl.arange(0, rows)
    w = column // PER_WORD + tl.arange(0, words)
    at = t[:, None] * (D // PER_WORD) + w[None, :]
    tl.store(WORDS + at, word, mask=(t >= 0)[:, None] & (w < D // PER_WORD)[None, :])


@triton.jit
def _fragments(fields, GROUP: tl.constexpr, PER_WORD: tl.constexpr):
    """Words in the order tile, m-tile group, g, t, m-tile in its group, r, k8, half, as far as it is not within one."""
    tiles: tl.constexpr = fields.shape[0] // 16
    groups: tl.constexpr = fields.shape[1] // (16 * GROUP)
    split = tl.reshape(fields, [tiles, 2, 4, 2, groups, GROUP, 2, 8])
    ordered = tl.permute(split, [0, 4, 7, 2, 5, 6, 1, 3])
    return _sum_last(tl.reshape(ordered, [fields.shape[0] * fields.shape[1] // PER_WORD, PER_WORD]))


@triton.jit
def _store_fragments(WORDS, fields, token, column, GROUP: tl.constexpr, PER_WORD: tl.constexpr, D: tl.constexpr):
    word = _fragments(fields, GROUP, PER_WORD)
    per_tile: tl.constexpr = fields.shape[1] * 16 // PER_WORD
    n = tl.arange(0, word.shape[0])
    within = column * 16 // PER_WORD + n % per_tile
    size: tl.constexpr = D * 16 // PER_WORD
    tl.store(WORDS + (token // 16 + n // per_tile) * size + within, word, mask=within < size)


@triton.jit
def _store_turbo3(WORDS, magnitude, sign, token, column, D: tl.constexpr):
    """Per tile and four m-tiles: 32 lanes' words of m-tiles 0 and 1, 32 of m-tiles 2 and 3, 32 of signs."""
    signs = _fragments(sign, 4, 32)
    pairs = tl.reshape(_fragments(magnitude, 4, 16), [signs.shape[0], 2])
    per_tile: tl.constexpr = magnitude.shape[1] // 2
    n = tl.arange(0, signs.shape[0])
    within = column // 64 * 96 + n % per_tile // 32 * 96 + n % 32
    at = (token // 16 + n // per_tile) * (D // 64 * 96) + within
    tl.store(WORDS + at[:, None] + tl.arange(0, 2)[None, :] * 32, pairs)
    tl.store(WORDS + at + 64, signs)
