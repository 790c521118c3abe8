"""Compile kernels for a GPU that need not be there: `python compile_targets.py ARCH`, without TRITON_INTERPRET.

The launchers run as they are, on CPU tensors; a driver that knows only its target takes the place of Triton's, and
kernels are compiled instead of launched. Prints one JSON object per kernel: name, case, bytes of shared memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from paging import int32, storage
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvcore.backends.cuda.kernels.append import append, rope_angles
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.kernels.gather import Source, gather
from kvcore.backends.cuda.kernels.rotate import rotation_matrices
from kvcore.layout import CODECS
from kvcore.modes import MODES

# Each codec on each side, each way to rotate (one term, two, three), each tile shape.
FOLDS = [
    *((mode, 128, "float16") for mode in ("int8", "int8-turbo4", "turbo4", "turbo4-asym", "turbo3-asym", "fp16")),
    *(("turbo4", dim, "bfloat16") for dim in (64, 80, 96, 128, 256)),
    *(("int8", dim, "bfloat16") for dim in (80, 256)),
    ("turbo4", 80, "float16"),
    ("turbo4", 96, "float32"),
    ("turbo4", 256, "float32"),
    ("int8", 256, "float32"),
    ("turbo3-asym", 256, "float32"),
]
# head_dim, dtype, n, group, K rotated, RoPE
APPENDS = [
    (128, "float16", 1, 4, True, True),
    (128, "bfloat16", 1, 4, False, False),
    (128, "float16", 16, 8, True, True),
    (64, "bfloat16", 2048, 3, True, True),
    (80, "bfloat16", 1, 1, True, True),
    (96, "float16", 5, 7, True, True),
    (256, "float32", 512, 2, True, True),
]
# mode, head_dim, dtype of raw rows, whether the pages are folded (else: raw ones of that mode)
GATHERS = [
    *((mode, 128, "float16", True) for mode in ("int8", "int8-turbo4", "turbo4", "turbo4-asym", "turbo3-asym")),
    *(("turbo4", dim, "bfloat16", True) for dim in (64, 80, 96, 256)),
    *(("int8", dim, "bfloat16", True) for dim in (80, 256)),
    ("turbo3-asym", 192, "bfloat16", True),
    *(("fp16", dim, dtype, False) for dim in (80, 128, 256) for dtype in ("bfloat16", "float32")),
]


class TargetOnly:
    """What Triton asks of a driver before it launches."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launch(seen: list[tuple[str, Any]]) -> None:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seen.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only


def fold(mode: str, dim: int, dtype: str) -> None:
    pages = storage(mode, dim, [256], "cpu", dtype=dtype, heads=1)
    tables = (pages.raw_table, pages.table, pages.lengths, pages.folded, int32([256], "cpu"))
    Fold.create(pages.native, 1, "cpu")(pages.raw, pages.planes, *tables)


def append_rows(dim: int, dtype: str, n: int, group: int, rotated: bool, rope: bool) -> None:
    pages = storage("fp16", dim, [n], "cpu", dtype=dtype, heads=1)
    x = torch.empty(1, n, group + 2, dim, dtype=getattr(torch, dtype))
    q, k, v = x.split([group, 1, 1], 2)
    angles = rope_angles(torch.empty(dim // 2, dtype=torch.float64), pages.lengths, n) if rope else None
    q_out = torch.empty(1, 1, n, group, dim, dtype=x.dtype)
    append(
        *(q, k, v, angles, pages.raw["k"][0], pages.raw["v"][0], pages.raw_table, pages.lengths, pages.folded, q_out),
        q_pages=q_out.half(),
        k_matrix=rotation_matrices(1, "k", dim, x.dtype, "cpu")[0] if rotated else None,
        k_out=torch.empty(1, 1, n, dim, dtype=x.dtype),
    )


def gather_rows(mode: str, dim: int, dtype: str, folded: bool) -> None:
    pages = storage(mode, dim, [256], "cpu", dtype=dtype, heads=1)
    layout, raw, planes = MODES[mode].layout(dim), CODECS["raw"], {k: x[0] for k, x in pages.planes.items()}
    k, v = pages.raw["k"][0], pages.raw["v"][0]
    source = Source(k, v, k, v, raw, raw)
    if folded:
        scales = (planes.get("k_scale", planes["v_scale"]), planes["v_scale"])
        source = Source(planes["k"], planes["v"], *scales, layout.k, layout.v, 1 / 16)
    pieces = torch.zeros(1, 2, 5, dtype=torch.int32)
    out = torch.float16 if folded else k.dtype
    for positions in (False, True):
        gather(source, pages.table, pages.lengths, pieces, 256, dim, out, positions=positions)


def main(arch: int) -> None:
    driver.set_active(TargetOnly(arch))
    seen: list[tuple[str, Any]] = []
    compile_instead_of_launch(seen)
    for launch, cases in ((fold, FOLDS), (append_rows, APPENDS), (gather_rows, GATHERS)):
        for case in cases:
            launch(*case)
            for name, kernel in seen:
                assert "cubin" in kernel.asm
                print(json.dumps({"kernel": name, "case": str(case), "shared": kernel.metadata.shared}), flush=True)
            seen.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]))
