"""Requests as users of mlx_lm.server, llama-server and vLLM send them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live import CHAT, TEXT, TEXTS, Live, error_of
from sse import stream

MESSAGES = [{"role": "user", "content": "Say this is a test!"}]


def test_mlx_lm_server_chat(fake: Live) -> None:
    """The request of its documentation, and one with every field at its default."""
    assert fake.post(CHAT, messages=MESSAGES, temperature=0.7).status_code == 200
    defaults = {
        "model": "default_model",
        "draft_model": "default_model",
        "num_draft_tokens": 3,
        "adapters": None,
        "max_tokens": 512,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 0.0,
        "repetition_context_size": 20,
        "presence_penalty": 0.0,
        "presence_context_size": 20,
        "frequency_penalty": 0.0,
        "frequency_context_size": 20,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "logit_bias": None,
        "logprobs": False,
        "top_logprobs": -1,
        "seed": None,
        "stop": None,
        "chat_template_kwargs": None,
        "stream": False,
        "stream_options": None,
    }
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXTS, {"prompt": "hi"})):
        mine = {k: v for k, v in defaults.items() if path == CHAT or k != "chat_template_kwargs"}
        response = fake.post(path, **body, **mine)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert fake.engine.submitted[-1].params.repetition_penalty == 1
    assert fake.post("/chat/completions", messages=MESSAGES).status_code == 200


def test_mlx_lm_server_logprobs_of_completions(fake: Live) -> None:
    choice = fake.post(TEXTS, prompt="hi", logprobs=True, top_logprobs=2, max_tokens=2).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2]
    assert fake.post(TEXTS, prompt="hi", logprobs=False).json()["choices"][0]["logprobs"] is None


def test_mlx_lm_server_penalty_window(fake: Live) -> None:
    error = error_of(fake.post(CHAT, messages=MESSAGES, repetition_penalty=1.1, repetition_context_size=20))
    assert error["param"] == "repetition_context_size"
    assert fake.post(CHAT, messages=MESSAGES, repetition_penalty=1.1).status_code == 200
    assert fake.engine.submitted[-1].params.repetition_penalty == 1.1


def test_llama_server_completion(fake: Live) -> None:
    """The request of its documentation; its JavaScript example sends no content type."""
    body = {"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 6}
    answer = fake.post("/completion", **body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("It was", True, "limit")
    assert answer["tokens_predicted"] == 6
    assert answer["tokens_evaluated"] > answer["tokens_cached"] > 0
    plain = fake.http.post("/completion", content=json.dumps(body), headers={"Content-Type": "text/plain"})
    assert plain.json()["content"] == "It was"
    whole = fake.post("/completion", prompt="x", n_predict=-1).json()
    assert (whole["content"], whole["stop_type"]) == (TEXT, "eos")
    assert fake.post("/completion", prompt="x", n_predict=0).json()["content"] == ""


def test_llama_server_completion_stream(fake: Live) -> None:
    found = stream(fake.http, "/completion", prompt="x", n_predict=6)
    *pieces, last = found.chunks
    assert "".join(piece["content"] for piece in pieces) == "It was"
    assert not any(piece["stop"] for piece in pieces)
    assert (last["content"], last["stop"], last["tokens_predicted"]) == ("", True, 6)
    assert not found.done


def test_llama_server_samplers_at_rest(fake: Live) -> None:
    """What its clients send along with each request; each is off."""
    rest: dict[str, Any] = {
        "cache_prompt": True,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "typical_p": 1,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "mirostat": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "temperature": 0.8,
        "seed": -1,
        "id_slot": -1,
        "grammar": "",
        "timings_per_token": False,
        "reasoning_format": "none",
        "n_predict": 5,
    }
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/completion", {"prompt": "x"})):
        assert fake.post(path, **body, **rest).status_code == 200
        params = fake.engine.submitted[-1].params
        assert (params.max_tokens, params.seed, params.top_k, params.repetition_penalty) == (5, None, 40, 1)
    assert fake.post(CHAT, messages=MESSAGES, repeat_penalty=1.3).status_code == 200
    assert fake.engine.submitted[-1].params.repetition_penalty == 1.3


@pytest.mark.parametrize("path", [CHAT, TEXTS])
def test_vllm_extras(fake: Live, path: str) -> None:
    extras: dict[str, Any] = {"min_tokens": 0, "skip_special_tokens": True, "top_k": -1, "ignore_eos": True}
    extras |= {"use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [], "priority": 0}
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    assert fake.post(path, **body, **extras).status_code == 200
    params = fake.engine.submitted[-1].params
    assert (params.top_k, params.logit_bias) == (0, ((2, -100.0),))
