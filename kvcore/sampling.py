"""From logits to a token, on the host in float64: the same seed gives the same tokens on every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.errors import InputError, KvcoreError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to stop. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off; ``repetition_penalty`` (CTRL, arXiv 1909.05858) looks at the prompt and all generated tokens."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

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


def _in_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    if math.isfinite(value) and (value > low or (value == low and not open_low)) and value <= high:
        return
    bound = f"{'above' if open_low else 'at least'} {low}" + ("" if math.isinf(high) else f" and at most {high}")
    raise InputError(f"{name} {value}: must be a number {bound}")


class Sampler:
    """Draws tokens with one generator; the order is penalty, temperature, top-k, top-p, min-p."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.default_rng(params.seed)

    def __call__(self, logits: np.ndarray, seen: Sequence[int]) -> int:
        """``logits`` float [vocab], ``seen`` the ids so far. Returns a token id."""
        p = self._params
        scores = np.array(logits, np.float64)
        if p.repetition_penalty != 1 and len(seen):
            ids = np.unique(np.asarray(seen))
            scores[ids] = np.where(
                scores[ids] > 0, scores[ids] / p.repetition_penalty, scores[ids] * p.repetition_penalty
            )
        best = int(np.argmax(scores))
        if not np.isfinite(scores[best]):
            raise KvcoreError("the model's logits are not finite: check its weights, or use a wider --dtype")
        if p.temperature == 0:
            return best
        return self._draw((scores - scores[best]) / p.temperature)

    def _draw(self, scores: np.ndarray) -> int:
        p = self._params
        order = np.argsort(-scores, kind="stable")
        if p.top_k:
            order = order[: p.top_k]
        probs = np.exp(scores[order])  # the best score is 0
        probs /= probs.sum()
        keep = np.cumsum(probs) - probs < p.top_p  # the token that crosses top_p stays
        keep &= probs >= p.min_p * probs[0]
        kept = probs[keep] / probs[keep].sum()
        return int(order[keep][self._random.choice(len(kept), p=kept)])
