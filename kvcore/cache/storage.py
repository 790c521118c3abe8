"""What a storage is: the rows of all layers, wherever and however they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, runtime_checkable

import numpy as np

from kvcore.layout import CacheStats, KVView, Layout
from kvcore.ops import Array


class CacheLayer(Protocol):
    """One layer's rows, for a batch of equally long sequences."""

    @property
    def layout(self) -> Layout:
        """How folded rows are stored."""

    @property
    def tokens(self) -> int:
        """Live rows, those of a step under way included."""

    def step(self, q: Array, k: Array, v: Array, scale: float, window: int | None = None) -> Array:
        """Keep new rows raw, then attend: the layer's share of a step. Nothing folds before the storage's commit.

        ``q`` [B, Hq, n, k_dim] and ``k`` [B, Hkv, n, k_dim] after RoPE, ``v`` [B, Hkv, n, v_dim]. The queries see all
        live rows, causally among the new ones; with ``window`` a query sees its own and the ``window`` - 1 live rows
        before it. Returns [B, Hq, n, v_dim] in q's dtype. Raises InputError for other shapes.
        """

    def view(self) -> KVView:
        """The live rows in canonical form, oldest first: for tests and for reading a cache, not for attention."""


class StepCache(Protocol):
    """What a step of a model needs: a `Cache`, or several that step together. ``offsets``: the position of the next
    token of each sequence."""

    @property
    def layers(self) -> Sequence[CacheLayer]: ...
    @property
    def offsets(self) -> Sequence[int]: ...

    def begin_step(self, count: int) -> None:
        """Before a step of ``count`` tokens of each sequence."""

    def angles(self, inv_freq: np.ndarray, count: int) -> tuple[Array, Array] | None:
        """See `Cache.angles`."""

    def checkpoint(self) -> Callable[[], None]:
        """What takes back a step that fails from here on."""

    def commit(self) -> None:
        """After a step: fold what is due."""

    def arrays(self) -> list[Array]:
        """Every array that holds rows."""


class Storage(Protocol):
    """K and V of every layer. A step is `CacheLayer.step` for each layer, then `commit`."""

    @property
    def layers(self) -> Sequence[CacheLayer]: ...

    def commit(self) -> None:
        """Fold what is due in every layer. An error leaves everything as it was."""

    def hand_over(self) -> None:
        """Fold from now on, and what is due at once. An error leaves each layer as it was, or handed over: the next
        call goes on with the others."""

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` rows of every layer; nothing is unfolded. InputError where there are fewer."""

    def shorten(self, tokens: int) -> None:
        """Forget what any layer holds beyond ``tokens``."""

    def stats(self) -> CacheStats: ...

    def arrays(self) -> list[Array]:
        """Every array that holds rows, for a backend that must be told to evaluate them."""


@runtime_checkable
class RowStorage(Storage, Protocol):
    """A storage whose rows can do more than come and go."""

    @property
    def rows_folded(self) -> int:
        """Folded rows of a layer that is not a boundary layer; waits for nothing."""

    @property
    def live_bytes(self) -> int:
        """Bytes of live rows as `CacheStats.kv_bytes` counts them; waits for nothing."""

    def drop(self, first: int, count: int) -> None:
        """Forget ``count`` rows of every layer from live row ``first`` on. The others stay as they are stored.
        InputError where there are fewer."""

    def load(self, views: Sequence[KVView], first_rows: int, folding: bool) -> None:
        """Take the rows of ``views``, one of each layer, into this empty storage; raw rows are converted to its dtype.

        ``first_rows``: the oldest rows of which the first fold may make sinks (fewer than the window's sink tokens
        where a hole follows them). ``folding``: whether the hand-over of a delegated mode has been made.
        """

    def fork(self) -> Self:
        """The same rows again, at the cost of no copy until one of the two writes."""


@runtime_checkable
class TurningStorage(Storage, Protocol):
    """A storage whose layers apply the rotary embedding: their `step` takes q and k before it, with ``angles``."""

    @property
    def layer_tokens(self) -> int:
        """Live rows of the last layer."""

    def place(self, offset: int) -> None:
        """The next token has this position: after rows came or went, among which there are holes."""

    def angles(self, inv_freq: np.ndarray, count: int) -> tuple[Array, Array]:
        """Begin a step of ``count`` tokens: cos and sin of their positions, for each layer's step."""

    def rope_angles(self, inv_freq: np.ndarray, count: int) -> tuple[Array, Array]:
        """The same for a step that has begun."""
