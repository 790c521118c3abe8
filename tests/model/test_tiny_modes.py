"""Modes seen through a whole model: chunking, page boundaries, zero weights, and how many rows are where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llamas import (
    BARE,
    QUANTIZED,
    SMALL,
    Recorder,
    divergence,
    folded_rows,
    in_mode,
    load_on,
    logits,
    margins,
    random_ids,
    tiny_folder,
)
from tiny import TinyLlama

import kvcore
from kvcore.backends import Backend
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

DEFAULT = WindowPolicy()
# Mean KL to raw on random weights without a window: about twice what was measured.
TINY_KL = {"int8": 1e-4, "int8-turbo4": 1e-2, "turbo4-asym": 1e-2, "turbo4-delegated": 1e-2}
TINY_KL |= {"turbo3-asym": 4e-2, "turbo4": 2e-2}
LENGTHS = (127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513)

each_mode = pytest.mark.parametrize("mode", MODES)
each_quantized = pytest.mark.parametrize("mode", QUANTIZED)


@pytest.fixture(scope="module")
def model(reference: Backend, tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    return load_on(reference, tiny_folder(tmp_path_factory.mktemp("tiny")))


def decode_state(model: kvcore.Model) -> kvcore.Cache:
    """A cache that folds from the first token on, in every mode."""
    cache = model.new_cache()
    cache.begin_decode()
    return cache


# Chunking


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_B36_chunks_do_not_change_raw_logits(backend: Backend, tmp_path: Path, chunk: int) -> None:
    model, ids = load_on(backend, tiny_folder(tmp_path)), random_ids(300)
    np.testing.assert_allclose(logits(model, ids, chunk=chunk), logits(model, ids), rtol=0, atol=1e-4)


@each_quantized
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_B36_chunks_change_quantized_logits_only_through_folded_rows(
    model: kvcore.Model, mode: str, chunk: int
) -> None:
    """With a window as long as the prompt nothing is folded, and nothing changes."""
    model, ids = in_mode(model, mode, WindowPolicy(recent_tokens=300)), random_ids(300)
    want = logits(in_mode(model, "fp16"), ids)
    np.testing.assert_allclose(logits(model, ids, chunk=chunk), want, rtol=0, atol=1e-4)


@each_quantized
def test_B36_chunks_leave_the_same_regions(model: kvcore.Model, mode: str) -> None:
    model, ids = in_mode(model, mode, SMALL), random_ids(300)
    regions = set()
    for chunk in (1, 7, 64, 300):
        cache = model.new_cache()
        logits(model, ids, chunk=chunk, cache=cache)
        cache.begin_decode()
        regions.add((cache.stats().rows_folded, cache.stats().rows_raw, cache.stats().kv_bytes))
    (region,) = regions
    assert region[:2] == (256, 4 + 44)


@each_quantized
@pytest.mark.parametrize("window", [SMALL, DEFAULT], ids=["32", "128"])
def test_one_pass_by_pages_is_the_decode_path(model: kvcore.Model, mode: str, window: WindowPolicy) -> None:
    """What the quality tests rely on: chunks of one page, aligned, see in each row what a decode step there sees.
    They differ by rounding alone, which may flip a code at a boundary; a chunk too long shows."""
    model, ids = in_mode(model, mode, window), random_ids(4 * window.page_size + 40)
    single, paged, longer = (
        logits(model, ids, chunk=chunk, cache=decode_state(model))
        for chunk in (1, window.page_size, 2 * window.page_size)
    )
    assert divergence(single, paged).mean() <= 1e-9
    assert np.abs(single - paged).max() <= 1e-3
    assert divergence(single, longer).mean() >= 5e-7


# Page boundaries


@each_mode
def test_B106_prompts_around_page_boundaries(model: kvcore.Model, mode: str) -> None:
    """Generation across each length, in chunks that end there or not. Greedy int8 is raw up to a near-tie."""
    raw = in_mode(model, "fp16")
    for length in LENGTHS:
        prompt = random_ids(length, seed=length).tolist()
        generation = in_mode(model, mode).generate(prompt, kvcore.SamplingParams(max_tokens=4), prefill_step=100)
        "".join(generation)
        stats = generation.cache.stats()
        assert stats.tokens == length + len(generation.token_ids) - 1
        assert stats.rows_folded == (folded_rows(stats.tokens, DEFAULT) if mode != "fp16" else 0), length
        if mode in ("fp16", "int8"):
            assert_greedy(raw, generation, limit=0.05)


def assert_greedy(model: kvcore.Model, generation: kvcore.Generation, limit: float) -> None:
    """The generated tokens are those that ``model`` takes, up to its first step with a margin below ``limit``."""
    ids = np.array([*generation.prompt, *generation.token_ids])
    scores = logits(model, ids)[len(generation.prompt) - 1 : -1]
    for step, token in enumerate(generation.token_ids):
        if margins(scores[step]) < limit:
            return
        assert token == int(scores[step].argmax())


@each_quantized
def test_B106_no_jump_where_a_page_folds(model: kvcore.Model, mode: str) -> None:
    """KL to raw, step by step from 300 to 420: right after the fold at 384 it is at most 10 times what it was."""
    ids = random_ids(420)
    raw = logits(in_mode(model, "fp16"), ids)
    model = in_mode(model, mode)
    got = logits(model, ids, chunk=1, cache=decode_state(model))
    steps = divergence(raw, got)
    assert steps[:256].max() <= 1e-9
    before, after = steps[300:384], steps[384:]
    assert before.max() > 1e-9
    assert after.max() <= 10 * before.max()


@each_mode
@pytest.mark.parametrize("window", [SMALL, DEFAULT], ids=["32", "128"])
def test_B10_odd_lengths_twice_give_the_same_text(model: kvcore.Model, mode: str, window: WindowPolicy) -> None:
    """P - 1, P, P + 1 and 2P tokens: a second run on a fresh cache repeats the first, whatever came between."""
    model, page = in_mode(model, mode, window), window.page_size
    prompts = [random_ids(n, seed=n).tolist() for n in (page - 1, page, page + 1, 2 * page)]
    params = kvcore.SamplingParams(max_tokens=6)
    first, second = ([model.generate(p, params) for p in prompts] for _ in range(2))
    assert ["".join(g) for g in first] == ["".join(g) for g in second]
    assert [g.token_ids for g in first] == [g.token_ids for g in second]


@pytest.mark.parametrize("length", [255, 256, 257, 512, 700])
def test_B126_first_tokens_do_not_depend_on_raw_chunks(model: kvcore.Model, length: int) -> None:
    model, ids = in_mode(model, "fp16"), random_ids(length, seed=3)
    last = [logits(model, ids, chunk=chunk)[-1] for chunk in (128, 256, length)]
    assert max(np.abs(last[0] - other).max() for other in last[1:]) <= 1e-4
    params = kvcore.SamplingParams(max_tokens=8)
    texts = [model.generate(ids.tolist(), params, prefill_step=chunk) for chunk in (128, 256, length)]
    tokens = [("".join(generation), generation.token_ids)[1] for generation in texts]
    assert tokens[0] == tokens[1] == tokens[2]


# Zero weights


@each_quantized
@pytest.mark.parametrize("zeroed", ["v_proj", "k_proj"])
def test_B03_a_layer_of_zeros(reference: Backend, tmp_path: Path, mode: str, zeroed: str) -> None:
    """300 tokens with no window at all. Zero V gives exactly zero, zero K the plain mean of V."""
    name = f"model.layers.1.self_attn.{zeroed}.weight"
    zeros = {name: np.zeros_like(TinyLlama().tensors()[name])}
    model = load_on(reference, tiny_folder(tmp_path, extra_tensors=zeros), window=BARE)
    ids, q = random_ids(300), np.random.default_rng(1).standard_normal((1, 4, 1, 64)).astype(np.float32)
    raw = logits(in_mode(model, "fp16"), ids)
    cache = decode_state(in_mode(model, mode))
    got = logits(model, ids, chunk=1, cache=cache)
    assert np.isfinite(got).all()
    assert cache.stats().rows_folded == 288
    assert divergence(raw, got).mean() <= TINY_KL[mode]
    k, v = cache.dense(1)
    out = cache.layers[1].attend(q, 0.125)
    assert not (k if zeroed == "k_proj" else v).any()
    want = np.zeros_like(out) if zeroed == "v_proj" else np.repeat(v.mean(2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(out, want, rtol=0, atol=0 if zeroed == "v_proj" else 1e-5)


# Rows and bytes


@pytest.mark.parametrize(
    ("prompt", "tokens", "chunk"),
    [(10, 1001, 512), (1000, 11, 1), (1000, 11, 7)],
    ids=["decode-1000", "prompt-by-1", "prompt-by-7"],
)
def test_B105_decoded_tokens_are_folded_too(
    reference: Backend, tmp_path: Path, prompt: int, tokens: int, chunk: int
) -> None:
    """At 1,010 rows 768 are folded, 242 in the tail and 4 are sinks, however they came in; 16-bit raw rows."""
    model = load_on(reference, tiny_folder(tmp_path), kv_cache_mode="int8", dtype="float16")
    recorder = Recorder(model)
    generation = recorder.generate(random_ids(prompt).tolist(), tokens, chunk)
    for _ in generation:
        stats = generation.cache.stats()
        tail = stats.tokens - stats.rows_folded
        assert stats.rows_folded == folded_rows(stats.tokens, DEFAULT)
        assert tail == stats.tokens or 128 <= tail <= 255
        per_head = (stats.rows_raw * 256) + stats.rows_folded * 132
        assert stats.kv_bytes == 2 * 2 * per_head
    assert recorder.counts[-tokens + 1 :] == [1] * (tokens - 1)
    assert len(generation.token_ids) == tokens
    stats = generation.cache.stats()
    assert (stats.tokens, stats.rows_folded, stats.rows_raw) == (1010, 768, 4 + 242)
    assert stats.kv_bytes == 2 * 2 * ((4 + 242) * 256 + 768 * 132)
    assert all(layer.rows_folded == 768 for layer in generation.cache.layers)


MARGINAL = {"fp16": 256, "int8": 132, "int8-turbo4": 100, "turbo4-asym": 162, "turbo4-delegated": 162}
MARGINAL |= {"turbo3-asym": 154, "turbo4": 69}


@each_mode
def test_L12_marginal_bytes_per_token(reference: Backend, tmp_path: Path, mode: str) -> None:
    """From 512 to 1,024 tokens the live bytes grow by the table's bytes per token and head (D = 64, 16-bit rows)."""
    model = load_on(reference, tiny_folder(tmp_path), kv_cache_mode=mode, dtype="float16")
    cache = model.new_cache()
    sizes = []
    for part in (random_ids(512), random_ids(512, seed=1)):
        logits(model, part, chunk=128, cache=cache)
        cache.begin_decode()
        sizes.append(cache.stats())
    assert cache.mode.name == mode
    assert sizes[0].rows_folded == (384 if mode != "fp16" else 0)
    assert sizes[1].kv_bytes - sizes[0].kv_bytes == 512 * MARGINAL[mode] * 2 * 2


def test_boundary_layers_stay_raw(reference: Backend, tmp_path: Path) -> None:
    window = WindowPolicy(recent_tokens=32, page_size=32, boundary_layers=1)
    model = load_on(reference, tiny_folder(tmp_path, layers=4), kv_cache_mode="turbo4", window=window)
    cache = model.new_cache()
    logits(model, random_ids(200), cache=cache)
    assert [layer.rows_folded for layer in cache.layers] == [0, 160, 160, 0]
    assert cache.stats().rows_folded == 160
