"""The results of `decode.py` merged by log-sum-exp, and out of V's rotated basis where they are still in it."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore.backends.cuda.kernels.rotate import exact_product


@triton.jit
def combine_splits(
    PO, PM, PL, UNDO, OUT, results,
    COLUMNS: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, APART: tl.constexpr,
    RESULTS: tl.constexpr, TOGETHER: tl.constexpr, SLICE: tl.constexpr, TERMS: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the results of a row by log-sum-exp; OUT [rows, COLUMNS, D] in its own dtype. A sequence without rows gives zeros.

    Grid (rows · COLUMNS / TOGETHER, D / SLICE): a program writes SLICE dimensions of TOGETHER columns of a row. Where sums
    of folded rows are still in V's rotated basis (TERMS > 0: D is no power of two), they are summed first, and R_Vᵀ is
    applied to that sum once: a product on tensor cores with UNDO bf16 [TERMS, D, D] (`attend.VRotation`), the float32
    sum as three bf16 numbers. The normalizers of the others are negative then.
    The first APART are loaded by themselves, so that RESULTS, a power of two, holds the rest; 0 or a power of two.
    """
    groups: tl.constexpr = COLUMNS // TOGETHER
    row = tl.program_id(0) // groups
    column = tl.program_id(0) % groups * TOGETHER + tl.arange(0, TOGETHER)
    j = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    if TERMS == 1:
        matrix = _undo_term(UNDO, 0, j, D, DP)  # a constant: its latency passes while programs still run
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (COLUMNS + NP - 1) // NP
    at = ((row * blocks + column // NP).to(tl.int64) * results * NP + column % NP)[None, :]
    live = column < COLUMNS
    s = APART + tl.arange(0, RESULTS)
    # All loads stand first: the launch is short, and each wait for memory in a row shows. As compiled, it still waits for
    # the maxima before it asks for the rest (docs/performance.md, "Next").
    m, l, o, rotated = _load_results(PO, PM, PL, at, s, results, live, j, NP, D, DP, TERMS > 0)
    top = tl.max(m, 0)
    if APART > 0:
        s = tl.arange(0, APART)
        m1, l1, o1, rotated1 = _load_results(PO, PM, PL, at, s, APART, live, j, NP, D, DP, TERMS > 0)
        top = tl.maximum(top, tl.max(m1, 0))
    total, out, x = _weighted(m, l, o, rotated, top, TERMS > 0)
    if APART > 0:
        total1, out1, x1 = _weighted(m1, l1, o1, rotated1, top, TERMS > 0)
        total, out, x = total + total1, out + out1, x + x1
    if TERMS > 0:
        # Tensor cores take 16 rows: the columns, repeated.
        repeats: tl.constexpr = 16 // TOGETHER
        x = tl.reshape(tl.broadcast_to(x[None, :, :], [repeats, TOGETHER, DP]), [16, DP])
        y = tl.zeros([16, SLICE], tl.float32)
        for term in tl.static_range(TERMS):
            if TERMS > 1:
                matrix = _undo_term(UNDO, term, j, D, DP)
            y = exact_product(x, matrix, y)
        out += tl.sum(tl.reshape(y, [repeats, TOGETHER, SLICE]), 0) * (NORM / repeats)
    out = out / tl.where(total == 0, 1.0, total)[:, None]  # NaN stays
    to = OUT + (row * COLUMNS + column).to(tl.int64)[:, None] * D + j[None, :]
    tl.store(to, out.to(OUT.dtype.element_ty), mask=live[:, None] & (j < D)[None, :])


@triton.jit
def _load_results(
    PO, PM, PL, at, s, end, column_live, j, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROTATED: tl.constexpr
):
    """Results s < end: maxima and normalizers [s, columns], sums [s, columns, dimensions j]; with ROTATED the sums of all
    dimensions as well."""
    at += s[:, None] * NP
    live = (s < end)[:, None] & column_live[None, :]
    m = tl.load(PM + at, mask=live, other=-1e30)
    l = tl.load(PL + at, mask=live, other=0.0)
    o = tl.load(PO + at[:, :, None] * D + j[None, None, :], mask=live[:, :, None] & (j < D)[None, None, :], other=0.0)
    rotated = o
    if ROTATED:
        d = tl.arange(0, DP)[None, None, :]
        rotated = tl.load(PO + at[:, :, None] * D + d, mask=live[:, :, None] & (d < D), other=0.0)
    return m, l, o, rotated


@triton.jit
def _weighted(m, l, o, rotated, top, ROTATED: tl.constexpr):
    """Normalizer, sum and rotated sum of some results at the maxima ``top``. The sum of no rows may be anything."""
    weight = tl.where(m > -1e30, tl.exp2(m - top[None, :]), 0.0)
    total = tl.sum(weight * tl.abs(l), 0)
    plain = l < 0 if ROTATED else l > 0
    out = tl.sum(tl.where(plain[:, :, None], o, 0.0) * weight[:, :, None], 0)
    x = out
    if ROTATED:
        x = tl.sum(tl.where((l > 0)[:, :, None], rotated, 0.0) * weight[:, :, None], 0)
    return total, out, x


@triton.jit
def _undo_term(UNDO, term, j, D: tl.constexpr, DP: tl.constexpr):
    i = tl.arange(0, DP)
    return tl.load(UNDO + (term * D + i[:, None]) * D + j[None, :], mask=(i < D)[:, None] & (j < D)[None, :], other=0.0)
