"""Attention of a few query rows over pages: one launch of many programs; `combine.py` has the one that merges results.

The programs of a (sequence, KV head) divide two kinds of rows among them: raw ones, sinks first, then the raw tail (the
whole cache in fp16 mode), and folded pages. All query heads of the KV head, times the query rows, are the columns of one
tile. Lengths are read on the device, so one grid and one CUDA graph serve every length.
"""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.fragments import hold, log2_approximate, spread_row
from kvcore.backends.cuda.kernels.gl import (
    INTERPRET,
    commit,
    gl,
    jit,
    let_next_start,
    loop_bound,
    mma,
    wait,
    wait_for_previous,
)
from kvcore.backends.cuda.kernels.hadamard import undo_rotation
from kvcore.backends.cuda.kernels.tiles import (
    PAGE,
    center_layout,
    center_operand,
    k_dimension,
    k_layout,
    k_operand,
    k_shared,
    load_centers,
    load_k,
    load_scale,
    load_signs,
    load_v,
    log2,
    p_operand,
    padded,
    scale_layout,
    scale_rows,
    v_dimension,
    v_layout,
    v_operand,
    v_shape,
    v_tile,
    values_per_element,
)

LOWEST = tl.constexpr(-1e30)
NEWEST = tl.constexpr(16)  # rows that a launch appends at most before attention
# What pages unpack to; the interpreter keeps float32, so that its results can be compared closely.
UNPACKED = tl.constexpr(tl.float32 if INTERPRET.value else tl.float16)
SMALLEST_SCALE = tl.constexpr(2.0**-60)  # in the place of 0; such rows round to nothing beside any other


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
def _entry(at, seq, slots, STRIDE):
    """The table entry of slot ``at``; tiles beyond the end read the last page, which is written."""
    return seq * STRIDE + gl.minimum(at, gl.maximum(slots - 1, 0)) // PAGE


