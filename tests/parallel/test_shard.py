"""Shares of a model: which heads a rank has, what a part of a weight holds, and logits equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks
from tiny import TinyLlama, write_tiny_gguf, write_tiny_llama

from kvcore.attention import make_cache
from kvcore.backends import load_backend
from kvcore.cache import CacheSpec
from kvcore.communicator import SINGLE, Communicator
from kvcore.errors import InputError, ModelError
from kvcore.models.config import LlamaConfig
from kvcore.models.llama import forward, load_params
from kvcore.models.shard import Shard, check_ranks
from kvcore.modes import MODES
from kvcore.weights import AffineWeight, DenseWeight, open_checkpoint, resolve_model, shard
from kvcore.weights.affine import affine_quantize, pack

IDS = np.random.default_rng(0).integers(5, 200, (1, 40))


def config_of(**shape: Any) -> LlamaConfig:
    return LlamaConfig.from_hf(TinyLlama(**shape).hf_config(), "test")


def logits(path: Path, size: int, notify: Callable[[str], None] = lambda _: None) -> list[np.ndarray]:
    """float32 [T, vocab] of IDS, as each of ``size`` ranks has them."""
    backend, checkpoint = load_backend("reference"), open_checkpoint(path)

    def run(ranks: Communicator) -> np.ndarray:
        local = Shard(checkpoint.config, ranks.rank, ranks.size).local
        params = load_params(backend, checkpoint, "float32", ranks=ranks, notify=notify)
        shape = (local.num_layers, local.num_heads, local.num_kv_heads, local.head_dim)
        cache = make_cache(backend, CacheSpec(MODES["fp16"], *shape, "float32"))
        found: np.ndarray = forward(backend.ops, local, params, IDS, cache, all_logits=True)[0]
        assert cache.layers[0].view().tail_k.shape[1] == local.num_kv_heads
        return found

    return [run(SINGLE)] if size == 1 else on_ranks(size, run)


SHAPES: dict[str, dict[str, Any]] = {
    "4 KV heads": {"heads": 8, "kv_heads": 4, "head_dim": 32},
    "biases": {"heads": 4, "kv_heads": 4, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "tied, a vocabulary that does not divide": {"heads": 4, "kv_heads": 4, "vocab": 251, "tie": True},
    "untied, a vocabulary that does not divide": {"heads": 4, "kv_heads": 4, "vocab": 253},
    "4 bits in groups of 32": {"heads": 4, "kv_heads": 4, "quantize": {"bits": 4, "group_size": 32}},
    "3 bits in groups of 64": {"heads": 4, "kv_heads": 4, "quantize": {"bits": 3, "group_size": 64}},
    "KV heads held twice": {"heads": 8, "kv_heads": 2, "head_dim": 32},
    "one KV head": {"heads": 4, "kv_heads": 1, "head_dim": 32},
    "an MLP that is cut unevenly": {"heads": 4, "kv_heads": 4, "intermediate": 160, "hidden": 64},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shares_give_the_logits_of_one_process(tmp_path: Path, shape: dict[str, Any], size: int) -> None:
    path = write_tiny_llama(tmp_path / "m", **shape)
    (want,) = logits(path, 1)
    for got in logits(path, size):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("size", [3, 9])
def test_smollm2_gives_the_logits_of_one_process(size: int) -> None:
    """9 query and 3 KV heads: a KV head for each of 3 ranks, and each one held by 3 of 9."""
    try:
        path = resolve_model(None).path
    except ModelError as error:
        pytest.skip(str(error))
    (want,) = logits(path, 1)
    for got in logits(path, size):
        np.testing.assert_allclose(got, want, atol=2e-4, rtol=0)  # of logits up to about 30


def test_a_gguf_file_is_shared_too(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", heads=3, kv_heads=3, hidden=96, intermediate=96)
    (want,) = logits(path, 1)
    for got in logits(path, 3):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)


def test_a_part_that_ends_within_a_group_is_dequantized_with_a_reason(tmp_path: Path) -> None:
    quantize = {"bits": 4, "group_size": 64}
    path = write_tiny_llama(tmp_path / "m", heads=4, kv_heads=4, head_dim=32, quantize=quantize)
    said: list[str] = []
    (want,) = logits(path, 1, said.append)
    assert said == []
    got = logits(path, 4, said.append)
    np.testing.assert_allclose(got[0], want, atol=2e-5, rtol=0)
    assert set(said) == {"o_proj is dequantized: 4 ranks cut its 128 inputs within groups of 64"}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_columns_stay_packed_on_group_boundaries(bits: int) -> None:
    values = np.random.default_rng(bits).standard_normal((5, 256)).astype(np.float32)
    codes, scales, biases = affine_quantize(values, bits, 64)
    weight = AffineWeight(pack(codes, bits), scales, biases, bits, 64)
    part = shard.columns(weight, 64, 192)
    assert isinstance(part, AffineWeight)
    np.testing.assert_array_equal(part.dequantize(), weight.dequantize()[:, 64:192])
    within = shard.columns(weight, 32, 96)
    assert isinstance(within, DenseWeight)
    np.testing.assert_array_equal(within.array, weight.dequantize()[:, 32:96])


def test_rows_beyond_the_last_are_zeros() -> None:
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    codes, scales, biases = affine_quantize(values, 4, 32)
    weight = AffineWeight(pack(codes, 4), scales, biases, 4, 32)
    for each in (weight, DenseWeight(values)):
        part = shard.rows(each, 3, 6)
        np.testing.assert_array_equal(part.dequantize()[:2], each.dequantize()[3:])
        np.testing.assert_array_equal(part.dequantize()[2], np.zeros(64))


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    smollm2 = config_of(heads=9, kv_heads=3)
    with pytest.raises(InputError, match=r"^3 KV heads and 9 query heads over 2 ranks: .* runs on 1, 3 or 9 ranks$"):
        check_ranks(smollm2, 2)
    check_ranks(smollm2, 3)
    with pytest.raises(InputError, match="4 KV heads and 8 query heads over 3 ranks"):
        check_ranks(config_of(heads=8, kv_heads=4), 3)


def test_ranks_that_are_a_multiple_of_the_heads_hold_them_in_turn() -> None:
    config = config_of(heads=9, kv_heads=3)
    weight = DenseWeight(np.arange(3 * 64, dtype=np.float32)[:, None].repeat(4, 1))
    starts = []
    for rank in range(9):
        share = Shard(config, rank, 9)
        assert (share.local.num_heads, share.local.num_kv_heads, share.replicas) == (1, 1, 3)
        part = share.part("model.layers.0.self_attn.k_proj.weight", weight)
        starts.append(int(part.dequantize()[0, 0]) // 64)
    assert starts == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_every_rank_has_its_own_part_of_the_mlp() -> None:
    config = config_of(heads=4, kv_heads=4, intermediate=160)
    weight = DenseWeight(np.arange(160, dtype=np.float32)[:, None].repeat(2, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    parts = [Shard(config, rank, 4).part(name, weight).dequantize()[:, 0] for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(160))
    assert all(len(part) % 32 == 0 for part in parts)
