"""Requests that come: when, with how long a prompt, and for how long an answer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from kvcore.errors import InputError

FORMS = "a number such as 512, several of equal share such as 256,1k,4k, a range 128-2k, or normal:MEAN:DEVIATION"
_NUMBER = r"(\d{1,9}(?:\.\d{1,3})?)([kKmM]?)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: "choice" among ``values``, "uniform" between two, or "normal" (mean, deviation),
    never below 1."""

    kind: str
    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count]."""
        if self.kind == "choice":
            return rng.choice(np.asarray(self.values, np.int64), count)
        if self.kind == "uniform":
            return rng.integers(int(self.values[0]), int(self.values[1]) + 1, count)
        mean, deviation = self.values
        return np.maximum(1, np.rint(rng.normal(mean, deviation, count))).astype(np.int64)

    @property
    def mean(self) -> float:
        return self.values[0] if self.kind == "normal" else sum(self.values) / len(self.values)


def parse_lengths(flag: str, text: str) -> Lengths:
    """InputError, naming ``flag``, for other than `FORMS`."""
    words = text.strip()
    if words.startswith("normal:"):
        parts = words.split(":")[1:]
        numbers = [_tokens(part) for part in parts]
        if len(parts) == 2 and numbers[0] and numbers[1] is not None:
            return Lengths("normal", (numbers[0], numbers[1]))
    elif "-" in words:
        ends = [_tokens(part) for part in words.split("-")]
        if len(ends) == 2 and ends[0] and ends[1] and ends[0] <= ends[1]:
            return Lengths("uniform", (ends[0], ends[1]))
    else:
        values = [_tokens(part) for part in words.split(",")]
        if all(values):
            return Lengths("choice", tuple(value for value in values if value))
    raise InputError(f"{flag} {text}: give {FORMS}")


def _tokens(text: str) -> float | None:
    match = re.fullmatch(_NUMBER, text.strip(), re.ASCII)
    if match is None:
        return None
    return math.floor(float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()])


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` that arrive at random (Poisson) at ``rate`` per second; ``seed`` makes them repeatable."""

    rate: float
    prompts: Lengths
    outputs: Lengths
    requests: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(f"{self.rate:g} requests per second: must be above 0")
        if self.requests < 1:
            raise InputError(f"{self.requests} requests: must be 1 or more")

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Arrival times in seconds, prompt tokens, output tokens; each [requests]."""
        rng = np.random.default_rng(self.seed)
        times = np.cumsum(rng.exponential(1 / self.rate, self.requests))
        return times, self.prompts.draw(rng, self.requests), self.outputs.draw(rng, self.requests)
