"""One rank's share of a llama: which heads, which part of the MLP, which rows of the head.

Projections into heads and into the MLP are split by outputs, those out of them by inputs, so that a layer needs one
sum over the ranks after attention and one after the MLP. The embedding is whole on every rank: a look-up costs nothing
and needs no collective. The head is split by vocabulary; logits are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.errors import InputError
from kvcore.models.config import LlamaConfig
from kvcore.weights import AffineWeight, Weight, shard
from kvcore.weights.expected import HEAD


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of ``rank`` among ``size``. InputError, with both numbers, where the heads cannot be shared so."""

    config: LlamaConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        check_ranks(self.config, self.size)

    @property
    def local(self) -> LlamaConfig:
        """The config with this rank's heads: what its cache and its attention are made for."""
        q, kv = self._heads()
        return replace(self.config, num_heads=q.stop - q.start, num_kv_heads=kv.stop - kv.start)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same KV head; 1 where none is held twice."""
        return max(1, self.size // self.config.num_kv_heads)

    def part(self, name: str, weight: Weight) -> Weight:
        """This rank's part of the parameter of that Hugging Face name."""
        if self.size == 1:
            return weight
        if name == HEAD:
            return self.head(weight)
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        if projection in ("o_proj", "down_proj"):  # their bias is added after the sum, by every rank
            return weight if kind == "bias" else shard.columns(weight, *self._inputs(projection, weight))
        if projection in ("gate_proj", "up_proj"):
            return shard.rows(weight, *self._mlp())
        if projection in ("q_proj", "k_proj", "v_proj"):
            heads, dim = self._heads()[projection != "q_proj"], self.config.head_dim
            return shard.rows(weight, heads.start * dim, heads.stop * dim)
        return weight

    def head(self, weight: Weight) -> Weight:
        """Rows of the head, also of one that is the embedding; the last rank's are filled up with zeros."""
        count = -(-self.config.vocab_size // self.size)
        return shard.rows(weight, self.rank * count, (self.rank + 1) * count)

    def notice(self, name: str, weight: Weight) -> str | None:
        """Why the part of a quantized weight is not quantized; None where it is."""
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if self.size == 1 or projection not in ("o_proj", "down_proj") or not isinstance(weight, AffineWeight):
            return None
        start, stop = self._inputs(projection, weight)
        if shard.on_groups(weight, start, stop):
            return None
        return (
            f"{projection} is dequantized: {self.size} ranks cut its {weight.shape[1]} inputs within groups of "
            f"{weight.group_size}"
        )

    def _inputs(self, projection: str, weight: Weight) -> tuple[int, int]:
        if projection == "down_proj":
            return self._mlp()
        q, dim = self._heads()[0], self.config.head_dim
        return q.start * dim, q.stop * dim

    def _heads(self) -> tuple[range, range]:
        """Query and KV heads of this rank."""
        q, kv = self.config.num_heads // self.size, self.config.num_kv_heads
        queries = range(self.rank * q, (self.rank + 1) * q)
        if kv % self.size == 0:
            return queries, range(self.rank * (kv // self.size), (self.rank + 1) * (kv // self.size))
        head = self.rank // self.replicas
        return queries, range(head, head + 1)

    def _mlp(self) -> tuple[int, int]:
        """Inner dimensions of this rank, in whole quantization groups where there are enough of them."""
        inner = self.config.intermediate_size
        unit = next(unit for unit in (128, 64, 32, 1) if inner % unit == 0 and inner // unit >= self.size)
        units = inner // unit
        return units * self.rank // self.size * unit, units * (self.rank + 1) // self.size * unit


def check_ranks(config: LlamaConfig, size: int) -> None:
    """InputError where ``size`` ranks cannot share the model."""
    check_heads(config.num_kv_heads, config.num_heads, size)
    if config.intermediate_size < size:
        raise InputError(f"an MLP of {config.intermediate_size} dimensions cannot be shared by {size} ranks")


def check_heads(kv: int, q: int, size: int) -> None:
    """InputError unless the ranks divide the KV heads, or are a multiple of them (then several ranks hold the same
    one) that divides the query heads."""
    allowed = [n for n in range(1, q + 1) if q % n == 0 and (kv % n == 0 or n % kv == 0)]
    if size not in allowed:
        raise InputError(
            f"{kv} KV heads and {q} query heads over {size} ranks: the ranks must divide the KV heads, or be a "
            f"multiple of them that divides the query heads; this model runs on {_listed(allowed)} ranks"
        )


def _listed(numbers: list[int]) -> str:
    words = [str(n) for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
