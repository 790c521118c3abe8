"""What is refused, and how: OpenAI's shape, the field at fault, and a server that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from live import CHAT, MESSAGES, NATIVE, TEXTS, Live, error_of, works

from kvcore.engine.types import BudgetError, ContextLengthError, ModeError, NotReadyError, QueueFullError
from kvcore.errors import InputError, UnsupportedError

BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXTS: {"prompt": "hi"}, NATIVE: {"prompt": "hi"}}


S4 = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"kv_cache_mode": "turbo5"}, "kv_cache_mode"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": 5, "n_predict": -1}, "n_predict"),
    ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), S4, ids=[json.dumps(fields)[:50] for fields, _ in S4])
def test_S4_a_bad_field_is_named(fake: Live, fields: dict[str, Any], param: str) -> None:
    error = error_of(fake.post(CHAT, **BASE[CHAT] | fields))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert works(fake)


UNSUPPORTED = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x", "format": "wav"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("reasoning_effort", "high"),
    ("grammar", "root ::= x"),
    ("json_schema", {}),
    ("xtc_probability", 0.5),
    ("mirostat", 2),
    ("adapters", "lora"),
    ("draft_model", "small"),
    ("min_tokens", 5),
    ("stop_token_ids", [5]),
    ("skip_special_tokens", False),
    ("cache_prompt", False),
    ("samplers", ["top_k"]),
    ("tempreature", 0.5),
]


def test_alternatives_need_logprobs(fake: Live) -> None:
    assert error_of(fake.post(TEXTS, prompt="x", top_logprobs=3))["param"] == "top_logprobs"
    assert fake.post(TEXTS, prompt="x", logprobs=False, top_logprobs=-1).status_code == 200


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_a_field_that_is_not_supported_is_named_and_not_ignored(fake: Live, name: str, value: Any) -> None:
    for path in BASE:
        error = error_of(fake.post(path, **BASE[path], **{name: value}))
        assert error["param"] == name
        assert error["message"].startswith(f"{name}: ")
    assert error["code"] == ("unknown_field" if name == "tempreature" else "unsupported_value")


def test_harmless_fields_pass(fake: Live) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": []}
    harmless |= {
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "suffix": None,
    }
    assert fake.post(CHAT, messages=MESSAGES, **harmless).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {}},
        {"text": "no type"},
    ],
    ids=["image", "audio", "no type"],
)
def test_parts_other_than_text_are_refused(fake: Live, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "look"}, part]
    error = error_of(fake.post(CHAT, messages=[*MESSAGES, {"role": "user", "content": content}]))
    assert error["param"] == "messages[1].content"
    assert "part 1" in error["message"]
    assert "AAAA" not in error["message"]


def test_a_whole_answer_can_be_sent_back(fake: Live) -> None:
    answer = fake.post(CHAT, messages=MESSAGES).json()["choices"][0]["message"]
    answer |= {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert fake.post(CHAT, messages=[*MESSAGES, answer, *MESSAGES]).status_code == 200
    answer["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]
    assert error_of(fake.post(CHAT, messages=[*MESSAGES, answer]))["param"] == "messages[1].tool_calls"


@pytest.mark.parametrize("path", [CHAT, TEXTS, NATIVE])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "-1", "1e400", '"0.5"', "true", "null"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k"])
def test_B152_numbers_that_are_none(fake: Live, path: str, name: str, word: str) -> None:
    # top_k -1 is vLLM's word for off.
    fine = word == "null" or (name, word) == ("top_k", "-1")
    for streamed in ("", ', "stream": true'):
        raw = json.dumps(BASE[path])[:-1] + f', "{name}": {word}{streamed}}}'
        response = fake.http.post(path, content=raw, headers={"Content-Type": "application/json"})
        if fine:
            assert response.status_code == 200
        else:
            assert error_of(response)["param"] == name


@pytest.mark.parametrize("word", ["NaN", "Infinity", "1e400", '"1"', "true", "null"])
def test_B152_biases_that_are_no_numbers(fake: Live, word: str) -> None:
    raw = json.dumps(BASE[CHAT])[:-1] + f', "logit_bias": {{"5": {word}}}}}'
    assert error_of(fake.http.post(CHAT, content=raw))["param"] == "logit_bias"


BROKEN = {
    "empty": b"",
    "not JSON": b"hello",
    "cut": b'{"messages": [',
    "a list": b"[]",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xe6\xad"}]}',
    "too deep": b"[" * 100_000,
    "a huge number": b'{"seed": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN.keys())
def test_B52_a_broken_body(fake: Live, raw: bytes) -> None:
    error = error_of(fake.http.post(CHAT, content=raw))
    assert error["code"] == "invalid_json"
    assert works(fake)


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        (CHAT, r'{"messages": [], "\UD800": 1}'.replace("\\U", "\\u")),
        (TEXTS, r'{"prompt": "\uD83d"}'),
        (TEXTS, r'{"prompt": "x", "\ud800": 1}'),
        (TEXTS, r'{"prompt": "x", "model": "\ud800"}'),
    ],
)
def test_half_a_surrogate_pair_is_refused(fake: Live, path: str, raw: str) -> None:
    assert "surrogate" in error_of(fake.http.post(path, content=raw))["message"]
    pair = raw.replace(r"\ud800", r"\ud83d\udc4d").replace(r"\uD83d", r"\uD83d\uDC4D").replace(r"\uD800", "m")
    assert "surrogate" not in fake.http.post(path, content=pair).text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "must be a text"),
        (None, "must be a text"),
        (5, "must be a text"),
        ([1, "a"], "must be a text"),
        ([[1, True]], "must be a text"),
        ([-1], "vocabulary"),
        ([99999], "vocabulary"),
        ([[]], "empty"),
    ],
)
def test_prompts_that_are_none(fake: Live, prompt: Any, words: str) -> None:
    error = error_of(fake.post(TEXTS, prompt=prompt))
    assert error["param"] == "prompt"
    assert words in error["message"]


def test_an_unknown_model_is_not_found(fake: Live) -> None:
    error = error_of(fake.post(CHAT, messages=MESSAGES, model="gpt-4"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = error_of(fake.http.get("/v1/models/gpt-4"), 404)
    assert error["code"] == "model_not_found"
    for name in ("tiny", "tiny-alias", "default_model", None):
        body = fake.post(CHAT, messages=MESSAGES, model=name).json()
        assert body["model"] == "tiny"


def test_models(fake: Live) -> None:
    models = fake.http.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["tiny", "tiny-alias"]
    assert fake.http.get("/v1/models/tiny").json() == models["data"][0]
    assert models["data"][0]["max_model_len"] == 4096


REFUSALS = [
    (QueueFullError("256 requests wait", 2.5), 429, "queue_full", None),
    (ContextLengthError("the prompt has 200 tokens, the context 128"), 400, "context_length_exceeded", "messages"),
    (BudgetError("needs 10 bytes, has 5"), 400, "insufficient_kv_budget", "messages"),
    (NotReadyError("the engine stops"), 503, "not_ready", None),
    (UnsupportedError("no mode like this here"), 400, "invalid_value", "messages"),
    (InputError("no"), 400, "invalid_value", "messages"),
    (InputError("cache mode of no kind"), 400, "invalid_value", "messages"),
    (ModeError("cache mode int8: this server has room for fp16 only"), 400, "invalid_value", "kv_cache_mode"),
    (ValueError("secret words"), 500, "internal", None),
]


@pytest.mark.parametrize(("refuse", "status", "code", "param"), REFUSALS, ids=[code for _, _, code, _ in REFUSALS])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_refusal_of_the_engine_has_its_status(
    fake: Live, refuse: Exception, status: int, code: str, param: str | None, streamed: bool
) -> None:
    fake.engine.refuse = refuse
    response = fake.post(CHAT, messages=MESSAGES, stream=streamed)
    error = error_of(response, status)
    assert (error["code"], error["param"]) == (code, param)
    assert "secret" not in error["message"]
    if status == 429:
        assert response.headers["retry-after"] == "3"
        assert error["type"] == "rate_limit_error"
    fake.engine.refuse = None
    assert works(fake)


def test_of_several_choices_all_are_taken_or_none(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"max_queue": 3})
    live.engine.hold.clear()
    response = live.post(CHAT, messages=MESSAGES, n=4)
    assert error_of(response, 429)["code"] == "queue_full"
    assert len(live.engine.cancelled) == 3
    assert live.idle()
    live.engine.hold.set()
    assert works(live)


def test_more_choices_than_may_ever_be_open_are_a_bad_request(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"most_open": 3})
    error = error_of(live.post(CHAT, messages=MESSAGES, n=4), 400)
    assert (error["param"], "at most 3 at a time" in error["message"]) == ("n", True)
    assert works(live)


def test_a_model_without_a_template_takes_completions_only(serve_fake: Callable[..., Live], tmp_path: Any) -> None:
    from tiny_tokenizer import write_tiny_tokenizer

    from kvcore.text import Tokenizer

    own = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path))
    live = serve_fake(served={"tokenizer": own})
    error = error_of(live.post(CHAT, messages=MESSAGES))
    assert error["param"] == "messages"
    assert "/v1/completions" in error["message"]
    assert live.post(TEXTS, prompt="hi").status_code == 200


def test_a_template_may_reject_messages(serve_fake: Callable[..., Live], tmp_path: Any) -> None:
    from tiny_tokenizer import write_tiny_tokenizer

    from kvcore.text import Tokenizer

    template = "{{ raise_exception('roles must alternate') }}"
    own = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template))
    live = serve_fake(served={"tokenizer": own})
    error = error_of(live.post(CHAT, messages=MESSAGES))
    assert "roles must alternate" in error["message"]


def test_paths_and_methods(fake: Live) -> None:
    assert error_of(fake.http.get("/v1/nonsense"), 404)["code"] == "not_found"
    assert error_of(fake.http.get(CHAT), 405)["code"] == "method_not_allowed"
    assert error_of(fake.http.post("/health"), 405)["code"] == "method_not_allowed"
    assert error_of(fake.http.get("/page/../chat.js"), 404)
    assert fake.http.get("/version").json()["version"]
    assert fake.http.head("/health").status_code == fake.http.head("/").status_code == 200
    assert fake.post(CHAT, messages=MESSAGES, max_tokens=5, max_completion_tokens=5).status_code == 200


def test_a_body_that_is_too_large(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(max_body=1000)
    assert error_of(live.post(TEXTS, prompt="x" * 1000), 413)["code"] == "body_too_large"

    def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    assert error_of(live.http.post(TEXTS, content=pieces()), 413)["code"] == "body_too_large"
    assert works(live)
