"""How ranks that share one model talk: a protocol of two collectives, and its implementation for a single process.

A collective is called by every rank, in the same order. Arrays are a backend's own or NumPy's, and come back as they
were given. The implementations for torch.distributed and mx.distributed are in `backends/cuda` and `backends/metal`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from kvcore.errors import KvcoreError
from kvcore.ops import Array


class LostRankError(KvcoreError):
    """Another rank has ended, or the connection to it."""


class Communicator(Protocol):
    """``name`` says what carries the tensors ("gloo", "nccl", "ring", "single process")."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...

    def all_sum(self, x: Array) -> Array:
        """The sum of all ranks' ``x``, of one shape and dtype; the same bits on every rank. ``x`` itself may be gone
        then. LostRankError."""

    def all_gather(self, x: Array) -> Array:
        """All ranks' ``x`` one after the other along the last axis. LostRankError."""

    def close(self) -> None:
        """Leave. Every rank does."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """One rank: collectives change nothing."""

    rank: int = 0
    size: int = 1
    name: str = "single process"

    def all_sum(self, x: Array) -> Array:
        return x

    def all_gather(self, x: Array) -> Array:
        return x

    def close(self) -> None:
        pass


SINGLE = SingleProcess()


class SharedSteps(Protocol):
    """How ranks keep in step that decode over their shares of one cache."""

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""

    def command(self, method: str, *arguments: Any) -> AbstractContextManager[object]:
        """The other ranks' decoders do this now; the body is rank 0's part."""

    def end(self, kept: int, forget: Callable[[], None]) -> None:
        """Nobody reads on: every decoder gives up all steps but those that were read. ``kept`` are not yet read;
        ``forget`` is rank 0's part, now or, where a command is under way, before the next one."""

    def any(self, happened: bool) -> bool:
        """Whether it happened on any rank. Every rank asks. LostRankError."""

    def chosen(self, tokens: Array) -> Array:
        """Rank 0's tokens, on the device: sums of probabilities are not the same bits on every rank."""


class OwnSteps:
    """One rank's, of a single process."""

    alone = True

    def command(self, method: str, *arguments: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def end(self, kept: int, forget: Callable[[], None]) -> None:
        forget()

    def any(self, happened: bool) -> bool:
        return happened

    def chosen(self, tokens: Array) -> Array:
        return tokens


OWN_STEPS = OwnSteps()
