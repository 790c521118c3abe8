"""The kernels' own tests need g++; they compile once for a worker, so one worker takes them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from metal_shim import COMPILER, NO_COMPILER

from kvcore.backends import Backend, load_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("metal"))


@pytest.fixture(scope="session")
def host() -> Backend:
    """Where views are made and results are compared: the reference backend."""
    if COMPILER is None:
        pytest.skip(NO_COMPILER)
    return load_backend("reference")
