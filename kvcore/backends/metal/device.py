"""The device that MLX computes on, and the backend on it."""

from __future__ import annotations

import importlib.metadata
import os

import mlx.core as mx

from kvcore.backends.load import Backend
from kvcore.backends.metal.capabilities import KERNELS
from kvcore.backends.metal.ops import MlxOps
from kvcore.errors import BackendError, InputError


def load(device: str | None = None) -> Backend:
    if device not in (None, "cpu", "gpu"):
        raise InputError(f"--device {device}: backend metal knows gpu and cpu")
    has_metal = mx.metal.is_available()
    gpu = mx.default_device().type == mx.gpu
    if device == "gpu" and not gpu:
        raise BackendError("backend metal: MLX finds no GPU on this machine; leave out --device gpu")
    if device == "cpu" and gpu:
        mx.set_default_device(mx.cpu)
        gpu = False
    where = ("metal" if has_metal else "gpu") if gpu else "cpu"
    # Rotations and attention are float32 products; MLX would round their inputs to TF32 where the hardware has it.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    return Backend(
        name="metal",
        ops=MlxOps(where, quantized_linear=where == "metal"),
        device=where,
        arch=_arch(where),
        versions={"mlx": importlib.metadata.version("mlx")},
        default_dtype="float32" if where == "cpu" else None,
        kernels=KERNELS,
        notice=None if where == "metal" else f"MLX has no Metal here: it runs on its default device, {where}",
    )


def _arch(where: str) -> str:
    if where != "metal":
        return where
    found = str(mx.device_info().get("architecture", "applegpu"))  # such as "applegpu_g16s"
    return found if found.startswith("apple") else f"apple-{found}"
