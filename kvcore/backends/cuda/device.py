"""The device that torch computes on, and the backend on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcore.backends.cuda.capabilities import KERNELS
from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.load import Backend
from kvcore.errors import BackendError, InputError
from kvcore.layout import CacheShape


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
            kernels=KERNELS,
            notice="torch runs on the CPU, as --device cpu asks",
            paged_storage=paged_storage_on("cpu"),
            paged_pools=paged_pools_on("cpu"),
        )
    index = _gpu_index(device)
    major, minor = torch.cuda.get_device_capability(index)
    has_kernels = major >= 8 and importlib.util.find_spec("triton") is not None
    return Backend(
        name="cuda",
        ops=TorchOps(f"cuda:{index}"),
        device=f"cuda:{index}",
        arch=f"sm_{major}{minor}",
        versions={**versions, "cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(index)},
        default_dtype=None,
        kernels=KERNELS,
        prefill_step=4096,  # weights are made dense once for so many tokens
        paged_storage=paged_storage_on(f"cuda:{index}"),
        fused_ops=fused_ops_on(f"cuda:{index}") if has_kernels else None,
        make_decoder=make_decoder if has_kernels else None,
        make_group_decoder=group_decoder_on(f"cuda:{index}") if has_kernels else None,
        paged_pools=paged_pools_on(f"cuda:{index}"),
        free_memory=lambda: int(torch.cuda.mem_get_info(index)[0]),
    )


def paged_storage_on(device: str) -> Callable[..., Any]:
    """What makes paged storage there. Triton is imported only where it is asked for."""

    def make(shape: CacheShape, **kernels: Any) -> Any:
        from kvcore.backends.cuda.paged import PagedStorage

        return PagedStorage(shape, device, **kernels)

    return make


def fused_ops_on(device: str) -> Callable[[], Any]:
    def make() -> Any:
        from kvcore.backends.cuda.fused_ops import FusedOps

        return FusedOps(device)

    return make


def paged_pools_on(device: str) -> Callable[..., Any]:
    """What makes pools that many caches share there."""

    def make(shape: CacheShape, budget: int, *, raw_pages: int, make_fold: Any, **_: Any) -> Any:
        from kvcore.backends.cuda.pools import pools_in_budget

        return pools_in_budget(shape, device, make_fold, budget, raw_pages=raw_pages)

    return make


def make_decoder(
    storage: Any, run: Callable[..., Any], draws: Sequence[Mapping[str, Any]], vocab: int, seen: Any, **how: Any
) -> Any:
    """A `Decoder` with a `DeviceSampler`; ``draws`` are fields of `Draw`, one of each sequence."""
    from kvcore.backends.cuda.decoder import Decoder
    from kvcore.backends.cuda.sample import DeviceSampler, Draw

    sampler = DeviceSampler([Draw(**draw) for draw in draws], vocab, storage.device, seen)
    return Decoder(storage, run, sampler, **how)


def group_decoder_on(device: str) -> Callable[..., Any]:
    """What makes a `GroupDecoder` there."""

    def make(run: Callable[..., Any], inv_freq: Any, vocab: int, **how: Any) -> Any:
        from kvcore.backends.cuda.group_decoder import GroupDecoder

        return GroupDecoder(run, inv_freq, vocab, device, **how)

    return make


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
