"""Which replica a request belongs to: the one that its conversation has been on.

A conversation is known by its head, the messages up to the first one of the user, which every later turn repeats. A new
one goes to the replica that consistent hashing names, unless that has more than its share of conversations already
("consistent hashing with bounded loads", arXiv 1608.01350); then to the next one in the hash's order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

HEAD_CHARACTERS = 1024
HEAD_TOKENS = 256
REMEMBERED = 100_000
SLACK = 1.1  # of the mean number of conversations, that a replica may have


def affinity_key(path: str, body: bytes) -> str:
    """The same for all turns of a conversation, and for all prompts that begin alike; hexadecimal."""
    try:
        found = json.loads(body) if body else None
    except ValueError:
        found = None
    head: object = path
    if isinstance(found, Mapping):
        if isinstance(found.get("messages"), list):
            head = _opening(found["messages"])
        elif "prompt" in found:
            head = _beginning(found["prompt"])
    return hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16).hexdigest()


def _opening(messages: Sequence[object]) -> list[object]:
    """The messages up to and including the first one of a user."""
    first = next(
        (i for i, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "user"), len(messages)
    )
    return list(messages[: first + 1])


def _beginning(prompt: object) -> object:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # of several prompts the first one decides
    if isinstance(prompt, list):
        return prompt[:HEAD_TOKENS]
    return prompt[:HEAD_CHARACTERS] if isinstance(prompt, str) else prompt


class Affinity:
    """Conversations and their replicas, both by name; the least recently seen conversation is forgotten first."""

    def __init__(self, remembered: int = REMEMBERED, slack: float = SLACK) -> None:
        self._remembered, self._slack = remembered, slack
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._counts: dict[str, int] = {}

    def order(self, key: str, replicas: Sequence[str]) -> list[str]:
        """The replicas that there are, the one to take first. A conversation stays where it is while that is there."""
        ranked = sorted(replicas, key=lambda replica: _score(key, replica), reverse=True)
        home = self._homes.get(key)
        if home is None or home not in replicas:
            most = math.ceil(self._slack * (sum(self._counts.get(name, 0) for name in replicas) + 1) / len(replicas))
            home = next((name for name in ranked if self._counts.get(name, 0) < most), ranked[0])
        return [home, *(name for name in ranked if name != home)]

    def went(self, key: str, replica: str) -> None:
        """A request of the conversation was taken by ``replica``, which holds its prefix from now on."""
        self._forget(key)
        self._homes[key] = replica
        self._counts[replica] = self._counts.get(replica, 0) + 1
        while len(self._homes) > self._remembered:
            self._forget(next(iter(self._homes)))

    def _forget(self, key: str) -> None:
        replica = self._homes.pop(key, None)
        if replica is not None:
            self._counts[replica] -= 1
            if not self._counts[replica]:
                del self._counts[replica]


def _score(key: str, replica: str) -> bytes:
    """Rendezvous hashing: each replica's own order of all keys, so that one that goes moves only its own."""
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()
