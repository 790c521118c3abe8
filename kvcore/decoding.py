"""Decoding with sampling on the device, where a backend does it: a source of tokens, or steps of many caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvcore.backends import Backend
from kvcore.cache import Cache
from kvcore.cache.storage import TurningStorage
from kvcore.communicator import OWN_STEPS, SharedSteps
from kvcore.errors import NOT_FINITE, KvcoreError, NonFiniteError
from kvcore.generate import TokenSource
from kvcore.models.config import LlamaConfig
from kvcore.models.llama import LlamaParams, decode_logits
from kvcore.ops import Array
from kvcore.sampling import Sampler, SamplingParams


def token_source(
    backend: Backend,
    config: LlamaConfig,
    params: LlamaParams,
    cache: Cache,
    samplers: Sequence[Sampler],
    seen: Sequence[Sequence[int]],
    *,
    graph: bool = True,
) -> TokenSource | None:
    """A source of tokens over ``cache``, with one of the ``samplers`` and the ids so far of each sequence. None where
    steps and sampling are the host's: see `on_device`."""
    if not on_device(backend, cache, samplers):
        return None
    draws = [draw(sampler.params) for sampler in samplers]
    return device_source(backend, config, params, cache, draws, seen, samplers, graph=graph)


def on_device(backend: Backend, cache: Cache, samplers: Sequence[Sampler]) -> bool:
    """Whether the device can decode: rows are in pages, and no sampler asks for more than it does."""
    if backend.make_decoder is None or not isinstance(cache.storage, TurningStorage):
        return False
    params = [sampler.params for sampler in samplers]
    return not any(p.presence_penalty or p.frequency_penalty or p.biases for p in params)


def device_source(
    backend: Backend,
    config: LlamaConfig,
    params: LlamaParams,
    cache: Cache,
    draws: Sequence[Mapping[str, Any]],
    seen: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    *,
    among: SharedSteps = OWN_STEPS,
    graph: bool = True,
) -> TokenSource:
    """Where `on_device` is true. ``draws`` are those of `draw`; ``samplers`` give the random numbers, which ranks other
    than 0 are told."""
    storage, ops = cache.storage, backend.ops
    assert backend.make_decoder is not None
    assert isinstance(storage, TurningStorage)

    def run(ids: Array) -> Array:
        return decode_logits(ops, config, params, ids, storage.layers, storage.rope_angles(params.inv_freq, 1))

    source: TokenSource = backend.make_decoder(
        storage,
        run,
        draws,
        config.vocab_size,
        seen,
        begin=partial(cache.begin_step, 1),
        commit=cache.commit,
        uniform=lambda: [sampler.uniform() for sampler in samplers],
        windows=set(config.layer_windows) or {None},
        among=among,
        graph=graph,
    )
    return source


def draw(params: SamplingParams) -> dict[str, Any]:
    """What the device needs to know to pick a token."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
    }


class GroupTokens:
    """Steps of one token of several caches of one `group_key`, each with its own sampling: `launch`, then `read`."""

    def __init__(self, decoder: Any) -> None:
        """``decoder`` is what `Backend.make_group_decoder` makes."""
        self._decoder = decoder
        self._samplers: list[Sampler | None] = []

    @property
    def words(self) -> str:
        """How steps run, and why not better."""
        return str(self._decoder.words)

    def takes(self, params: SamplingParams) -> bool:
        """Whether tokens can be picked on the device."""
        return bool(self._decoder.takes(params))

    def launch(self, caches: Sequence[Cache], ids: Sequence[int], samplers: Sequence[Sampler | None]) -> None:
        """A step of every cache with its newest token ``ids[i]``, and its fold. Without a sampler logits are wanted.
        After an error nothing has changed in any cache, and no sampler has drawn."""
        for cache in caches:
            cache.begin_step(1)
        undo = [cache.checkpoint() for cache in caches]
        self._samplers = list(samplers)
        try:
            self._decoder.launch(
                [cache.storage for cache in caches],
                ids,
                [None if sampler is None else sampler.params for sampler in samplers],
                [
                    sampler.ahead() if sampler is not None and sampler.params.temperature else 0.0
                    for sampler in samplers
                ],
            )
            for cache in caches:
                cache.cut_to_cap()
        except BaseException:
            for each in undo:
                each()
            raise

    def read(self) -> list[int | np.ndarray | KvcoreError]:
        """Of each cache its token, its float32 logits [1, vocab] (until the next step) where they were wanted or the
        device could not decide, or an error where logits are not finite."""
        found: list[int | np.ndarray | KvcoreError] = []
        for sampler, token in zip(self._samplers, self._decoder.read(), strict=True):
            if not isinstance(token, int):
                found.append(token[None])
            elif token < 0:
                found.append(NonFiniteError(NOT_FINITE))
            else:
                if sampler is not None and sampler.params.temperature:
                    sampler.uniform()
                found.append(token)
        return found


def group_tokens(backend: Backend, config: LlamaConfig, params: LlamaParams, *, most: int) -> GroupTokens | None:
    """Steps of up to ``most`` caches with sampling on the device; None where they are the host's, and where a row's
    result must not depend on the batch (`Backend.row_block`)."""
    if backend.make_group_decoder is None or backend.row_block is not None:
        return None

    def run(ids: Array, layers: Sequence[Any], angles: tuple[Array, Array]) -> Array:
        return decode_logits(backend.ops, config, params, ids, layers, angles)

    return GroupTokens(backend.make_group_decoder(run, params.inv_freq, config.vocab_size, most=most))
