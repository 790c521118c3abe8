"""`kvcore bench decode`: rows that say what ran, and models with synthetic weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from outcome import Cli
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.bench import decode
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
        (["--peer", "vllm"], "--peer vllm: choose none or transformers"),
        (
            ["--peer", "transformers", "--prompt-tokens", "40"],
            "--peer transformers runs on torch: use --backend cuda, with --device cpu",
        ),
        (["--random-model", "smollm2-135m", "--prompt-tokens", "8192", "--modes", "int8"], "context holds 8192 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(cli: Cli, args: list[str], message: str) -> None:
    assert message in cli("bench", "decode", "--backend", "reference", *args).refused()


def test_a_row_that_does_not_fit_costs_no_other(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = decode._filled

    def scarce(subject: decode.Subject, settings: decode.Settings, mode: str, tokens: int) -> decode._Run:
        if mode == "fp16" and tokens > 40:
            raise MemoryError("no room")
        return filled(subject, settings, mode, tokens)

    monkeypatch.setattr(decode, "_filled", scarce)
    args = ["--backend", "reference", "--model", tiny, "--max-tokens", 2, "--repeats", 1, "--json"]
    outcome = cli("bench", "decode", *args, "--modes", "fp16,turbo4", "--prompt-tokens", "40,50")
    assert "1 x 50 tokens, fp16: left out, out of memory" in outcome.err
    rows = outcome.json["rows"]
    assert [(row["prompt_tokens"], row["mode"]) for row in rows] == [(40, "fp16"), (40, "turbo4"), (50, "turbo4")]
    assert rows[2]["ratio_to_fp16"] is None
    failed = cli("bench", "decode", *args, "--modes", "fp16", "--prompt-tokens", "50")
    assert failed.code == 1


@pytest.fixture
def subject(tiny: Path) -> decode.Subject:
    return decode.Subject.of(kvcore.load(tiny, backend="reference"))


def measured(tokens: int, batch: int, steps: int) -> decode.Measured:
    """10 ms a step, of which memory takes half where it gives as much as `Settings` of the test say."""
    if tokens == 50:
        raise RuntimeError("out of memory\nand more")
    return decode.Measured("theirs", "their loop", "bfloat16", 0.5, [0.01] * steps, 1000 * tokens * batch, 16.0, 7)


def test_a_peer_s_row_follows_those_of_its_length(subject: decode.Subject) -> None:
    settings = decode.Settings(["fp16"], [40, 50, 40000], batch=2, max_tokens=99, bandwidth=1e6)
    ours = [{"mode": "fp16", "prompt_tokens": tokens, "decode_ms": 5.0} for tokens in settings.prompt_tokens]
    said: list[str] = []
    rows, absent = decode.with_peer(subject, settings, ours, "transformers", measured, said.append)
    assert [(row["prompt_tokens"], row["mode"]) for row in rows] == [
        (40, "fp16"), (40, "fp16 (transformers)"), (50, "fp16"), (40000, "fp16"),
    ]  # fmt: skip
    assert absent == ["no row for 50 tokens, RuntimeError: out of memory", "no row for 40000 tokens, more than 32768"]
    assert {f"transformers: {words}" for words in absent} < set(said)
    row = rows[1]
    assert set(decode.COLUMNS) <= set(row)
    assert (row["effective_mode"], row["kernels"], row["step"], row["dtype"]) == (
        "fp16", "theirs", "their loop", "bfloat16",
    )  # fmt: skip
    assert (row["new_tokens"], row["kv_bytes"], row["peak_bytes"], row["fill"]) == (32, 80000, 7, "real")
    assert (row["prefill_tokens_per_s"], row["ttft_ms"]) == (160, 500)
    assert (row["decode_ms"], row["tokens_per_s"], row["ratio_to_fp16"]) == pytest.approx((10, 200, 0.5))
    weights = subject.weight_bytes(16.0)
    assert weights == subject.weight_bytes() / 2  # the subject computes in float32
    assert row["floor_percent"] == pytest.approx(100 * (weights + 80000) / 1e6 / 0.01)


@pytest.mark.xdist_group("transformers")
def test_transformers_own_loop_on_the_same_shape(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    args = ["--modes", "fp16", "--prompt-tokens", "40,70", "--max-tokens", 3, "--repeats", 1, "--batch", 2]
    outcome = cli(
        "bench", "decode", "--backend", "cuda", "--device", "cpu", "--model", tiny, *args, "--peer", "transformers",
        "--out", tmp_path, "--json",
    )  # fmt: skip
    rows = outcome.json["rows"]
    assert [row["mode"] for row in rows] == ["fp16", "fp16 (transformers)"] * 2
    assert outcome.json["environment"]["peer"].endswith(", bf16 weights")
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert theirs["kernels"] == "transformers DynamicCache, sdpa, bf16 weights"
        assert theirs["step"] == "transformers generate"
        assert (theirs["new_tokens"], theirs["prompt_tokens"]) == (3, ours["prompt_tokens"])
        assert theirs["kv_bytes"] == ours["kv_bytes"] / 2  # ours are in float32
        assert theirs["decode_ms"] > 0 < theirs["prefill_tokens_per_s"]
        assert theirs["ratio_to_fp16"] == pytest.approx(ours["decode_ms"] / theirs["decode_ms"])
    assert "fp16 (transformers)" in (tmp_path / "decode.csv").read_text()


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
