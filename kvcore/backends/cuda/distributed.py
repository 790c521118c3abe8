"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. NumPy's arrays go through gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from kvcore.communicator import LostRankError
from kvcore.errors import BackendError

JOIN_SECONDS = 120  # for all ranks to come
FOREVER = timedelta(days=365)  # a rank may wait for its next command that long; who watches ranks is not torch
_NARROW = (torch.float16, torch.bfloat16)


class TorchCommunicator:
    """The default process group, made from the environment that torchrun sets."""

    def __init__(self, device: str) -> None:
        """``device``: that of this rank's tensors, "cpu" or "cuda:N". BackendError where the ranks do not meet."""
        gpu = device.startswith("cuda")
        if gpu and not dist.is_nccl_available():
            raise BackendError("ranks on GPUs need NCCL, which this torch has not: use a CUDA build, or --device cpu")
        if not dist.is_gloo_available():
            raise BackendError("ranks need gloo, which this torch has not: use another build of torch")
        try:
            store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS))))
            if gpu:
                torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"the ranks did not meet through torch.distributed: {error}") from error
        self.rank, self.size, self.name = rank, size, "nccl" if gpu else "gloo"

    def all_sum(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self.all_sum(torch.from_numpy(np.array(x))).numpy()
        # gloo adds in the tensor's dtype; float32 keeps the sum of 16-bit parts as exact as one product's
        wide = x.float() if x.dtype in _NARROW and x.device.type == "cpu" else x.contiguous()
        self._run(lambda: dist.all_reduce(wide))
        return wide.to(x.dtype)

    def all_gather(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self.all_gather(torch.from_numpy(np.array(x))).numpy()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, x.contiguous()))
        return torch.cat(parts, -1)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise LostRankError(f"rank {self.rank} of {self.size} lost another one in a collective: {error}") from error
