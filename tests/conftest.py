"""Fixtures that all tests share: the backends, and buffers whose unwritten part shows."""

from __future__ import annotations

import importlib.util

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
