"""What a step does to a paged cache on CUDA: append in every layer, fold where pages are full, and a trim with sinks.

Append and fold are kernels, in CUDA graphs; a trim is the host's work on its tables (`kvcore.bench.trim`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from kvcore.backends.cuda.block_tables import BlockTables
from kvcore.backends.cuda.kernels.append import append, rope_angles
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.native import PAGE, NativeLayout, to_canonical
from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.cuda.pool import PagePool
from kvcore.bench import trim
from kvcore.bench.timing import interleaved
from kvcore.errors import KvcoreError
from kvcore.layout import Rotation, WindowPolicy
from kvcore.modes import CODEC_FUNCTIONS, MODES, centred_rows

COLUMNS = (
    "mode",
    "kernel",
    "batch",
    "tokens",
    "dtype",
    "us",
    "us_p10",
    "us_p90",
    "tb_per_s",
    "percent_of_copy",
    "us_tables",
    "bytes_copied",
    "check",
)
LAYERS = 32  # of an append's replay, each with pages of its own; a fold takes one layer
FOLDED = 32768  # tokens that a fold quantizes at once
KV_HEADS, GROUP, DIM = 8, 4, 128  # one layer of the llama-3.1-8b shape


class Storage:
    """Pools and tables of ``batch`` sequences with room for ``tokens`` tokens each, in ``layers`` layers."""

    def __init__(
        self,
        mode: str,
        dtype: str,
        device: str,
        *,
        layers: int,
        batch: int,
        tokens: int,
        heads: int = KV_HEADS,
        group: int = GROUP,
        dim: int = DIM,
    ) -> None:
        self.mode, self.dtype, self.device = mode, dtype, device
        self.layers, self.batch, self.tokens = layers, batch, tokens
        self.heads, self.group, self.dim = heads, group, dim
        self.layout = MODES[mode].layout(dim)
        native = NativeLayout(self.layout, dtype)
        count = (-(-tokens // PAGE) + 2) * batch
        self.raw, self.native = (
            PagePool(planes, layers, heads, count, device) for planes in (native.raw_planes, native.planes)
        )
        pages = self.native if self.layout.quantized else None
        self.tables = BlockTables(batch, tokens + PAGE, WindowPolicy(), self.raw, pages, device)
        self.fold = Fold.create(native, layers, device) if self.layout.quantized else None

    def extend(self, count: int) -> None:
        self.tables.extend(dict.fromkeys(range(self.batch), count))
        self.tables.upload()


@dataclass(frozen=True, slots=True)
class Variant:
    """``calls`` launches in a run; bytes that one of them reads and writes; how far off its result is."""

    row: dict[str, Any]
    run: Callable[[], object]
    calls: int
    moved: int
    check: float


def run(
    modes: Sequence[str],
    *,
    dtype: str = "float16",
    batches: Sequence[int] = (1, 16),
    repeats: int = 25,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row per mode and batch for append, one per quantized mode for fold, one per mode for a trim.

    KvcoreError where a result is wrong.
    """
    progress("building")
    with torch.no_grad():
        variants = [copy_variant(), *_variants(modes, dtype, batches)]
        progress(f"timing {len(variants)} variants")
        times = interleaved([variant.run for variant in variants], repeats)
    copy = variants[0].moved / median(times[0])
    rows = [_row(variant, sample, copy) for variant, sample in zip(variants, times, strict=True)]
    del variants
    progress("trims")
    return [*rows, *(trim.row(trim.Trim(mode, dtype, "cuda"), max(repeats, 200)) for mode in modes)]


def _variants(modes: Sequence[str], dtype: str, batches: Sequence[int]) -> Iterator[Variant]:
    for mode in modes:
        for batch in batches:
            yield append_variant(Storage(mode, dtype, "cuda", layers=LAYERS, batch=batch, tokens=2 * PAGE))
        if MODES[mode].quantized:
            yield fold_variant(Storage(mode, dtype, "cuda", layers=1, batch=1, tokens=FOLDED + PAGE))


def _row(variant: Variant, sample: list[float], copy: float) -> dict[str, Any]:
    us = [1e3 * ms / variant.calls for ms in sample]
    deciles, middle = quantiles(us, n=10), median(us)
    rate = variant.moved / middle / 1e6
    return variant.row | {
        "us": middle,
        "us_p10": deciles[0],
        "us_p90": deciles[-1],
        "tb_per_s": rate,
        "percent_of_copy": 100 * rate * 1e9 / copy,
        "check": variant.check,
        "repeats": len(sample),
    }


