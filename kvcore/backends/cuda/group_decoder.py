"""Decode steps of many sequences of one pool as CUDA graphs, with sampling in them.

A graph serves every step of up to so many sequences (its bucket): lengths, tables, ids and settings are tensors that a
step fills first. Slots beyond the sequences are idle: of length 0, nothing is written for them. The fold is a launch
beside it. Tokens come back to the host, logits only of the rows that it asks for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.block_tables import NEVER
from kvcore.backends.cuda.group import TableLayer, commit_together, table_layers
from kvcore.backends.cuda.kernels.append import rope_angles
from kvcore.backends.cuda.paged import PagedStorage, on_device
from kvcore.backends.cuda.sample import MAX_BIASES, MAX_ORDERED, UNDECIDED, Mix, RowSettings, sample_rows

# ids int32 [B, 1], layers, angles -> float32 logits [B, vocab], all of it on the device
Run = Callable[[Tensor, Sequence[TableLayer], tuple[Tensor, Tensor]], Tensor]
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # and multiples of 16
MAX_GRAPHS = 32
FIRST_WIDTH = 32  # pages of a sequence
_TABLES = ("table", "ranges", "raw_table", "raw_ranges")
_UNKNOWN: Any = object()
_STATE = ("length", "folded", "positions", "sinks", "sink_page", "fold_at")


class Settings(Protocol):
    """How to pick a row's token: `kvcore.sampling.SamplingParams`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def biases(self) -> Sequence[tuple[int, float]]: ...


