"""Answers and streams in OpenAI's shape, over an engine that says what a test tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from live import CHAT, MESSAGES, TEXT, TEXTS, Live, says
from sse import stream

from kvcore.text import Tokenizer

BODY: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXTS: {"prompt": "hi", "max_tokens": 200}}

both = pytest.mark.parametrize("path", [CHAT, TEXTS], ids=["chat", "completions"])


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_a_whole_chat(fake: Live) -> None:
    response = fake.post(CHAT, model="tiny", messages=MESSAGES)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "kvcore-test",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 49,
            "total_tokens": 68,
            "prompt_tokens_details": {"cached_tokens": 9},
        },
    }


def test_a_whole_completion(fake: Live) -> None:
    body = fake.post(TEXTS, prompt="hi", max_tokens=6).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "It was", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["completion_tokens"] == 6


def test_a_completion_has_16_tokens_unless_it_says_otherwise(fake: Live) -> None:
    assert fake.post(TEXTS, prompt="hi").json()["usage"]["completion_tokens"] == 16


@both
def test_B45_finish_reason_is_null_until_the_last_chunk(fake: Live, path: str) -> None:
    found = stream(fake.http, path, **BODY[path] | {"max_tokens": 5})
    assert found.status == 200
    assert found.finish_reasons()[-1] == "length"
    assert set(found.finish_reasons()[:-1]) == {None}
    assert found.done
    assert len({chunk["id"] for chunk in found.chunks}) == 1
    assert len({chunk["created"] for chunk in found.chunks}) == 1
    assert {chunk["object"] for chunk in found.chunks} == {
        "chat.completion.chunk" if path == CHAT else "text_completion"
    }


def test_the_role_comes_first_and_once(fake: Live) -> None:
    deltas = [choice["delta"] for choice in stream(fake.http, CHAT, **BODY[CHAT]).choices()]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[-1] == {}
    assert all(list(delta) == ["content"] for delta in deltas[1:-1])


@both
def test_B46_usage_comes_last_and_only_on_request(fake: Live, path: str) -> None:
    asked = stream(fake.http, path, **BODY[path], n=2, stream_options={"include_usage": True})
    *chunks, last = asked.chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 98
    assert last["usage"] == fake.post(path, **BODY[path], n=2).json()["usage"]
    for option in ({}, {"stream_options": {"include_usage": False}}):
        plain = stream(fake.http, path, **BODY[path], n=2, **option)
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain.chunks)
        assert plain.text(0) == plain.text(1) == TEXT


@both
def test_B47_no_chunk_is_empty_between_the_first_and_the_last(fake: Live, path: str) -> None:
    plain = stream(fake.http, path, **BODY[path])
    stopped = stream(fake.http, path, **BODY[path], stop=["zzzzzzzz"])
    for found in (plain, stopped):
        assert all(found.pieces())
        assert found.text() == TEXT
    assert plain.pieces() == stopped.pieces()


@both
@pytest.mark.parametrize("stop", ["worst of", ["xyz", "worst of"]], ids=["string", "list"])
def test_M9_B48_B155_a_stop_string_is_never_sent(fake: Live, path: str, stop: Any) -> None:
    whole = fake.post(path, **BODY[path], stop=stop).json()["choices"][0]
    found = stream(fake.http, path, **BODY[path], stop=stop)
    assert text_of(whole) == found.text() == TEXT[: TEXT.index("worst of")]
    assert whole["finish_reason"] == found.finish_reasons()[-1] == "stop"


@both
def test_B154_text_that_was_held_back_comes_before_the_end(serve_fake: Callable[..., Live], path: str) -> None:
    live = serve_fake("pleas")
    for ending in ({}, {"max_tokens": 5}):
        body = BODY[path] | {"stop": ["assistant", "assume"]} | ending
        assert text_of(live.post(path, **body).json()["choices"][0]) == "pleas"
        assert stream(live.http, path, **body).text() == "pleas"


@both
def test_B50_B156_no_half_character_is_ever_sent(
    serve_fake: Callable[..., Live], tokenizer: Tokenizer, path: str
) -> None:
    text = "歪👍🏽é👩‍👩‍👧"
    live = serve_fake(text)
    found = stream(live.http, path, **BODY[path], logprobs=path == CHAT or 1, n=4)
    for index in range(4):
        assert "\ufffd" not in found.text(index)
        assert found.text(index) == text


def test_M8_logprobs_of_half_characters_have_their_bytes(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake("a歪👍b")
    choice = live.post(CHAT, messages=MESSAGES, logprobs=True).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 9
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a歪👍b"
    choice = live.post(TEXTS, prompt="x", logprobs=0).json()["choices"][0]
    assert choice["logprobs"]["tokens"][:4] == ["a", "bytes:\\xe6", "bytes:\\xad", "bytes:\\xaa"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert choice["logprobs"]["top_logprobs"] is None


def test_logprobs_of_a_chat(fake: Live) -> None:
    asked = BODY[CHAT] | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    entries = fake.post(CHAT, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["I", "t", " "]
    assert all(entry["logprob"] == -0.125 and len(entry["top_logprobs"]) == 2 for entry in entries)
    assert entries[0]["top_logprobs"][0] == {"token": "I", "logprob": -0.125, "bytes": [73]}
    found = stream(fake.http, CHAT, **asked)
    assert [e for c in found.choices() if c["logprobs"] for e in c["logprobs"]["content"]] == entries


def test_logprobs_leave_out_the_end_token_and_the_stop_string(fake: Live) -> None:
    for more, text in (({}, TEXT), ({"stop": "worst"}, TEXT[: TEXT.index("worst")])):
        asked = BODY[CHAT] | {"logprobs": True} | more
        whole = fake.post(CHAT, **asked).json()["choices"][0]
        streamed = [
            e for c in stream(fake.http, CHAT, **asked).choices() if c["logprobs"] for e in c["logprobs"]["content"]
        ]
        assert "".join(entry["token"] for entry in whole["logprobs"]["content"]) == text
        assert streamed == whole["logprobs"]["content"]


def test_a_prompt_is_echoed_with_its_logprobs(fake: Live) -> None:
    asked = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 2}
    choice = fake.post(TEXTS, **asked).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "helloIt"
    assert logprobs["tokens"] == ["<s>", *"he", *"llo", "I", "t"] or logprobs["tokens"] == [
        "<s>",
        "he",
        *"llo",
        "I",
        "t",
    ]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    offsets = logprobs["text_offset"]
    assert (offsets[0], offsets[1], offsets[-2:]) == (0, 0, [5, 6])
    found = stream(fake.http, TEXTS, **asked)
    assert found.text() == "helloIt"
    assert [t for c in found.choices() if c["logprobs"] for t in c["logprobs"]["tokens"]] == logprobs["tokens"]


def test_a_prompt_alone_is_scored(fake: Live) -> None:
    body = fake.post(TEXTS, prompt="hello", echo=True, logprobs=1, max_tokens=0).json()
    assert body["choices"][0]["text"] == "hello"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0
    assert stream(fake.http, TEXTS, prompt="hello", echo=True, max_tokens=0).text() == "hello"


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [("hi", [3]), (["hi", "there"], [3, 4]), ([1, 77, 78], [3]), ([[1, 77], [1, 77, 78, 79]], [2, 4])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_the_four_forms_of_a_prompt(fake: Live, prompt: Any, counts: list[int]) -> None:
    body = fake.post(TEXTS, prompt=prompt, n=2, max_tokens=2).json()
    sent = [len(request.prompt) for request in fake.engine.submitted]
    assert sent == [count for count in counts for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(counts)))
    assert body["usage"]["prompt_tokens"] == sum(counts)
    assert body["usage"]["completion_tokens"] == 2 * 2 * len(counts)


def test_choices_have_seeds_of_their_own(fake: Live) -> None:
    fake.post(CHAT, messages=MESSAGES, n=3, seed=7)
    assert [request.params.seed for request in fake.engine.submitted] == [7, 8, 9]


def test_S5_cached_tokens_are_the_engines(fake: Live) -> None:
    usage = fake.post(CHAT, messages=MESSAGES).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2


def test_comments_keep_a_long_prefill_alive(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"prefill_step": 4, "step_seconds": 0.15}, keep_alive=0.05)
    found = stream(live.http, CHAT, messages=MESSAGES, max_tokens=2)
    assert ": keep-alive" in found.comments
    assert any(comment.startswith(": prompt ") and comment.endswith("/19") for comment in found.comments)
    assert found.text() == TEXT[:2]


def test_B53_one_bos(fake: Live) -> None:
    fake.post(CHAT, messages=MESSAGES)
    fake.post(TEXTS, prompt="hi")
    fake.post(TEXTS, prompt="<s>hi")
    for request in fake.engine.submitted:
        assert [request.prompt.index(1), request.prompt.count(1)] == [0, 1]


def test_the_developer_is_the_system_where_the_template_does_not_know_it(
    serve_fake: Callable[..., Live], tokenizer: Tokenizer
) -> None:
    live = serve_fake()
    live.post(CHAT, messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES])
    prompt = tokenizer.decode(live.engine.submitted[-1].prompt)
    assert prompt.startswith("[system]Be brief.[user]hi")


def test_text_parts_are_joined(fake: Live, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert fake.post(CHAT, messages=[{"role": "user", "content": parts}]).status_code == 200
    assert "[user]one two" in tokenizer.decode(fake.engine.submitted[-1].prompt)


def test_parameters_reach_the_engine(fake: Live) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {"5": 1.5, "77": -100},
        "seed": 11,
        "stop": ["a", "b"],
        "max_completion_tokens": 9,
        "kv_cache_mode": "turbo4-sym",
    }
    assert fake.post(CHAT, messages=MESSAGES, **asked).status_code == 200
    (request,) = fake.engine.submitted
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, -0.4)
    assert params.logit_bias == ((5, 1.5), (77, -100))
    assert (params.seed, params.stop, params.max_tokens, request.mode) == (11, ("a", "b"), 9, "turbo4")


def test_a_template_reads_its_own_variables(
    serve_fake: Callable[..., Live], tokenizer: Tokenizer, tmp_path: Any
) -> None:
    from tiny_tokenizer import write_tiny_tokenizer

    template = "{% if shout %}LOUD {% endif %}{{ messages[0]['content'] }}"
    own = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template))
    live = serve_fake(script=says(own, "x"), served={"tokenizer": own})
    live.post(CHAT, messages=MESSAGES, chat_template_kwargs={"shout": True})
    live.post(CHAT, messages=MESSAGES)
    assert [own.decode(request.prompt) for request in live.engine.submitted] == ["LOUD hi", "hi"]
    refused = live.post(CHAT, messages=MESSAGES, chat_template_kwargs={"messages": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")
