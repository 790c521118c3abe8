"""How ranks that share one model talk: a protocol of two collectives, and its implementation for a single process.

A collective is called by every rank, in the same order. Arrays are a backend's own or NumPy's, and come back as they
were given. The implementations for torch.distributed and mx.distributed are in `backends/cuda` and `backends/metal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
        """The sum of all ranks' ``x``, of one shape and dtype; the same bits on every rank. LostRankError."""

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
