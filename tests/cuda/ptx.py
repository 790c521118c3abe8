"""The few PTX instructions of the kernels' inline assembly, on Python integers: what a register holds, 32 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np


def run(asm: str, inputs: Sequence[int], outputs: int, lane: int = 0) -> list[int]:
    """The output registers $0, $1, ... of ``asm`` in a lane, given those from $``outputs`` on."""
    registers: dict[str, int] = {f"${outputs + i}": int(x) & 0xFFFFFFFF for i, x in enumerate(inputs)}
    registers["%laneid"] = lane
    for statement in re.split(r"[;\n]", asm.replace("{ .reg", ".reg")):
        text = statement.strip()
        if text and text not in "{}" and not text.startswith(".reg"):
            _execute(text, registers)
    return [registers[f"${i}"] for i in range(outputs)]


def _execute(text: str, registers: dict[str, int]) -> None:
    name, rest = text.split(None, 1)
    if unpacked := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest):  # a register as two of 16 bits
        low, high, source = unpacked.groups()
        registers[low], registers[high] = registers[source] & 0xFFFF, registers[source] >> 16
        return
    target, *operands = (part.strip() for part in rest.split(","))
    values = [registers[x] if x in registers else int(re.sub("^0f", "0x", x), 0) for x in operands]
    registers[target] = _OPERATIONS[name](*values) & 0xFFFFFFFF


def _halves(dtype: type, work: Callable[..., np.ndarray]) -> Callable[..., int]:
    """An operation on pairs of 16-bit numbers, rounded once."""

    def apply(*values: int) -> int:
        pairs = [np.array([x], np.uint32).view(np.uint16).view(dtype).astype(np.float64) for x in values]
        return int(work(*pairs).astype(np.float32).astype(dtype).view(np.uint16).view(np.uint32)[0])

    return apply


def _saturating_fma(a: int, b: int, c: int) -> int:
    x, y, z = np.array([a, b, c], np.uint32).view(np.float32).astype(np.float64)
    assert np.isfinite([x, y, z]).all()  # others are not what a clip makes of them
    return int(np.clip(x * y + z, 0, 1).astype(np.float32).view(np.uint32))


def _prmt(a: int, b: int, selector: int) -> int:
    pool = (a | b << 32).to_bytes(8, "little")
    picks = [selector >> 4 * i & 15 for i in range(4)]
    taken = [pool[x & 7] if x < 8 else 255 * (pool[x & 7] >> 7) for x in picks]
    return int.from_bytes(bytes(taken), "little")


def _e4m3_pair(x: int) -> int:
    numbers = np.array([x & 255, x >> 8 & 255], np.uint8).view(ml_dtypes.float8_e4m3fn)
    return int(numbers.astype(np.float16).view(np.uint32)[0])


def _lop3(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA  # (a & b) | c
    return a & b | c


_OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shfl.sync.idx.b32": lambda _, source, clamp, members: source & clamp & members,  # the lane it comes from
    "shr.u32": lambda a, n: a >> n,
    "shr.b32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "cvt.rn.f16x2.e4m3x2": _e4m3_pair,
    "sub.f16x2": _halves(np.float16, lambda a, b: a - b),
    "sub.rn.f16x2": _halves(np.float16, lambda a, b: a - b),
    "mul.rn.f16x2": _halves(np.float16, lambda a, b: a * b),
    "fma.rn.f16x2": _halves(np.float16, lambda a, b, c: a * b + c),
    "fma.rn.sat.f32": _saturating_fma,
    "fma.rn.bf16x2": _halves(ml_dtypes.bfloat16, lambda a, b, c: a * b + c),
}
