"""Generation and its cache: the hand-over, a second turn, trimming, cancelling, other windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import Script

import kvcore
from kvcore.errors import NonFiniteError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES
from kvcore.text import Tokenizer

QUANTIZED = [name for name, mode in MODES.items() if mode.quantized]
SMALL = WindowPolicy(recent_tokens=32, page_size=32)
TEN = kvcore.SamplingParams(max_tokens=10)

each_mode = pytest.mark.parametrize("mode", MODES)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 256, count).tolist()


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> kvcore.Model:
    """Pages and a recent window of 32."""
    return kvcore.load(tiny_folder, backend="reference", window=SMALL)


def tokens(generation: kvcore.Generation) -> list[int]:
    for _ in generation:
        pass
    return generation.token_ids


# The hand-over


def test_the_hand_over_comes_once_after_the_last_prompt_token(tiny_tokenizer: Tokenizer) -> None:
    script = Script([5, 6, 7], vocab=256)
    tokens(script.generate(tiny_tokenizer, prompt=range(10, 50), prefill_step=16, max_tokens=3))
    assert script.events == [16, 16, 8, "begin_decode", 1, 1]


def test_a_delegated_cache_folds_at_the_hand_over_and_page_by_page_after_it(model: kvcore.Model) -> None:
    """Nothing during the prompt's 200 tokens; 160 rows at once; the next page at 224 tokens."""
    cache = model.new_cache("turbo4-delegated")
    folded = []

    def step(part: list[int], cache: kvcore.Cache) -> np.ndarray:
        logits = model.forward(np.array([part]), cache)[0, -1]
        folded.append((cache.offset, cache.stats().rows_folded))
        return logits

    generation = kvcore.Generation(
        step,
        model.tokenizer,
        cache,
        ids(200),
        kvcore.SamplingParams(max_tokens=31),
        eos_token_ids=frozenset(),
        max_position=4096,
        prefill_step=50,
    )
    tokens(generation)
    assert folded[:4] == [(50, 0), (100, 0), (150, 0), (200, 0)]
    assert all(rows == (160 if offset < 224 else 192) for offset, rows in folded[4:])
    assert folded[-1] == (230, 192)


def test_a_later_prompt_of_a_delegated_cache_folds_like_the_asymmetric_mode(model: kvcore.Model) -> None:
    """The hand-over is one-way."""
    stats = {}
    for mode in ("turbo4-delegated", "turbo4-asym"):
        cache, first = model.new_cache(mode), ids(40)
        answer = tokens(model.generate(first, TEN, cache=cache))
        tokens(model.generate([*first, *answer, *ids(100, 1)], kvcore.SamplingParams(max_tokens=1), cache=cache))
        stats[mode] = (cache.stats().rows_folded, cache.stats().kv_bytes)
    assert stats["turbo4-delegated"] == stats["turbo4-asym"]
    assert stats["turbo4-asym"][0] == 96


# A second turn, trimming


def test_a_second_turn_equals_a_fresh_run(model: kvcore.Model) -> None:
    """Raw rows: the kept cache of a chat gives the answer that the whole conversation gives at once."""
    messages = [{"role": "user", "content": "the one"}]
    cache = model.new_cache("fp16")
    first = model.generate(messages, TEN, cache=cache)
    tokens(first)
    assert first.stats.cached_tokens == 0
    conversation = [*first.prompt, *first.token_ids, *model.encode("[user]another", raw=True)[1:]]
    second = model.generate(conversation, TEN, cache=cache)
    fresh = model.generate(conversation, TEN)
    assert tokens(second) == tokens(fresh)
    assert second.text == fresh.text
    assert second.stats.cached_tokens == len(first.prompt) + 9  # its last token was never run
    assert cache.offset == len(conversation) + 9


@each_mode
def test_a_second_turn_equals_one_run_that_was_chunked_there(model: kvcore.Model, mode: str) -> None:
    """In quantized modes what was folded by then differs from a cold run; rows folded since do not."""
    prompt, more = ids(150), ids(30, 1)
    cache, twin = model.new_cache(mode), model.new_cache(mode)
    answer = tokens(model.generate(prompt, TEN, cache=cache))
    second = tokens(model.generate([*prompt, *answer, *more], TEN, cache=cache))
    model.forward(np.array([prompt]), twin)
    twin.begin_decode()
    for token in answer[:-1]:
        model.forward(np.array([[token]]), twin)
    assert second == tokens(model.generate([*prompt, *answer, *more], TEN, cache=twin))
    assert cache.stats() == twin.stats()
    assert cache.stats().rows_folded == (160 if mode != "fp16" else 0)


@pytest.mark.parametrize("kept", [1, 37, 159])
def test_trim_and_continue_equals_a_fresh_run(model: kvcore.Model, kept: int) -> None:
    cache, prompt = model.new_cache("fp16"), ids(150)
    tokens(model.generate(prompt, TEN, cache=cache))
    cache.trim(cache.offset - kept)
    assert cache.offset == kept
    shared = [*prompt, *tokens(model.generate(prompt, TEN))][:kept]
    other = [*shared, *ids(20, 2)]
    assert tokens(model.generate(other, TEN, cache=cache)) == tokens(model.generate(other, TEN))


