"""The official client: what it sends is understood, and what it gets it accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live import TEXT, Live, wait_until

openai = pytest.importorskip("openai")

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture
def client(fake: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id.startswith("req-")


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_B46_S3_a_streamed_chat(client: Any, usage: bool, n: int) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    texts, reasons, counts = [""] * n, [None] * n, []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, n=n, **more):
        counts += [chunk.usage] if chunk.usage is not None else []
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert (texts, reasons) == ([TEXT] * n, ["stop"] * n)
    assert [count.completion_tokens for count in counts] == ([49 * n] if usage else [])


def test_the_clients_own_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_an_answer_goes_back_into_the_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message
    again = client.chat.completions.create(model="tiny", messages=[*MESSAGES, answer, MESSAGES[1]])
    assert again.choices[0].message.content == TEXT


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, max_completion_tokens=4
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == TEXT[:4]
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == TEXT[:4]


def test_completions(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=6, n=2, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aIt was", "aIt was", "bIt was", "bIt was"]
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    pieces = client.completions.create(model="tiny", prompt="a", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == "It was"


def test_stop(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, stop=["times,", "never"])
    assert answer.choices[0].message.content == TEXT[: TEXT.index("times,")]
    assert answer.choices[0].finish_reason == "stop"


def test_extra_parameters(client: Any, fake: Live) -> None:
    client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    )
    params = fake.engine.submitted[-1].params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny").owned_by == "kvcore"


@pytest.mark.parametrize(
    ("changes", "kind", "param"),
    [
        ({"temperature": 5}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "BadRequestError", "tools"),
        ({"model": "gpt-4"}, "NotFoundError", "model"),
    ],
)
def test_errors_have_their_class_and_param(client: Any, changes: Any, kind: str, param: str) -> None:
    with pytest.raises(getattr(openai, kind)) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | changes)
    assert raised.value.param == param
    assert raised.value.code


def test_authentication(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(api_key="sk-right")
    wrong = openai.OpenAI(base_url=live.url + "/v1", api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with openai.OpenAI(base_url=live.url + "/v1", api_key="sk-right", max_retries=0) as made:
        assert made.models.list().data


def test_a_full_queue_is_tried_again(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"max_queue": 0})
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        with pytest.raises(openai.RateLimitError) as raised:
            made.chat.completions.create(model="tiny", messages=MESSAGES)
        assert raised.value.response.headers["retry-after"] == "3"


def test_an_error_in_a_stream_is_raised(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"fail_after": 5})
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        pieces = []

        def read() -> None:
            for chunk in made.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                pieces.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="logits"):
            read()
        assert "".join(pieces) == TEXT[:5]


def test_a_stream_that_is_closed_ends_its_request(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(script=lambda _request: [77] * 100_000, engine={"step_seconds": 0.01})
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        with made.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as chunks:
            for _, _chunk in zip(range(3), chunks, strict=False):
                pass
            assert live.engine.stats().running == 1
        assert wait_until(lambda: live.engine.stats().running == 0)


def test_the_asynchronous_client(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"step_seconds": 0.002})

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:

            async def one(i: int) -> str:
                if i % 2:
                    answer = await made.chat.completions.create(model="tiny", messages=MESSAGES)
                    return str(answer.choices[0].message.content)
                chunks = await made.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*(one(i) for i in range(12)))

    assert asyncio.run(ask()) == [TEXT] * 12
    assert live.idle()
