"""A model on a cache in pages against the same model on contiguous rows: the same logits, rows and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, live, paged, storage_of

import kvcore
from kvcore.attention import make_cache
from kvcore.cache import Cache
from kvcore.models.llama import forward
from kvcore.modes import MODES

IDS = np.random.default_rng(0).integers(5, 256, (2, 700))
# ‖logits − those of the contiguous cache‖ / ‖the latter‖. Both are float16; codes that flip at a boundary add to it.
CLOSE = {"fp16": 4e-3, "int8": 4e-3, "turbo3-asym": 2e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, heads=2, kv_heads=1)
    write_tiny_tokenizer(folder)
    return kvcore.load(folder, backend="cuda", device=TORCH_DEVICE, dtype="float16")


class Pair:
    """One model with a cache of each kind; every step is compared."""

    def __init__(self, model: kvcore.Model, mode: str, **settings: Any) -> None:
        self.model, self.mode = model, mode
        spec = replace(SPEC, mode=MODES[mode], **settings)
        self.pages = paged(model.backend, spec)
        self.contiguous = make_cache(model.backend, spec, kernels="graph")
        self.batch = spec.batch

    @property
    def caches(self) -> tuple[Cache, Cache]:
        return self.pages, self.contiguous

    def step(self, count: int) -> None:
        at = self.pages.offset
        ids = IDS[: self.batch, at : at + count]
        got, want = (self.model.forward(ids, cache, all_logits=True) for cache in self.caches)
        assert np.linalg.norm(got - want) <= CLOSE.get(self.mode, 1e-2) * np.linalg.norm(want)
        self.check()

    def both(self, change: Callable[[Cache], object]) -> None:
        for cache in self.caches:
            change(cache)
        self.check()

    def check(self) -> None:
        assert live(self.pages) == live(self.contiguous)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            mode, marks=[pytest.mark.full] if mode in ("int8-turbo4", "turbo4-delegated", "turbo4-asym") else []
        )
        for mode in MODES
    ],
)
def test_a_model_on_pages_is_the_model_on_contiguous_rows(model: kvcore.Model, mode: str) -> None:
    """Prefill, hand-over, decode over a fold, trims of raw and of folded rows, and what comes after them."""
    pair = Pair(model, mode)
    pair.step(255)
    pair.both(Cache.begin_decode)
    pair.step(1)
    pair.both(lambda cache: cache.trim(56))
    pair.step(250)
    assert pair.pages.stats().rows_folded == (256 if MODES[mode].quantized else 0)
    pair.both(lambda cache: cache.trim(250))
    pair.step(260)
    pair.step(1)
    assert pair.pages.stats().rows_folded == (328 if MODES[mode].quantized else 0)
    k, v = (pair.contiguous.dense(1)[i] for i in range(2))
    for got, want in zip(pair.pages.dense(1), (k, v), strict=True):
        assert float((got - want).norm() / want.norm()) <= 0.03


def test_a_batch(model: kvcore.Model) -> None:
    pair = Pair(model, "int8", batch=2)
    for count in (270, 1):
        pair.step(count)
    pair.both(lambda cache: cache.trim(100))
    pair.step(20)


def test_only_accepted_rows_fold(model: kvcore.Model) -> None:
    pair = Pair(model, "turbo4-asym")
    pair.step(252)
    for cache in pair.caches:
        forward(model.backend.ops, model.config, model.params, IDS[:1, 252:257], cache, commit=False)
    pair.both(lambda cache: cache.commit(3, 5))
    assert pair.pages.stats().rows_folded == 0
    pair.step(1)
    assert pair.pages.stats().rows_folded == 128


def test_a_generation(model: kvcore.Model) -> None:
    """Through `generate`, with a reservation; on a GPU the registry chooses pages by itself."""
    prompt, params = IDS[0, :250].tolist(), kvcore.SamplingParams(max_tokens=3)
    spec = replace(SPEC, mode=MODES["turbo4"], capacity=253)
    cache = paged(model.backend, spec)
    generation = model.generate(prompt, params, cache=cache, prefill_step=200)
    "".join(generation)
    assert (cache.offset, generation.finish_reason) == (252, "length")
    if TORCH_DEVICE is None:
        own = model.generate(prompt, params, prefill_step=200)
        "".join(own)
        assert own.token_ids == generation.token_ids
        assert [d.kernel for d in own.cache.decisions] == ["fold-pages", "attend-pages"]
        assert storage_of(own.cache).shape.capacity == 253


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_a_step_that_fails_between_layers_can_be_repeated(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cache, fresh = (paged(model.backend, replace(SPEC, mode=MODES[mode])) for _ in range(2))
    model.forward(IDS[:1, :200], cache)
    storage = storage_of(cache)
    calls = []

    def fail(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room")
        return attend(*arguments, **settings)

    attend = storage.attend
    monkeypatch.setattr(storage, "attend", fail)
    with pytest.raises(MemoryError):
        model.forward(IDS[:1, 200:300], cache)
    assert [layer.tokens for layer in cache.layers] == [200, 200]
    monkeypatch.undo()
    model.forward(IDS[:1, :200], fresh)
    got, want = (model.forward(IDS[:1, 200:300], each) for each in (cache, fresh))
    np.testing.assert_array_equal(got, want)
    assert live(cache) == live(fresh)
