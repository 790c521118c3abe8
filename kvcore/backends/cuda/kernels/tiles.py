"""Tiles of pages: how a warp loads the rows of K and V that it owns, and turns them into tensor core operands.

Each warp owns T = 16·MT tokens at a time, for all of the head: warps exchange nothing until the end. Tensors carry the
warp as their first axis, [W, ...]. docs/cuda.md gives the stored order; `fragments.py` the unpacking.

K. A stored element is a 32-bit word of NV = 8 (turbo4) or 4 (int8) codes, or one fp16 value (raw, NV = 1). A lane holds
2·LO elements side by side, four lanes stand side by side, HI such groups make a row. Unpacking pairs neighbouring words,
so the axes become [.., HI, 4 lanes, LO, 2 half, NV], and the tensor core's k index is (HI, LO, NV, lanes, half).

Vᵀ. Words stand as [tile, C groups of m-tiles, lane (8 g, 4 t), m-tiles side by side]; rows d = 16·m-tile + 8·r + g,
tokens 16·tile + 8·k8 + 2·t + half.
"""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.fragments import halves, transpose_blocks, unpack_int8, unpack_turbo3, unpack_turbo4
from kvcore.backends.cuda.kernels.gl import constexpr_function, copy, gl, jit

PAGE = tl.constexpr(128)


@constexpr_function
def log2(n):
    return n.bit_length() - 1


@constexpr_function
def padded(head_dim):
    """The power of two that register tiles round the head dimension up to: 64 at least, or lanes would stay idle."""
    return max(64, 1 << (head_dim - 1).bit_length())


@jit
def _get(SLOT, at, mask, MASKED: tl.constexpr, RING: tl.constexpr):
    """What stands at ``at``: loaded, or with RING copied to a slot of shared memory, from which `ring.load` reads it."""
    x = at
    if RING:
        if MASKED:
            copy(SLOT, at, mask=mask)
        else:
            copy(SLOT, at)
    elif MASKED:
        x = gl.load(at, mask=mask, other=0)
    else:
        x = gl.load(at)
    return x


@constexpr_function
def values_per_element(codec):
    return 8 if codec == "turbo4" else 4 if codec == "int8" else 1


@constexpr_function
def k_side(codec, head_dim):
    """LO: half the elements that one lane holds side by side; 16 bytes where the row is long enough."""
    elements = padded(head_dim) // values_per_element(codec)
    return 4 if codec == "raw" else min(4, elements // 4) // 2


@constexpr_function
def k_layout(codec, head_dim, W, MT):
    elements, side = padded(head_dim) // values_per_element(codec), 2 * k_side(codec, head_dim)
    bits = [1 << i for i in range(log2(elements)) if 1 << i not in (side, 2 * side)]
    regs = [[0, 0, e] for e in bits] + [[0, 8, 0]] + [[0, 16 << i, 0] for i in range(log2(MT))]
    lanes = [[0, 0, side], [0, 0, 2 * side], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << i, 0, 0] for i in range(log2(W))]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, 16 * MT, elements])


@jit
def k_dimension(k, CODEC: tl.constexpr, D: tl.constexpr):
    """d of the tensor core's k index; padding gives d >= D."""
    NV: gl.constexpr = values_per_element(CODEC)
    LO: gl.constexpr = k_side(CODEC, D)
    half, lane, value = k & 1, (k >> 1) & 3, (k >> 3) % NV
    low, high = (k >> 3) // NV % LO, (k >> 3) // (NV * LO)
    return half + 2 * value + 2 * NV * (low + LO * (lane + 4 * high))


@constexpr_function
def k_shared(codec, head_dim):
    """Rows as they are; where two of them would meet in one bank, odd ones have their 64-byte groups swapped."""
    side = 8 * k_side(codec, head_dim)
    groups = padded(head_dim) // values_per_element(codec) // side
    return gl.SwizzledSharedLayout(side, 1, min(groups, 2), [2, 1, 0])


