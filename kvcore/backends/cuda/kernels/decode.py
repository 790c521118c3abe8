"""Attention of a few query rows over pages: one launch over splits, one to combine them.

Split programs of a (sequence, KV head) come in two kinds. The first RAW_SPLITS share the raw rows: sinks, then the raw
tail (the whole cache in fp16 mode). The others share the folded pages. All query heads of the KV head, times the query
rows, are the columns of one tile. Lengths are read on the device, so one grid and one CUDA graph serve every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore.backends.cuda.kernels.gl import INTERPRET, gl, jit, loop_bound, mma
from kvcore.backends.cuda.kernels.tiles import (
    PAGE,
    k_dimension,
    k_operand,
    load_k,
    load_scale,
    load_signs,
    load_v,
    p_operand,
    padded,
    scale_rows,
    v_dimension,
    v_operand,
    v_tile,
)

LOWEST = tl.constexpr(-1e30)
# What pages unpack to; the interpreter keeps float32, so that its results can be compared closely.
UNPACKED = tl.constexpr(tl.float32 if INTERPRET.value else tl.float16)
SMALLEST_SCALE = tl.constexpr(2.0**-24)  # the smallest fp16 number


@jit
def _load_q(
    Q,
    row,
    columns,
    col0,
    OPERAND: tl.constexpr,
    CODEC: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    NP: tl.constexpr,
):
    """Columns col0 .. col0 + NP of Q [rows, columns, D] as second operand [W, DP, NP], d in K's order."""
    DP: gl.constexpr = padded(D)
    k = gl.arange(0, DP, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))
    n = gl.arange(0, NP, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND))) + col0
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))
    d = k_dimension(k, CODEC, D)
    at = Q + (row * columns * D + w * 0)[:, None, None] + (d[None, :, None] + n[None, None, :] * D)
    return gl.load(at, mask=(w >= 0)[:, None, None] & (d < D)[None, :, None] & (n < columns)[None, None, :], other=0.0)


