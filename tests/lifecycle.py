"""A state machine: any history of a cache, against a plain list that knows what each row should be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import attend, decoded, exact_attention, gaussian, new_cache, relative_error

from kvcore.attention import convert_cache
from kvcore.backends import Backend
from kvcore.cache import Cache, Prefixes
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES
from kvcore.ops import Array

DIM = 16
# The largest ‖decoded - row‖ / ‖row‖ that a codec may leave; a wrong row is at √2.
FAR = {"raw": 0.0, "int8": 0.02, "turbo4": 0.3, "turbo3": 0.5}


class Lifecycle(RuleBasedStateMachine):
    """``rows`` is the model: every live token's K and V. The first ``folded`` are in pages, of which the first
    ``sinks`` are raw as well; ``pages`` numbers the page of each of them."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self.positions: list[int] = []
        self.donors: list[Prefixes] = []
        self.idle: list[tuple[Cache, list[np.ndarray]]] = []
        self.folded = self.sinks = self.pending = self.made = self.offset = 0
        self.pages: list[int] = []

    @initialize(
        mode=st.sampled_from(sorted(MODES)),
        page=st.sampled_from([4, 8]),
        recent=st.sampled_from([0, 3, 8]),
        sinks=st.integers(0, 4),
    )
    def create(self, mode: str, page: int, recent: int, sinks: int) -> None:
        self.window = WindowPolicy(sinks, recent, page)
        self.first = sinks  # oldest rows that may become sinks
        self.mode = MODES[mode]
        self.folding = self.mode.quantized and not self.mode.delegated
        shape: dict[str, Any] = {"heads": (2, 1), "dim": DIM, "layers": 2, "batch": 2, "window": self.window}
        self.cache, self.shape = new_cache(self.backend, mode, **shape), shape

    @rule(count=st.integers(1, 20))
    def append(self, count: int) -> None:
        self._give(count)
        self.pending += count

    def _give(self, count: int) -> None:
        self.made += 1
        shape = self.cache.spec.batch, 1, count, DIM
        k, v = (gaussian(*shape, seed=2 * self.made + part, dtype=self.cache.spec.dtype) for part in range(2))
        self._step(self.backend.ops.asarray(k), self.backend.ops.asarray(v))
        self.rows += [(k[:, :, i], v[:, :, i]) for i in range(count)]
        self.positions += range(self.offset, self.offset + count)
        self.offset += count

    def _step(self, k: Array, v: Array) -> None:
        for layer in self.cache.layers:
            layer.append(k, v)

    def fold(self) -> None:
        while self.folding and len(self.rows) - self.folded >= self.window.recent_tokens + self.window.page_size:
            self.sinks = self.sinks if self.folded else min(self.first, self.window.page_size)
            self.folded += self.window.page_size
            self.pages += [max(self.pages, default=0) + 1] * self.window.page_size
        self.pending = 0

    def forget(self, count: int) -> None:
        left = len(self.rows) - count
        self.rows, self.positions = self.rows[:left], self.positions[:left]
        self.folded = min(self.folded, left)
        self.pages = self.pages[: self.folded]
        self.sinks = min(self.sinks, self.folded)
        self.pending = max(0, self.pending - count)
        if count and self.folded == 0 and left <= self.first:
            self.first = self.window.sink_tokens

    @rule()
    def commit(self) -> None:
        self.cache.commit()
        self.fold()

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        accepted = data.draw(st.integers(0, self.pending))
        self.cache.commit(accepted, self.pending)
        self._trimmed(self.pending - accepted)
        self.fold()

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        count = int(share * len(self.rows))
        self.cache.trim(count)
        self._trimmed(count)

    def _trimmed(self, count: int) -> None:
        """The next row comes right behind the last one that stays."""
        self.forget(count)
        if count:
            self.offset = self.positions[-1] + 1 if self.positions else 0

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Rows in the middle go; sinks behind the hole are sinks no more. The next position stays."""
        first = data.draw(st.integers(0, len(self.rows)))
        self._drop(first, data.draw(st.integers(0, len(self.rows) - first)))

    def _drop(self, first: int, count: int) -> None:
        self.cache.drop(first, count)
        if first + count == len(self.rows):
            self.forget(count)
            self.first = min(self.first, first) if count else self.first
        elif count:
            self.folded -= max(0, min(first + count, self.folded) - first)
            del self.rows[first : first + count], self.positions[first : first + count]
            del self.pages[first : first + count]
            self.pending = min(self.pending, len(self.rows))
            self.sinks, self.first = min(self.sinks, first), min(self.first, first)

    @rule(keep_old=st.booleans())
    def fork(self, keep_old: bool) -> None:
        """Go on with one of two; the other is looked at in the end."""
        other = self.cache.fork()
        self.cache, idle = (self.cache, other) if keep_old else (other, self.cache)
        self._set_aside(idle)

    @rule()
    def restore(self) -> None:
        """Through canonical rows into a new cache."""
        self._restore()

    def _restore(self) -> None:
        rows = self.cache.export()
        self.cache = self._empty()
        self.cache.load(rows)

    def _empty(self) -> Cache:
        return new_cache(self.backend, self.mode.name, **self.shape)

    @precondition(lambda self: not self.pending)
    @rule(share=st.floats(0, 1))
    def adopt(self, share: float) -> None:
        """Donate the cache, and begin another prompt with what it shares with this one."""
        cut, prefixes = int(share * len(self.rows)), Prefixes()
        ids = list(range(self.offset))
        prefixes.donate(ids, self.cache)
        self.donors.append(prefixes)
        adopted = prefixes.adopt([*ids[:cut], -1, -2], self.cache.spec)
        if self.holes() or not self.cache.handed_over:
            assert adopted is None
            assert prefixes.adopt([*ids, -1], self.cache.spec) is None
            assert sum(prefixes.counters.declined.values()) >= (1 if ids else 0)
            return
        page, window = self.window.page_size, self.window
        whole = window.foldable(cut) if self.mode.quantized else cut // page * page
        wanted = (
            cut if cut == len(self.rows) else min(whole, self.folded // page * page if self.mode.quantized else cut)
        )
        assert (0 if adopted is None else adopted.offset) == wanted
        if adopted is not None:
            self._set_aside(self.cache)
            self.cache = adopted
            self._trimmed(len(self.rows) - wanted)

    def holes(self) -> bool:
        return self.offset != len(self.rows)

    @precondition(lambda self: not self.pending)
    @rule(mode=st.sampled_from(sorted(MODES)))
    def convert(self, mode: str) -> None:
        """Another mode for the same rows, which are now what the new one makes of them."""
        self._convert(mode)

    def _convert(self, mode: str) -> None:
        before = [self.backend.ops.to_numpy(rows) for rows in self.cache.dense(1 % len(self.cache.layers))]
        self._set_aside(self.cache)
        self.cache, self.mode = self._converted(mode), MODES[mode]
        after = [self.backend.ops.to_numpy(rows).copy() for rows in self.cache.dense(1 % len(self.cache.layers))]
        for codec, got, want in zip((self.mode.k, self.mode.v), after, before, strict=True):
            error = np.linalg.norm(got - want, axis=-1) / np.maximum(np.linalg.norm(want, axis=-1), 1e-9)
            assert error.max(initial=0) <= max(FAR[codec], 1e-3)
        self.rows = [(after[0][:, :, i], after[1][:, :, i]) for i in range(len(self.rows))]
        self.first = min(
            [i for i, at in enumerate([*self.positions, self.offset]) if at != i] + [self.window.sink_tokens]
        )
        self.folding, self.folded, self.sinks, self.pages = self.mode.quantized, 0, 0, []
        self.fold()

    def _converted(self, mode: str) -> Cache:
        return convert_cache(self.backend, self.cache, MODES[mode])

    def _set_aside(self, cache: Cache) -> None:
        self.idle.append((cache, [self.backend.ops.to_numpy(rows).copy() for rows in cache.dense(0)]))

    def teardown(self) -> None:
        for cache, rows in self.idle:
            for got, want in zip(cache.dense(0), rows, strict=True):
                assert np.array_equal(self.backend.ops.to_numpy(got), want)

    @rule()
    def begin_decode(self) -> None:
        self.cache.begin_decode()
        if self.mode.delegated and not self.folding:
            self.folding = True
            self.fold()

    @rule(count=st.integers(1, 3))
    def attend(self, count: int) -> None:
        if count > len(self.rows):
            return
        layer, q = self.cache.layers[1], gaussian(2, 2, count, DIM)
        out, want = attend(self.backend, layer, q, 0.25), exact_attention(self.backend, layer, q, 0.25)
        assert relative_error(out, want) <= 1e-5

    @invariant()
    def regions_are_those_of_the_model(self) -> None:
        assert (self.cache.tokens, self.cache.offset) == (len(self.rows), self.offset)
        for view in (layer.view() for layer in self.cache.layers):
            assert (view.sinks, view.folded) == (self.sinks, self.folded)
            centred = tuple(Counter(self.pages).values()) if view.layout.k.centred else ()
            assert view.page_rows == centred
            assert view.k_centers is None or view.k_centers.shape[2] == len(centred)
        self._bytes_agree()

    def _bytes_agree(self) -> None:
        spec, layout = self.cache.spec, self.mode.layout(DIM)
        raw = (self.sinks + len(self.rows) - self.folded) * layout.raw_bytes_per_token(spec.dtype)
        pages = layout.folded_bytes(spec.dtype, self.folded, len(set(self.pages)))
        assert self.cache.stats().kv_bytes == spec.batch * spec.num_layers * (raw + pages)

    @invariant()
    def every_row_is_where_and_what_it_should_be(self) -> None:
        if not self.rows:
            return
        stored = decoded(self.backend.ops, self.cache.layers[-1])
        for part, codec, got in zip(range(2), (self.mode.k, self.mode.v), stored, strict=True):
            want = np.stack([row[part] for row in self.rows], 2)
            error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
            assert error[:, :, : self.sinks].max(initial=0) == 0
            assert error[:, :, self.sinks : self.folded].max(initial=0) <= FAR[codec]
            assert error[:, :, self.folded :].max(initial=0) == 0


def run(machine: type[Lifecycle], backend: Backend, examples: int, steps: int = 25) -> None:
    made = type("Machine", (machine,), {"backend": backend})
    run_state_machine_as_test(made, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None))
