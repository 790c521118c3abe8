"""What Ray's processes import: a model to serve, and a router that knows nothing."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvcore.engine.config import EngineConfig
from kvcore.server.load import start
from kvcore.server.served import Defaults, Served


class RandomRouter(RequestRouter):
    """Any replica, whatever the request."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._draw = random.Random(5)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [[self._draw.choice(candidate_replicas)]]


@dataclass(frozen=True)
class Loader:
    """A tiny model with ``budget`` bytes for caches. The file ``pids``/NAME holds the process of replica NAME."""

    model: str
    pids: str
    budget: int

    def __call__(self) -> Served:
        import kvcore

        name = serve.get_replica_context().replica_id.unique_id
        (Path(self.pids) / name).write_text(str(os.getpid()))
        model = kvcore.load(self.model, backend="reference")
        config = EngineConfig(kv_cache_budget=self.budget, max_batch=8)
        return start(model, config, requested_mode="fp16", names=("tiny",), defaults=Defaults(temperature=0.0))
