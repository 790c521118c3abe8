"""Joining the other ranks: this rank's backend, the communicator of the launcher, and the monitor beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcore.backends import Backend, load_backend
from kvcore.communicator import Communicator, LostRankError
from kvcore.errors import InputError, KvcoreError
from kvcore.ops import Array
from kvcore.parallel.launch import Launch, check_launch, find_launch
from kvcore.parallel.monitor import Ending, Monitor, end_process


@dataclass(frozen=True, slots=True)
class Ranks:
    """A communicator that is watched: where a collective fails, the monitor has the first word."""

    inner: Communicator
    monitor: Monitor

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def name(self) -> str:
        return self.inner.name

    def all_sum(self, x: Array) -> Array:
        try:
            return self.inner.all_sum(x)
        except LostRankError:
            self.monitor.settle()
            raise

    def all_gather(self, x: Array) -> Array:
        try:
            return self.inner.all_gather(x)
        except LostRankError:
            self.monitor.settle()
            raise

    @contextmanager
    def reported(self) -> Iterator[None]:
        """What goes wrong in the body ends every rank, and rank 0 says it."""
        try:
            yield
        except Exception as error:
            code = error.exit_code if isinstance(error, KvcoreError) else 1
            self.monitor.fail(
                str(error) if isinstance(error, KvcoreError) else f"{type(error).__name__}: {error}", code
            )
            raise

    def close(self) -> None:
        self.monitor.close()
        self.inner.close()


def join(asked: int, backend: str, device: str | None, end: Ending = end_process) -> tuple[Backend, Ranks]:
    """This rank's backend, and the ranks that it has met.

    InputError where not ``asked`` ranks have been started, or not for this backend; BackendError or LostRankError where
    they do not come.
    """
    launch = find_launch(os.environ)
    check_launch(asked, launch)
    assert launch is not None
    loaded = _own_backend(launch, backend, device)
    launch.check_backend(loaded.name)
    inner: Communicator
    if launch.launcher == "torchrun":
        from kvcore.backends.cuda.distributed import TorchCommunicator

        inner = TorchCommunicator(loaded.device if loaded.name == "cuda" else "cpu")
    else:
        from kvcore.backends.metal.distributed import MlxCommunicator

        inner = MlxCommunicator()
    return loaded, Ranks(inner, Monitor(inner, launch.host, end))


def _own_backend(launch: Launch, name: str, device: str | None) -> Backend:
    """The backend, on NVIDIA GPUs on the one that is this rank's."""
    if device is not None and device.startswith("cuda:"):
        raise InputError(f"--device {device}: each of {launch.size} ranks takes a GPU of its own; leave out --device")
    if launch.launcher == "mlx.launch" and name == "auto":
        name = "metal"
    loaded = load_backend(name, device) if name != "cuda" or device is not None else None
    if loaded is None or (loaded.name == "cuda" and loaded.device != "cpu"):
        return load_backend("cuda", f"cuda:{launch.local_rank}")
    return loaded
