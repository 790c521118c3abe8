"""The other ranks' side: do what rank 0 says, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.cache import Cache, CacheSpec
from kvcore.communicator import Communicator, SharedSteps
from kvcore.layout import Cap, WindowPolicy
from kvcore.models.llama import Ragged
from kvcore.modes import MODES
from kvcore.parallel.commands import Command, agree, anywhere, receive

METHODS = frozenset({"begin_decode", "commit", "trim", "rewind", "drop", "shorten"})
DECODES = frozenset({"start", "launch", "forget"})


@dataclass(frozen=True, slots=True)
class FollowedSteps:
    """The side of a rank other than 0: a `SharedSteps`."""

    ranks: Communicator
    alone: bool = False

    def command(self, method: str, *arguments: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self, kept: int, forget: Callable[[], None]) -> None:
        pass

    def any(self, happened: bool) -> bool:
        return anywhere(self.ranks, happened)

    def chosen(self, tokens: Any) -> Any:
        return self.ranks.all_sum(tokens * 0)


@dataclass(slots=True)
class Worker:
    """``new_cache(spec)`` makes this rank's share of a cache; ``step(ids, cache, all_logits)`` and
    ``ragged(ids, caches, settings)`` run its share, as `kvcore.models.llama` does.
    ``decoder(cache, draws, seen, among)`` makes what decodes over it."""

    ranks: Communicator
    new_cache: Callable[[CacheSpec], Cache]
    step: Callable[[np.ndarray, Cache, bool], object]
    ragged: Callable[[Sequence[np.ndarray], Sequence[Cache], Mapping[str, Any]], Ragged]
    decoder: Callable[[Cache, Sequence[Mapping[str, Any]], Sequence[Sequence[int]], SharedSteps], Any] | None = None
    caches: dict[int, Cache] = field(default_factory=dict)
    decoders: dict[int, Any] = field(default_factory=dict)

    def run(self, command: Command) -> None:
        """One command, other than the end."""
        name, given = command.name, command.arguments
        if name == "new":
            self.caches[given["cache"]] = self.new_cache(spec_from_json(given["spec"]))
        elif name == "fork":
            self.caches[given["into"]] = self.caches[given["cache"]].fork()
        elif name == "free":
            number = given["number"]
            del (self.caches if number in self.caches else self.decoders)[number]
        elif name == "decoder":
            assert command.ids is not None
            assert self.decoder is not None
            seen = [part.tolist() for part in np.split(command.ids, np.cumsum(given["seen"])[:-1])]
            cache, steps = self.caches[given["cache"]], FollowedSteps(self.ranks)
            self.decoders[given["decoder"]] = self.decoder(cache, given["draws"], seen, steps)
        elif name == "decode":
            assert given["method"] in DECODES, f"unknown method {given['method']}"
            getattr(self.decoders[given["decoder"]], given["method"])(*given["arguments"])
        elif name == "step":
            assert command.ids is not None
            self.step(command.ids, self.caches[given["cache"]], given["all_logits"])
        elif name == "ragged":
            self._ragged(command)
        else:
            assert name == "call", f"unknown command {name}"
            assert given["method"] in METHODS, f"unknown method {given['method']}"
            getattr(self.caches[given["cache"]], given["method"])(*given["arguments"])

    def _ragged(self, command: Command) -> None:
        assert command.ids is not None
        given = command.arguments
        caches = [self.caches[number] for number in given["caches"]]
        ends = np.cumsum([batch * count for batch, count in given["shapes"]])[:-1]
        parts = np.split(command.ids, ends)
        ids = [part.reshape(shape) for part, shape in zip(parts, given["shapes"], strict=True)]
        before = [cache.tokens for cache in caches]
        agree(self.ranks, self.ragged(ids, caches, given["settings"]).errors, caches, before)


def follow(ranks: Communicator, worker: Worker) -> None:
    """Run rank 0's commands until it says that it is done."""
    while (command := receive(ranks)).name != "end":
        worker.run(command)


def spec_from_json(plain: dict[str, Any]) -> CacheSpec:
    """The inverse of `leader.spec_to_json`."""
    cap = None if plain["cap"] is None else Cap(**plain["cap"])
    return CacheSpec(**plain | {"mode": MODES[plain["mode"]], "window": WindowPolicy(**plain["window"]), "cap": cap})
