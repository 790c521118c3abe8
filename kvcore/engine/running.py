"""One request in the engine: its tokens, its text, and where its prompt is cut into chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvcore.cache import Cache
from kvcore.engine.memory import Amount
from kvcore.engine.types import Failure, FinishReason, Listener, Output, Request, TokenLogprob, Usage
from kvcore.generate import chunk_end
from kvcore.sampling import Sampler, likeliest, log_probabilities
from kvcore.text import Answer


@dataclass(slots=True, eq=False)
class Running:
    """A request from its arrival to its end. ``order`` is the place in the queue, which it keeps when it is preempted;
    ``limit`` the most tokens of its answer."""

    request: Request
    listener: Listener
    mode: str
    order: int
    limit: int
    prefill_step: int
    answer: Answer
    sampler: Sampler
    cache: Cache | None = None
    reserved: Amount = ()
    covered: int = 0  # tokens that ``reserved`` is known to be enough for
    started: bool = False
    cached: int = 0  # rows that it adopted when it was started first
    failures: int = 0
    echoed: int = 0  # tokens of the prompt whose logits have been noted
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    pending: list[TokenLogprob] = field(default_factory=list)  # told with the next piece of text

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer.tokens)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer.tokens)

    @property
    def target(self) -> int:
        """Tokens that have to be run before the next one can be sampled, but for the newest one of an answer."""
        return len(self.prompt) + max(0, len(self.answer.tokens) - 1)

    @property
    def offset(self) -> int:
        return 0 if self.cache is None else self.cache.offset

    @property
    def decoding(self) -> bool:
        return self.cache is not None and bool(self.answer.tokens) and self.offset >= self.target

    def chunk(self) -> np.ndarray:
        """The tokens to run next of those up to `target`: int32 [1, n].

        Borders depend on the request alone: every ``prefill_step`` tokens of a prompt, from where adopted rows end, and
        none shortly before its end (`kvcore.generate.chunk_end`).
        When a preempted request is run again, its answer is cut where pages fold, so that each token sees the rows
        raw or folded as it did the first time.
        """
        assert self.cache is not None
        at, step = self.offset, self.prefill_step
        if at < self.cached:
            end = min(self.cached, at + step)
        elif at < len(self.prompt):
            end = chunk_end(at + step - (at - self.cached) % step, len(self.prompt), step)
        else:
            window = self.cache.spec.window
            border = (at - window.recent_tokens) // window.page_size + 1
            fold = window.recent_tokens + max(0, border) * window.page_size
            end = min(self.target, at + step, fold if self.cache.mode.quantized else self.target)
        return np.asarray(self.tokens[at:end], np.int32)[None]

    def usage(self) -> Usage:
        return Usage(len(self.prompt), len(self.answer.tokens), self.cached)

    def output(self, text: str = "", finish: FinishReason | None = None, failure: Failure | None = None) -> Output:
        """A piece of the answer, with the log-probabilities that wait for one."""
        tokens: tuple[TokenLogprob, ...] = ()
        if text or finish is not None:
            tokens, self.pending = tuple(self.pending), []
        done = len(self.prompt) if self.answer.tokens else min(self.offset, len(self.prompt))
        error, code = (None, None) if failure is None else (failure.message, failure.code)
        code = "cancelled" if finish == "cancelled" else code
        return Output(self.request.id, text, self.usage(), tokens, done, finish, error, code)

    def note(self, token: int, logits: np.ndarray) -> None:
        """Keep a generated token's log-probability, if it was asked for."""
        if self.request.logprobs is not None:
            self.pending.append(_with_logprob(token, log_probabilities(logits), self.request.logprobs))

    def note_prompt(self, start: int, logits: np.ndarray) -> None:
        """The log-probabilities of the prompt: ``logits`` [n, vocab] are those of its tokens from ``start`` on, each of
        which says how likely the next one is."""
        if self.echoed == 0:
            self.pending.append(TokenLogprob(self.prompt[0], None))
        for at in range(max(start, self.echoed), min(start + len(logits), len(self.prompt) - 1)):
            logprobs = log_probabilities(logits[at - start])
            self.pending.append(_with_logprob(self.prompt[at + 1], logprobs, self.request.logprobs or 0))
        self.echoed = max(self.echoed, start + len(logits))


def _with_logprob(token: int, logprobs: np.ndarray, count: int) -> TokenLogprob:
    return TokenLogprob(token, float(logprobs[token]), likeliest(logprobs, count))


def pieces(ids: np.ndarray, limit: int | None) -> Iterator[np.ndarray]:
    """``ids`` [1, n] in steps that a capped cache takes."""
    size = limit or ids.shape[1]
    for start in range(0, ids.shape[1], size):
        yield ids[:, start : start + size]
