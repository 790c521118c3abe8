"""Which launcher has started this process, as which rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvcore.errors import InputError

BACKENDS = {"torchrun": ("cuda", "reference"), "mlx.launch": ("metal", "reference")}


@dataclass(frozen=True, slots=True)
class Launch:
    """One of ``size`` processes. ``local_rank`` counts those of this host; ``host`` is where rank 0 runs."""

    launcher: Literal["torchrun", "mlx.launch"]
    rank: int
    size: int
    local_rank: int
    host: str

    def check_backend(self, name: str) -> None:
        """InputError where the launcher's collectives do not serve that backend's arrays."""
        serves = BACKENDS[self.launcher]
        if name not in serves:
            other = next(launcher for launcher, backends in BACKENDS.items() if name in backends)
            raise InputError(
                f"backend {name} cannot use the ranks of {self.launcher}, which serves {' and '.join(serves)}: "
                f"start the command with {other}"
            )


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """What torchrun (RANK, WORLD_SIZE) or mlx.launch (MLX_RANK; its ring, jaccl and nccl backends) has put into the
    environment; None without it."""
    if "MLX_RANK" in environ:
        hosts, devices = (_listed_in(environ.get(name)) for name in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"))
        size = len(hosts) or len(devices) or int(environ.get("MLX_WORLD_SIZE", 1))
        first = _address(hosts[0]) if hosts else environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0]
        rank = int(environ["MLX_RANK"])
        return Launch("mlx.launch", rank, size, rank, first or environ.get("NCCL_HOST_IP", "127.0.0.1"))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        rank = int(environ["RANK"])
        local = int(environ.get("LOCAL_RANK", rank))
        return Launch("torchrun", rank, int(environ["WORLD_SIZE"]), local, environ["MASTER_ADDR"])
    return None


def check_launch(asked: int, launch: Launch | None) -> None:
    """InputError where other than ``asked`` processes were started."""
    if asked < 1:
        raise InputError(f"--tensor-parallel {asked}: must be 1 or more")
    if asked > 1 and launch is None:
        raise InputError(
            f"--tensor-parallel {asked} needs {asked} processes: start them with torchrun --nproc-per-node {asked} "
            f"-m kvcore ..., or on MLX with mlx.launch -n {asked} -- python -m kvcore ..."
        )
    if launch is not None and launch.size != asked:
        raise InputError(f"--tensor-parallel {asked}, but {launch.launcher} has started {launch.size}: use one number")


def _listed_in(path: str | None) -> list[Any]:
    """One entry for each rank, from a file that mlx.launch has written."""
    if path is None or not Path(path).is_file():
        return []
    entries: list[Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return entries


def _address(entry: Any) -> str:
    """The host in an entry of the ring's file, "HOST:PORT" or a list of them."""
    return str(entry[0] if isinstance(entry, list) else entry).rpartition(":")[0]
