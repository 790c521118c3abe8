"""What goes into the engine and what comes out: requests, pieces of output, usage, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcore.errors import InputError, KvcoreError
from kvcore.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorCode = Literal["out_of_memory", "insufficient_kv_budget", "not_finite", "cancelled", "shutdown", "internal"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue. ``logprobs``: None, or how many alternatives to report beside each token (0 for none).

    ``mode``: a cache mode's name, or None for the model's own. ``echo_logprobs``: also those of the prompt's tokens.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    mode: str | None = None
    logprobs: int | None = None
    echo_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability in nats (None for the first token of a prompt), and the likeliest ones beside it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. ``cached_tokens`` of the prompt were not run again: their rows were adopted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without its answer: one line for a user, and a code for programs."""

    message: str
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of an answer. Text never holds part of a character or of a stop string; ``finish_reason`` ends it.

    ``tokens`` are those generated since the last piece, of the prompt first where its log-probabilities were asked for;
    ``prompt_done`` counts the prompt's tokens that have been run, for progress in long prefills. With finish
    reason "error" or "cancelled" ``code`` says why, and ``error`` may in words.
    """

    request_id: str
    text: str
    usage: Usage
    tokens: tuple[TokenLogprob, ...] = ()
    prompt_done: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    code: ErrorCode | None = None


Listener = Callable[[Output], None]  # called from the engine's thread; must not block


class QueueFullError(KvcoreError):
    """As many requests wait as may. ``retry_after`` seconds is when to try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ContextLengthError(KvcoreError):
    """The prompt alone is longer than the model's context."""


class BudgetError(KvcoreError):
    """The request can never fit into the budget for the cache."""


class ModeError(InputError):
    """The engine has no room for that cache mode."""


class NotReadyError(KvcoreError):
    """The engine is loading, stopping, or has failed."""
