"""Folding: complete raw pages become native pages, for every layer, sequence and KV head in one launch.

Whether a page folds is decided on the device: programs of sequences that do not cross a page boundary return at once,
so that the launch can stand in the CUDA graph of every step. Quantization is that of `kvcore.modes`, the stored form
that of `native.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.backends.cuda import gpu
from kvcore.backends.cuda.kernels.pack import store_int8, store_scale, store_turbo
from kvcore.backends.cuda.kernels.quantize import finite_rows, int8_codes, nearest_level, power_of_two_under
from kvcore.backends.cuda.kernels.rotate import rotate, rotation_matrices, rotation_part
from kvcore.backends.cuda.native import PAGE, NativeLayout, code_bits, mtile_group
from kvcore.layout import Codec
from kvcore.layout.planes import center_skips

PAGE_TOKENS = tl.constexpr(PAGE)
PAGE_SKIPS = tl.constexpr(center_skips(PAGE))
FP16_MAX = tl.constexpr(65504.0)
INFINITY = tl.constexpr(float("inf"))


@dataclass(frozen=True, slots=True)
class FoldPart:
    """What a kernel is compiled for: K or V of one layout. ``bits`` of a code, 16 for rows that stay raw.

    ``rows`` of ``padded`` head size are held in registers at a time, 64 elements a thread, 32 of int8; ``columns`` output
    coordinates are rotated at a time, which bounds shared memory. ``group``: `native.mtile_group`, 0 for K.
    """

    bits: int
    head_dim: int
    group: int
    terms: int
    spread: float
    rows: int
    padded: int
    columns: int
    centred: bool

    @classmethod
    def create(cls, codec: Codec, part: str, head_dim: int, matrix: Tensor | None, *, columns: int = 64) -> FoldPart:
        padded = triton.next_power_of_2(head_dim)
        return cls(
            bits=code_bits(codec) if codec.quantized else 16,
            head_dim=head_dim,
            group=mtile_group(codec.name, head_dim) if part == "v" else 0,
            terms=1 if matrix is None else matrix.shape[1],
            spread=0.0 if codec.codebook is None else codec.codebook.spread,
            rows=min(PAGE, (4096 if codec.name == "int8" else 8192) // padded),
            padded=padded,
            columns=min(columns, padded),
            centred=codec.centred,
        )


@triton.jit
def _fold_center(CENTER, RAW, MATRIX, PART: tl.constexpr):
    """The rotated mean of a page's finite rows, but for the first, to CENTER [D]; returns its largest magnitude."""
    D: tl.constexpr = PART.head_dim
    COLUMNS: tl.constexpr = PART.columns
    ROWS: tl.constexpr = PART.rows
    PADDED: tl.constexpr = PART.padded
    TERMS: tl.constexpr = PART.terms
    d = tl.arange(0, PADDED)
    total = tl.zeros([PADDED], tl.float32)
    counts = tl.zeros([ROWS], tl.int32)
    for token in range(0, PAGE_TOKENS, ROWS):
        t = token + tl.arange(0, ROWS)
        at = RAW + t[:, None] * D + d[None, :]
        x = tl.load(at, mask=(t >= PAGE_SKIPS)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        x, whole = finite_rows(x)
        total += tl.sum(x, 0)
        counts += (whole & (t >= PAGE_SKIPS)).to(tl.int32)
    mean = total / tl.maximum(tl.sum(counts, 0), 1).to(tl.float32)
    largest = tl.zeros([COLUMNS], tl.float32)
    for column in range(0, D, COLUMNS):
        j = column + tl.arange(0, COLUMNS)
        y = tl.zeros([COLUMNS], tl.float32)
        for term in tl.static_range(TERMS):
            part = rotation_part(MATRIX, column, 0, PADDED, D, D, term, COLUMNS=COLUMNS).to(tl.float32)
            y += tl.sum(mean[:, None] * part, 0)
        y *= D**-0.5
        y = tl.where(tl.abs(y) < INFINITY, y, 0.0)
        y = tl.minimum(tl.maximum(y, -FP16_MAX), FP16_MAX).to(tl.float16)
        largest = tl.maximum(largest, tl.where(j < D, tl.abs(y.to(tl.float32)), 0.0))
        tl.store(CENTER + j, y, mask=j < D)
    return tl.max(largest, 0)


@triton.jit
def _rotated(unit, inverse, CENTER, MATRIX, column, PART: tl.constexpr):
    """√D·R of the rows ``unit``, which were multiplied by ``inverse``, less the page's centre: COLUMNS coordinates."""
    D: tl.constexpr = PART.head_dim
    COLUMNS: tl.constexpr = PART.columns
    y = tl.zeros([unit.shape[0], COLUMNS], tl.float32)
    y = rotate(unit, y, MATRIX, column, 0, D, D, PART.terms)
    if PART.centred:
        j = column + tl.arange(0, COLUMNS)
        center = tl.load(CENTER + j, mask=j < D, other=0.0).to(tl.float32) * D**0.5
        y -= center[None, :] * inverse[:, None]
    return y


@triton.jit
def _inside(x, column, PART: tl.constexpr):
    """x [rows, columns] of coordinates from ``column`` on, zeros beyond the head size."""
    if PART.head_dim % PART.columns != 0:
        x = tl.where((column + tl.arange(0, PART.columns) < PART.head_dim)[None, :], x, 0.0)
    return x


@triton.jit
def _fold_turbo(WORDS, SCALE, CENTER, MATRIX, rows, token, largest, PART: tl.constexpr):
    D: tl.constexpr = PART.head_dim
    COLUMNS: tl.constexpr = PART.columns
    x, whole = finite_rows(rows.to(tl.float32))
    # A power of two keeps squares and rotated sums in range, and 16-bit rows exact.
    inverse = power_of_two_under(tl.maximum(tl.max(tl.abs(x), 1), largest))
    x *= inverse[:, None]
    unit = x.to(rows.dtype)
    y = tl.zeros([rows.shape[0], COLUMNS], tl.float32)
    if PART.centred:
        squares = tl.zeros([rows.shape[0]], tl.float32)
        for column in range(0, D, COLUMNS):
            y = _rotated(unit, inverse, CENTER, MATRIX, column, PART)
            squares += tl.sum(_inside(y * y, column, PART), 1)
        norm = tl.where(whole, tl.sqrt_rn(squares) * D**-0.5, 0.0)
    else:
        norm = tl.sqrt_rn(tl.sum(x * x, 1))
    factor = tl.div_rn(norm * 0 + PART.spread, tl.where(norm == 0, 1.0, norm))
    # Index 0, the most negative level, marks rows that were not finite.
    lowest = tl.where(whole, 0.0, -1e30)
    squares = norm * 0
    for column in range(0, D, COLUMNS):
        if not PART.centred or D > COLUMNS:  # else y still holds all coordinates
            y = _rotated(unit, inverse, CENTER, MATRIX, column, PART)
        magnitude, sign, square = nearest_level(y * factor[:, None] + lowest[:, None], PART.bits)
        squares += tl.sum(_inside(square, column, PART), 1)
        store_turbo(WORDS, magnitude, sign, token, column, PART.bits, PART.group, D)
    scale = tl.div_rn(norm, tl.sqrt_rn(squares) * inverse)
    store_scale(SCALE, tl.minimum(scale, FP16_MAX).to(tl.float16), token)


@triton.jit
def _fold_int8(WORDS, SCALE, rows, token, PART: tl.constexpr):
    x, whole = finite_rows(rows.to(tl.float32))
    codes, scale = int8_codes(x)
    store_int8(WORDS, codes + 128, token, PART.group, PART.head_dim)
    store_scale(SCALE, tl.where(whole, scale, 0.0).to(tl.float16), token)


@triton.jit
def _fold_part(
    RAW, OUT, SCALE, CENTER, MATRIX, layer, source, target, raw_layer, out_layer, scale_layer, center_layer,
    PART: tl.constexpr,
):  # fmt: skip
    """One page of K or V; source and target count (page, KV head) rows of a layer."""
    D: tl.constexpr = PART.head_dim
    ROWS: tl.constexpr = PART.rows
    SIZE: tl.constexpr = PAGE_TOKENS * D
    RAW += layer * raw_layer + source * SIZE
    OUT += layer * out_layer
    SCALE += layer * scale_layer + target * PAGE_TOKENS
    MATRIX += layer * (PART.terms * D * D)
    CENTER += layer * center_layer + target * D
    largest = 0.0
    if PART.centred:
        largest = _fold_center(CENTER, RAW, MATRIX, PART)
        tl.debug_barrier()  # what one thread has written, others read
    d = tl.arange(0, PART.padded)
    for token in range(0, PAGE_TOKENS, ROWS):
        t = token + tl.arange(0, ROWS)
        at = t[:, None] * D + d[None, :]
        inside = (t >= 0)[:, None] & (d < D)[None, :]
        rows = tl.load(RAW + at, mask=inside, other=0.0)
        if PART.bits == 16:
            tl.store(OUT + target * SIZE + at, rows, mask=inside)
        else:
            words = OUT + target * (SIZE * PART.bits // 32)
            if PART.bits == 8:
                _fold_int8(words, SCALE, rows, token, PART)
            else:
                _fold_turbo(words, SCALE, CENTER, MATRIX, rows, token, largest, PART)


@triton.jit(do_not_specialize=["raw_stride", "stride"])  # tables grow, which must not compile it anew
def fold_kernel(
    RAW_K, RAW_V, K, V, K_SCALE, V_SCALE, K_CENTER, K_MATRIX, V_MATRIX, RAW_TABLE, TABLE, LENGTHS, FOLDED, FOLD_AT,
    raw_k_layer, raw_v_layer, k_layer, v_layer, k_scale_layer, v_scale_layer, k_center_layer, raw_stride, stride,
    HKV: tl.constexpr, K_PART: tl.constexpr, V_PART: tl.constexpr,
):  # fmt: skip
    """Grid (layers · Hkv, pages, sequences): the page-th oldest raw page of each sequence, if it is due."""
    page, seq = tl.program_id(1), tl.program_id(2)
    folded = tl.load(FOLDED + seq)
    if tl.load(LENGTHS + seq) - folded < tl.load(FOLD_AT + seq) + page * PAGE_TOKENS:
        return
    h = tl.program_id(0) % HKV
    layer = (tl.program_id(0) // HKV).to(tl.int64)
    source = tl.load(RAW_TABLE + seq * raw_stride + page).to(tl.int64) * HKV + h
    target = tl.load(TABLE + seq * stride + folded // PAGE_TOKENS + page).to(tl.int64) * HKV + h
    _fold_part(
        RAW_K, K, K_SCALE, K_CENTER, K_MATRIX, layer, source, target,
        raw_k_layer, k_layer, k_scale_layer, k_center_layer, K_PART,
    )  # fmt: skip
    _fold_part(
        RAW_V, V, V_SCALE, K_CENTER, V_MATRIX, layer, source, target,
        raw_v_layer, v_layer, v_scale_layer, k_center_layer, V_PART,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fold:
    """The fold of one model, ready to launch: [layers, terms, D, D] rotations where K or V is a turbo codec."""

    k: FoldPart
    v: FoldPart
    k_matrix: Tensor | None
    v_matrix: Tensor | None
    registers: int | None  # of a thread, at most

    @classmethod
    def create(cls, native: NativeLayout, layers: int, device: str) -> Fold:
        """``layers`` counts from the model's first: rotations depend on the layer."""
        dtype, layout = getattr(torch, native.dtype), native.layout
        k = rotation_matrices(layers, "k", layout.k_dim, dtype, device) if layout.k.codebook else None
        v = rotation_matrices(layers, "v", layout.v_dim, dtype, device) if layout.v.codebook else None
        # Centred rows of up to 128 coordinates are rotated once where registers hold them all. On an H200 three programs
        # on a multiprocessor are then faster than two, though at 168 registers a few of them spill.
        once = layout.k.centred and layout.k_dim <= 128 and dtype != torch.float32
        k_part = FoldPart.create(layout.k, "k", layout.k_dim, k, columns=128 if once else 64)
        v_part = FoldPart.create(layout.v, "v", layout.v_dim, v)
        roomy = gpu.capability(torch.device(device)) >= (9, 0)
        return cls(k_part, v_part, k, v, 168 if once and roomy else None)

    def __call__(
        self,
        raw: Mapping[str, Tensor],
        planes: Mapping[str, Tensor],
        raw_table: Tensor,
        table: Tensor,
        lengths: Tensor,
        folded: Tensor,
        fold_at: Tensor,
        *,
        pages: int = 1,
    ) -> None:
        """Fold what is due: of each sequence the oldest raw pages, while its raw tail has ``fold_at`` rows.

        raw "k", "v" [layers, raw pages, Hkv, 128, D]; planes as `NativeLayout` names them, [layers, pages, Hkv, ...];
        raw_table, table int32 [sequences, pages], the raw one counted from the oldest raw row; lengths (all rows),
        folded (of them, a multiple of 128, which the caller advances afterwards) and fold_at (recent + 128) int32
        [sequences]. At most ``pages`` pages a sequence: 1 serves decode, a prefilled chunk needs as many as it completes.
        """
        layers, _, heads, _, _ = raw["k"].shape
        absent = torch.empty(0, dtype=torch.float16, device=lengths.device)  # stands where a codec has no such plane
        k_scale, v_scale, k_center = (planes.get(name, absent) for name in ("k_scale", "v_scale", "k_center"))
        strides = (x.stride(0) for x in (raw["k"], raw["v"], planes["k"], planes["v"], k_scale, v_scale, k_center))
        fold_kernel[(layers * heads, pages, lengths.shape[0])](
            raw["k"],
            raw["v"],
            planes["k"],
            planes["v"],
            k_scale,
            v_scale,
            k_center,
            absent if self.k_matrix is None else self.k_matrix,
            absent if self.v_matrix is None else self.v_matrix,
            raw_table,
            table,
            lengths,
            folded,
            fold_at,
            *strides,
            raw_table.stride(0),
            table.stride(0),
            HKV=heads,
            K_PART=self.k,
            V_PART=self.v,
            num_warps=4,
            maxnreg=self.registers,
            num_stages=1,  # several loads of the matrix in flight would not fit in an sm_89's shared memory
        )
