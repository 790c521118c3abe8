"""From stored pages to operands of the tensor cores, in registers.

`native.py` stores a page so that what a lane loads is its own fragment of `mma.m16n8k16`. A lane is (g, t) = (lane // 4,
lane % 4). K is the first operand of S = K q: lane g holds tokens g and g + 8 of a 16-token tile, and any order of the
head dimension will do, as long as q is gathered in the same one. Vᵀ is the first operand of O = Vᵀ P: lane g holds
rows d, lane t tokens. Unpacking is therefore lane-local: no shared memory, no barrier.

Bit lists below run from the lowest bit to the highest and name, for each bit of an mma index, the bit of d (or of the
stored index) that it stands for.
"""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.gl import INTERPRET, gl, jit

# Magnitudes of turbo4 as e4m3 bytes: 1.125, 3.25, 5.5, 8 | 11, 14, 18, 24; of turbo3: 3, 9, 16, 26.
TURBO4_LOW, TURBO4_HIGH = 0x504B4539, 0x5C595653
TURBO3_MAGNITUDES = 0x5D585144


def _turbo4_asm(e4m3: bool) -> str:
    """Two words to sixteen fp16 values in eight registers; see docs/cuda.md for the word.

    A byte permute looks the magnitudes of four codes up as e4m3 bytes and a logic operation adds their signs. The
    hardware converts e4m3 pairs to fp16 (sm_89 and newer); before that, the same bits shifted into place and
    multiplied by 256 are the same values exactly.
    """
    lines = ["{", ".reg .b32 a, b, s, u, v;", ".reg .b16 h0, h1;"]
    for pair in range(2):
        word, out = f"${8 + pair}", 4 * pair
        lines.append(f"and.b32 a, {word}, 0x77777777;")
        for half in range(2):
            signs = word if half == 0 else "s"
            if half == 1:
                lines += ["shr.u32 a, a, 16;", f"mul.lo.u32 s, {word}, 16;"]
            lines += [
                f"prmt.b32 b, $10, {TURBO4_HIGH:#x}, a;",
                f"lop3.b32 b, {signs}, 0x80808080, b, 0xEA;",
                *_e4m3_to_fp16(f"${out + 2 * half}", f"${out + 2 * half + 1}", e4m3),
            ]
    return "\n".join([*lines, "}"])


def _e4m3_to_fp16(low: str, high: str, hardware: bool) -> list[str]:
    """The four e4m3 bytes of register b to two registers of fp16 pairs."""
    if hardware:
        return [
            "mov.b32 {h0, h1}, b;",
            f"cvt.rn.f16x2.e4m3x2 {low}, h0;",
            f"cvt.rn.f16x2.e4m3x2 {high}, h1;",
        ]
    lines = ["mov.b32 v, 0x5C005C00;"]  # 256 in both halves
    for register, selector in ((low, 0x1404), (high, 0x3424)):
        lines += [
            f"prmt.b32 u, b, 0, {selector:#x};",  # bytes to the high halves
            f"and.b32 {register}, u, 0x80008000;",
            "shr.u32 u, u, 1;",
            f"lop3.b32 {register}, u, 0x3F803F80, {register}, 0xEA;",
            f"mul.rn.f16x2 {register}, {register}, v;",
        ]
    return lines


def _turbo3_asm(e4m3: bool) -> str:
    """Two index words and their sign word (given twice) to thirty-two fp16 values in sixteen registers."""
    lines = ["{", ".reg .b32 a, b, s, u, v;", ".reg .b16 h0, h1;"]
    for word in range(2):
        for mtile in range(2):
            shift = f"shr.u32 a, ${16 + word}, 2;" if mtile else f"mov.b32 a, ${16 + word};"
            lines += [shift, "and.b32 a, a, 0x33333333;"]
            for half in range(2):
                k = 2 * (2 * word + mtile) + half
                if half:
                    lines.append("shr.u32 a, a, 16;")
                lines += [
                    "prmt.b32 b, $20, 0, a;",
                    f"mul.lo.u32 s, $18, {1 << k};",
                    "lop3.b32 b, s, 0x80808080, b, 0xEA;",
                    *_e4m3_to_fp16(f"${2 * k}", f"${2 * k + 1}", e4m3),
                ]
    return "\n".join([*lines, "}"])


_INT8_ASM = """{
.reg .b32 z;
mov.b32 z, 0x64806480;
prmt.b32 $0, $4, 0x64646464, 0x4140;
prmt.b32 $1, $4, 0x64646464, 0x4342;
prmt.b32 $2, $5, 0x64646464, 0x4140;
prmt.b32 $3, $5, 0x64646464, 0x4342;
sub.f16x2 $0, $0, z;
sub.f16x2 $1, $1, z;
sub.f16x2 $2, $2, z;
sub.f16x2 $3, $3, z;
}"""  # the byte below 0x64 is fp16 1024 + code + 128; 1152 is subtracted

