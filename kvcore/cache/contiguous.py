"""The cache of a whole model in contiguous storage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvcore.cache.layer import LayerCache, LayerKernels
from kvcore.errors import InputError
from kvcore.layout import WindowPolicy
from kvcore.modes import Mode
from kvcore.ops import Array, Ops
from kvcore.registry import Decision


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of a cache: what the model asks for and what the user chose."""

    mode: Mode
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: WindowPolicy = field(default_factory=WindowPolicy)
    batch: int = 1
    v_head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds. Rows are those of one layer that is not a boundary layer; bytes cover all layers.

    ``kv_bytes_raw`` is what the same tokens cost with every row raw.
    """

    tokens: int
    rows_raw: int
    rows_folded: int
    kv_bytes: int
    kv_bytes_raw: int
    kv_bytes_allocated: int
    nonfinite_rows: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Cache:
    """K and V of every layer. In each step and layer: append, attend, then commit; `offset` is the next position."""

    def __init__(
        self,
        ops: Ops,
        spec: CacheSpec,
        kernels: LayerKernels,
        decisions: tuple[Decision, ...] = (),
        *,
        raise_on_nonfinite: bool = False,
    ) -> None:
        self.spec, self.decisions = spec, decisions
        raw = Mode("fp16", "raw", "raw").layout(spec.head_dim, spec.v_head_dim)
        folded = spec.mode.layout(spec.head_dim, spec.v_head_dim)
        self.layers = [
            LayerCache(
                ops,
                raw if spec.window.is_raw_layer(layer, spec.num_layers) else folded,
                spec.window,
                kernels,
                layer=layer,
                batch=spec.batch,
                kv_heads=spec.num_kv_heads,
                dtype=spec.dtype,
                raise_on_nonfinite=raise_on_nonfinite,
            )
            for layer in range(spec.num_layers)
        ]
        self._handed_over = not spec.mode.delegated
        if not self._handed_over:
            for layer in self.layers:
                layer.folding = False

    @property
    def mode(self) -> Mode:
        return self.spec.mode

    @property
    def offset(self) -> int:
        """Tokens seen so far: the position of the next one."""
        return self.layers[-1].tokens

    def begin_decode(self) -> None:
        """The hand-over of a delegated mode: all but the window is folded now, later rows page by page. One-way; a
        no-op in other modes and the second time. Called after the last prompt token's attention."""
        if self._handed_over:
            return
        self._handed_over = True
        for layer in self.layers:
            layer.folding = layer.layout.quantized
        self.commit()

    def commit(self, accepted: int | None = None, pending: int | None = None) -> None:
        """Fold what is due in every layer.

        After speculative verification of ``pending`` appended rows, ``accepted`` of them stay: the others are
        forgotten before anything folds.
        """
        if accepted is not None:
            if pending is None or not 0 <= accepted <= pending:
                raise InputError(f"cannot accept {accepted} of {pending} pending rows")
            self.trim(pending - accepted)
        for layer in self.layers:
            layer.commit()

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` tokens. Folded rows are not unfolded; the raw tail refills as tokens come."""
        for layer in self.layers:
            layer.trim(count)

    def shorten(self, tokens: int) -> None:
        """Forget what any layer holds beyond ``tokens``: the way back from a step that failed between layers."""
        for layer in self.layers:
            layer.trim(max(0, layer.tokens - tokens))

    def dense(self, layer: int) -> tuple[Array, Array]:
        """K and V of one layer as attention sees them, float32 [B, Hkv, tokens, D]."""
        return self.layers[layer].dense()

    def stats(self) -> CacheStats:
        shown = next((layer for layer in self.layers if layer.layout.quantized), self.layers[0])
        raw_row = shown.layout.raw_bytes_per_token(self.spec.dtype)
        heads = self.spec.batch * self.spec.num_kv_heads
        return CacheStats(
            tokens=self.offset,
            rows_raw=shown.rows_tail + shown.rows_sinks,
            rows_folded=shown.rows_folded,
            kv_bytes=sum(layer.live_bytes() for layer in self.layers),
            kv_bytes_raw=sum(layer.tokens for layer in self.layers) * raw_row * heads,
            kv_bytes_allocated=sum(layer.allocated_bytes() for layer in self.layers),
            nonfinite_rows=sum(layer.nonfinite_rows() for layer in self.layers),
        )

    def arrays(self) -> list[Array]:
        """Every array that holds rows, for a backend that must be told to evaluate them."""
        return [array for layer in self.layers for array in layer.arrays()]

    def describe(self) -> dict[str, Any]:
        """Mode and kernels as plain values."""
        return {
            "mode": self.mode.name,
            "window": asdict(self.spec.window),
            "kernels": [decision.to_dict() for decision in self.decisions],
        }
