"""Steps of the model over running requests, with each request's logits or its error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.cache import Cache, CacheGroup, StepCache, group_key
from kvcore.engine.running import Running
from kvcore.errors import CapacityError, KvcoreError, is_out_of_memory
from kvcore.runtime import Model

Result = np.ndarray | Exception  # float32 [n, vocab]


class Stepper:
    """Runs chunks of prompts one by one, and the newest tokens of all decoding sequences together."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._block = model.backend.row_block

    def prefill(self, running: Running, ids: np.ndarray, *, all_logits: bool) -> Result:
        """``ids`` int32 [1, n] of one sequence. A call of its own, so that its result depends on nothing else."""
        assert running.cache is not None
        (result,) = self._run([running.cache], [ids], all_logits=all_logits, block=None)
        return result

    def decode(self, batch: Sequence[Running], ids: Sequence[np.ndarray]) -> list[Result]:
        """One token of each sequence; where the step as a whole fails, each is tried alone."""
        caches = [running.cache for running in batch if running.cache is not None]
        together = _groups(caches)
        units = [caches[rows[0]] if len(rows) == 1 else CacheGroup([caches[row] for row in rows]) for rows in together]
        joined = [np.concatenate([ids[row] for row in rows]) for rows in together]
        results: list[Result] = [CapacityError("the step was lost")] * len(caches)
        for rows, result in zip(together, self._run(units, joined, all_logits=False, block=self._block), strict=True):
            for at, row in enumerate(rows):
                if not isinstance(result, Exception):
                    results[row] = result[at : at + 1]
                elif len(rows) == 1:
                    results[row] = result
                else:  # what went wrong for one of them, and nothing has changed in any
                    (results[row],) = self._run([caches[row]], [ids[row]], all_logits=False, block=self._block)
        return results

    def _run(
        self, caches: Sequence[StepCache], ids: Sequence[np.ndarray], *, all_logits: bool, block: int | None
    ) -> list[Result]:
        model = self._model
        try:
            ran = model.forward_ragged(ids, caches, all_logits=all_logits, row_block=block)
        except Exception as error:  # nothing has changed in any cache
            if len(caches) == 1:
                return [error]
            alone = zip(caches, ids, strict=True)
            return [self._run([one], [part], all_logits=all_logits, block=block)[0] for one, part in alone]
        try:
            logits = model.backend.ops.to_numpy(ran.logits)
            model.backend.ops.evaluate(*(array for cache in caches for array in cache.arrays()))
        except Exception as error:  # rows may be lost: all of them are run again
            return [CapacityError(f"the step was lost ({reason_of(error)})") for _ in caches]
        return [ran.errors.get(i, logits[span]) for i, span in enumerate(ran.spans)]


def _groups(caches: Sequence[Cache]) -> list[list[int]]:
    """Which caches step together: those whose pages lie in one pool; any other alone."""
    groups: dict[object, list[int]] = {}
    for i, cache in enumerate(caches):
        key = group_key(cache)
        groups.setdefault(("alone", i) if key is None else key, []).append(i)
    return list(groups.values())


def reason_of(error: Exception) -> str:
    """One line for a user."""
    if isinstance(error, KvcoreError):
        return str(error)
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return f"out of memory for now ({text or type(error).__name__}): try again later, or with a shorter prompt"
    return f"the step failed ({type(error).__name__}: {text})"
