"""Stored weights to operands of the tensor cores, in registers: words to numbers, and the layouts in which lanes load."""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.fragments import join8, pair_of
from kvcore.backends.cuda.kernels.gl import INTERPRET, constexpr_function, gl, jit


def _nibbles_asm(bf16: bool) -> str:
    """Two words to sixteen numbers in eight registers: each nibble in the mantissa of a power of two, which its product
    with Σ x takes away again (`offset`). float16 has room for it at bits 0 (under 1024) and 4 (under 64), bf16 at bit 0
    (under 128).
    """
    low, high = ((0x000F, 0x4300), (0x000F, 0x4300)) if bf16 else ((0x000F, 0x6400), (0x00F0, 0x5400))
    lines = ["{", ".reg .b32 w, m, b, n, c;"]
    for names, numbers in (("mb", low), ("nc", high)):
        lines += [f"mov.b32 {name}, {x * 0x10001:#x};" for name, x in zip(names, numbers, strict=True)]
    for word in range(2):
        for i in range(4):
            source, shift = f"${8 + word}", 4 * i if bf16 else 8 * (i // 2)
            if shift and (bf16 or i % 2 == 0):
                lines.append(f"shr.b32 w, {source}, {shift};")
            mask, under = "nc" if i % 2 else "mb"
            lines.append(f"lop3.b32 ${4 * word + i}, {'w' if shift else source}, {mask}, {under}, 0xEA;")
    return "\n".join([*lines, "}"])


# Bytes under 1024 in float16. bf16 holds a code of eight bits only by itself.
_BYTES_ASM = """{
prmt.b32 $0, $4, 0x64646464, 0x4140;
prmt.b32 $1, $4, 0x64646464, 0x4342;
prmt.b32 $2, $5, 0x64646464, 0x4140;
prmt.b32 $3, $5, 0x64646464, 0x4342;
}"""
NIBBLES_F16, NIBBLES_BF16 = tl.constexpr(_nibbles_asm(False)), tl.constexpr(_nibbles_asm(True))
NIBBLES_TO = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r")
BYTES_ASM = tl.constexpr(_BYTES_ASM)
# x · (weight / 8), rounded once. 0x8000 is -0.
WEIGHTED_F16 = tl.constexpr("{ .reg .b32 c; mov.b32 c, 0x30003000; mul.rn.f16x2 c, $2, c; mul.rn.f16x2 $0, $1, c; }")
WEIGHTED_BF16 = tl.constexpr(
    "{ .reg .b32 c, z; mov.b32 c, 0x3E003E00; mov.b32 z, 0x80008000; fma.rn.bf16x2 c, $2, c, z; "
    "fma.rn.bf16x2 $0, $1, c, z; }"
)


@constexpr_function
def offset(bits, bf16, r):
    """What the unpacked codes of a tile's rows 8 · r .. 8 · r + 7 have too much."""
    if bits == 4:
        return 128.0 if bf16 else (64.0 if r else 1024.0)
    return 0.0 if bf16 else 1024.0


@jit
def _nibbles(word, pair: tl.constexpr, dtype: tl.constexpr, like):
    more: gl.constexpr = offset(4, dtype == tl.bfloat16, pair % 2)
    low, high = (word >> (4 * pair)) & 15, (word >> (16 + 4 * pair)) & 15
    return pair_of(low.to(tl.float32) + more, high.to(tl.float32) + more, like)


@jit
def _byte_pair(word, pair: tl.constexpr, dtype: tl.constexpr, like):
    more: gl.constexpr = offset(8, dtype == tl.bfloat16, 0)
    low, high = (word >> (16 * pair)) & 255, (word >> (16 * pair + 8)) & 255
    return pair_of(low.to(tl.float32) + more, high.to(tl.float32) + more, like)


@jit
def unpack_nibbles(x, dtype: tl.constexpr):
    """Words [..., 2] -> codes and `offset` [..., 2 (e), 2 (word), 2 (b), 2 (r)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        values = join8(
            _nibbles(w0, 0, dtype, x),
            _nibbles(w0, 1, dtype, x),
            _nibbles(w0, 2, dtype, x),
            _nibbles(w0, 3, dtype, x),
            _nibbles(w1, 0, dtype, x),
            _nibbles(w1, 1, dtype, x),
            _nibbles(w1, 2, dtype, x),
            _nibbles(w1, 3, dtype, x),
        )
    elif dtype == gl.bfloat16:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            NIBBLES_BF16, NIBBLES_TO, [x], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2
        )
        values = join8(o0, o1, o2, o3, o4, o5, o6, o7)
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            NIBBLES_F16, NIBBLES_TO, [x], dtype=(gl.float16,) * 8, is_pure=True, pack=2
        )
        values = join8(o0, o1, o2, o3, o4, o5, o6, o7)
    return values


@jit
def unpack_bytes(x, dtype: tl.constexpr):
    """Words [..., 2] -> codes and `offset` [..., 2 (e), 2 (word), 2 (r)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        o0, o1 = _byte_pair(w0, 0, dtype, x), _byte_pair(w0, 1, dtype, x)
        o2, o3 = _byte_pair(w1, 0, dtype, x), _byte_pair(w1, 1, dtype, x)
        values = gl.join(gl.join(o0, o2), gl.join(o1, o3))
    else:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(
            BYTES_ASM, "=&r,=&r,=&r,=&r,r,r", [x], dtype=(gl.float16,) * 4, is_pure=True, pack=2
        )
        values = gl.join(gl.join(o0, o2), gl.join(o1, o3))
        if dtype == gl.bfloat16:
            values = (values.to(gl.float32) - 1024.0).to(gl.bfloat16)
    return values


@jit
def weighted(x, weight):
    """x · weight / 8: products of 16-bit rows stay in range."""
    if INTERPRET:
        y = (x.to(tl.float32) * weight.to(tl.float32) * 0.125).to(x.dtype)
    elif x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(WEIGHTED_BF16, "=r,r,r", [x, weight], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise(WEIGHTED_F16, "=r,r,r", [x, weight], dtype=gl.float16, is_pure=True, pack=2)
    return y


@constexpr_function
def words_layout(bits, W, tiles, count):
    """Codes of some tiles and chunks as words [W, tiles, count, 8 · bits, 4], or numbers [W, tiles, count, 128, 8]: a
    lane takes 16 bytes at a time."""
    regs = [[0, 0, 0, 0, 1 << i] for i in range(3 if bits == 16 else 2)]
    regs += [[0, 0, 0, 32 << i, 0] for i in range((bits // 4).bit_length() - 1)]
    regs += [[0, 0, 1 << i, 0, 0] for i in range(count.bit_length() - 1)] + [
        [0, 1 << i, 0, 0, 0] for i in range(tiles.bit_length() - 1)
    ]
    lanes = [[0, 0, 0, 1 << i, 0] for i in range(5)]
    warps = [[1 << i, 0, 0, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, tiles, count, 8 * bits, 8 if bits == 16 else 4])


@constexpr_function
def x_layout(W, NP, count):
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]] + ([[0, 8, 0]] if NP == 16 else [])
    regs += [[0, 0, 64 << i] for i in range(count.bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << i, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, NP, 64 * count])


@constexpr_function
def sides_layout(W, tiles, count):
    """Scales and biases [W, tiles, count, 8 g, 4 (r, scale or bias)]: a lane holds those of its two outputs."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]]
    regs += [[0, 0, 1 << i, 0, 0] for i in range(count.bit_length() - 1)] + [
        [0, 1 << i, 0, 0, 0] for i in range(tiles.bit_length() - 1)
    ]
    lanes = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], *([0, 0, 0, 1 << i, 0] for i in range(3))]
    warps = [[1 << i, 0, 0, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, tiles, count, 8, 4])


@jit
def codes_operand(x, OPERAND: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The operand [W, 16 · tiles, 64] of a chunk's words or numbers [W, tiles, ...]."""
    W: gl.constexpr = x.shape[0]
    T: gl.constexpr = x.shape[1]
    if BITS == 16:
        # W, tile, h, j, g, t, b, r, e
        y = gl.permute(gl.reshape(x, [W, T, 2, 2, 8, 4, 2, 2, 2]), [0, 1, 7, 4, 2, 3, 6, 5, 8])
    elif BITS == 4:
        # W, tile, g, t, h, e, j, b, r
        y = gl.permute(unpack_nibbles(gl.reshape(x, [W, T, 8, 4, 2, 2]), DTYPE), [0, 1, 8, 2, 4, 6, 7, 3, 5])
    else:
        # W, tile, h, g, t, j, e, b, r
        y = gl.permute(unpack_bytes(gl.reshape(x, [W, T, 2, 8, 4, 2, 2]), DTYPE), [0, 1, 8, 3, 2, 5, 7, 4, 6])
    return gl.convert_layout(gl.reshape(y, [W, 16 * T, 64]), OPERAND, assert_trivial=True)