@jit
def load_k(
    SLOT, K, row, first, last,
    CODEC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Rows row[w] .. row[w] + T of K [rows, elements]; raw rows outside first[w] .. last[w] of the tile are zeros."""
    lay: gl.constexpr = k_layout(CODEC, D, W, MT)
    NV: gl.constexpr = values_per_element(CODEC)
    E: gl.constexpr = padded(D) // NV
    ROW: gl.constexpr = D // NV
    warps: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, lay))
    base = gl.convert_layout(row, warps)
    t = gl.arange(0, 16 * MT, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    e = gl.arange(0, E, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    at = K + (base * ROW)[:, None, None] + (t[None, :, None] * ROW + e[None, None, :])
    if CODEC == "raw":
        low, high = gl.convert_layout(first, warps), gl.convert_layout(last, warps)
        live = (t[None, :] >= low[:, None]) & (t[None, :] < high[:, None])
        mask = live[:, :, None] & (e < ROW)[None, None, :]
    else:
        mask = (base >= 0)[:, None, None] & (t >= 0)[None, :, None] & (e < ROW)[None, None, :]
    return _get(SLOT, at, mask, CODEC == "raw" or E != ROW, RING)


@jit
def k_operand(
    x, table, OPERAND: tl.constexpr, CODEC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """[W, T, DP] fp16 (raw: its own dtype), the head dimension in the order of `k_dimension`."""
    NV: gl.constexpr = values_per_element(CODEC)
    LO: gl.constexpr = k_side(CODEC, D)
    HI: gl.constexpr = padded(D) // (8 * NV * LO)
    T: gl.constexpr = 16 * MT
    words = gl.reshape(x, [W, T, HI, 4, LO, 2])
    if CODEC == "turbo4":
        y = unpack_turbo4(words, table, HARDWARE)
    elif CODEC == "int8":
        y = unpack_int8(words)
    else:
        y = words
    y = gl.permute(gl.reshape(y, [W, T, HI, 4, LO, 2, NV]), [0, 1, 2, 4, 6, 3, 5])
    return gl.convert_layout(gl.reshape(y, [W, T, padded(D)]), OPERAND, assert_trivial=True)


@constexpr_function
def center_layout(head_dim, W):
    """A lane holds what it needs of its two centres as first operand: 16 bytes a load."""
    words, side = padded(head_dim) // 2, values_per_element("turbo4") * k_side("turbo4", head_dim)
    regs = [[0, 0, 1 << i] for i in range(log2(words)) if 1 << i not in (side, 2 * side)] + [[0, 8, 0]]
    lanes = [[0, 0, side], [0, 0, 2 * side], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[1 << i, 0, 0] for i in range(log2(W))], [], [W, 16, words])


@jit
def load_centers(CENTER, page, h, HKV: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Of pages page[w, n] and head h, from CENTER int32 [pages, HKV, D / 2], two fp16 values a word: [W, 16, DP / 2].
    Page -1 has zeros."""
    lay: gl.constexpr = center_layout(D, W)
    e = gl.arange(0, padded(D) // 2, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    at = CENTER + ((page.to(gl.int64) * HKV + h) * (D // 2))[:, :, None] + e[None, None, :]
    return gl.load(at, mask=(page >= 0)[:, :, None] & (e < D // 2)[None, None, :], other=0)


@jit
def center_operand(x, OPERAND: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """fp16 [W, 16, DP], the head dimension in the order of `k_dimension` of turbo4."""
    NV: gl.constexpr = values_per_element("turbo4")
    LO: gl.constexpr = k_side("turbo4", D)
    HI: gl.constexpr = padded(D) // (8 * NV * LO)
    y = halves(gl.reshape(x, [W, 16, HI, 4, LO, NV // 2, 2]))
    y = gl.permute(y, [0, 1, 2, 4, 5, 7, 3, 6])
    return gl.convert_layout(gl.reshape(y, [W, 16, padded(D)]), OPERAND, assert_trivial=True)


@constexpr_function
def mtiles_side(codec, head_dim):
    """m-tiles that a lane holds side by side: 16 bytes where their number allows it."""
    mtiles = head_dim // 16
    if codec == "turbo3":
        return 4
    if codec == "int8":
        return 2 if mtiles % 2 == 0 else 1
    return 4 if mtiles % 4 == 0 else 2 if mtiles % 2 == 0 else 1


@constexpr_function
def v_words(codec, head_dim):
    """Words that a lane loads side by side (turbo3: its two index words)."""
    return 2 if codec == "turbo3" else mtiles_side(codec, head_dim) * (2 if codec == "int8" else 1)


@constexpr_function
def v_tile(codec, head_dim):
    """Stored 32-bit words of a 16-token tile."""
    return head_dim // 2 * {"turbo4": 4, "int8": 8, "turbo3": 3}[codec]


@constexpr_function
def v_layout(codec, head_dim, W, MT):
    warps = [[1 << i, 0, 0] for i in range(log2(W))]
    if codec == "raw":
        regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0]] + [
            [0, 0, 64 << i] for i in range(log2(padded(head_dim)) - 6)
        ]
        regs += [[0, 8, 0]] + [[0, 16 << i, 0] for i in range(log2(MT))]
        lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
        return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, 16 * MT, padded(head_dim)])
    groups, words = padded(head_dim) // 16 // mtiles_side(codec, head_dim), v_words(codec, head_dim)
    regs = [[0, 0, 1 << i] for i in range(log2(words))] + [[0, 32 << i, 0] for i in range(log2(groups * MT))]
    lanes = [[0, 1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, MT * groups * 32, words])


@jit
def v_dimension(m, CODEC: tl.constexpr):
    """d of the operand's row: raw rows stand with bits 3 to 5 of d lowest, because a lane reads 8 values side by side."""
    if CODEC == "raw":
        d = (m & 7) * 8 + ((m >> 3) & 7) + (m >> 6) * 64
    else:
        d = m
    return d


@constexpr_function
def v_shape(codec, head_dim, MT):
    """Of a tile of words in shared memory, for each warp."""
    return [MT * padded(head_dim) // 16 // mtiles_side(codec, head_dim) * 32, v_words(codec, head_dim)]


@jit
def load_v(
    SLOT, V, start, first, last,
    CODEC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """raw: rows start[w] .. + T of V [rows, D]. Others: MT tiles of words from word start[w]; for turbo3 the index words."""
    lay: gl.constexpr = v_layout(CODEC, D, W, MT)
    warps: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, lay))
    base = gl.convert_layout(start, warps)
    if CODEC == "raw":
        t = gl.arange(0, 16 * MT, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
        e = gl.arange(0, padded(D), gl.SliceLayout(0, gl.SliceLayout(1, lay)))
        low, high = gl.convert_layout(first, warps), gl.convert_layout(last, warps)
        live = (t[None, :] >= low[:, None]) & (t[None, :] < high[:, None])
        at = V + (base * D)[:, None, None] + (t[None, :, None] * D + e[None, None, :])
        v = _get(SLOT, at, live[:, :, None] & (e < D)[None, None, :], True, RING)
    else:
        SIDE: gl.constexpr = mtiles_side(CODEC, D)
        GROUPS: gl.constexpr = padded(D) // 16 // SIDE
        STORED: gl.constexpr = D // 16 // SIDE
        WORDS: gl.constexpr = v_words(CODEC, D)
        x = gl.arange(0, MT * GROUPS * 32, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
        e = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
        inner = x % (32 * GROUPS)
        tile = x // (32 * GROUPS) * v_tile(CODEC, D)
        if CODEC == "turbo3":
            at = (
                V
                + base[:, None, None]
                + ((tile + inner // 32 * 96 + inner % 32)[None, :, None] + e[None, None, :] * 32)
            )
        else:
            at = V + base[:, None, None] + ((tile + inner * WORDS)[None, :, None] + e[None, None, :])
        stored = (base >= 0)[:, None, None] & (inner < 32 * STORED)[None, :, None] & (e >= 0)[None, None, :]
        v = _get(SLOT, at, stored, GROUPS != STORED, RING)
    return v


@jit
def load_signs(V, start, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr):
    """The sign words of turbo3, the same for both index words: [W, X, 2]."""
    lay: gl.constexpr = v_layout("turbo3", D, W, MT)
    GROUPS: gl.constexpr = padded(D) // 64
    base = gl.convert_layout(start, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    x = gl.arange(0, MT * GROUPS * 32, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    inner = x % (32 * GROUPS)
    word = x // (32 * GROUPS) * v_tile("turbo3", D) + inner // 32 * 96 + inner % 32 + 64
    return gl.load(V + base[:, None, None] + (word[None, :, None] + e[None, None, :] * 0))


@jit
def v_operand(
    x, signs, table, OPERAND: tl.constexpr, CODEC: tl.constexpr, D: tl.constexpr, W: tl.constexpr, MT: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """[W, DP, T]: rows in the order of `v_dimension`, tokens in order."""
    T: gl.constexpr = 16 * MT
    DP: gl.constexpr = padded(D)
    SIDE: gl.constexpr = mtiles_side(CODEC, D)
    C: gl.constexpr = DP // 16 // SIDE
    if CODEC == "raw":
        y = gl.permute(gl.reshape(x, [W, T, DP // 64, 8, 8]), [0, 2, 4, 3, 1])
    elif CODEC == "int8":
        # unpacked: W, tile, C, g, t, m-tile, half, r, k8
        y = unpack_int8(gl.reshape(x, [W, MT, C, 8, 4, SIDE, 2]))
        y = gl.permute(y, [0, 2, 5, 7, 3, 1, 8, 4, 6])
    elif CODEC == "turbo3":
        # unpacked: W, tile, C, g, t, half, m-tile bit 0, r, k8, m-tile bit 1
        y = unpack_turbo3(gl.reshape(x, [W, MT, C, 8, 4, 2]), gl.reshape(signs, [W, MT, C, 8, 4, 2]), table, HARDWARE)
        y = gl.permute(y, [0, 2, 9, 6, 7, 3, 1, 8, 4, 5])
    else:
        # unpacked: W, tile, C, g, t, high m-tile bits, half, m-tile bit 0, r, k8
        if SIDE == 1:
            w = gl.permute(gl.reshape(x, [W, MT, C // 2, 2, 8, 4]), [0, 1, 2, 4, 5, 3])
            w = gl.reshape(w, [W, MT, C // 2, 8, 4, 1, 2])
        else:
            w = gl.reshape(x, [W, MT, C, 8, 4, SIDE // 2, 2])
        y = gl.permute(unpack_turbo4(w, table, HARDWARE), [0, 2, 5, 7, 8, 3, 1, 9, 4, 6])
    return gl.convert_layout(gl.reshape(y, [W, DP, T]), OPERAND, assert_trivial=True)


@constexpr_function
def scale_layout(W, MT):
    regs = [[0, 0, 1 << i] for i in range(log2(2 * MT))]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[1 << i, 0, 0] for i in range(log2(W))], [], [W, 8, 2 * MT])


@jit
def load_scale(SLOT, S, page, tile, W: tl.constexpr, MT: tl.constexpr, RING: tl.constexpr):
    """Scales of T tokens, the tile[w]-th T of plane row page[w]: [W, 8 g, 2·MT]."""
    lay: gl.constexpr = scale_layout(W, MT)
    base = gl.convert_layout(page * PAGE + tile * (2 * MT), gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    r = gl.arange(0, 2 * MT, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    return _get(SLOT, S + base[:, None, None] + (g[None, :, None] * 16 + r[None, None, :]), 0, False, RING)


@jit
def scale_rows(x, ROWS: tl.constexpr, W: tl.constexpr, MT: tl.constexpr):
    """[W, T] float32 in the layout of score rows."""
    y = gl.reshape(gl.permute(x, [0, 2, 1]), [W, 16 * MT])
    return gl.convert_layout(y, ROWS, assert_trivial=True).to(gl.float32)


@jit
def p_operand(p, OPERAND: tl.constexpr, W: tl.constexpr, MT: tl.constexpr, NP: tl.constexpr):
    """Probabilities [W, T, NP] from accumulator layout to second operand: each 8×8 block transposed across lanes."""
    t = gl.reshape(transpose_blocks(p), [W, 2 * MT, 8, NP // 8, 8])
    t = gl.reshape(gl.permute(t, [0, 1, 4, 3, 2]), [W, 16 * MT, NP])
    return gl.convert_layout(t, OPERAND, assert_trivial=True)
