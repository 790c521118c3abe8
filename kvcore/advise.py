"""What a cache mode costs, computed from shapes: bytes, the largest context, a floor in time per token.

Nothing is loaded or measured. The floor is the bytes that one decode step must read, weights once and the cache
of each sequence, over the memory bandwidth; kernels are slower than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcore.layout import CODECS, CacheShape, WindowPolicy, narrower
from kvcore.layout.footprint import largest, live_bytes, over_layers, peak_live_bytes
from kvcore.models.config import LlamaConfig
from kvcore.modes import MODES, Mode


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a llama model on which bytes depend."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    max_position: int
    common_window: int | None = None  # where all layers slide: rows beyond it do not live

    @classmethod
    def from_config(cls, config: LlamaConfig) -> ModelShape:
        return cls(**{name: getattr(config, name) for name in cls.__slots__})

    @property
    def streamed_weights(self) -> int:
        """Matrix elements that one decode step reads: all linear layers and the output head."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    @property
    def weights(self) -> int:
        """Elements of all matrices; an embedding of its own is held, but one row of it is read per token."""
        return self.streamed_weights + (0 if self.tie_embeddings else self.vocab_size * self.hidden_size)


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3.1-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, False, 131072),
        "llama-3.1-70b": ModelShape(80, 8192, 28672, 64, 8, 128, 128256, False, 131072),
        "llama-3.2-1b": ModelShape(16, 2048, 8192, 32, 8, 64, 128256, True, 131072),
        "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    }
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is to run.

    ``bits_per_weight`` includes scales; ``bandwidth`` in bytes per second; ``memory`` in bytes, for weights and
    cache; ``dtype`` is that of raw rows.
    """

    shape: ModelShape
    context: int
    bits_per_weight: float
    bandwidth: float
    batch: int = 1
    dtype: str = "float16"
    window: WindowPolicy = field(default_factory=WindowPolicy)
    memory: int | None = None

    @property
    def weight_bytes(self) -> float:
        return self.shape.weights * self.bits_per_weight / 8

    @property
    def streamed_bytes(self) -> float:
        """Bytes of weights that one decode step reads."""
        return self.shape.streamed_weights * self.bits_per_weight / 8


@dataclass(frozen=True, slots=True)
class ModeCost:
    """One mode under a plan.

    bytes_per_token    what a token adds beyond the window, over all layers and heads
    kv_bytes           one sequence at the plan's context, with the exact raw rows
    fp16_ratio         how many times smaller than mode fp16
    largest_context    tokens per sequence; None without a memory limit
    floor_seconds      one decode step
    tokens_per_second  of the whole batch, at the floor
    """

    mode: str
    bytes_per_token: int
    kv_bytes: int
    fp16_ratio: float
    largest_context: int | None
    floor_seconds: float
    tokens_per_second: float


def mode_costs(plan: Plan) -> list[ModeCost]:
    """Every mode in the order of `MODES`. Modes whose codec cannot store the head size are left out."""
    raw = kv_bytes(plan, MODES["fp16"], plan.context)
    return [_cost(plan, mode, raw) for mode in MODES.values() if not unsupported(plan.shape, mode)]


def unsupported(shape: ModelShape, mode: Mode) -> list[str]:
    """Why ``mode`` cannot store heads of this size; empty where it can."""
    return [reason for codec in (mode.k, mode.v) for reason in CODECS[codec].reasons_against(shape.head_dim)]


def shape_of(plan: Plan, mode: Mode) -> CacheShape:
    """A cache of one sequence under the plan."""
    model = plan.shape
    return CacheShape(
        name=mode.name,
        layout=mode.layout(model.head_dim),
        delegated=mode.delegated,
        num_layers=model.num_layers,
        num_q_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        dtype=plan.dtype,
        window=plan.window,
        batch=1,
        cap=narrower(None, model.common_window),
    )


def kv_bytes(plan: Plan, mode: Mode, tokens: int) -> int:
    """Live bytes of one sequence of ``tokens``, sinks and the page rows that they shadow both counted."""
    return live_bytes(shape_of(plan, mode), tokens)


def largest_context(plan: Plan, mode: Mode) -> int:
    """The most tokens per sequence that fit beside the weights, at every length on the way there.

    At most the model's limit. A delegated mode must hold its prompt raw.
    """
    assert plan.memory is not None
    budget, shape = (plan.memory - plan.weight_bytes) / plan.batch, shape_of(plan, mode)
    found = largest(lambda tokens: peak_live_bytes(shape, tokens) <= budget, plan.shape.max_position)
    return plan.shape.max_position if found is None else found


def _cost(plan: Plan, mode: Mode, raw: int) -> ModeCost:
    layout = mode.layout(plan.shape.head_dim)
    live = kv_bytes(plan, mode, plan.context)
    seconds = (plan.streamed_bytes + plan.batch * live) / plan.bandwidth
    return ModeCost(
        mode=mode.name,
        bytes_per_token=over_layers(
            shape_of(plan, mode),
            layout.bytes_per_token(plan.dtype, plan.window.page_size),
            layout.raw_bytes_per_token(plan.dtype),
        ),
        kv_bytes=live,
        fp16_ratio=raw / live,
        largest_context=None if plan.memory is None else largest_context(plan, mode),
        floor_seconds=seconds,
        tokens_per_second=plan.batch / seconds,
    )
