"""SmolLM2 under a cap: sinks keep it close to the uncapped model, in every mode, with the default and a small window.

The storage here is contiguous. On pages the same steps give the same rows and outputs: tests/cuda/test_paged_cap.py
compares them on small shapes, because Triton's interpreter is slow; on a GPU the model itself runs on pages here.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from llamas import SMALL, Loader, divergence, in_mode

import kvcore
from kvcore.cache import Prefixes
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]

WINDOWS = {"128": WindowPolicy(), "32": SMALL}
PROMPT, NEXT, CAP = 500, 100, 256
CHUNK = 100
LOSS = {"fp16": 1e-6, "int8": 1e-4, "turbo3-asym": 3e-3, "turbo4": 5e-3}  # mean KL to raw rows without a cap; else 1e-3
HALF = 1e-4  # mean KL of float16 to float32, with raw rows and the same cap: 0.00001 measured
each_window = pytest.mark.parametrize("window", WINDOWS)


def scores(model: kvcore.Model, ids: np.ndarray, prompt: int, **cap: int) -> tuple[np.ndarray, kvcore.Cache]:
    """Logits before each token behind the prompt, which runs in chunks; the rest in steps that a cap cuts alike."""
    cache = model.new_cache(**cap)
    for start in range(0, prompt, CHUNK):
        last = model.forward(ids[None, start : min(prompt, start + CHUNK)], cache)
    cache.begin_decode()
    out = [last[0]]
    for start in range(prompt, len(ids) - 1, 20):
        out.append(model.forward(ids[None, start : min(len(ids) - 1, start + 20)], cache, all_logits=True)[0])
    return np.concatenate(out), cache


def assert_sinks_pay(model: kvcore.Model, raw: np.ndarray, ids: np.ndarray, prompt: int, cap: int) -> None:
    """KL to the uncapped raw run with the first four tokens kept is at most half of that without them."""
    found = {}
    for keep in (4, 0):
        got, cache = scores(model, ids, prompt, max_kv_size=cap, keep=keep)
        assert (cache.tokens, cache.offset) == (cap, len(ids) - 1)
        assert (cache.stats().rows_folded > keep) == cache.mode.quantized
        found[keep] = float(divergence(raw, got).mean())
    assert found[4] <= 0.5 * found[0], found


@pytest.fixture(scope="module")
def raw(smollm2: Loader, text_ids: np.ndarray) -> np.ndarray:
    return scores(in_mode(smollm2("reference"), "fp16"), text_ids[: PROMPT + NEXT], PROMPT)[0]


def test_L5_sinks_pay_with_quantized_rows(smollm2: Loader, text_ids: np.ndarray) -> None:
    """The short form of what follows: 120 tokens, cap 96, pages of 32."""
    ids = text_ids[:144]
    want, _ = scores(in_mode(smollm2("torch"), "fp16"), ids, 120)
    assert_sinks_pay(in_mode(smollm2("torch"), "int8", SMALL), want, ids, 120, 96)


@pytest.mark.full
@each_window
@pytest.mark.parametrize("mode", MODES)
def test_L5_B112_sinks_pay_in_every_mode(
    smollm2: Loader, text_ids: np.ndarray, raw: np.ndarray, mode: str, window: str
) -> None:
    """A cap of 256; with the default window of 300, or nothing would be quantized."""
    cap = CAP if window == "32" else 300
    model = in_mode(smollm2("reference"), mode, WINDOWS[window])
    assert_sinks_pay(model, raw, text_ids[: PROMPT + NEXT], PROMPT, cap)


@pytest.mark.full
@each_window
@pytest.mark.parametrize("mode", MODES)
def test_L4_B06_B13_text_beyond_the_cap_is_coherent(
    smollm2: Loader, text_ids: np.ndarray, mode: str, window: str
) -> None:
    """100 tokens after a prompt of 500: a cache that stays, and an answer that raw rows under the cap would give.

    How well so small a model writes under a cap is its own affair: a greedy answer of it may loop. So raw rows have to
    write words that differ without a loop; a quantized mode's distribution has to be that of raw rows under the same
    cap, all along its own answer, within what the mode costs without a cap."""
    model = in_mode(smollm2("torch"), mode, WINDOWS[window])
    prompt = question(model, text_ids)
    cap = CAP if window == "32" else 300
    sizes, cache = [], model.new_cache(max_kv_size=cap)
    generation = model.generate(prompt, kvcore.SamplingParams(max_tokens=NEXT), cache=cache, prefill_step=CHUNK)
    for _ in generation:
        sizes.append(cache.stats().tokens)
    assert {*sizes} <= {cap}
    assert cache.mode.name == mode
    assert (cache.stats().rows_folded > 0) == MODES[mode].quantized
    assert_text(generation.text, generation.token_ids, prompt)
    if mode == "fp16":
        assert_no_loop(generation.text, generation.token_ids)
    else:
        assert answer_loss(in_mode(model, "fp16"), model, prompt, generation.token_ids, cap) <= LOSS.get(mode, 1e-3)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_L5_B112_sinks_pay_on_pages(text_ids: np.ndarray, mode: str) -> None:
    """Pages, fused kernels, float16; beside the same model with a raw cache of its own, and beside graph operations."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    model = kvcore.load(None, backend="cuda", dtype="float16", kernels="fused", kv_cache_mode=mode)
    ids = text_ids[: PROMPT + NEXT]
    want, _ = scores(in_mode(model, "fp16"), ids, PROMPT)
    assert_sinks_pay(model, want, ids, PROMPT, 300)
    prompt = question(model, text_ids)
    generation = model.generate(prompt, kvcore.SamplingParams(max_tokens=NEXT), max_kv_size=300)
    "".join(generation)
    assert_text(generation.text, generation.token_ids, prompt)
    plain = kvcore.load(None, backend="cuda", dtype="float32", kernels="graph", kv_cache_mode="fp16")
    assert answer_loss(plain, model, prompt, generation.token_ids, 300) <= LOSS.get(mode, 1e-3) + HALF


