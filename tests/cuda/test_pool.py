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
        self.positions = [0] * self.ROWS
        self.handed_over = [False] * self.ROWS
        self.folded_now = [False] * self.ROWS
        self.next = 0

    @rule(row=rows, count=st.sampled_from([1, 2, 16, 100, 127, 128, 129, 300]), accepted=st.integers(0, 16))
    def step(self, row: int, count: int, accepted: int) -> None:
        """Append, drop what was not accepted, fold."""
        before = (self.raw.free_pages, self.native.free_pages, self.tables.length(row))
        try:
            self._extend(row, count)
        except (KvcoreError, InputError):
            assert (self.raw.free_pages, self.native.free_pages, self.tables.length(row)) == before
            return
        self.tables.upload()
        self._append(row, count)
        dropped = max(0, min(count, 16) - accepted)
        self.tables.trim(row, dropped)
        del self.tokens[row][len(self.tokens[row]) - dropped :]
        self.positions[row] += count - dropped
        self._fold_and_commit()

    @rule(row=rows)
    def hand_over(self, row: int) -> None:
        self.tables.hand_over(row)
        self.handed_over[row] = True
        try:
            self._extend(row, 0)
        except (KvcoreError, InputError):
            return
        self._fold_and_commit()

    @rule(row=rows, count=st.integers(0, 8 * PAGE))
    def trim(self, row: int, count: int) -> None:
        left = len(self.tokens[row]) - count
        if left < 0:
            with pytest.raises(InputError, match="cannot trim"):
                self.tables.trim(row, count)
            return
        self.tables.trim(row, count)
        del self.tokens[row][left:]
        self.positions[row] -= count

    @rule(row=rows, keep=st.sampled_from([0, 2, 4, 60, 130, 300]), count=st.sampled_from([1, 5, 40, 128, 200, 600]))
    def drop(self, row: int, keep: int, count: int) -> None:
        entries = [len(entries) for entries in self.tables.entries(row)]
        if keep + count > len(self.tokens[row]):
            with pytest.raises(InputError, match="cannot drop"):
                self.tables.drop(row, keep, count)
            return
        try:
            self.tables.drop(row, keep, count)
        except InputError:
            assert max(entries) == self.tables.width
            return
        del self.tokens[row][keep : keep + count]
        assert sum(map(len, self.tables.entries(row))) <= sum(entries) + 1

    @precondition(lambda self: [] in self.tokens)
    @rule(source=rows)
    def fork(self, source: int) -> None:
        target = self.tokens.index([])
        if source == target:
            return
        self.tables.release(target)
        self.tables.fork(source, target)
        self.tokens[target] = list(self.tokens[source])
        self.positions[target] = self.positions[source]
        self.handed_over[target] = self.handed_over[source]

    @rule(row=rows)
    def release(self, row: int) -> None:
        self.tables.release(row)
        self.tokens[row], self.positions[row], self.handed_over[row] = [], 0, False

    def _extend(self, row: int, count: int) -> None:
        """A step names every sequence, as its fold looks at every one: behind a hole a page may still be due."""
        self.tables.extend({each: count if each == row else 0 for each in range(self.ROWS)})

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
            self.folded_now[row] = done > 0
        t.commit()
        assert t.due == 0

    def _live(self, pages: PagePool, table: torch.Tensor, ranges: torch.Tensor, slots: int) -> list[int]:
        """The tokens in the first ``slots`` slots of a table's row that its ranges let live."""
        found: list[int] = []
        for i in range(-(-slots // PAGE)):
            first, end = int(ranges[i]) & 0xFFFF, min(int(ranges[i]) >> 16, slots - i * PAGE)
            found += pages.planes["k"][0, int(table[i]), 0, first : max(first, end)].tolist()
        return found

    @invariant()
    def the_device_finds_every_token(self) -> None:
        t = self.tables
        t.upload()
        for row, tokens in enumerate(self.tokens):
            folded, length, sinks = int(t.folded[row]), int(t.lengths[row]), int(t.sinks[row])
            assert (t.length(row), int(t.positions[row])) == (len(tokens), self.positions[row])
            assert (sinks, folded, length) == t.slots(row)
            shadow = self.raw.planes["k"][0, int(t.sink_pages[row]), 0, :sinks].tolist()
            native = self._live(self.native, t.table[row], t.ranges[row], folded)
            assert shadow + native == tokens[: t.rows_folded(row)]
            assert (
                self._live(self.raw, t.raw_table[row], t.raw_ranges[row], length - folded)
                == tokens[len(shadow + native) :]
            )
            if folded:  # what stands behind the sinks is what they shadow
                codes = self.native.planes["k"][0, int(t.table[row, 0]), 0, :sinks].tolist()
                assert codes == shadow

    @invariant()
    def folds_leave_the_recent_rows_raw(self) -> None:
        self.tables.upload()
        for row, tokens in enumerate(self.tokens):
            folded = self.tables.rows_folded(row)
            assert (int(self.tables.fold_at[row]) == NEVER) == (not self.handed_over[row])
            assert self.handed_over[row] or folded == 0
            if self.folded_now[row]:
                assert len(tokens) - folded >= WINDOW.recent_tokens
            self.folded_now[row] = False

    @invariant()
    def pages_are_counted_right(self) -> None:
        raw: Counter[int] = Counter()
        native: Counter[int] = Counter()
        t = self.tables
        t.upload()
        for row in range(self.ROWS):
            sinks, folded, length = t.slots(row)
            raw.update(t.raw_table[row, : -(-(length - folded) // PAGE)].tolist())
            raw.update([int(t.sink_pages[row])] if sinks else [])
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


def test_a_page_that_is_due_behind_a_hole_folds_in_the_next_step_of_any_sequence() -> None:
    played = TablesMachine()
    played.hand_over(row=1)
    played.step(row=1, count=100, accepted=0)
    played.drop(row=1, keep=2, count=1)
    played.step(row=1, count=300, accepted=0)
    assert played.tables.rows_folded(1) == 2  # the page with the hole, as far as it came before it
    played.hand_over(row=0)
    assert played.tables.rows_folded(1) == 2 + 125
    played.the_device_finds_every_token()
    played.pages_are_counted_right()
    played.teardown()


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


def ranges(tables: BlockTables, name: str, count: int) -> list[tuple[int, int]]:
    tables.upload()
    return [(x & 0xFFFF, x >> 16) for x in getattr(tables, name)[0, :count].tolist()]


def filled(tokens: int, *, max_tokens: int = 8 * PAGE) -> tuple[BlockTables, PagePool, PagePool]:
    raw, native = pool(12, "raw KV"), pool(8)
    tables = BlockTables(1, max_tokens, WINDOW, raw, native, "cpu")
    tables.extend({0: tokens})
    tables.commit()
    return tables, raw, native


def test_a_trim_within_a_folded_page_keeps_its_oldest_rows() -> None:
    """The raw tail begins anew behind it; the next page folds when a whole one and the recent rows are there again."""
    tables, raw, native = filled(500)
    assert (tables.length(0), tables.rows_folded(0)) == (500, 256)
    tables.trim(0, 300)
    assert (tables.length(0), tables.rows_folded(0), tables.slots(0)) == (200, 200, (4, 256, 256))
    assert ranges(tables, "ranges", 2) == [(4, 128), (0, 72)]
    assert (raw.free_pages, native.free_pages) == (11, 6)
    tables.extend({0: 255})
    tables.commit()
    assert tables.rows_folded(0) == 200
    tables.extend({0: 1})
    tables.commit()
    assert (tables.rows_folded(0), tables.slots(0)) == (328, (4, 384, 512))
    assert ranges(tables, "ranges", 3) == [(4, 128), (0, 72), (0, 128)]
    assert int(tables.positions[0]) == 456


def test_a_page_with_a_hole_stands_twice_and_folds_as_it_is() -> None:
    tables, raw, native = filled(200)
    tables.drop(0, 20, 30)
    assert (tables.length(0), tables.slots(0)) == (170, (0, 0, 328))
    assert ranges(tables, "raw_ranges", 3) == [(0, 20), (50, 128), (0, 128)]
    assert tables.raw_table[0, 0] == tables.raw_table[0, 1]
    assert raw.free_pages == 10
    tables.extend({0: 300})
    tables.upload()
    assert int(tables.fold_at[0]) == WINDOW.recent_tokens + PAGE + 108 + 50, "slots of 256 live rows"
    tables.commit()
    assert ranges(tables, "ranges", 2) == [(4, 20), (50, 128)]
    assert tables.rows_folded(0) == 20 + 78
    tables.extend({0: 0})
    tables.commit()
    assert tables.rows_folded(0) == 20 + 78 + 128
    assert int(tables.positions[0]) == 500
    tables.release(0)
    assert (raw.free_pages, native.free_pages) == (12, 8)


def test_the_middle_goes_and_the_sinks_stay() -> None:
    """Whole pages are given back; that of the sinks stays in the table, for they are its rows."""
    tables, _, native = filled(900)
    assert tables.rows_folded(0) == 768
    tables.drop(0, 4, 600)
    assert (tables.length(0), tables.rows_folded(0), tables.rows_sinks(0)) == (300, 168, 4)
    assert ranges(tables, "ranges", 3) == [(4, 4), (92, 128), (0, 128)]
    assert native.free_pages == 8 - 3
    tables.drop(0, 2, 1)
    assert (tables.length(0), tables.rows_sinks(0)) == (299, 2)
    assert ranges(tables, "ranges", 2) == [(2, 2), (3, 4)]


@pytest.mark.parametrize(("first", "count"), [(-1, 5), (0, -1), (90, 20), (101, 0)])
def test_rows_that_are_not_there_cannot_be_dropped(first: int, count: int) -> None:
    tables, *_ = filled(100)
    with pytest.raises(InputError, match=f"cannot drop {count} rows from row {first} on: the sequence holds 100"):
        tables.drop(0, first, count)


def test_a_hole_needs_an_entry() -> None:
    tables, *_ = filled(200, max_tokens=256)
    with pytest.raises(InputError, match="a page with a hole needs an entry more than 2"):
        tables.drop(0, 5, 5)
    tables.widen(3)
    tables.drop(0, 5, 5)
    assert ranges(tables, "raw_ranges", 3) == [(0, 5), (10, 128), (0, 128)]


def test_pools_and_tables_grow_with_what_they_hold() -> None:
    raw = pool(2)
    tables = BlockTables(1, 2 * PAGE, WINDOW, raw, None, "cpu")
    tables.extend({0: 2 * PAGE})
    held = [entry.page for entry in tables.entries(0)[1]]
    raw.planes["k"][0, held] = torch.arange(2, dtype=torch.int32)[:, None, None]
    needs = tables.needs({0: 300})
    assert (needs.raw, needs.native, needs.width) == (3, 0, 5)
    raw.grow(5)
    raw.grow(4)
    tables.widen(needs.width)
    tables.extend({0: 300})
    tables.upload()
    assert (raw.pages, raw.free_pages, raw.allocated_bytes) == (5, 0, 5 * PAGE * 4)
    assert sorted(tables.raw_table[0].tolist()) == list(range(5))
    assert raw.planes["k"][0, tables.raw_table[0, :2].long(), 0, 0].tolist() == [0, 1]


def test_a_pool_that_cannot_grow_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pool(2)
    (page,) = pages.alloc()
    planes = pages.planes

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(PagePool, "_allocate", fail)
    with pytest.raises(torch.OutOfMemoryError):
        pages.grow(4)
    assert (pages.pages, pages.free_pages, pages.references(page)) == (2, 1, 1)
    assert pages.planes is planes
