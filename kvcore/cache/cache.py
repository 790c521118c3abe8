"""The cache of a whole model: a mode, its storage, and the kernels that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvcore.cache.positions import Hole, Positions
from kvcore.cache.storage import CacheLayer, RowStorage, Storage, TurningStorage
from kvcore.cache.view import dense_rows
from kvcore.errors import CapacityError, InputError, UnsupportedError
from kvcore.layout import CacheShape, CacheStats, Cap, KVView, WindowPolicy
from kvcore.layout.footprint import bytes_needed
from kvcore.modes import Mode
from kvcore.ops import Array, Ops
from kvcore.registry import Decision


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of a cache: what the model asks for and what the user chose.

    ``capacity``: tokens that will come, where that is known. Paged storage reserves them, and no storage ends there.
    With a ``cap`` the middle of longer sequences is dropped. ``sliding``: layers attend through windows of their own.
    ``budget``: most bytes that rows may take, with steps of at most ``step`` tokens. ``model`` is a fingerprint, for
    caches that share rows.
    """

    mode: Mode
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: WindowPolicy = field(default_factory=WindowPolicy)
    batch: int = 1
    v_head_dim: int | None = None
    capacity: int | None = None
    cap: Cap | None = None
    sliding: bool = False
    budget: int | None = None
    model: str = ""
    step: int = 512

    def shape(self) -> CacheShape:
        """The same for storage. UnsupportedError where a codec cannot store vectors of that width."""
        return CacheShape(
            name=self.mode.name,
            layout=self.mode.layout(self.head_dim, self.v_head_dim),
            delegated=self.mode.delegated,
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            dtype=self.dtype,
            window=self.window,
            batch=self.batch,
            capacity=self.capacity,
            cap=self.cap,
            step=self.step,
            budget=self.budget,
        )


@dataclass(frozen=True, slots=True)
class CacheRows:
    """What a cache holds: canonical rows of each layer, the holes among them, whether a hand-over has been made."""

    views: tuple[KVView, ...]
    holes: tuple[Hole, ...] = ()
    handed_over: bool = True

    @property
    def tokens(self) -> int:
        """Live rows."""
        return self.views[-1].tokens

    @property
    def offset(self) -> int:
        """The position of the next token."""
        return self.tokens + sum(hole.missing for hole in self.holes)


