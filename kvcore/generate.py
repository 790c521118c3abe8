"""Generation: prefill in chunks, then one token at a time, as text that is safe to show."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvcore.cache import Cache
from kvcore.errors import InputError, is_out_of_memory
from kvcore.sampling import Sampler, SamplingParams
from kvcore.text import Answer, Tokenizer


class TokenSource(Protocol):
    """Decode steps that sample where the model runs. ``no_graph``: why a step is no CUDA graph; None where it is."""

    no_graph: str | None
    capture_seconds: float

    def tokens(self, first: Sequence[int], count: int) -> Generator[list[int]]:
        """``count`` times the next token of every sequence; close the generator to stop earlier."""


class MakeSource(Protocol):
    """A source for one sequence, whose ids so far are ``seen``; None where steps and sampling are the host's."""

    def __call__(self, cache: Cache, sampler: Sampler, seen: Sequence[int]) -> TokenSource | None: ...


class Step(Protocol):
    """Run ids [T] through the model and the cache; float32 logits [vocab] of the last one, on the host."""

    def __call__(self, ids: Sequence[int], cache: Cache) -> np.ndarray: ...


def longest_chunk(step: int) -> int:
    """Tokens of a prompt that may run at once where ``step`` were asked for."""
    return step + step // 8


def chunk_end(border: int, total: int, step: int) -> int:
    """Where a chunk of a prompt of ``total`` tokens ends: at ``border``, or with the prompt if that is not an eighth of
    ``step`` later. A last chunk of a few tokens costs nearly as much as a whole one."""
    return total if total - border <= step // 8 else border