@jit
def _tile_address(
    i,
    RAW: tl.constexpr,
    TABLE,
    SINK,
    h,
    seq,
    sinks,
    tail,
    HKV: tl.constexpr,
    STRIDE,
    W: tl.constexpr,
    T: tl.constexpr,
    LANE: tl.constexpr,
):
    """Where the warps' tiles of step i are: plane row (page, head), first token within the page, valid rows, and the
    position of the first token within its part. A raw part has the sinks as its first tile."""
    tile = i * W + gl.arange(0, W, LANE)
    if RAW:
        first = gl.maximum(tile - 1, 0) * T
        sink = tile == 0
        rows = gl.where(sink, sinks, tail - first)
        page = gl.load(TABLE + seq * STRIDE + first // PAGE, mask=(rows > 0) & (tile > 0), other=0)
        page = gl.where(sink, gl.load(SINK + seq), page)
        first = gl.where(sink, 0, first)
    else:
        first = tile * T
        rows = tail - first
        page = gl.load(TABLE + seq * STRIDE + first // PAGE, mask=rows > 0, other=0)
    return page.to(gl.int64) * HKV + h, first % PAGE, gl.minimum(rows, T), first


@jit
def _load_tile(
    K,
    V,
    KS,
    VS,
    page,
    token,
    rows,
    KC: tl.constexpr,
    VC: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    MT: tl.constexpr,
):
    """Everything of one tile: K, V, turbo3 signs, K scale, V scale (what a codec lacks repeats ``page``)."""
    k = load_k(K, page * PAGE + token, rows, KC, D, W, MT)
    row = page * PAGE + token
    start = row if VC == "raw" else (row // 16) * v_tile(VC, D)
    v = load_v(V, start, rows, VC, D, W, MT)
    signs = load_signs(V, start, D, W, MT) if VC == "turbo3" else page
    ks = load_scale(KS, page, token // (16 * MT), W, MT) if KC != "raw" else page
    vs = load_scale(VS, page, token // (16 * MT), W, MT) if VC != "raw" else page
    return k, v, signs, ks, vs


@jit
def _power_of_two_below(x):
    """1 / 2^floor(log2 x) for float32 x > 0, exactly."""
    return ((254 << 23) - (x.to(gl.int32, bitcast=True) & 0x7F800000)).to(gl.float32, bitcast=True)


@jit
def _stream(
    Q, K, V, KS, VS, TABLE, SINK, PO, PM, PL,
    row, slot, seq, h, col0, columns, begin, end, sinks, tail, offset, length, scale, STRIDE, window,
    k_table, v_table,
    RAW: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, D: tl.constexpr, HKV: tl.constexpr,
    GROUP: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, CAUSAL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Online softmax (arXiv 2205.14135) of one program over steps begin .. end of its part; writes a partial result."""
    T: gl.constexpr = 16 * MT
    DP: gl.constexpr = padded(D)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(2, acc_layout)
    cols_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    warp_rows: gl.constexpr = gl.SliceLayout(1, rows_layout)
    q = _load_q(Q, row, columns, col0, b_layout, KC, D, W, NP)
    m = gl.full([W, NP], LOWEST, gl.float32, cols_layout)
    l = gl.zeros([W, T, NP], gl.float32, acc_layout)
    acc = gl.zeros([W, DP, NP], gl.float32, acc_layout)
    unit = gl.full([W], 1.0, gl.float32, warp_rows)
    t = gl.arange(0, T, gl.SliceLayout(0, rows_layout))
    col = gl.arange(0, NP, gl.SliceLayout(0, cols_layout)) + col0
    position = length - columns // GROUP + col // GROUP
    page, token, rows, first = _tile_address(begin, RAW, TABLE, SINK, h, seq, sinks, tail, HKV, STRIDE, W, T, warp_rows)
    k, v, signs, ks, vs = _load_tile(K, V, KS, VS, page, token, rows, KC, VC, D, W, MT)
    for i in range(loop_bound(begin), loop_bound(end)):
        k_now, v_now, signs_now, ks_now, vs_now, rows_now, first_now = k, v, signs, ks, vs, rows, first
        following = gl.minimum(i + 1, end - 1)
        page, token, rows, first = _tile_address(
            following, RAW, TABLE, SINK, h, seq, sinks, tail, HKV, STRIDE, W, T, warp_rows
        )
        k, v, signs, ks, vs = _load_tile(K, V, KS, VS, page, token, rows, KC, VC, D, W, MT)

        s = mma(
            k_operand(k_now, k_table, a_layout, KC, D, W, MT, HARDWARE), q, gl.zeros([W, T, NP], gl.float32, acc_layout)
        )
        if KC == "raw":
            s = s * scale
        else:
            s = s * (scale_rows(ks_now, rows_layout, W, MT) * scale)[:, :, None]
        valid = t[None, :] < rows_now[:, None]
        if not RAW:
            valid = valid & (first_now[:, None] + t[None, :] >= sinks)
        if CAUSAL:
            at = first_now[:, None] + t[None, :]
            if RAW:
                # The tail begins behind the folded pages; the sink tile (the first of the part) begins at 0.
                is_sink = (i * W + gl.arange(0, W, warp_rows)) == 0
                at = at + gl.where(is_sink, 0, offset)[:, None]
            seen = (at[:, :, None] <= position[None, None, :]) & (at[:, :, None] > position[None, None, :] - window)
            s = gl.where(valid[:, :, None] & seen, s, LOWEST)
        else:
            s = gl.where(valid[:, :, None], s, LOWEST)
        peak = gl.maximum(m, gl.max(s, 1))
        shrink = gl.exp2(m - peak)
        p = gl.exp2(s - peak[:, None, :])
        if CAUSAL:
            p = gl.where(s > LOWEST, p, 0.0)
        m = peak
        l = l * shrink[:, None, :] + p
        if VC != "raw":
            # Probabilities times V scales stay in fp16's range: the accumulator's unit follows the tile's largest scale.
            scales = scale_rows(vs_now, rows_layout, W, MT)
            new_unit = _power_of_two_below(gl.maximum(gl.max(scales, 1), SMALLEST_SCALE))
            p = p * (scales * new_unit[:, None])[:, :, None]
            ratio = gl.convert_layout(new_unit / unit, gl.SliceLayout(1, cols_layout), assert_trivial=True)
            shrink = shrink * ratio[:, None]
            unit = new_unit
        acc = acc * shrink[:, None, :]
        probabilities = p_operand(p.to(v_now.dtype if VC == "raw" else UNPACKED), b_layout, W, MT, NP)
        acc = mma(v_operand(v_now, signs_now, v_table, a_layout, VC, D, W, MT, HARDWARE), probabilities, acc)

    top = gl.max(m, 0)
    weight = gl.exp2(m - top[None, :])
    total = gl.sum(gl.sum(l, 1) * weight, 0)
    out = gl.sum(acc * (1.0 / unit)[:, None, None] * weight[:, None, :], 0)
    out_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    d = v_dimension(gl.arange(0, DP, gl.SliceLayout(1, out_layout)), VC)
    n = gl.arange(0, NP, gl.SliceLayout(0, out_layout))
    gl.store(PO + ((slot * NP + n) * D)[None, :] + d[:, None], out, mask=(d < D)[:, None] & (n >= 0)[None, :])
    nc = gl.arange(0, NP, gl.SliceLayout(0, cols_layout))
    gl.store(PM + slot * NP + nc, top)
    gl.store(PL + slot * NP + nc, total)


@jit
def attend_splits(
    Q, Q_RAW, K, V, KS, VS, RAW_K, RAW_V, TABLE, RAW_TABLE, SINK, SINKS, FOLDED, LENGTH, PO, PM, PL,
    scale, STRIDE, RAW_STRIDE, window, k_table, v_table,
    KC: tl.constexpr, VC: tl.constexpr, D: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RAW_MT: tl.constexpr,
    RAW_SPLITS: tl.constexpr, CAUSAL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Partial results of every split.

    Grid (sequences · HKV · column blocks, splits). Q [rows, COLUMNS, D] rotated for turbo K (Q_RAW: not rotated), a row
    a (sequence, KV head), a column (query row, head of the group). Pages as in docs/cuda.md; TABLE, RAW_TABLE int32
    [sequences, *STRIDE] of page numbers; SINK int32 the raw page of the sinks; SINKS, FOLDED, LENGTH int32 per sequence:
    raw sinks, folded rows, all rows. PO float32 [row · block, splits, NP, D], PM, PL [row · block, splits, NP].
    ``scale`` is the softmax scale times log2(e).
    """
    BLOCKS: gl.constexpr = (COLUMNS + NP - 1) // NP
    row = gl.program_id(0) // BLOCKS
    col0 = (gl.program_id(0) % BLOCKS) * NP
    seq = row // HKV
    h = row % HKV
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    slot = gl.program_id(0).to(gl.int64) * splits + split
    sinks, folded, length = gl.load(SINKS + seq), gl.load(FOLDED + seq), gl.load(LENGTH + seq)
    if split < RAW_SPLITS:
        steps = (length - folded + W * 16 * RAW_MT - 1) // (W * 16 * RAW_MT) + 1
        if W > 1:
            steps = ((length - folded + 16 * RAW_MT - 1) // (16 * RAW_MT) + W) // W
        begin, end = steps * split // RAW_SPLITS, steps * (split + 1) // RAW_SPLITS
        _stream(
            Q_RAW, RAW_K, RAW_V, KS, VS, RAW_TABLE, SINK, PO, PM, PL,
            row, slot, seq, h, col0, COLUMNS, begin, end, sinks, length - folded, folded, length, scale, RAW_STRIDE, window,
            k_table, v_table,
            True, "raw", "raw", D, HKV, GROUP, NP, W, RAW_MT, CAUSAL, HARDWARE,
        )  # fmt: skip
    else:
        steps = (folded + W * 16 * MT - 1) // (W * 16 * MT)
        begin = steps * (split - RAW_SPLITS) // (splits - RAW_SPLITS)
        end = steps * (split - RAW_SPLITS + 1) // (splits - RAW_SPLITS)
        _stream(
            Q, K, V, KS, VS, TABLE, SINK, PO, PM, PL,
            row, slot, seq, h, col0, COLUMNS, begin, end, sinks, folded, folded, length, scale, STRIDE, window,
            k_table, v_table,
            False, KC, VC, D, HKV, GROUP, NP, W, MT, CAUSAL, HARDWARE,
        )  # fmt: skip


@triton.jit
def combine_splits(
    PO, PM, PL, OUTER, INNER, SIGNS, OUT,
    splits: tl.constexpr, COLUMNS: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    RAW_SPLITS: tl.constexpr, ROTATED: tl.constexpr, DO: tl.constexpr, DI: tl.constexpr, DIP: tl.constexpr,
    SB: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (sequence, KV head, column) by log-sum-exp; OUT [rows, COLUMNS, D] in its own dtype.

    Folded splits are summed in V's rotated basis first, and R_Vᵀ is applied to that sum once. R_V = (OUTER ⊗ INNER)·diag(SIGNS)
    with OUTER [DO, DO] and INNER [DI, DI] float32, so the product is two small ones. A sequence without rows gives zeros.
    """
    row, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    blocks: tl.constexpr = (COLUMNS + NP - 1) // NP
    base = (row * blocks + column // NP).to(tl.int64) * splits
    n = column % NP
    d = tl.arange(0, DP)
    # Rotated vectors stand as [DO, DIP], so that they can be multiplied from both sides.
    place = d // DIP * DI + d % DIP if ROTATED else d
    stored = (d % DIP < DI) & (d // DIP < DO) if ROTATED else d < D
    s = tl.arange(0, SB)
    live = s < splits
    # All loads come first: the launch is short, and each wait for memory in a row would show.
    o = tl.load(
        PO + ((base + s) * NP + n)[:, None] * D + place[None, :], mask=live[:, None] & stored[None, :], other=0.0
    )
    m = tl.load(PM + (base + s) * NP + n, mask=live, other=-1e30)
    sums = tl.load(PL + (base + s) * NP + n, mask=live, other=0.0)
    if ROTATED:
        a, b = tl.arange(0, DO), tl.arange(0, DIP)
        inner = tl.load(INNER + b[:, None] * DI + b[None, :], mask=(b[:, None] < DI) & (b[None, :] < DI), other=0.0)
        outer = tl.load(OUTER + a[:, None] * DO + a[None, :])
        signs = tl.load(SIGNS + place, mask=stored, other=0.0)
    weight = tl.where(m > -1e30, tl.exp2(m - tl.max(m, 0)), 0.0)
    total = tl.sum(weight * sums, 0)
    if ROTATED:
        raw = tl.sum(o * tl.where(s < RAW_SPLITS, weight, 0.0)[:, None], 0)
        x = tl.reshape(tl.sum(o * tl.where(s < RAW_SPLITS, 0.0, weight)[:, None], 0), [DO, DIP])
        x = tl.sum(x[:, :, None] * inner[None, :, :], 1)
        x = tl.sum(outer[:, :, None] * x[:, None, :], 0)
        out = tl.reshape(x, [DP]) * signs + raw
    else:
        out = tl.sum(o * weight[:, None], 0)
    out = out / tl.where(total > 0, total, 1.0)
    at = OUT + (row * COLUMNS + column).to(tl.int64) * D + place
    tl.store(at, out.to(OUT.dtype.element_ty), mask=stored)
