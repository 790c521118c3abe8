"""Over HTTP, with the real engine and a tiny model: the text is that of `generate`, in every mode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from live import CHAT, MESSAGES, TEXTS, Live, error_of, wait_until
from real import serving, slow
from sse import stream
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.engine import Engine
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

SMALL = WindowPolicy(recent_tokens=32, page_size=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = write_tiny_llama(tmp_path_factory.mktemp("served"), eos_token_id=None, layers=2)
    return write_tiny_tokenizer(made, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def model(folder: Any) -> kvcore.Model:
    return kvcore.load(folder, backend="reference", window=SMALL)


@pytest.fixture(scope="module")
def live(model: kvcore.Model) -> Iterator[Live]:
    with serving(model, prefill_step=64) as served:
        yield served


def alone(model: kvcore.Model, prompt: Any, mode: str = "fp16", **params: Any) -> str:
    """What `generate` says."""
    generation = model.generate(
        prompt, kvcore.SamplingParams(**params), raw=True, cache=model.new_cache(mode), prefill_step=64
    )
    return "".join(generation)


def ids(count: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(5, 250, count - 1).tolist()]


@pytest.mark.parametrize("mode", MODES)
def test_B122_the_server_says_what_generate_says(live: Live, model: kvcore.Model, mode: str) -> None:
    whole, streamed = ids(150, seed=1), ids(150, seed=2)  # two, as an adopted prefix would be cut elsewhere
    asked = {"max_tokens": 40, "kv_cache_mode": mode}
    choice = live.post(TEXTS, prompt=whole, **asked).json()["choices"][0]
    assert choice["text"] == alone(model, whole, mode, max_tokens=40)
    assert stream(live.http, TEXTS, prompt=streamed, **asked).text() == alone(model, streamed, mode, max_tokens=40)


def test_a_chat_goes_through_the_template(live: Live, model: kvcore.Model) -> None:
    prompt = model.tokenizer.encode_chat(MESSAGES)
    wanted = alone(model, prompt, max_tokens=20)
    body = live.post(CHAT, messages=MESSAGES, max_tokens=20).json()
    assert body["choices"][0]["message"]["content"] == wanted
    assert body["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4", "turbo4-delegated"])
def test_B90_B117_S5_a_shared_prefix_is_reported(live: Live, mode: str) -> None:
    shared = ids(200, seed=hash(mode) % 1000)
    first = live.post(TEXTS, prompt=[*shared, 7, 8], max_tokens=4, kv_cache_mode=mode).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    before = live.engine.stats().cached_tokens
    second = live.post(TEXTS, prompt=[*shared, 9, 10, 11], max_tokens=4, kv_cache_mode=mode).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    page, recent = SMALL.page_size, SMALL.recent_tokens
    least = page * (200 // page) if mode == "fp16" else page * ((200 - recent) // page)
    assert least <= cached <= 200
    assert second["prompt_tokens"] == 203
    assert live.engine.stats().cached_tokens - before == cached
    found = stream(
        live.http,
        TEXTS,
        prompt=[*shared, 12, 13],
        max_tokens=4,
        kv_cache_mode=mode,
        stream_options={"include_usage": True},
    )
    assert found.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert f'kvcore:prefix_cached_tokens_total{{model_name="tiny"}} {live.engine.stats().cached_tokens:.1f}' in (
        live.http.get("/metrics").text
    )


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4"])
def test_B85_the_same_request_again_says_the_same(live: Live, mode: str) -> None:
    prompt = ids(180, seed=77)
    texts = [
        live.post(TEXTS, prompt=prompt, max_tokens=16, kv_cache_mode=mode).json()["choices"][0]["text"]
        for _ in range(4)
    ]
    assert len(set(texts[1:])) == 1
    if mode == "fp16":
        assert texts[0] == texts[1]


@pytest.mark.parametrize("temperature", [0, 0.7, 2])
def test_B87_B89_logprobs_are_those_of_the_model(live: Live, model: kvcore.Model, temperature: float) -> None:
    prompt = ids(20, seed=3)
    logits = model.forward(np.asarray(prompt, np.int32)[None], model.new_cache())[0, -1].astype(np.float64)
    wanted = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    best = np.argsort(-wanted)[:5]
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 5, "temperature": temperature, "seed": 5}
    logprobs = live.post(TEXTS, **body).json()["choices"][0]["logprobs"]
    top = logprobs["top_logprobs"][0]
    assert sorted(top.values(), reverse=True)[:5] == pytest.approx(wanted[best].tolist(), abs=1e-4)
    assert logprobs["token_logprobs"][0] == pytest.approx(top[logprobs["tokens"][0]], abs=1e-9)
    if temperature == 0:
        assert logprobs["token_logprobs"][0] == pytest.approx(wanted.max(), abs=1e-4)


def test_echoed_logprobs_are_those_of_the_prompt(live: Live, model: kvcore.Model) -> None:
    prompt = ids(90, seed=4)
    logits = model.forward(np.asarray(prompt, np.int32)[None], model.new_cache(), all_logits=True)[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    for _ in range(2):  # the second time, its rows are there already
        found = live.post(TEXTS, **body).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert found[0] is None
        assert found[1:] == pytest.approx([wanted[i, prompt[i + 1]] for i in range(89)], abs=1e-3)


def test_choices_with_a_seed_repeat(live: Live) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    four = [c["message"]["content"] for c in live.post(CHAT, **body, n=4).json()["choices"]]
    again = [c["message"]["content"] for c in live.post(CHAT, **body, n=4).json()["choices"]]
    assert four == again
    assert len(set(four)) > 1
    assert live.post(CHAT, **body).json()["choices"][0]["message"]["content"] == four[0]


def test_B40_concurrent_requests_get_their_own_answers(live: Live, model: kvcore.Model) -> None:
    prompts = [ids(20 + 3 * i, seed=100 + i) for i in range(16)]
    wanted = [alone(model, prompt, max_tokens=12) for prompt in prompts]

    def ask(prompt: list[int]) -> str:
        response = httpx.post(live.url + TEXTS, json={"prompt": prompt, "max_tokens": 12}, timeout=120)
        return str(response.json()["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == wanted


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_B123_options_stay_with_their_request(live: Live, model: kvcore.Model, order: tuple[int, ...]) -> None:
    prompt = ids(30, seed=9)
    banned = model.tokenizer.encode(alone(model, prompt, max_tokens=1))[-1]
    bodies = [
        {"prompt": prompt, "max_tokens": 3},
        {"prompt": prompt, "max_tokens": 12, "logit_bias": {str(banned): -100}, "logprobs": 0},
        {"prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 7, "stop": "x"},
    ]
    single = [live.post(TEXTS, **body).json()["choices"][0] for body in bodies]

    def ask(i: int) -> Any:
        return i, httpx.post(live.url + TEXTS, json=bodies[i], timeout=120).json()["choices"][0]

    with ThreadPoolExecutor(3) as pool:
        for i, choice in pool.map(ask, order):
            assert choice["text"] == single[i]["text"]
    assert model.tokenizer.pieces[banned].decode("utf-8", "replace") not in single[1]["logprobs"]["tokens"]


def test_S1_pages_are_free_after_a_client_left(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(live, monkeypatch)
    before = live.engine.stats().finished.get("cancelled", 0)
    body = {"prompt": ids(40, seed=11), "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", live.url + TEXTS, json=body, timeout=60) as response:
        lines = response.iter_lines()  # a name, for a generator that nobody holds closes the connection
        next(lines)
        assert live.engine.stats().running == 1
    assert live.idle()
    assert live.engine.stats().finished["cancelled"] == before + 1
    assert sum(use.running for use in live.engine.stats().kv.values()) == 0


def test_B92_B94_the_context_bounds_prompt_and_answer(model: kvcore.Model) -> None:
    with serving(model, max_model_len=128) as live:
        for more in ({}, {"max_tokens": 7}):
            error = error_of(live.post(TEXTS, prompt=ids(200), **more))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert "200" in error["message"]
            assert "128" in error["message"]
            assert "-" not in error["message"]
        long = [{"role": "user", "content": "x" * 300}]
        assert error_of(live.post(CHAT, messages=long))["param"] == "messages"
        choice = live.post(TEXTS, prompt=ids(8), max_tokens=125).json()
        assert choice["usage"]["completion_tokens"] == 120
        assert choice["choices"][0]["finish_reason"] == "length"
        chat = live.post(CHAT, messages=MESSAGES, max_tokens=125).json()
        assert chat["usage"]["total_tokens"] == 128
        assert chat["choices"][0]["finish_reason"] == "length"
        assert live.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_B132_what_can_never_fit_is_refused_with_both_numbers(model: kvcore.Model, mode: str) -> None:
    with serving(model, kv_cache_budget=2 * 2**20) as live:
        error = error_of(live.post(TEXTS, prompt=ids(4000), max_tokens=1, kv_cache_mode=mode))
        assert error["code"] == "insufficient_kv_budget"
        assert "4000" in error["message"]
        assert str(2 * 2**20) in error["message"] or "2.0 MiB" in error["message"]
        assert live.engine.stats().prompt_tokens == 0
        assert live.post(TEXTS, prompt=ids(5), max_tokens=1, kv_cache_mode=mode).status_code == 200


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4"])
def test_B110_a_cap_bounds_what_a_request_holds(model: kvcore.Model, mode: str) -> None:
    with serving(model, max_kv_size=128, keep=4, prefill_step=32) as live:
        body = {"prompt": ids(300, seed=2), "max_tokens": 150, "kv_cache_mode": mode, "stream": True}
        most = 0
        with httpx.stream("POST", live.url + TEXTS, json=body, timeout=120) as response:
            for _ in response.iter_lines():
                most = max(most, live.engine.stats().kv[mode].running)
        config = model.config
        raw_row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        assert 0 < most <= 160 * raw_row
        assert live.http.get("/health").json()["cap"] == {"max_kv_size": 128, "keep": 4, "context_shift": True}


def test_B42_a_step_that_fails_ends_its_request_only(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as live:
        engine = live.engine
        assert isinstance(engine, Engine)
        sample = Engine._sample

        def fails(self: Engine, running: Any, logits: np.ndarray) -> Any:
            if running.request.params.seed == 13 and len(running.answer.tokens) == 3:
                logits = np.full_like(logits, np.nan)
            return sample(self, running, logits)

        monkeypatch.setattr(Engine, "_sample", fails)
        more = {"max_tokens": 12, "ignore_eos": True}
        bodies = [{"prompt": ids(20, seed=i), "seed": 13 if i == 1 else i, **more} for i in range(4)]
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(httpx.post, live.url + TEXTS, json=body, timeout=120) for body in bodies]
            for i, response in enumerate(each.result() for each in asked):
                if i == 1:
                    assert "finite" in error_of(response, 500)["message"]
                else:
                    assert response.json()["usage"]["completion_tokens"] == 12
        assert stream(live.http, TEXTS, **bodies[1]).chunks[-1]["error"]["code"] == "not_finite"
        assert live.post(TEXTS, **bodies[0]).status_code == 200
        assert live.http.get("/health").json()["status"] == "ready"


def test_B74_memory_that_runs_out_ends_one_request(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.engine.steps import Stepper

    with serving(model, prefill_step=32) as live:
        prefill = Stepper.prefill

        def fails(self: Stepper, running: Any, part: np.ndarray, **more: Any) -> Any:
            if running.request.params.seed == 13 and running.offset >= 64:
                return MemoryError("no more")
            return prefill(self, running, part, **more)

        monkeypatch.setattr(Stepper, "prefill", fails)
        others = [{"prompt": ids(20, seed=i), "max_tokens": 25} for i in range(2)]
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_stream, live.url, body) for body in others]
            assert wait_until(lambda: live.engine.stats().running >= 1)
            error = error_of(live.post(TEXTS, prompt=ids(150), seed=13), 503)
            assert error["code"] == "out_of_memory"
            assert all(each.result().done for each in streams)
        assert live.post(TEXTS, prompt=ids(150), max_tokens=2).status_code == 200


def test_B127_an_engine_that_dies_ends_every_request_at_once(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model) as live:
        slow(live, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            opened = pool.submit(_stream, live.url, {"prompt": ids(20), "max_tokens": 3000})
            assert wait_until(lambda: live.engine.stats().generated_tokens > 3)

            def broken(*_args: object) -> None:
                raise ValueError("a bug")

            monkeypatch.setattr(Engine, "_collect", broken)
            assert "failed" in opened.result().chunks[-1]["error"]["message"]
        assert error_of(live.post(TEXTS, prompt=ids(5)), 503)["code"] == "not_ready"
        health = live.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")


def _stream(url: str, body: dict[str, Any]) -> Any:
    with httpx.Client(base_url=url, timeout=120) as http:
        return stream(http, TEXTS, **body)


def test_a_long_prefill_shows_progress_and_lets_running_streams_go_on(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes one chunk of the prompt and one token of the stream."""
    with serving(model, prefill_step=16) as live:
        slow(live, monkeypatch)
        body = {"prompt": ids(10), "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", live.url + TEXTS, json=body, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            before = live.engine.stats().generated_tokens
            found = _stream(live.url, {"prompt": ids(640, seed=8), "max_tokens": 2, "ignore_eos": True})
            assert live.engine.stats().generated_tokens - before >= 640 // 16
            assert next(lines) is not None
        assert found.done
        assert any(comment.startswith(": prompt ") and comment.endswith("/640") for comment in found.comments)