def bucket_of(count: int) -> int:
    """Slots of a step of ``count`` sequences."""
    return next((bucket for bucket in BUCKETS if bucket >= count), -(-count // 16) * 16)


@dataclass(slots=True)
class _Step:
    """Steps of one bucket and one mix over one pool."""

    layers: list[TableLayer]
    graph: torch.cuda.CUDAGraph | None = None
    ran: bool = False  # once without a graph, when kernels are compiled and loaded


class GroupDecoder:
    """Steps of one token for sequences of one pool, as many as come, at most ``most`` without allocating anew.

    ``run`` is the model, ``inv_freq`` float64 [D/2] of its rotary embedding. ``no_graph``: None while graphs are used
    or may be, else why steps are launched one by one.
    """

    def __init__(
        self, run: Run, inv_freq: np.ndarray, vocab: int, device: str, *, most: int = 64, graph: bool = True
    ) -> None:
        self._run, self._vocab, self._device = run, vocab, device
        self._cuda = torch.device(device).type == "cuda"
        self._inv_freq = torch.from_numpy(inv_freq).to(device)
        self.no_graph: str | None = None if self._cuda else "not on a GPU"
        if not graph:
            self.no_graph = "switched off"
        self.captures, self.capture_seconds = 0, 0.0
        self._steps: OrderedDict[tuple[Any, ...], _Step] = OrderedDict()
        self._memory: Any = None  # of all graphs
        self._most, self._width = bucket_of(most), FIRST_WIDTH
        self._ready = False
        self._stamps: list[int] = []  # of what the tables hold
        self._asked: tuple[int, list[int]] = (0, [])  # rows of the step under way, and those whose logits are wanted
        self._event: torch.cuda.Event | None = None

    @property
    def graphs(self) -> int:
        return sum(step.graph is not None for step in self._steps.values())

    @property
    def words(self) -> str:
        if self.no_graph is not None:
            return f"launched one by one ({self.no_graph}), sampling on the device"
        return f"CUDA graphs ({self.captures} captured in {self.capture_seconds:.1f} s), sampling on the device"

    @staticmethod
    def takes(settings: Settings) -> bool:
        """Whether tokens can be picked on the device."""
        penalties = settings.presence_penalty or settings.frequency_penalty or settings.repetition_penalty != 1
        return not penalties and settings.top_k <= MAX_ORDERED and len(settings.biases) <= MAX_BIASES

    def launch(
        self,
        storages: Sequence[PagedStorage],
        ids: Sequence[int],
        settings: Sequence[Settings | None],
        uniform: Sequence[float],
    ) -> None:
        """A step of every sequence with its newest token. ``settings`` None: the row's logits are wanted instead.

        KvcoreError where a page is missing; the caller takes back what an error leaves in the storages.
        """
        for storage in storages:
            storage.extend(1)
        first, count = storages[0], len(storages)
        bucket = bucket_of(count)
        try:
            self._make_room(bucket, self._needed_width(storages))
            self._fill_tables(storages, bucket)
            mix = self._fill(storages, ids, settings, uniform, bucket)
            with on_device(self._device):
                self._step(first, bucket, mix)
                self._asked = count, [row for row, each in enumerate(settings) if each is None]
                self._ask()
                for storage in storages:
                    storage.advance(1)
                tables, state = self._views(bucket), self._state(bucket)
                commit_together(
                    storages,
                    tables["raw_table"],
                    tables["table"],
                    state["length"],
                    state["folded"],
                    state["fold_at"],
                )
        except BaseException:
            self._settle()
            raise

    def read(self) -> list[int | np.ndarray]:
        """What the step gave each sequence: its token, -1 where logits are not finite, or float32 logits [vocab] where
        they were wanted or the device could not decide. Logits stay as they are until the next step."""
        count, wanted = self._asked
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int | np.ndarray] = self._host_tokens[:count].tolist()
        for at, row in enumerate(wanted):
            tokens[row] = self._host_logits[at].numpy()
        for row, token in enumerate(tokens):
            if isinstance(token, int) and token == UNDECIDED:
                tokens[row] = self._logits[row].cpu().numpy()
        return tokens

    # What a step reads

    def _needed_width(self, storages: Sequence[PagedStorage]) -> int:
        """Of the tables that changed since their slot was filled last."""
        stamps = self._stamps + [-1] * (len(storages) - len(self._stamps))
        changed = (x for x, stamp in zip(storages, stamps, strict=False) if x.tables.stamp != stamp)
        return max((storage.tables.entries_used for storage in changed), default=0)

    def _make_room(self, bucket: int, width: int) -> None:
        """Tensors of a fixed address for so many slots and pages; larger ones end all graphs."""
        if self._ready and bucket <= self._most and width <= self._width:
            return
        while self._width < width:
            self._width *= 2
        self._most, self._ready = max(self._most, bucket), False
        self._steps.clear()
        most, where = self._most, {"device": self._device}
        self._host_tables = self._staged(4, most, self._width)
        self._tables = torch.zeros_like(self._host_tables, **where)
        self._stamps = [0] * most
        self._host = self._staged(15 + 2 * MAX_BIASES, most)
        self._inputs = torch.zeros_like(self._host, **where)
        self._given: list[Settings | None] = [_UNKNOWN] * most
        self._logits = torch.empty(most, self._vocab, **where)
        self._tokens = torch.zeros(most, dtype=torch.int32, **where)
        self._host_tokens = self._staged(most)
        self._host_logits = torch.empty(0, self._vocab)
        self._ready = True

    def _staged(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._cuda)

    def _fill_tables(self, storages: Sequence[PagedStorage], bucket: int) -> None:
        """Tables of what changed since the slot was filled last. Those of idle slots are 0: kernels load from the first
        page of any sequence, which has to be there."""
        host, changed = self._host_tables.numpy(), False
        for slot in range(len(storages), bucket):
            if self._stamps[slot] != 0:
                host[:, slot], self._stamps[slot], changed = 0, 0, True
        for slot, storage in enumerate(storages):
            stamp = storage.tables.stamp
            if self._stamps[slot] != stamp:
                own = storage.tables.host_table()
                host[:, slot, : own.shape[1]] = own
                self._stamps[slot], changed = stamp, True
        if changed:
            for own, staged in zip(self._tables, self._host_tables, strict=True):
                own[:bucket].copy_(staged[:bucket], non_blocking=True)

    def _fill(
        self,
        storages: Sequence[PagedStorage],
        ids: Sequence[int],
        settings: Sequence[Settings | None],
        uniform: Sequence[float],
        bucket: int,
    ) -> Mix:
        count, host = len(storages), self._host.numpy()
        host[:2].reshape(-1).view(np.float64)[:count] = uniform
        host[2:8, :count] = np.array([storage.tables.host_state() for storage in storages], np.int32).T
        host[8, :count] = ids
        host[2:9, count:bucket] = 0
        host[7, count:bucket] = NEVER
        for slot, each in enumerate(settings):
            if self._given[slot] is not each:
                self._give(host, slot, each)
        self._inputs.copy_(self._host, non_blocking=True)
        return Mix(
            random=not host[10, :count].all(),
            ordered=bool(host[11, :count].any()),
            biased=bool(host[15:, :count].any()),
        )

    def _give(self, host: np.ndarray, slot: int, settings: Settings | None) -> None:
        """The slot's settings; without any, or with no temperature, it is greedy."""
        greedy = settings is None or settings.temperature == 0
        host[9:12, slot], host[15:, slot] = (0, greedy, 0), 0
        floats = host[12:].view(np.float32)
        floats[:3, slot] = 1, 1, 0
        if settings is not None and not greedy:
            host[9, slot], host[11, slot] = settings.top_k, settings.top_k > 0 or settings.top_p < 1
            floats[:3, slot] = max(settings.temperature, 1e-30), settings.top_p, settings.min_p
        for i, (token, bias) in enumerate([] if settings is None else settings.biases):
            host[15 + i, slot], floats[3 + MAX_BIASES + i, slot] = token, bias
        self._given[slot] = settings

    def _state(self, bucket: int) -> dict[str, Tensor]:
        return dict(zip(_STATE, self._inputs[2:8, :bucket].unbind(), strict=True))

    def _views(self, bucket: int) -> dict[str, Tensor]:
        return dict(zip(_TABLES, self._tables[:, :bucket].unbind(), strict=True))

    def _settings(self, bucket: int) -> RowSettings:
        inputs = self._inputs
        floats = inputs.view(torch.float32)
        return RowSettings(
            uniform=inputs[:2].reshape(-1).view(torch.float64)[:bucket],
            top_k=inputs[9, :bucket],
            greedy=inputs[10, :bucket],
            ordered=inputs[11, :bucket],
            temperature=floats[12, :bucket],
            top_p=floats[13, :bucket],
            min_p=floats[14, :bucket],
            bias_ids=inputs[15 : 15 + MAX_BIASES, :bucket].T,
            biases=floats[15 + MAX_BIASES :, :bucket].T,
        )

    # The step

    def _step(self, first: PagedStorage, bucket: int, mix: Mix) -> None:
        key = first.pools, first.attend, bucket, mix
        step = self._steps.get(key)
        if step is None:
            state = {name: x for name, x in self._state(bucket).items() if name not in ("positions", "fold_at")}
            step = self._steps[key] = _Step(table_layers(first, self._views(bucket) | state))
            if len(self._steps) > MAX_GRAPHS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        if step.graph is None and step.ran and self.no_graph is None:
            self._capture(step, bucket, mix)
        if step.graph is not None:
            step.graph.replay()
        else:
            self._compute(step, bucket, mix)
            step.ran = True

    def _compute(self, step: _Step, bucket: int, mix: Mix) -> None:
        angles = rope_angles(self._inv_freq, self._state(bucket)["positions"], 1)
        logits = self._run(self._inputs[8, :bucket, None], step.layers, angles)
        self._logits[:bucket].copy_(logits)
        self._tokens[:bucket].copy_(sample_rows(logits, self._settings(bucket), mix))

    def _capture(self, step: _Step, bucket: int, mix: Mix) -> None:
        start, graph = time.perf_counter(), torch.cuda.CUDAGraph()
        if not self.graphs:  # the memory of graphs goes with the last one
            self._memory = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                self._compute(step, bucket, mix)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.no_graph = f"capture failed: {str(error).splitlines()[0]}"
            return
        step.graph = graph
        self.captures += 1
        self.capture_seconds += time.perf_counter() - start

    def _ask(self) -> None:
        """Let what the host reads come to it, without waiting."""
        count, wanted = self._asked
        self._host_tokens[:count].copy_(self._tokens[:count], non_blocking=True)
        if len(wanted) > len(self._host_logits):
            self._host_logits = torch.empty(bucket_of(len(wanted)), self._vocab, pin_memory=self._cuda)
        for at, row in enumerate(wanted):
            self._host_logits[at].copy_(self._logits[row], non_blocking=True)
        if self._cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def _settle(self) -> None:
        """Wait for what is under way: it may still read what the next step fills."""
        if self._ready:
            self._given, self._stamps = [_UNKNOWN] * self._most, [-1] * self._most
        if self._cuda:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
