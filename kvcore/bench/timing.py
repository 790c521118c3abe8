"""CUDA graphs and device events: how every kernel of a benchmark is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


def interleaved(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of each run's CUDA graph, the runs taking turns."""
    graphs = [_capture(run) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 3):
        for graph, sample in zip(graphs, times, strict=True):
            with timer(sample if repeat >= 3 else []):
                graph.replay()
    return times


def _capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@contextmanager
def timer(sample: list[float]) -> Iterator[None]:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    yield
    stop.record()
    torch.cuda.synchronize()
    sample.append(start.elapsed_time(stop))
