"""Which cache mode a plan calls for: what fits, how faithful the mode was measured to be, then the floor in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvcore.advise import ModeCost, Plan
from kvcore.modes import MODES

BASIS = (
    "KL and top-1 were measured on SmolLM2-135M (head size 64, 1,024 tokens of prose, positions from 256 on), not on "
    "this model: `kvcore eval` measures yours. Time is the floor."
)
MAX_KL = 5e-4  # nats


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Mean KL to the raw model in nats, and how often the likeliest token is the same."""

    kl: float
    top1: float


# docs/benchmark_results/2026-11-29-fidelity-modes.csv; turbo4: 2026-11-30-fidelity-turbo4.csv
FIDELITY: Mapping[str, Fidelity] = MappingProxyType(
    {
        "fp16": Fidelity(0.0, 1.0),
        "int8": Fidelity(2.588e-5, 0.9970),
        "int8-turbo4": Fidelity(2.749e-4, 0.9933),
        "turbo4-asym": Fidelity(2.502e-4, 0.9948),
        "turbo4-delegated": Fidelity(2.502e-4, 0.9948),
        "turbo3-asym": Fidelity(1.045e-3, 0.9831),
        "turbo4": Fidelity(1.682e-3, 0.9792),
    }
)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``mode`` is None where nothing fits. ``faithful``: whether its KL is within the limit."""

    mode: str | None
    faithful: bool
    reason: str


def recommend(plan: Plan, costs: Sequence[ModeCost], max_kl: float = MAX_KL) -> Recommendation:
    """Of the modes that hold the plan's context beside the weights, the one with the lowest floor among those whose
    measured KL is at most ``max_kl``; where none is, the most faithful one."""
    fitting = [cost for cost in costs if cost.largest_context is None or cost.largest_context >= plan.context]
    if not fitting:
        if plan.memory is not None and plan.memory < plan.weight_bytes:
            return Recommendation(None, False, "that memory does not hold the weights")
        longest = max(costs, key=lambda cost: cost.largest_context or 0, default=None)
        most = "" if longest is None else f"; the longest that fits is {longest.largest_context:,} in {longest.mode}"
        return Recommendation(None, False, f"no mode holds {plan.context:,} tokens in that memory{most}")
    faithful = [cost for cost in fitting if FIDELITY[cost.mode].kl <= max_kl]
    if faithful:
        best = min(faithful, key=lambda cost: (cost.floor_seconds, FIDELITY[cost.mode].kl, _order(cost)))
        why = f"the lowest floor of the {len(faithful)} modes that fit with a KL of at most {max_kl:g}"
        return Recommendation(best.mode, True, why)
    best = min(fitting, key=lambda cost: (FIDELITY[cost.mode].kl, cost.floor_seconds))
    return Recommendation(
        best.mode, False, f"the most faithful that fits; no mode with a KL of at most {max_kl:g} does"
    )


def _order(cost: ModeCost) -> int:
    return list(MODES).index(cost.mode)
