"""A conversation that keeps one cache over its turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.cache import Cache
from kvcore.errors import InputError
from kvcore.generate import Generation
from kvcore.layout import DEFAULT_KEEP, Cap
from kvcore.runtime import Model, common_prefix
from kvcore.sampling import SamplingParams

Message = dict[str, str]


class Conversation:
    """Messages, and a cache whose tokens are known.

    Each turn encodes the whole conversation again and trims the cache to what it shares with that: a template
    may render an earlier answer otherwise than the model spelled it. Only the rest is prefilled.
    """

    def __init__(
        self,
        model: Model,
        params: SamplingParams,
        *,
        system: str | None,
        raw: bool,
        prefill_step: int | None,
        cap: Cap | None = None,
        shifts: bool = True,
        prompt_cache: str | None = None,
    ) -> None:
        self._model, self._params, self._raw, self._prefill_step = model, params, raw, prefill_step
        self._cap, self._shifts = cap, shifts
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._ids: list[int] = []  # the tokens that the cache has seen
        if prompt_cache is None:
            self._cache = self._new_cache()
        else:
            size, keep = self._cap_of_cache()
            self._cache, tokens = model.load_cache(prompt_cache, max_kv_size=size, keep=keep)
            self._ids = list(tokens)
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
        return len(self._ids) + 1 >= self.limit

    @property
    def limit(self) -> int:
        """Most tokens of the conversation."""
        return min(self._limits().values())

    @property
    def limit_name(self) -> str:
        limits = self._limits()
        return min(limits, key=lambda name: limits[name])

    def _limits(self) -> dict[str, int]:
        """What ends a conversation, and after how many tokens."""
        limits = {"the model's context": self._model.config.max_position}
        if self._cap is not None and not self._shifts:
            limits["--max-kv-size without a context shift"] = self._cap.tokens
        if self._cache.limit is not None:
            limits["--kv-cache-budget"] = self._cache.limit + 1  # an answer's last token takes no row
        return limits

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
        if len(ids) >= self.limit:
            raise InputError(
                f"with this message the conversation has {len(ids)} tokens, {self.limit_name} holds {self.limit}: "
                "/reset starts a new one, or send a shorter message"
            )
        shared = min(common_prefix(ids, self._ids), len(ids) - 1)  # the last token's logits are needed
        self._ids = self._ids[: self._cache.rewind(shared)]
        return self._model.generate(
            ids,
            self._params,
            cache=self._cache,
            prefill_step=self._prefill_step,
            max_kv_size=None if self._cap is None else self._cap.tokens,
            context_shift=self._shifts,
        )

    def _encode(self, messages: list[Message]) -> list[int]:
        if self._raw:
            return self._model.encode("\n".join(message["content"] for message in messages), raw=True)
        return self._model.encode(messages)

    def _forget_rows(self) -> None:
        self._cache = self._new_cache()
        self._ids = []

    def _new_cache(self) -> Cache:
        size, keep = self._cap_of_cache()
        return self._model.new_cache(max_kv_size=size, keep=keep)

    def _cap_of_cache(self) -> tuple[int | None, int]:
        """What `Model.new_cache` takes: no cap where the context may not shift, for then nothing is ever dropped."""
        if self._cap is None or not self._shifts:
            return None, DEFAULT_KEEP
        return self._cap.tokens, self._cap.keep
