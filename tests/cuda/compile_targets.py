"""Compile kernels for a GPU that need not be there: `python compile_targets.py ARCH`, without TRITON_INTERPRET.

The launchers run as they are, on CPU tensors; a driver that knows only its target takes the place of Triton's, and
kernels are compiled instead of launched. Prints one JSON object per kernel: name, case, bytes of shared memory, and how
many of its sums Triton 3.6 would get wrong.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from paging import int32, storage
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kvcore.backends.cuda.gpu
from kvcore.backends.cuda.attend import Pages, VRotation, attend_pages, choose_config
from kvcore.backends.cuda.kernels.append import append, rope_angles
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.kernels.gate import gate_rows
from kvcore.backends.cuda.kernels.gather import Source, gather
from kvcore.backends.cuda.kernels.pick import likeliest
from kvcore.backends.cuda.kernels.rotate import rotation_matrices
from kvcore.backends.cuda.linear import WeightTiles, linear_tiles
from kvcore.backends.cuda.linear_config import RowsConfig
from kvcore.backends.cuda.linear_config import choose_config as choose_linear
from kvcore.layout import CODECS
from kvcore.modes import MODES

PROCESSORS = 132  # of an H200
# Each codec on each side, each way to rotate (one term, two, three), each tile shape.
FOLDS = [
    *((mode, 128, "float16") for mode in ("int8", "int8-turbo4", "turbo4", "turbo4-asym", "turbo3-asym", "fp16")),
    *(("turbo4", dim, "bfloat16") for dim in (64, 80, 96, 128, 256)),
    *(("int8", dim, "bfloat16") for dim in (80, 256)),
    *((mode, dim, "float16") for mode in ("int8", "turbo4") for dim in (16, 64)),
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
    (16, "float16", 1, 2, True, True),
]
# mode, head_dim, dtype of raw rows, whether the pages are folded (else: raw ones of that mode)
GATHERS = [
    *((mode, 128, "float16", True) for mode in ("int8", "int8-turbo4", "turbo4", "turbo4-asym", "turbo3-asym")),
    *(("turbo4", dim, "bfloat16", True) for dim in (16, 64, 80, 96, 256)),
    *(("int8", dim, "bfloat16", True) for dim in (80, 256)),
    ("turbo3-asym", 192, "bfloat16", True),
    *(("fp16", dim, dtype, False) for dim in (80, 128, 256) for dtype in ("bfloat16", "float32")),
]
# mode, head_dim, dtype of raw rows, group, query rows, (sequence, KV head) rows, tokens of a table: each pair of codecs
# in the tile shapes that `choose_config` takes for head size 128, then the other head sizes, ways to undo V's rotation
# and column counts.
ATTENDS = [
    *(
        (mode, 128, "float16", 4, 1, rows)
        for mode in ("fp16", "int8", "int8-turbo4", "turbo4", "turbo4-asym", "turbo3-asym")
        for rows in (2, 8, 128)
    ),
    *((mode, 128, "bfloat16", 4, 1, 8) for mode in ("fp16", "int8", "turbo4", "turbo3-asym")),
    *(("turbo4", dim, "float16", 3, 1, 8) for dim in (16, 32, 64, 80, 96, 256)),
    ("int8", 16, "bfloat16", 3, 1, 8),
    ("fp16", 16, "float16", 3, 1, 8),
    *((mode, 128, "float16", 4, 1, 32) for mode in ("turbo4", "int8", "int8-turbo4", "turbo4-asym", "turbo3-asym")),
    *(("turbo4", 128, "float16", 4, 1, rows, tokens) for rows, tokens in ((8, 131072), (32, 8192), (128, 4096))),
    *(("int8", 64, "float16", 3, 1, rows) for rows in (3, 192)),
    *((mode, 64, "float16", 3, 1, rows) for mode in ("turbo4-asym", "fp16") for rows in (8, 192)),
    *(("turbo4", dim, "float16", 3, 1, 128) for dim in (64, 80)),
    *(("int8-turbo4", dim, "bfloat16", 3, 1, 8) for dim in (64, 80, 96, 256)),
    *(("turbo4-asym", dim, "bfloat16", 1, 1, 8) for dim in (80, 256)),
    ("turbo3-asym", 256, "float16", 1, 1, 8),
    *(("fp16", 256, "bfloat16", 7, 1, rows) for rows in (2, 8)),
    ("turbo4", 128, "float16", 4, 4, 8),
    ("int8", 128, "bfloat16", 16, 16, 8),
    ("fp16", 64, "float16", 8, 2, 8),
]
# rows, bits, group, dtype, normed and added to, gated, dtype of scales where it is another
LINEARS = [
    *((rows, 4, group, "float16", False, False) for rows in (1, 16) for group in (32, 64, 128)),
    *((1, bits, 64, "float16", normed, False) for bits in (4, 8) for normed in (False, True)),
    (1, 4, 64, "float16", True, True),
    (16, 4, 64, "bfloat16", True, True),
    (1, 4, 64, "bfloat16", True, False),
    (1, 8, 64, "bfloat16", True, False),
    *((64, 4, group, "float16", False, False) for group in (32, 64, 128)),
    *((64, bits, 64, "bfloat16", True, gated) for bits in (4, 8) for gated in (False, True)),
    (64, 8, 32, "float16", True, True),
    *((64, bits, 64, "bfloat16", False, False, "float16") for bits in (4, 8)),
    *(
        (rows, 16, 64, dtype, True, gated)
        for rows in (1, 16, 64)
        for dtype in ("float16", "bfloat16")
        for gated in (False, True)
    ),
]


REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d).*?\}\) : \(tensor<[^,]+, (#[^()]*)>\) ->', re.DOTALL)


def split_sums(ttgir: str) -> int:
    """Reductions along an axis that a linear layout has in both lanes and warps, or in lanes that are no neighbours."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.linear<(.*)>", ttgir, re.MULTILINE))
    found = REDUCTION.findall(ttgir)
    assert len(found) == ttgir.count('"tt.reduce"(')
    return sum(
        _is_split(layouts[name], int(axis), [int(dim) for dim in re.findall(r"dim = (\d)", layout)])
        for axis, layout in found
        for name in re.findall(r"#\w+\b(?!\.)", layout)
        if name in layouts
    )


