"""`kvcore chat`: one cache over the turns, Ctrl-C, the end of the context."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outcome import Cli, Outcome

import kvcore
from kvcore.cache import Cache
from kvcore.cli.chat import Lines
from kvcore.modes import MODES
from kvcore.runtime import Model

LINES = ["hello there", "what do you know of rivers?", "and of mountains?", "of the sea", "thanks", "bye"]
REFERENCE = ("--backend", "reference", "--max-tokens", "12", "--json")


def talk(cli: Cli, model: Path, lines: list[str], *flags: str) -> tuple[list[dict[str, Any]], Outcome]:
    """The JSON object of each answer."""
    stdin = "".join(f"{line}\n" for line in lines).encode()
    outcome = cli("chat", "--model", model, *REFERENCE, *flags, stdin=stdin)
    assert outcome.code == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()], outcome


def cold_answers(model: Path, lines: list[str]) -> list[list[int]]:
    """Token ids of each answer where every turn begins with an empty cache."""
    loaded = kvcore.load(model, backend="reference")
    messages: list[dict[str, str]] = []
    answers = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        generation = loaded.generate(messages, kvcore.SamplingParams(max_tokens=12))
        text = "".join(generation)
        messages.append({"role": "assistant", "content": text})
        answers.append(generation.token_ids)
    return answers


def test_B120_each_turn_equals_its_cold_run_and_runs_only_what_is_new(cli: Cli, tiny: Path) -> None:
    answers, _ = talk(cli, tiny, LINES)
    assert [answer["token_ids"] for answer in answers] == cold_answers(tiny, LINES)
    cached = [answer["stats"]["cached_tokens"] for answer in answers]
    prompts = [answer["stats"]["prompt_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached == sorted(cached)
    assert all(now >= before for now, before in zip(cached[1:], prompts, strict=False))  # a prompt is kept whole


@pytest.mark.parametrize("mode", MODES)
def test_B120_six_turns_in_each_mode_with_pages(cli: Cli, tiny: Path, mode: str) -> None:
    window = ("--recent-tokens", "32", "--page-size", "32")
    answers, _ = talk(cli, tiny, LINES, "--kv-cache-mode", mode, *window)
    cached = [answer["stats"]["cached_tokens"] for answer in answers]
    assert len(answers) == 6
    assert cached == sorted(cached)
    assert (answers[-1]["cache"]["rows_folded"] > 0) == MODES[mode].quantized
    last = answers[-1]
    assert last["cache"]["tokens"] == last["stats"]["prompt_tokens"] + last["stats"]["generation_tokens"] - 1


def test_the_system_message_stays_after_reset(cli: Cli, tiny: Path) -> None:
    answers, outcome = talk(cli, tiny, ["hello", "more", "/reset", "hello"], "--system", "Be brief.")
    assert answers[2]["token_ids"] == answers[0]["token_ids"]
    assert answers[2]["stats"]["cached_tokens"] == 0
    assert answers[2]["stats"]["prompt_tokens"] == answers[0]["stats"]["prompt_tokens"]
    assert "kvcore: a new conversation begins" in outcome.err


def test_commands_and_empty_lines_are_no_messages(cli: Cli, tiny: Path) -> None:
    answers, outcome = talk(cli, tiny, ["", "/stats", "/what now", "hello", "/exit", "never read"])
    assert len(answers) == 1
    assert "cache: mode fp16 (requested fp16), 0.00 MiB for 0 tokens" in outcome.err
    assert "unknown command /what: /reset starts a new conversation" in outcome.err


def test_text_is_streamed_without_json(cli: Cli, tiny: Path) -> None:
    expected, _ = talk(cli, tiny, ["hello"])
    outcome = cli("chat", "--model", tiny, "--max-tokens", 12, "--backend", "reference", stdin=b"hello")
    text = expected[0]["text"]
    assert outcome.out == (text if text.endswith("\n") else f"{text}\n")


def test_without_a_template_turns_are_plain_text_and_that_is_said(cli: Cli, short: Path) -> None:
    answers, outcome = talk(cli, short, ["ab", "cd"])
    assert "has no chat template" in outcome.err
    model = kvcore.load(short, backend="reference")
    text = f"ab\n{answers[0]['text']}\ncd"
    assert answers[1]["stats"]["prompt_tokens"] == len(model.encode(text, raw=True))


def test_the_end_of_the_context_is_a_message_and_reset_helps(cli: Cli, short: Path) -> None:
    answers, outcome = talk(cli, short, ["\x07" * 60, "\x07" * 70, "\x07" * 200, "/reset", "\x07" * 60])
    assert [answer["token_ids"] for answer in answers] == [answers[0]["token_ids"]] * 2
    refused = [line for line in outcome.err.splitlines() if "error" in line]
    assert len(refused) == 2
    assert all("the model's context holds 128: /reset starts a new one" in line for line in refused)
    assert "with this message the conversation has 201 tokens" not in refused[0]
    assert "Traceback" not in outcome.err


def test_an_answer_that_fills_the_context_says_so(cli: Cli, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "eos_token_ids", frozenset())
    answers, outcome = talk(cli, short, ["\x07" * 120])
    assert (answers[0]["finish_reason"], answers[0]["stats"]["generation_tokens"]) == ("length", 7)
    assert "the model's context of 128 tokens is full: /reset starts a new one" in outcome.err


def test_B52_a_line_that_is_not_utf8_names_its_byte(cli: Cli, tiny: Path) -> None:
    outcome = cli("chat", "--model", tiny, *REFERENCE, stdin=b"/stats\n\xff\n")
    assert outcome.code == 2
    assert "standard input is not UTF-8: byte 7 is 0xff" in outcome.err.splitlines()[-1]


# Ctrl-C


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C comes ``times`` times while the model runs step number ``step``, counted from 1."""
    run: Callable[[Model, Sequence[int], Cache], np.ndarray] = Model._step
    calls = 0

    def counted(model: Model, ids: Sequence[int], cache: Cache) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return run(model, ids, cache)

    monkeypatch.setattr(Model, "_step", counted)


