"""Refusals and failures as OpenAI's clients read them: a status, and an object with message, type, param and code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.engine.types import (
    BudgetError,
    ContextLengthError,
    ErrorCode,
    ModeError,
    NotReadyError,
    Output,
    QueueFullError,
)
from kvcore.errors import InputError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}

_FAILURES: Mapping[ErrorCode, tuple[int, str]] = {  # the engine's codes as a status and the code of the answer
    "out_of_memory": (503, "out_of_memory"),
    "insufficient_kv_budget": (400, "insufficient_kv_budget"),
    "not_finite": (500, "not_finite"),
    "cancelled": (503, "cancelled"),
    "shutdown": (503, "stopping"),
    "internal": (500, "engine_error"),
}


@dataclass
class ApiError(Exception):
    """A request that gets no answer. ``param`` names the field at fault, ``code`` is for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, and of an error event in a stream."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param, code)


def unavailable(message: str, code: str, retry_after: float = 1) -> ApiError:
    return ApiError(503, message, None, code, {"Retry-After": str(max(1, math.ceil(retry_after)))})


def refusal(error: Exception, prompt_param: str) -> ApiError:
    """What the engine's refusal of a request becomes; ``prompt_param`` is the field that holds the prompt."""
    match error:
        case QueueFullError():
            seconds = str(max(1, math.ceil(error.retry_after)))
            return ApiError(429, str(error), None, "queue_full", {"Retry-After": seconds})
        case ContextLengthError():
            return bad_request(str(error), prompt_param, "context_length_exceeded")
        case BudgetError():
            return bad_request(str(error), prompt_param, "insufficient_kv_budget")
        case NotReadyError():
            return unavailable(str(error), "not_ready")
        case ModeError():
            return bad_request(str(error), "kv_cache_mode")
        case InputError():
            return bad_request(str(error), prompt_param)
    return ApiError(
        500, f"the server failed on this request ({type(error).__name__}); its log says more", code="internal"
    )


def failure(output: Output) -> ApiError:
    """What a request becomes that the engine has given up."""
    status, code = _FAILURES[output.code or "internal"]
    fallback = "the engine failed on this request; the server's log says more"
    message = output.error or ("the server has ended this request" if output.code == "cancelled" else fallback)
    return unavailable(message, code) if status == 503 else ApiError(status, message, code=code)
