"""torch on an NVIDIA GPU; `device="cpu"` runs the same graph operations with torch on the CPU."""

from __future__ import annotations

import torch

from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.load import Backend
from kvcore.errors import BackendError, InputError


def load(device: str | None = None) -> Backend:
    versions = {"torch": torch.__version__}
    if device == "cpu":
        return Backend(
            name="cuda",
            ops=TorchOps("cpu"),
            device="cpu",
            arch="cpu",
            versions=versions,
            default_dtype="float32",
            notice="torch runs on the CPU, as --device cpu asks",
        )
    index = _gpu_index(device)
    major, minor = torch.cuda.get_device_capability(index)
    return Backend(
        name="cuda",
        ops=TorchOps(f"cuda:{index}"),
        device=f"cuda:{index}",
        arch=f"sm_{major}{minor}",
        versions={**versions, "cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(index)},
        default_dtype=None,
    )


def _gpu_index(device: str | None) -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no usable NVIDIA GPU"
        raise BackendError(
            f"backend cuda: {why}; use a machine with an NVIDIA GPU, its driver and a CUDA build of torch, "
            "or --device cpu for torch on the CPU"
        )
    if device in (None, "cuda"):
        return int(torch.cuda.current_device())
    kind, _, index = str(device).partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise InputError(f"--device {device}: backend cuda knows cuda, cuda:N and cpu")
    if int(index) >= count:
        raise InputError(f"--device {device}: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}")
    return int(index)
