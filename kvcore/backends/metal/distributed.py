"""Collectives of mx.distributed: whatever backend mlx.launch has set up, the ring over TCP on Linux too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from kvcore.communicator import LostRankError
from kvcore.errors import BackendError


class MlxCommunicator:
    """The group of all processes that mlx.launch has started."""

    def __init__(self) -> None:
        """BackendError where the processes do not meet."""
        try:
            self._group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise BackendError(f"the ranks did not meet through mx.distributed: {error}") from error
        self.rank, self.size = self._group.rank(), self._group.size()
        self.name = "mx.distributed"

    def all_sum(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return np.array(self._evaluated(lambda: mx.distributed.all_sum(mx.array(x), group=self._group)))
        return mx.distributed.all_sum(x, group=self._group)

    def all_gather(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return np.array(self._evaluated(lambda: self.all_gather(mx.array(x))))
        rows = mx.distributed.all_gather(mx.contiguous(x)[None], group=self._group)  # [ranks, ..., n]
        return mx.concatenate(list(rows), -1)

    def close(self) -> None:
        pass

    def _evaluated(self, collective: Callable[[], mx.array]) -> mx.array:
        try:
            result = collective()
            mx.eval(result)
        except RuntimeError as error:
            raise LostRankError(f"rank {self.rank} of {self.size} lost another one in a collective: {error}") from error
        return result
