"""`kvcore advise`: the design's numbers, the cache's own bytes, the largest context."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outcome import Cli
from tiny import write_tiny_gguf, write_tiny_llama

from kvcore.advise import SHAPES, ModelShape, Plan, kv_bytes, largest_context, mode_costs
from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.cache import CacheSpec
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES
from kvcore.recommend import FIDELITY

ROOT = Path(__file__).resolve().parents[2]

TINY = ModelShape(3, 128, 256, 4, 2, 64, 256, False, 4096)
LLAMA_8B = Plan(SHAPES["llama-3.1-8b"], 32768, 4.5, 4.4e12)
FLOORS = {
    (32768, "fp16"): 517,
    (32768, "int8"): 687,
    (32768, "turbo4"): 820,
    (131072, "fp16"): 206,
    (131072, "int8"): 340,
    (131072, "turbo4"): 505,
}


@pytest.mark.parametrize(("context", "mode"), FLOORS, ids=[f"{context}-{mode}" for context, mode in FLOORS])
def test_the_floors_of_a_4_bit_llama_8b_are_the_designs(cli: Cli, context: int, mode: str) -> None:
    args = ["--model", "llama-3.1-8b", "--weight-bits", 4, "--context", f"{context // 1024}k", "--json"]
    rows = {row["mode"]: row for row in cli("advise", *args).json["modes"]}
    assert rows[mode]["tokens_per_second"] == pytest.approx(FLOORS[context, mode], rel=0.02)
    assert rows[mode]["floor_seconds"] * rows[mode]["tokens_per_second"] == pytest.approx(1)


def test_the_weights_of_llama_8b_are_the_designs() -> None:
    assert LLAMA_8B.weight_bytes == pytest.approx(4.5e9, rel=0.01)
    assert LLAMA_8B.streamed_bytes == pytest.approx(4.22e9, rel=0.001)


BYTES = {"fp16": 23040, "int8": 11880, "turbo4": 6210}


@pytest.mark.parametrize("mode", BYTES)
def test_B78_bytes_per_token_of_smollm2(cli: Cli, mode: str) -> None:
    rows = {row["mode"]: row for row in cli("advise", "--json").json["modes"]}
    assert rows[mode]["bytes_per_token"] == BYTES[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("boundary", [0, 1], ids=["all layers", "boundary 1"])
def test_kv_bytes_are_those_of_a_cache(reference: Backend, mode: str, boundary: int) -> None:
    window = WindowPolicy(sink_tokens=4, recent_tokens=32, page_size=32, boundary_layers=boundary)
    plan = Plan(TINY, 128, 16, 1e9, dtype="float32", window=window)
    spec = CacheSpec(MODES[mode], 3, 4, 2, 64, "float32", window)
    cache = make_cache(reference, spec)
    cache.begin_decode()
    row = np.ones((1, 2, 1, 64), np.float32)
    for tokens in range(1, 101):
        for layer in cache.layers:
            layer.append(row, row)
            layer.commit()
        assert cache.stats().kv_bytes == kv_bytes(plan, MODES[mode], tokens)


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_context_fits_all_the_way_and_one_more_does_not(mode: str) -> None:
    window = WindowPolicy(sink_tokens=4, recent_tokens=32, page_size=32)
    held = MODES["fp16"] if MODES[mode].delegated else MODES[mode]
    weights = Plan(TINY, 1, 16, 1e9).weight_bytes
    for room in (0, 1, 50_000, 300_000, 333_333):
        plan = Plan(TINY, 128, 16, 1e9, batch=2, window=window, memory=int(weights) + room)
        found = largest_context(plan, MODES[mode])
        assert all(2 * kv_bytes(plan, held, n) <= room for n in range(found + 1))
        assert any(2 * kv_bytes(plan, held, n) > room for n in range(found + 2))


def test_the_largest_context_ends_at_the_models_limit() -> None:
    plan = replace(LLAMA_8B, memory=80 * 10**9)
    assert {cost.largest_context for cost in mode_costs(plan)} == {131072}


def test_memory_below_the_weights_holds_nothing_and_says_so(cli: Cli) -> None:
    outcome = cli("advise", "--model", "llama-3.1-70b", "--memory", "24GiB")
    assert "recommended: none, because that memory does not hold the weights." in outcome.out
    assert "The memory does not hold the weights." in outcome.out
    assert len({line.split()[4] for line in outcome.out.splitlines() if line.startswith(tuple(MODES))}) == 1


def test_a_batch_reads_the_weights_once() -> None:
    one, eight = mode_costs(LLAMA_8B)[0], mode_costs(replace(LLAMA_8B, batch=8))[0]
    kv_seconds = one.kv_bytes / LLAMA_8B.bandwidth
    assert eight.floor_seconds - one.floor_seconds == pytest.approx(7 * kv_seconds)
    assert eight.tokens_per_second == pytest.approx(8 / eight.floor_seconds)


def test_the_table_states_that_the_floor_is_not_measured(cli: Cli) -> None:
    out = cli("advise", "--model", "llama-3.1-8b", "--weight-bits", "4", "--memory", "24GiB").out
    assert "It is computed, not measured" in out
    assert "`kvcore doctor`" in out
    assert "bandwidth 4400 GB/s (the default: one H200), memory 24.00 GiB" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(tuple(MODES))] == list(MODES)


# The recommendation


def recommended(cli: Cli, *args: object) -> dict[str, object]:
    found = cli("advise", "--model", "llama-3.1-8b", "--weight-bits", 4, "--context", "32k", "--json", *args).json
    return dict(found["recommended"])


def test_the_fastest_faithful_mode_that_fits_is_recommended(cli: Cli) -> None:
    assert recommended(cli)["mode"] == "int8-turbo4"
    assert recommended(cli, "--max-kl", 1e-4)["mode"] == "int8"
    assert recommended(cli, "--max-kl", 0)["mode"] == "fp16"
    assert recommended(cli, "--max-kl", 0.01)["mode"] == "turbo4"


def test_memory_comes_before_fidelity(cli: Cli) -> None:
    found = recommended(cli, "--memory", "6GB")
    assert (found["mode"], found["faithful"]) == ("turbo4", False)
    assert "no mode with a KL of at most 0.0005 does" in str(found["reason"])
    none = recommended(cli, "--memory", "5GB")
    assert none["mode"] is None
    assert "no mode holds 32,768 tokens" in str(none["reason"])
    assert "recommended: none" in cli("advise", "--model", "llama-3.1-70b", "--memory", "24GiB").out


def test_its_figures_are_those_of_the_published_table() -> None:
    rows = {}
    for table in (
        "2026-11-29-fidelity-modes",
        "2026-11-30-fidelity-turbo4",
    ):  # the second is newer: turbo4 with centres
        with (ROOT / f"docs/benchmark_results/{table}.csv").open(encoding="utf-8") as file:
            rows |= {row["variant"]: row for row in csv.DictReader(file)}
    for mode, figure in FIDELITY.items():
        if mode != "fp16":
            assert figure.kl == pytest.approx(float(rows[mode]["kl"]), rel=1e-3)
            assert figure.top1 == pytest.approx(float(rows[mode]["top1"]), abs=1e-4)
    assert set(FIDELITY) == set(MODES)


# Sources


def source(cli: Cli, model: str | Path) -> tuple[ModelShape, float]:
    plan = cli("advise", "--model", model, "--json").json["plan"]
    return ModelShape(**plan["shape"]), plan["bits_per_weight"]


def test_a_folder_needs_no_weights(cli: Cli, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, dtype="bfloat16", layers=3)
    (tmp_path / "model.safetensors").unlink()
    assert source(cli, tmp_path) == (TINY, 16)


def test_a_quantized_folder_counts_scales(cli: Cli, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, dtype="bfloat16", layers=3, quantize={"bits": 4, "group_size": 32})
    assert source(cli, tmp_path) == (TINY, 5)


def test_weights_that_are_there_are_counted(cli: Cli, tmp_path: Path) -> None:
    """Modules may have formats of their own, of which the first lines of the config know nothing."""
    write_tiny_llama(tmp_path, dtype="bfloat16", layers=3, quantize={"bits": 4, "group_size": 32})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] |= {"bits": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source(cli, tmp_path) == (TINY, 5)
    (tmp_path / "model.safetensors").unlink()
    assert source(cli, tmp_path) == (TINY, 9)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8.5), ("Q4_1", 5), ("F32", 32)])
def test_a_gguf_tells_its_bits_and_whether_it_is_tied(cli: Cli, tmp_path: Path, kind: str, bits: float) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", qtype=kind, layers=3, tie=True)
    assert source(cli, path) == (replace(TINY, tie_embeddings=True), bits)


def test_a_folder_without_config_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert f"{tmp_path / 'config.json'}" in cli("advise", "--model", tmp_path).refused()


def test_a_head_size_that_turbo_cannot_store_is_said(cli: Cli, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, head_dim=36)
    report = cli("advise", "--model", tmp_path, "--json").json
    assert [row["mode"] for row in report["modes"]] == ["fp16", "int8"]
    assert "turbo4" in report["impossible"]
    assert "turbo4 is not possible: head_dim 36" in cli("advise", "--model", tmp_path).out


@pytest.mark.parametrize(
    ("bits", "counted"), [("4", 4.5), ("8", 8.5), ("4.25", 4.25), ("16", 16)], ids=lambda value: str(value)
)
def test_whole_bits_up_to_8_count_scales(cli: Cli, bits: str, counted: float) -> None:
    assert json.loads(cli("advise", "--weight-bits", bits, "--json").out)["plan"]["bits_per_weight"] == counted