@jit
def _first_slot(i, RAW: tl.constexpr, W: tl.constexpr, T: tl.constexpr, CENTRED: tl.constexpr, LANE: tl.constexpr):
    """Of each warp's tile of step i, within the part; -1 for the tile of the sinks, the first of a raw part.

    Warps take turns, tile by tile. Where pages have centres, a warp keeps to its page: it needs each centre once.
    """
    TURNS: gl.constexpr = PAGE // T
    tile = gl.arange(0, W, LANE)
    if CENTRED and W > 1:
        step = tile * 0 + i
        tile = (step // TURNS * W + tile) * TURNS + step % TURNS
    else:
        tile += i * W
    return gl.where(tile == 0, -1, (tile - 1) * T) if RAW else tile * T


@jit
def _page(at, TABLE, SINK, seq, slots, STRIDE, RAW: tl.constexpr):
    """The page that holds slot ``at``."""
    page = gl.load(TABLE + _entry(at, seq, slots, STRIDE))
    return gl.where(at < 0, gl.load(SINK + seq), page) if RAW else page


@jit
def _live(at, RANGES, seq, sinks, slots, STRIDE, RAW: tl.constexpr):
    """First and end of the live rows of the tile from slot ``at`` on; none beyond the end."""
    live = gl.load(RANGES + _entry(at, seq, slots, STRIDE))
    token = at % PAGE
    first, last = (live & 0xFFFF) - token, gl.minimum((live >> 16) - token, slots - at)
    if RAW:
        first, last = gl.where(at < 0, 0, first), gl.where(at < 0, sinks, last)
    return first, last


@jit
def _keys(
    K_SLOT, KS_SLOT, K, KS, page, at, first, last, h,
    HKV: tl.constexpr, CODEC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """K of a tile and its scales (the page stands in for a codec without any)."""
    plane, token = page.to(gl.int64) * HKV + h, gl.maximum(at, 0) % PAGE
    k, ks = load_k(K_SLOT, K, plane * PAGE + token, first, last, CODEC, D, W, MT, RING), plane
    if CODEC != "raw":
        ks = load_scale(KS_SLOT, KS, plane, token // (16 * MT), W, MT, RING)
    return k, ks


@jit
def _values(
    V_SLOT, VS_SLOT, V, VS, page, at, first, last, h,
    HKV: tl.constexpr, CODEC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """V of a tile, turbo3's signs, scales."""
    plane, token = page.to(gl.int64) * HKV + h, gl.maximum(at, 0) % PAGE
    row = plane * PAGE + token
    start = row if CODEC == "raw" else (row // 16) * v_tile(CODEC, D)
    v, signs, vs = load_v(V_SLOT, V, start, first, last, CODEC, D, W, MT, RING), plane, plane
    if CODEC == "turbo3":
        signs = load_signs(V, start, D, W, MT)
    if CODEC != "raw":
        vs = load_scale(VS_SLOT, VS, plane, token // (16 * MT), W, MT, RING)
    return v, signs, vs


@jit
def _center_pages(TABLE, seq, turn, end, slots, STRIDE, D: tl.constexpr, W: tl.constexpr):
    """The pages that each warp meets in turns turn .. turn + 16, but not from ``end`` on: -1 there."""
    lay: gl.constexpr = center_layout(D, W)
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    at = ((turn + n) * W)[None, :] + w[:, None]
    return gl.load(TABLE + seq * STRIDE + at, mask=(at < end * W) & (at * PAGE < slots), other=-1)


@jit
def _shifts(centers, q, scale, D: tl.constexpr, W: tl.constexpr, NP: tl.constexpr):
    """What each of the 16 centres adds to the logits of a column: [W, 16, NP]."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    operand = center_operand(centers, gl.DotOperandLayout(0, acc_layout, 2), D, W)
    return mma(operand, q, gl.zeros([W, 16, NP], gl.float32, acc_layout)) * scale


@jit
def _next_shifts(
    turn, shifts, pages, i, end, q, scale, C, TABLE, seq, h, slots, STRIDE,
    D: tl.constexpr, HKV: tl.constexpr, W: tl.constexpr, T: tl.constexpr, NP: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Those of the next 16 turns, where step i is the first of them. Their pages were looked up 16 turns earlier."""
    if CENTRED:
        done = i == (turn + 16) * (PAGE // T)
        if done:
            turn += 16
            shifts = _shifts(load_centers(C, pages, h, HKV, D, W), q, scale, D, W, NP)
            pages = _center_pages(TABLE, seq, turn + 16, end, slots, STRIDE, D, W)
    return turn, shifts, pages


@jit
def _shift(shifts, n, W: tl.constexpr, T: tl.constexpr, NP: tl.constexpr):
    """The n-th of them for every row of a tile: [W, T, NP]."""
    low, high = gl.split(gl.permute(gl.reshape(shifts, [W, 2, 8, NP]), [0, 2, 3, 1]))
    y = spread_row(gl.where(n < 8, low, high), n % 8)
    for _ in tl.static_range(log2(T // 8)):
        y = gl.join(y, y)
    y = gl.reshape(gl.permute(gl.reshape(y, [W, 8, NP, T // 8]), [0, 3, 1, 2]), [W, T, NP])
    return gl.convert_layout(y, gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8]), assert_trivial=True)


@jit
def _update(
    s, shifts, turn, ks, v, signs, vs, at, first, last, m, l, acc, t, position, offset,
    scale, window, v_table,
    RAW: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, D: tl.constexpr, NP: tl.constexpr, W: tl.constexpr,
    MT: tl.constexpr, CAUSAL: tl.constexpr, HARDWARE: tl.constexpr, DTYPE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """One tile into the running maximum m, normalizer l and sum acc; s [W, T, NP] are K's codes times q.

    With CENTRED the page's centre adds the ``turn``-th of ``shifts`` to every logit of a column.

    Where V has scales, a row's weight is the probability times its scale: log2 of the scale is added to the logit, so
    that the largest weight is 1 whatever the range of V. The normalizer takes the scale out again.
    """
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(2, acc_layout)
    valid = (t[None, :] >= first[:, None]) & (t[None, :] < last[:, None])
    v_log = gl.zeros([W, 16 * MT], gl.float32, rows_layout)
    if VC != "raw":
        v_log = log2_approximate(gl.maximum(scale_rows(vs, rows_layout, W, MT), SMALLEST_SCALE))
    k_scale = scale if KC == "raw" else (scale_rows(ks, rows_layout, W, MT) * scale)[:, :, None]
    s = s * k_scale + gl.where(valid, v_log, LOWEST)[:, :, None]
    if CENTRED:
        s += _shift(shifts, turn, W, 16 * MT, NP)
    if CAUSAL:
        here = at[:, None] + t[None, :] + offset
        if RAW:
            here = gl.where(at[:, None] < 0, t[None, :], here)  # sinks are the first rows
        seen = (here[:, :, None] <= position[None, None, :]) & (here[:, :, None] > position[None, None, :] - window)
        s = gl.where(seen, s, LOWEST)
    peak = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s - peak[:, None, :])
    shrink = gl.exp2(m - peak)
    l = l * shrink[:, None, :] + (p if VC == "raw" else p * gl.exp2(-v_log)[:, :, None])
    acc = acc * shrink[:, None, :]
    probabilities = p_operand(p.to(DTYPE if VC == "raw" else UNPACKED), b_layout, W, MT, NP)
    acc = mma(v_operand(v, signs, v_table, a_layout, VC, D, W, MT, HARDWARE), probabilities, acc)
    return peak, l, acc


@jit
def _copy_tile(
    k_ring, v_ring, ks_ring, vs_ring, slot, K, V, KS, VS, page, at, first, last, h,
    HKV: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """A tile of K and V with their scales to a slot of the rings."""
    _keys(k_ring.index(slot), ks_ring.index(slot), K, KS, page, at, first, last, h, HKV, KC, D, W, MT, True)
    _values(v_ring.index(slot), vs_ring.index(slot), V, VS, page, at, first, last, h, HKV, VC, D, W, MT, True)


@jit
def _stream(
    Q, K, V, KS, VS, C, TABLE, RANGES, SINK, SIGNS, PO, PM, PL,
    row, slot, seq, h, col0, columns, begin, end, sinks, slots, offset, length, scale, STRIDE, window,
    k_table, v_table,
    RAW: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, D: tl.constexpr, HKV: tl.constexpr,
    GROUP: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RING: tl.constexpr,
    CAUSAL: tl.constexpr, HARDWARE: tl.constexpr, UNDO: tl.constexpr, MARK: tl.constexpr, OVERLAP: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Online softmax (arXiv 2205.14135) of one program over steps begin .. end of a kind; writes a partial result.

    With OVERLAP the append before it may still run: it writes queries and the newest rows, all else stands. The next tile
    is loaded to registers, each part after the last use of its predecessor, or with RING (of folded pages) copied to
    shared memory meanwhile; a lane copies what it will read itself.
    """
    T: gl.constexpr = 16 * MT
    TURNS: gl.constexpr = PAGE // T  # steps of a warp in a page
    DP: gl.constexpr = padded(D)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 2)
    out_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    cols_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    rows_layout: gl.constexpr = gl.SliceLayout(2, acc_layout)
    warp_rows: gl.constexpr = gl.SliceLayout(1, rows_layout)
    DTYPE: gl.constexpr = V.dtype.element_ty
    at = _first_slot(begin, RAW, W, T, CENTRED, warp_rows)
    page = _page(at, TABLE, SINK, seq, slots, STRIDE, RAW)
    first, last = _live(at, RANGES, seq, sinks, slots, STRIDE, RAW)
    turn, last_turn = begin // TURNS, (end + TURNS - 1) // TURNS
    pages = at  # stands in where keys have no centres
    if CENTRED:
        pages = _center_pages(TABLE, seq, turn, last_turn, slots, STRIDE, D, W)
    k_table, v_table = hold(k_table), hold(v_table)
    m = gl.full([W, NP], LOWEST, gl.float32, cols_layout)
    shifts = gl.zeros([W, 16, NP], gl.float32, acc_layout)
    l = gl.zeros([W, T, NP], gl.float32, acc_layout)
    acc = gl.zeros([W, DP, NP], gl.float32, acc_layout)
    d = gl.arange(0, DP, gl.SliceLayout(1, out_layout))
    words = gl.load(SIGNS + d % 8) if UNDO else d
    t = gl.arange(0, T, gl.SliceLayout(0, rows_layout))
    col = gl.arange(0, NP, gl.SliceLayout(0, cols_layout)) + col0
    position = length - columns // GROUP + col // GROUP
    if RING:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        VX: gl.constexpr = v_shape(VC, D, MT)[0]
        VE: gl.constexpr = v_shape(VC, D, MT)[1]
        k_ring = gl.allocate_shared_memory(K.dtype.element_ty, [2, W, T, DP // values_per_element(KC)], k_shared(KC, D))
        v_ring = gl.allocate_shared_memory(V.dtype.element_ty, [2, W, VX, VE], plain)
        ks_ring = gl.allocate_shared_memory(KS.dtype.element_ty, [2, W, 8, 2 * MT], plain)
        vs_ring = gl.allocate_shared_memory(VS.dtype.element_ty, [2, W, 8, 2 * MT], plain)
        _copy_tile(
            k_ring, v_ring, ks_ring, vs_ring, 0, K, V, KS, VS, page, at, first, last, h, HKV, KC, VC, D, W, MT,
        )  # fmt: skip
        commit()
        if CENTRED:
            centers = load_centers(C, pages, h, HKV, D, W)
            pages = _center_pages(TABLE, seq, turn + 16, last_turn, slots, STRIDE, D, W)
        if OVERLAP:
            wait_for_previous()
        q = _load_q(Q, row, columns, col0, b_layout, KC, D, W, NP)
        if CENTRED:
            shifts = _shifts(centers, q, scale, D, W, NP)
        # Table entries are read a step before they are used.
        ahead = _first_slot(begin + 1, RAW, W, T, CENTRED, warp_rows)
        page = _page(ahead, TABLE, SINK, seq, slots, STRIDE, RAW)
        low, high = _live(ahead, RANGES, seq, sinks, slots, STRIDE, RAW)
        for i in range(loop_bound(begin), loop_bound(end)):
            wait(0)
            now = (i - begin) % 2
            if i + 1 < end:
                _copy_tile(
                    k_ring, v_ring, ks_ring, vs_ring, 1 - now, K, V, KS, VS, page, ahead, low, high, h,
                    HKV, KC, VC, D, W, MT,
                )  # fmt: skip
            commit()
            coming_at, coming_first, coming_last = ahead, low, high
            ahead = _first_slot(i + 2, RAW, W, T, CENTRED, warp_rows)
            page = _page(ahead, TABLE, SINK, seq, slots, STRIDE, RAW)
            low, high = _live(ahead, RANGES, seq, sinks, slots, STRIDE, RAW)
            turn, shifts, pages = _next_shifts(
                turn, shifts, pages, i, last_turn, q, scale, C, TABLE, seq, h, slots, STRIDE, D, HKV, W, T, NP, CENTRED
            )
            k = k_ring.index(now).load(k_layout(KC, D, W, MT))
            s = mma(
                k_operand(k, k_table, a_layout, KC, D, W, MT, HARDWARE), q, gl.zeros([W, T, NP], gl.float32, acc_layout)
            )
            v = v_ring.index(now).load(v_layout(VC, D, W, MT))
            ks, vs = ks_ring.index(now).load(scale_layout(W, MT)), vs_ring.index(now).load(scale_layout(W, MT))
            m, l, acc = _update(
                s, shifts, i // TURNS - turn, ks, v, at, vs, at, first, last, m, l, acc, t, position, offset,
                scale, window, v_table, RAW, KC, VC, D, NP, W, MT, CAUSAL, HARDWARE, DTYPE, CENTRED,
            )  # fmt: skip
            at, first, last = coming_at, coming_first, coming_last
    else:
        k, ks = _keys(K, K, K, KS, page, at, first, last, h, HKV, KC, D, W, MT, False)
        v, signs, vs = _values(V, V, V, VS, page, at, first, last, h, HKV, VC, D, W, MT, False)
        if CENTRED:
            centers = load_centers(C, pages, h, HKV, D, W)
            pages = _center_pages(TABLE, seq, turn + 16, last_turn, slots, STRIDE, D, W)
        if OVERLAP:
            wait_for_previous()
        q = _load_q(Q, row, columns, col0, b_layout, KC, D, W, NP)
        if CENTRED:
            shifts = _shifts(centers, q, scale, D, W, NP)
        # Pages are looked up a step before the loads that need them.
        ahead = _first_slot(gl.minimum(begin + 1, end - 1), RAW, W, T, CENTRED, warp_rows)
        page = _page(ahead, TABLE, SINK, seq, slots, STRIDE, RAW)
        low, high = _live(ahead, RANGES, seq, sinks, slots, STRIDE, RAW)
        for i in range(loop_bound(begin), loop_bound(end)):
            turn, shifts, pages = _next_shifts(
                turn, shifts, pages, i, last_turn, q, scale, C, TABLE, seq, h, slots, STRIDE, D, HKV, W, T, NP, CENTRED
            )
            s = mma(
                k_operand(k, k_table, a_layout, KC, D, W, MT, HARDWARE), q, gl.zeros([W, T, NP], gl.float32, acc_layout)
            )
            k, next_ks = _keys(K, K, K, KS, page, ahead, low, high, h, HKV, KC, D, W, MT, False)
            m, l, acc = _update(
                s, shifts, i // TURNS - turn, ks, v, signs, vs, at, first, last, m, l, acc, t, position, offset,
                scale, window, v_table, RAW, KC, VC, D, NP, W, MT, CAUSAL, HARDWARE, DTYPE, CENTRED,
            )  # fmt: skip
            v, signs, vs = _values(V, V, V, VS, page, ahead, low, high, h, HKV, VC, D, W, MT, False)
            ks, at, first, last = next_ks, ahead, low, high
            ahead = _first_slot(gl.minimum(i + 2, end - 1), RAW, W, T, CENTRED, warp_rows)
            page = _page(ahead, TABLE, SINK, seq, slots, STRIDE, RAW)
            low, high = _live(ahead, RANGES, seq, sinks, slots, STRIDE, RAW)

    top = gl.max(m, 0)
    weight = gl.exp2(m - top[None, :])
    total = gl.sum(gl.sum(l, 1) * weight, 0)
    if UNDO:
        out = gl.sum(acc * (weight * D**-0.5)[:, None, :], 0)
        out = undo_rotation(out, words, d, D, out_layout)
    else:
        out = gl.sum(acc * weight[:, None, :], 0)
    d = v_dimension(d, VC)
    n = gl.arange(0, NP, gl.SliceLayout(0, out_layout))
    stored = (d < D)[:, None] & (n + col0 < columns)[None, :]
    gl.store(PO + ((slot * NP + n) * D)[None, :] + d[:, None], out, mask=stored)
    nc = gl.arange(0, NP, gl.SliceLayout(0, cols_layout))
    gl.store(PM + slot * NP + nc, top)
    gl.store(PL + slot * NP + nc, -total if MARK else total)


@jit
def _no_rows(PM, PL, slot, NP: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr):
    """The partial result of no rows; the sum behind it is not read."""
    if OVERLAP:
        wait_for_previous()  # the memory may still be in use
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    lay: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, acc_layout))
    n = gl.arange(0, NP, lay)
    gl.store(PM + slot * NP + n, gl.full([NP], LOWEST, gl.float32, lay))
    gl.store(PL + slot * NP + n, gl.zeros([NP], gl.float32, lay))


@jit
def raw_programs(raw_steps, steps, programs, LEAST: tl.constexpr):
    """How many of the programs take raw rows, LEAST or more: so many that each has at most twice the steps of a program
    of folded rows, unless that is more than their even share, and those that the others can do without, because their
    longest would stay as long."""
    longest = gl.maximum(_cdiv(steps, programs - LEAST), 1)
    even = _cdiv(raw_steps * programs, gl.maximum(raw_steps + steps, 1))
    raw = gl.minimum(gl.maximum(gl.minimum(_cdiv(raw_steps, 2 * longest), even), LEAST), programs - 1)
    longest = gl.maximum(_cdiv(steps, programs - raw), 1)
    return programs - _cdiv(steps, longest)


@jit
def _steps(folded, W: tl.constexpr, MT: tl.constexpr, CENTRED: tl.constexpr):
    """Steps of all folded rows in tiles of MT; with centres a warp keeps to its page."""
    steps = _cdiv(folded, W * 16 * MT)
    if CENTRED:
        steps = _cdiv(folded // PAGE, W) * (PAGE // (16 * MT))
    return steps


@jit
def _cdiv(x, y):
    return (x + y - 1) // y


@jit
def attend_splits(
    Q, Q_RAW, K, V, KS, VS, C, RAW_K, RAW_V, TABLE, RAW_TABLE, RANGES, RAW_RANGES, SINK, SINKS, FOLDED, LENGTH, SIGNS,
    PO, PM, PL,
    scale, STRIDE, RAW_STRIDE, window, k_table, v_table,
    KC: tl.constexpr, VC: tl.constexpr, D: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RING_MT: tl.constexpr,
    RING_FROM: tl.constexpr, RAW_MT: tl.constexpr, RAW_PROGRAMS: tl.constexpr, CAUSAL: tl.constexpr,
    HARDWARE: tl.constexpr, UNDO: tl.constexpr, MARK: tl.constexpr, OVERLAP: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Partial results of every program.

    Grid (sequences · HKV · column blocks, programs). With RAW_PROGRAMS > 0 a program takes rows of one kind, and that many
    take raw ones, or more where folded pages leave programs idle. With 0 they divide all steps evenly, raw ones first,
    and the one in which the kinds meet writes two results: there is a result more than programs.
    Folded pages are read in tiles of MT, but from RING_FROM rows a program on in tiles of RING_MT through shared memory,
    unless that is 0.
    Q [rows, COLUMNS, D] rotated for turbo K (Q_RAW: not rotated), a row a (sequence, KV head), a column (query row, head
    of the group). Pages as in docs/cuda.md; with CENTRED C int32 [pages, HKV, D / 2] are K's centres, two fp16 values a
    word; TABLE, RAW_TABLE int32 [sequences, *STRIDE] of page numbers, RANGES, RAW_RANGES of their live rows
    (first | end << 16); SINK int32 the raw page of the sinks; SINKS, FOLDED, LENGTH int32 per sequence: raw sinks, folded
    slots, all slots. With UNDO a folded sum leaves V's rotated basis here (SIGNS: `hadamard.packed_signs`); with MARK it
    does not, and normalizers of raw rows are negative to tell. PO float32 [row · block, results, NP, D], PM, PL
    [row · block, results, NP]. ``scale`` is the softmax scale times log2(e).
    """
    if OVERLAP:
        let_next_start()
    BLOCKS: gl.constexpr = (COLUMNS + NP - 1) // NP
    QUANTIZED: gl.constexpr = KC != "raw" or VC != "raw"
    SHARED: gl.constexpr = QUANTIZED and RAW_PROGRAMS == 0
    row = gl.program_id(0) // BLOCKS
    col0 = (gl.program_id(0) % BLOCKS) * NP
    seq = row // HKV
    h = row % HKV
    i = gl.program_id(1)
    programs = gl.num_programs(1)
    slot = gl.program_id(0).to(gl.int64) * (programs + 1 if SHARED else programs) + i
    sinks, folded, length = gl.load(SINKS + seq), gl.load(FOLDED + seq), gl.load(LENGTH + seq)
    raw_end = ((length - folded + 16 * RAW_MT - 1) // (16 * RAW_MT) + W) // W  # one tile more, for the sinks
    raw_begin = gl.where(sinks == 0, 1, 0) if W == 1 else 0
    raw_steps = raw_end - raw_begin
    steps = _steps(folded, W, MT, CENTRED)
    raw_units, per_unit = raw_steps, 1  # a step of raw rows costs as much as one of folded ones, or half
    ring = False
    if RING_MT > 0:
        ring = folded >= RING_FROM * programs
        if ring:
            steps, raw_units, per_unit = _steps(folded, W, RING_MT, CENTRED), _cdiv(raw_steps, 2), 2
    if SHARED:
        low, high = (raw_units + steps) * i // programs, (raw_units + steps) * (i + 1) // programs
        takes_raw, takes_folded = low <= raw_units, (high > raw_units) | (i == programs - 1)
    else:
        raw = raw_programs(raw_units, steps, programs, RAW_PROGRAMS) if QUANTIZED else programs
        takes_raw, takes_folded = i < raw, i >= raw
    if takes_raw:
        if SHARED:
            begin, end = low * per_unit, gl.minimum(high * per_unit, raw_steps)
        else:
            begin, end = raw_steps * i // raw, raw_steps * (i + 1) // raw
        if begin < end:
            if OVERLAP and (raw_begin + end) * W * 16 * RAW_MT > length - folded - NEWEST:
                wait_for_previous()
            _stream(
                Q_RAW, RAW_K, RAW_V, KS, VS, C, RAW_TABLE, RAW_RANGES, SINK, SIGNS, PO, PM, PL,
                row, slot, seq, h, col0, COLUMNS, raw_begin + begin, raw_begin + end, sinks, length - folded, folded,
                length, scale, RAW_STRIDE, window, k_table, v_table,
                True, "raw", "raw", D, HKV, GROUP, NP, W, RAW_MT, False, CAUSAL, HARDWARE, False, MARK, OVERLAP, False,
            )  # fmt: skip
        else:
            _no_rows(PM, PL, slot, NP, W, OVERLAP)
    if QUANTIZED and takes_folded:
        if SHARED:
            begin, end = gl.maximum(low - raw_units, 0), gl.maximum(high - raw_units, 0)
            slot += 1
        else:
            begin = steps * (i - raw) // (programs - raw)
            end = steps * (i - raw + 1) // (programs - raw)
        if begin >= end:
            _no_rows(PM, PL, slot, NP, W, OVERLAP)
        elif RING_MT > 0 and ring:
            _stream(
                Q, K, V, KS, VS, C, TABLE, RANGES, SINK, SIGNS, PO, PM, PL,
                row, slot, seq, h, col0, COLUMNS, begin, end, sinks, folded, 0, length, scale, STRIDE, window,
                k_table, v_table,
                False, KC, VC, D, HKV, GROUP, NP, W, RING_MT, True, CAUSAL, HARDWARE, UNDO, False, OVERLAP, CENTRED,
            )  # fmt: skip
        else:
            _stream(
                Q, K, V, KS, VS, C, TABLE, RANGES, SINK, SIGNS, PO, PM, PL,
                row, slot, seq, h, col0, COLUMNS, begin, end, sinks, folded, 0, length, scale, STRIDE, window,
                k_table, v_table,
                False, KC, VC, D, HKV, GROUP, NP, W, MT, False, CAUSAL, HARDWARE, UNDO, False, OVERLAP, CENTRED,
            )  # fmt: skip