def _is_split(linear: str, axis: int, sliced: list[int]) -> bool:
    for dim in sliced:
        axis += axis >= dim
    lane, warp = (json.loads(re.search(rf"{part} = (\[.*?\])(?:, \w+ =|\}})", linear)[1]) for part in ("lane", "warp"))
    lanes = [i for i, basis in enumerate(lane) if basis[axis]]
    return bool(lanes) and (any(basis[axis] for basis in warp) or lanes[-1] - lanes[0] >= len(lanes))


# bits, rows, tiles, chunks, normed: each launch shape that `linear_config.choose_config` takes
LINEAR_SHAPES = [
    (bits, rows, tiles, chunks, normed)
    for bits in (4, 8, 16)
    for rows in (1, 2, 16, 32, 64)
    for tiles, chunks in ((8016, 64), (1792, 64), (384, 64), (256, 64), (256, 224))
    for normed in (True, False)
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
        source = Source(planes["k"], planes["v"], *scales, layout.k, layout.v, 1 / 16, planes.get("k_center"))
    pieces = torch.zeros(1, 2, 5, dtype=torch.int32)
    out = torch.float16 if folded else k.dtype
    for positions in (False, True):
        gather(source, pages.table, pages.lengths, pieces, 256, dim, out, positions=positions)


def attend(mode: str, dim: int, dtype: str, group: int, n: int, rows: int, tokens: int = 32768) -> None:
    pages = storage(mode, dim, [256], "cpu", dtype=dtype, heads=1)
    layout, planes = MODES[mode].layout(dim), {name: x[0] for name, x in pages.planes.items()}
    scales = [planes.get(f"{part}_scale", planes[part]) for part in "kv"]
    tables = (pages.table, pages.raw_table, pages.table, pages.raw_table)
    counts = (pages.lengths, pages.lengths, pages.folded, pages.lengths)
    q = torch.empty(1, 1, n * group, dim, dtype=getattr(torch, dtype))
    attend_pages(
        q,
        q.half() if layout.k.quantized else q,
        Pages(
            *(planes["k"], planes["v"], *scales, pages.raw["k"][0], pages.raw["v"][0], *tables, *counts),
            k_center=planes.get("k_center"),
        ),
        layout,
        query_rows=n,
        v_rotation=VRotation.create(0, dim, "cpu") if layout.v.codebook else None,
        config=choose_config(layout, rows, n * group, PROCESSORS, tokens),
    )


def linear(
    rows: int, bits: int, group: int, dtype: str, normed: bool, gated: bool, sides_dtype: str | None = None
) -> None:
    kind, out, inputs = getattr(torch, dtype), 64, 1024
    codes = torch.empty(out // 16, inputs // 64, 32 * bits, dtype=torch.int32)
    sides = torch.empty(out // 16, inputs // group, 8, 4, dtype=getattr(torch, sides_dtype or dtype))
    if bits == 16:
        codes, sides = torch.empty(out // 16, inputs // 64, 1024, dtype=kind), None
    tiles = WeightTiles(codes, sides, kind, out // 2 if gated else out, inputs, bits, group, gated)
    x, y = torch.empty(rows, inputs, dtype=kind), torch.empty(rows, out, dtype=kind)
    bias = torch.empty(out, dtype=kind) if gated else None
    linear_tiles(x, tiles, norm=(x[0], 1e-5) if normed else None, bias=bias, added=y if normed and not gated else None)
    tiles.rows()
    tiles.rows(torch.zeros(1, dtype=torch.int32))


def linear_shapes() -> None:
    """Each launch shape once."""
    done = set()
    for bits, rows, tiles, chunks, normed in LINEAR_SHAPES:
        config = choose_linear(tiles, chunks, bits, rows, normed=normed, processors=PROCESSORS)
        case = bits, max(8, rows), config, normed and isinstance(config, RowsConfig)
        if case not in done:
            done.add(case)
            kind = torch.float16 if bits == 16 else torch.int32
            codes = torch.empty(8, 64, 1024 if bits == 16 else 32 * bits, dtype=kind)
            sides = None if bits == 16 else torch.empty(8, 64, 8, 4, dtype=torch.float16)
            x = torch.empty(rows, 4096, dtype=torch.float16)
            weight = WeightTiles(codes, sides, torch.float16, 128, 4096, bits, 64 if sides is not None else 4096)
            linear_tiles(x, weight, norm=(x[0], 1e-5) if normed else None, config=config)


def small() -> None:
    likeliest(torch.empty(2, 32000))
    gate_rows(torch.empty(2, 4096, dtype=torch.float16))


def main(arch: int) -> None:
    kvcore.backends.cuda.gpu.capability = lambda device: divmod(arch, 10)
    driver.set_active(TargetOnly(arch))
    seen: list[tuple[str, Any]] = []
    compile_instead_of_launch(seen)
    for launch, cases in (
        (fold, FOLDS),
        (append_rows, APPENDS),
        (gather_rows, GATHERS),
        (attend, ATTENDS),
        (linear, LINEARS),
        (linear_shapes, [()]),
        (small, [()]),
    ):
        for case in cases:
            launch(*case)
            for name, kernel in seen:
                assert "cubin" in kernel.asm
                facts = {"shared": kernel.metadata.shared, "split_sums": split_sums(kernel.asm["ttgir"])}
                print(json.dumps({"kernel": name, "case": str(case), **facts}), flush=True)
            seen.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]))
