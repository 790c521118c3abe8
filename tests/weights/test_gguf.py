"""Weights from GGUF: lossless affine forms, llama.cpp's row order, types that are dequantized, RoPE factors."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import TinyLlama, llama_cpp_rows, random_blocks, write_tiny_gguf, write_tiny_llama

from kvcore.errors import ModelError
from kvcore.models.config import RopeConfig
from kvcore.models.rope import rope_inv_freq
from kvcore.weights import AffineWeight, DenseWeight, open_checkpoint
from kvcore.weights.gguf import hf_name, unpermuted_rows

WIDE = {"hidden": 256, "intermediate": 512}


def rounded(array: np.ndarray, qtype: str) -> np.ndarray:
    """What ``qtype`` keeps of a matrix, by the gguf package."""
    kind = gguf.GGMLQuantizationType[qtype]
    return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_M3_rows_and_values_are_those_of_the_original(tmp_path: Path, qtype: str) -> None:
    shape = {"attention_bias": True, "mlp_bias": True, "kv_heads": 1}
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype=qtype, **shape))
    tensors = TinyLlama(**shape).tensors()
    assert set(checkpoint.names()) == set(tensors)
    assert checkpoint.config.attention_bias
    assert checkpoint.config.mlp_bias
    for name, original in tensors.items():
        expected = original if original.ndim == 1 or qtype == "F32" else rounded(original, qtype)
        np.testing.assert_array_equal(checkpoint.load(name).dequantize(), expected, err_msg=name)


def test_M3_llama_cpp_order_differs_from_the_original(tmp_path: Path) -> None:
    tiny = TinyLlama()
    name = "model.layers.0.self_attn.q_proj.weight"
    original = tiny.tensors()[name]
    permuted = llama_cpp_rows(name, original, tiny)
    assert not np.array_equal(permuted, original)
    np.testing.assert_array_equal(permuted[unpermuted_rows(256, 4)], original)


@pytest.mark.parametrize(("qtype", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_affine_types_stay_packed(tmp_path: Path, qtype: str, bits: int) -> None:
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype=qtype))
    weight = checkpoint.load("model.layers.1.self_attn.k_proj.weight")
    assert isinstance(weight, AffineWeight)
    assert (weight.bits, weight.group_size, weight.shape) == (bits, 32, (128, 128))
    assert weight.scales.dtype == np.float16
    assert checkpoint.notices == ()


def test_a_bias_that_overflows_float16_moves_to_float32(tmp_path: Path) -> None:
    head = np.full((256, 128), 60000.0, np.float32)
    head[:, 1] = -60000
    path = write_tiny_gguf(tmp_path / "x.gguf", qtype="Q8_0", extra_tensors={"lm_head.weight": head})
    weight = open_checkpoint(path).load("lm_head.weight")
    assert isinstance(weight, AffineWeight)
    np.testing.assert_array_equal(weight.dequantize(), rounded(head, "Q8_0"))


@pytest.mark.parametrize("qtype", ["Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K"])
def test_k_quants_are_dequantized_with_a_notice(tmp_path: Path, qtype: str) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", qtype=qtype, **WIDE)
    checkpoint = open_checkpoint(path)
    kind = gguf.GGMLQuantizationType[qtype]
    (notice,) = checkpoint.notices
    assert f"16 {qtype}" in notice
    for name, rows in (("mlp.up_proj", None), ("self_attn.q_proj", unpermuted_rows(256, 4))):
        name = f"model.layers.0.{name}.weight"
        weight = checkpoint.load(name)
        assert isinstance(weight, DenseWeight)
        blocks = random_blocks(*weight.shape, kind, seed=len(name))
        expected = gguf.quants.dequantize(blocks, kind)
        np.testing.assert_array_equal(weight.dequantize(), expected if rows is None else expected[rows])


@pytest.mark.parametrize(
    ("qtype", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_1", "float16")]
)
def test_dtype_is_that_of_the_embedding(tmp_path: Path, qtype: str, dtype: str) -> None:
    assert open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype=qtype)).config.dtype == dtype


def test_config_agrees_with_the_safetensors_original(tmp_path: Path) -> None:
    shape = {"tie": True, "head_dim": 96, "rope_theta": 500000.0}
    from_hf = open_checkpoint(write_tiny_llama(tmp_path / "hf", **shape)).config
    from_gguf = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="F32", **shape)).config
    assert from_gguf == from_hf


def test_M10_rope_factors_tensor_scales_the_frequencies(tmp_path: Path) -> None:
    llama3 = RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)
    wanted = rope_inv_freq(llama3, 64)
    factors = rope_inv_freq(RopeConfig("default", 500000.0), 64) / wanted
    path = write_tiny_gguf(tmp_path / "x.gguf", rope_theta=500000.0, rope_factors=factors)
    rope = open_checkpoint(path).config.rope
    assert rope.freq_factors is not None
    np.testing.assert_allclose(rope_inv_freq(rope, 64), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("factors", "word"),
    [(np.ones(16), "[16]"), (np.zeros(32), "not positive"), (np.full(32, np.nan), "not positive")],
    ids=["wrong-length", "zero", "nan"],
)
def test_bad_rope_factors_are_refused(tmp_path: Path, factors: np.ndarray, word: str) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", rope_factors=factors)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight") as caught:
        open_checkpoint(path)
    assert word in str(caught.value)


def test_superfluous_and_missing_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path, extra_tensors={"vision.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match=r"superfluous: vision\.weight"):
        open_checkpoint(path)
    write_tiny_gguf(path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.0.attn_v.weight", b"blk.0.attn_w.weight"))
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    assert "missing: model.layers.0.self_attn.v_proj.weight" in str(caught.value)
    assert "superfluous: blk.0.attn_w.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.11.attn_output.bias", "model.layers.11.self_attn.o_proj.bias"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.x.ffn_norm.weight", "blk.x.ffn_norm.weight"),
        ("blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_inp.weight"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert hf_name(name) == expected


@pytest.mark.smollm2
def test_real_model_equals_the_gguf_package_s_values(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    reader = {t.name: t for t in gguf.GGUFReader(checkpoint.where).tensors}
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_embeddings
    assert config.vocab_size == 49152
    for theirs, mine, rows in (
        ("token_embd.weight", "model.embed_tokens.weight", None),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight", None),
        ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight", unpermuted_rows(576, 9)),
        ("blk.7.attn_k.weight", "model.layers.7.self_attn.k_proj.weight", unpermuted_rows(192, 3)),
    ):
        weight = checkpoint.load(mine)
        assert isinstance(weight, AffineWeight)
        tensor = reader[theirs]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(weight.dequantize(), expected if rows is None else expected[rows])
