"""Decode attention over pages: the host side of `kernels/decode.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2, sqrt

import torch

from kvcore.backends.cuda.kernels.decode import attend_splits, combine_splits
from kvcore.backends.cuda.kernels.fragments import TURBO3_MAGNITUDES, TURBO4_LOW
from kvcore.layout import Layout, hadamard_dct, rotation_signs

MAX_SPLITS = 128  # the combining program holds one row of each in registers
NO_WINDOW = 1 << 30
_TABLES = {"raw": 0, "int8": 0, "turbo4": TURBO4_LOW, "turbo3": TURBO3_MAGNITUDES}


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's cache on the device, in the page layout of docs/cuda.md.

    k, v              folded pages: int32 words [pages, Hkv, ...], or the compute dtype for a raw codec
    k_scale, v_scale  fp16 [pages, Hkv, 128]
    raw_k, raw_v      raw pages [raw pages, Hkv, 128, D]: sinks, the raw tail, everything in fp16 mode
    table, raw_table  int32 [sequences, pages]: page numbers of a sequence's folded pages and of its raw tail
    sink_page, sinks, folded, length   int32 [sequences]: the raw page of the sinks and how many it holds, folded rows,
                                       all rows (the raw tail is length - folded)
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    raw_k: torch.Tensor
    raw_v: torch.Tensor
    table: torch.Tensor
    raw_table: torch.Tensor
    sink_page: torch.Tensor
    sinks: torch.Tensor
    folded: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True, slots=True)
class VRotation:
    """R_V = (outer ⊗ inner)·diag(signs) on the device, float32: outer [DO, DO], inner [DI, DI], signs [D]."""

    outer: torch.Tensor
    inner: torch.Tensor
    signs: torch.Tensor

    @classmethod
    def create(cls, layer: int, head_dim: int, device: torch.device | str) -> VRotation:
        power = head_dim & -head_dim
        outer = min(16, power) if head_dim == power else power
        inner = head_dim // outer
        matrices = [torch.from_numpy(hadamard_dct(n).copy()).to(device) for n in (outer, inner)]
        signs = torch.from_numpy(rotation_signs(layer, "v", head_dim).copy()).to(device)
        return cls(matrices[0], matrices[1], signs)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch parameters: warps of a program, 16-token tiles of a warp for folded pages (``tiles``) and for raw rows,
    programs per (sequence, KV head) for each, and tile columns."""

    warps: int
    tiles: int
    raw_tiles: int
    splits: int
    raw_splits: int
    columns: int


def choose_config(layout: Layout, rows: int, columns: int, processors: int) -> LaunchConfig:
    """From the number of (sequence, KV head) rows and query columns; measured on an H200, see docs/performance.md.

    Register pressure decides: an accumulator holds D / 16 · columns / 8 fragments, a tile of K and V as much again.
    """
    wide = layout.k_dim > 128 or columns > 8
    raw_parts = (not layout.k.quantized) + (not layout.v.quantized)
    if raw_parts == 2:
        warps, tiles, resident = 4, 1, 2
    elif raw_parts == 1:
        warps, tiles, resident = 2, 1 if wide else 2, 4 if rows >= 64 else 3
    elif wide:
        warps, tiles, resident = 1, 1, 8
    else:
        warps, tiles, resident = (1, 4, 8) if layout.k.codebook else (2, 4, 4)
    total = max(1, min(MAX_SPLITS, processors * resident // rows))
    width = 8 if columns <= 8 else 16
    if raw_parts == 2:
        return LaunchConfig(warps, 1, 1, 0, total, width)
    raw_splits = min(4, max(1, total // 4))
    return LaunchConfig(warps, tiles, 1, max(1, total - raw_splits) if rows < 64 else total, raw_splits, width)


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
    config = config or choose_config(layout, rows, columns, _processors(q.device))
    splits = config.raw_splits + config.splits
    blocks = -(-columns // config.columns)
    partial = torch.empty(rows * blocks * splits, config.columns, dim, device=q.device, dtype=torch.float32)
    peak = torch.empty(rows * blocks * splits, config.columns, device=q.device, dtype=torch.float32)
    total = torch.empty_like(peak)
    out = torch.empty_like(q, dtype=out_dtype)
    attend_splits[(rows * blocks, splits)](
        q_rotated, q, pages.k, pages.v, pages.k_scale, pages.v_scale, pages.raw_k, pages.raw_v,
        pages.table, pages.raw_table, pages.sink_page, pages.sinks, pages.folded, pages.length, partial, peak, total,
        (scale or 1 / sqrt(dim)) * log2(e), pages.table.shape[1], pages.raw_table.shape[1],
        window or NO_WINDOW, _TABLES[layout.k.name], _TABLES[layout.v.name],
        KC=layout.k.name, VC=layout.v.name, D=dim, HKV=kv_heads, GROUP=group, COLUMNS=columns, NP=config.columns,
        W=config.warps, MT=config.tiles, RAW_MT=config.raw_tiles, RAW_SPLITS=config.raw_splits,
        CAUSAL=query_rows > 1 or window is not None, HARDWARE=_converts_fp8(q.device), num_warps=config.warps,
    )  # fmt: skip
    outer, inner = (len(v_rotation.outer), len(v_rotation.inner)) if v_rotation else (1, dim)
    inner_padded = 1 << (inner - 1).bit_length()
    rotation = (v_rotation.outer, v_rotation.inner, v_rotation.signs) if v_rotation else (peak, peak, peak)
    combine_splits[(rows * columns,)](
        partial, peak, total, *rotation, out,
        splits=splits, COLUMNS=columns, NP=config.columns, D=dim, DP=outer * inner_padded, RAW_SPLITS=config.raw_splits,
        ROTATED=v_rotation is not None, DO=outer, DI=inner, DIP=inner_padded, SB=1 << (splits - 1).bit_length(),
        num_warps=8 if splits > 16 else 4,
    )  # fmt: skip
    return out


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=8)
def _converts_fp8(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 to fp16 in one instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
