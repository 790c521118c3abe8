"""Decode attention over pages: the host side of `kernels/decode.py` and `combine.py`."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2, sqrt

import torch
import triton

from kvcore.backends.cuda import gpu
from kvcore.backends.cuda.kernels.combine import combine_splits
from kvcore.backends.cuda.kernels.decode import attend_splits
from kvcore.backends.cuda.kernels.fragments import TURBO3_MAGNITUDES, TURBO4_LOW
from kvcore.backends.cuda.kernels.hadamard import packed_signs
from kvcore.backends.cuda.kernels.rotate import matrix_terms, sum_of_terms
from kvcore.backends.cuda.native import PAGE
from kvcore.layout import Layout, hadamard_dct, rotation_signs

MAX_PROGRAMS = 128  # of a row: the merge holds the result of each in registers, and up to four more apart
LONG = 768  # tokens of a program from which shared memory pays for what it costs the kernels around
NO_WINDOW = 1 << 30
MERGE_SLICE, MERGE_WARPS = 32, 4  # dimensions of a merging program, its warps
REGISTERS = 216  # of a thread: with eight warps on a multiprocessor, the merging program still fits beside them
_TABLES = {"raw": 0, "int8": 0, "turbo4": TURBO4_LOW, "turbo3": TURBO3_MAGNITUDES}


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's cache on the device, in the page layout of docs/cuda.md.

    k, v              folded pages: int32 words [pages, Hkv, ...], or the compute dtype for a raw codec
    k_scale, v_scale  fp16 [pages, Hkv, 128]
    raw_k, raw_v      raw pages [raw pages, Hkv, 128, D]: sinks, the raw tail, everything in fp16 mode
    table, raw_table  int32 [sequences, pages]: page numbers of a sequence's folded pages and of its raw tail
    ranges, raw_ranges  int32 of the same shapes: the live rows of each page, first | end << 16; nobody sees the others
                        (rows that sinks shadow, rows that were trimmed)
    sink_page, sinks, folded, length   int32 [sequences]: the raw page of the sinks and how many (at most 16) it holds,
                                       folded slots, all slots (those of the raw tail are length - folded), dead ones
                                       included
    k_center          fp16 [pages, Hkv, D] in K's rotated basis, where its codec is centred
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    raw_k: torch.Tensor
    raw_v: torch.Tensor
    table: torch.Tensor
    raw_table: torch.Tensor
    ranges: torch.Tensor
    raw_ranges: torch.Tensor
    sink_page: torch.Tensor
    sinks: torch.Tensor
    folded: torch.Tensor
    length: torch.Tensor
    k_center: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class VRotation:
    """R_V of one layer on the device, for rows multiplied from the left: x @ matrix is R_Vᵀ x.

    matrix  float32 [D, D]
    terms   bf16 [terms, D, D], whose sum is √D · matrix to float32's precision
    signs   int32 [8], `hadamard.packed_signs`; None where D is no power of two
    """

    matrix: torch.Tensor
    terms: torch.Tensor
    signs: torch.Tensor | None

    @classmethod
    def create(cls, layer: int, head_dim: int, device: torch.device | str) -> VRotation:
        signs = torch.from_numpy(rotation_signs(layer, "v", head_dim).copy())
        matrix = torch.from_numpy(hadamard_dct(head_dim).copy()) * signs
        terms = sum_of_terms(matrix * head_dim**0.5, torch.bfloat16, matrix_terms(head_dim, torch.bfloat16))
        packed = packed_signs(layer, head_dim).to(device) if head_dim & (head_dim - 1) == 0 else None
        return cls(matrix.to(device), terms.to(device), packed)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch parameters of `attend_splits`.

    warps         of a program
    programs      of a (sequence, KV head)
    raw_programs  how many of them take raw rows at least; 0: each takes both kinds, where they meet
    columns       of a tile: query rows times heads of the group
    tiles         16-token tiles of a warp, for folded pages
    ring_tiles    the same where a program has ``ring_from`` rows or more, which then go through shared memory; 0: never
    raw_tiles     the same for raw rows
    """

    warps: int
    programs: int
    raw_programs: int
    columns: int
    tiles: int
    ring_tiles: int = 0
    ring_from: int = 192
    raw_tiles: int = 1