TURBO4_ASM = tl.constexpr(_turbo4_asm(True))
TURBO4_ASM_SM80 = tl.constexpr(_turbo4_asm(False))
TURBO3_ASM = tl.constexpr(_turbo3_asm(True))
TURBO3_ASM_SM80 = tl.constexpr(_turbo3_asm(False))
INT8_ASM = tl.constexpr(_INT8_ASM)
HALVES_ASM = tl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")
# Adds laneid / 32, which is 0: a constant that the assembler does not know for one stays in its register.
HOLD_ASM = tl.constexpr("{ .reg .u32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, t, $1; }")
LOG2_ASM = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")
# From the lane of row $2 and of the same columns.
SPREAD_ASM = tl.constexpr(
    "{ .reg .u32 t; mov.u32 t, %laneid; and.b32 t, t, 3; mad.lo.u32 t, $2, 4, t;"
    " shfl.sync.idx.b32 $0, $1, t, 31, 0xffffffff; }"
)
TRANSPOSE_ASM = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


# Twins of the assembly in plain Triton: the pair is the last axis of x


@jit
def _turbo4_code(word, c: tl.constexpr):
    magnitude = (word >> (4 * c)) & 7
    sign = (word >> (8 * (c % 4) + (7 if c < 4 else 3))) & 1
    value = tl.where(
        magnitude < 4, _pick4(magnitude, 1.125, 3.25, 5.5, 8.0), _pick4(magnitude - 4, 11.0, 14.0, 18.0, 24.0)
    )
    return tl.where(sign == 1, -value, value)


