"""--max-kv-size, --keep and --context-shift on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outcome import Cli

REFERENCE = ("--backend", "reference")


def test_a_cap_holds(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--raw", "--prompt", "x" * 120, "--max-tokens", 5, "--json", *REFERENCE]
    outcome = cli("generate", *args, "--max-kv-size", 64, "--kv-cache-mode", "int8")
    assert outcome.json["cache"]["tokens"] == 64
    assert "--max-kv-size 64 is below 260 (sink, recent and page tokens): rows of mode int8 stay raw" in outcome.err
    assert outcome.err.count("stay raw") == 1


def test_without_a_shift_the_answer_ends_there(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--raw", "--prompt", "x" * 20, "--max-kv-size", 30, "--context-shift", "off", *REFERENCE]
    found = cli("generate", *args, "--json").json
    assert found["finish_reason"] == "length"
    assert found["stats"]["prompt_tokens"] + found["stats"]["generation_tokens"] == 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-kv-size", 4], "keep 4: must be below max_kv_size 4"),
        (["--max-kv-size", 0], "max_kv_size 0: must be 1 or more"),
        (["--max-kv-size", 9, "--keep", -1], "keep -1: must be 0 or more"),
        (["--context-shift", "maybe"], "--context-shift maybe: choose on or off"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_caps_that_cannot_be(cli: Cli, tiny: Path, command: str, args: list[object], message: str) -> None:
    prompt = ["--prompt", "hi"] if command == "generate" else []
    assert message in cli(command, "--model", tiny, *prompt, *args, *REFERENCE).refused()


def test_a_chat_shifts(cli: Cli, tiny: Path) -> None:
    """Turns beyond the cap: the conversation goes on, and what the cache lacks of it is not asked of it."""
    args = ["--model", tiny, "--json", "--max-tokens", 12, "--max-kv-size", 60, *REFERENCE]
    outcome = cli("chat", *args, stdin=b"one two three\nfour five\nsix seven\n")
    answers = [json.loads(line) for line in outcome.out.splitlines()]
    assert len(answers) == 3
    assert answers[-1]["cache"]["tokens"] == 60
    assert answers[-1]["stats"]["prompt_tokens"] > 60
    assert answers[-1]["stats"]["cached_tokens"] > 0


def test_a_chat_without_a_shift_says_that_it_is_full(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--max-tokens", 50, "--max-kv-size", 60, "--context-shift", "off", *REFERENCE]
    outcome = cli("chat", *args, stdin=b"one two three\nfour five\n")
    assert "--max-kv-size without a context shift of 60 tokens is full: /reset starts a new one" in outcome.err
    assert "--max-kv-size without a context shift holds 60" in outcome.err


def test_settings_without_effect_are_said(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--prompt", "hi", "--max-tokens", 2, "--verbose", "--keep", 9, *REFERENCE]
    assert "ignored: --keep, --context-shift: no effect without --max-kv-size" in cli("generate", *args).err
