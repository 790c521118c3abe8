"""Rotary position embedding: its settings and its inverse frequencies.

Formulas: RoFormer (arXiv 2104.09864, section 3.2); ``linear`` is position interpolation (arXiv 2306.15595);
``llama3`` is Llama 3.1's scaling by wavelength.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError
from kvcore.models.fields import Fields, quoted

RopeKind = Literal["default", "linear", "llama3"]
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of the rotation. ``factor`` serves linear and llama3, the fields after it llama3 alone.

    ``freq_factors`` (head_dim / 2 numbers that divide the inverse frequencies) is how GGUF files carry llama3
    scaling; it applies on top of ``kind``.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_factors: tuple[float, ...] | None = None


def rope_inv_freq(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Radians per position, float32 [head_dim / 2], rounded once from float64."""
    inv_freq = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    if rope.freq_factors is not None:
        inv_freq = inv_freq / np.asarray(rope.freq_factors, dtype=np.float64)
    return inv_freq.astype(np.float32)


def _llama3(rope: RopeConfig, inv_freq: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Slow frequencies divided by ``factor``, fast ones kept, a linear blend between the two bounds."""
    turns = rope.original_max_position * inv_freq / (2 * math.pi)  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return np.where(keep == 0.0, inv_freq / rope.factor, inv_freq * ((1 - keep) / rope.factor + keep))


def rope_from_hf(config: Mapping[str, object], where: str) -> RopeConfig:
    """Read ``rope_scaling`` (key rope_type, or type in older files) or the newer ``rope_parameters``."""
    fields = Fields(config, where)
    blocks = {key: fields.block(key) for key in ("rope_parameters", "rope_scaling")}
    kinds = {key: _hf_kind(block, f"{where}: {key}") for key, block in blocks.items() if block}
    if len(set(kinds.values())) > 1:
        raise ModelError(f"{where}: rope_parameters and rope_scaling disagree on the type: {kinds}")
    name, kind = next(iter(kinds.items()), ("rope_parameters", "default"))
    inner = Fields(blocks[name], f"{where}: {name}")
    for scope in (fields, inner):
        if scope.get("partial_rotary_factor") not in (None, 1):
            raise ModelError(f"{scope.where}: partial_rotary_factor other than 1 is not supported")
    theta = inner.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    rope = RopeConfig(kind, theta)
    if kind == "default":
        return rope
    rope = replace(rope, factor=inner.number("factor"))
    if kind == "linear":
        return rope
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if not low < high:
        raise ModelError(f"{inner.where}: low_freq_factor {low} must be below high_freq_factor {high}")
    original = inner.count("original_max_position_embeddings")
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_position=original)


def _hf_kind(block: Mapping[str, object], where: str) -> RopeKind:
    fallback = None if "factor" in block else "default"
    key = "type" if block.get("rope_type") is None and "type" in block else "rope_type"
    if any(isinstance(value, Mapping) for value in block.values()):
        raise ModelError(f"{where}: settings per layer type are not supported")
    return _supported_kind(Fields(block, where).text(key, fallback), where)


def _supported_kind(kind: str, where: str) -> RopeKind:
    if kind not in get_args(RopeKind):
        raise ModelError(
            f"{where}: RoPE type {quoted(kind)} is not supported (supported: {', '.join(get_args(RopeKind))})"
        )
    return cast(RopeKind, kind)


def rope_from_gguf(metadata: Mapping[str, object], where: str) -> RopeConfig:
    """Read ``llama.rope.*``. The tensor rope_freqs.weight, where a file has it, becomes ``freq_factors``."""
    fields = Fields(metadata, where)
    theta = fields.number("llama.rope.freq_base", DEFAULT_THETA)
    kind = fields.text("llama.rope.scaling.type", "none")
    factor = fields.number("llama.rope.scaling.factor", fields.number("llama.rope.scale_linear", 1.0))
    if kind == "none":
        linear = "llama.rope.scaling.type" not in metadata and factor != 1.0
        return RopeConfig("linear", theta, factor) if linear else RopeConfig("default", theta)
    if kind != "linear":
        raise ModelError(f"{where}: llama.rope.scaling.type {quoted(kind)} is not supported (supported: none, linear)")
    return RopeConfig("linear", theta, factor)


def rope_to_hf(rope: RopeConfig, head_dim: int) -> dict[str, object]:
    """The keys rope_theta and rope_scaling of a config.json. ModelError where no such keys exist."""
    if rope.freq_factors is not None:
        rope = llama3_from_factors(rope, head_dim)
    scaling: dict[str, object] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if scaling is not None and rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def llama3_from_factors(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """The llama3 settings that give ``rope.freq_factors``. ModelError if there are none."""
    if rope.kind == "default" and rope.freq_factors is not None:
        wanted = rope_inv_freq(rope, head_dim)
        factors = np.asarray(rope.freq_factors, dtype=np.float64)
        usual = RopeConfig("llama3", rope.theta, factor=round(float(factors.max()), 4))
        for candidate in (usual, _fit_blend(usual, factors, head_dim)):
            if np.allclose(rope_inv_freq(candidate, head_dim), wanted, rtol=1e-5, atol=0):
                return candidate
    raise ModelError("these RoPE frequency factors (rope_freqs.weight) cannot be written to a config.json")


def _fit_blend(usual: RopeConfig, factors: npt.NDArray[np.float64], head_dim: int) -> RopeConfig:
    """Between the bounds 1 / freq_factor is linear in the frequency, so two numbers describe the blend; the
    third is a free choice (only ratios count): low_freq_factor = 1. ``usual`` where nothing fits."""
    blended = (factors > 1 + 1e-6) & (factors < usual.factor * (1 - 1e-6))
    if np.count_nonzero(blended) < 2:
        return usual
    default = RopeConfig("default", usual.theta)
    turns = rope_inv_freq(default, head_dim).astype(np.float64)[blended] / (2 * math.pi)
    keep = (1 / factors[blended] - 1 / usual.factor) / (1 - 1 / usual.factor)
    slope, intercept = (float(value) for value in np.polyfit(turns, keep, 1))
    if not intercept < 0 < slope:
        return usual
    return replace(
        usual,
        high_freq_factor=round(1 - 1 / intercept, 4),
        original_max_position=round(-slope / intercept),
    )