def choose_config(layout: Layout, rows: int, columns: int, processors: int, tokens: int) -> LaunchConfig:
    """From the number of (sequence, KV head) rows, query columns and the most tokens that a sequence may have; measured
    on an H200, see docs/performance.md.

    Many small programs. With few rows MAX_PROGRAMS of one warp would leave most of the GPU idle: they have two, except
    where tiles are wide. turbo4 computes most for a byte: long programs of it take shared memory, which leaves
    registers for larger tiles. A kernel that may do so overlaps less with those around it, so tables must be long.
    """
    wide, few, fewest = layout.k_dim > 128 or columns > 8, rows < 64, rows < 4
    raw_parts = (not layout.k.quantized) + (not layout.v.quantized)
    small = layout.k_dim <= 64
    turbo4 = layout.k.codebook and layout.v.name == "turbo4"
    warps, tiles = 1, 2
    if raw_parts == 2:
        warps, tiles = 2 if fewest else 1, 1
    elif wide:
        warps, tiles = 2 if raw_parts else 1, 1
    elif fewest:
        warps, tiles = 2, 4 if small else 2
    elif turbo4:
        tiles = 4 if small else 2
    elif few:
        tiles = 1 if raw_parts and layout.v.name == "turbo4" and not small else 2
    elif small or (layout.k.quantized and layout.v.codebook):
        tiles = 4
    width = 8 if columns <= 8 else 16
    programs = _best_programs(rows, processors * 8 // warps)
    if raw_parts == 2:
        raw_tiles = 2 if small and programs <= 24 else 1
        return LaunchConfig(warps, min(programs, MAX_PROGRAMS), 0, width, tiles, raw_tiles=raw_tiles)
    # Short programs have rows of one kind: a second chain of loads would show.
    raw_programs = 0 if programs <= 24 else 4 if programs >= MAX_PROGRAMS + 4 else 1
    programs = min(programs, MAX_PROGRAMS + raw_programs)
    ring = turbo4 and not (wide or small or fewest) and tokens >= LONG * programs
    ring_tiles = 4 if ring else 0
    return LaunchConfig(warps, programs, raw_programs, width, tiles, ring_tiles)


def _best_programs(rows: int, resident: int) -> int:
    """Of a row, on a GPU that holds ``resident`` programs: what fills it once, or twice where once leaves much idle."""
    once, twice = (min(MAX_PROGRAMS, waves * resident // rows) for waves in (1, 2))
    return max(1, twice if twice > 2.1 * once else resident // rows)


def attend_pages(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    pages: Pages,
    layout: Layout,
    *,
    query_rows: int = 1,
    v_rotation: VRotation | None,
    scale: float | None = None,
    window: int | None = None,
    config: LaunchConfig | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of the newest n rows' queries over a paged cache.

    q          [sequences, Hkv, n · group, D] in the raw rows' dtype: query row major, then the head of the group
    q_rotated  the same after R_K, fp16 (q itself where K is not rotated)
    v_rotation None where V is not rotated
    Returns [sequences, Hkv, n · group, D] in ``out_dtype``, by default q's. Enqueues two launches and never waits for
    the device.
    """
    sequences, kv_heads, columns, dim = q.shape
    rows = sequences * kv_heads
    group = columns // query_rows
    tokens = pages.table.shape[1] * PAGE
    if config is None:
        config = choose_config(layout, rows, columns, gpu.processors(q.device), tokens)
    else:
        _check(config, layout)
    # See `attend_splits`: where a program may take rows of both kinds, there is a result more.
    results = config.programs + (layout.quantized and not config.raw_programs)
    apart = (config.raw_programs or 1) if layout.quantized else 0  # in a merge, which holds a power of two beside them
    blocks = -(-columns // config.columns)
    partial = torch.empty(rows * blocks * results, config.columns, dim, device=q.device, dtype=torch.float32)
    peak = torch.empty(rows * blocks * results, config.columns, device=q.device, dtype=torch.float32)
    total = torch.empty_like(peak)
    out = torch.empty_like(q, dtype=out_dtype)
    signs = None if v_rotation is None else v_rotation.signs
    terms = v_rotation.terms if v_rotation is not None and signs is None else None
    center = pages.k_scale
    if layout.k.centred:
        assert pages.k_center is not None
        center = pages.k_center.view(torch.int32)
    overlap = gpu.overlap_options(q.device)
    attend_splits[(rows * blocks, config.programs)](
        q_rotated, q, pages.k, pages.v, pages.k_scale, pages.v_scale,
        center, pages.raw_k, pages.raw_v,
        pages.table, pages.raw_table, pages.ranges, pages.raw_ranges, pages.sink_page, pages.sinks, pages.folded,
        pages.length, pages.length if signs is None else signs, partial, peak, total,
        (scale or 1 / sqrt(dim)) * log2(e), pages.table.shape[1], pages.raw_table.shape[1],
        window or NO_WINDOW, _TABLES[layout.k.name], _TABLES[layout.v.name],
        KC=layout.k.name, VC=layout.v.name, D=dim, HKV=kv_heads, GROUP=group, COLUMNS=columns, NP=config.columns,
        W=config.warps, MT=config.tiles, RING_MT=config.ring_tiles, RING_FROM=config.ring_from,
        RAW_MT=config.raw_tiles, RAW_PROGRAMS=config.raw_programs,
        CAUSAL=query_rows > 1 or window is not None, HARDWARE=gpu.capability(q.device) >= (8, 9),
        UNDO=signs is not None, MARK=terms is not None, CENTRED=layout.k.centred,
        num_warps=config.warps, maxnreg=REGISTERS, **overlap,
    )  # fmt: skip
    padded = triton.next_power_of_2(dim)
    together = _columns_together(rows, columns, results)
    combine_splits[(rows * columns // together, triton.cdiv(padded, MERGE_SLICE))](
        partial, peak, total, peak if terms is None else terms, out, results,
        COLUMNS=columns, NP=config.columns, D=dim, DP=padded, APART=apart,
        RESULTS=triton.next_power_of_2(results - apart), TOGETHER=together,
        SLICE=MERGE_SLICE, TERMS=0 if terms is None else len(terms), NORM=dim**-0.5,
        num_warps=MERGE_WARPS, **overlap,
    )  # fmt: skip
    return out


def _check(config: LaunchConfig, layout: Layout) -> None:
    if not layout.quantized:
        return
    if config.raw_programs not in (0, 1, 2, 4) or config.raw_programs >= config.programs:
        raise ValueError(
            f"{config.raw_programs} of {config.programs} programs for raw rows: give 0, 1, 2 or 4, and fewer"
        )
    if config.ring_tiles and not (layout.k.quantized and layout.v.name in ("int8", "turbo4")):
        raise ValueError(f"{layout.k.name} and {layout.v.name} do not go through shared memory: set ring_tiles to 0")


def _columns_together(rows: int, columns: int, results: int) -> int:
    """Columns that one merging program writes: more than one only where that leaves enough programs."""
    together = 1
    while columns % (2 * together) == 0 and rows * columns // together > 256 and results * together < 32:
        together *= 2
    return min(together, 16)
