"""The simulation against an engine that goes iteration by iteration, and against what queues are known to do."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from kvcore.planning import Fleet, Rates, Workload, parse_lengths, simulate
from kvcore.planning.replica import Job, Replica

RATES = Rates(chunk=0.002, prompt_token=5e-5, prompt_pair=1e-9, step=0.01, sequence=2e-4, context_token=1e-7)
BYTES = 1000


def workload(
    rate: float, requests: int = 300, prompts: str = "50-900", outputs: str = "1-80", seed: int = 0
) -> Workload:
    return Workload(rate, parse_lengths("p", prompts), parse_lengths("o", outputs), requests, seed)


def stepwise(jobs: list[Job], memory: int | None, max_batch: int, chunk: int) -> None:
    """One replica, an iteration at a time, straight from the description of `Rates`."""
    coming, waiting = deque(jobs), deque[Job]()
    running: list[list[object]] = []  # job, tokens of it so far
    filling: Job | None = None
    left, extra, used, now = 0, 0.0, 0, 0.0
    while coming or waiting or running or filling:
        if not waiting and not running and filling is None:
            now = max(now, coming[0].arrived)
        while coming and coming[0].arrived <= now:
            waiting.append(coming.popleft())
        fits = waiting and (memory is None or used + waiting[0].bytes <= memory)
        if filling is None and fits and len(running) < max_batch:
            filling = waiting.popleft()
            used += filling.bytes
            left = max(1, math.ceil((filling.prompt - chunk // 8) / chunk))  # no small chunk at the end
            extra = RATES.prefill(filling.prompt, chunk) / left
        now += extra if filling is not None else 0.0
        if running:
            context = sum(job.prompt + done for job, done in running)  # type: ignore[attr-defined,operator]
            now += RATES.decode(len(running), context)
            for entry in running:
                entry[1] += 1  # type: ignore[operator]
        for job, done in list(running):
            if done == job.output:  # type: ignore[attr-defined]
                job.finished = now  # type: ignore[attr-defined]
                used -= job.bytes  # type: ignore[attr-defined]
                running.remove([job, done])
        if filling is not None:
            left -= 1
            if left == 0:
                filling.first_token = now
                if filling.output == 1:
                    filling.finished = now
                    used -= filling.bytes
                else:
                    running.append([filling, 1])
                filling = None


@pytest.mark.parametrize("memory", [None, 6 * 700 * BYTES])
@pytest.mark.parametrize("rate", [0.5, 4.0, 30.0])
def test_blocks_of_iterations_equal_single_ones(rate: float, memory: int | None) -> None:
    times, prompts, outputs = workload(rate).draw()
    made = [
        [
            Job(t, p, o, (p + o) * BYTES)
            for t, p, o in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        ]
        for _ in range(2)
    ]
    replica = Replica(RATES, memory, 8, 256)
    for job in made[0]:
        replica.advance(job.arrived)
        replica.submit(job)
    replica.advance(math.inf)
    stepwise(made[1], memory, 8, 256)
    for field in ("first_token", "finished"):
        blocks, single = (np.array([getattr(job, field) for job in jobs]) for jobs in made)
        np.testing.assert_allclose(blocks, single, rtol=1e-9)


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    found = simulate(workload(1e-3, 50, "600", "10"), Fleet(1, chunk=512), RATES, lambda _: 0)
    prefill = RATES.prefill(600, 512)
    steps = [RATES.decode(1, 600 + done) for done in range(1, 10)]
    assert found.time_to_first_token == pytest.approx((prefill,) * 3)
    assert found.latency == pytest.approx((prefill + sum(steps),) * 3)
    assert found.gap[0] == pytest.approx(sum(steps) / 9)
    assert found.batch == 1


def test_waiting_of_random_arrivals_is_that_of_queueing_theory() -> None:
    """One-token answers, no batching: an M/D/1 queue, whose mean wait is load · service / (2 (1 - load))."""
    service = RATES.prefill(400, 512)
    found = simulate(workload(0.7 / service, 60_000, "400", "1"), Fleet(1), RATES, lambda _: 0)
    waited = 0.7 * service / (2 * 0.3)
    times, *_ = workload(0.7 / service, 60_000, "400", "1").draw()
    replica, jobs = Replica(RATES, None, 64, 512), [Job(t, 400, 1, 0) for t in times.tolist()]
    for job in jobs:
        replica.advance(job.arrived)
        replica.submit(job)
    replica.advance(math.inf)
    assert np.mean([job.first_token - job.arrived for job in jobs]) == pytest.approx(service + waited, rel=0.05)
    assert found.busy == pytest.approx(0.7, rel=0.02)
    assert not found.overloaded


def test_memory_holds_requests_back_and_refuses_what_never_fits() -> None:
    load = workload(8.0, 400)
    free = simulate(load, Fleet(1), RATES, lambda tokens: tokens * BYTES)
    tight = simulate(load, Fleet(1, memory=2000 * BYTES), RATES, lambda tokens: tokens * BYTES)
    assert tight.batch < free.batch
    assert tight.time_to_first_token[1] > free.time_to_first_token[1]
    assert (free.refused, tight.refused) == (0, 0)
    small = simulate(load, Fleet(1, memory=500 * BYTES), RATES, lambda tokens: tokens * BYTES)
    _, prompts, outputs = load.draw()
    assert small.refused == int((prompts + outputs > 500).sum()) > 0


def test_more_load_than_a_replica_serves_is_said() -> None:
    assert simulate(workload(100.0, 1000), Fleet(1), RATES, lambda _: 0).overloaded
    assert not simulate(workload(100.0, 1000), Fleet(40), RATES, lambda _: 0).overloaded


def test_replicas_share_the_load() -> None:
    one = simulate(workload(3.0, 1000), Fleet(1), RATES, lambda _: 0)
    ten = simulate(workload(30.0, 10_000), Fleet(10), RATES, lambda _: 0)
    assert ten.tokens_per_second == pytest.approx(10 * one.tokens_per_second, rel=0.1)
    assert ten.time_to_first_token[1] < 1.1 * one.time_to_first_token[1]


def test_the_same_seed_gives_the_same_result_and_another_another() -> None:
    runs = [simulate(workload(5.0, seed=seed), Fleet(3), RATES, lambda _: 0) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_thousands_of_replicas_take_seconds() -> None:
    start = time.process_time()
    found = simulate(workload(4000.0, 20_000), Fleet(2000), RATES, lambda _: 0)
    assert time.process_time() - start < 10
    assert found.requests == 18_000


def test_cost_counts_every_device_for_the_whole_time() -> None:
    found = simulate(workload(3.0), Fleet(2, devices=4), RATES, lambda _: 0)
    cost = found.cost_per_million_tokens(Fleet(2, devices=4), 3.0)
    assert cost == pytest.approx(2 * 4 * 3.0 / 3600 / found.tokens_per_second * 1e6)
    assert replace(found, tokens_per_second=0.0).cost_per_million_tokens(Fleet(1), 1.0) == math.inf
