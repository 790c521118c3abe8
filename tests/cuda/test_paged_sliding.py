"""Layers with a sliding window on pages: what their queries see is what they see of contiguous rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import gaussian, relative_error

pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, live, paged, storage_of

from kvcore.attention import make_cache
from kvcore.backends import Backend, load_backend
from kvcore.layout import Cap
from kvcore.modes import MODES


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cuda", TORCH_DEVICE)


class Mixed:
    """Two layers, of which the second slides; the same steps on pages and on contiguous rows."""

    def __init__(self, backend: Backend, mode: str, window: int, cap: Cap | None = None) -> None:
        self.backend, self.windows = backend, (None, window)
        spec = replace(SPEC, mode=MODES[mode], cap=cap, sliding=True)
        self.caches = paged(backend, spec), make_cache(backend, spec, kernels="graph")
        self.seed = 0

    def step(self, count: int) -> None:
        ops = self.backend.ops
        self.seed += 3
        rows = [gaussian(1, heads, count, 64, seed=self.seed + i, dtype="float16") for i, heads in enumerate((2, 1, 1))]
        outs: list[list[np.ndarray]] = [[], []]
        for cache, out in zip(self.caches, outs, strict=True):
            cache.begin_step(count)
            for layer, window in zip(cache.layers, self.windows, strict=True):
                out.append(ops.to_numpy(layer.step(*map(ops.asarray, rows), 0.125, window)))
            cache.commit()
        for got, want in zip(*outs, strict=True):
            assert relative_error(got, want.astype(np.float64)) <= 4e-3
        assert live(self.caches[0]) == live(self.caches[1])
        if self.caches[0].tokens - count >= self.windows[1] and self.caches[0].spec.cap is None:
            assert relative_error(outs[0][0], outs[0][1].astype(np.float64)) > 0.1, "the window hides nothing"

    def trim(self, count: int) -> None:
        for cache in self.caches:
            cache.trim(count)


def test_a_layer_slides_beside_one_that_does_not_in_short(backend: Backend) -> None:
    """What follows with fewer steps: a prompt, a token, a trim into the folded page, a token."""
    pair = Mixed(backend, "int8", 100)
    for count in (262, 1):
        pair.step(count)
    assert storage_of(pair.caches[0]).tables.solid(0)
    pair.trim(150)
    pair.step(1)
    assert not storage_of(pair.caches[0]).tables.solid(0)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4", "turbo3-asym"])
def test_a_layer_slides_beside_one_that_does_not(backend: Backend, mode: str) -> None:
    """More new rows than the window, few, and one; then after a trim that leaves half a page of dead slots."""
    pair = Mixed(backend, mode, 100)
    for count in (180, 90, 1, 1):
        pair.step(count)
    tables = storage_of(pair.caches[0]).tables
    assert tables.solid(0)
    pair.trim(200 if MODES[mode].quantized else 30)
    for count in (60, 1, 20, 1):
        pair.step(count)
    assert tables.solid(0) == (not MODES[mode].quantized)


@pytest.mark.full
@pytest.mark.parametrize(("window", "cap"), [(40, Cap(200, 4)), (150, Cap(60, 4)), (56, Cap(60, 4)), (40, Cap(150, 0))])
def test_a_window_beside_a_cap(backend: Backend, window: int, cap: Cap) -> None:
    """The narrower one decides, and kept rows are the cap's."""
    pair = Mixed(backend, "int8", window, cap)
    for count in (50, 40, 1, 55, 50, 1):
        pair.step(count)
    assert pair.caches[0].tokens == min(197, cap.tokens)
