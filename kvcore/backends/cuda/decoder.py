"""Decoding without waiting: a step is one CUDA graph with sampling in it, and the host reads tokens one step behind.

The graph holds everything between a token and the next one. What changes from step to step is in tensors: lengths and
block tables, which `BlockTables.upload` brings up to date before each step, and the uniform numbers of sampling. So one
graph serves every length; it is captured anew only where a pool or a table had to move. The fold, which comes once in
128 tokens, is a launch of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcore.backends.cuda.paged import PagedStorage
from kvcore.backends.cuda.sample import DeviceSampler
from kvcore.communicator import OWN_STEPS, SharedSteps
from kvcore.errors import NOT_FINITE, KvcoreError, NonFiniteError

Run = Callable[[Tensor], Tensor]  # ids int32 [B, 1] -> float32 logits [B, vocab], all of it on the device


class Decoder:
    """Steps of one token for every sequence of a paged cache.

    ``begin`` and ``commit`` are the cache's own for a step of one token, ``uniform`` gives [B] numbers in [0, 1),
    ``windows`` are those of the layers. ``among``: the ranks that run the same steps over their shares.
    ``no_graph``: None while a graph is used or may be, else why steps are launched one by one.
    """

    def __init__(
        self,
        storage: PagedStorage,
        run: Run,
        sampler: DeviceSampler,
        *,
        begin: Callable[[], None],
        commit: Callable[[], None],
        uniform: Callable[[], Sequence[float]],
        windows: Collection[int | None] = (None,),
        among: SharedSteps = OWN_STEPS,
        graph: bool = True,
    ) -> None:
        batch, device = storage.shape.batch, torch.device(storage.device)
        self._storage, self._run, self._sampler = storage, run, sampler
        self._begin, self._commit, self._uniform, self._among = begin, commit, uniform, among
        self._ids = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._draws = torch.zeros(batch, device=device)
        self._cuda = device.type == "cuda"
        self.no_graph: str | None = None if self._cuda else "not on a GPU"
        if not graph:
            self.no_graph = "switched off"
        self.capture_seconds = 0.0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._windows = windows
        self._key: tuple[Any, ...] = ()  # what a step depends on beside values on the device, when one last ran
        self._under_way: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def tokens(self, first: Sequence[int], count: int) -> Generator[list[int]]:
        """``count`` times the next token of every sequence, from ``first`` on, which have no rows yet.

        Whoever stops earlier closes the iterator: then the cache holds the rows of all tokens before the last one that
        was read. KvcoreError where logits are not finite or memory is short, after what came before.
        """
        ids, launched = list(map(int, first)), 0
        with self._among.command("start", ids):
            self.start(ids)
        try:
            for _ in range(count):
                failed: KvcoreError | None = None
                while launched < count and len(self._under_way) < 2 and failed is None:
                    drawn = self._numbers()
                    with self._among.command("launch", drawn, len(self._under_way)):
                        failed = self.launch(drawn)
                    launched += failed is None
                if not self._under_way:
                    assert failed is not None
                    raise failed
                yield self._read()
        finally:
            self._among.end(len(self._under_way), self.forget)

    def _numbers(self) -> list[float] | None:
        """Those that all ranks draw with in the next step, where there are others."""
        if self._among.alone or not self._sampler.random:
            return None
        return [float(x) for x in self._uniform()]

    # What `tokens` is made of; other ranks do the same by command, and keep as many steps as rank 0 has not read

    def start(self, first: Sequence[int]) -> None:
        self._ids.copy_(torch.tensor(first, dtype=torch.int32)[:, None])

    def launch(self, drawn: Sequence[float] | None = None, kept: int | None = None) -> KvcoreError | None:
        """A step, or why there is no room for it. ``drawn``: its random numbers, this rank's own without them."""
        self._keep(kept)
        before, failed = self._storage.tokens, None
        try:
            if self._under_way:  # the step before is known to stand once the next one is asked for
                self._commit()
            self._begin()  # which may drop rows
            before = self._storage.tokens
            self._storage.start_step(1)
        except KvcoreError as error:
            failed = error
        except BaseException:
            self._storage.shorten(before)
            raise
        if self._among.any(failed is not None):  # then none of the ranks may wait for the others in a step
            self._storage.shorten(before)
            return failed or KvcoreError("another rank could not run this step")
        try:
            if self._sampler.random:
                numbers = self._uniform() if drawn is None else drawn
                self._draws.copy_(torch.tensor(numbers, dtype=torch.float32), non_blocking=True)
            self._step()
        except BaseException as error:
            self._storage.shorten(before)
            if isinstance(error, KvcoreError) and self._among.alone:
                return error
            raise
        self._ask()
        return None

    def forget(self, kept: int | None = None) -> None:
        """Give up steps that nobody read."""
        self._keep(kept)
        if self._under_way:
            self._storage.trim(len(self._under_way))
            self._under_way.clear()
        self._commit()

    def release(self) -> None:
        """Let go of the graph: collectives in it keep their communicator busy."""
        self._graph, self._key = None, ()

    def _keep(self, count: int | None) -> None:
        """The newest ``count`` steps under way; the others have been read."""
        while count is not None and len(self._under_way) > count:
            self._under_way.popleft()

    def _ask(self) -> None:
        """Let the tokens come to the host, without waiting."""
        if self._cuda:
            tokens = torch.empty(self._tokens.shape, dtype=torch.int32, pin_memory=True)
            tokens.copy_(self._tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._under_way.append((tokens, event))
        else:
            self._under_way.append((self._tokens.clone(), None))

    def _step(self) -> None:
        ways = [self._storage.way(1, window) for window in self._windows]
        planned = any(plan is not None for plan, _ in ways)  # by the host, for this step alone
        key = (self._storage.bindings, *(window for _, window in ways), planned)
        same, self._key = self._key == key, key
        if not same or planned:  # also the first time, when kernels are compiled and loaded
            self._graph = None
            self._compute()
        elif self._graph is not None:
            self._graph.replay()
            self._storage.advance(1)
        elif self.no_graph is None:
            self._capture()
        else:
            self._compute()

    def _compute(self) -> None:
        tokens = self._sampler(self._run(self._ids), self._draws, self._among.chosen)
        self._tokens.copy_(tokens)
        self._ids.copy_(tokens[:, None].clamp(min=0))

    def _capture(self) -> None:
        start, graph = time.perf_counter(), torch.cuda.CUDAGraph()
        before = [layer.tokens for layer in self._storage.layers]
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._compute()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.no_graph = f"capture failed: {str(error).splitlines()[0]}"
            self._storage.set_layer_tokens(before)
            self._compute()
            return
        self._graph = graph
        self.capture_seconds += time.perf_counter() - start
        graph.replay()

    def _read(self) -> list[int]:
        tokens, event = self._under_way.popleft()
        if event is not None:
            event.synchronize()
        ids: list[int] = tokens.tolist()
        if min(ids) < 0:
            raise NonFiniteError(NOT_FINITE)
        return ids
