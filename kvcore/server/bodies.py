"""The JSON of answers and of chunks, as OpenAI's clients and llama-server's read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.engine.types import Usage
from kvcore.server.logprobs import Placed, chat_logprobs, completion_logprobs
from kvcore.server.prepare import Plan
from kvcore.server.served import Served

Json = dict[str, Any]


def usage_body(usages: Sequence[Usage | None], n: int, *, prompt_only: bool = False) -> Json:
    """Sums over the choices; the prompt of the ``n`` choices of one prompt counts once."""
    known = [usage or Usage(0, 0, 0) for usage in usages]
    prompts = known[::n]
    prompt, cached = sum(u.prompt_tokens for u in prompts), sum(u.cached_tokens for u in prompts)
    made = 0 if prompt_only else sum(u.completion_tokens for u in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def head(plan: Plan, served: Served, *, chunk: bool) -> Json:
    """What an answer and each of its chunks begin with."""
    kind = "text_completion"
    if plan.endpoint == "chat":
        kind = "chat.completion.chunk" if chunk else "chat.completion"
    return {
        "id": plan.id,
        "object": kind,
        "created": plan.created,
        "model": served.name,
        "system_fingerprint": served.fingerprint,
    }


def whole_choice(
    plan: Plan, served: Served, index: int, text: str, placed: Sequence[Placed], finish_reason: str | None
) -> Json:
    """One choice of an answer that is not streamed."""
    choice: Json = {"index": index, "logprobs": logprobs(plan, served, placed), "finish_reason": finish_reason}
    if plan.endpoint == "chat":
        return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}
    return choice | {"text": text}


def delta_choice(
    plan: Plan, served: Served, index: int, text: str, placed: Sequence[Placed], finish_reason: str | None
) -> Json:
    """One choice of a chunk; the one with the finish reason has no text."""
    some = logprobs(plan, served, placed) if placed else None
    choice: Json = {"index": index, "logprobs": some, "finish_reason": finish_reason}
    if plan.endpoint == "chat":
        return choice | {"delta": {"content": text} if text else {}}
    return choice | {"text": text}


def role_choice(index: int) -> Json:
    """The first chunk of a chat's choice."""
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def logprobs(plan: Plan, served: Served, placed: Sequence[Placed]) -> Json | None:
    if plan.logprobs is None:
        return None
    if plan.endpoint == "chat":
        return chat_logprobs(placed, served.tokenizer)
    return completion_logprobs(placed, served.tokenizer, plan.logprobs)


def native_chunk(text: str) -> Json:
    """A chunk of llama-server's own stream."""
    return {"index": 0, "content": text, "stop": False}


def native_body(plan: Plan, served: Served, text: str, usage: Usage, finish_reason: str | None) -> Json:
    """llama-server's own answer, and the last chunk of its stream (with empty ``text``)."""
    body = {
        "index": 0,
        "content": text,
        "stop": True,
        "model": served.name,
        "tokens_predicted": 0 if plan.prompt_only else usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
    }
    if finish_reason == "length":
        return body | {"stop_type": "limit"}
    # With stop strings it is not known here which of the two it was.
    return body if plan.requests[0].params.stop else body | {"stop_type": "eos"}
