"""Append: rotary embedding, raw rows into their pages, and the queries that attention reads, in one launch per layer.

Where rows go is read from lengths and block tables on the device, and the grid depends on the number of new tokens
alone, so that one CUDA graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.backends.cuda.gpu import overlap_options
from kvcore.backends.cuda.kernels.rotate import exact_product, rotate, rotation_part
from kvcore.backends.cuda.native import PAGE

PAGE_TOKENS = tl.constexpr(PAGE)
TURN = tl.constexpr(6.283185307179586)


@triton.jit
def angles_kernel(INV_FREQ, POSITIONS, COS, SIN, n, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Grid (sequences · n). Angles in float64, where long contexts keep their phase; see `rope_angles`."""
    token = tl.program_id(0)
    position = tl.load(POSITIONS + token // n) - n + token % n
    d = tl.arange(0, PADDED)
    angle = position.to(tl.float64) * tl.load(INV_FREQ + d, mask=d < HALF, other=0.0)
    turns = angle / TURN
    rest = ((turns - tl.floor(turns)) * TURN).to(tl.float32)
    at = token.to(tl.int64) * HALF + d
    tl.store(COS + at, tl.cos(rest), mask=d < HALF)
    tl.store(SIN + at, tl.sin(rest), mask=d < HALF)


@triton.jit
def _load_angles(COS, SIN, angle, valid, D: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin [rows, D/2] of some rows."""
    d = tl.arange(0, PADDED)
    at = angle[:, None] * (D // 2) + d[None, :]
    inside = valid[:, None] & (d < D // 2)[None, :]
    if ROPE:
        cos = tl.load(COS + at, mask=inside, other=0.0)
        sin = tl.load(SIN + at, mask=inside, other=0.0)
    else:
        cos, sin = at, at
    return cos, sin


@triton.jit
def _load_turned(X, at, cos, sin, valid, D: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr):
    """Both halves of the rows at ``at`` after RoPE (halves paired as Hugging Face does), in their own dtype."""
    half: tl.constexpr = D // 2
    d, side = tl.arange(0, PADDED), tl.arange(0, 2)
    inside = valid[:, None, None] & (d < half)[None, None, :] & (side >= 0)[None, :, None]
    both = tl.load(X + at[:, None, None] + side[None, :, None] * half + d[None, None, :], mask=inside, other=0.0)
    first, second = tl.split(tl.permute(both, [0, 2, 1]))
    if ROPE:
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = (x * cos - y * sin).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    return first, second


@triton.jit
def _store_halves(OUT, at, first, second, valid, D: tl.constexpr):
    d = tl.arange(0, first.shape[1])
    inside = valid[:, None] & (d < D // 2)[None, :]
    tl.store(OUT + at[:, None] + d[None, :], first, mask=inside)
    tl.store(OUT + at[:, None] + D // 2 + d[None, :], second, mask=inside)


@triton.jit
def _queries(
    Q, COS, SIN, MATRIX, Q_OUT, Q_PAGES, seq, h, block, column, n, q_seq, q_token, q_head,
    GROUP: tl.constexpr, SHAPE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows (token, head of the group) of one KV head's queries; of their rotation the columns from ``column`` on, or
    all where one program does them."""
    D: tl.constexpr = SHAPE.head_dim
    if SHAPE.terms == 1 and SHAPE.parts > 1:  # constants: they are loaded while the kernel before still runs
        low = rotation_part(MATRIX, column, 0, SHAPE.half, D // 2, D, 0, COLUMNS=SHAPE.columns)
        high = rotation_part(MATRIX, column, D // 2, SHAPE.half, D, D, 0, COLUMNS=SHAPE.columns)
    HALF: tl.constexpr = SHAPE.half
    COLUMNS: tl.constexpr = SHAPE.columns
    ROWS: tl.constexpr = SHAPE.q_rows
    r = block * ROWS + tl.arange(0, ROWS)
    valid = r < n * GROUP
    token = (r // GROUP).to(tl.int64)
    at = seq * q_seq + token * q_token + (h * GROUP + r % GROUP) * q_head
    cos, sin = _load_angles(COS, SIN, seq * n + token, valid, D, HALF, SHAPE.rope)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, second = _load_turned(Q, at, cos, sin, valid, D, HALF, SHAPE.rope)
    out = ((seq * tl.num_programs(1) + h) * n * GROUP + r) * D
    _store_halves(Q_OUT, out, first, second, valid & (column == 0), D)
    if SHAPE.terms > 0:
        for more in range(0, COLUMNS if SHAPE.parts > 1 else D, COLUMNS):
            y = tl.zeros([ROWS, COLUMNS], tl.float32)
            if SHAPE.terms == 1 and SHAPE.parts > 1:
                y = exact_product(second, high, exact_product(first, low, y))
            else:
                y = rotate(first, y, MATRIX, column + more, 0, D // 2, D, SHAPE.terms)
                y = rotate(second, y, MATRIX, column + more, D // 2, D, D, SHAPE.terms)
            d = column + more + tl.arange(0, COLUMNS)
            y = (y * SHAPE.norm).to(Q_PAGES.dtype.element_ty)
            tl.store(Q_PAGES + out[:, None] + d[None, :], y, mask=valid[:, None] & (d < D)[None, :])
    elif SHAPE.q_pages:
        dtype = Q_PAGES.dtype.element_ty
        _store_halves(Q_PAGES, out, first.to(dtype), second.to(dtype), valid, D)


@triton.jit
def _rows(
    K, V, COS, SIN, RAW_K, RAW_V, K_OUT, RAW_TABLE, LENGTHS, FOLDED, seq, h, block, n,
    k_seq, k_token, k_head, v_seq, v_token, v_head, raw_stride, SHAPE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some tokens' rows of one KV head into its raw pages."""
    D: tl.constexpr = SHAPE.head_dim
    VD: tl.constexpr = SHAPE.v_dim
    V_PADDED: tl.constexpr = SHAPE.v_padded
    ROWS: tl.constexpr = SHAPE.kv_rows
    i = block * ROWS + tl.arange(0, ROWS)
    row = tl.load(LENGTHS + seq) - tl.load(FOLDED + seq) - n + i
    valid = (i < n) & (row >= 0)  # an idle sequence has length 0
    page = tl.load(RAW_TABLE + seq * raw_stride + row // PAGE_TOKENS, mask=valid, other=0).to(tl.int64)
    slot = (page * tl.num_programs(1) + h) * PAGE_TOKENS + row % PAGE_TOKENS
    token = i.to(tl.int64)
    cos, sin = _load_angles(COS, SIN, seq * n + token, i < n, D, SHAPE.half, SHAPE.rope)
    if OVERLAP:  # all but q, k and v is older than the kernel before
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    d = tl.arange(0, V_PADDED)
    inside = valid[:, None] & (d < VD)[None, :]
    at = seq * v_seq + token * v_token + h * v_head
    v = tl.load(V + at[:, None] + d[None, :], mask=inside, other=0.0)
    tl.store(RAW_V + slot[:, None] * VD + d[None, :], v, mask=inside)

    at = seq * k_seq + token * k_token + h * k_head
    first, second = _load_turned(K, at, cos, sin, i < n, D, SHAPE.half, SHAPE.rope)
    _store_halves(RAW_K, slot * D, first, second, valid, D)
    if SHAPE.k_out:
        dense = ((seq * tl.num_programs(1) + h) * n + token) * D
        _store_halves(K_OUT, dense, first, second, i < n, D)


@triton.jit(do_not_specialize=["raw_stride"])  # tables grow, which must not compile it anew
def append_kernel(
    Q, K, V, COS, SIN, MATRIX, RAW_K, RAW_V, Q_OUT, Q_PAGES, K_OUT, RAW_TABLE, LENGTHS, FOLDED,
    n, q_seq, q_token, q_head, k_seq, k_token, k_head, v_seq, v_token, v_head, raw_stride,
    GROUP: tl.constexpr, SHAPE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of query rows times blocks of rotated columns, then blocks of tokens; Hkv; sequences)."""
    h, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    block = tl.program_id(0)
    parts: tl.constexpr = SHAPE.parts
    q_blocks = (n * GROUP + SHAPE.q_rows - 1) // SHAPE.q_rows * parts
    if block < q_blocks:
        column = block % parts * SHAPE.columns
        _queries(
            Q, COS, SIN, MATRIX, Q_OUT, Q_PAGES, seq, h, block // parts, column, n, q_seq, q_token, q_head,
            GROUP, SHAPE, OVERLAP,
        )  # fmt: skip
    else:
        _rows(
            K, V, COS, SIN, RAW_K, RAW_V, K_OUT, RAW_TABLE, LENGTHS, FOLDED, seq, h, block - q_blocks, n,
            k_seq, k_token, k_head, v_seq, v_token, v_head, raw_stride, SHAPE, OVERLAP,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AppendShape:
    """What `append_kernel` is compiled for. ``terms`` of the rotation of K, 0 where folded K is not rotated; its columns
    are shared by ``parts`` programs, ``columns`` at a time."""

    head_dim: int
    half: int
    v_dim: int
    v_padded: int
    q_rows: int
    kv_rows: int
    columns: int
    parts: int
    terms: int
    norm: float
    rope: bool
    q_pages: bool
    k_out: bool


def rope_angles(inv_freq: Tensor, positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [B, n, D/2] of the newest n positions of each sequence, once per step for all layers.

    inv_freq float64 [D/2]; positions int32 [B]: that of the next token, the new ones counted.
    """
    half = inv_freq.shape[0]
    cos, sin = (torch.empty(positions.shape[0], n, half, device=positions.device) for _ in range(2))
    grid = (positions.shape[0] * n,)
    angles_kernel[grid](inv_freq, positions, cos, sin, n, HALF=half, PADDED=triton.next_power_of_2(half), num_warps=1)
    return cos, sin


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    raw_k: Tensor,
    raw_v: Tensor,
    raw_table: Tensor,
    lengths: Tensor,
    folded: Tensor,
    q_out: Tensor,
    *,
    q_pages: Tensor | None = None,
    k_matrix: Tensor | None = None,
    k_out: Tensor | None = None,
) -> None:
    """Write n new rows of every sequence into one layer's raw pages, and its queries for attention.

    q [B, n, Hq, D], k [B, n, Hkv, D], v [B, n, Hkv, Dv]: the projections, any strides but a dense last axis.
    angles: `rope_angles`, None for q and k that are turned already. raw_k, raw_v [raw pages, Hkv, 128, D]; raw_table
    int32 [B, pages], counted from the oldest raw row; lengths (rows with the new ones) and folded int32 [B]. A
    sequence of length 0 is idle: nothing is written for it.
    q_out [B, Hkv, n, Hq/Hkv, D] gets q after RoPE; q_pages, float16 of that shape, what meets quantized K: R_K q where
    ``k_matrix`` [terms, D, D] is given (one layer of `rotation_matrices`), else q. k_out [B, Hkv, n, D] gets k after
    RoPE, for attention among the new rows.
    """
    batch, n, q_heads, dim = q.shape
    heads, v_dim = k.shape[2], v.shape[3]
    group = q_heads // heads
    padded = triton.next_power_of_2(dim)
    limit = max(16, 4096 // padded)
    few = n * group <= 16  # which take many small programs
    columns = min(32 if few else 64, padded)
    shape = AppendShape(
        head_dim=dim,
        half=max(16, padded // 2),  # tensor cores take 16 coordinates or more
        v_dim=v_dim,
        v_padded=triton.next_power_of_2(v_dim),
        q_rows=min(limit, max(16, triton.next_power_of_2(n * group))),
        kv_rows=min(limit, triton.next_power_of_2(n)),
        columns=columns,
        parts=triton.cdiv(dim, columns) if few and k_matrix is not None else 1,
        terms=0 if k_matrix is None else k_matrix.shape[0],
        norm=dim**-0.5,
        rope=angles is not None,
        q_pages=q_pages is not None,
        k_out=k_out is not None,
    )
    cos, sin = (q, q) if angles is None else angles
    blocks = triton.cdiv(n * group, shape.q_rows) * shape.parts + triton.cdiv(n, shape.kv_rows)
    append_kernel[(blocks, heads, batch)](
        q,
        k,
        v,
        cos,
        sin,
        q if k_matrix is None else k_matrix,
        raw_k,
        raw_v,
        q_out,
        q_out if q_pages is None else q_pages,
        q if k_out is None else k_out,
        raw_table,
        lengths,
        folded,
        n,
        *(stride for x in (q, k, v) for stride in x.stride()[:3]),
        raw_table.stride(0),
        GROUP=group,
        SHAPE=shape,
        num_warps=4,
        num_stages=1,
        **overlap_options(q.device),
    )
