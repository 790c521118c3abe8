"""A conversation that keeps one cache over its turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

from kvcore.cache import Cache
from kvcore.errors import InputError
from kvcore.generate import Generation
from kvcore.runtime import Model
from kvcore.sampling import SamplingParams

Message = dict[str, str]


class Conversation:
    """Messages, and a cache whose tokens are known.

    Each turn encodes the whole conversation again and trims the cache to what it shares with that: a template
    may render an earlier answer otherwise than the model spelled it. Only the rest is prefilled.
    """

    def __init__(
        self, model: Model, params: SamplingParams, *, system: str | None, raw: bool, prefill_step: int
    ) -> None:
        self._model, self._params, self._raw, self._prefill_step = model, params, raw, prefill_step
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._ids: list[int] = []  # the tokens whose rows the cache holds
        self._cache = model.new_cache()
        self.messages = list(self._system)

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = list(self._system)
        self._forget_rows()

    @property
    def cache(self) -> Cache:
        return self._cache

    @property
    def full(self) -> bool:
        """Whether no further token fits into the model's context."""
        return len(self._ids) + 1 >= self._model.config.max_position

    @contextmanager
    def turn(self, text: str) -> Iterator[Generation]:
        """Iterate over the result to get the answer.

        Afterwards the turn is part of the conversation, unless not one token was generated. After an exception
        the messages are as before, and the cache is empty.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        generation = self._start(asked)
        try:
            yield generation
        except BaseException:
            # A step may have stopped between two layers: only an empty cache is surely whole.
            self._forget_rows()
            raise
        self._ids = [*generation.prompt, *generation.token_ids][: self._cache.offset]
        if generation.token_ids:
            self.messages = [*asked, {"role": "assistant", "content": generation.text}]

    def _start(self, messages: list[Message]) -> Generation:
        ids = self._encode(messages)
        limit = self._model.config.max_position
        if len(ids) >= limit:
            raise InputError(
                f"with this message the conversation has {len(ids)} tokens, the model's context holds {limit}: "
                "/reset starts a new one, or send a shorter message"
            )
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self._ids, strict=False)))
        shared = min(shared, len(ids) - 1)  # the last token's logits are needed
        self._cache.trim(self._cache.offset - shared)
        self._ids = self._ids[:shared]
        return self._model.generate(ids, self._params, cache=self._cache, prefill_step=self._prefill_step)

    def _encode(self, messages: list[Message]) -> list[int]:
        if self._raw:
            return self._model.encode("\n".join(message["content"] for message in messages), raw=True)
        return self._model.encode(messages)

    def _forget_rows(self) -> None:
        self._cache = self._model.new_cache()
        self._ids = []