@jit
def _turbo3_code(index, signs, word: tl.constexpr, mtile: tl.constexpr, c: tl.constexpr):
    magnitude = (index >> (4 * c + 2 * mtile)) & 3
    sign = (signs >> (8 * (c % 4) + 7 - (2 * (2 * word + mtile) + c // 4))) & 1
    value = _pick4(magnitude, 3.0, 9.0, 16.0, 26.0)
    return tl.where(sign == 1, -value, value)


@jit
def _pick4(i, a, b, c, d):
    return tl.where(i < 2, tl.where(i == 0, a, b), tl.where(i == 2, c, d))


@jit
def _int8_code(word, byte: tl.constexpr):
    return (((word >> (8 * byte)) & 255) - 128).to(tl.float32)


@jit
def pair_of(a, b, like):
    return tl.reshape(tl.join(a, b), like.shape).to(tl.float16)


@jit
def join8(o0, o1, o2, o3, o4, o5, o6, o7):
    """Eight tensors as three new last axes, output bit 2 first, bit 0 last."""
    low = gl.join(gl.join(o0, o4), gl.join(o2, o6))
    high = gl.join(gl.join(o1, o5), gl.join(o3, o7))
    return gl.join(low, high)


@jit
def unpack_turbo4(x, table, HARDWARE: tl.constexpr):
    """Words [..., 2] (a pair is two registers in a row) -> fp16 [..., 2 (half), 2 (word), 2, 2 (code // 2)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        values = join8(
            pair_of(_turbo4_code(w0, 0), _turbo4_code(w0, 1), x),
            pair_of(_turbo4_code(w0, 2), _turbo4_code(w0, 3), x),
            pair_of(_turbo4_code(w0, 4), _turbo4_code(w0, 5), x),
            pair_of(_turbo4_code(w0, 6), _turbo4_code(w0, 7), x),
            pair_of(_turbo4_code(w1, 0), _turbo4_code(w1, 1), x),
            pair_of(_turbo4_code(w1, 2), _turbo4_code(w1, 3), x),
            pair_of(_turbo4_code(w1, 4), _turbo4_code(w1, 5), x),
            pair_of(_turbo4_code(w1, 6), _turbo4_code(w1, 7), x),
        )
    else:
        asm: gl.constexpr = TURBO4_ASM if HARDWARE else TURBO4_ASM_SM80
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            asm,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [x, table],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
        values = join8(o0, o1, o2, o3, o4, o5, o6, o7)
    return values


@jit
def unpack_turbo3(x, signs, table, HARDWARE: tl.constexpr):
    """Index words and sign words [..., 2] -> fp16 [..., 2 (half), 2 (word), 2 (m-tile), 2, 2 (code // 2)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        s, _ = tl.split(signs)
        low = join8(
            pair_of(_turbo3_code(w0, s, 0, 0, 0), _turbo3_code(w0, s, 0, 0, 1), x),
            pair_of(_turbo3_code(w0, s, 0, 0, 2), _turbo3_code(w0, s, 0, 0, 3), x),
            pair_of(_turbo3_code(w0, s, 0, 0, 4), _turbo3_code(w0, s, 0, 0, 5), x),
            pair_of(_turbo3_code(w0, s, 0, 0, 6), _turbo3_code(w0, s, 0, 0, 7), x),
            pair_of(_turbo3_code(w0, s, 0, 1, 0), _turbo3_code(w0, s, 0, 1, 1), x),
            pair_of(_turbo3_code(w0, s, 0, 1, 2), _turbo3_code(w0, s, 0, 1, 3), x),
            pair_of(_turbo3_code(w0, s, 0, 1, 4), _turbo3_code(w0, s, 0, 1, 5), x),
            pair_of(_turbo3_code(w0, s, 0, 1, 6), _turbo3_code(w0, s, 0, 1, 7), x),
        )
        high = join8(
            pair_of(_turbo3_code(w1, s, 1, 0, 0), _turbo3_code(w1, s, 1, 0, 1), x),
            pair_of(_turbo3_code(w1, s, 1, 0, 2), _turbo3_code(w1, s, 1, 0, 3), x),
            pair_of(_turbo3_code(w1, s, 1, 0, 4), _turbo3_code(w1, s, 1, 0, 5), x),
            pair_of(_turbo3_code(w1, s, 1, 0, 6), _turbo3_code(w1, s, 1, 0, 7), x),
            pair_of(_turbo3_code(w1, s, 1, 1, 0), _turbo3_code(w1, s, 1, 1, 1), x),
            pair_of(_turbo3_code(w1, s, 1, 1, 2), _turbo3_code(w1, s, 1, 1, 3), x),
            pair_of(_turbo3_code(w1, s, 1, 1, 4), _turbo3_code(w1, s, 1, 1, 5), x),
            pair_of(_turbo3_code(w1, s, 1, 1, 6), _turbo3_code(w1, s, 1, 1, 7), x),
        )
    else:
        asm: gl.constexpr = TURBO3_ASM if HARDWARE else TURBO3_ASM_SM80
        o = gl.inline_asm_elementwise(
            asm,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [x, signs, table],
            dtype=(gl.float16,) * 16,
            is_pure=True,
            pack=2,
        )
        low = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
        high = join8(o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15])
    return gl.join(low, high)


@jit
def unpack_int8(x):
    """Words [..., 2] -> fp16 [..., 2 (half), 2 (word), 2 (byte // 2)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        o0 = pair_of(_int8_code(w0, 0), _int8_code(w0, 1), x)
        o1 = pair_of(_int8_code(w0, 2), _int8_code(w0, 3), x)
        o2 = pair_of(_int8_code(w1, 0), _int8_code(w1, 1), x)
        o3 = pair_of(_int8_code(w1, 2), _int8_code(w1, 3), x)
    else:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(
            INT8_ASM, "=&r,=&r,=&r,=&r,r,r", [x], dtype=(gl.float16,) * 4, is_pure=True, pack=2
        )
    return gl.join(gl.join(o0, o2), gl.join(o1, o3))


@jit
def _half(word, i: tl.constexpr):
    return (word >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True)


@jit
def halves(x):
    """Words [..., 2] of two fp16 values each -> fp16 [..., 2 (half), 2 (word)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        o0, o1 = pair_of(_half(w0, 0), _half(w0, 1), x), pair_of(_half(w1, 0), _half(w1, 1), x)
    else:
        o0, o1 = gl.inline_asm_elementwise(
            HALVES_ASM, "=&r,=&r,r,r", [x], dtype=(gl.float16,) * 2, is_pure=True, pack=2
        )
    return gl.join(o0, o1)


@jit
def transpose_blocks(p):
    """16-bit [W, T, N]: each 8×8 block of the last two axes transposed, across the warp's lanes."""
    if INTERPRET:
        shape: tl.constexpr = p.shape
        blocks = tl.reshape(p, [shape[0], shape[1] // 8, 8, shape[2] // 8, 8])
        out = tl.reshape(tl.permute(blocks, [0, 1, 4, 3, 2]), shape)
    else:
        out = gl.inline_asm_elementwise(TRANSPOSE_ASM, "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2)
    return out


@jit
def spread_row(x, n):
    """[W, 8, N] in accumulator layout (lane g holds row g): row n in the place of every row."""
    if INTERPRET:
        shape: tl.constexpr = x.shape
        row = tl.arange(0, 8)[None, :, None]
        y = tl.broadcast_to(tl.sum(tl.where(row == n, x, 0.0), 1)[:, None, :], shape)
    else:
        y = gl.inline_asm_elementwise(SPREAD_ASM, "=r,r,r", [x, n], dtype=gl.float32, is_pure=True, pack=1)
    return y


@jit
def log2_approximate(x):
    """log2 of normal float32 numbers in one instruction (absolute error 2^-22); `log2` is a polynomial."""
    if INTERPRET:
        y = tl.log2(x)
    else:
        y = gl.inline_asm_elementwise(LOG2_ASM, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return y


@jit
def hold(x):
    """x itself, kept in a register."""
    if INTERPRET:
        y = x
    else:
        y = gl.inline_asm_elementwise(HOLD_ASM, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)
    return y