class Cache:
    """K and V of every layer. A step is `CacheLayer.step` in each layer, then `commit`; `offset` is the next position.

    The life of a cache is the same whatever its storage: contiguous, for graph operations, or in pages.
    """

    def __init__(
        self,
        ops: Ops,
        spec: CacheSpec,
        storage: Storage,
        decisions: tuple[Decision, ...] = (),
        limit: int | None = None,
    ) -> None:
        """``limit``: the most tokens for which the budget is enough; None where it always is."""
        self.spec, self.storage, self.decisions, self.limit = spec, storage, decisions, limit
        self._ops = ops
        self._turning = storage if isinstance(storage, TurningStorage) else None  # asked once, not in every step
        self._handed_over = not spec.mode.delegated
        self._positions = Positions()

    @property
    def mode(self) -> Mode:
        return self.spec.mode

    @property
    def layers(self) -> Sequence[CacheLayer]:
        return self.storage.layers

    @property
    def tokens(self) -> int:
        """Live rows: fewer than `offset` where rows in the middle were dropped."""
        return self.layers[-1].tokens if self._turning is None else self._turning.layer_tokens

    @property
    def offset(self) -> int:
        """Tokens seen so far: the position of the next one."""
        return self.tokens + self._positions.missing

    @property
    def offsets(self) -> Sequence[int]:
        """`offset` of each sequence, all alike."""
        return (self.offset,) * self.spec.batch

    @property
    def rows_folded(self) -> int:
        """Live rows in quantized pages, of a layer that is not a boundary layer."""
        return self._rows().rows_folded

    @property
    def live_bytes(self) -> int:
        """Bytes of live rows, as in `stats`."""
        return self._rows().live_bytes

    @property
    def step_limit(self) -> int | None:
        """Most tokens of a step; None where there is neither a cap, in which a longer one has rows that its own newest
        do not see, nor a budget, which reckons with chunks."""
        cap, budget = self.spec.cap, self.spec.budget
        limits = [*([] if cap is None else [cap.window]), *([] if budget is None else [self.spec.step])]
        return min(limits, default=None)

    def begin_step(self, count: int) -> None:
        """Before a step of ``count`` tokens: with a cap, rows that none of them sees are dropped.

        CapacityError where the budget is not enough for the others and the new ones.
        """
        if self.spec.cap is not None and count > 0:
            self._drop_beyond(self.spec.cap.tokens - 1)
        self.require(self.tokens + count)

    def require(self, tokens: int) -> None:
        """CapacityError where the budget is not enough for so many tokens, which says what they take."""
        if self.limit is None or tokens <= self.limit:
            return
        kind = self.decisions[0].storage if self.decisions else "contiguous"
        needed = bytes_needed(self.spec.shape(), tokens, kind)
        raise CapacityError(
            f"{tokens} tokens take {needed} bytes of cache in mode {self.mode.name}, the budget is {self.spec.budget} "
            f"bytes and holds {self.limit} tokens: give a larger --kv-cache-budget, a smaller cache mode, a "
            "--max-kv-size or fewer tokens"
        )

    def angles(self, inv_freq: np.ndarray, count: int) -> tuple[Array, Array] | None:
        """Begin a step of ``count`` tokens: cos and sin of their positions where the layers apply the rotary embedding
        themselves (`TurningStorage`), else None."""
        return None if self._turning is None else self._turning.angles(inv_freq, count)

    def begin_decode(self) -> None:
        """The hand-over of a delegated mode: all but the window is folded now, later rows page by page. One-way; a
        no-op in other modes and the second time. Called after the last prompt token's attention."""
        if not self._handed_over:
            self.storage.hand_over()
            self._handed_over = True

    def commit(self, accepted: int | None = None, pending: int | None = None) -> None:
        """Fold what is due in every layer.

        After speculative verification of ``pending`` appended rows, ``accepted`` of them stay: the others are
        forgotten before anything folds.
        """
        if accepted is not None:
            if pending is None or not 0 <= accepted <= pending:
                raise InputError(f"cannot accept {accepted} of {pending} pending rows")
            self.trim(pending - accepted)
        self.storage.commit()
        self.cut_to_cap()

    def cut_to_cap(self) -> None:
        """Drop what is beyond the cap; part of `commit`."""
        if self.spec.cap is not None:
            self._drop_beyond(self.spec.cap.tokens)

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` live rows; `offset` goes back to behind the last one that stays.

        Folded rows are not unfolded; the raw tail refills as tokens come.
        """
        self.storage.trim(count)
        if count:
            self._forget_holes()

    def drop(self, first: int, count: int) -> None:
        """Forget ``count`` tokens from live row ``first`` on. The others stay as they are stored, at their positions,
        and `offset` does not change. InputError where there are fewer, or where the storage cannot do it."""
        self._rows().drop(first, count)
        self._positions.drop(first, count)

    def rewind(self, offset: int) -> int:
        """Go back to the position ``offset``, and further where the row before it was dropped: to before that hole.
        Returns the position of the next token, which is ``offset`` or less."""
        if offset < self.offset:
            self.storage.trim(self.tokens - max(0, self._positions.rows_before(offset, self.tokens)))
            self._forget_holes()
        return self.offset

    def export(self) -> CacheRows:
        """The rows in canonical form, as this backend's arrays. Later steps may overwrite them: use them first."""
        views = tuple(layer.view() for layer in self.layers)
        return CacheRows(views, tuple(self._positions.holes), self._handed_over)

    def load(self, rows: CacheRows) -> None:
        """Take exported rows into this empty cache, whatever storage they come from; arrays are this backend's or the
        host's. Raw rows are converted to this cache's dtype, codes never. With a cap the middle is dropped."""
        if self.tokens:
            raise InputError(f"rows are loaded into an empty cache: this one holds {self.tokens} tokens")
        first = min((hole.at for hole in rows.holes), default=self.spec.window.sink_tokens)
        self.require(rows.tokens if self.spec.cap is None else min(rows.tokens, self.spec.cap.tokens))
        self._rows().load(rows.views, min(first, self.spec.window.sink_tokens), rows.handed_over)
        self._positions = Positions(list(rows.holes))
        self._place()
        self._handed_over = rows.handed_over
        if self.spec.cap is not None:
            self._drop_beyond(self.spec.cap.tokens)

    def fork(self) -> Cache:
        """Another cache with the same rows, independent of this one. Rows are shared until one of the two writes."""
        other = Cache(self._ops, self.spec, self._rows().fork(), self.decisions, self.limit)
        other._positions, other._handed_over = self._positions.copy(), self._handed_over
        return other

    @property
    def holes(self) -> tuple[Hole, ...]:
        """Where rows in the middle were dropped, oldest first."""
        return tuple(self._positions.holes)

    @property
    def handed_over(self) -> bool:
        """Whether rows fold as they come; false in a delegated mode until `begin_decode`."""
        return self._handed_over

    def shorten(self, tokens: int) -> None:
        """Forget what any layer holds beyond ``tokens`` rows: the way back from a step that failed between layers."""
        self.storage.shorten(tokens)

    def checkpoint(self) -> Callable[[], None]:
        """What takes back a step that fails from here on."""
        tokens = self.tokens
        return lambda: self.shorten(tokens)

    def _drop_beyond(self, tokens: int) -> None:
        """Drop the rows after the kept ones so that ``tokens`` remain."""
        assert self.spec.cap is not None
        if self.tokens > tokens:
            self.drop(self.spec.cap.keep, self.tokens - tokens)

    def _forget_holes(self) -> None:
        """Those behind the last row."""
        self._positions.trim(self.tokens)
        self._place()

    def _place(self) -> None:
        if self._turning is not None:
            self._turning.place(self.offset)

    def _rows(self) -> RowStorage:
        if not isinstance(self.storage, RowStorage):
            raise UnsupportedError(f"the storage of this cache ({type(self.storage).__name__}) only grows")
        return self.storage

    def dense(self, layer: int) -> tuple[Array, Array]:
        """K and V of one layer as attention sees them, float32 [B, Hkv, tokens, D]."""
        return dense_rows(self._ops, self.layers[layer].view())

    def stats(self) -> CacheStats:
        return self.storage.stats()

    def arrays(self) -> list[Array]:
        """Every array that holds rows, for a backend that must be told to evaluate them."""
        return self.storage.arrays()

    def describe(self) -> dict[str, Any]:
        """Mode and kernels as plain values."""
        return {
            "mode": self.mode.name,
            "window": asdict(self.spec.window),
            "kernels": [decision.to_dict() for decision in self.decisions],
        }
