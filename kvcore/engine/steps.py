"""Steps of the model over running requests, with each request's token, logits or error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvcore.cache import Cache, CacheGroup, StepCache, group_key
from kvcore.decoding import GroupTokens
from kvcore.engine.running import Running
from kvcore.engine.types import BudgetError, Failure
from kvcore.errors import CapacityError, KvcoreError, NonFiniteError, is_out_of_memory
from kvcore.runtime import Model
from kvcore.sampling import Sampler

log = logging.getLogger(__name__)

Result = np.ndarray | Exception  # float32 [n, vocab]
Next = int | Result  # a token that was picked on the device


class Stepper:
    """Runs chunks of prompts one by one, and the newest tokens of all decoding sequences together."""

    def __init__(self, model: Model, most: int) -> None:
        """Of up to ``most`` decoding sequences."""
        self._model = model
        self._block = model.backend.row_block
        self._tokens = model.group_tokens(most)

    @property
    def words(self) -> str:
        """How decode steps run."""
        return "launched one by one, sampling on the host" if self._tokens is None else self._tokens.words

    def prefill(self, running: Running, ids: np.ndarray, *, all_logits: bool) -> Result:
        """``ids`` int32 [1, n] of one sequence. A call of its own, so that its result depends on nothing else."""
        assert running.cache is not None
        (result,) = self._run([running.cache], [ids], all_logits=all_logits, block=None)
        return result

    def decode(self, batch: Sequence[Running], ids: Sequence[np.ndarray], meanwhile: Callable[[], None]) -> list[Next]:
        """One step of each sequence, ``ids`` int32 [1, 1]: its next token where that is picked on the device, else its
        logits [1, vocab], which stay until the next step. Where the step as a whole fails, each is tried alone.
        ``meanwhile`` is what the host does while a device computes, or else before."""
        caches = [running.cache for running in batch if running.cache is not None]
        results: list[Next] = [CapacityError("the step was lost")] * len(caches)
        left: list[list[int]] = []
        for rows in _groups(caches):
            if self._tokens is None or group_key(caches[rows[0]]) is None:
                left.append(rows)
                continue
            samplers = [self._sampler(self._tokens, batch[row]) for row in rows]
            try:
                self._tokens.launch([caches[row] for row in rows], [int(ids[row][0, 0]) for row in rows], samplers)
            except Exception as error:  # nothing has changed in any of them
                if not isinstance(error, KvcoreError) and not is_out_of_memory(error):
                    log.warning("a step of %d sequences failed; each is tried alone", len(rows), exc_info=True)
                left += [[row] for row in rows]
                continue
            meanwhile()
            try:
                found: Sequence[Next] = self._tokens.read()
            except Exception as error:  # rows may be lost: all of them are run again
                found = [CapacityError(f"the step was lost ({reason_of(error)})") for _ in rows]
            for row, result in zip(rows, found, strict=True):
                results[row] = result
        if left:
            meanwhile()
            self._decode(caches, ids, left, results)
        return results

    @staticmethod
    def _sampler(tokens: GroupTokens, running: Running) -> Sampler | None:
        """Where tokens can be picked on the device, and nobody asks for log-probabilities."""
        sampler = running.sampler
        return sampler if running.request.logprobs is None and tokens.takes(sampler.params) else None

    def _decode(
        self, caches: Sequence[Cache], ids: Sequence[np.ndarray], together: list[list[int]], results: list[Next]
    ) -> None:
        """Logits of each sequence into ``results``."""
        units = [caches[rows[0]] if len(rows) == 1 else CacheGroup([caches[row] for row in rows]) for rows in together]
        joined = [np.concatenate([ids[row] for row in rows]) for rows in together]
        for rows, result in zip(together, self._run(units, joined, all_logits=False, block=self._block), strict=True):
            for at, row in enumerate(rows):
                if not isinstance(result, Exception):
                    results[row] = result[at : at + 1]
                elif len(rows) == 1:
                    results[row] = result
                else:  # what went wrong for one of them, and nothing has changed in any
                    (results[row],) = self._run([caches[row]], [ids[row]], all_logits=False, block=self._block)

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


def failure_of(error: Exception) -> Failure:
    """The same with its code."""
    if isinstance(error, BudgetError):
        return Failure(reason_of(error), "insufficient_kv_budget")
    if isinstance(error, NonFiniteError):
        return Failure(reason_of(error), "not_finite")
    return Failure(reason_of(error), "out_of_memory" if is_out_of_memory(error) else "internal")
