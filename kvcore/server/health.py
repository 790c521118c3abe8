"""GET /health: whether requests are taken, and what runs: backend, mode, kernels with reasons, the engine's counts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcore.server.state import ServerState
from kvcore.version import __version__


def health(state: ServerState) -> dict[str, Any]:
    """``status`` is ready, loading, stopping or failed."""
    body: dict[str, Any] = {"status": state.status, "version": __version__}
    served = state.served
    if served is None:
        return body
    stats = served.engine.stats()
    if body["status"] == "ready" and not stats.healthy:
        body["status"] = "failed"
    kv_bytes = {"used": sum(use.used for use in stats.kv.values()), "budget": stats.budget}
    return body | {"model": served.name, **served.facts, "kv_bytes": kv_bytes, "engine": asdict(stats)}