@pytest.mark.parametrize("mode", QUANTIZED)
def test_trim_into_folded_rows_and_continue(model: kvcore.Model, mode: str) -> None:
    """Rows stay folded; the tail is empty, then refills: 100 kept folded rows and the tail make whole pages again."""
    cache, prompt = model.new_cache(mode), ids(150)
    tokens(model.generate(prompt, TEN, cache=cache))
    assert cache.stats().rows_folded == 96
    cache.trim(cache.offset - 90)
    assert (cache.offset, cache.stats().rows_folded) == (90, 90)
    generation = model.generate([*prompt[:90], *ids(80, 2)], TEN, cache=cache)
    assert len(tokens(generation)) == 10
    assert cache.offset == 179
    assert cache.stats().rows_folded == 90 + 32
    fresh = model.generate([*prompt[:90], *ids(80, 2)], kvcore.SamplingParams(max_tokens=1), cache=model.new_cache())
    tokens(fresh)
    k, _ = cache.dense(0)
    raw, _ = fresh.cache.dense(0)
    assert np.linalg.norm(k[:, :, :170] - raw) <= 0.15 * np.linalg.norm(raw)


# Cancelling


@pytest.mark.parametrize("how", ["close", "cancel"])
@each_mode
def test_the_cache_of_a_cancelled_generation_is_usable(model: kvcore.Model, mode: str, how: str) -> None:
    """What it holds is the prompt and the tokens run so far; the continuation is that of a run never stopped."""
    prompt, cache = ids(100), model.new_cache(mode)
    generation = model.generate(prompt, kvcore.SamplingParams(max_tokens=100), cache=cache)
    pieces = iter(generation)
    while len(generation.token_ids) < 5:
        next(pieces)
    if how == "close":
        pieces.close()
    else:
        generation.cancel()
        assert len(list(pieces)) <= 1
        assert generation.finish_reason == "cancelled"
    so_far = [*generation.prompt, *generation.token_ids]
    assert cache.offset == len(so_far) - 1
    whole = tokens(model.generate(prompt, kvcore.SamplingParams(max_tokens=20), cache=model.new_cache(mode)))
    assert whole[: len(generation.token_ids)] == generation.token_ids
    rest = 20 - len(generation.token_ids)
    resumed = model.generate(so_far, kvcore.SamplingParams(max_tokens=rest), cache=cache)
    assert [*generation.token_ids, *tokens(resumed)] == whole


def test_cancelled_during_the_prompt(tiny_tokenizer: Tokenizer) -> None:
    """The step that runs is finished; no token comes, and a delegated cache is not handed over."""
    script = Script([5], vocab=256)

    def step(part: list[int], cache: object) -> np.ndarray:
        if len(script.events) == 1:
            generation.cancel()
        return script(part, cache)

    generation = script.generate(tiny_tokenizer, prompt=range(10, 60), prefill_step=10)
    generation._step = step
    assert tokens(generation) == []
    assert script.events == [10, 10]
    assert (generation.finish_reason, generation.cache.offset) == ("cancelled", 20)


def test_a_finished_generation_stays_finished(model: kvcore.Model) -> None:
    generation = model.generate(ids(10), TEN)
    text = "".join(generation)
    assert list(generation) == []
    assert (generation.text, len(generation.token_ids)) == (text, 10)


# Windows and modes of a model


@each_mode
def test_a_small_window_folds_in_a_short_generation(model: kvcore.Model, mode: str) -> None:
    """32/32: 90 rows after the last step, of which one page is folded; the sinks are kept raw beside it."""
    generation = replace(model, mode=MODES[mode]).generate(ids(81), TEN)
    tokens(generation)
    stats = generation.cache.stats()
    assert generation.cache.mode.name == mode
    assert stats.tokens == 90
    assert (stats.rows_folded, stats.rows_raw) == ((32, 58 + 4) if mode != "fp16" else (0, 90))


def test_each_generation_has_a_cache_of_its_own(model: kvcore.Model) -> None:
    one, two = model.generate(ids(10), TEN), model.generate(ids(10), TEN)
    interleaved = [piece for pair in zip(one, two, strict=True) for piece in pair]
    assert one.token_ids == two.token_ids
    assert interleaved[::2] == interleaved[1::2]
    assert one.cache is not two.cache


def test_C3_the_reference_names_a_row_that_cannot_be_folded(model: kvcore.Model) -> None:
    """Through a whole generation: a weight of infinity in one k_proj."""
    layer = model.params.layers[1]
    q, k, v = layer.qkv.weight
    bad = k.array.copy()
    bad[64 + 5] = np.inf  # KV head 1
    qkv = replace(layer.qkv, weight=(q, replace(k, array=bad), v))
    params = replace(model.params, layers=(model.params.layers[0], replace(layer, qkv=qkv)))
    broken = replace(model, params=params, mode=MODES["int8"])
    with pytest.raises(NonFiniteError, match="K of layer 1, head 1, position 0"), np.errstate(invalid="ignore"):
        tokens(broken.generate(ids(100), TEN))


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_a_step_that_fails_between_layers_can_be_repeated(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cache, prompt = model.new_cache(mode), ids(100)
    model.forward(np.array([prompt[:60]]), cache)
    last = cache.layers[-1]

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(last, "attend", fail)
    with pytest.raises(MemoryError):
        model.forward(np.array([prompt[60:]]), cache)
    assert [layer.tokens for layer in cache.layers] == [60] * len(cache.layers)
    monkeypatch.undo()
    got = model.forward(np.array([prompt[60:]]), cache)
    fresh = model.new_cache(mode)
    model.forward(np.array([prompt[:60]]), fresh)
    want = model.forward(np.array([prompt[60:]]), fresh)
    assert cache.offset == fresh.offset == 100
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert cache.stats() == replace(fresh.stats(), kv_bytes_allocated=cache.stats().kv_bytes_allocated)
