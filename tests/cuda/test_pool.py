"""Pages and block tables against plain lists of tokens: nothing is lost, leaked, or written by two."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

torch = pytest.importorskip("torch", reason="the package torch is not installed")

from kvcore.backends.cuda.block_tables import NEVER, BlockTables
from kvcore.backends.cuda.native import PAGE, NativeLayout, NativePlane
from kvcore.backends.cuda.pool import PagePool, bytes_per_page, pages_in_budget
from kvcore.errors import InputError, KvcoreError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

ROW = NativePlane("k", (PAGE,), "int32")  # one number per token: which one it is
WINDOW = WindowPolicy(sink_tokens=4, recent_tokens=128)


def pool(pages: int, what: str = "KV") -> PagePool:
    return PagePool([ROW], layers=1, kv_heads=1, pages=pages, device="cpu", what=what)


class PoolMachine(RuleBasedStateMachine):
    """`PagePool` against a counter of references."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(5)
        self.references: Counter[int] = Counter()
        self.tag = 0

    @rule(target=held)
    def alloc(self) -> int:
        if len(+self.references) == 5:
            with pytest.raises(KvcoreError, match="1 needed, 0 of 5 free"):
                self.pool.alloc()
            return -1
        (page,) = self.pool.alloc()
        assert self.references[page] == 0
        self.references[page] += 1
        self._write(page)
        return page

    @rule(target=held, page=held)
    def share(self, page: int) -> int:
        if page >= 0:
            self.pool.share([page])
            self.references[page] += 1
        return page

    @rule(page=consumes(held))
    def free(self, page: int) -> None:
        if page >= 0:
            self.pool.free([page])
            self.references[page] -= 1

    @rule(target=held, page=consumes(held))
    def write(self, page: int) -> int:
        if page < 0:
            return page
        before, content = self.references[page], self.pool.planes["k"][0, page].clone()
        if before > 1 and len(+self.references) == 5:
            with pytest.raises(KvcoreError):
                self.pool.writable(page)
            return page
        mine = self.pool.writable(page)
        assert (mine == page) == (before == 1)
        assert torch.equal(self.pool.planes["k"][0, mine], content)
        self.references[page] -= 1
        self.references[mine] += 1
        self._write(mine)
        return mine

    def _write(self, page: int) -> None:
        self.tag += 1
        self.pool.planes["k"][0, page] = self.tag

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.references(page) for page in range(5)] == [self.references[page] for page in range(5)]
        assert self.pool.free_pages == 5 - len(+self.references)
        assert self.pool.used_bytes == len(+self.references) * PAGE * 4


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TablesMachine(RuleBasedStateMachine):
    """`BlockTables` against a list of tokens per sequence; append and fold are played on what the device has."""

    ROWS = 3
    rows = st.integers(0, ROWS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.native = pool(9, "raw KV"), pool(6)
        self.tables = BlockTables(self.ROWS, 8 * PAGE, WINDOW, self.raw, self.native, "cpu", delegated=True)
        self.tokens: list[list[int]] = [[] for _ in range(self.ROWS)]
        self.handed_over = [False] * self.ROWS
        self.next = 0

    @rule(row=rows, count=st.sampled_from([1, 2, 16, 100, 127, 128, 129, 300]), accepted=st.integers(0, 16))
    def step(self, row: int, count: int, accepted: int) -> None:
        """Append, drop what was not accepted, fold."""
        before = (self.raw.free_pages, self.native.free_pages, self.tables.length(row))
        try:
            self.tables.extend({row: count})
        except (KvcoreError, InputError):
            assert (self.raw.free_pages, self.native.free_pages, self.tables.length(row)) == before
            return
        self.tables.upload()
        self._append(row, count)
        dropped = max(0, min(count, 16) - accepted)
        self.tables.trim(row, dropped)
        del self.tokens[row][len(self.tokens[row]) - dropped :]
        self._fold_and_commit()

    @rule(row=rows)
    def hand_over(self, row: int) -> None:
        try:
            self.tables.hand_over(row)
        except KvcoreError:
            return
        finally:
            self.handed_over[row] = True
        self._fold_and_commit()

    @rule(row=rows, count=st.integers(0, 8 * PAGE))
    def trim(self, row: int, count: int) -> None:
        left, folded = len(self.tokens[row]) - count, self.tables.rows_folded(row)
        if left < 0 or (left < folded and left % PAGE):
            with pytest.raises(InputError, match="cannot trim"):
                self.tables.trim(row, count)
            return
        self.tables.trim(row, count)
        del self.tokens[row][left:]

    @precondition(lambda self: [] in self.tokens)
    @rule(source=rows)
    def fork(self, source: int) -> None:
        target = self.tokens.index([])
        if source == target:
            return
        self.tables.release(target)
        self.tables.fork(source, target)
        self.tokens[target] = list(self.tokens[source])
        self.handed_over[target] = self.handed_over[source]

    @rule(row=rows)
    def release(self, row: int) -> None:
        self.tables.release(row)
        self.tokens[row], self.handed_over[row] = [], False

    def _append(self, row: int, count: int) -> None:
        t = self.tables
        first = int(t.lengths[row] - t.folded[row]) - count
        for i in range(first, first + count):
            self.raw.planes["k"][0, t.raw_table[row, i // PAGE], 0, i % PAGE] = self.next
            self.tokens[row].append(self.next)
            self.next += 1

    def _fold_and_commit(self) -> None:
        t = self.tables
        t.upload()
        for row in range(self.ROWS):
            folded, done = int(t.folded[row]), 0
            while int(t.lengths[row]) - folded >= int(t.fold_at[row]) + done * PAGE:
                page = self.raw.planes["k"][0, t.raw_table[row, done]]
                self.native.planes["k"][0, t.table[row, folded // PAGE + done]] = page
                done += 1
            assert done <= t.due
        t.commit()
        assert t.due == 0

    @invariant()
    def the_device_finds_every_token(self) -> None:
        t = self.tables
        t.upload()
        for row, tokens in enumerate(self.tokens):
            folded, sinks = int(t.folded[row]), int(t.sinks[row])
            assert (int(t.lengths[row]), int(t.positions[row])) == (len(tokens), len(tokens))
            assert sinks == min(4, folded)
            native = self.native.planes["k"][0, t.table[row, : folded // PAGE].long(), 0].flatten()
            tail = self.raw.planes["k"][0, t.raw_table[row].long(), 0].flatten()[: len(tokens) - folded]
            shadow = self.raw.planes["k"][0, t.sink_pages[row].long(), 0, :sinks]
            assert torch.cat([native, tail]).tolist() == tokens
            assert shadow.tolist() == tokens[:sinks]

    @invariant()
    def what_is_due_is_folded(self) -> None:
        for row, tokens in enumerate(self.tokens):
            assert (int(self.tables.fold_at[row]) == NEVER) == (not self.handed_over[row])
            if not self.handed_over[row]:
                assert self.tables.rows_folded(row) == 0
            elif self.tables.due == 0 and self.native.free_pages:
                assert len(tokens) - self.tables.rows_folded(row) < WINDOW.recent_tokens + PAGE or self._starved(row)

    def _starved(self, row: int) -> bool:
        """A hand-over that found too few pages: its rows fold with the next step that finds them."""
        tail = len(self.tokens[row]) - self.tables.rows_folded(row)
        return WINDOW.foldable(tail) // PAGE > self.native.free_pages

    @invariant()
    def pages_are_counted_right(self) -> None:
        raw: Counter[int] = Counter()
        native: Counter[int] = Counter()
        t = self.tables
        t.upload()
        for row, tokens in enumerate(self.tokens):
            folded = t.rows_folded(row)
            raw.update(t.raw_table[row, : -(-(len(tokens) - folded) // PAGE)].tolist())
            raw.update([int(t.sink_pages[row])] if folded else [])
            native.update(t.table[row, : folded // PAGE].tolist())
        for counter, pages in ((raw, self.raw), (native, self.native)):
            assert {page: pages.references(page) for page in range(pages.pages)} == {
                page: counter[page] for page in range(pages.pages)
            }

    def teardown(self) -> None:
        for row in range(self.ROWS):
            self.tables.release(row)
        assert (self.raw.free_pages, self.native.free_pages) == (9, 6)


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_exhausted_pool_says_what_is_needed_and_what_there_is() -> None:
    pages = pool(4, "raw KV")
    pages.alloc(3)
    with pytest.raises(KvcoreError, match="out of raw KV pages: 2 needed, 1 of 4 free") as caught:
        pages.alloc(2)
    assert pages.free_pages == 1
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("misuse", ["free", "share", "writable"])
def test_a_free_page_can_be_neither_freed_shared_nor_written(misuse: str) -> None:
    pages = pool(2)
    (page,) = pages.alloc()
    pages.free([page])
    with pytest.raises(ValueError, match=f"page {page} is free"):
        getattr(pages, misuse)(page if misuse == "writable" else [page])


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_buys_the_pages_that_fit(mode: str) -> None:
    native = NativeLayout(MODES[mode].layout(128), "bfloat16")
    size = bytes_per_page(native.planes, 32, 8)
    assert size == 32 * 8 * PAGE * MODES[mode].layout(128).bytes_per_token("bfloat16")
    assert pages_in_budget(native.planes, 32, 8, 10 * size - 1) == 9
    with pytest.raises(KvcoreError, match=f"budget of {size - 1} bytes holds no page: one takes {size} bytes"):
        pages_in_budget(native.planes, 32, 8, size - 1)


def test_planes_cover_all_layers_and_are_allocated_once() -> None:
    native = NativeLayout(MODES["int8-turbo4"].layout(64), "float16")
    pages = PagePool(native.planes, layers=3, kv_heads=2, pages=5, device="cpu")
    assert {name: tuple(x.shape) for name, x in pages.planes.items()} == {
        "k": (3, 5, 2, PAGE * 16),
        "k_scale": (3, 5, 2, PAGE),
        "v": (3, 5, 2, PAGE * 8),
        "v_scale": (3, 5, 2, PAGE),
    }
    assert sum(x.numel() * x.element_size() for x in pages.planes.values()) == pages.allocated_bytes
    addresses = {name: x.data_ptr() for name, x in pages.planes.items()}
    taken = pages.alloc(5)
    pages.free(taken)
    assert {name: x.data_ptr() for name, x in pages.planes.items()} == addresses


def test_device_tables_stay_at_their_addresses() -> None:
    """CUDA graphs have them baked in."""
    tables = BlockTables(2, 4 * PAGE, WINDOW, pool(8), pool(8), "cpu")
    names = ("table", "raw_table", "lengths", "folded", "positions", "sinks", "sink_pages", "fold_at")
    before = [getattr(tables, name).data_ptr() for name in names]
    for _ in range(5):
        tables.extend({0: 100, 1: 60})
        tables.upload()
        tables.commit()
    assert [getattr(tables, name).data_ptr() for name in names] == before
    assert [int(x) for x in tables.lengths] == [500, 300]
    assert all(getattr(tables, name).dtype == torch.int32 for name in names)


def test_an_extension_that_does_not_fit_changes_nothing() -> None:
    raw = pool(3, "raw KV")
    tables = BlockTables(2, 8 * PAGE, WINDOW, raw, pool(1), "cpu")
    tables.extend({0: 5})
    with pytest.raises(KvcoreError, match="raw KV pages: 3 needed, 2 of 3 free"):
        tables.extend({0: 200, 1: 200})
    assert [tables.length(row) for row in range(2)] == [5, 0]
    assert raw.free_pages == 2


def test_a_sequence_longer_than_its_table_is_refused() -> None:
    tables = BlockTables(1, 2 * PAGE, WINDOW, pool(9), None, "cpu")
    with pytest.raises(InputError, match="hold 256 tokens a sequence"):
        tables.extend({0: 257})


def test_without_native_pages_nothing_folds() -> None:
    raw = pool(9)
    tables = BlockTables(1, 8 * PAGE, WINDOW, raw, None, "cpu")
    tables.extend({0: 1000})
    tables.upload()
    assert (tables.due, int(tables.fold_at[0])) == (0, NEVER)
    tables.commit()
    assert (tables.rows_folded(0), raw.free_pages) == (0, 1)


@pytest.mark.parametrize("chunk", [1, 16, 100, 1000])
def test_folded_rows_do_not_depend_on_the_chunking(chunk: int) -> None:
    """1010 tokens give 768 folded rows and 242 raw ones, the sinks' page beside them."""
    raw, native = pool(11), pool(6)
    tables = BlockTables(1, 8 * PAGE, WINDOW, raw, native, "cpu")
    for start in range(0, 1010, chunk):
        tables.extend({0: min(chunk, 1010 - start)})
        tables.commit()
    assert tables.rows_folded(0) == 768 == WINDOW.folded_after(1010)
    assert (native.free_pages, raw.free_pages) == (0, 11 - 3)
    tables.upload()
    assert int(tables.sinks[0]) == 4


def test_a_fork_keeps_the_sinks_of_a_released_source() -> None:
    raw = pool(9)
    tables = BlockTables(2, 8 * PAGE, WINDOW, raw, pool(6), "cpu")
    tables.extend({0: 300})
    tables.commit()
    tables.fork(0, 1)
    tables.release(0)
    tables.upload()
    assert raw.references(int(tables.sink_pages[1])) == 1
    tables.release(1)
    assert raw.free_pages == 9


def test_pages_due_in_a_step_are_taken_once() -> None:
    """Extended twice, and then cut below the fold: the page that was taken for it is given back."""
    raw, native = pool(9), pool(6)
    tables = BlockTables(1, 8 * PAGE, WINDOW, raw, native, "cpu")
    tables.extend({0: 250})
    tables.extend({0: 10})
    tables.extend({0: 4})
    assert (tables.due, native.free_pages) == (1, 5)
    tables.trim(0, 8)
    assert (tables.due, native.free_pages) == (1, 5)
    tables.trim(0, 1)
    assert (tables.due, native.free_pages) == (0, 6)
    tables.commit()
    assert (tables.length(0), tables.rows_folded(0)) == (255, 0)
