"""Rows of pages to dense rows in 16 bits, for attention of many queries at once.

K keeps its rotation (a rotated query meets it), V the basis it is stored in. Pages are read tile by tile in their
stored order (`native.py`), unpacked in registers and written row by row. Dead rows are left out: what is written is
dense.

Range. K is divided by 16, which keeps every row of finite fp16 keys finite after rotation; the softmax scale makes up
for it. V is multiplied by a power of two per (sequence, KV head), chosen from the largest scale, so that neither tiny
nor loud values leave fp16's range; its inverse is returned, for the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.backends.cuda.kernels.fragments import TURBO3_MAGNITUDES, TURBO4_HIGH, TURBO4_LOW
from kvcore.backends.cuda.native import PAGE, mtile_group
from kvcore.layout import Codec

K_DIVISOR = 16.0
PIECE_FIELDS = 5
PAGE_TOKENS = tl.constexpr(PAGE)
FIELDS = tl.constexpr(PIECE_FIELDS)
T4_LOW, T4_HIGH, T3 = tl.constexpr(TURBO4_LOW), tl.constexpr(TURBO4_HIGH), tl.constexpr(TURBO3_MAGNITUDES)
E4M3 = tl.constexpr(256.0)  # what an e4m3 byte moved into fp16's fields lacks
LARGEST = tl.constexpr(7)  # the largest V scale becomes 2^7 to 2^8: times 127, the largest code, that fits fp16
SMALLEST = tl.constexpr(103)  # the exponent field of 2^-24, fp16's smallest number


@dataclass(frozen=True, slots=True)
class GatherShape:
    """What `gather_kernel` is compiled for. ``tokens`` a program; ``v_side``: m-tiles side by side (`mtile_group`);
    ``k_factor`` multiplies K; ``positions``: whether to write them."""

    k_codec: str
    v_codec: str
    head_dim: int
    padded: int
    tokens: int
    v_side: int
    k_factor: float
    centred: bool
    positions: bool


@triton.jit
def _levels(magnitude_byte, negative):
    """e4m3 bytes and sign bits to fp16, divided by 256."""
    return ((magnitude_byte << 7) | (negative << 15)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _turbo4(word, code):
    """Code ``code`` of words, in fp16 divided by 256."""
    magnitude = (word >> (4 * code)) & 7
    negative = (word >> (code % 4 * 8 + 7 - code // 4 * 4)) & 1
    table = tl.where(magnitude < 4, T4_LOW, T4_HIGH)
    return _levels((table >> ((magnitude & 3) * 8)) & 127, negative)


@triton.jit
def _int8(word, code):
    return (((word >> (8 * code)) & 255) - 128).to(tl.float16)


@triton.jit
def _k_codes(K, plane, start, SHAPE: tl.constexpr):
    """Quantized K of tokens from ``start``: fp16 [tokens, padded]."""
    PER_WORD: tl.constexpr = 8 if SHAPE.k_codec == "turbo4" else 4
    WORDS: tl.constexpr = SHAPE.head_dim // PER_WORD
    PADDED: tl.constexpr = SHAPE.padded // PER_WORD
    token = start + tl.arange(0, SHAPE.tokens)
    w = tl.arange(0, PADDED)
    at = K + plane * (PAGE_TOKENS * WORDS) + token[:, None] * WORDS + w[None, :]
    word = tl.load(at, mask=(token >= 0)[:, None] & (w < WORDS)[None, :], other=0)
    code = tl.arange(0, PER_WORD)[None, None, :]
    if SHAPE.k_codec == "turbo4":
        values = _turbo4(word[:, :, None], code)
    else:
        values = _int8(word[:, :, None], code)
    return tl.reshape(values, [SHAPE.tokens, SHAPE.padded])


@triton.jit
def _v_codes(V, plane, start, SHAPE: tl.constexpr):
    """int8 or turbo4 V of tokens from ``start``: fp16 [tokens, padded]. Words are [tile, m-tile group, lane, m-tile]
    (int8: [.., r]), a word's codes ([r],) k8, half."""
    TILES: tl.constexpr = SHAPE.tokens // 16
    SIDE: tl.constexpr = SHAPE.v_side
    GROUPS: tl.constexpr = SHAPE.padded // (16 * SIDE)
    PER_WORD: tl.constexpr = 8 if SHAPE.v_codec == "turbo4" else 4
    STORED: tl.constexpr = SHAPE.head_dim * 16 // PER_WORD
    TILE: tl.constexpr = SHAPE.padded * 16 // PER_WORD
    x = tl.arange(0, TILES * TILE)
    within = x % TILE
    at = V + plane * (PAGE_TOKENS // 16 * STORED) + (start // 16 + x // TILE) * STORED + within
    word = tl.load(at, mask=within < STORED, other=0)
    code = tl.arange(0, PER_WORD)[None, :]
    if SHAPE.v_codec == "turbo4":
        values = _turbo4(word[:, None], code)
    else:
        values = _int8(word[:, None], code)
    split = tl.reshape(values, [TILES, GROUPS, 8, 4, SIDE, 2, 2, 2])  # tile, group, g, t, m-tile, r, k8, half
    return tl.reshape(tl.permute(split, [0, 6, 3, 7, 1, 4, 5, 2]), [SHAPE.tokens, SHAPE.padded])


@triton.jit
def _v_turbo3(V, plane, start, SHAPE: tl.constexpr):
    """turbo3 V of tokens from ``start``: fp16 [tokens, padded], divided by 256. Each index word holds two m-tiles."""
    TILES: tl.constexpr = SHAPE.tokens // 16
    GROUPS: tl.constexpr = SHAPE.padded // 64
    STORED: tl.constexpr = SHAPE.head_dim // 64
    x = tl.arange(0, TILES * GROUPS * 64)
    group, pair, lane = x // 64 % GROUPS, x // 32 % 2, x % 32
    at = V + plane * (PAGE_TOKENS // 16 * STORED * 96) + (start // 16 + x // (64 * GROUPS)) * (STORED * 96)
    at += group * 96 + lane
    index = tl.load(at + pair * 32, mask=group < STORED, other=0)[:, None]
    signs = tl.load(at + 64, mask=group < STORED, other=0)[:, None]
    code = tl.arange(0, 16)[None, :]
    odd, c = code // 8, code % 8
    magnitude = (index >> (4 * c + 2 * odd)) & 3
    negative = (signs >> (c % 4 * 8 + 7 - (4 * pair[:, None] + 2 * odd + c // 4))) & 1
    table = tl.full([1, 1], T3, tl.int32)
    values = _levels((table >> (magnitude * 8)) & 127, negative)
    split = tl.reshape(values, [TILES, GROUPS, 2, 8, 4, 2, 2, 2, 2])  # tile, group, pair, g, t, odd, r, k8, half
    return tl.reshape(tl.permute(split, [0, 7, 4, 8, 1, 2, 5, 6, 3]), [SHAPE.tokens, SHAPE.padded])


@triton.jit
def _raw_rows(X, plane, token, live, SHAPE: tl.constexpr):
    d = tl.arange(0, SHAPE.padded)
    at = X + (plane * PAGE_TOKENS + token)[:, None] * SHAPE.head_dim + d[None, :]
    return tl.load(at, mask=live[:, None] & (d < SHAPE.head_dim)[None, :], other=0.0)


@triton.jit
def _scales(SCALE, plane, token):
    return tl.load(SCALE + plane * PAGE_TOKENS + token % 8 * (PAGE_TOKENS // 8) + token // 8).to(tl.float32)


@triton.jit
def _store(OUT, row, rows, live, SHAPE: tl.constexpr):
    d = tl.arange(0, SHAPE.padded)
    at = OUT + row[:, None] * SHAPE.head_dim + d[None, :]
    tl.store(at, rows.to(OUT.dtype.element_ty), mask=live[:, None] & (d < SHAPE.head_dim)[None, :])


@triton.jit
def _power_of_two(exponent_field):
    return (exponent_field << 23).to(tl.float32, bitcast=True)


@triton.jit
def _page(TABLE, SINK_PAGE, seq, stride, entry):
    """The page of a table entry, of the sinks for entry -1."""
    at = TABLE + seq * stride + entry
    if entry < 0:
        at = SINK_PAGE + seq
    return tl.load(at).to(tl.int64)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["TABLE", "SINK_PAGE", "PIECES", "PEAK"])
def peak_kernel(SCALE, TABLE, SINK_PAGE, PIECES, PEAK, stride):
    """Grid (pieces, Hkv, sequences). PEAK int32 [sequences, Hkv], zeroed: the bits of the largest live scale."""
    h, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    piece = PIECES + (seq * tl.num_programs(0) + tl.program_id(0)) * FIELDS
    first, end = tl.load(piece + 1), tl.load(piece + 2)
    if first < end:
        page = _page(TABLE, SINK_PAGE, seq, stride, tl.load(piece))
        token = tl.arange(0, PAGE_TOKENS)
        scale = _scales(SCALE, page * tl.num_programs(1) + h, token)
        scale = tl.where((token >= first) & (token < end), scale, 0.0)
        bits = tl.max(scale, 0).to(tl.int32, bitcast=True)  # in order, as no scale is negative
        tl.atomic_max(PEAK + seq * tl.num_programs(1) + h, bits)


@triton.jit(
    do_not_specialize=["stride", "rows"],  # D alone aligns the rows
    do_not_specialize_on_alignment=["TABLE", "SINK_PAGE", "PIECES", "PEAK", "UNIT", "POSITIONS"],
)
def gather_kernel(
    K, V, K_SCALE, V_SCALE, K_CENTER, TABLE, SINK_PAGE, PIECES, PEAK, K_OUT, V_OUT, UNIT, POSITIONS, stride, rows,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Grid (pieces · tiles of a page, Hkv, sequences). Outputs [sequences, Hkv, rows, D]; UNIT float32 [sequences, Hkv]
    what V_OUT is to be multiplied by; POSITIONS int32 [sequences, rows]."""
    TILES: tl.constexpr = PAGE_TOKENS // SHAPE.tokens
    heads = tl.num_programs(1)
    h, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pieces = tl.num_programs(0) // TILES
    piece = PIECES + (seq * pieces + tl.program_id(0) // TILES) * FIELDS
    first, end = tl.load(piece + 1), tl.load(piece + 2)
    start = tl.program_id(0) % TILES * SHAPE.tokens
    if SHAPE.v_codec != "raw":
        peak = tl.maximum(tl.load(PEAK + seq * heads + h) >> 23, SMALLEST)
        if tl.program_id(0) == 0:
            tl.store(UNIT + seq * heads + h, _power_of_two(peak - LARGEST))
    if (start < end) & (start + SHAPE.tokens > first):
        plane = _page(TABLE, SINK_PAGE, seq, stride, tl.load(piece)) * heads + h
        token = start + tl.arange(0, SHAPE.tokens)
        live = (token >= first) & (token < end)
        out = tl.load(piece + 3) + token - first
        row = (seq * heads + h) * rows + out
        if SHAPE.positions:
            at = tl.load(piece + 4) + token - first
            tl.store(POSITIONS + seq * rows + out, at, mask=live & (h == 0))

        if SHAPE.k_codec == "raw":
            k = _raw_rows(K, plane, token, live, SHAPE)
            if SHAPE.k_factor != 1.0:
                k = k.to(tl.float32) * SHAPE.k_factor
        else:
            unit: tl.constexpr = SHAPE.k_factor * (E4M3 if SHAPE.k_codec == "turbo4" else 1.0)
            k = _k_codes(K, plane, start, SHAPE).to(tl.float32) * (_scales(K_SCALE, plane, token) * unit)[:, None]
            if SHAPE.centred:
                d = tl.arange(0, SHAPE.padded)
                center = tl.load(K_CENTER + plane * SHAPE.head_dim + d, mask=d < SHAPE.head_dim, other=0.0)
                k += (center.to(tl.float32) * SHAPE.k_factor)[None, :]
        _store(K_OUT, row, k, live, SHAPE)

        if SHAPE.v_codec == "raw":
            v = _raw_rows(V, plane, token, live, SHAPE)
        else:
            scale = _scales(V_SCALE, plane, token) * _power_of_two(254 - peak + LARGEST)
            if SHAPE.v_codec == "int8":
                v = _v_codes(V, plane, start, SHAPE).to(tl.float32) * scale[:, None]
            elif SHAPE.v_codec == "turbo4":
                v = _v_codes(V, plane, start, SHAPE).to(tl.float32) * (scale * E4M3)[:, None]
            else:
                v = _v_turbo3(V, plane, start, SHAPE).to(tl.float32) * (scale * E4M3)[:, None]
        _store(V_OUT, row, v, live, SHAPE)


@dataclass(frozen=True, slots=True)
class Source:
    """Pages of one kind, as `attend.Pages` holds them: folded ones in their codecs, or raw ones."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_codec: Codec
    v_codec: Codec
    k_factor: float = 1.0
    k_center: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Dense:
    """k, v [B, Hkv, rows, D]. Times ``unit`` float32 [B, Hkv], v is what was stored. positions int32 [B, rows]."""

    k: Tensor
    v: Tensor
    unit: Tensor | None
    positions: Tensor | None


def gather(
    source: Source,
    table: Tensor,
    sink_page: Tensor,
    pieces: Tensor,
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    positions: bool = False,
) -> Dense:
    """Live rows of some pages of each sequence, dense; two launches where V is quantized, else one.

    table       int32 [B, pages], sink_page int32 [B]: page numbers
    pieces      int32 [B, pieces, 5]: table entry (-1: the sinks' page), first live row, end, row of the output, and the
                position of the first live row; an empty piece is all zeros. Together they fill ``rows`` rows.
    K is multiplied by the source's ``k_factor``. Raw rows keep their dtype where that is ``dtype``.
    """
    batch, count = pieces.shape[:2]
    heads, device = source.k.shape[1], source.k.device
    padded = triton.next_power_of_2(head_dim)
    codec = source.v_codec
    shape = GatherShape(
        k_codec=source.k_codec.name,
        v_codec=codec.name,
        head_dim=head_dim,
        padded=padded,
        tokens=max(16, min(PAGE, 8192 // padded)),
        v_side=mtile_group(codec.name, head_dim),
        k_factor=source.k_factor,
        centred=source.k_center is not None,
        positions=positions,
    )
    k, v = (torch.empty(batch, heads, rows, head_dim, dtype=dtype, device=device) for _ in range(2))
    unit = peak = None
    if codec.quantized:
        unit = torch.empty(batch, heads, device=device)
        peak = torch.zeros(batch, heads, dtype=torch.int32, device=device)
        peak_kernel[(count, heads, batch)](
            source.v_scale, table, sink_page, pieces, peak, table.stride(0), num_warps=1
        )  # fmt: skip
    at = torch.empty(batch, rows, dtype=torch.int32, device=device) if positions else None
    gather_kernel[(count * (PAGE // shape.tokens), heads, batch)](
        source.k, source.v, source.k_scale, source.v_scale, source.v if source.k_center is None else source.k_center,
        table, sink_page, pieces, pieces if peak is None else peak,
        k, v, k if unit is None else unit, pieces if at is None else at, table.stride(0), rows, SHAPE=shape, num_warps=8,
    )  # fmt: skip
    return Dense(k, v, unit, at)
