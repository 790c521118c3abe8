"""From a request's body to what the engine gets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcore.engine.types import Request
from kvcore.errors import InputError, KvcoreError
from kvcore.sampling import SamplingParams
from kvcore.server.errors import ApiError, bad_request
from kvcore.server.fields import refuse_unsupported
from kvcore.server.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Endpoint,
    Message,
    NativeRequest,
    OpenAiFields,
    SamplingFields,
)
from kvcore.server.served import Served

COMPLETION_TOKENS = 16  # OpenAI's default at /v1/completions
_TINY = 1e-9  # top_p 0 keeps the likeliest token alone


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, ready for the engine: ``requests[p * n + i]`` is choice i of prompt p, with ``index`` p * n + i.

    ``logprobs``: alternatives beside each token, or None. ``echo``: the text of each prompt, where it is repeated.
    ``prompt_only``: run the prompt and show no generated token.
    """

    id: str
    endpoint: Endpoint
    prompt_param: str
    requests: tuple[Request, ...]
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: tuple[str, ...] | None
    prompt_only: bool
    created: int


def plan_chat(body: ChatRequest, served: Served) -> Plan:
    """ApiError for what cannot be served."""
    _check(body, served)
    for i, message in enumerate(body.messages):
        _check_message(message, f"messages[{i}]")
    if body.top_logprobs not in (None, -1) and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs true", "top_logprobs")
    ids = _chat_ids(body, served)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    alternatives = max(0, body.top_logprobs or 0) if body.logprobs else None
    return _plan(body, served, "chat", [ids], _max_tokens(body, limit, served, None), alternatives)


def plan_completion(body: CompletionRequest, served: Served) -> Plan:
    """ApiError for what cannot be served."""
    _check(body, served)
    if body.best_of not in (None, body.n or 1):
        raise bad_request("best_of: must equal n, the best are not chosen here: leave it out", "best_of")
    ids = [_prompt_ids(prompt, served) for prompt in body.prompt]
    if body.top_logprobs not in (None, -1) and body.logprobs is None:
        raise bad_request("top_logprobs: needs logprobs", "top_logprobs")
    asked = body.max_tokens if body.max_tokens is not None else body.n_predict
    prompt_only = asked == 0
    if prompt_only and body.n not in (None, 1):
        raise bad_request("n: with max_tokens 0 there is nothing to choose from", "n")
    limit = 1 if prompt_only else _max_tokens(body, body.max_tokens, served, COMPLETION_TOKENS)
    alternatives = None if body.logprobs is None else max(body.logprobs, body.top_logprobs or 0)
    plan = _plan(body, served, "completions", ids, limit, alternatives, echo=bool(body.echo))
    if not body.echo:
        return replace(plan, prompt_only=prompt_only)
    texts = [_prompt_text(prompt, served) for prompt in body.prompt]
    return replace(plan, prompt_only=prompt_only, echo=tuple(text for text in texts for _ in range(plan.n)))


def plan_native(body: NativeRequest, served: Served) -> Plan:
    """ApiError for what cannot be served."""
    _check(body, served)
    prompt_only = body.n_predict == 0
    limit = 1 if prompt_only else _max_tokens(body, None, served, None)
    plan = _plan(body, served, "native", [_prompt_ids(body.prompt[0], served)], limit, None)
    return replace(plan, prompt_only=prompt_only)


def _check(body: SamplingFields, served: Served) -> None:
    """The model's name, and fields that the schema does not have."""
    if not served.knows(body.model):
        name = (body.model or "")[:200]
        raise ApiError(
            404,
            f"the model {name!r} does not exist; served is {served.name!r}",
            "model",
            "model_not_found",
        )
    for names in (("max_tokens", "max_completion_tokens", "n_predict"), ("repetition_penalty", "repeat_penalty")):
        _check_agreement(body, names)
    options = body.stream_options if isinstance(body, OpenAiFields) else None
    if options is not None and not body.stream:
        raise bad_request("stream_options: needs stream true", "stream_options")
    penalties = {
        "repetition_penalty": _repetition(body, served),
        "presence_penalty": body.presence_penalty or 0,
        "frequency_penalty": body.frequency_penalty or 0,
    }
    refuse_unsupported(body.model_extra or {}, penalties)


def _check_agreement(body: SamplingFields, names: Sequence[str]) -> None:
    """ApiError where two names of one thing have different values."""
    given = [(name, value) for name in names if (value := getattr(body, name, None)) is not None]
    for name, value in given[1:]:
        first, other = given[0]
        if value != other:
            raise bad_request(f"{name}: {value}, but {first} is {other}: give one of them", name)


def _check_message(message: Message, param: str) -> None:
    if message.content is None:
        raise bad_request(f"{param}.content: is required; tool calls are not supported", f"{param}.content")
    for name, value in (message.model_extra or {}).items():
        # Clients send back a whole answer, with these empty.
        if value is None or name == "annotations" or (name in ("tool_calls", "images") and value == []):
            continue
        raise bad_request(f"{param}.{name[:100]}: is not supported: only text is", f"{param}.{name[:100]}")


