"""Ranks as threads of one process: real collectives, without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.communicator import Communicator

SECONDS = 120  # that ranks may be apart, for instance while they load


@dataclass(frozen=True)
class ThreadRanks:
    """One thread's view; NumPy arrays only."""

    rank: int
    size: int
    shared: list[Any]
    barrier: threading.Barrier
    name: str = "threads"

    def _exchange(self, x: np.ndarray) -> list[np.ndarray]:
        self.shared[self.rank] = np.array(x)
        self.barrier.wait(SECONDS)
        parts = list(self.shared)
        self.barrier.wait(SECONDS)
        return parts

    def all_sum(self, x: np.ndarray) -> np.ndarray:
        return np.sum(np.stack(self._exchange(x)), 0, dtype=x.dtype)

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate(self._exchange(x), -1)

    def close(self) -> None:
        pass


def on_ranks(size: int, run: Callable[[Communicator], Any]) -> list[Any]:
    """What ``run`` returns on each rank."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def guarded(rank: int) -> Any:
        try:
            return run(ThreadRanks(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()  # or the others would wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(guarded, rank) for rank in range(size)]]