def answers_after(model: Path, messages: list[dict[str, str]]) -> list[int]:
    generation = kvcore.load(model, backend="reference").generate(messages, kvcore.SamplingParams(max_tokens=12))
    list(generation)
    return generation.token_ids


def test_ctrl_c_ends_the_answer_and_the_next_turn_is_right(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(4, monkeypatch)
    (first, second), _ = talk(cli, tiny, LINES[:2])
    assert (first["finish_reason"], first["stats"]["generation_tokens"]) == ("cancelled", 4)
    messages = [
        {"role": "user", "content": LINES[0]},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": LINES[1]},
    ]
    assert second["stats"]["cached_tokens"] > 0
    assert second["token_ids"] == answers_after(tiny, messages)


def test_ctrl_c_in_a_long_prompt_drops_the_turn(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(2, monkeypatch)
    (first, second), _ = talk(cli, tiny, [LINES[1], LINES[0]], "--prefill-step-size", "4")
    assert (first["finish_reason"], first["token_ids"], first["cache"]["tokens"]) == ("cancelled", [], 8)
    assert second["token_ids"] == answers_after(tiny, [{"role": "user", "content": LINES[0]}])


def test_a_second_ctrl_c_forgets_the_turn_at_once(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(3, monkeypatch, times=2)
    answers, outcome = talk(cli, tiny, LINES[:2])
    assert "kvcore: interrupted: this turn is forgotten" in outcome.err
    assert len(answers) == 1
    assert answers[0]["stats"]["cached_tokens"] == 0
    assert answers[0]["token_ids"] == answers_after(tiny, [{"role": "user", "content": LINES[1]}])


@pytest.mark.parametrize(
    ("events", "code", "hints"),
    [
        ([KeyboardInterrupt, KeyboardInterrupt, None], 130, 1),
        ([KeyboardInterrupt, "", KeyboardInterrupt, None], 0, 2),
        ([None], 0, 0),
    ],
    ids=["twice", "a line between", "Ctrl-D"],
)
def test_ctrl_c_at_the_prompt_leaves_the_second_time(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any], code: int, hints: int
) -> None:
    def read(_: Lines) -> str | None:
        event = events.pop(0)
        if event is KeyboardInterrupt:
            raise KeyboardInterrupt
        assert event is None or isinstance(event, str)
        return event

    monkeypatch.setattr(Lines, "read", read)
    outcome = cli("chat", "--model", tiny, *REFERENCE)
    assert outcome.code == code
    assert events == ([None] if code else [])
    assert outcome.err.count("Ctrl-C once more leaves") == hints
