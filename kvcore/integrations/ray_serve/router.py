"""Ray's request router that sends a conversation back to the replica that holds its pages."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvcore.server.affinity import Affinity


class PrefixRouter(RequestRouter):
    """Requests carry their key as the first argument (`affinity_key`). A replica that takes no more requests, or is
    gone, is passed over, and the conversation moves to the one that takes the request."""

    def initialize_state(self, **kwargs: Any) -> None:
        """``kwargs`` are those of `Affinity`."""
        self._affinity = Affinity(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = _key(pending_request)
        if key is None:
            return [candidate_replicas]
        named = {str(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        return [[named[name]] for name in self._affinity.order(key, list(named))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (key := _key(pending_request)) is not None:
            self._affinity.went(key, str(replica_id.unique_id))


def _key(request: PendingRequest | None) -> str | None:
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, str) else None
