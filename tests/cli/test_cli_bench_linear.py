"""`kvcore bench linear`: what it refuses, and what it says without an NVIDIA GPU."""

from __future__ import annotations

import pytest
from outcome import Cli

torch = pytest.importorskip("torch", reason="the package torch is not installed")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--random-model", "gpt-5"], "unknown random model 'gpt-5': choose one of llama-3.1-8b-4bit"),
        (["--rows", "0,4"], "--rows 0,4: must be whole numbers from 1, comma-separated"),
        (["--repeats", "0"], "--repeats 0: must be 1 or more"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, args: list[str], message: str) -> None:
    assert message in cli("bench", "linear", *args).refused()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: nox -s bench-cuda runs the benchmark")
@pytest.mark.parametrize("name", ["linear", "attention", "cache"])
def test_without_a_gpu_it_says_what_to_do_instead(cli: Cli, name: str) -> None:
    message = cli("bench", name, "--json").refused()
    assert message.startswith(f"bench {name} times CUDA kernels: ")
    assert message.endswith("or time a whole model here with kvcore bench decode")
