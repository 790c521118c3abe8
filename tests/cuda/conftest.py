"""What the tests of CUDA kernels share."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from triton_device import DEVICE


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: "cuda" compiled, "cpu" interpreted."""
    return DEVICE


@pytest.fixture(autouse=True)
def _fresh_pages_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool allocates and no sequence has written is NaN (codes 0xff), so that reading it shows."""
    if importlib.util.find_spec("torch") is None:
        return
    from paging import poison

    from kvcore.backends.cuda.pool import PagePool

    allocate = PagePool._allocate

    def poisoned(pool: PagePool, pages: int) -> dict[str, Any]:
        return {name: poison(plane) for name, plane in allocate(pool, pages).items()}

    monkeypatch.setattr(PagePool, "_allocate", poisoned)
