"""What the HTTP layer knows of the model and the engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcore.engine.config import EngineStats
from kvcore.engine.types import Listener, Request
from kvcore.text import Tokenizer

DEFAULT_NAME = "default_model"  # what mlx_lm.server's clients call whatever is served


class EngineLike(Protocol):
    """What of the engine is used here; `kvcore.engine.Engine` is one."""

    @property
    def most_open(self) -> int: ...

    def submit(self, request: Request, listener: Listener) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def stop(self, timeout: float = 30.0) -> None: ...


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets for what it leaves out. ``max_tokens`` None: as many as fit (16 at /v1/completions)."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind an engine. ``names``: the one that answers carry, then its aliases.

    ``facts`` are for /health: backend, mode requested and effective, kernels with reasons.
    """

    names: tuple[str, ...]
    engine: EngineLike
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    created: int
    fingerprint: str
    mode: str
    check_mode: Callable[[str], str]
    defaults: Defaults = Defaults()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]

    def summary(self) -> dict[str, Any]:
        """What the log says when the server is ready: the facts, with kernels in words."""
        facts = {name: value for name, value in self.facts.items() if name not in ("kernels", "window", "notices")}
        kernels = [kernel["kernel"] for kernel in self.facts.get("kernels", ())]
        return {"model": self.name, **facts, "kernels": kernels}

    def knows(self, name: str | None) -> bool:
        return name is None or name in self.names or name == DEFAULT_NAME
