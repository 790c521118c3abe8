"""A cache as its storage sees it: the shape that it is made for, and what it says of itself. No modes, only layouts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvcore.layout.planes import Layout
from kvcore.layout.window import Cap, WindowPolicy


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What storage is made for. ``layout`` is that of folded rows; with ``delegated`` nothing folds before the
    hand-over. ``capacity`` tokens are expected: a hint, for storage that can reserve them. With a ``cap``, queries see
    what it lets them see. ``budget``: most bytes that storage may allocate for rows; it takes room for ``capacity`` at
    once then. ``step``: most tokens of a step that is reckoned with. ``name`` is for messages."""

    name: str
    layout: Layout
    delegated: bool
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str
    window: WindowPolicy
    batch: int
    capacity: int | None = None
    cap: Cap | None = None
    budget: int | None = None
    step: int = 512


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
