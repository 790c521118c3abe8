"""What launchers put into the environment, and requests that do not fit it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcore.cli import run
from kvcore.errors import InputError
from kvcore.parallel import Launch, check_launch, find_launch
from kvcore.parallel.join import join

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_torchrun_says_rank_size_and_where_rank_0_is() -> None:
    assert find_launch(TORCHRUN) == Launch("torchrun", 5, 8, 1, "10.0.0.1")


def test_mlx_launch_names_its_hosts_in_a_file(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5001"], ["10.0.0.3:5002"]]))
    found = find_launch({"MLX_RANK": "2", "MLX_HOSTFILE": str(hostfile)})
    assert found == Launch("mlx.launch", 2, 3, 2, "10.0.0.1")


def test_mlx_launch_over_thunderbolt_names_its_devices_and_its_coordinator(tmp_path: Path) -> None:
    devices = tmp_path / "devices.json"
    devices.write_text(json.dumps([[None, "rdma_en5"], ["rdma_en5", None]]))
    found = find_launch({"MLX_RANK": "1", "MLX_IBV_DEVICES": str(devices), "MLX_JACCL_COORDINATOR": "10.0.0.1:32323"})
    assert found == Launch("mlx.launch", 1, 2, 1, "10.0.0.1")


def test_mlx_launch_over_nccl_names_the_world(tmp_path: Path) -> None:
    found = find_launch({"MLX_RANK": "0", "MLX_WORLD_SIZE": "4", "NCCL_HOST_IP": "10.0.0.9"})
    assert found == Launch("mlx.launch", 0, 4, 0, "10.0.0.9")


def test_a_process_of_its_own_is_no_rank() -> None:
    assert find_launch({"PATH": "/bin", "RANK": "3"}) is None
    check_launch(1, None)


@pytest.mark.parametrize(
    ("asked", "launch", "message"),
    [
        (2, None, "--tensor-parallel 2 needs 2 processes: start them with torchrun --nproc-per-node 2 -m kvcore"),
        (2, Launch("torchrun", 0, 4, 0, ""), "--tensor-parallel 2, but torchrun has started 4"),
        (1, Launch("mlx.launch", 0, 2, 0, ""), "--tensor-parallel 1, but mlx.launch has started 2"),
        (0, None, "--tensor-parallel 0: must be 1 or more"),
    ],
)
def test_other_numbers_of_processes_are_refused(asked: int, launch: Launch | None, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        check_launch(asked, launch)


@pytest.mark.parametrize(
    ("launcher", "backend", "message"),
    [
        ("torchrun", "metal", "backend metal cannot use the ranks of torchrun, .*: start the command with mlx.launch"),
        ("mlx.launch", "cuda", "backend cuda cannot use the ranks of mlx.launch, .*: start the command with torchrun"),
    ],
)
def test_a_launcher_serves_its_own_backends(launcher: str, backend: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Launch(launcher, 0, 2, 0, "").check_backend(backend)  # type: ignore[arg-type]
    Launch(launcher, 0, 2, 0, "").check_backend("reference")  # type: ignore[arg-type]


def test_a_gpu_by_number_is_refused_because_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="--device cuda:1: each of 2 ranks takes a GPU of its own"):
        join(2, "cuda", "cuda:1")


@pytest.mark.parametrize("command", [("generate", "--prompt", "hi"), ("chat",), ("bench", "generate")])
def test_commands_need_the_processes(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel 2 needs 2 processes: start them with torchrun" in capsys.readouterr().err


def test_a_prompt_cache_has_the_rows_of_all_heads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    code = run(["generate", "--prompt", "hi", "--tensor-parallel", "2", "--prompt-cache", "x.cache"])
    assert (code, "--prompt-cache with --tensor-parallel 2" in capsys.readouterr().err) == (2, True)
