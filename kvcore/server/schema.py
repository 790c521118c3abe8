"""The bodies of requests. Types are strict: a number is no text and no truth value, and NaN is no number."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvcore.server.errors import ApiError, bad_request

MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_CHOICES = 128
ROLES = ("system", "developer", "user", "assistant")


def _stops(value: Any) -> Any:
    """A list from OpenAI's string or list."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} strings: at most {MAX_STOPS} are allowed")
    if "" in stops:
        raise ValueError("an empty string would stop at once: leave it out")
    return stops


def _prompts(value: Any) -> Any:
    """A list of texts and lists of ids from OpenAI's four forms of a prompt."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [value]
    for item in value:
        ids = isinstance(item, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in item)
        if not (isinstance(item, str) or ids):
            raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    return value


def _content(value: Any) -> Any:
    """The text of a message: a string, or text parts joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a text or a list of text parts")
    for i, part in enumerate(value):
        kind = part.get("type")
        if kind != "text":
            words = f"type {kind[:40]!r}" if isinstance(kind, str) else "no type"
            raise ValueError(f"part {i} has {words}: only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {i} has no text")
    return "".join(part["text"] for part in value)


def _role(value: Any) -> Any:
    if not isinstance(value, str) or value not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}; tool messages are not supported")
    return value


def _count_of_alternatives(value: Any) -> Any:
    """OpenAI's number at /v1/completions, or the truth value that mlx_lm.server's clients send there."""
    return {True: 0, False: None}[value] if isinstance(value, bool) else value


def _bias(value: Any) -> Any:
    """Token ids as JSON has them, in strings, to numbers."""
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if not all(key.isdecimal() and len(key) < 12 for key in value):
        raise ValueError("its keys must be token ids")
    return {int(key): number for key, number in value.items()}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(BaseModel):
    """``include_obfuscation`` is padding, which a local server has no need for: it is accepted and nothing is added."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Message(_Strict):
    """One turn. Only text comes and goes."""

    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    reasoning_content: str | None = None


class SamplingFields(_Strict):
    """What both of OpenAI's endpoints and llama-server's own take. None is the server's default."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_bias), Field(max_length=1024)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    kv_cache_mode: str | None = None


class OpenAiFields(SamplingFields):
    """What both of OpenAI's endpoints take beyond that."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(OpenAiFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(OpenAiFields):
    """POST /v1/completions. ``max_tokens`` 0 runs the prompt alone, for its log-probabilities."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_count_of_alternatives)
    ] = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class NativeRequest(SamplingFields):
    """POST /completion, as llama-server takes it."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), Field(max_length=1)]


Body = TypeVar("Body", bound=BaseModel)
Endpoint = Literal["chat", "completions", "native"]


def parse(schema: type[Body], data: bytes) -> Body:
    """A body from its bytes. ApiError 400 with the field at fault."""
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 at byte {error.start}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {_json_reason(error)}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    if b"\\ud" in data.lower() and _has_surrogate(value):
        raise bad_request("the body holds half a surrogate pair, which is no character: remove it", code="invalid_json")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _field_error(error) from error


def _has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number in it is too long"


def _field_error(error: ValidationError) -> ApiError:
    """The first field that is wrong, in words that never repeat what was sent beyond a number."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    loc = first["loc"][:1] if first["loc"][0] == "logit_bias" else first["loc"]
    for part in loc:
        param += f"[{part}]" if isinstance(part, int) else f"{'.' if param else ''}{part}"
    kind, message, given = first["type"], str(first["msg"]), first.get("input")
    if kind == "missing":
        return bad_request(f"{param}: is required", param, "missing_required_parameter")
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    number = f" {given}" if isinstance(given, (int, float)) and not isinstance(given, bool) else ""
    return bad_request(f"{param[:100]}{number}: {message}", param[:100])
