"""Decode attention on CUDA, kernel by kernel, beside torch's own: interleaved, L2-cold, checked before it is timed.

Time is that of CUDA graph replays over buffers that together exceed the L2 cache several times. The queries of rotated
modes arrive rotated (in a model the append kernel does that); undoing V's rotation is part of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcore.backends.cuda.attend import LaunchConfig, Pages, VRotation, attend_pages
from kvcore.backends.cuda.native import PAGE, to_native
from kvcore.backends.cuda.ops import TorchOps
from kvcore.bench.shape import Shape
from kvcore.bench.timing import interleaved, timer
from kvcore.errors import KvcoreError
from kvcore.layout import Layout, Rotation
from kvcore.modes import CODEC_FUNCTIONS, MODES, centred_rows, page_centers, plain_centers

COLUMNS = (
    "shape",
    "mode",
    "kernel",
    "window",
    "dtype",
    "us",
    "us_p10",
    "us_p90",
    "speedup",
    "tb_per_s",
    "percent_of_read",
    "error",
)
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to attend: its name for the row, its run over every buffer, the KV bytes of one run, its error."""

    mode: str
    kernel: str
    window: str
    run: Callable[[], object]
    kv_bytes: int
    error: float


def run(
    shapes: Sequence[Shape],
    modes: Sequence[str],
    *,
    dtype: str = "float16",
    windows: Sequence[bool] = (True, False),
    repeats: int = 25,
    config: LaunchConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row per shape, mode and window policy, and one per torch kernel; shapes that do not fit are left out, which
    ``progress`` says. Raises KvcoreError where a kernel's error exceeds its limit: a wrong result is not timed; or
    where nothing fits."""
    ceiling = read_ceiling()
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        try:
            rows += _shape_rows(shape, modes, dtype, windows, repeats, config, ceiling, progress)
        except torch.OutOfMemoryError:
            progress(f"{shape}: left out, its buffers do not fit on this GPU")
        torch.cuda.empty_cache()
    if not rows:
        raise KvcoreError("no shape fits on this GPU: give smaller --shapes")
    return rows


def _shape_rows(
    shape: Shape,
    modes: Sequence[str],
    dtype: str,
    windows: Sequence[bool],
    repeats: int,
    config: LaunchConfig | None,
    ceiling: float,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    progress(f"{shape}: building")
    buffers = _buffer_count(shape, modes)
    with torch.no_grad():
        variants = list(_variants(shape, modes, getattr(torch, dtype), windows, buffers, config))
        progress(f"{shape}: timing {len(variants)} variants over {buffers} buffers")
        times = interleaved([variant.run for variant in variants], repeats)
    base = median(next(t for v, t in zip(variants, times, strict=True) if v.kernel == "sdpa-cudnn"))
    return [
        _row(shape, variant, sample, buffers, base, ceiling, dtype)
        for variant, sample in zip(variants, times, strict=True)
    ]


def _row(
    shape: Shape,
    variant: Variant,
    sample: list[float],
    buffers: int,
    base: float,
    ceiling: float,
    dtype: str,
) -> dict[str, Any]:
    us = median(sample) / buffers * 1e3
    deciles = quantiles(sample, n=10)
    rate = variant.kv_bytes / us / 1e6
    return {
        "shape": str(shape),
        "mode": variant.mode,
        "kernel": variant.kernel,
        "window": variant.window,
        "dtype": dtype,
        "us": us,
        "us_p10": deciles[0] / buffers * 1e3,
        "us_p90": deciles[-1] / buffers * 1e3,
        "speedup": base / median(sample),
        "tb_per_s": rate,
        "percent_of_read": 100 * rate / ceiling,
        "error": variant.error,
        "buffers": buffers,
        "repeats": len(sample),
    }


def _buffer_count(shape: Shape, modes: Sequence[str]) -> int:
    """So many that the smallest mode's buffers are four times the L2 cache, and the fp16 ones fit in 24 GiB."""
    rows = shape.batch * shape.tokens * shape.kv_heads
    smallest = min(MODES[mode].layout(shape.head_dim).bytes_per_token("float16") for mode in modes) * rows
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    fits = max(2, 24 * 1024 * MiB // (rows * shape.head_dim * 4))
    return max(2, min(math.ceil(4 * l2 / smallest), fits, 64))


def _variants(
    shape: Shape,
    modes: Sequence[str],
    dtype: torch.dtype,
    windows: Sequence[bool],
    buffers: int,
    config: LaunchConfig | None,
) -> Iterator[Variant]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int, rows: int) -> list[torch.Tensor]:
        size = (shape.batch, heads, rows, shape.head_dim)
        return [torch.randn(size, generator=generator, device="cuda", dtype=dtype) for _ in range(buffers)]

    q, k, v = (
        normal(shape.q_heads, 1),
        normal(shape.kv_heads, shape.tokens),
        normal(shape.kv_heads, shape.tokens),
    )
    raw_bytes = k[0].numel() * 2 * k[0].element_size()
    for name, kind in (("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa-flash", SDPBackend.FLASH_ATTENTION)):
        run = _sdpa(kind, q, k, v)
        yield Variant("torch", name, "-", run, raw_bytes, _error(run()[0], q[0], k[0], v[0]))
    for mode in modes:
        layout = MODES[mode].layout(shape.head_dim)
        for window in windows if layout.quantized else (False,):
            yield _paged(mode, layout, window, q, k, v, config)


def _sdpa(kind: SDPBackend, q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor]) -> Callable[[], Any]:
    def run() -> list[torch.Tensor]:
        with sdpa_kernel(kind):
            return [F.scaled_dot_product_attention(*x, enable_gqa=True) for x in zip(q, k, v, strict=True)]

    return run


