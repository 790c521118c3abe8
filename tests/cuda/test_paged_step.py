"""Whole steps on paged storage, as a model runs them: append, attend, fold; against the contiguous cache."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import exact_attention, gaussian, new_cache, relative_error

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from paging import poison, to_numpy, to_torch

from kvcore.backends import Backend
from kvcore.backends.cuda.attend import Pages, VRotation, attend_pages
from kvcore.backends.cuda.block_tables import BlockTables
from kvcore.backends.cuda.kernels.append import append
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.native import NativeLayout
from kvcore.backends.cuda.pool import PagePool
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

WINDOW = WindowPolicy()
HEADS, GROUP, DIM = 1, 2, 64


class Paged:
    """One layer's cache of two sequences, in pools whose unwritten bytes are all NaN."""

    def __init__(self, mode: str, device: str) -> None:
        self.native, self.device = NativeLayout(MODES[mode].layout(DIM), "float16"), device
        self.raw = PagePool(self.native.raw_planes, 1, HEADS, 9, device, "raw KV")
        self.folded = PagePool(self.native.planes, 1, HEADS, 5, device)
        for plane in (*self.raw.planes.values(), *self.folded.planes.values()):
            poison(plane)
        native = self.folded if MODES[mode].quantized else None
        self.tables = BlockTables(2, 512, WINDOW, self.raw, native, device)
        self.fold = Fold.create(self.native, 1, device)

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray | None:
        """n rows for both sequences, [2, n, H, D]; [2, Hq, n, D] where attention takes that many."""
        n, t = q.shape[1], self.tables
        t.extend({0: n, 1: n})
        t.upload()
        q_out = torch.empty(2, HEADS, n, GROUP, DIM, dtype=torch.float16, device=self.device)
        q_pages = torch.empty_like(q_out)
        matrix = None if self.fold.k_matrix is None else self.fold.k_matrix[0]
        raw_k, raw_v = self.raw.planes["k"][0], self.raw.planes["v"][0]
        rows = (to_torch(x, self.device) for x in (q, k, v))
        tables = (t.raw_table, t.lengths, t.folded)
        append(*rows, None, raw_k, raw_v, *tables, q_out, q_pages=q_pages, k_matrix=matrix)
        out = self._attend(q_out, q_pages, n) if n <= 16 else None
        self.fold(
            self.raw.planes, self.folded.planes, t.raw_table, t.table, *tables[1:], t.fold_at, pages=max(1, t.due)
        )
        t.commit()
        return out

    def _attend(self, q: torch.Tensor, q_pages: torch.Tensor, n: int) -> np.ndarray:
        t, planes = self.tables, {name: x[0] for name, x in self.folded.planes.items()}
        scales = [planes.get(f"{part}_scale", planes[part]) for part in "kv"]
        pages = Pages(
            *(planes["k"], planes["v"], *scales, self.raw.planes["k"][0], self.raw.planes["v"][0]),
            *(t.table, t.raw_table, t.ranges, t.raw_ranges, t.sink_pages, t.sinks, t.folded, t.lengths),
            k_center=planes.get("k_center"),
        )
        layout = self.native.layout
        rotation = VRotation.create(0, DIM, self.device) if layout.v.codebook else None
        flat = [x.reshape(2, HEADS, n * GROUP, DIM) for x in (q, q_pages)]
        out = attend_pages(*flat, pages, layout, query_rows=n, v_rotation=rotation, out_dtype=torch.float32)
        return to_numpy(out).reshape(2, HEADS, n, GROUP, DIM).swapaxes(2, 3).reshape(2, HEADS * GROUP, n, DIM)


@pytest.mark.parametrize(
    "mode",
    ["fp16", "int8", "turbo4", "int8-turbo4", pytest.param("turbo4-asym", marks=pytest.mark.full), "turbo3-asym"],
)
def test_steps_on_pages_attend_like_the_contiguous_cache(device: str, reference: Backend, mode: str) -> None:
    """Prefilled chunks, and steps of 8, 1 and 4 rows before and after folds; 393 rows in the end."""
    paged = Paged(mode, device)
    cache = new_cache(reference, mode, heads=(GROUP, HEADS), dim=DIM, dtype="float16", window=WINDOW, batch=2)
    for number, n in enumerate([120, 130, 8, 1, 130, 4]):
        q = gaussian(2, n, HEADS * GROUP, DIM, seed=3 * number, dtype="float16")
        k, v = (gaussian(2, n, HEADS, DIM, seed=3 * number + i, dtype="float16") for i in (1, 2))
        out = paged.step(q, k, v)
        layer = cache.layers[0]
        layer.append(k.swapaxes(1, 2), v.swapaxes(1, 2))
        if out is not None:
            want = exact_attention(reference, layer, q.swapaxes(1, 2), DIM**-0.5)
            assert relative_error(out, want) <= (2e-3 if MODES[mode].quantized else 1e-3)
        cache.commit()
        assert paged.tables.rows_folded(0) == cache.layers[0].rows_folded
    assert paged.tables.rows_folded(0) == (2 * 128 if MODES[mode].quantized else 0)
