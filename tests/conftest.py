"""Fixtures that all tests share: the backends, and buffers whose unwritten part shows."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
from collections.abc import Iterator

import pytest
from oracle import BACKENDS, fill_unused

from kvcore.backends import Backend, load_backend
from kvcore.cache import RowBuffer


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn: NumPy, MLX on its default device, torch on the CPU."""
    name, device, package = BACKENDS[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    return load_backend(name, device)


@pytest.fixture(scope="session")
def reference() -> Backend:
    return load_backend("reference")


@pytest.fixture(autouse=True)
def _fresh_buffers_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache allocates and has not written is NaN (codes 0xff), so that reading it shows."""
    reserve = RowBuffer._reserve

    def poisoned(buffer: RowBuffer, wanted: int) -> None:
        grows = wanted > buffer.capacity
        reserve(buffer, wanted)
        if grows:
            fill_unused(buffer, 0xFF)

    monkeypatch.setattr(RowBuffer, "_reserve", poisoned)


@pytest.fixture(autouse=True)
def _machine_to_itself(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test marked ``alone`` waits for those of the other workers, and new ones wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    alone = request.node.get_closest_marker("alone") is not None
    shared = tmp_path_factory.getbasetemp().parent  # by all workers of this run
    with contextlib.ExitStack() as stack:
        gate, room = (stack.enter_context((shared / name).open("w")) for name in ("gate", "room"))
        fcntl.flock(gate, fcntl.LOCK_EX)  # nobody passes one who waits for the room
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