def _chat_ids(body: ChatRequest, served: Served) -> list[int]:
    template = served.tokenizer.chat_template
    if template is None:
        raise bad_request(
            "messages: the model has no chat template: use /v1/completions, or start the server with --chat-template",
            "messages",
        )
    variables = body.chat_template_kwargs or {}
    for name in ("self", "messages", "add_generation_prompt"):
        if name in variables:
            raise bad_request(f"chat_template_kwargs: {name} is not for it to set", "chat_template_kwargs")
    knows_developer = "developer" in template.source
    messages = [_for_template(message, knows_developer) for message in body.messages]
    try:
        return served.tokenizer.encode_chat(messages, **variables)
    except InputError as error:
        raise bad_request(str(error), "messages") from error


def _for_template(message: Message, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    known = {"role": role, "content": message.content}
    more = {"name": message.name, "reasoning_content": message.reasoning_content}
    return known | {name: value for name, value in more.items() if value is not None}


def _prompt_ids(prompt: str | list[int], served: Served) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = served.tokenizer.encode(prompt)
        except InputError as error:
            raise bad_request(str(error), "prompt") from error
    else:
        ids = list(prompt)
    if not ids:
        raise bad_request("prompt: is empty: give some text", "prompt")
    bad = next((i for i in ids if not 0 <= i < served.vocab_size), None)
    if bad is not None:
        raise bad_request(f"prompt: token id {bad}: the vocabulary has ids 0 to {served.vocab_size - 1}", "prompt")
    return ids


def _prompt_text(prompt: str | list[int], served: Served) -> str:
    return prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)


def _max_tokens(body: SamplingFields, limit: int | None, served: Served, otherwise: int | None) -> int:
    """Most tokens to generate; the engine ends earlier where the context does."""
    if limit is None and body.n_predict is not None:
        limit = served.max_model_len if body.n_predict == -1 else body.n_predict
        if limit == 0:
            raise bad_request("n_predict 0: must be -1 (no limit) or 1 or more", "n_predict")
    if limit is None:
        limit = served.defaults.max_tokens or otherwise or served.max_model_len
    return min(limit, served.max_model_len)


def _repetition(body: SamplingFields, served: Served) -> float:
    given = body.repetition_penalty if body.repetition_penalty is not None else body.repeat_penalty
    return served.defaults.repetition_penalty if given is None else given or 1.0  # mlx_lm.server's 0 is off


def _plan(
    body: SamplingFields,
    served: Served,
    endpoint: Endpoint,
    prompts: Sequence[list[int]],
    max_tokens: int,
    logprobs: int | None,
    *,
    echo: bool = False,
) -> Plan:
    n, options = (body.n or 1, body.stream_options) if isinstance(body, OpenAiFields) else (1, None)
    if n * len(prompts) > (most := min(MAX_CHOICES, served.engine.most_open)):
        raise bad_request(f"n: {n} answers to {len(prompts)} prompts: at most {most} at a time", "n")
    prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
    plan_id = f"{prefix}-{uuid.uuid4().hex}"
    params = _params(body, served, max_tokens)
    mode = _mode(body, served)
    requests = [
        Request(
            id=f"{plan_id}-{p * n + i}",
            prompt=tuple(ids),
            params=params if params.seed is None else replace(params, seed=(params.seed + i) % 2**64),
            mode=mode,
            logprobs=logprobs,
            echo_logprobs=echo and logprobs is not None,
        )
        for p, ids in enumerate(prompts)
        for i in range(n)
    ]
    return Plan(
        id=plan_id,
        endpoint=endpoint,
        prompt_param="messages" if endpoint == "chat" else "prompt",
        requests=tuple(requests),
        n=n,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        logprobs=logprobs,
        echo=None,
        prompt_only=False,
        created=int(time.time()),
    )


def _params(body: SamplingFields, served: Served, max_tokens: int) -> SamplingParams:
    d = served.defaults
    bias = dict(body.logit_bias or {})
    bad = next((i for i in bias if i >= served.vocab_size), None)
    if bad is not None:
        raise bad_request(
            f"logit_bias: token id {bad}: the vocabulary has ids 0 to {served.vocab_size - 1}", "logit_bias"
        )
    if body.ignore_eos:
        bias |= dict.fromkeys(served.eos_token_ids, -100.0)
    seed = None if body.seed in (None, -1) else body.seed % 2**64  # llama-server's -1 is a random one
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=d.temperature if body.temperature is None else body.temperature,
            top_p=max(d.top_p if body.top_p is None else body.top_p, _TINY),
            top_k=max(0, d.top_k if body.top_k is None else body.top_k),
            min_p=d.min_p if body.min_p is None else body.min_p,
            repetition_penalty=_repetition(body, served),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=tuple(bias.items()),
            seed=seed,
            stop=tuple(body.stop),
        )
    except InputError as error:
        raise bad_request(str(error), str(error).split()[0]) from error


def _mode(body: SamplingFields, served: Served) -> str | None:
    if body.kv_cache_mode is None:
        return None
    try:
        return served.check_mode(body.kv_cache_mode)
    except KvcoreError as error:
        raise bad_request(f"kv_cache_mode: {error}", "kv_cache_mode") from error
