"""Attention of many new rows over pages: dense blocks of keys through library kernels, merged by log-sum-exp.

Decode attention (`attend.py`) unpacks pages inside its own kernel, which pays for a few queries. With many queries the
matrix products dominate, so pages are gathered into dense 16-bit rows first, a bounded block at a time, and each block
is attended to by PyTorch's own kernel. Folded blocks are merged in V's rotated basis, R_Vᵀ is applied to their result
once, and the raw blocks are merged in. New rows are causal among themselves; all else is older than every query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcore.backends.cuda.attend import Pages, VRotation
from kvcore.backends.cuda.dense import LOWEST, Band, dense_attention, flash_serves
from kvcore.backends.cuda.kernels.gather import K_DIVISOR, Dense, Source, gather
from kvcore.backends.cuda.prefill_plan import Batch, Block, Call, PrefillPlan
from kvcore.errors import KvcoreError
from kvcore.layout import CODECS, Layout

__all__ = ["WORKSPACE_BYTES", "PrefillPlan", "attend_prefill"]

WORKSPACE_BYTES = 256 << 20
SMALLEST_BLOCK = 16  # rows, however small the workspace
# Chunks of a fresh prompt in multiples of so many rows go to the library's own choice, cuDNN where it serves: up to 6%
# faster than flash, but each shape that it has not seen costs it 65 ms (H200), which any other length would pay.
PLANNED_ROWS = 1024


def attend_prefill(
    q: Tensor,
    q_rotated: Tensor,
    pages: Pages,
    layout: Layout,
    *,
    plan: PrefillPlan,
    v_rotation: VRotation | None,
    scale: float | None = None,
    window: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Attention of the newest n rows' queries over a paged cache that holds these rows already.

    q          [sequences, Hkv, n · group, D] in the raw rows' dtype: query row major, then the head of the group
    q_rotated  the same after R_K, fp16 (q itself where K is not rotated)
    plan       of this step, the same for every layer
    v_rotation None where V is not rotated
    window     a query sees the newest ``window`` slots up to its own; blocks that this cuts run without a flash kernel
    Returns [sequences, Hkv, n · group, D] in q's dtype; zeros for a sequence without rows. Dense keys and values take
    at most ``workspace_bytes`` at a time (but 16 rows fit always); results that are merged are in float32. Never waits
    for the device. KvcoreError where memory does not suffice even for a quarter of the workspace.
    """
    if q.shape[0] != len(plan.sequences) or q.shape[2] % plan.query_rows:
        raise ValueError(
            f"queries {tuple(q.shape)} do not fit a plan of {len(plan.sequences)} x {plan.query_rows} rows"
        )
    rotated = q_rotated.half() if q_rotated.dtype == torch.bfloat16 else q_rotated
    matrix = None if v_rotation is None else v_rotation.matrix
    step = _Step(q, rotated, pages, layout, plan.query_rows, matrix, scale or 1 / sqrt(q.shape[-1]), window)
    for size in (workspace_bytes, workspace_bytes // 4):
        try:
            return step.attend(plan, size)
        except torch.OutOfMemoryError:
            continue
    raise KvcoreError(
        f"out of GPU memory in prefill: {plan.query_rows} rows of {q.shape[0]} sequences with a workspace of "
        f"{workspace_bytes // 4} bytes; prefill in smaller chunks, or give the cache less memory"
    )


@dataclass(frozen=True, slots=True)
class _Step:
    q: Tensor
    q_rotated: Tensor
    pages: Pages
    layout: Layout
    query_rows: int
    v_matrix: Tensor | None
    scale: float
    window: int | None

    def attend(self, plan: PrefillPlan, workspace_bytes: int) -> Tensor:
        heads, dim = self.q.shape[1], self.q.shape[3]
        row_bytes = 2 * heads * dim * max(self.q.itemsize, self.q_rotated.itemsize)
        batches = plan.batches(max(SMALLEST_BLOCK, workspace_bytes // row_bytes))
        if len(batches) == 1:
            return self._attend_batch(batches[0])
        return torch.cat([self._attend_batch(batch) for batch in batches])

    def _attend_batch(self, batch: Batch) -> Tensor:
        q = self.q[batch.sequences]
        merged = _Merged((*q.shape[:2], self.query_rows, q.shape[2] // self.query_rows), q)
        for block in batch.folded:
            self._attend_block(batch, block, merged)
        if self.v_matrix is not None:
            merged.rotate(self.v_matrix)
        for block in batch.raw:
            self._attend_block(batch, block, merged)
        return merged.result()

    def _attend_block(self, batch: Batch, block: Block, merged: _Merged) -> None:
        calls = list(self._visible(block))
        if not calls:
            return
        masked = any(cut for _, cut in calls)
        dense = self._gather(batch, block, masked)
        q = (self.q_rotated if block.folded else self.q)[batch.sequences].unflatten(2, (self.query_rows, -1))
        scale = self.scale * K_DIVISOR if block.folded else self.scale
        for call, cut in calls:
            rows = q[:, :, call.first : call.last]  # [B, Hkv, rows, group, D]
            if call.causal and batch.fresh and not cut and flash_serves(q) and rows.shape[2] % PLANNED_ROWS == 0:
                heads = rows.transpose(2, 3).flatten(1, 2)
                out = F.scaled_dot_product_attention(
                    heads, dense.k, dense.v, is_causal=True, scale=scale, enable_gqa=heads.shape[1] != dense.k.shape[1]
                )
                merged.add(call, _by_row(out, rows), None)
                continue
            band = None
            if cut:
                assert dense.positions is not None
                assert self.window is not None
                band = Band(dense.positions, call.first - self.query_rows, self.window)
            out, lse = _attend_rows(rows, dense, scale, call.causal, band)
            merged.add(call, out, lse, dense.unit)

    def _visible(self, block: Block) -> Iterator[tuple[Call, bool]]:
        """Calls of a block of which the window leaves something, and whether it cuts them."""
        for call in block.calls:
            first, last = call.first - self.query_rows, call.last - 1 - self.query_rows
            if self.window is None or block.oldest > last - self.window:
                yield call, False
            elif block.newest > first - self.window:
                yield call, True

    def _gather(self, batch: Batch, block: Block, positions: bool) -> Dense:
        pages, raw = self.pages, CODECS["raw"]
        if block.folded:
            codecs = (self.layout.k, self.layout.v)
            source = Source(pages.k, pages.v, pages.k_scale, pages.v_scale, *codecs, 1 / K_DIVISOR, pages.k_center)
        else:
            source = Source(pages.raw_k, pages.raw_v, pages.raw_k, pages.raw_v, raw, raw)
        table = (pages.table if block.folded else pages.raw_table)[batch.sequences]
        dtype = self.q_rotated.dtype if block.folded else self.q.dtype
        sinks = pages.sink_page[batch.sequences]
        return gather(source, table, sinks, block.pieces, block.rows, self.q.shape[3], dtype, positions=positions)


def _attend_rows(q: Tensor, dense: Dense, scale: float, causal: bool, band: Band | None) -> tuple[Tensor, Tensor]:
    """q [B, Hkv, rows, group, D] -> out [B, Hkv, rows, group, D], log-sum-exp [B, Hkv, rows, group].

    Where no mask tells rows apart, the heads of a group are more rows: keys are read once for all of them.
    """
    if causal or band is not None:
        out, lse = dense_attention(q.transpose(2, 3).flatten(1, 2), dense.k, dense.v, scale, causal, band)
        return _by_row(out, q), lse.unflatten(1, (q.shape[1], q.shape[3])).transpose(2, 3)
    out, lse = dense_attention(q.flatten(2, 3), dense.k, dense.v, scale, False)
    return out.unflatten(2, q.shape[2:4]), lse.unflatten(2, q.shape[2:4])


def _by_row(out: Tensor, q: Tensor) -> Tensor:
    """[B, Hq, rows, D] -> [B, Hkv, rows, group, D], as q is."""
    return out.unflatten(1, (q.shape[1], q.shape[3])).transpose(2, 3)


class _Merged:
    """Partial results of the same queries over different keys, merged in float32 as they come. One that stands alone is
    as it came, to be multiplied by ``unit`` [B, Hkv]."""

    def __init__(self, shape: tuple[int, ...], q: Tensor) -> None:
        self.shape = shape  # [B, Hkv, n, group]
        self.q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None
        self.unit: Tensor | None = None

    def add(self, call: Call, out: Tensor, lse: Tensor | None, unit: Tensor | None = None) -> None:
        """out [B, Hkv, rows, group, D], times ``unit``, and lse [B, Hkv, rows, group] of some query rows. A result that
        stands alone needs no lse, and is not copied."""
        if self.out is None and (call.first, call.last) == (0, self.shape[2]):
            self.out, self.lse, self.unit = out, lse, unit
            return
        if self.out is None:
            self.out = torch.zeros(*self.shape, out.shape[-1], device=out.device)
            self.lse = torch.full(self.shape, LOWEST, device=out.device)
        assert self.lse is not None
        assert lse is not None
        self.out = self._whole()
        rows = slice(call.first, call.last)
        before = self.lse[:, :, rows]
        self.out[:, :, rows].lerp_(_times(out, unit), torch.sigmoid(lse - before)[..., None])
        self.lse[:, :, rows] = torch.logaddexp(lse, before)

    def rotate(self, matrix: Tensor) -> None:
        if self.out is None:
            return
        dim = len(matrix)
        if self.out.dtype != torch.float16 or dim & (dim - 1):
            self.out = self._whole() @ matrix
            return
        # Signs times a power of two are exact in float16, and the product keeps the range of its rows.
        factor = 2.0 ** -((dim.bit_length()) // 2)
        self.out = self.out @ (matrix * (dim**0.5 * factor)).half()
        scale = torch.full(self.shape[:2], dim**-0.5 / factor, device=matrix.device)
        self.unit = scale if self.unit is None else self.unit * scale

    def result(self) -> Tensor:
        if self.out is None:
            return torch.zeros_like(self.q)
        out = self.out if self.unit is None else self._whole()
        return out.to(self.q.dtype).reshape(self.q.shape)

    def _whole(self) -> Tensor:
        assert self.out is not None
        out, self.unit = _times(self.out, self.unit), None
        return out


def _times(out: Tensor, unit: Tensor | None) -> Tensor:
    """out [B, Hkv, rows, group, D] times ``unit`` [B, Hkv], float32."""
    return out.float() if unit is None else out * unit[:, :, None, None, None]
