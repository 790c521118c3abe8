"""K or V of one layer in buffers, and the centres of K's pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvcore.cache.rows import RowBuffer
from kvcore.layout import Codec, Rotation
from kvcore.layout.footprint import Rows
from kvcore.modes import centred_rows, page_centers
from kvcore.ops import Array, Ops


class Part:
    """K or V of one layer."""

    __slots__ = ("centers", "codec", "folded", "rotation", "sinks", "tail")

    def __init__(
        self,
        ops: Ops,
        codec: Codec,
        dim: int,
        shape: tuple[int, int],
        dtype: str,
        rotation: Rotation | None,
        room: Rows | None,
    ) -> None:
        self.codec, self.rotation = codec, rotation
        first, exact = room or Rows(256, 0, 256, 2), room is not None
        self.tail = RowBuffer(ops, *shape, dim, dtype, first.tail, exact=exact)
        self.sinks = RowBuffer(ops, *shape, dim, dtype, first.sinks, exact=exact)
        self.folded = {
            plane.name: RowBuffer(ops, *shape, plane.width(dim), plane.resolve(dtype), first.folded, exact=exact)
            for plane in codec.planes
        }
        self.centers: Centers | None = None
        if codec.centred:
            self.centers = Centers(RowBuffer(ops, *shape, dim, "float16", first.pages, exact=exact))

    def buffers(self) -> list[RowBuffer]:
        centers = [] if self.centers is None else [self.centers.buffer]
        return [self.tail, self.sinks, *self.folded.values(), *centers]

    def fold(self, ops: Ops, encode: Callable[..., Mapping[str, Array]], rows: Array, page: int) -> None:
        """Quantize ``rows``, which are whole pages."""
        if self.centers is not None and self.rotation is not None:
            centers = page_centers(ops, rows, self.rotation, page)
            rows = centred_rows(ops, rows, centers, self.rotation, page)
            self.centers.append(centers, (page,) * int(centers.shape[2]))
        for name, plane in encode(ops, self.codec, rows, self.rotation).items():
            self.folded[name].append(plane)

    def truncate_folded(self, length: int) -> None:
        """Forget the newest folded rows beyond ``length``, those of a fold that failed too."""
        for buffer in self.folded.values():
            buffer.truncate(length)
        if self.centers is not None:
            self.centers.drop(length, sum(self.centers.page_rows) - length)

    def drop_folded(self, first: int, count: int) -> None:
        """Forget ``count`` folded rows from the ``first`` on."""
        for buffer in self.folded.values():
            buffer.drop(first, count)
        if self.centers is not None:
            self.centers.drop(first, count)

    def planes(self) -> dict[str, Array]:
        return {name: buffer.live() for name, buffer in self.folded.items()}

    def fork(self) -> Part:
        other = object.__new__(Part)
        other.codec, other.rotation = self.codec, self.rotation
        other.tail, other.sinks = self.tail.fork(), self.sinks.fork()
        other.folded = {name: buffer.fork() for name, buffer in self.folded.items()}
        other.centers = None if self.centers is None else self.centers.fork()
        return other

    def marked_rows(self, ops: Ops) -> int:
        """Folded rows that held a NaN or an infinity."""
        planes = self.planes()
        marked = (planes["scale"] == 0) & ops.all(planes["codes"] == 0, axis=-1, keepdims=True)
        return int(ops.to_numpy(marked).sum())


class Centers:
    """One row of ``buffer`` for each page with a live row, oldest first. A page keeps its centre for life."""

    __slots__ = ("buffer", "page_rows")

    def __init__(self, buffer: RowBuffer, page_rows: tuple[int, ...] = ()) -> None:
        self.buffer, self.page_rows = buffer, page_rows

    def append(self, centers: Array, page_rows: Sequence[int]) -> None:
        """``centers`` [B, H, n, D] of the next pages, which have so many live rows."""
        self.buffer.append(centers)
        self.page_rows += tuple(int(rows) for rows in page_rows)

    def drop(self, first: int, count: int) -> None:
        """``count`` folded rows from the ``first`` on are gone, and with them the pages that have no other. Looks at no
        page behind them: under a cap each step drops a row of one of the first pages."""
        page = 0
        while count and self.page_rows[page] <= first:
            first, page = first - self.page_rows[page], page + 1
        left: list[int] = []
        while count:
            rows = self.page_rows[page + len(left)]
            gone = min(rows - first, count)
            left.append(rows - gone)
            first, count = 0, count - gone
        if 0 in left:  # these pages stand side by side
            self.buffer.drop(page + left.index(0), left.count(0))
        behind = self.page_rows[page + len(left) :]
        self.page_rows = (*self.page_rows[:page], *(rows for rows in left if rows), *behind)

    def fork(self) -> Centers:
        return Centers(self.buffer.fork(), self.page_rows)
