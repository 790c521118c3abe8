"""Replicas behind a router, a workload that comes to them, and what its users see."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.errors import InputError
from kvcore.planning.rates import Rates
from kvcore.planning.replica import Job, Replica
from kvcore.planning.workload import Workload

WARM_SHARE = 0.1  # of the requests, at the beginning: they find the fleet empty, and are not counted
OVERLOADED = 0.05  # of the arrivals' time, by which the last tenth may begin later than the first


@dataclass(frozen=True, slots=True)
class Fleet:
    """``replicas`` of ``devices`` each. ``memory``: bytes for the cache of one replica, None without a limit."""

    replicas: int
    devices: int = 1
    memory: int | None = None
    max_batch: int = 64
    chunk: int = 512

    def __post_init__(self) -> None:
        for name in ("replicas", "devices", "max_batch", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', ' ')} {getattr(self, name)}: must be 1 or more")
        if self.memory is not None and self.memory <= 0:
            raise InputError("the memory of a replica does not hold the weights: no byte is left for the cache")


@dataclass(frozen=True, slots=True)
class Summary:
    """What the counted requests saw. Percentiles are (50th, 90th, 99th), in seconds.

    gap                 between two tokens of an answer
    tokens_per_second   of answers, over the whole fleet
    busy                share of the time in which a replica computes
    batch               sequences in a decode step, on average
    refused             requests that no replica could ever hold
    overloaded          requests come faster than they are served: waiting times grow as long as it goes on
    """

    requests: int
    seconds: float
    time_to_first_token: tuple[float, float, float]
    gap: tuple[float, float, float]
    latency: tuple[float, float, float]
    tokens_per_second: float
    busy: float
    batch: float
    refused: int
    overloaded: bool

    def cost_per_million_tokens(self, fleet: Fleet, per_device_hour: float) -> float:
        """Of a million tokens of answers, where the fleet is paid for whether busy or not."""
        if not self.tokens_per_second:
            return math.inf
        return fleet.replicas * fleet.devices * per_device_hour / 3600 / self.tokens_per_second * 1e6


def simulate(workload: Workload, fleet: Fleet, rates: Rates, request_bytes: Callable[[int], int]) -> Summary:
    """Run the workload to its last token. ``request_bytes(tokens)``: what a sequence that grows to that length may
    take of one replica's memory.

    A request goes to the less loaded of two replicas drawn at random. The same arguments give the same result.
    """
    times, prompts, outputs = (column.tolist() for column in workload.draw())
    return simulate_arrivals(times, prompts, outputs, fleet, rates, request_bytes, seed=workload.seed)


def simulate_arrivals(
    times: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    fleet: Fleet,
    rates: Rates,
    request_bytes: Callable[[int], int],
    *,
    seed: int = 0,
    warm_share: float = WARM_SHARE,
) -> Summary:
    """`simulate` for requests that are given one by one: ascending arrival times, prompt and output tokens. The first
    ``warm_share`` of them are not counted."""
    replicas = [Replica(rates, fleet.memory, fleet.max_batch, fleet.chunk) for _ in range(fleet.replicas)]
    draw = random.Random(seed)
    sizes: dict[int, int] = {}
    jobs = []
    for arrived, prompt, output in zip(times, prompts, outputs, strict=True):
        length = prompt + output
        if length not in sizes:
            sizes[length] = request_bytes(length)
        job = Job(arrived, prompt, output, sizes[length])
        jobs.append(job)
        replica = _choose(replicas, draw, arrived)
        replica.submit(job)
    for replica in replicas:
        replica.advance(math.inf)
    return _summary(jobs, replicas, warm_share)


def _choose(replicas: Sequence[Replica], draw: random.Random, now: float) -> Replica:
    if len(replicas) == 1:
        replicas[0].advance(now)
        return replicas[0]
    first = draw.randrange(len(replicas))
    second = (first + draw.randrange(1, len(replicas))) % len(replicas)
    a, b = replicas[first], replicas[second]
    a.advance(now)
    b.advance(now)
    return a if a.load <= b.load else b


def _summary(jobs: Sequence[Job], replicas: Sequence[Replica], warm_share: float) -> Summary:
    served = [job for job in jobs if not job.refused]
    counted = served[int(len(served) * warm_share) :]
    if not counted:
        nothing = (math.nan,) * 3
        return Summary(0, 0.0, nothing, nothing, nothing, 0.0, 0.0, 0.0, len(jobs), False)
    first = np.array([job.first_token - job.arrived for job in counted])
    latency = np.array([job.finished - job.arrived for job in counted])
    end = max(job.finished for job in served)
    gaps = np.array([gap for replica in replicas for gap in replica.gaps]).reshape(-1, 2)
    steps = sum(replica.steps for replica in replicas)
    return Summary(
        requests=len(counted),
        seconds=end,
        time_to_first_token=_percentiles(first),
        gap=_percentiles(gaps[:, 0], gaps[:, 1]),
        latency=_percentiles(latency),
        tokens_per_second=sum(job.output for job in served) / end,
        busy=sum(replica.busy for replica in replicas) / (end * len(replicas)),
        batch=float(gaps[:, 1].sum() / steps) if steps else 0.0,
        refused=len(jobs) - len(served),
        overloaded=_grows(first, jobs[-1].arrived),
    )


def _grows(first: np.ndarray, span: float) -> bool:
    """Whether the last requests waited longer than the earlier ones by more than `OVERLOADED` of the time."""
    if len(first) < 50:
        return False
    tenth = len(first) // 10
    return bool(np.median(first[-tenth:]) - np.median(first[: 3 * tenth]) > OVERLOADED * span)


def _percentiles(values: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float, float]:
    if not len(values):
        return math.nan, math.nan, math.nan
    order = np.argsort(values, kind="stable")
    counts = np.ones(len(values)) if weights is None else weights[order]
    upto = np.cumsum(counts)
    at = [np.searchsorted(upto, share * upto[-1]) for share in (0.5, 0.9, 0.99)]
    p50, p90, p99 = (float(values[order[min(int(i), len(values) - 1)]]) for i in at)
    return p50, p90, p99
