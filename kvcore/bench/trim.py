"""A trim with sinks on pages: what it costs the host, what the device, and that no row of the cache is copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import torch

from kvcore.backends.cuda.native import PAGE
from kvcore.backends.cuda.paged import PagedStorage
from kvcore.errors import KvcoreError
from kvcore.layout import CacheShape, Cap, WindowPolicy
from kvcore.modes import MODES

TOKENS, KEEP = 32768, 4
LAYERS, Q_HEADS, KV_HEADS, DIM = 32, 32, 8, 128  # the llama-3.1-8b shape


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one trim: those that the host takes to drop a row, and those until the device has the new tables."""

    host: float
    device: float


class Trim:
    """A cache of ``tokens`` live rows that drops one after its kept ones before each new row, as under a cap."""

    def __init__(
        self, mode: str, dtype: str, device: str, *, tokens: int = TOKENS, layers: int = LAYERS, heads: int = KV_HEADS
    ) -> None:
        self.mode, self.dtype, self.device, self.tokens = mode, dtype, device, tokens
        shape = CacheShape(
            name=mode,
            layout=MODES[mode].layout(DIM),
            delegated=False,
            num_layers=layers,
            num_q_heads=heads * Q_HEADS // KV_HEADS,
            num_kv_heads=heads,
            dtype=dtype,
            window=WindowPolicy(),
            batch=1,
            capacity=tokens,
            cap=Cap(tokens, KEEP),
        )
        # Room for all rows raw at once: they are booked, not computed.
        self.storage = PagedStorage(replace(shape, delegated=True, capacity=tokens + 4 * PAGE), device)
        tables = self.storage.tables
        tables.extend({0: tokens})
        if shape.layout.quantized:
            tables.hand_over(0)
            tables.extend({0: 0})
        tables.commit()
        tables.upload()

    def once(self, timer: Callable[[], float] = time.perf_counter) -> Sample:
        """Drop a row, bring the tables to the device, and take in a row that comes."""
        storage, tables = self.storage, self.storage.tables
        self._wait()
        start = timer()
        storage.drop(KEEP, 1)
        dropped = timer()
        tables.upload()
        self._wait()
        uploaded = timer()
        tables.extend({0: 1})
        tables.commit()
        return Sample(dropped - start, uploaded - dropped)

    def state(self) -> tuple[tuple[int, int], ...]:
        """Where each plane lies, and how often it was written: a copy or a move of rows changes one of them."""
        return tuple((plane.data_ptr(), plane._version) for plane in self.storage.arrays())

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def row(trim: Trim, repeats: int) -> dict[str, Any]:
    """Times in microseconds. KvcoreError where a plane was written or moved, or where a row is missing."""
    before = trim.state()
    samples = [trim.once() for _ in range(repeats + 3)][3:]
    if trim.state() != before:
        raise KvcoreError(f"trim, {trim.mode}: rows of the cache were copied: not timed")
    if trim.storage.tables.length(0) != trim.tokens:
        raise KvcoreError(
            f"trim, {trim.mode}: {trim.storage.tables.length(0)} rows instead of {trim.tokens}: not timed"
        )
    us = [1e6 * sample.host for sample in samples]
    deciles = quantiles(us, n=10)
    return {
        "mode": trim.mode,
        "kernel": "trim",
        "batch": 1,
        "tokens": trim.tokens,
        "dtype": trim.dtype,
        "us": median(us),
        "us_p10": deciles[0],
        "us_p90": deciles[-1],
        "us_tables": median(1e6 * sample.device for sample in samples),
        "bytes_copied": 0,
        "check": 0.0,
        "repeats": len(samples),
    }
