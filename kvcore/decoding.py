"""Decoding with sampling on the device, where a backend does it: one call gives a source of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvcore.backends import Backend
from kvcore.cache import Cache
from kvcore.cache.storage import TurningStorage
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
    steps and sampling are the host's: the storage is not in pages, or a sampler asks for more than the device does."""
    storage, ops = cache.storage, backend.ops
    if backend.make_decoder is None or not isinstance(storage, TurningStorage):
        return None
    if any(p.presence_penalty or p.frequency_penalty or p.biases for p in (sampler.params for sampler in samplers)):
        return None

    def run(ids: Array) -> Array:
        return decode_logits(ops, config, params, ids, storage.layers, storage.rope_angles(params.inv_freq, 1))

    source: TokenSource = backend.make_decoder(
        storage,
        run,
        [_draw(sampler.params) for sampler in samplers],
        config.vocab_size,
        seen,
        begin=partial(cache.begin_step, 1),
        commit=cache.commit,
        uniform=lambda: [sampler.uniform() for sampler in samplers],
        windows=set(config.layer_windows) or {None},
        graph=graph,
    )
    return source


def _draw(params: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
    }
