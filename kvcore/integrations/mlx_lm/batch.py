"""`KvcoreBatchCache`: one layer's rows of several sequences, of any lengths, in mlx-lm's batch protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvcore.errors import InputError, UnsupportedError
from kvcore.integrations.mlx_lm.cache import CausalMask, KvcoreCache


class KvcoreBatchCache:
    """A `KvcoreCache` for each sequence: no padding is stored, each has its own sinks, and each is what it would be
    alone. Attention runs sequence by sequence."""

    def __init__(self, caches: list[KvcoreCache]) -> None:
        self.caches = caches
        self._left: list[int] | None = None  # padding still to come, and
        self._lengths: list[int] | None = None  # rows still to come, of each sequence in a padded prompt
        self._spans: list[tuple[int, int]] = []

    @property
    def offset(self) -> mx.array:
        """The next position of each sequence, int32 [B]; below 0 while left padding is still to come."""
        left = self._left or [0] * len(self.caches)
        return mx.array([cache.offset - n for cache, n in zip(self.caches, left, strict=True)])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """``keys`` and ``values`` [B, Hkv, n, D]; rows that are padding are left out."""
        if keys.shape[0] != len(self.caches):
            raise InputError(f"rows of {keys.shape[0]} sequences for a cache of {len(self.caches)}")
        self._spans = [self._take(i, int(keys.shape[2])) for i in range(len(self.caches))]
        for i, (cache, (start, stop)) in enumerate(zip(self.caches, self._spans, strict=True)):
            if stop > start:
                cache.update_and_fetch(keys[i : i + 1, :, start:stop], values[i : i + 1, :, start:stop])
        return keys, values

    def attend(self, q: mx.array, scale: float, mask: Any) -> mx.array:
        """``q`` [B, Hq, n, D] -> [B, Hq, n, D_v]; zeros where a row is padding."""
        if isinstance(mask, mx.array):
            raise UnsupportedError("an attention mask of this model's own over a batch: run its sequences one by one")
        out = []
        for i, (cache, (start, stop)) in enumerate(zip(self.caches, self._spans, strict=True)):
            rows = q[i : i + 1, :, start:stop]
            if stop > start:
                rows = cache.attend(rows, scale, mask)
            after = int(q.shape[2]) - stop
            out.append(mx.pad(rows, [(0, 0), (0, 0), (start, after), (0, 0)]) if start or after else rows)
        return mx.concatenate(out, 0)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> CausalMask:
        return CausalMask(window_size)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Before a padded prompt: how many rows of each sequence are padding, and where."""
        if left_padding is not None:
            self._left = list(left_padding)
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise InputError("right padding without lengths: give both")
            self._lengths = list(lengths)

    def finalize(self) -> None:
        """The padded prompt is done."""
        self._left = self._lengths = None

    def filter(self, batch_indices: Any) -> None:
        """Keep those sequences, in that order."""
        keep: list[int] = [int(i) for i in batch_indices]
        self.caches = [self.caches[i] for i in keep]
        self._left, self._lengths = (
            None if old is None else [old[i] for i in keep] for old in (self._left, self._lengths)
        )

    def extend(self, other: KvcoreBatchCache) -> None:
        """Add the sequences of another batch."""
        self._left, self._lengths = (
            None if mine is None and theirs is None else [*(mine or [fill] * a), *(theirs or [fill] * b)]
            for mine, theirs, fill, a, b in (
                (self._left, other._left, 0, len(self.caches), len(other.caches)),
                (self._lengths, other._lengths, 1 << 62, len(self.caches), len(other.caches)),
            )
        )
        self.caches = [*self.caches, *other.caches]

    def extract(self, idx: int) -> KvcoreCache:
        """One sequence as a cache of its own, which later steps of the batch do not change."""
        return self.caches[idx].copy()

    @classmethod
    def merge(cls, caches: list[KvcoreCache]) -> KvcoreBatchCache:
        return cls([cache.copy() for cache in caches])

    def size(self) -> int:
        return max((cache.offset for cache in self.caches), default=0)

    def empty(self) -> bool:
        return all(cache.empty() for cache in self.caches)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens of every sequence."""
        n = min((cache.offset for cache in self.caches), default=0) if n > self.size() else n
        for cache in self.caches:
            cache.trim(n)
        return n

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def state(self) -> list[Any]:
        """The arrays of all sequences, for mlx-lm to evaluate. A batch is not saved: `extract` its sequences."""
        return [array for cache in self.caches if cache.rows is not None for array in cache.rows.arrays()]

    def _take(self, i: int, count: int) -> tuple[int, int]:
        """Which of the next ``count`` rows of sequence ``i`` are no padding."""
        start, stop = 0, count
        if self._left is not None:
            start = min(count, self._left[i])
            self._left[i] -= start
        if self._lengths is not None:
            stop = min(count, self._lengths[i])
            self._lengths[i] -= stop
        return start, stop
