"""What a request's answer is made of: text, stop strings, log-probabilities, its own sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from driving import Heard, alone, finish, ids, new_engine, request, some_modes, submit

import kvcore
from kvcore.backends import Backend
from kvcore.engine import Engine
from kvcore.sampling import log_probabilities


def scripted(engine: Engine, texts: dict[str, Iterable[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model say these tokens, whatever it thinks."""
    left = {name: list(tokens) for name, tokens in texts.items()}

    def logits(name: str) -> np.ndarray:
        scores = np.zeros((1, engine.model.config.vocab_size), np.float32)
        scores[0, left[name].pop(0)] = 10
        return scores

    stepper = engine._stepper
    prefill, decode = stepper.prefill, stepper.decode
    monkeypatch.setattr(
        stepper, "prefill", lambda running, *a, **k: (prefill(running, *a, **k), logits(running.request.id))[1]
    )
    monkeypatch.setattr(
        stepper,
        "decode",
        lambda batch, *rest: (decode(batch, *rest), [logits(each.request.id) for each in batch])[1],
    )


def spelled(model: kvcore.Model, text: str) -> list[int]:
    return model.tokenizer.encode(text)[1:]  # without BOS


@pytest.mark.parametrize("together", [1, 4])
def test_M9_B48_nothing_of_a_stop_string_is_emitted(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Every token is a byte or two, so that "OP HE" begins and ends inside of words."""
    engine = new_engine(model)
    names = [f"r{i}" for i in range(together)]
    tokens = spelled(model, "STOP HERE more")
    scripted(engine, dict.fromkeys(names, tokens), monkeypatch)
    heard = submit(engine, *(request(name, ids(5, i), 50, stop=("OP HE",)) for i, name in enumerate(names)))
    finish(engine, heard)
    for each in heard:
        assert (each.text, each.reason) == ("ST", "stop")
        assert each.last.usage.completion_tokens == len(spelled(model, "STOP HE"))


@pytest.mark.parametrize("end", ["eos", "length", "cancel"])
def test_B154_held_text_is_flushed_at_the_end(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    engine = new_engine(model)
    tokens = spelled(model, "pleas")
    scripted(engine, {"a": [*tokens, 2, 2, 2]}, monkeypatch)
    (heard,) = submit(
        engine, request("a", ids(5), len(tokens) if end == "length" else 50, stop=("assistant", "assume"))
    )
    while not heard.done and len(engine._open["a"].answer.tokens) < len(tokens):
        engine.step()
    if end == "cancel":
        engine.cancel("a")
    finish(engine, [heard])
    assert heard.text == "pleas"
    assert heard.reason == {"eos": "stop", "length": "length", "cancel": "cancelled"}[end]


def test_M8_B156_characters_that_span_tokens_come_whole(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four streams with their bytes at different phases."""
    texts = {"a": "😀 oui", "b": "x界y", "c": "né👍🏽", "d": "日本"}
    engine = new_engine(model)
    scripted(engine, {name: [*spelled(model, text), 2] for name, text in texts.items()}, monkeypatch)
    heard = submit(engine, *(request(name, ids(4, i), 60) for i, name in enumerate(texts)))
    finish(engine, heard)
    for each, text in zip(heard, texts.values(), strict=True):
        assert each.text == text
        assert not any("\ufffd" in output.text for output in each.outputs)


def test_B57_every_end_token_ends_and_none_is_shown(tiny_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = kvcore.load(tiny_folder, backend="reference")
    model = replace(loaded, config=replace(loaded.config, eos_token_ids=(2, 7)))
    engine = new_engine(model)
    word = spelled(model, "hi")
    scripted(engine, {"a": [*word, 7, 9], "b": [*word, 2, 9]}, monkeypatch)
    heard = submit(engine, request("a", ids(4), 50, logprobs=1), request("b", ids(4), 50))
    finish(engine, heard)
    assert [(each.text, each.reason) for each in heard] == [("hi", "stop")] * 2
    assert [each.token for output in heard[0].outputs for each in output.tokens] == word


# Log-probabilities


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_log_probabilities_are_the_model_s_whatever_the_sampling(model: kvcore.Model, mode: str) -> None:
    """Penalties, bias and temperature choose the token; the numbers are those of the unmodified logits."""
    engine = new_engine(model)
    sampled = {"temperature": 0.9, "seed": 3, "presence_penalty": 1.0, "logit_bias": {60: 5.0}}
    (heard,) = submit(engine, request("a", ids(40), 12, mode=mode, logprobs=3, **sampled))
    finish(engine, [heard])
    tokens = [each for output in heard.outputs for each in output.tokens]
    assert len(tokens) == 12
    cache = model.new_cache(mode)
    logits = model.forward(np.array([ids(40)]), cache)[0, -1]
    cache.begin_decode()
    for each in tokens:
        want = log_probabilities(logits)
        assert each.logprob == pytest.approx(want[each.token], abs=1e-4)
        assert [token for token, _ in each.top] == np.argsort(-want, kind="stable")[:3].tolist()
        assert each.top[0][1] == pytest.approx(want.max(), abs=1e-4)
        logits = model.forward(np.array([[each.token]]), cache)[0, -1]


def test_log_probabilities_come_with_the_text_that_they_belong_to(model: kvcore.Model) -> None:
    (heard,) = submit(engine := new_engine(model), request("a", ids(20), 30, logprobs=0))
    finish(engine, [heard])
    pieces = [output for output in heard.outputs if output.tokens]
    for output in pieces[:-1]:
        assert output.text
    spoken = b"".join(model.tokenizer.pieces[each.token] for output in pieces for each in output.tokens)
    assert spoken.decode("utf-8", "replace").startswith(heard.text[:5])
    assert all(each.top == () for output in pieces for each in output.tokens)


def test_the_prompt_s_log_probabilities(model: kvcore.Model) -> None:
    """Over several chunks, and once more where rows could have been adopted: then none are."""
    prompt = ids(70)
    engine = new_engine(model, prefill_step=16)
    want = log_probabilities(model.forward(np.array([prompt]), model.new_cache(), all_logits=True)[0])
    for name in "ab":
        (heard,) = submit(engine, request(name, prompt, 3, logprobs=2, echo_logprobs=True))
        finish(engine, [heard])
        tokens = [each for output in heard.outputs for each in output.tokens]
        assert [each.token for each in tokens[:70]] == list(prompt)
        assert tokens[0].logprob is None
        got = [each.logprob for each in tokens[1:70]]
        np.testing.assert_allclose(got, [want[i, token] for i, token in enumerate(prompt[1:])], atol=1e-4)
        assert tokens[5].top[0][0] == int(want[4].argmax())
        assert len(tokens) == 73
        assert heard.last.usage.cached_tokens == 0


def test_an_echo_is_told_once_where_its_request_is_run_again(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model, prefill_step=16)
    prefill, calls = engine._stepper.prefill, []

    def failing(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        return MemoryError() if len(calls) == 3 else prefill(*args, **settings)

    monkeypatch.setattr(engine._stepper, "prefill", failing)
    (heard,) = submit(engine, request("a", ids(70), 3, logprobs=0, echo_logprobs=True))
    finish(engine, [heard])
    tokens = [each.token for output in heard.outputs for each in output.tokens]
    assert tokens[:70] == list(ids(70))
    assert len(tokens) == 73


# Sampling is each request's own


def test_B123_options_stay_with_their_request(model: kvcore.Model) -> None:
    first = alone(model, request("x", ids(9, 1), 1, logprobs=0)).outputs[-1].tokens[0].token
    requests = {
        "a": request("a", ids(9), 3),
        "b": request("b", ids(9, 1), 25, logit_bias={first: -100}, logprobs=0),
        "c": request("c", ids(9, 2), 25, temperature=0.8, seed=7, stop=("q",), repetition_penalty=1.2),
    }
    want = {name: alone(model, each).text for name, each in requests.items()}
    for order in permutations("abc"):
        engine = new_engine(model)
        heard: dict[str, Heard] = {}
        for name in order:
            (heard[name],) = submit(engine, requests[name])
            engine.step()
        finish(engine, heard.values())
        assert {name: each.text for name, each in heard.items()} == want
        assert first not in [each.token for output in heard["b"].outputs for each in output.tokens]


@some_modes
def test_B122_the_engine_says_what_generate_says(model: kvcore.Model, mode: str) -> None:
    """One request, and one in a batch: a prompt of 300 tokens over several folds."""
    wanted = request("a", ids(300), 40, mode=mode)
    cache = model.new_cache(mode)
    want = "".join(model.generate(wanted.prompt, wanted.params, cache=cache, prefill_step=128))
    assert alone(model, wanted, prefill_step=128).text == want


@some_modes
def test_other_backends_agree_with_generate(model_on: kvcore.Model, backend: Backend, mode: str) -> None:
    """Up to the first near-tie: a batch rounds products otherwise, and codes may flip at a boundary."""
    engine = new_engine(model_on, prefill_step=64)
    requests = [request(f"r{i}", ids(20 + 60 * i, i), 16, mode=mode, logprobs=2) for i in range(4)]
    heard = submit(engine, *requests)
    finish(engine, heard)
    for each, got in zip(requests, heard, strict=True):
        cache = model_on.new_cache(mode)
        generation = model_on.generate(each.prompt, each.params, cache=cache, prefill_step=64)
        "".join(generation)
        tokens = [each for output in got.outputs for each in output.tokens]
        for token, want in zip(tokens, generation.token_ids, strict=True):
            if token.token != want:
                assert token.top[0][1] - token.top[1][1] < 0.05, f"{got.last.request_id}: not a near-tie"
                break
