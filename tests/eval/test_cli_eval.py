"""`kvcore eval`: one command from a model to a table, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizer import write_tiny_tokenizer

from kvcore.cli import run

TINY = ("--recent-tokens", "16", "--page-size", "16", "--context", "64", "--windows", "2", "--backend", "reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import write_tiny_llama

    made = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=512)
    write_tiny_tokenizer(made)
    (made / "text.txt").write_text("the cat sat on the mat and looked at the other cat. " * 60, encoding="utf-8")
    return made


def evaluate(folder: Path, *args: object) -> int:
    return run(["eval", "--model", str(folder), "--text", str(folder / "text.txt"), *TINY, *map(str, args)])


def test_json_has_rows_and_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(folder, "--modes", "fp16,int8,kivi-4bit-g32", "--keep-raw", "own,none", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["variant"] for row in found["rows"]} == {"fp16 (noise floor)", "int8", "kivi-4bit-g32"}
    assert len(found["rows"]) == 5
    assert {"kl", "kl_low", "kl_p99", "top1", "ppl_ratio", "rms_dp", "bytes", "all_kl"} <= set(found["rows"][0])
    assert {"commit", "backend", "model", "text", "window_starts", "dtype"} <= set(found["environment"])


def test_a_budget_that_is_too_small_is_said_before_anything_is_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folder, "--modes", "int8", "--path", "pages", "--kv-cache-budget", "100K") == 1
    assert "64 tokens take 131072 bytes of cache in mode fp16, the budget is 102400" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["pages", "decode"])
def test_the_real_cache_says_what_one_pass_says(folder: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    found = {}
    for each in (path, "one-pass"):
        assert evaluate(folder, "--modes", "fp16,turbo4", "--path", each, "--json") == 0
        found[each] = {row["variant"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert found[each]["fp16 (noise floor)"]["kl"] < 1e-9
    assert found[path]["turbo4"]["kl"] == pytest.approx(found["one-pass"]["turbo4"]["kl"], rel=0.05)
    assert found[path]["turbo4"]["kl"] > 1e-5


def test_files_and_no_state_left(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert evaluate(folder, "--modes", "turbo4", "--probes", "attention", "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith("| variant | window | bytes |")
    assert "| turbo4 | 4+16/16 | 76 |" in out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *(f"fidelity.{kind}" for kind in ("md", "jsonl", "csv")),
        *(f"fidelity-attention.{kind}" for kind in ("md", "jsonl", "csv")),
        *("fidelity-bytes.png", "fidelity-position.png"),
    }


def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvcore.eval import table

    score, calls = table.score, []

    def stopped(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*args)

    monkeypatch.setattr(table, "score", stopped)
    state = tmp_path / "state.npz"
    assert evaluate(folder, "--modes", "int8,turbo4", "--state", state) == 130
    assert evaluate(folder, "--modes", "int8,turbo4", "--state", state) == 0
    assert len(calls) == 5, "two rows were done, the third was not"
    assert "2 rows are there already" in capsys.readouterr().err
    assert state.is_file()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--modes", "turbo5"], "unknown KV cache mode 'turbo5'"),
        (["--path", "fast"], "--path fast: choose one of one-pass, pages, decode"),
        (["--probes", "luck"], "--probes luck: choose among attention, greedy, retrieval"),
        (["--context", "32"], "nothing is quantized below 32 tokens"),
        (["--context", "9999"], "the model's context holds 512"),
        (["--windows", "0"], "--windows 0: must be 1 or more"),
        (["--starts", "a,b"], "--starts a,b: must be whole numbers"),
        (["--starts", "100000"], "a window at token 100000"),
        (["--keep-raw", "some"], "unknown window 'some'"),
        (["--text", "/no/such/file"], "--text /no/such/file: No such file"),
        (["--boundary-layers", "1"], "scores all layers alike"),
        (["--modes", "kivi-4bit-g32", "--path", "decode"], "score it in one pass"),
        (["--state", "/proc/none/x"], "--state /proc/none/x"),
    ],
)
def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    assert evaluate(folder, *args) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
