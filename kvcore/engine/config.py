"""What an engine is told, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcore.errors import InputError
from kvcore.layout import DEFAULT_KEEP


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of an engine.

    kv_cache_budget  bytes for all caches; None: 0.9 of the memory that is free on a GPU, a quarter of the RAM elsewhere
    max_batch        most requests that run together
    max_queue        most requests that wait, beside max_batch that run
    max_model_len    tokens of prompt and answer; at most, and by default, the model's context
    max_kv_size      most live rows of a request; with context_shift the first ``keep`` and the newest stay, without it
                     the answer ends there
    prefill_step     tokens of a chunk of prefill, and of all prefill between two decode steps; a chunk that ends a
                     prompt takes up to an eighth more, rather than leave a small one. None: the backend's own number,
                     2,048 at most
    modes            cache modes that requests may ask for beside the model's own; contiguous storage allows any
    prefix_reuse     whether prompts adopt rows of others
    prefix_bytes     most bytes of prefixes that nobody uses; None: what the budget leaves
    decode_reserve   room for an answer that is set aside on admission; None: for all of max_tokens
    """

    kv_cache_budget: int | None = None
    max_batch: int = 64
    max_queue: int = 256
    max_model_len: int | None = None
    max_kv_size: int | None = None
    keep: int = DEFAULT_KEEP
    context_shift: bool = True
    prefill_step: int | None = None
    modes: tuple[str, ...] = ()
    prefix_reuse: bool = True
    prefix_bytes: int | None = None
    decode_reserve: int | None = 512

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_step", "kv_cache_budget", "max_model_len", "max_kv_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: must be 1 or more")
        for name in ("max_queue", "prefix_bytes", "decode_reserve"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InputError(f"{name} {value}: must be 0 or more")


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one pool: ``shared`` are those of ``used`` that more than one cache holds."""

    free: int
    used: int
    shared: int


@dataclass(frozen=True, slots=True)
class KvUse:
    """Bytes of one mode's rows: of running requests, of prefixes kept for reuse, and what the mode may take in all.

    Where pages are shared they count as ``running`` if a running request holds them. ``pages`` by pool, where there
    are pages.
    """

    running: int
    prefixes: int
    budget: int
    pages: Mapping[str, Pages] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return self.running + self.prefixes


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine did since it was made, and does now. Counters only grow.

    ``prefix_declined``: look-ups whose best match could not be used, and prefixes that could not be kept, by reason.
    ``finished``: requests by finish reason. ``fallbacks``: caches on graph operations where the backend has fused
    kernels that could not serve them, by reason. ``batching`` says in words what a step computes together,
    ``decoding`` how steps of decode run and why not better.
    """

    running: int
    waiting: int
    kv: Mapping[str, KvUse]
    budget: int
    prefixes: int
    prefix_hits: int
    prefix_misses: int
    prefix_declined: Mapping[str, int]
    cached_tokens: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    finished: Mapping[str, int]
    fallbacks: Mapping[str, int]
    listener_errors: int
    batching: str
    healthy: bool
    decoding: str = ""
