"""`kvcore bench linear`: its checks and its table, with times made up; interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

import kvcore.bench.linear as bench
from kvcore.bench import report
from kvcore.bench.random_model import RandomCheckpoint
from kvcore.errors import InputError, KvcoreError
from kvcore.models.config import LlamaConfig
from kvcore.weights.types import AffineWeight

COPIES = 10_000  # bytes that every replay reads at least


def checkpoint(bits: int = 4, **settings: Any) -> RandomCheckpoint:
    config = {
        "model_type": "llama",
        "vocab_size": 192,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float16" if bits == 4 else "bfloat16",
    }
    return RandomCheckpoint(LlamaConfig.from_hf(config | settings, "tiny"), bits)


@pytest.fixture(autouse=True)
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant's time is 10 ms for the first, 20 for the second, and so on; memory gives 2 TB/s."""

    def interleaved(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
        return [[10.0 * (i + 1)] * repeats for i in range(len(runs))]

    monkeypatch.setattr(bench, "interleaved", interleaved)
    monkeypatch.setattr(bench, "read_ceiling", lambda: 2.0)


@pytest.fixture
def int4(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's int4 product as its CUDA kernel defines it, in plain operations."""

    def pack(pairs: Any, tiles: int) -> Any:
        assert (pairs.dtype, tiles, pairs.is_contiguous()) == (torch.uint8, 8, True)
        return torch.stack([pairs >> 4, pairs & 15], -1).flatten(1)

    def times(x: Any, codes: Any, group: int, sides: Any) -> Any:
        assert (x.dtype, sides.dtype, group) == (torch.bfloat16, torch.bfloat16, 64)
        scales, zeros = sides.float().transpose(0, 1).repeat_interleave(group, 1).unbind(-1)
        return (x.float() @ ((codes.float() - 8) * scales + zeros).T).bfloat16()

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", pack)
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", times)


def run(model: RandomCheckpoint, rows: Sequence[int], device: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    return bench.run(model, rows, repeats=3, device=device, cold=COPIES)


def test_a_row_for_each_layer_and_a_sum_for_each_number_of_rows(int4: None, device: str, tmp_path: Path) -> None:
    rows, notes = run(checkpoint(), [1, 2], device)
    layers = ["qkv", "o", "gate/up", "down", "head"]
    assert [(row["layer"], row["rows"]) for row in rows] == [
        *((layer, count) for layer in layers for count in (1, 2)), ("all", 1), ("all", 2),
    ]  # fmt: skip
    assert notes == {f"peer {name}": words for name, words in bench.PEERS.items()}
    first, second = rows[2], rows[3]
    assert (first["copies"], first["count"], first["outputs"], first["inputs"]) == (2, 3, 128, 128)
    assert first["bytes"] == 128 * 128 * 9 // 16
    times = [first["us"], first["us_int4"], first["us_cublas"], second["us"]]
    assert times == pytest.approx([10e3 / 2, 20e3, 30e3, 40e3 / 2])  # a copy of int4's stand-in is larger
    assert first["tb_per_s"] == pytest.approx(first["bytes"] / first["us"] / 1e6)
    assert first["percent_of_read"] == pytest.approx(100 * first["tb_per_s"] / 2)
    assert first["ms"] == pytest.approx(3 * first["us"] / 1e3)
    assert "+" in first["config"]
    assert second["config"].endswith(" wide")
    assert first["floor_ms"] == pytest.approx(3 * first["bytes"] / 2e9)
    assert all(0 < row["error"] < 1e-3 for row in rows)
    assert all(0 < row["error_int4"] < 1e-2 for row in rows[:-2])
    total = rows[-2]
    mine = [row for row in rows[:-2] if row["rows"] == 1]
    for key in ("ms", "ms_int4", "ms_cublas", "floor_ms"):
        assert total[key] == pytest.approx(sum(row[key] for row in mine))
    assert total["count"] == 13
    assert total["percent_of_read"] == pytest.approx(100 * total["floor_ms"] / total["ms"])
    assert all(set(bench.COLUMNS) <= set(row) for row in rows)
    report.write(tmp_path, "linear", notes, rows, bench.COLUMNS)
    header, *lines = (tmp_path / "linear.csv").read_text().splitlines()
    assert set(bench.COLUMNS) <= set(header.split(","))
    assert len(lines) == len(rows)


@pytest.mark.gpu
def test_torch_s_own_int4_product_is_right(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs an NVIDIA GPU")
    rows, notes = run(checkpoint(), [1, 16], device)
    assert notes == {f"peer {name}": words for name, words in bench.PEERS.items()}
    assert all(0 < row["error_int4"] < 1e-2 for row in rows[:-2])


def test_dense_weights_have_one_peer_and_a_reason(device: str) -> None:
    rows, notes = run(checkpoint(16, tie_word_embeddings=True), [9], device)
    assert {row["us_int4"] for row in rows} == {None}
    assert None not in {row["us_cublas"] for row in rows[:-1]}
    assert rows[-1]["ms_int4"] is None
    assert rows[-1]["ms_cublas"] > 0
    assert notes["peer int4"] == "none for head: the weights have no 4 bits"
    assert {row["dtype"] for row in rows} == {"bfloat16"}


def test_a_peer_that_fails_is_a_line_and_not_an_abort(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise NotImplementedError("Could not run 'aten::_convert_weight_to_int4pack'\nwith arguments")

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", missing)
    monkeypatch.setattr(bench.F, "linear", lambda x, weight: x @ weight.T * 1.1)
    rows, notes = run(checkpoint(), [1], device)
    assert {row["us_int4"] for row in rows} == {row["us_cublas"] for row in rows} == {None}
    assert notes["peer int4"] == (
        "none for head: NotImplementedError: Could not run 'aten::_convert_weight_to_int4pack'"
    )
    assert notes["peer cublas"] == "none for head: error 1.0e-01 exceeds 2e-02: not timed"
    assert "| – |" in report.markdown(rows, bench.COLUMNS)


@pytest.mark.parametrize("part", ["norm", "added"])
def test_a_wrong_result_is_not_timed(part: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.linear_tiles
    monkeypatch.setattr(bench, "linear_tiles", lambda *args, **parts: real(*args, **(parts | {part: None})))
    name = "qkv" if part == "norm" else "o"
    with pytest.raises(KvcoreError, match=rf"{name}, 1 rows: error .* exceeds 2.0e-03: not timed"):
        run(checkpoint(), [1], device)


def test_more_rows_than_the_kernel_takes_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="--rows 65: the kernels take at most 64"):
        run(checkpoint(), [1, 65], device)


def test_codes_are_those_of_the_weight() -> None:
    weight = next(iter(bench.layers(checkpoint()))).weights[0]
    assert isinstance(weight, AffineWeight)
    matrix = bench.Matrix.of([weight], torch.float16, "cpu")
    np.testing.assert_array_equal(matrix.values.numpy(), weight.unpacked())
    np.testing.assert_allclose(torch.cat(list(matrix.dense(torch.float32))).numpy(), weight.dequantize(), rtol=1e-6)
