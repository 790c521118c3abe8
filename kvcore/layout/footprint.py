"""What a cache takes at most: bytes of live rows, and what storage allocates for them. The one source of both.

Bytes are those of rows. Unpacked rows of a layer under way, and a copy while buffers or pools grow, are not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcore.layout.storage import CacheShape

PAGE = 128  # tokens of a page of paged storage
FOREVER = 1 << 40  # tokens; a cap has been reached long before


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one layer and sequence that storage has room for; ``pages``: of the folded ones, for their centres."""

    tail: int
    sinks: int = 0
    folded: int = 0
    pages: int = 0

    def nbytes(self, shape: CacheShape) -> int:
        """Of one sequence and KV head."""
        raw = shape.layout.raw_bytes_per_token(shape.dtype)
        return (self.tail + self.sinks) * raw + shape.layout.folded_bytes(shape.dtype, self.folded, self.pages)


def live_bytes(shape: CacheShape, tokens: int) -> int:
    """Of all sequences with ``tokens`` live rows each, sinks and the page rows that they shadow both counted."""
    tokens = tokens if shape.cap is None else min(tokens, shape.cap.tokens)
    folded = shape.window.folded_after(tokens) if shape.layout.quantized else 0
    rows = Rows(tokens - folded, min(shape.window.sink_tokens, folded), folded, folded // shape.window.page_size)
    return over_layers(shape, rows.nbytes(shape), Rows(tokens).nbytes(shape))


def peak_live_bytes(shape: CacheShape, tokens: int) -> int:
    """The most of `live_bytes` at any length up to ``tokens``: now, or just before the newest page was folded. A
    delegated cache may have to hold all of them raw, as its prompt."""
    tokens = tokens if shape.cap is None else min(tokens, shape.cap.tokens)
    if shape.delegated:
        return over_layers(shape, Rows(tokens).nbytes(shape), Rows(tokens).nbytes(shape))
    folded = shape.window.folded_after(tokens)
    before = folded + shape.window.recent_tokens - 1 if folded else 0
    return max(live_bytes(shape, tokens), live_bytes(shape, before))


def bytes_needed(shape: CacheShape, tokens: int, storage: str) -> int:
    """The most that ``storage`` ("contiguous" or "paged") allocates for sequences that grow to ``tokens`` positions, in
    steps of at most ``shape.step``; the hand-over of a delegated cache included."""
    if storage == "paged":
        raw, native = pages_needed(shape, tokens)
        layout, heads = shape.layout, shape.num_layers * shape.num_kv_heads
        raw_bytes = raw * PAGE * layout.raw_bytes_per_token(shape.dtype)
        return heads * (raw_bytes + layout.folded_bytes(shape.dtype, native * PAGE, native))
    before, after = rows_needed(shape, tokens)
    raw = Rows(_capped(shape, tokens)).nbytes(shape)
    most = over_layers(shape, after.nbytes(shape), raw)
    if not shape.delegated:
        return most
    handed = shape.batch * shape.num_kv_heads * replace(after, tail=0).nbytes(shape)  # layer by layer
    return max(most, over_layers(shape, before.nbytes(shape), raw) + handed)


def rows_needed(shape: CacheShape, tokens: int) -> tuple[Rows, Rows]:
    """Room of a contiguous layer that folds, before and after the hand-over of a delegated cache (else the same)."""
    window, most = shape.window, _capped(shape, tokens)
    if not shape.layout.quantized:
        return Rows(most), Rows(most)
    tail = min(most, window.recent_tokens + window.page_size - 1 + shape.step)
    # After a trim into a page, folded rows are no multiple of a page.
    folded = max(0, most - window.recent_tokens) if tokens >= window.recent_tokens + window.page_size else 0
    # One page was trimmed into, or a cap dropped a part of it. Each further trim into a page may add a centre.
    pages = -(-folded // window.page_size) + 1 if folded else 0
    after = Rows(tail, window.sink_tokens if folded else 0, folded, pages)
    return (Rows(most) if shape.delegated else after), after


def pages_needed(shape: CacheShape, tokens: int) -> tuple[int, int]:
    """Raw and native pages of all sequences; one at least, for kernels to point at. A sequence that was trimmed within
    a folded page may need another one."""
    window, spare = shape.window, 0
    if shape.cap is not None and tokens > shape.cap.tokens:
        # Two pages more, which are partly dropped.
        tokens = min(tokens, shape.cap.tokens + min(shape.cap.window, shape.step) + 2 * PAGE)
        spare = 2
    pages = raw = -(-tokens // PAGE)
    if shape.layout.quantized and not shape.delegated:
        step = -(-(window.recent_tokens + PAGE - 1 + shape.step) // PAGE)
        raw = min(pages, step + spare) + (window.sink_tokens > 0)
    native = max(1, window.foldable(tokens) // PAGE) if shape.layout.quantized else 0
    return max(1, raw) * shape.batch, native * shape.batch


def tokens_in(shape: CacheShape, budget: int, storage: str) -> int | None:
    """The most positions for which ``budget`` bytes are enough; None where a cap lets them be enough for any number."""
    return largest(lambda tokens: bytes_needed(shape, tokens, storage) <= budget)


def largest(fits: Callable[[int], bool], most: int = FOREVER) -> int | None:
    """The largest number up to ``most`` that ``fits``, where all smaller ones do; None where ``most`` does."""
    if fits(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def reserving(shape: CacheShape, tokens: int) -> CacheShape:
    """The shape with room for no more than ``tokens``."""
    return replace(shape, capacity=tokens if shape.capacity is None else min(shape.capacity, tokens))


def _capped(shape: CacheShape, tokens: int) -> int:
    """Room for the live rows of a step, half as much again where rows go at the front: they move together then."""
    cap = shape.cap
    if cap is None or tokens <= cap.tokens:
        return tokens
    most = min(tokens, cap.tokens - 1 + min(cap.window, shape.step))
    return most * 3 // 2 + 1


def over_layers(shape: CacheShape, folding: int, raw: int) -> int:
    """Sum over sequences, layers and heads of bytes per head: in a layer that folds, and in a boundary layer."""
    raw_layers = sum(shape.window.is_raw_layer(layer, shape.num_layers) for layer in range(shape.num_layers))
    return shape.batch * shape.num_kv_heads * (raw_layers * raw + (shape.num_layers - raw_layers) * folding)
