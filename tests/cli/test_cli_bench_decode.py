"""`kvcore bench decode`: rows that say what ran, and models with synthetic weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from outcome import Cli
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

from kvcore.bench.random_model import MODELS, random_checkpoint
from kvcore.weights.types import AffineWeight


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "model")
    write_tiny_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("fill", ["real", "random"])
def test_rows_of_both_modes_at_each_length(cli: Cli, tiny: Path, fill: str, tmp_path: Path) -> None:
    args = ["--modes", "fp16,turbo4", "--prompt-tokens", "40,300", "--max-tokens", 3, "--repeats", 2, "--batch", 2]
    outcome = cli(
        "bench", "decode", "--backend", "reference", "--model", tiny, "--fill", fill, *args, "--out", tmp_path, "--json"
    )
    rows = outcome.json["rows"]
    assert [(row["prompt_tokens"], row["mode"]) for row in rows] == [
        (40, "fp16"), (40, "turbo4"), (300, "fp16"), (300, "turbo4"),
    ]  # fmt: skip
    for row in rows:
        assert row["effective_mode"] == row["mode"]
        assert row["kernels"] == "encode-graph attend-graph"
        assert (row["step"], row["batch"], row["fill"]) == ("host", 2, fill)
        assert row["rows_folded"] == (128 if (row["mode"], row["prompt_tokens"]) == ("turbo4", 300) else 0)
        assert row["decode_ms_p10"] <= row["decode_ms"] <= row["decode_ms_p90"]
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["decode_ms"])
        assert (row["ttft_ms"] is None) == (fill == "random")
    assert rows[0]["ratio_to_fp16"] == 1
    assert rows[3]["kv_bytes"] < rows[2]["kv_bytes"]
    written = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
    assert [row["mode"] for row in written] == [row["mode"] for row in rows]
    assert (tmp_path / "decode.csv").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fill", "zeros"], "--fill zeros: choose real or random"),
        (["--random-model", "gpt-5"], "unknown random model 'gpt-5': choose one of llama-3.1-8b-4bit"),
        (["--random-model", "smollm2-135m", "--model", "x"], "--model x and --random-model smollm2-135m: choose one"),
        (["--batch", "0"], "--batch 0: must be 1 or more"),
        (["--random-model", "smollm2-135m", "--prompt-tokens", "8192", "--modes", "int8"], "context holds 8192 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(cli: Cli, args: list[str], message: str) -> None:
    assert message in cli("bench", "decode", "--backend", "reference", *args).refused()


@pytest.mark.parametrize("name", MODELS)
def test_synthetic_weights_keep_the_size_of_activations(name: str) -> None:
    checkpoint = random_checkpoint(name, layers=1)
    weight = checkpoint.load("model.layers.0.mlp.down_proj.weight")
    assert weight.shape == (checkpoint.config.hidden_size, checkpoint.config.intermediate_size)
    assert isinstance(weight, AffineWeight) == name.endswith("4bit")
    rows = weight.rows(slice(0, 64)).dequantize() if isinstance(weight, AffineWeight) else weight.dequantize()[:64]
    assert rows.std() * np.sqrt(rows.shape[1]) == pytest.approx(1, rel=0.03)
    assert abs(rows.mean()) < 0.1 * rows.std()
    assert not np.array_equal(rows[0], rows[1])
