"""`kvcore cache-prompt`, and --prompt-cache on generate and chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outcome import Cli

REFERENCE = ("--backend", "reference")
TEXT = "The rivers of the north run cold. " * 9


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_a_prompt_is_run_once(cli: Cli, tiny: Path, tmp_path: Path, mode: str) -> None:
    path, common = tmp_path / "cache", ("--model", tiny, "--raw", "--kv-cache-mode", mode, *REFERENCE)
    made = cli("cache-prompt", *common, "--prompt", TEXT, "--prompt-cache", path, "--json")
    about = made.json
    assert (about["file"], about["bytes"], about["mode"]) == (str(path), path.stat().st_size, mode)
    assert f"{path}: {about['tokens']} tokens in mode {mode}" in made.err
    args = ("--prompt", TEXT + "And then?", "--max-tokens", 5, "--json")
    found = cli("generate", *common, *args, "--prompt-cache", path)
    assert found.json["stats"]["cached_tokens"] in (about["tokens"], about["tokens"] - 1)
    assert "tokens reused" in found.err
    if mode == "fp16":
        assert found.json["text"] == cli("generate", *common, *args).json["text"]


def test_the_same_prompt_again(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    path, common = tmp_path / "cache", ("--model", tiny, *REFERENCE)
    cli("cache-prompt", *common, "--prompt", "hi", "--prompt-cache", path)
    cold = cli("generate", *common, "--prompt", "hi", "--max-tokens", 5, "--json").json
    found = cli("generate", *common, "--prompt", "hi", "--max-tokens", 5, "--json", "--prompt-cache", path).json
    assert found["text"] == cold["text"]
    assert found["stats"]["cached_tokens"] == cold["stats"]["prompt_tokens"] - 1


def test_a_chat_begins_with_it(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    path, common = tmp_path / "cache", ("--model", tiny, "--system", "Be short.", *REFERENCE)
    cli("cache-prompt", *common, "--prompt", "hi", "--prompt-cache", path)
    lines = [
        cli("chat", *common, *extra, "--max-tokens", 5, "--json", stdin=b"hi\n").out
        for extra in ((), ("--prompt-cache", path))
    ]
    cold, warm = map(json.loads, lines)
    assert warm["text"] == cold["text"]
    assert (cold["stats"]["cached_tokens"], warm["stats"]["cached_tokens"]) == (0, cold["stats"]["prompt_tokens"] - 1)


def test_another_mode_is_refused_with_both(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    common = ("--model", tiny, "--prompt", "hi", "--prompt-cache", tmp_path / "cache", *REFERENCE)
    cli("cache-prompt", *common, "--kv-cache-mode", "int8")
    message = cli("generate", *common, "--kv-cache-mode", "turbo4").refused()
    assert "mode is int8 in the file and turbo4 here" in message


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("cache-prompt", ["--prompt", "hi"], "no file: give --prompt-cache FILE to write to"),
        ("cache-prompt", ["--prompt", "hi", "--prompt-cache", "no/such/file"], "there is no folder no/such"),
        ("generate", ["--prompt", "hi", "--prompt-cache", "nothing"], "--prompt-cache nothing: there is no such file"),
        ("chat", ["--prompt-cache", "nothing"], "--prompt-cache nothing: there is no such file"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    cli: Cli, tiny: Path, command: str, args: list[str], message: str
) -> None:
    assert message in cli(command, "--model", tiny, *args, *REFERENCE).refused()


def test_a_damaged_file_is_one_line(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_bytes(b"nonsense, and more of it")
    assert (
        "not a safetensors file"
        in cli("generate", "--model", tiny, "--prompt", "hi", "--prompt-cache", path, *REFERENCE).refused()
    )
