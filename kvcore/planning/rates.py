"""How long one replica takes for a prefill chunk and for a decode step, in one cache mode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np

from kvcore.advise import ModelShape, Plan, kv_bytes
from kvcore.errors import InputError
from kvcore.generate import chunks_of
from kvcore.modes import Mode, resolve_mode


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds. An iteration of the engine is a decode step, and prefill chunks of prompts that wait.

    chunk          of a prefill chunk, whatever its length
    prompt_token   of each token in it
    prompt_pair    of each pair of a prompt token and one before it, which attention looks at
    step           of a decode step, whatever its batch: the weights are read once
    sequence       of each sequence in it
    context_token  of each token in the cache of each sequence
    """

    chunk: float
    prompt_token: float
    prompt_pair: float
    step: float
    sequence: float
    context_token: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise InputError(f"rate {name} {value!r}: must be a number of seconds, 0 or more")
        if self.prompt_token + self.chunk <= 0 or self.step + self.sequence <= 0:
            raise InputError("rates of no time at all: a prompt token or chunk, and a step or sequence, must take some")

    def piece(self, start: int, tokens: int) -> float:
        """One prefill chunk of ``tokens`` behind ``start`` others of its prompt."""
        return self.chunk + tokens * self.prompt_token + tokens * (start + tokens / 2) * self.prompt_pair

    def prefill(self, tokens: int, chunk: int) -> float:
        """A whole prompt, alone."""
        return self.piece(0, tokens) + (chunks_of(tokens, chunk) - 1) * self.chunk

    def decode(self, batch: int, context: float) -> float:
        """One step of ``batch`` sequences that hold ``context`` tokens together."""
        return self.step + batch * self.sequence + context * self.context_token


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured time. prefill: ``count`` tokens in ``chunks``; decode: a step of ``count`` sequences that hold
    ``context`` tokens together."""

    kind: Literal["prefill", "decode"]
    count: int
    context: int
    seconds: float
    chunks: int = 1


def fit(samples: Sequence[Sample]) -> Rates:
    """The rates that fit the samples best by relative error, none below 0. InputError without both kinds."""
    rows: dict[str, list[tuple[float, float, float]]] = {"prefill": [], "decode": []}
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    for sample in samples:
        pairs = sample.count**2 / 2 if sample.kind == "prefill" else sample.context
        first = sample.chunks if sample.kind == "prefill" else 1
        rows[sample.kind].append((first, sample.count, pairs))
        seconds[sample.kind].append(sample.seconds)
    if not all(rows.values()):
        raise InputError("rates need measured times of both prefill and decode")
    prefill, decode = (_coefficients(rows[kind], seconds[kind]) for kind in ("prefill", "decode"))
    return Rates(*prefill, *decode)


def _coefficients(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Where noise leaves all of the time to the last term, the one of contexts, it is left out: a step takes some."""
    found = _non_negative(rows, seconds)
    return found if sum(found[:2]) > 0 else [*_non_negative([row[:2] for row in rows], seconds), 0.0]


def _non_negative(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Least squares with each row weighted by 1 / seconds; coefficients that would be negative are left out, the most
    negative first."""
    y = np.asarray(seconds, np.float64)
    x = np.asarray(rows, np.float64) / y[:, None]
    used = list(range(x.shape[1]))
    while used:
        scale = np.abs(x[:, used]).max(0)
        found = np.linalg.lstsq(x[:, used] / scale, np.ones(len(y)), rcond=None)[0] / scale
        if found.min() >= 0:
            break
        used.pop(int((found * scale).argmin()))
    result = [0.0] * x.shape[1]
    for column, value in zip(used, found, strict=True):
        result[column] = float(value)
    return result


def floor_rates(plan: Plan, mode: Mode, *, ranks: int, flops: float, link_seconds: float) -> Rates:
    """What no kernel beats: bytes over the plan's bandwidth in decode, ``flops`` per second of one device in prefill.

    Of ``ranks`` each reads its share of weights and KV heads; two sums per layer take ``link_seconds`` each.
    """
    shape, bandwidth = plan.shape, plan.bandwidth
    share = share_of_rank(shape, ranks)
    far = plan.window.recent_tokens + 8 * plan.window.page_size  # where the raw window is whole
    per_token = (kv_bytes(plan, mode, 2 * far) - kv_bytes(plan, mode, far)) / far
    fixed = max(0.0, kv_bytes(plan, mode, far) - far * per_token)
    sums = 2 * shape.num_layers * link_seconds if ranks > 1 else 0.0
    pair = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    return Rates(
        chunk=plan.streamed_bytes / ranks / bandwidth + sums,
        prompt_token=2 * shape.streamed_weights / flops / ranks,
        prompt_pair=pair / flops / ranks,
        step=plan.streamed_bytes / ranks / bandwidth + sums,
        sequence=fixed * share / bandwidth,
        context_token=per_token * share / bandwidth,
    )


def share_of_rank(shape: ModelShape, ranks: int) -> float:
    """How much of the cache one rank holds: a KV head at least, also where several hold the same one."""
    return max(1, shape.num_kv_heads // ranks) / shape.num_kv_heads


def read_rates(path: str) -> dict[str, Rates]:
    """Rates by mode from a JSON file {"modes": {"int8": {"chunk": ...}}}. InputError for anything else."""
    where = Path(path).expanduser()
    try:
        found = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--rates {path}: cannot be read ({error})") from error
    modes = found.get("modes") if isinstance(found, Mapping) else None
    if not isinstance(modes, Mapping) or not modes:
        raise InputError(f'--rates {path}: has no "modes" with the rates of each: see docs/scale.md')
    return {resolve_mode(name).name: _rates(f"--rates {path}: {name}", each) for name, each in modes.items()}


def _rates(where: str, found: object) -> Rates:
    names = [field.name for field in fields(Rates)]
    if not isinstance(found, Mapping) or set(found) != set(names):
        raise InputError(f"{where}: must have exactly {', '.join(names)}, in seconds")
    try:
        return Rates(**found)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
