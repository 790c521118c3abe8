"""From logits to a token, on the host in float64: the same seed gives the same tokens on every backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.errors import NOT_FINITE, InputError, NonFiniteError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to stop. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off; ``repetition_penalty`` (CTRL, arXiv 1909.05858) looks at the prompt and all generated tokens.

    ``presence_penalty`` and ``frequency_penalty`` are OpenAI's: taken off the score of a generated token once, and once
    for each time that it was generated. ``logit_bias`` {token: bias} is added to scores; it is kept as sorted pairs.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens {self.max_tokens}: must be 1 or more")
        _in_range("temperature", self.temperature, 0, math.inf)
        _in_range("top_p", self.top_p, 0, 1, open_low=True)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        if self.top_k < 0:
            raise InputError(f"top_k {self.top_k}: must be 0 (off) or more")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed {self.seed}: must be from 0 to 2^64 - 1")
        if isinstance(self.stop, str):
            raise InputError(f"stop {self.stop!r}: must be a tuple of strings, as in stop=({self.stop!r},)")
        if any(not stop for stop in self.stop):
            raise InputError("stop: an empty stop string would stop at once; leave it out")
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs, by token."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def check_vocabulary(self, size: int) -> None:
        """InputError where ``logit_bias`` names a token that a vocabulary of ``size`` does not have."""
        bad = next((token for token, _ in self.biases if token >= size), None)
        if bad is not None:
            raise InputError(f"logit_bias of token {bad}: the vocabulary has ids 0 to {size - 1}")


def _bias_pairs(bias: Mapping[int, float] | tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    pairs = tuple(bias.items() if isinstance(bias, Mapping) else bias)
    for token, value in pairs:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"logit_bias of token {token!r}: must be a token id, 0 or more")
        _in_range(f"logit_bias of token {token}:", value, -100, 100)
    return tuple(sorted(pairs))


def _in_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    if math.isfinite(value) and (value > low or (value == low and not open_low)) and value <= high:
        return
    bound = f"{'above' if open_low else 'at least'} {low}" + ("" if math.isinf(high) else f" and at most {high}")
    raise InputError(f"{name} {value}: must be a number {bound}")


class Sampler:
    """Draws tokens with one generator. The order: repetition penalty, presence and frequency penalty, logit bias,
    temperature, top-k, top-p, min-p."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)
        self._ahead: float | None = None

    def __call__(self, logits: np.ndarray, seen: Sequence[int], generated: Sequence[int] = ()) -> int:
        """``logits`` float [vocab], ``seen`` the ids so far, the last of which were ``generated``. Returns a token id.

        KvcoreError where no logit is a number to choose by, InputError for a bias beyond the vocabulary.
        """
        p = self.params
        scores = np.array(logits, np.float64)
        if p.repetition_penalty != 1 and len(seen):
            ids = np.unique(np.asarray(seen))
            scores[ids] = np.where(
                scores[ids] > 0, scores[ids] / p.repetition_penalty, scores[ids] * p.repetition_penalty
            )
        if generated and (p.presence_penalty or p.frequency_penalty):
            ids, times = np.unique(np.asarray(generated), return_counts=True)
            scores[ids] -= p.presence_penalty + p.frequency_penalty * times
        if p.biases:
            p.check_vocabulary(len(scores))
            for token, bias in p.biases:
                scores[token] += bias
        best = int(np.argmax(scores))
        if not np.isfinite(scores[best]):
            raise NonFiniteError(NOT_FINITE)
        if p.temperature == 0:
            return best
        return self._draw((scores - scores[best]) / p.temperature)

    def uniform(self) -> float:
        """The number in [0, 1) that this draw takes."""
        number, self._ahead = self.ahead(), None
        return number

    def ahead(self) -> float:
        """The number that the next draw takes: it stays the next one, whoever asks, until a draw takes it."""
        if self._ahead is None:
            self._ahead = float(self._random.random())
        return self._ahead

    def _draw(self, scores: np.ndarray) -> int:
        """By the inverse of the cumulative distribution, over candidates from the likeliest down where they are sorted,
        else by id."""
        p, order = self.params, None
        if p.top_k or p.top_p < 1:
            order = np.argsort(-scores, kind="stable")
            scores = scores[order[: p.top_k] if p.top_k else order]
        probs = np.exp(scores)  # the best score is 0
        probs /= probs.sum()
        if order is not None:
            probs[np.cumsum(probs) - probs >= p.top_p] = 0  # the token that crosses top_p stays
        probs[probs < p.min_p * probs.max()] = 0
        total = np.cumsum(probs)
        last = int(np.flatnonzero(probs)[-1])
        index = min(int(np.searchsorted(total, self.uniform() * total[-1], side="right")), last)
        return index if order is None else int(order[index])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 log-softmax over the last axis of the model's own logits: no penalty, bias or temperature."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def likeliest(logprobs: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` best tokens of log-probabilities [vocab], best first."""
    if count <= 0:
        return ()
    best = np.argpartition(-logprobs, min(count, len(logprobs)) - 1)[:count] if count < len(logprobs) else None
    ids = np.arange(len(logprobs)) if best is None else best
    ids = ids[np.lexsort((ids, -logprobs[ids]))]
    return tuple((int(i), float(logprobs[i])) for i in ids)
