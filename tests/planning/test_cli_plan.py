"""`kvcore advise --rps`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from outcome import Cli

from kvcore.modes import MODES
from kvcore.planning import Rates

SMALL = ("--model", "llama-3.1-8b", "--weight-bits", "4", "--requests", "300", "--replicas", "2")
RATES = Rates(0.002, 5e-5, 1e-9, 0.01, 2e-4, 1e-7)


def test_each_mode_has_a_row_with_percentiles_and_cost(cli: Cli) -> None:
    outcome = cli("advise", *SMALL, "--rps", "4", "--cost-per-hour", "2", "--memory", "24GiB")
    assert outcome.code == 0
    assert outcome.out.startswith("llama-3.1-8b: 2 replicas, batches up to 64")
    rows = outcome.out.split("\n\n")[1].splitlines()
    assert [row.split()[0] for row in rows[1:]] == list(MODES)
    titles = "mode TTFT p50 p90 p99 gap p50 p90 p99 tok/s busy batch cost/Mtok"
    assert rows[0].split() == titles.split()
    assert "Rates are floors, not measurements" in outcome.out


def test_json_has_the_same_facts_and_the_same_seed_the_same_numbers(cli: Cli) -> None:
    args = ("advise", *SMALL, "--rps", "4", "--cost-per-hour", "2", "--json", "--seed", "7")
    found, again = cli(*args).json, cli(*args).json
    assert found == again
    assert set(found["modes"]) == set(MODES)
    turbo4, fp16 = found["modes"]["turbo4"], found["modes"]["fp16"]
    assert turbo4["rates"]["context_token"] < fp16["rates"]["context_token"] / 3
    assert turbo4["cost_per_million_tokens"] == pytest.approx(2 * 2 / 3600 / turbo4["tokens_per_second"] * 1e6)
    assert found != cli(*args[:-1], "8").json


def test_smaller_modes_hold_more_requests_in_the_same_memory(cli: Cli) -> None:
    load = ("--rps", "30", "--prompt-lengths", "8k", "--output-lengths", "512", "--memory", "12GiB", "--json")
    found = cli("advise", *SMALL, *load).json["modes"]
    assert found["turbo4"]["batch"] > 1.5 * found["fp16"]["batch"]
    assert found["turbo4"]["time_to_first_token"][1] < found["fp16"]["time_to_first_token"][1]


def test_measured_rates_replace_the_floors(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"modes": {"int8": asdict(RATES), "fp16": asdict(RATES)}}))
    found = cli("advise", *SMALL, "--rps", "1", "--rates", path, "--json").json
    assert set(found["modes"]) == {"fp16", "int8"}
    assert found["modes"]["int8"]["rates"] == asdict(RATES)
    assert f"Rates: {path}." in cli("advise", *SMALL, "--rps", "1", "--rates", path).out


def test_an_overloaded_fleet_is_marked(cli: Cli) -> None:
    outcome = cli("advise", "--model", "llama-3.1-70b", "--requests", "500", "--rps", "900", "--bandwidth", "400")
    assert "fp16 *" in outcome.out
    assert "* more requests come than are served" in outcome.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rps", "0"), "--rps 0.0: must be above 0"),
        (("--rps", "nan"), "--rps nan: must be above 0"),
        (("--rps", "1", "--compute", "-1"), "--compute -1.0: must be above 0"),
        (("--rps", "1", "--prompt-lengths", "x"), "--prompt-lengths x: give a number"),
        (("--rps", "1", "--prompt-lengths", "9k"), "the longest request has"),
        (("--rps", "1", "--tensor-parallel", "2"), "3 KV heads and 9 query heads over 2 ranks"),
        (("--rps", "1", "--memory", "1MiB"), "the memory of a replica does not hold the weights"),
        (("--rps", "1", "--context", "2k"), "--context and --batch with --rps"),
        (("--rps", "1", "--rates", "none.json"), "--rates none.json: cannot be read"),
        (("--replicas", "3", "--tensor-parallel", "3"), "--replicas, --tensor-parallel: belong to the simulation"),
    ],
)
def test_what_cannot_be_simulated_is_refused(cli: Cli, args: tuple[str, ...], message: str) -> None:
    assert cli("advise", *args).refused().startswith(message)
