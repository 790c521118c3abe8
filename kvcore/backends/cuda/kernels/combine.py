"""The splits of `decode.py` merged by log-sum-exp, and out of V's rotated basis where they are still in it."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore.backends.cuda.kernels.rotate import exact_product


@triton.jit
def combine_splits(
    PO, PM, PL, UNDO, OUT, splits,
    COLUMNS: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RAW_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr, RAW: tl.constexpr, TOGETHER: tl.constexpr, SLICE: tl.constexpr, TERMS: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the splits by log-sum-exp; OUT [rows, COLUMNS, D] in its own dtype. A sequence without rows gives zeros.

    Grid (rows · COLUMNS / TOGETHER, D / SLICE): a program writes SLICE dimensions of TOGETHER columns of a row. Where the
    folded splits are still in V's rotated basis (TERMS > 0: D is no power of two), they are summed first, and R_Vᵀ is
    applied to that sum once: a product on tensor cores with UNDO bf16 [TERMS, D, D] (`attend.VRotation`), the float32
    sum as three bf16 numbers.
    SPLITS and RAW are powers of two that hold all the splits and the raw ones.
    """
    groups: tl.constexpr = COLUMNS // TOGETHER
    row = tl.program_id(0) // groups
    column = tl.program_id(0) % groups * TOGETHER + tl.arange(0, TOGETHER)
    j = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    if TERMS == 1:
        matrix = _undo_term(UNDO, 0, j, D, DP)  # a constant: its latency passes while the splits still run
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (COLUMNS + NP - 1) // NP
    s = tl.arange(0, SPLITS)
    at = ((row * blocks + column // NP).to(tl.int64)[None, :] * splits + s[:, None]) * NP + (column % NP)[None, :]
    live = (s < splits)[:, None] & (column < COLUMNS)[None, :]
    d = tl.arange(0, DP) if TERMS > 0 else j
    first = RAW_SPLITS if TERMS > 0 else 0
    merged = live & (s >= first)[:, None]
    # All loads come first: the launch is short, and each wait for memory in a row would show.
    m = tl.load(PM + at, mask=live, other=-1e30)
    sums = tl.load(PL + at, mask=live, other=0.0)
    o = tl.load(PO + at[:, :, None] * D + d[None, None, :], mask=merged[:, :, None] & (d < D)[None, None, :], other=0.0)
    weight = tl.where(m > -1e30, tl.exp2(m - tl.max(m, 0)[None, :]), 0.0)
    total = tl.sum(weight * sums, 0)
    total = tl.where(total > 0, total, 1.0)
    out = tl.sum(o * weight[:, :, None], 0)
    if TERMS > 0:
        r = tl.arange(0, RAW)
        raw_at = ((row * blocks + column // NP).to(tl.int64)[None, :] * splits + r[:, None]) * NP + (column % NP)[
            None, :
        ]
        raw_live = (r < RAW_SPLITS)[:, None] & (column < COLUMNS)[None, :]
        raw_m = tl.load(PM + raw_at, mask=raw_live, other=-1e30)
        raw_o = tl.load(
            PO + raw_at[:, :, None] * D + j[None, None, :],
            mask=raw_live[:, :, None] & (j < D)[None, None, :],
            other=0.0,
        )
        raw_weight = tl.where(raw_m > -1e30, tl.exp2(raw_m - tl.max(m, 0)[None, :]), 0.0)
        raw = tl.sum(raw_o * raw_weight[:, :, None], 0)
        # Tensor cores take 16 rows: the columns, repeated.
        repeats: tl.constexpr = 16 // TOGETHER
        x = tl.reshape(tl.broadcast_to(out[None, :, :], [repeats, TOGETHER, DP]), [16, DP])
        y = tl.zeros([16, SLICE], tl.float32)
        for term in tl.static_range(TERMS):
            if TERMS > 1:
                matrix = _undo_term(UNDO, term, j, D, DP)
            y = exact_product(x, matrix, y)
        out = tl.sum(tl.reshape(y, [repeats, TOGETHER, SLICE]), 0) * (NORM / repeats) + raw
    out = out / total[:, None]
    to = OUT + (row * COLUMNS + column).to(tl.int64)[:, None] * D + j[None, :]
    tl.store(to, out.to(OUT.dtype.element_ty), mask=(column < COLUMNS)[:, None] & (j < D)[None, :])


@triton.jit
def _undo_term(UNDO, term, j, D: tl.constexpr, DP: tl.constexpr):
    i = tl.arange(0, DP)
    return tl.load(UNDO + (term * D + i[:, None]) * D + j[None, :], mask=(i < D)[:, None] & (j < D)[None, :], other=0.0)
