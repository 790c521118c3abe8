"""The benchmark of a decode step inside transformers, with a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from kvcore.errors import BackendError
from kvcore.integrations.transformers import KVCache, bench

pytestmark = pytest.mark.xdist_group("transformers")

TINY = bench.Setting(2, 280, 2, 2, 1, 64, 64, "float32", "cpu")


def test_one_row_for_each_cache_after_stocks() -> None:
    said: list[str] = []
    rows = bench.run(TINY, ["fp16", "int8", "turbo4"], repeats=2, progress=said.append)
    names = [row["cache"] for row in rows]
    assert names[:4] == ["DynamicCache", "kvcore fp16", "kvcore int8", "kvcore turbo4"]
    stock, fp16, int8, turbo4 = rows[:4]
    assert stock["speedup"] == 1.0
    assert fp16["logits_difference"] < 1e-5 < int8["logits_difference"] < turbo4["logits_difference"] < 0.5
    assert turbo4["kv_mib"] < int8["kv_mib"] < fp16["kv_mib"] == stock["kv_mib"]
    assert [row["kernel"] for row in rows[:4]] == ["", *["attend-graph"] * 3]
    assert all(set(bench.COLUMNS) <= set(row) and row["step_ms"] > 0 and row["repeats"] == 2 for row in rows)
    # Each of transformers' quantized caches has a row, or a line that says why not.
    for backend in ("quanto", "hqq", "fp8"):
        assert any(backend in name for name in names) or any(backend in line and "left out" in line for line in said)


@pytest.mark.parametrize("cudnn", [True, False])
def test_a_step_may_be_kept_from_cudnn(cudnn: bool) -> None:
    """A row of its own on a GPU."""
    seen: list[bool] = []

    def model(**_: object) -> SimpleNamespace:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return SimpleNamespace(logits=torch.zeros(1))

    bench._step(model, bench.Contender("DynamicCache", "sdpa", None, cudnn=cudnn), torch.zeros(1, 1))
    assert seen == [cudnn]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_failing_cache_of_transformers_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "stock_quantized_caches", lambda config: iter([("QuantizedCache odd", object(), "")]))
    said: list[str] = []
    rows = bench.run(replace(TINY, tokens=20), ["fp16"], repeats=1, progress=said.append)
    assert [row["cache"] for row in rows] == ["DynamicCache", "kvcore fp16"]
    assert any(line.startswith("QuantizedCache odd: left out, ") for line in said)


def test_a_failure_of_our_own_is_none_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(KVCache, "open", broken)
    with pytest.raises(RuntimeError, match="broken"):
        bench.run(replace(TINY, tokens=20), ["fp16"], repeats=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU here")
def test_without_a_gpu_it_says_so_before_anything_is_built() -> None:
    with pytest.raises(BackendError, match="sees no NVIDIA GPU; use --device cpu"):
        bench.run(replace(TINY, device="cuda"), ["fp16"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3/2/64"], "--heads 3/2/64: 3 query heads are no multiple of 2 KV heads"),
        (["--bench-dtype", "int8"], "--bench-dtype int8: choose float16, bfloat16 or float32"),
        (["--device", "tpu"], "--device tpu: choose cuda, cuda:N or cpu"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "kvcore", "bench", "transformers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"kvcore: error: {words}"]


@pytest.mark.full
def test_the_command_prints_json() -> None:
    shape = ["--layers", "1", "--context", "40", "--heads", "2/1/64", "--vocab", "64", "--bench-dtype", "float32"]
    command = [sys.executable, "-m", "kvcore", "bench", "transformers", "--device", "cpu", "--json", *shape]
    done = subprocess.run([*command, "--modes", "turbo4"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["environment"]["model"] == "random llama, 1 layers, 2/1 D64"
    assert [row["cache"] for row in report["rows"]][:2] == ["DynamicCache", "kvcore turbo4"]
