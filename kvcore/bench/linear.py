"""The linear layers of a decode step on CUDA: our kernel beside torch's int4 product and cuBLAS, interleaved, L2-cold,
checked before they are timed.

Ours does the RMSNorm before (in its launch for a few rows, in one of its own for more) and the residual or the gated
activation after (in its launch), as in a model. The peers do the product alone, over the same outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcore.backends.cuda.linear import FEW_ROWS, WeightTiles, config_for, linear_tiles, unpacked_on
from kvcore.backends.cuda.linear_config import LinearConfig, RowsConfig
from kvcore.backends.cuda.ops import TORCH_DTYPES
from kvcore.bench.attention import read_ceiling
from kvcore.bench.random_model import RandomCheckpoint
from kvcore.bench.timing import interleaved
from kvcore.errors import InputError, KvcoreError
from kvcore.weights.expected import EMBEDDING, HEAD
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

COLUMNS = (
    "layer", "count", "rows", "us", "us_int4", "us_cublas", "tb_per_s", "percent_of_read", "ms", "ms_int4", "ms_cublas",
    "floor_ms", "config", "error",
)  # fmt: skip
COLD = 300_000_000  # bytes of weights that a replay reads at least: no cache holds them
LIMITS = {"float16": 2e-3, "bfloat16": 1.6e-2}  # relative errors, of rounding above all
PEER_LIMIT = 2e-2  # the int4 peer rounds scales and inputs to bf16
BLOCK = 8192  # outputs that are made dense at once
EPS = 1e-5
PEERS = {"int4": "torch.ops.aten._weight_int4pack_mm, bf16", "cublas": "torch.nn.functional.linear over dense weights"}


@dataclass(frozen=True, slots=True)
class Layer:
    """One product of a step, ``count`` times in the model: its weights, which of a norm before, a residual after and a
    gated activation are part of it."""

    name: str
    count: int
    weights: tuple[Weight, ...]
    normed: bool
    gated: bool = False

    @property
    def added(self) -> bool:
        return not self.normed


def layers(checkpoint: RandomCheckpoint) -> Iterator[Layer]:
    config = checkpoint.config

    def load(*names: str) -> tuple[Weight, ...]:
        return tuple(_varied(checkpoint.load(f"model.layers.0.{name}.weight"), seed) for seed, name in enumerate(names))

    many = config.num_layers
    yield Layer("qkv", many, load("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), True)
    yield Layer("o", many, load("self_attn.o_proj"), False)
    yield Layer("gate/up", many, load("mlp.gate_proj", "mlp.up_proj"), True, gated=True)
    yield Layer("down", many, load("mlp.down_proj"), False)
    yield Layer("head", 1, (_varied(checkpoint.load(EMBEDDING if config.tie_embeddings else HEAD), 0),), True)


def _varied(weight: Weight, seed: int) -> Weight:
    """With scales that differ, so that a mistake in their order shows."""
    if isinstance(weight, DenseWeight):
        return weight
    factor: Any = np.random.default_rng(seed).uniform(0.5, 1.5, weight.scales.shape).astype(np.float16)
    return replace(weight, scales=factor * weight.scales, biases=factor * weight.biases)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A layer's weights one after the other: numbers [out, in], or codes with scales and biases [out, in / group]."""

    values: Tensor
    sides: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, weights: Sequence[Weight], dtype: torch.dtype, device: str) -> Matrix:
        if any(isinstance(weight, DenseWeight) for weight in weights):
            return cls(torch.cat([torch.from_numpy(w.dequantize()).to(device).to(dtype) for w in weights]))
        affine = [weight for weight in weights if isinstance(weight, AffineWeight)]
        values = torch.cat([unpacked_on(weight, device) for weight in affine])
        scales, biases = (
            torch.cat([torch.from_numpy(side).to(device) for side in sides])
            for sides in ([w.scales for w in affine], [w.biases for w in affine])
        )
        return cls(values, (scales, biases))

    def dense(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """`BLOCK` outputs at a time."""
        for begin in range(0, len(self.values), BLOCK):
            values = self.values[begin : begin + BLOCK]
            if self.sides is None:
                yield values.to(dtype)
                continue
            scales, biases = (side[begin : begin + BLOCK, :, None].to(dtype) for side in self.sides)
            yield (values.unflatten(1, (scales.shape[1], -1)).to(dtype) * scales + biases).flatten(1)

    def times(self, x: Tensor) -> Tensor:
        """x Wᵀ in float64."""
        return torch.cat([x.double() @ block.T for block in self.dense(torch.float64)], 1)


@dataclass(frozen=True, slots=True)
class Inputs:
    x: Tensor
    norm: tuple[Tensor, float] | None
    added: Tensor | None

    @classmethod
    def random(cls, layer: Layer, rows: int, out: int, dtype: torch.dtype, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        inputs = layer.weights[0].shape[1]
        x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
        norm = (torch.rand(inputs, generator=generator, device=device) + 0.5).to(dtype)
        added = torch.randn(rows, out, generator=generator, device=device).to(dtype)
        return cls(x, (norm, EPS) if layer.normed else None, added if layer.added else None)

    def want(self, layer: Layer, matrix: Matrix) -> Tensor:
        """What the layer gives, in float64."""
        x = self.x.double()
        if self.norm is not None:
            x = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm[0].double()
        y = matrix.times(x)
        if layer.gated:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return y if self.added is None else y + self.added.double()


@dataclass(frozen=True, slots=True)
class Variant:
    """``run`` takes every copy of the weights once."""

    kernel: str
    rows: int
    run: Callable[[], object]
    copies: int
    error: float
    config: LinearConfig | None = None


def run(
    checkpoint: RandomCheckpoint,
    rows: Sequence[int],
    *,
    repeats: int = 25,
    device: str = "cuda",
    cold: int = COLD,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each layer and number of rows, then the model's sum for each number of rows; and what was timed beside
    our kernel, or why not. KvcoreError where our result is wrong: it is not timed."""
    if max(rows) > FEW_ROWS:
        raise InputError(f"--rows {max(rows)}: the kernels take at most {FEW_ROWS}, more go through dense weights")
    ceiling, found = read_ceiling(), []
    notes = {f"peer {name}": words for name, words in PEERS.items()}
    with torch.no_grad():
        for layer in layers(checkpoint):
            progress(f"{layer.name}: building and checking")
            dtype = TORCH_DTYPES[checkpoint.config.dtype]
            tiles = _tiles(layer, dtype, device)
            variants = list(_variants(layer, tiles, rows, dtype, device, cold, notes))
            progress(f"{layer.name}: timing {len(variants)} variants")
            times = interleaved([variant.run for variant in variants], repeats)
            found += _rows(layer, tiles.nbytes, rows, variants, times, ceiling)
            del variants
            if device != "cpu":
                torch.cuda.empty_cache()
    totals = [_total([row for row in found if row["rows"] == count], ceiling) for count in rows]
    return [{"dtype": checkpoint.config.dtype, **row} for row in (*found, *totals)], notes


def _tiles(layer: Layer, dtype: torch.dtype, device: str) -> WeightTiles:
    if layer.gated:
        return WeightTiles.create_gated(layer.weights[0], layer.weights[1], device, dtype)
    return WeightTiles.create(layer.weights, device, dtype)


def _variants(
    layer: Layer,
    tiles: WeightTiles,
    rows: Sequence[int],
    dtype: torch.dtype,
    device: str,
    cold: int,
    notes: dict[str, str],
) -> Iterator[Variant]:
    """Those of one number of rows after those of another. A peer that fails is left out and named in ``notes``."""
    matrix, limit = Matrix.of(layer.weights, dtype, device), LIMITS[str(dtype).removeprefix("torch.")]
    copies = [tiles, *(_copy(tiles) for _ in range(_copies(tiles.nbytes, cold) - 1))]
    peers = {}
    for name, make in (("int4", _int4), ("cublas", _cublas)):
        try:
            peers[name] = make(matrix, dtype, cold)
        except Exception as error:
            notes[f"peer {name}"] = _why(layer, error)
    for count in rows:
        given = Inputs.random(layer, count, tiles.out, dtype, device)
        ours = partial(_ours, copies, given)
        off = _error(ours()[0], given.want(layer, matrix))
        if not off <= limit:
            raise KvcoreError(f"{layer.name}, {count} rows: error {off:.1e} exceeds {limit:.1e}: not timed")
        config = config_for(tiles, count, normed=layer.normed)
        yield Variant("ours", count, ours, len(copies), off, config)
        want = matrix.times(given.x)
        for name, products in list(peers.items()):
            try:
                peer = partial(_each, products, given.x.bfloat16() if name == "int4" else given.x)
                off = _error(peer()[0], want)
                if not off <= PEER_LIMIT:
                    raise KvcoreError(f"error {off:.1e} exceeds {PEER_LIMIT:.0e}: not timed")
            except Exception as error:
                notes[f"peer {name}"] = _why(layer, error)
                del peers[name]
            else:
                yield Variant(name, count, peer, len(products), off)


def _copies(nbytes: int, cold: int) -> int:
    return max(1, math.ceil(cold / nbytes))


def _copy(tiles: WeightTiles) -> WeightTiles:
    sides = None if tiles.sides is None else tiles.sides.clone()
    return replace(tiles, codes=tiles.codes.clone(), sides=sides)


def _ours(copies: Sequence[WeightTiles], given: Inputs) -> list[Tensor]:
    return [linear_tiles(given.x, tiles, norm=given.norm, added=given.added) for tiles in copies]


def _each(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    return [product(x) for product in products]


def _int4(matrix: Matrix, _: torch.dtype, cold: int) -> list[Callable[[Tensor], Tensor]]:
    """torch's int4 product: two codes a byte, the even one high; scale and zero of a code less 8."""
    if matrix.sides is None or int(matrix.values.max()) > 15:
        raise KvcoreError("the weights have no 4 bits")
    scales, biases = (side.float() for side in matrix.sides)
    group = matrix.values.shape[1] // scales.shape[1]
    pairs = (matrix.values[:, ::2] << 4 | matrix.values[:, 1::2]).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    sides = torch.stack([scales, biases + 8 * scales], -1).transpose(0, 1).contiguous().bfloat16()

    def product(packed: Tensor, sides: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, packed, group, sides)

    count = _copies(packed.nbytes + sides.nbytes, cold)
    return [partial(product, packed.clone(), sides.clone()) for _ in range(count)]


def _cublas(matrix: Matrix, dtype: torch.dtype, cold: int) -> list[Callable[[Tensor], Tensor]]:
    dense = torch.cat([block.to(dtype) for block in matrix.dense(torch.float32)])

    def product(weight: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight)

    return [partial(product, dense), *(partial(product, dense.clone()) for _ in range(_copies(dense.nbytes, cold) - 1))]


def _error(y: Tensor, want: Tensor) -> float:
    """The worst ‖y − want‖ / ‖want‖ of a row."""
    return float(((y.double() - want).norm(dim=1) / want.norm(dim=1)).max())


def _why(layer: Layer, error: Exception) -> str:
    words = (str(error).splitlines() or [""])[0].strip()[:200]
    return f"none for {layer.name}: {words if isinstance(error, KvcoreError) else f'{type(error).__name__}: {words}'}"


def _rows(
    layer: Layer,
    nbytes: int,
    rows: Sequence[int],
    variants: Sequence[Variant],
    times: Sequence[list[float]],
    ceiling: float,
) -> list[dict[str, Any]]:
    us = {(v.kernel, v.rows): [1e3 * ms / v.copies for ms in t] for v, t in zip(variants, times, strict=True)}
    by_kernel = {(v.kernel, v.rows): v for v in variants}
    made = []
    for count in rows:
        ours, sample = by_kernel["ours", count], us["ours", count]
        middle, deciles = median(sample), quantiles(sample, n=10)
        rate = nbytes / middle / 1e6
        row: dict[str, Any] = {
            "layer": layer.name,
            "count": layer.count,
            "rows": count,
            "outputs": sum(weight.shape[0] for weight in layer.weights),
            "inputs": layer.weights[0].shape[1],
            "us": middle,
            "us_p10": deciles[0],
            "us_p90": deciles[-1],
            "bytes": nbytes,
            "tb_per_s": rate,
            "percent_of_read": 100 * rate / ceiling,
            "ms": layer.count * middle / 1e3,
            "floor_ms": layer.count * nbytes / ceiling / 1e9,
            "config": _words(ours.config),
            "error": ours.error,
            "copies": ours.copies,
            "repeats": len(sample),
        }
        for name in PEERS:
            peer = by_kernel.get((name, count))
            theirs = None if peer is None else median(us[name, count])
            row |= {
                f"us_{name}": theirs,
                f"ms_{name}": None if theirs is None else layer.count * theirs / 1e3,
                f"error_{name}": None if peer is None else peer.error,
            }
        made.append(row)
    return made


def _total(rows: Sequence[dict[str, Any]], ceiling: float) -> dict[str, Any]:
    """All layers of the model; no sum where one of them is missing."""

    def add(key: str) -> float | None:
        values = [row[key] for row in rows]
        return None if None in values else sum(values)

    moved = sum(row["count"] * row["bytes"] for row in rows)
    sums = {key: add(key) for key in ("ms", "floor_ms", *(f"ms_{name}" for name in PEERS))}
    ms = sum(row["ms"] for row in rows)
    return {
        "layer": "all",
        "count": sum(row["count"] for row in rows),
        "rows": rows[0]["rows"],
        "us": None,
        "us_int4": None,
        "us_cublas": None,
        "bytes": moved,
        "tb_per_s": moved / ms / 1e9,
        "percent_of_read": 100 * moved / ms / 1e9 / ceiling,
        "config": None,
        "error": max(row["error"] for row in rows),
        **sums,
    }


def _words(config: LinearConfig | None) -> str | None:
    """warps x tiles x chunks + turns ahead of `linear_rows`; with "wide" or "apart" instead, of `linear_wide`"""
    if config is None:
        return None
    shape = f"{config.warps}x{config.tiles}x{config.chunks}"
    if isinstance(config, RowsConfig):
        return f"{shape}+{config.ahead}"
    return f"{shape} {'apart' if config.apart else 'wide'}"
