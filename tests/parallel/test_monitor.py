"""A rank that is gone, silent or failed ends all others, and one of them says why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from thread_ranks import on_ranks

from kvcore.communicator import Communicator
from kvcore.parallel import monitor
from kvcore.parallel.monitor import Monitor

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Endings:
    """What each rank was ended with, instead of the end of this process."""

    def __init__(self) -> None:
        self.said: dict[int, tuple[str | None, int]] = {}
        self.some = threading.Event()

    def of(self, rank: int) -> monitor.Ending:
        def end(line: str | None, code: int) -> None:
            self.said.setdefault(rank, (line, code))
            self.some.set()
            raise SystemExit  # ends the monitor's thread, as the process would

        return end

    def wait(self, ranks: set[int], seconds: float = 5) -> None:
        until = time.monotonic() + seconds
        while not ranks <= self.said.keys() and time.monotonic() < until:
            time.sleep(0.02)
        assert ranks <= self.said.keys(), self.said


@pytest.fixture
def monitors() -> Any:
    made: list[Monitor] = []

    def make(size: int) -> tuple[list[Monitor], Endings]:
        endings = Endings()

        def run(ranks: Communicator) -> Monitor:
            return Monitor(ranks, "127.0.0.1", endings.of(ranks.rank))

        made.extend(on_ranks(size, run))
        return made, endings

    yield make
    for each in made:
        each.close()


Make = Callable[[int], tuple[list[Monitor], Endings]]


def drop(killed: Monitor) -> None:
    """What the kernel does for a killed process."""
    killed._closing.set()
    killed._thread.join()
    for peer in killed._peers:
        peer.connection.close()


def test_ranks_that_close_end_nobody(monitors: Make) -> None:
    made, endings = monitors(3)
    for each in made:
        each.close()
    assert endings.said == {}


def test_a_killed_rank_is_named_by_rank_0_and_the_others_end_quietly(monitors: Make) -> None:
    made, endings = monitors(3)
    drop(made[2])
    endings.wait({0, 1})
    line, code = endings.said[0]
    assert line is not None
    assert line.startswith("rank 2 of 3 has ended: it was killed or has crashed")
    assert (code, endings.said[1]) == (1, (None, 1))


def test_without_rank_0_the_others_say_it(monitors: Make) -> None:
    made, endings = monitors(2)
    drop(made[0])
    endings.wait({1})
    line, code = endings.said[1]
    assert (str(line).split(":")[0], code) == ("rank 0 of 2 has ended", 1)


def test_a_silent_rank_counts_as_gone(monitors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, endings = monitors(2)
    monkeypatch.setattr(monitor, "SILENCE_SECONDS", 0.5)
    made[1]._send = lambda message: None  # type: ignore[method-assign]  # a stopped process keeps its connection
    endings.wait({0})
    assert "rank 1 of 2 has said nothing" in str(endings.said[0][0])


def test_a_failing_rank_is_quoted_with_its_exit_code(monitors: Make) -> None:
    made, endings = monitors(2)
    made[1].fail("out of memory", 1)
    endings.wait({0})
    assert endings.said[0] == ("rank 1 of 2: out of memory", 1)


def test_an_error_that_all_ranks_meet_is_left_to_rank_0(monitors: Make) -> None:
    made, endings = monitors(2)
    failing = threading.Thread(target=made[1].fail, args=("no such folder", 2))
    failing.start()
    made[0].fail("no such folder", 2)
    failing.join()
    time.sleep(monitor.GRACE_SECONDS + 0.3)
    assert 0 not in endings.said
    assert endings.said.get(1, (None, 2)) == (None, 2)
