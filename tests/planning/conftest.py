"""Commands in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))  # for outcome

from outcome import Cli, Outcome

from kvcore.cli import run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in [name for name in os.environ if name.startswith("KVCORE_")]:
        monkeypatch.delenv(name)

    def invoke(*args: object, stdin: bytes = b"") -> Outcome:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return invoke
