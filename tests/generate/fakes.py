"""Steps that emit what a test says, and caches that note what is asked of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import kvcore
from kvcore.text import Tokenizer


class FakeCache:
    """Holds a number of tokens and no rows; notes the hand-over among the calls of a step."""

    def __init__(self, events: list[object], offset: int = 0) -> None:
        self.offset = offset
        self._events = events

    def require(self, tokens: int) -> None:
        """There is room for everything."""

    def begin_decode(self) -> None:
        self._events.append("begin_decode")


class Script:
    """A step that makes the tokens ``ids`` the best ones, one after the other, whatever the prompt."""

    def __init__(self, ids: Iterable[int], *, vocab: int, seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        """``seconds`` that a step takes over several tokens, and over one."""
        self.events: list[object] = []
        self._ids = iter(ids)
        self._vocab, self._seconds = vocab, seconds
        self._prompt_left = 0

    def __call__(self, ids: Sequence[int], cache: FakeCache) -> np.ndarray:
        self.events.append(len(ids))
        cache.offset += len(ids)
        self._prompt_left -= len(ids)
        time.sleep(self._seconds[0 if self._prompt_left >= 0 else 1])
        logits = np.zeros(self._vocab, np.float32)
        if self._prompt_left <= 0:
            logits[next(self._ids)] = 10
        return logits

    def generate(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (1, 5, 6),
        eos: Iterable[int] = (),
        max_position: int = 4096,
        prefill_step: int = 512,
        cached: int = 0,
        **params: Any,
    ) -> kvcore.Generation:
        self._prompt_left = len(prompt) - cached
        return kvcore.Generation(
            self,
            tokenizer,
            FakeCache(self.events, cached),
            prompt,
            kvcore.SamplingParams(**params),
            eos_token_ids=frozenset(eos),
            max_position=max_position,
            prefill_step=prefill_step,
        )