def question(model: kvcore.Model, text_ids: np.ndarray) -> list[int]:
    """A chat of about 500 tokens: a text, and what to do with it."""
    text = model.tokenizer.decode(text_ids[:460].tolist())
    return model.encode(f"{text}\n\nWrite a short story about a hacker who reads this file.")


def answer_loss(raw: kvcore.Model, model: kvcore.Model, prompt: list[int], answer: list[int], cap: int) -> float:
    """Mean KL of ``model`` to ``raw``, both under the cap, where each token of the answer was chosen."""
    ids = np.array([*prompt, *answer])
    want, got = (scores(each, ids, len(prompt), max_kv_size=cap)[0] for each in (raw, model))
    return float(divergence(want, got).mean())


def assert_no_loop(text: str, answer: list[int]) -> None:
    words = text.lower().split()
    assert len({*words}) > 0.4 * len(words), text
    grams = Counter(tuple(answer[i : i + 5]) for i in range(len(answer) - 4))
    assert max(grams.values()) <= 2, text


def assert_text(text: str, answer: list[int], prompt: list[int]) -> None:
    """Words, and no echo of the prompt."""
    assert len(text.split()) >= 30
    seen = {tuple(prompt[i : i + 8]) for i in range(len(prompt) - 7)}
    echoed = sum(tuple(answer[i : i + 8]) in seen for i in range(len(answer) - 7))
    assert echoed <= 0.2 * len(answer), text


# Reuse of prompts


@pytest.mark.full
@each_window
@pytest.mark.parametrize("mode", MODES)
def test_B119_a_prompt_that_extends_another_or_shares_its_start(
    smollm2: Loader, text_ids: np.ndarray, mode: str, window: str
) -> None:
    """Extending equals the uninterrupted run. A shorter common prefix is a run chunked there, and close to a cold one:
    within twice the mode's KL, as rows between the adopted ones and the end of the prefix see others quantized."""
    model = in_mode(smollm2("reference"), mode, WINDOWS[window])
    length, shared = (130, 101) if window == "32" else (420, 300)
    ids, other = text_ids[:length].tolist(), text_ids[1000:1012].tolist()
    cache, prefixes = model.new_cache(), Prefixes()
    model.prefill(ids, cache, prefill_step=CHUNK)
    cache.begin_decode()
    assert (cache.stats().rows_folded > 0) == MODES[mode].quantized
    prefixes.donate(ids, cache)
    longer = prefixes.adopt([*ids, *other], cache.spec)
    assert longer is not None
    assert longer.offset == length
    np.testing.assert_array_equal(*(model.forward(np.array([other]), each) for each in (longer, cache)))

    prompt = [*ids[:shared], *other]
    adopted = prefixes.adopt(prompt, cache.spec)
    assert adopted is not None
    page, recent = model.window.page_size, model.window.recent_tokens
    assert adopted.offset == page * ((shared - recent) // page if MODES[mode].quantized else shared // page)
    got = last_logits(model, prompt[adopted.offset :], adopted, len(other))
    chunked = model.new_cache()
    model.prefill(prompt[:shared], chunked, prefill_step=CHUNK)
    chunked.begin_decode()
    there = last_logits(model, other, chunked, len(other))
    cold = last_logits(model, prompt, model.new_cache(), len(other))
    limit = {"fp16": 1e-6, "int8": 1e-4, "int8-turbo4": 1e-3, "turbo4": 1e-2}.get(mode, 3e-3)  # the mode's KL
    assert divergence(there, got).mean() <= 2 * limit
    assert divergence(cold, got).mean() <= 2 * limit
    assert adopted.stats().rows_folded == chunked.stats().rows_folded


def last_logits(model: kvcore.Model, ids: list[int], cache: kvcore.Cache, count: int) -> np.ndarray:
    return model.forward(np.array([ids]), cache, all_logits=True)[0][-count:]