def copy_variant(size: int = 1 << 30) -> Variant:
    """torch's copy of 1 GiB: what reading and writing memory gives at best."""
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    row = {"mode": "torch", "kernel": "copy", "batch": 1, "tokens": 0, "dtype": "uint8"}
    return Variant(row, lambda: target.copy_(source), 1, 2 * size, 0.0)


def append_variant(storage: Storage) -> Variant:
    """One new token of every sequence in each layer: RoPE, raw rows, both queries."""
    s, dtype = storage, getattr(torch, storage.dtype)
    s.extend(PAGE + 1)
    group = s.group
    x = torch.randn(s.batch, 1, s.heads * (group + 2), s.dim, device=s.device, dtype=dtype)
    q, k, v = x.split([s.heads * group, s.heads, s.heads], 2)
    inv_freq = 500000.0 ** (-torch.arange(0, s.dim, 2, dtype=torch.float64, device=s.device) / s.dim)
    angles = rope_angles(inv_freq, s.tables.positions, 1)
    q_out = torch.empty(s.layers, s.batch, s.heads, 1, group, s.dim, device=s.device, dtype=dtype)
    q_pages = torch.empty_like(q_out, dtype=torch.float16) if s.layout.k.quantized else None
    matrices = None if s.fold is None else s.fold.k_matrix

    def launch() -> None:
        for layer in range(s.layers):
            append(
                *(q, k, v, angles, s.raw.planes["k"][layer], s.raw.planes["v"][layer]),
                *(s.tables.raw_table, s.tables.lengths, s.tables.folded, q_out[layer]),
                q_pages=None if q_pages is None else q_pages[layer],
                k_matrix=None if matrices is None else matrices[layer],
            )

    launch()
    page = s.tables.raw_table[:, 1].long()
    wrong = float((s.raw.planes["v"][-1, page, :, 0] - v[:, 0]).abs().max())
    size = x.element_size() * s.batch * s.heads * s.dim
    moved = size * (2 * (group + 2) + (group if q_pages is not None else 0))
    row = {"mode": s.mode, "kernel": "append", "batch": s.batch, "tokens": 1, "dtype": s.dtype}
    return Variant(row, launch, s.layers, moved, _limited(f"append, {s.mode}", wrong, 0.0))


def fold_variant(storage: Storage) -> Variant:
    """Whole pages of one sequence, as a long prompt completes them."""
    s = storage
    assert s.fold is not None
    fold, pages = s.fold, (s.tokens - PAGE) // PAGE
    for plane in s.raw.planes.values():
        plane.normal_()
    s.extend(s.tokens)
    t = s.tables

    def launch() -> None:
        fold(s.raw.planes, s.native.planes, t.raw_table, t.table, t.lengths, t.folded, t.fold_at, pages=pages)

    launch()
    rows = s.batch * s.heads * s.layers * pages * PAGE
    moved = rows * (s.layout.raw_bytes_per_token(s.dtype) + s.layout.bytes_per_token(s.dtype))
    row = {"mode": s.mode, "kernel": "fold", "batch": s.batch, "tokens": pages * PAGE, "dtype": s.dtype}
    return Variant(row, launch, 1, moved, _limited(f"fold, {s.mode}", _codes_off(s), 1e-3))


def _codes_off(s: Storage) -> float:
    """The share of codes of the first page that differ from the graph operations' (rounding moves a few)."""
    ops, found = TorchOps(s.device), []
    source, target = int(s.tables.raw_table[0, 0]), int(s.tables.table[0, 0])
    for part, codec in (("k", s.layout.k), ("v", s.layout.v)):
        if not codec.quantized:
            continue
        planes = {"codes": s.native.planes[part][0, target], "scale": s.native.planes[f"{part}_scale"][0, target]}
        got = to_canonical(codec, part, planes, s.dim)["codes"]
        rotation = Rotation.create(ops, 0, part, s.dim) if codec.codebook else None
        rows = s.raw.planes[part][0, source][None]
        if codec.centred and rotation is not None:
            rows = centred_rows(ops, rows, s.native.planes["k_center"][0, target][None, :, None], rotation, PAGE)
        want = CODEC_FUNCTIONS[codec.name].encode(ops, rows, rotation)["codes"][0]
        found.append(float((got != want).float().mean()))
    return max(found)


def _limited(what: str, value: float, limit: float) -> float:
    if not value <= limit:
        raise KvcoreError(f"{what}: off by {value:.1e}, more than {limit:.0e}: not timed")
    return value
