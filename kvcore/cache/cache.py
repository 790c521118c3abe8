"""The cache of a whole model: a mode, its storage, and the kernels that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcore.cache.storage import CacheLayer, Storage
from kvcore.cache.view import dense_rows
from kvcore.errors import InputError
from kvcore.layout import CacheShape, CacheStats, WindowPolicy
from kvcore.modes import Mode
from kvcore.ops import Array, Ops
from kvcore.registry import Decision


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of a cache: what the model asks for and what the user chose.

    ``capacity``: tokens that will come, where that is known. Paged storage reserves them, and no storage ends there.
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
        )


class Cache:
    """K and V of every layer. A step is `CacheLayer.step` in each layer, then `commit`; `offset` is the next position.

    The life of a cache is the same whatever its storage: contiguous, for graph operations, or in pages.
    """

    def __init__(self, ops: Ops, spec: CacheSpec, storage: Storage, decisions: tuple[Decision, ...] = ()) -> None:
        self.spec, self.storage, self.decisions = spec, storage, decisions
        self._ops = ops
        self._handed_over = not spec.mode.delegated

    @property
    def mode(self) -> Mode:
        return self.spec.mode

    @property
    def layers(self) -> Sequence[CacheLayer]:
        return self.storage.layers

    @property
    def offset(self) -> int:
        """Tokens seen so far: the position of the next one."""
        return self.layers[-1].tokens

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

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` tokens. Folded rows are not unfolded; the raw tail refills as tokens come."""
        self.storage.trim(count)

    def shorten(self, tokens: int) -> None:
        """Forget what any layer holds beyond ``tokens``: the way back from a step that failed between layers."""
        self.storage.shorten(tokens)

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
