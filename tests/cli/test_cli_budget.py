"""--kv-cache-budget on the command line, and answers that end where memory does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outcome import Cli

import kvcore
from kvcore.cache import RowBuffer
from kvcore.cli.sizes import parse_size
from kvcore.errors import InputError
from kvcore.modes import MODES

REFERENCE = ("--backend", "reference")
ROW = 2 * 2 * 2 * 64 * 4  # bytes of one token in the tiny model's fp16 cache with float32 rows


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("2K", 2048),
        ("1.5M", 3 << 19),
        ("3G", 3 << 30),
        ("4KiB", 4096),
        ("4 MiB", 4 << 20),
        ("4KB", 4000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--x", text, example="1") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "K", "1X", "0.0001", "1e9", "nan", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match=r"^--x .*: give a number of bytes, or one with a unit, such as 2G"):
        parse_size("--x", text, example="2G")


@pytest.mark.parametrize("mode", MODES)
def test_B132_a_prompt_beyond_the_budget_is_refused_before_it_runs(cli: Cli, tiny: Path, mode: str) -> None:
    args = ["--model", tiny, "--raw", "--kv-cache-mode", mode, *REFERENCE]
    message = cli("generate", *args, "--prompt", "x" * 200, "--kv-cache-budget", 50 * ROW).refused(1)
    assert f"of cache in mode {mode}, the budget is {50 * ROW} bytes and holds 50 tokens" in message
    assert message.split(" tokens take ")[0].isdecimal()
    found = cli("generate", *args, "--prompt", "x", "--max-tokens", 5, "--kv-cache-budget", 50 * ROW, "--json").json
    assert found["stats"]["generation_tokens"] > 0
    assert found["cache"]["kv_bytes_allocated"] <= 50 * ROW


def test_B132_growth_beyond_the_budget_ends_the_answer(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--raw", "--prompt", "x" * 20, "--max-tokens", 10**6, *REFERENCE]
    outcome = cli("generate", *args, "--kv-cache-budget", 60 * ROW, "--json")
    found = outcome.json
    free = cli("generate", *args[:-2], *REFERENCE, "--max-tokens", found["stats"]["generation_tokens"], "--json").json
    assert found["finish_reason"] == "length"
    assert found["stats"]["prompt_tokens"] + found["stats"]["generation_tokens"] == 61
    assert (found["text"], found["token_ids"]) == (free["text"], free["token_ids"])
    assert "the answer ends after " in outcome.err
    assert found["notices"][-1].endswith("a --max-kv-size or fewer tokens")
    assert found["cache"]["kv_bytes_allocated"] == 60 * ROW


def test_a_cap_makes_any_prompt_fit(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--raw", "--prompt", "x" * 300, "--max-tokens", 90, "--max-kv-size", 64, "--json"]
    found = cli("generate", *args, *REFERENCE, "--kv-cache-budget", 200 * ROW).json
    assert found["cache"]["tokens"] == 64
    assert found["cache"]["kv_bytes_allocated"] <= 200 * ROW


def test_a_chat_says_that_the_budget_is_full(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--max-tokens", 60, "--kv-cache-budget", 70 * ROW, *REFERENCE]
    outcome = cli("chat", *args, stdin=b"one two three\nfour five\n/reset\nhi\n")
    assert "the answer ends after " in outcome.err
    assert "--kv-cache-budget of 71 tokens is full: /reset starts a new one" in outcome.err
    assert "with this message the conversation has" in outcome.err
    assert outcome.err.count("finish:") == 2


def test_a_prompt_cache_within_a_budget(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    args = ["--model", tiny, "--raw", "--prompt", "x" * 90, "--prompt-cache", tmp_path / "cache", *REFERENCE]
    assert "91 tokens take" in cli("cache-prompt", *args, "--kv-cache-budget", 50 * ROW).refused(1)
    assert list(tmp_path.iterdir()) == []
    made = cli("cache-prompt", *args, "--json", "--kv-cache-budget", 100 * ROW).json
    assert made["tokens"] == 91
    assert "91 tokens take" in cli("generate", *args, "--kv-cache-budget", 50 * ROW).refused(1)


@pytest.mark.parametrize("command", ["generate", "chat", "cache-prompt", "eval"])
def test_a_budget_that_is_no_size(cli: Cli, tiny: Path, command: str) -> None:
    args = [] if command in ("chat", "eval") else ["--prompt", "hi"]
    message = cli(command, "--model", tiny, *args, "--kv-cache-budget", "much", *REFERENCE).refused()
    assert message.startswith("--kv-cache-budget much: give a number of bytes")


def test_memory_that_ends_in_the_middle_of_an_answer(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was said stays said, and the cache can be used."""
    model = kvcore.load(tiny, backend="reference")
    prompt, move = list(range(5, 255)), RowBuffer._move

    def full(buffer: RowBuffer, capacity: int) -> Any:
        if capacity > 300:
            raise MemoryError("Unable to allocate 9 GiB")
        return move(buffer, capacity)

    monkeypatch.setattr(RowBuffer, "_move", full)
    generation = model.generate(prompt, kvcore.SamplingParams(max_tokens=30))
    assert "".join(generation) == generation.text
    assert (generation.finish_reason, generation.cache.tokens) == ("length", 256)
    assert generation.notice == (
        f"the answer ends after {len(generation.token_ids)} tokens for lack of memory: Unable to allocate 9 GiB"
    )
    monkeypatch.undo()
    assert json.dumps(generation.token_ids) == json.dumps(_tokens(model, prompt, len(generation.token_ids))), (
        "the same tokens as with memory"
    )


def _tokens(model: kvcore.Model, prompt: list[int], count: int) -> list[int]:
    generation = model.generate(prompt, kvcore.SamplingParams(max_tokens=count))
    "".join(generation)
    return generation.token_ids
