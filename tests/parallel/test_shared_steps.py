"""Decoders of two ranks, threads here, over caches that only count: whatever ends a generation, they stay in step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from thread_ranks import ThreadRanks

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from kvcore.backends.cuda.decoder import Decoder
from kvcore.communicator import Communicator, SharedSteps
from kvcore.errors import NonFiniteError
from kvcore.parallel import Leader, Worker, follow


class Rows:
    """Stands for a paged storage."""

    device, bindings, layers = "cpu", 0, ()
    shape = SimpleNamespace(batch=1)

    def __init__(self) -> None:
        self.tokens = 0

    def way(self, count: int, window: int | None) -> tuple[None, int | None]:
        return None, window

    def start_step(self, count: int) -> None:
        self.tokens += count

    def shorten(self, tokens: int) -> None:
        self.tokens = min(self.tokens, tokens)

    def trim(self, count: int) -> None:
        self.tokens -= count


class Tensors:
    """`ThreadRanks` for torch's tensors too."""

    def __init__(self, inner: ThreadRanks) -> None:
        self._inner, self.rank, self.size, self.name = inner, inner.rank, inner.size, inner.name
        self.monitor = SimpleNamespace(fail=lambda *_: inner.barrier.abort())

    def all_sum(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self._inner.all_sum(x)
        return torch.from_numpy(self._inner.all_sum(x.numpy()))

    def close(self) -> None:
        pass


class Two:
    """Rank 0's leader and decoder, and a thread that follows. ``pick(rank, step)`` is what a rank would take."""

    def __init__(self, pick: Callable[[int, int], int], *, random: bool = False) -> None:
        shared: list[Any] = [None, None]
        barrier = threading.Barrier(2, timeout=20)
        ranks: list[Communicator] = [Tensors(ThreadRanks(i, 2, shared, barrier)) for i in range(2)]
        self.rows, self.picked = (Rows(), Rows()), ([], [])

        def decoder(rank: int, among: SharedSteps) -> Decoder:
            class Sampler:
                def __call__(self, _: Any, __: Any, chosen: Callable[[Any], Any]) -> Any:
                    self.steps = getattr(self, "steps", 0) + 1
                    token = torch.tensor([pick(rank, self.steps)])
                    return (chosen(token) if random else token).to(torch.int32)

            sampler: Any = Sampler()
            sampler.random = random
            made = Decoder(
                self.rows[rank],
                lambda ids: self.picked[rank].append(int(ids)),
                sampler,
                begin=lambda: None,
                commit=lambda: None,
                uniform=lambda: [0.5],
                among=among,
            )
            made.no_graph = "no device"
            return made

        worker = Worker(ranks[1], None, None, None, lambda *given: decoder(1, given[-1]))
        self.leader = Leader(ranks[0])
        cache = self.leader._number()
        worker.caches[cache] = None
        self.worker = worker
        self.thread = threading.Thread(target=self._follow, args=(ranks[1],), daemon=True)
        self.thread.start()
        with self.leader.decoder(SimpleNamespace(number=cache), [], [()]) as among:
            self.decoder: Any = decoder(0, among)
        self.leader.keep(self.decoder, among.number)

    def _follow(self, ranks: Communicator) -> None:
        with suppress(threading.BrokenBarrierError):
            follow(ranks, self.worker)

    def end(self) -> None:
        self.leader.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


def tokens(two: Two, count: int = 6) -> Iterator[list[int]]:
    stream: Iterator[list[int]] = two.decoder.tokens([1], count)
    return stream


def test_both_run_the_same_steps() -> None:
    two = Two(lambda rank, step: step + 10)
    assert list(tokens(two)) == [[11], [12], [13], [14], [15], [16]]
    two.end()
    assert two.picked[0] == two.picked[1] == [1, 11, 12, 13, 14, 15]
    assert two.rows[0].tokens == two.rows[1].tokens == 6


def test_what_is_drawn_is_rank_0s() -> None:
    """Sums of probabilities differ in their last bits."""
    two = Two(lambda rank, step: step + 10 + 100 * rank, random=True)
    assert list(tokens(two, 3)) == [[11], [12], [13]]
    two.end()
    assert two.picked[0] == two.picked[1] == [1, 11, 12]


def test_logits_that_are_not_finite() -> None:
    two = Two(lambda rank, step: -1 if step == 2 else 5)
    with pytest.raises(NonFiniteError):
        list(tokens(two))
    two.end()
    assert two.rows[0].tokens == two.rows[1].tokens == 2


def test_interrupted_while_waiting_for_a_token() -> None:
    two = Two(lambda rank, step: 5)
    stream = tokens(two)
    next(stream)

    def interrupted() -> None:
        raise KeyboardInterrupt

    steps = two.decoder._under_way
    steps[0] = (steps[0][0], SimpleNamespace(synchronize=interrupted))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert list(tokens(two, 2)) == [[5], [5]]
    two.end()
    assert two.rows[0].tokens == two.rows[1].tokens


def test_interrupted_within_a_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are out of step then; what ended it is not hidden by that."""
    two = Two(lambda rank, step: 5)
    stream = tokens(two)
    next(stream)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(two.decoder, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)


class Generation:
    """A cycle, as a generation is one."""

    def __init__(self, decoder: Any) -> None:
        self.source = decoder
        self.pieces = self._run()

    def _run(self) -> Iterator[list[int]]:
        with closing(self.source.tokens([1], 6)) as stream:
            for self.last in stream:
                yield self.last


@pytest.mark.parametrize("amidst", [False, True], ids=["between commands", "amidst a command"])
def test_garbage_that_was_a_generation(amidst: bool) -> None:
    two = Two(lambda rank, step: 5)
    generation = Generation(two.decoder)
    next(generation.pieces)
    two.decoder = None
    two.leader._quiet = amidst
    del generation
    gc.collect()
    two.leader._quiet = False
    another = two.leader._number()
    two.worker.caches[another] = None
    two.leader.forget(another)
    two.end()
    assert two.rows[0].tokens == two.rows[1].tokens == 1
    assert two.worker.decoders == {}
    assert two.worker.caches == {1: None}


def test_the_end_lets_go_of_graphs() -> None:
    """Their collectives keep a communicator from ending."""
    two = Two(lambda rank, step: 5)
    two.decoder._graph = object()
    two.end()
    assert two.decoder._graph is None