def chunks(at: int, total: int, step: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each chunk of a prompt of ``total`` tokens, from ``at`` on."""
    while at < total:
        end = chunk_end(at + step, total, step)
        yield at, end
        at = end


def check_step(step: int) -> None:
    """InputError for a number of tokens that no chunk can have."""
    if step < 1:
        raise InputError(f"prefill step size {step}: must be 1 or more")


def chunks_of(total: int, step: int) -> int:
    """Chunks that a prompt of ``total`` tokens runs in."""
    return max(1, -(-(total - step // 8) // step))


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counts and times of one generation. ``prompt_tokens`` includes the ``cached_tokens`` that were not run again.

    Times in seconds from the start of prefill; the clock is read when logits are on the host, so pending device
    work counts. Tokenization of the prompt and loading are not included, sampling is.
    """

    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    prefill_seconds: float
    time_to_first_token: float
    decode_seconds: float
    finish_reason: str | None

    @property
    def prompt_tokens_per_second(self) -> float:
        run = self.prompt_tokens - self.cached_tokens
        return run / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def generation_tokens_per_second(self) -> float:
        """Tokens after the first one over the time since it."""
        return (self.generation_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Generation:
    """Iterate to get text piece by piece; afterwards (or meanwhile) `token_ids`, `text`, `finish_reason`, `stats`.

    Finish reasons: "stop" (end token or stop string), "length" (max_tokens, the model's last position, or a
    ``max_kv_size`` that may not be exceeded, no room for another row), "cancelled" (by `cancel`). A ``notice`` says
    where memory or a budget ended the answer.
    """

    def __init__(
        self,
        step: Step,
        tokenizer: Tokenizer,
        cache: Cache,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        max_position: int,
        prefill_step: int = 512,
        max_kv_size: int | None = None,
        make_source: MakeSource | None = None,
    ) -> None:
        """``prompt`` is the whole sequence; the cache may hold a prefix of it already.

        With ``max_kv_size`` prompt and answer together end there, without a context shift.
        """
        if not prompt:
            raise InputError("the prompt is empty: give at least one token of text")
        if len(prompt) >= max_position:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the model's context holds {max_position}: "
                "shorten the prompt to leave room for an answer"
            )
        if max_kv_size is not None and len(prompt) >= max_kv_size:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, max_kv_size {max_kv_size} without a context shift leaves no "
                "room for an answer: shorten the prompt, or let the context shift"
            )
        if cache.offset >= len(prompt):
            raise InputError("the cache already holds the whole prompt: trim at least its last token first")
        check_step(prefill_step)
        cache.require(len(prompt))
        self.prompt = tuple(prompt)
        self.text = ""
        self.notice: str | None = None
        self.cache = cache
        self._step, self._params, self._prefill_step = step, params, prefill_step
        self._limit = min(params.max_tokens, min(max_position, max_kv_size or max_position) - len(prompt))
        self._answer = Answer(tokenizer, params.stop, eos_token_ids, self._limit)
        self._stats = GenerationStats(len(prompt), cache.offset, 0, 0.0, 0.0, 0.0, None)
        self._cancelled = False
        self._make_source = make_source
        self.source: TokenSource | None = None  # once decode has begun, where there is one
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def token_ids(self) -> list[int]:
        return self._answer.tokens

    @property
    def finish_reason(self) -> str | None:
        return self._stats.finish_reason

    @property
    def stats(self) -> GenerationStats:
        return self._stats

    def cancel(self) -> None:
        """End after the step that runs now or comes next; the cache keeps its rows. Safe in a signal handler."""
        self._cancelled = True

    def _run(self) -> Iterator[str]:
        start = time.perf_counter()
        logits = self._prefill()
        if logits is None:
            self._stats = replace(self._stats, finish_reason="cancelled")
            return
        self._stats = replace(self._stats, prefill_seconds=time.perf_counter() - start)
        with closing(self._sampled(logits)) as tokens:
            try:
                yield from self._accepted(tokens, start)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                yield from self._end_for_lack_of_memory(error)

    def _accepted(self, tokens: Iterator[int], start: float) -> Iterator[str]:
        """The text of ``tokens`` until one of them ends it."""
        first = start
        for token in tokens:
            now = time.perf_counter()
            if not self.token_ids:
                first = now
                self._stats = replace(self._stats, time_to_first_token=now - start)
            reason, piece = self._answer.add(token)
            self._stats = replace(self._stats, generation_tokens=len(self.token_ids), decode_seconds=now - first)
            if reason is None and self._cancelled:
                reason, piece = "cancelled", piece + self._answer.flush()
            self.text += piece
            if piece:
                yield piece
            if reason is not None:
                self._stats = replace(self._stats, finish_reason=reason)
                return

    def _sampled(self, logits: np.ndarray) -> Generator[int]:
        """Tokens without an end: the first of the prompt's ``logits``, then from the device or step by step."""
        sampler = Sampler(self._params)
        token = sampler(logits, self.prompt)
        yield token
        if self._make_source is not None:
            self.source = self._make_source(self.cache, sampler, (*self.prompt, token))
        if self.source is not None:
            with closing(self.source.tokens([token], self._limit - 1)) as tokens:
                for (each,) in tokens:
                    yield each
            return
        while True:
            logits = self._step([token], self.cache)
            token = sampler(logits, (*self.prompt, *self.token_ids), self.token_ids)
            yield token

    def _end_for_lack_of_memory(self, error: Exception) -> Iterator[str]:
        """A step that found no room has changed nothing: what is there is the answer."""
        self.notice = f"the answer ends after {len(self.token_ids)} tokens for lack of memory: {error}"
        self._stats = replace(self._stats, finish_reason="length")
        piece = self._answer.flush()
        self.text += piece
        if piece:
            yield piece

    def _prefill(self) -> np.ndarray | None:
        """Logits of the prompt's last token; None where cancelled on the way there."""
        logits = None
        for begin, end in chunks(self.cache.offset, len(self.prompt), self._prefill_step):
            if self._cancelled:
                return None
            logits = self._step(self.prompt[begin:end], self.cache)
        self.cache.begin_decode()
        assert logits is not None
        return logits
