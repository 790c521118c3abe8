"""docs/server.md names what the server has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live import CHAT, MESSAGES, TEXTS, Live
from sse import stream

from kvcore.server.fields import IGNORED, NEUTRAL, WINDOWS
from kvcore.server.schema import ChatRequest, CompletionRequest, NativeRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    fields = {name for schema in (ChatRequest, CompletionRequest, NativeRequest) for name in schema.model_fields}
    missing = {name for name in fields - {"messages", "prompt", "model"} if f"`{name}" not in PAGE}
    assert missing == set()
    assert {
        name for name in IGNORED - {"num_draft_tokens", "prompt_cache_retention"} if f"`{name}`" not in PAGE
    } == set()
    assert set(WINDOWS) <= set(NEUTRAL)


def test_every_metric_is_documented(fake: Live) -> None:
    fake.post(CHAT, messages=MESSAGES)
    names = set(re.findall(r"^# TYPE kvcore:(\w+) ", fake.http.get("/metrics").text, re.MULTILINE))
    assert len(names) > 15
    assert {name for name in names if f"`{name}" not in PAGE} == set()


def test_every_path_is_documented(fake: Live) -> None:
    app = fake.server.config.app
    paths = {route.path for route in app.routes if not route.path.startswith("/page")}  # type: ignore[union-attr]
    assert "/v1/chat/completions" in paths
    assert {path for path in paths if f"{path.replace('{name:path}', 'NAME')}`" not in PAGE} == set()


def test_answers_fit_the_clients_types(fake: Live) -> None:
    types = pytest.importorskip("openai.types", exc_type=ImportError)
    chat = pytest.importorskip("openai.types.chat", exc_type=ImportError)
    asked = {"max_tokens": 5, "n": 2}
    whole = fake.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, **asked).json()
    chat.ChatCompletion.model_validate(whole)
    types.Completion.model_validate(fake.post(TEXTS, prompt="x", logprobs=2, **asked).json())
    usage = {"stream_options": {"include_usage": True}}
    for chunk in stream(fake.http, CHAT, messages=MESSAGES, logprobs=True, **asked, **usage).chunks:
        chat.ChatCompletionChunk.model_validate(chunk)
    for chunk in stream(fake.http, TEXTS, prompt="x", logprobs=1, **asked, **usage).chunks:
        # Between the first and the last chunk the finish reason is null, which this type does not foresee.
        types.Completion.model_validate(
            chunk | {"choices": [c | {"finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]}
        )
    for model in fake.http.get("/v1/models").json()["data"]:
        types.Model.model_validate(model)
