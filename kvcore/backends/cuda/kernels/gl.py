"""Gluon, or its meaning in Triton's interpreter.

The kernels are written in Gluon: Triton with explicit register layouts. The interpreter has no registers, so there a
layout is nothing, a conversion between layouts is the identity and a matrix product is a product. With
TRITON_INTERPRET=1 this module provides exactly that, and the same kernel bodies run on CPU tensors.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


class _Interpreted:
    """`gluon.language` for the interpreter: layout arguments fall away, the rest is `triton.language`.

    Names are looked up at each use, because the interpreter replaces Triton's builtins while a kernel runs.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Any:
        return tl.arange(start, end)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    @staticmethod
    def zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, 0, dtype)

    @staticmethod
    def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return value

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Any, layout: Any = None) -> _Ring:
        return _Ring(int(shape[0]))

    @staticmethod
    def _no_layout(*_: Any) -> None:
        return None

    SliceLayout = BlockedLayout = NVMMADistributedLayout = DotOperandLayout = DistributedLinearLayout = _no_layout
    SwizzledSharedLayout = _no_layout


class _Slot:
    """One tile of shared memory; unwritten it holds nothing."""

    tile: Any = None

    def load(self, layout: Any = None) -> Any:
        return self.tile


class _Ring:
    def __init__(self, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]

    def index(self, slot: Any) -> _Slot:
        return self._slots[_interpreted_int(slot)]


def _interpreted_copy(slot: _Slot, pointers: Any, mask: Any = None) -> None:
    slot.tile = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


def _interpreted_mma(a: Any, b: Any, acc: Any) -> Any:
    return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


def _interpreted_int(x: Any) -> int:
    return x if isinstance(x, int) else int(x.handle.data.reshape(-1)[0])


@gluon.jit
def _bound(x):
    return x


@gluon.jit
def _wait_for_previous():
    tl.extra.cuda.gdc_wait()


@gluon.jit
def _let_next_start():
    tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _prefetch(at):
    gluon_language.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=gluon_language.int32, is_pure=False, pack=1
    )


def _nothing(*_: Any) -> None:
    return None


gl: Any
jit: Any
mma: Any
# A loop bound that is a scalar on the device: the interpreter's own conversion fails with NumPy 2.4 and newer.
loop_bound: Any
# Programmatic dependent launch (sm_90 and newer): a kernel starts while the one before it ends, and waits for its data.
wait_for_previous: Any
let_next_start: Any
# Asks for the lines at some addresses to come to the L2 cache.
prefetch: Any
# Copies from global to shared memory that run beside the program: `copy` a tile, `commit` a group, `wait` until only
# the newest n groups are under way. What a mask leaves out becomes zero.
copy: Any
commit: Any
wait: Any
if INTERPRET.value:
    gl, jit, mma, loop_bound = _Interpreted(), triton.jit, _interpreted_mma, _interpreted_int
    wait_for_previous = let_next_start = commit = wait = prefetch = _nothing
    copy = _interpreted_copy
else:
    gl, jit, mma, loop_bound = gluon_language, gluon.jit, mma_v2, _bound
    wait_for_previous, let_next_start, prefetch = _wait_for_previous, _let_next_start, _prefetch
    renamed = "async_load" in async_copy.__all__  # by Triton 3.9 at the latest
    copy = async_copy.async_load if renamed else async_copy.async_copy_global_to_shared
    commit, wait = async_copy.commit_group, async_copy.wait_group


def constexpr_function(fn: Any) -> Any:
    """A host function that a kernel calls while it is compiled, on plain Python values."""
    if not INTERPRET.value:
        return gluon.constexpr_function(fn)
    return lambda *args: fn(*(x.value if isinstance(x, tl.constexpr) else x for x in args))
