"""A growable array of rows."""

from __future__ import annotations

from kvcore.ops import ITEMSIZE, Array, Ops


class RowBuffer:
    """Rows [B, H, capacity, W] of which ``length`` from ``start`` on are live.

    Capacity grows by half: n appends copy less than three times the final size, and at most a third of a grown
    buffer is unused. Where the front goes a few rows at a time, the rest stays where it is until the end of the buffer
    is reached. A buffer that is shared with a fork is copied before the first write. An ``exact`` one has its first
    capacity for what comes, and grows to no more than it needs.
    """

    __slots__ = (
        "_batch",
        "_buffer",
        "_dtype",
        "_exact",
        "_heads",
        "_ops",
        "_shared",
        "_width",
        "bytes_copied",
        "first_capacity",
        "length",
        "reallocations",
        "start",
    )

    def __init__(
        self,
        ops: Ops,
        batch: int,
        heads: int,
        width: int,
        dtype: str,
        first_capacity: int = 256,
        *,
        exact: bool = False,
    ) -> None:
        self._ops, self._batch, self._heads, self._width, self._dtype = ops, batch, heads, width, dtype
        self.first_capacity, self._exact = first_capacity, exact
        self._buffer: Array | None = None
        self._shared = False
        self.start = 0
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
        self._buffer = self._ops.write_rows(self._buffer, rows, self.start + self.length)
        self.length += count

    def live(self) -> Array:
        """A view [B, H, length, W]."""
        if self._buffer is None:
            return self._ops.zeros((self._batch, self._heads, 0, self._width), self._dtype)
        return self._buffer[:, :, self.start : self.start + self.length]

    def truncate(self, length: int) -> None:
        """Forget the newest rows beyond ``length``."""
        self.length = length
        if length == 0:
            self.start = 0

    def drop(self, first: int, count: int) -> None:
        """Forget ``count`` rows from the ``first`` on. The rows before them move, in place: few, as a rule."""
        if count == 0:
            return
        left = self.length - count
        if 0 < first < left:
            self._own()
            assert self._buffer is not None
            front = self._buffer[:, :, self.start : self.start + first]
            front = self._ops.concat([front], 2)  # a copy, as source and target may overlap
            self._buffer = self._ops.write_rows(self._buffer, front, self.start + count)
            self.bytes_copied += first * self.row_bytes
        if first < left:
            self.start += count
        self.length = left

    def without_front(self, count: int) -> RowBuffer:
        """All but the oldest ``count`` rows, in a buffer of their own size; this one stays as it is. An exact buffer
        has that size for good: then they stay where they are, and only one of the two may be written to."""
        other = self._empty()
        if self._exact and self.capacity == self.first_capacity:
            other._buffer, other._shared = self._buffer, self._shared
            other.start, other.length = self.start + count, self.length
            other.truncate(self.length - count)
            other.reallocations, other.bytes_copied = self.reallocations, self.bytes_copied
            return other
        other.append(self.live()[:, :, count:])
        other.reallocations = self.reallocations
        other.bytes_copied = self.bytes_copied + other.length * other.row_bytes
        return other

    def _empty(self) -> RowBuffer:
        shape = self._ops, self._batch, self._heads, self._width, self._dtype
        return RowBuffer(*shape, self.first_capacity, exact=self._exact)

    def fork(self) -> RowBuffer:
        """The same rows in the same array, until one of the two writes."""
        other = self._empty()
        other._buffer, other.start, other.length = self._buffer, self.start, self.length
        self._shared = other._shared = self._buffer is not None
        return other

    def arrays(self) -> list[Array]:
        return [] if self._buffer is None else [self._buffer]

    def _reserve(self, wanted: int) -> None:
        if self.start + wanted <= self.capacity and not self._shared:
            return
        capacity = self.capacity
        if self._exact:
            capacity = max(wanted, self.first_capacity)
        elif wanted > capacity * 2 // 3:
            capacity = max(wanted, self.first_capacity, capacity + capacity // 2)
        self._move(capacity)

    def _own(self) -> None:
        if self._shared:
            self._move(self.capacity)

    def _move(self, capacity: int) -> None:
        """The live rows to the front of a new array."""
        grown = self._ops.zeros((self._batch, self._heads, capacity, self._width), self._dtype)
        if self.length:
            grown = self._ops.write_rows(grown, self.live(), 0)
            self.bytes_copied += self.length * self.row_bytes
        if self._buffer is not None:
            self.reallocations += 1
        self._buffer, self.start, self._shared = grown, 0, False
