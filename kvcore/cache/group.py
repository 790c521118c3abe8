"""Caches that step together where their storage can: each keeps its rows, a step computes them in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvcore.cache.cache import Cache
from kvcore.cache.storage import CacheLayer, Storage
from kvcore.ops import Array


class StorageGroup(Protocol):
    """Storages that take a row each at a time."""

    @property
    def layers(self) -> Sequence[CacheLayer]: ...

    def angles(self, inv_freq: np.ndarray) -> tuple[Array, Array]:
        """Begin a step: cos and sin of every sequence's position, for each layer's step."""

    def commit(self) -> None: ...


@runtime_checkable
class GroupedStorage(Storage, Protocol):
    """A storage that may step together with others of the same ``group_key``; None where it may not."""

    @property
    def group_key(self) -> object: ...

    def group(self, storages: Sequence[Storage]) -> StorageGroup: ...


class CacheGroup:
    """Several caches as one `StepCache` of one token per sequence, whatever their lengths."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        """The caches have one `group_key`."""
        self._caches = tuple(caches)
        first = caches[0].storage
        assert isinstance(first, GroupedStorage)
        self._group = first.group([cache.storage for cache in caches])
        self.layers = self._group.layers

    @property
    def offsets(self) -> Sequence[int]:
        return [cache.offset for cache in self._caches]

    def begin_step(self, count: int) -> None:
        for cache in self._caches:
            cache.begin_step(count)

    def angles(self, inv_freq: np.ndarray, count: int) -> tuple[Array, Array]:
        """See `Cache.angles`; ``count`` is 1."""
        return self._group.angles(inv_freq)

    def checkpoint(self) -> Callable[[], None]:
        undo = [cache.checkpoint() for cache in self._caches]
        return lambda: [each() for each in undo].clear()

    def commit(self) -> None:
        self._group.commit()
        for cache in self._caches:
            cache.cut_to_cap()

    def arrays(self) -> list[Array]:
        return self._caches[0].arrays()


def group_key(cache: Cache) -> object:
    """What caches that may step together have in common; None where a cache may not."""
    if cache.spec.sliding:
        return None
    return getattr(cache.storage, "group_key", None)  # of a `GroupedStorage`; asking for the protocol takes long