def _paged(
    mode: str,
    layout: Layout,
    window: bool,
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    config: LaunchConfig | None,
) -> Variant:
    """The pages kernels over the same K and V, folded by the window policy or altogether."""
    ops = TorchOps("cuda")
    batch, kv_heads, tokens, dim = k[0].shape
    recent, sinks = (PAGE, 4) if window else (0, 0)
    folded = (tokens - recent) // PAGE * PAGE if layout.quantized else 0
    k_rotation = Rotation.create(ops, 0, "k", dim) if layout.k.codebook else None
    v_rotation = Rotation.create(ops, 0, "v", dim) if layout.v.codebook else None
    undo = None if v_rotation is None else VRotation.create(0, dim, k[0].device)
    group = q[0].shape[1] // kv_heads
    calls, dense = [], (k[0], v[0])
    for i in range(len(k)):
        pages, decoded = build_pages(ops, layout, k[i], v[i], folded, sinks, (k_rotation, v_rotation), keep=i == 0)
        if i == 0:
            dense = decoded
        queries = q[i].reshape(batch, kv_heads, group, dim)
        rotated = queries if k_rotation is None else k_rotation.apply(ops, queries.float())
        calls.append((queries, rotated.to(torch.float16 if layout.k.quantized else queries.dtype), pages))

    def run(out_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return [attend_pages(*call, layout, v_rotation=undo, config=config, out_dtype=out_dtype) for call in calls]

    error = _error(run(torch.float32)[0].reshape(q[0].shape), q[0], *dense)
    limit = 2e-3 if layout.quantized else 1e-3 if k[0].dtype == torch.float16 else 2e-3
    if not error <= limit:
        raise KvcoreError(f"{mode}, window {window}: error {error:.1e} exceeds {limit:.0e}: not timed")
    dtype = ops.dtype(k[0])
    rows = batch * kv_heads
    kv_bytes = rows * (
        folded * layout.bytes_per_token(dtype) + (tokens - folded + sinks) * layout.raw_bytes_per_token(dtype)
    )
    return Variant(mode, "attend-pages", "on" if window else "off", run, kv_bytes, error)


def build_pages(
    ops: TorchOps,
    layout: Layout,
    k: torch.Tensor,
    v: torch.Tensor,
    folded: int,
    sinks: int,
    rotations: tuple[Rotation | None, Rotation | None],
    *,
    keep: bool,
) -> tuple[Pages, tuple[torch.Tensor, torch.Tensor]]:
    """Pages in shuffled order of K and V [B, Hkv, T, D]; with ``keep`` also the rows as attention sees them."""
    batch, heads, tokens, _ = k.shape
    count = folded // PAGE
    raw_count = -(-(tokens - folded) // PAGE)
    order = torch.randperm(max(1, batch * count), device=k.device)
    raw_order = torch.randperm(batch * (raw_count + 1), device=k.device)
    table, raw_table = order[: batch * count].view(batch, count), raw_order.view(batch, raw_count + 1)
    planes: dict[str, torch.Tensor] = {}
    seen = []
    for part, codec, rows, rotation in (("k", layout.k, k, rotations[0]), ("v", layout.v, v, rotations[1])):
        coded, centers = rows[:, :, :folded], None
        if codec.centred and rotation is not None:
            centers = page_centers(ops, coded, rotation, PAGE)
            coded = centred_rows(ops, coded, centers, rotation, PAGE)
            planes["k_center"] = _scatter(centers, order)
        canonical = CODEC_FUNCTIONS[codec.name].encode(ops, coded, rotation)
        native = to_native(codec, part, {n: p.unflatten(2, (count, PAGE)) for n, p in canonical.items()})
        codes = native["codes" if codec.quantized else "rows"]
        planes[part] = _scatter(codes, order)
        planes[f"{part}_scale"] = _scatter(native["scale"], order) if codec.quantized else planes[part]
        raw = torch.zeros(batch, heads, raw_count + 1, PAGE, rows.shape[-1], device=k.device, dtype=rows.dtype)
        raw[:, :, 0, :sinks] = rows[:, :, :sinks]
        raw[:, :, 1:].flatten(2, 3)[:, :, : tokens - folded] = rows[:, :, folded:]
        planes[f"raw_{part}"] = _scatter(raw, raw_order)
        if keep:
            decoded = CODEC_FUNCTIONS[codec.name].decode(ops, canonical, rotation)
            if centers is not None and rotation is not None:
                decoded += plain_centers(ops, centers, rotation).repeat_interleave(PAGE, 2)
            seen.append(torch.cat([rows[:, :, :sinks].float(), decoded[:, :, sinks:], rows[:, :, folded:].float()], 2))
    counts = {"sinks": min(sinks, folded), "folded": folded, "length": tokens}
    tables = {
        "table": table.int().contiguous() if count else torch.zeros(batch, 1, dtype=torch.int32, device=k.device),
        "raw_table": raw_table[:, 1:].int().contiguous() if raw_count else raw_table.int().contiguous(),
    }
    ranges = {name: torch.full_like(x, PAGE << 16) for name, x in tables.items()}
    ranges["table"][:, 0] |= counts["sinks"]  # the rows that raw sinks shadow
    pages = Pages(
        **planes,
        **tables,
        ranges=ranges["table"],
        raw_ranges=ranges["raw_table"],
        sink_page=raw_table[:, 0].int().contiguous(),
        **{name: torch.full((batch,), n, dtype=torch.int32, device=k.device) for name, n in counts.items()},
    )
    return pages, (seen[0], seen[1]) if keep else (k, v)


def _scatter(pages: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[B, H, pages, ...] to [B · pages, H, ...], page i at order[i]."""
    flat = pages.transpose(1, 2).flatten(0, 1)
    out = torch.zeros(max(1, flat.shape[0]), *flat.shape[1:], device=flat.device, dtype=flat.dtype)
    out[order[: flat.shape[0]]] = flat
    return out


def _error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The worst ‖out − ref‖ / ‖ref‖ of a sequence and head, against float64 attention over what the cache holds."""
    worst = 0.0
    group = q.shape[1] // k.shape[1]
    for sequence in range(q.shape[0]):
        wide = (x[sequence].double() for x in (k, v))
        dk, dv = wide
        dq = q[sequence].double().reshape(k.shape[1], group, -1)
        weights = torch.softmax(dq @ dk.transpose(1, 2) / math.sqrt(q.shape[-1]), -1)
        ref = (weights @ dv).reshape(q.shape[1], -1)
        got = out[sequence].double().reshape(q.shape[1], -1)
        worst = max(worst, float(((got - ref).norm(dim=-1) / ref.norm(dim=-1)).max()))
    return worst


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_ceiling() -> float:
    """TB/s of a plain read of 4 GiB: what memory gives at best."""
    x = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    out = torch.empty(2048, device="cuda")
    sample: list[float] = []
    for _ in range(8):
        with timer(sample):
            _read[(2048,)](x, out, x.numel(), BLOCK=4096, num_warps=8)
    return x.numel() * 4 / min(sample[2:]) / 1e9


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Speed against cuDNN by shape, a bar per mode."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ours = [row for row in rows if row["kernel"] == "attend-pages" and row["window"] != "on"]
    shapes = list(dict.fromkeys(row["shape"] for row in ours))
    names = list(dict.fromkeys(row["mode"] for row in ours))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.6 * len(shapes)), 4.5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [next((r["speedup"] for r in ours if (r["shape"], r["mode"]) == (s, name)), 0.0) for s in shapes]
        axes.bar([x + i * width for x in range(len(shapes))], values, width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(shapes))], shapes, rotation=20, ha="right")
    axes.set_ylabel("speed against cuDNN SDPA, fp16")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
