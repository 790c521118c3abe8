"""Generation under a cap on live rows: chunks, ends, rewinding, positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.errors import InputError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

SMALL = WindowPolicy(recent_tokens=32, page_size=32)
each_mode = pytest.mark.parametrize("mode", MODES)
windows = pytest.mark.parametrize("window", [WindowPolicy(), SMALL], ids=["128", "32"])


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 256, count).tolist()


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> kvcore.Model:
    return kvcore.load(tiny_folder, backend="reference", window=SMALL)


def tokens(generation: kvcore.Generation) -> list[int]:
    for _ in generation:
        pass
    return generation.token_ids


@windows
@each_mode
def test_L4_generation_beyond_the_cap(model: kvcore.Model, mode: str, window: WindowPolicy) -> None:
    """Cap 256, a short prompt, 300 tokens: the cache stays at 256 rows, positions go on."""
    model = replace(model, mode=MODES[mode], window=window)
    params = kvcore.SamplingParams(max_tokens=300, logit_bias=dict.fromkeys(model.eos_token_ids, -100.0))
    generation = model.generate(ids(20), params, max_kv_size=256)
    assert len(tokens(generation)) == 300
    stats = generation.cache.stats()
    assert (generation.cache.offset, stats.tokens, generation.finish_reason) == (319, 256, "length")
    if window is SMALL:
        assert (stats.rows_folded > 0) == MODES[mode].quantized


@pytest.mark.parametrize("chunk", [1 << 20, 128, 64])
def test_L6_a_long_prompt_in_any_chunks(model: kvcore.Model, chunk: int) -> None:
    """700 tokens, cap 256: raw rows give the same logits whatever the chunks, a token at a time included."""
    prompt = np.array([ids(700)])
    found = []
    for step in (chunk, 1 if chunk == 64 else 50):
        cache = model.new_cache("fp16", max_kv_size=256)
        logits = [model.forward(prompt[:, i : i + step], cache, all_logits=True) for i in range(0, 700, step)]
        assert (cache.offset, cache.tokens) == (700, 256)
        found.append(np.concatenate(logits, 1))
    np.testing.assert_allclose(*found, atol=2e-4)


@each_mode
def test_L6_quantized_rows_in_chunks(model: kvcore.Model, mode: str) -> None:
    prompt = np.array([ids(700)])
    logits = []
    for step in (128, 64):
        cache = model.new_cache(mode, max_kv_size=256)
        logits.append(np.concatenate([model.forward(prompt[:, i : i + step], cache) for i in range(0, 700, step)]))
        cache.begin_decode()
        assert (cache.offset, cache.tokens) == (700, 256)
        assert (cache.stats().rows_folded > 0) == MODES[mode].quantized
    a, b = (x[-1, -1].astype(np.float64) for x in logits)
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (a, b))
    assert np.isfinite(a).all()
    assert float((p * np.log(p / q)).sum()) <= (1e-6 if mode == "fp16" else 0.05)


def test_without_a_shift_generation_ends_at_the_cap(model: kvcore.Model) -> None:
    generation = model.generate(ids(20), kvcore.SamplingParams(max_tokens=100), max_kv_size=50, context_shift=False)
    free = tokens(model.generate(ids(20), kvcore.SamplingParams(max_tokens=30)))
    assert tokens(generation) == free
    assert (generation.finish_reason, generation.cache.tokens, generation.cache.offset) == ("length", 49, 49)
    with pytest.raises(InputError, match="the prompt has 50 tokens, max_kv_size 50 without a context shift leaves no"):
        model.generate(ids(50), max_kv_size=50, context_shift=False)


def test_the_model_s_last_position_ends_a_capped_generation_too(model: kvcore.Model) -> None:
    short = replace(model, config=replace(model.config, max_position=128))
    generation = short.generate(ids(20), kvcore.SamplingParams(max_tokens=500), max_kv_size=40)
    assert len(tokens(generation)) == 108
    assert generation.finish_reason == "length"


@each_mode
def test_rewinding_under_a_cap(model: kvcore.Model, mode: str) -> None:
    """To a position whose row is there; further back only the kept rows are left."""
    cache = model.new_cache(mode, max_kv_size=200)
    model.forward(np.array([ids(300)]), cache)
    assert cache.rewind(400) == 300
    assert (cache.rewind(250), cache.tokens) == (250, 150)
    model.forward(np.array([ids(10, 1)]), cache)
    assert (cache.offset, cache.tokens) == (260, 160)
    assert (cache.rewind(60), cache.tokens) == (4, 4)
    assert (cache.rewind(2), cache.tokens) == (2, 2)


def test_more_tokens_than_a_capped_step_takes_need_a_commit(model: kvcore.Model) -> None:
    from kvcore.models.llama import forward

    cache = model.new_cache("fp16", max_kv_size=20)
    with pytest.raises(InputError, match="30 tokens without a commit: a cap of this size takes at most 16 in a step"):
        forward(model.backend.ops, model.config, model.params, np.array([ids(30)]), cache, commit=False)


def test_a_failed_step_leaves_offset_and_rows(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, twin = (model.new_cache("int8", max_kv_size=100) for _ in range(2))
    for each in (cache, twin):
        model.forward(np.array([ids(150)]), each)
    last = cache.layers[-1]

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(last, "attend", fail)
    with pytest.raises(MemoryError):
        model.forward(np.array([[7]]), cache)
    monkeypatch.undo()
    assert cache.offset == 150
    np.testing.assert_array_equal(*(model.forward(np.array([[7]]), each) for each in (cache, twin)))
    assert cache.stats() == twin.stats()
