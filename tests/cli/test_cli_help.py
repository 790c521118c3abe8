"""Help: fast, complete, and what the environment can set."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, get_type_hints

import pytest
from outcome import Cli

import kvcore
from kvcore.cli import options
from kvcore.modes import MODES

COMMANDS = ("generate", "chat", "serve", "doctor", "advise", "convert", "eval")


def declared() -> Iterator[tuple[Field[Any], Any]]:
    """Every option's field and declaration."""
    for group in vars(options).values():
        if isinstance(group, type) and group.__module__ == options.__name__:
            hints = get_type_hints(group, include_extras=True)
            yield from ((field, hints[field.name].__metadata__[0]) for field in fields(group))


def test_help_imports_nothing_that_a_command_needs() -> None:
    program = "import sys; from kvcore.cli import run; run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "typer" in loaded
    assert loaded.isdisjoint(
        {"numpy", "tokenizers", "gguf", "torch", "mlx", "transformers", "fastapi", "uvicorn", "httpx"}
    )


@pytest.mark.parametrize("args", [(), ("--help",)], ids=["no arguments", "help"])
def test_help_lists_the_commands(cli: Cli, args: tuple[str, ...]) -> None:
    outcome = cli(*args)
    assert outcome.code == 0
    assert all(f"  {command} " in outcome.out for command in COMMANDS)
    assert "..." not in outcome.out.split("Commands:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"Usage: kvcore {command} [OPTIONS]")


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"kvcore {kvcore.__version__}\n"


def test_help_lists_every_mode() -> None:
    assert set(options.MODES.split(", ")) == set(MODES)


def test_every_flag_has_its_variable_and_help() -> None:
    for field, option in declared():
        (name,) = option.param_decls if option.default is ... else (option.default,)
        assert name == f"--{field.name.replace('_', '-')}"
        expected = None if name == "--stop" else f"KVCORE_{field.name.upper()}"  # --stop reads KVCORE_STOP itself
        assert option.envvar == expected
        assert option.help
