"""One layer's rows: raw sinks, folded pages, raw tail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from kvcore.cache.part import Part
from kvcore.cache.rows import RowBuffer
from kvcore.cache.view import dense_rows
from kvcore.errors import InputError, NonFiniteError
from kvcore.layout import Cap, Codec, KVView, Layout, Rotation, WindowPolicy, visible
from kvcore.layout.footprint import Rows
from kvcore.ops import Array, Ops

_ENCODE_ROWS = 4096  # rows folded in one go: bounds the float32 workspace of a hand-over


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The callables that the registry chose for a layer.

    encode(ops, codec, rows, rotation) -> planes; rows of a centred codec come without their pages' centres, in float32
    attend(ops, q, view, scale, window) -> [B, Hq, n, v_dim]
    """

    encode: Callable[[Ops, Codec, Array, Rotation | None], Mapping[str, Array]]
    attend: Callable[[Ops, Array, KVView, float, int | None], Array]


class LayerCache:
    """Append, attend, commit: the life of one layer's K and V, for a batch of equally long sequences."""

    def __init__(
        self,
        ops: Ops,
        layout: Layout,
        window: WindowPolicy,
        kernels: LayerKernels,
        *,
        layer: int,
        batch: int,
        kv_heads: int,
        dtype: str,
        cap: Cap | None = None,
        room: Rows | None = None,
        raise_on_nonfinite: bool = False,
    ) -> None:
        """``room``: rows to take at once, where a budget counts them."""
        self._ops, self._window, self._kernels, self._cap = ops, window, kernels, cap
        self._raise_on_nonfinite = raise_on_nonfinite
        self.layout = layout
        self.layer = layer
        self.dtype = dtype
        self.folding = layout.quantized
        self._shape = shape = (batch, kv_heads)
        k_rotation = Rotation.create(ops, layer, "k", layout.k_dim) if layout.k.codebook else None
        v_rotation = Rotation.create(ops, layer, "v", layout.v_dim) if layout.v.codebook else None
        self._k = Part(ops, layout.k, layout.k_dim, shape, dtype, k_rotation, room)
        self._v = Part(ops, layout.v, layout.v_dim, shape, dtype, v_rotation, room)
        self._folded_rows = 0
        self._first_rows = window.sink_tokens  # of the oldest rows: those that may become sinks at the first fold

    @property
    def rows_folded(self) -> int:
        return self._folded_rows

    @property
    def rows_tail(self) -> int:
        return self._k.tail.length

    @property
    def rows_sinks(self) -> int:
        """Raw rows beside the first page, whose codes they shadow."""
        return self._k.sinks.length

    @property
    def tokens(self) -> int:
        return self._folded_rows + self.rows_tail

    def step(self, q: Array, k: Array, v: Array, scale: float, window: int | None = None) -> Array:
        """`append`, then `attend`: see `CacheLayer.step`."""
        self.append(k, v)
        return self.attend(q, scale, window)

    def append(self, k: Array, v: Array) -> None:
        """Keep new rows raw: ``k`` [B, Hkv, n, k_dim] after RoPE, ``v`` [B, Hkv, n, v_dim].

        Raises InputError for other shapes.
        """
        count = int(k.shape[2])
        for name, rows, dim in (("K", k, self.layout.k_dim), ("V", v, self.layout.v_dim)):
            if tuple(rows.shape) != (expected := (*self._shape, count, dim)):
                raise InputError(f"{name} rows of shape {tuple(rows.shape)}: this layer takes {expected}")
        self._k.tail.append(k)
        self._v.tail.append(v)

    def attend(self, q: Array, scale: float, window: int | None = None) -> Array:
        """Attention of ``q`` [B, Hq, n, k_dim], the queries of the newest n rows, over all live rows.

        Causal among the newest rows; with ``window`` a query sees its own and the ``window`` - 1 live rows before it. A
        cap hides what it would have dropped by then. Returns [B, Hq, n, v_dim] in q's dtype.
        """
        view = self.view()
        window, keep = visible(self._cap, window, view.tokens)
        return self._kernels.attend(self._ops, q, replace(view, keep=keep) if keep else view, scale, window)

    def hand_over(self, tail: int | None) -> None:
        """Rows fold from now on, and what is due at once; the raw tail that is left needs room for ``tail`` rows (None:
        as it grows). An error leaves the layer as it was."""
        before = self.folding, [part.tail.first_capacity for part in (self._k, self._v)]
        self.folding = self.layout.quantized
        for part in (self._k, self._v):
            if tail is not None and self.folding:
                part.tail.first_capacity = tail
        try:
            self.commit()
        except BaseException:
            self.folding, (self._k.tail.first_capacity, self._v.tail.first_capacity) = before
            raise

    def commit(self) -> int:
        """Fold the oldest raw rows, whole pages at a time, where the window policy says so; returns their number."""
        return fold_due([self])[0]

    def _rows_due(self) -> int:
        """Rows that `fold_due` folds. NonFiniteError where one of them forbids it."""
        rows = self._window.foldable(self.rows_tail) if self.folding else 0
        if rows and self._raise_on_nonfinite:
            self._check_finite(self._k, "K", rows)
            self._check_finite(self._v, "V", rows)
        return rows

    def _encode(self, rows: int) -> None:
        """Sinks and pages of the oldest raw rows, which stay where they are."""
        new_sinks = min(self._first_rows, rows) if self._folded_rows == 0 else 0
        page = self._window.page_size
        step = max(1, _ENCODE_ROWS // page) * page
        for part in (self._k, self._v):
            tail = part.tail.live()
            part.sinks.append(tail[:, :, :new_sinks])
            for start in range(0, rows, step):
                chunk = tail[:, :, start : min(rows, start + step)]
                part.fold(self._ops, self._kernels.encode, chunk, page)

    def _cut_pages(self) -> None:
        """Forget sinks and quantized rows beyond the folded ones, what `_encode` did of a fold that failed too."""
        for part in (self._k, self._v):
            part.sinks.truncate(min(part.sinks.length, self._folded_rows))
            part.truncate_folded(self._folded_rows)

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` rows. Folded rows are never unfolded: the tail gets shorter, even empty."""
        if not 0 <= count <= self.tokens:
            raise InputError(f"cannot trim {count} rows: the cache holds {self.tokens}")
        from_tail = min(count, self.rows_tail)
        tail = self.rows_tail - from_tail
        self._folded_rows -= count - from_tail
        for part in (self._k, self._v):
            part.tail.truncate(min(part.tail.length, tail))  # V's is shorter where a step failed between the two
        self._cut_pages()
        if count and self._folded_rows == 0 and self.tokens <= self._first_rows:
            self._first_rows = self._window.sink_tokens  # no hole is left

    def drop(self, first: int, count: int) -> None:
        """Forget ``count`` rows from live row ``first`` on; the others stay as they are stored.

        Sinks behind the hole are read from their codes from now on.
        """
        if first < 0 or count < 0 or first + count > self.tokens:
            raise InputError(f"cannot drop {count} rows from row {first} on: the cache holds {self.tokens}")
        if first + count == self.tokens:
            self.trim(count)
            self._first_rows = min(self._first_rows, first) if count else self._first_rows
            return
        from_folded = max(0, min(first + count, self._folded_rows) - first)
        in_tail = max(0, first - self._folded_rows)
        for part in (self._k, self._v):
            if count:
                part.sinks.truncate(min(part.sinks.length, first))
            part.drop_folded(first, from_folded)
            part.tail.drop(in_tail, count - from_folded)
        self._folded_rows -= from_folded
        if count:
            self._first_rows = min(self._first_rows, first)

    def load(self, view: KVView, first_rows: int, folding: bool) -> None:
        """Take the rows of ``view`` into this empty layer: see `RowStorage.load`."""
        self._folded_rows, self._first_rows = view.folded, first_rows
        self.folding = folding and self.layout.quantized
        for part, planes, sinks, tail in (
            (self._k, view.k_planes, view.sink_k, view.tail_k),
            (self._v, view.v_planes, view.sink_v, view.tail_v),
        ):
            part.tail.append(self._ops.asarray(tail))
            if sinks is not None:
                part.sinks.append(self._ops.asarray(sinks))
            for name, buffer in part.folded.items():
                if view.folded:
                    buffer.append(self._ops.asarray(planes[name]))
        self._load_centers(view)

    def _load_centers(self, view: KVView) -> None:
        if self._k.centers is not None and view.folded:
            self._k.centers.append(self._ops.asarray(view.k_centers), view.page_rows)

    def fork(self) -> LayerCache:
        other = copy(self)
        other._k, other._v = self._k.fork(), self._v.fork()
        return other

    def view(self) -> KVView:
        """The live rows as attention reads them."""
        sinks, centers = self.rows_sinks, self._k.centers
        return KVView(
            layout=self.layout,
            sinks=sinks,
            folded=self._folded_rows,
            sink_k=self._k.sinks.live()[:, :, :sinks] if sinks else None,
            sink_v=self._v.sinks.live()[:, :, :sinks] if sinks else None,
            k_planes=self._k.planes(),
            v_planes=self._v.planes(),
            tail_k=self._k.tail.live(),
            tail_v=self._v.tail.live(),
            k_rotation=self._k.rotation,
            v_rotation=self._v.rotation,
            k_centers=None if centers is None else centers.buffer.live(),
            page_rows=() if centers is None else centers.page_rows,
        )

    def dense(self) -> tuple[Array, Array]:
        """K [B, Hkv, tokens, k_dim] and V, float32, as attention sees them: sinks and tail raw, pages decoded."""
        return dense_rows(self._ops, self.view())

    def nonfinite_rows(self) -> int:
        """Folded rows, those of K and V and of each head counted apart, that held a NaN or an infinity: scale and
        codes are 0. A row of zeros differs: it has scale 1 (int8) or codes at the middle of the book (turbo)."""
        return sum(part.marked_rows(self._ops) for part in (self._k, self._v) if part.codec.quantized)

    def _check_finite(self, part: Part, name: str, count: int) -> None:
        if not part.codec.quantized:
            return
        rows = self._ops.to_numpy(part.tail.live()[:, :, :count]).astype(np.float32)
        bad = np.argwhere(~np.isfinite(rows).all(-1))
        if len(bad):
            sequence, head, row = (int(i) for i in bad[0])
            raise NonFiniteError(
                f"{name} of layer {self.layer}, head {head}, position {self._folded_rows + row}, sequence {sequence} "
                f"is not finite ({len(bad)} such rows in this page): it cannot be quantized; "
                "check the weights, or use mode fp16"
            )

    def buffers(self) -> list[RowBuffer]:
        return self._k.buffers() + self._v.buffers()

    def live_bytes(self) -> int:
        """Bytes of live rows: sinks and the page rows that they shadow both count."""
        return sum(buffer.length * buffer.row_bytes for buffer in self.buffers())

    def allocated_bytes(self) -> int:
        return sum(buffer.capacity * buffer.row_bytes for buffer in self.buffers())

    def arrays(self) -> list[Array]:
        return [array for buffer in self.buffers() for array in buffer.arrays()]


def fold_due(layers: Sequence[LayerCache]) -> list[int]:
    """Fold what is due in each layer and return how many rows that were; an error leaves all of them as they were."""
    due = [layer._rows_due() for layer in layers]
    folding = [(layer, rows) for layer, rows in zip(layers, due, strict=True) if rows]
    try:
        for layer, rows in folding:
            layer._encode(rows)
        tails = [[part.tail.without_front(rows) for part in (layer._k, layer._v)] for layer, rows in folding]
    except BaseException:
        for layer, _ in folding:
            layer._cut_pages()
        raise
    for (layer, rows), (k, v) in zip(folding, tails, strict=True):
        layer._k.tail, layer._v.tail = k, v
        layer._folded_rows += rows
    return due
