"""A growable array of rows."""

from __future__ import annotations

from kvcore.ops import ITEMSIZE, Array, Ops


class RowBuffer:
    """Rows [B, H, capacity, W] of which the first ``length`` are live.

    Capacity grows by half: n appends copy less than three times the final size, and at most a third of a grown
    buffer is unused.
    """

    __slots__ = (
        "_batch",
        "_buffer",
        "_dtype",
        "_first_capacity",
        "_heads",
        "_ops",
        "_width",
        "bytes_copied",
        "length",
        "reallocations",
    )

    def __init__(self, ops: Ops, batch: int, heads: int, width: int, dtype: str, first_capacity: int = 256) -> None:
        self._ops, self._batch, self._heads, self._width, self._dtype = ops, batch, heads, width, dtype
        self._first_capacity = first_capacity
        self._buffer: Array | None = None
        self.length = 0
        self.reallocations = 0
        self.bytes_copied = 0

    @property
    def capacity(self) -> int:
        return 0 if self._buffer is None else int(self._buffer.shape[2])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over the whole batch and all heads."""
        return self._batch * self._heads * self._width * ITEMSIZE[self._dtype]

    def append(self, rows: Array) -> None:
        """``rows`` [B, H, n, W]; converted to the buffer's dtype."""
        count = int(rows.shape[2])
        if count == 0:
            return
        self._reserve(self.length + count)
        rows = self._ops.astype(rows, self._dtype)
        self._buffer = self._ops.write_rows(self._buffer, rows, self.length)
        self.length += count

    def live(self) -> Array:
        """A view [B, H, length, W]."""
        if self._buffer is None:
            return self._ops.zeros((self._batch, self._heads, 0, self._width), self._dtype)
        return self._buffer[:, :, : self.length]

    def truncate(self, length: int) -> None:
        """Forget the newest rows beyond ``length``."""
        self.length = length

    def drop_front(self, count: int) -> None:
        """Forget the oldest ``count`` rows; the rest moves into a buffer of its own size."""
        rest = self.live()[:, :, count:]
        self._buffer = None
        self.length = 0
        self.append(rest)
        self.bytes_copied += self.length * self.row_bytes

    def arrays(self) -> list[Array]:
        return [] if self._buffer is None else [self._buffer]

    def _reserve(self, wanted: int) -> None:
        if wanted <= self.capacity:
            return
        capacity = max(wanted, self._first_capacity, self.capacity + self.capacity // 2)
        grown = self._ops.zeros((self._batch, self._heads, capacity, self._width), self._dtype)
        if self.length:
            grown = self._ops.write_rows(grown, self.live(), 0)
            self.bytes_copied += self.length * self.row_bytes
        if self._buffer is not None:
            self.reallocations += 1
        self._buffer = grown
