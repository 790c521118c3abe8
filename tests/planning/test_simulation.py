"""The simulation against an engine that goes iteration by iteration, and against what queues are known to do."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tiny models

from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.engine import Engine, EngineConfig, Request
from kvcore.planning import Fleet, Rates, Workload, parse_lengths, simulate
from kvcore.planning.replica import Job, Replica
from kvcore.sampling import SamplingParams

RATES = Rates(chunk=0.002, prompt_token=5e-5, prompt_pair=1e-9, step=0.01, sequence=2e-4, context_token=1e-7)
BYTES = 1000


def workload(
    rate: float, requests: int = 300, prompts: str = "50-900", outputs: str = "1-80", seed: int = 0
) -> Workload:
    return Workload(rate, parse_lengths("p", prompts), parse_lengths("o", outputs), requests, seed)


def stepwise(jobs: list[Job], memory: int | None, max_batch: int, chunk: int) -> list[float]:
    """One replica, an iteration at a time, straight from the description of `Rates`: the gaps between tokens."""
    coming, waiting = deque(jobs), deque[Job]()
    running: list[tuple[Job, list[float]]] = []  # with the times of its tokens
    gaps: list[float] = []
    chunks: deque[tuple[Job, int, int]] = deque()  # of the prompt in prefill: begin, end
    used, now = 0, 0.0

    def end(job: Job, at: list[float]) -> None:
        nonlocal used
        job.finished = now
        used -= job.bytes
        gaps.extend(np.diff(at).tolist())

    while coming or waiting or running or chunks:
        if not waiting and not running and not chunks:
            now = max(now, coming[0].arrived)
        while coming and coming[0].arrived <= now:
            waiting.append(coming.popleft())
        if running:
            now += RATES.decode(len(running), sum(job.prompt + len(at) for job, at in running))
            for _, at in running:
                at.append(now)
            for job, at in running:
                if len(at) == job.output:
                    end(job, at)
            running = [(job, at) for job, at in running if len(at) < job.output]
        left = chunk
        while left > 0:
            fits = waiting and (memory is None or used + waiting[0].bytes <= memory)
            if not chunks and fits and len(running) < max_batch:
                job = waiting.popleft()
                used += job.bytes
                count = max(1, math.ceil((job.prompt - chunk // 8) / chunk))  # no small chunk at the end
                borders = [*range(0, count * chunk, chunk), job.prompt]
                chunks.extend((job, first, last) for first, last in pairwise(borders))
            if not chunks or (left < chunk and chunks[0][2] - chunks[0][1] > left):
                break
            job, first, last = chunks.popleft()
            left -= last - first
            now += RATES.prefill(last, 10**6) - RATES.prefill(first, 10**6) + RATES.chunk
            if not chunks:
                job.first_token = now
                running.append((job, [now]))
                if job.output == 1:
                    end(*running.pop())
    return gaps


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
    gaps = stepwise(made[1], memory, 8, 256)
    for name in ("first_token", "finished"):
        blocks, single = (np.array([getattr(job, name) for job in jobs]) for jobs in made)
        np.testing.assert_allclose(blocks, single, rtol=1e-9)
    assert sum(count for _, count in replica.gaps) == len(gaps)
    assert sum(seconds * count for seconds, count in replica.gaps) == pytest.approx(sum(gaps))


def test_an_iteration_takes_short_prompts_together() -> None:
    """Three of 40 tokens go into a chunk of 128, the fourth waits for a decode step."""
    replica, jobs = Replica(RATES, None, 8, 128), [Job(0.0, 40, 2, 0) for _ in range(4)]
    for job in jobs:
        replica.submit(job)
    replica.advance(math.inf)
    one = RATES.prefill(40, 128)
    decode = RATES.decode(3, 3 * 41)
    assert [job.first_token for job in jobs] == pytest.approx([one, 2 * one, 3 * one, 4 * one + decode])
    assert jobs[0].finished == jobs[2].finished == pytest.approx(3 * one + decode)
    assert [count for _, count in replica.gaps] == [1] * 4
    gaps = sorted(seconds for seconds, _ in replica.gaps)
    assert gaps == pytest.approx([RATES.decode(1, 41), decode, one + decode, 2 * one + decode])


def test_requests_take_turns_as_in_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each first and last token of 40 requests, at most five at a time, by a clock that counts 1 for a chunk of a
    prompt and 1000 for a decode step."""
    model = kvcore.load(write_tiny_tokenizer(write_tiny_llama(tmp_path)), backend="reference")
    forward, now = kvcore.Model.forward_ragged, 0.0

    def timed(self: kvcore.Model, ids: Sequence[np.ndarray], *args: Any, **settings: Any) -> Any:
        nonlocal now
        now += 1.0 if ids[0].shape[1] > 1 else 1000.0
        return forward(self, ids, *args, **settings)

    monkeypatch.setattr(kvcore.Model, "forward_ragged", timed)
    engine = Engine(model, EngineConfig(max_batch=5, prefill_step=32, prefix_reuse=False))
    take, taken = engine._take, defaultdict[str, list[float]](list)

    def note(running: Any, *token: Any) -> None:
        taken[running.request.id].append(now)
        take(running, *token)

    monkeypatch.setattr(engine, "_take", note)
    replica = Replica(Rates(1.0, 0.0, 0.0, 1000.0, 0.0, 0.0), None, 5, 32)
    random, no_end = np.random.default_rng(4), dict.fromkeys(model.eos_token_ids, -100.0)
    jobs = [Job(0.0, *random.integers((3, 1), (90, 9)).tolist(), 0) for _ in range(40)]
    for number, job in enumerate(jobs):
        params = SamplingParams(max_tokens=job.output, logit_bias=no_end)
        engine.submit(Request(str(number), tuple(range(3, 3 + job.prompt)), params), lambda _: None)
        replica.submit(job)
    while engine.step():
        pass
    replica.advance(math.inf)
    found = [taken[str(number)] for number in range(len(jobs))]
    assert [len(at) for at in found] == [job.output for job in jobs]
    assert [at[0] for at in found] == [job.first_token for job in jobs]
    assert [at[-1] for at in found] == [job.finished for job in jobs]


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
