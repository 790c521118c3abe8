"""LlamaConfig and RoPE from config.json and GGUF metadata, against transformers and the published numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ModelError
from kvcore.models.config import LlamaConfig, RopeConfig
from kvcore.models.rope import llama3_from_factors, rope_inv_freq

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 256,
    "llama.embedding_length": 128,
    "llama.feed_forward_length": 256,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 4096,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def from_hf(**changes: Any) -> LlamaConfig:
    config = {key: value for key, value in (HF | changes).items() if value is not ...}
    return LlamaConfig.from_hf(json.loads(json.dumps(config)), "dir/config.json")


def from_gguf(changes: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig.from_gguf({k: v for k, v in (GGUF | changes).items() if v is not ...}, "x.gguf")


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def test_hf_fields() -> None:
    config = from_hf()
    assert config == LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_position=4096,
        rope=RopeConfig("default", 10000.0),
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2, 7),
        dtype="bfloat16",
    )


def test_gguf_fields_agree_with_hf() -> None:
    expected = from_hf(tie_word_embeddings=False, torch_dtype="float16", eos_token_id=2)
    assert from_gguf({}) == expected


def test_config_survives_writing() -> None:
    config = from_hf(head_dim=96, rope_scaling=LLAMA3, attention_bias=True, rope_theta=500000.0)
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf())), "") == config


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 96}, "head_dim", 96),
        ({"num_key_value_heads": ...}, "num_kv_heads", 4),
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"eos_token_id": 2}, "eos_token_ids", (2,)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"bos_token_id": None}, "bos_token_id", None),
        ({"torch_dtype": ..., "dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "torch.float16"}, "dtype", "float16"),
        ({"rope_theta": 500000}, "rope", RopeConfig("default", 500000.0)),
        ({"sliding_window": None}, "num_layers", 2),
        ({"sliding_window": 4096, "use_sliding_window": False}, "layer_windows", ()),
        ({"sliding_window": 4096}, "layer_windows", (4096, 4096)),
        ({"sliding_window": 8, "max_window_layers": 1}, "layer_windows", (None, 8)),
        ({"sliding_window": 8, "max_window_layers": 2}, "layer_windows", ()),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_windows", ()),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_windows",
            (8, None),
        ),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "layer_windows", ()),
        ({"quantization_aware": True}, "num_layers", 2),
    ],
    ids=lambda value: None if isinstance(value, tuple | int | RopeConfig) else str(value)[:40],
)
def test_hf_variants(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(from_hf(**changes), field) == value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ..., "vocab_size": None}, ["missing keys vocab_size, hidden_size"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 64}, ["6", "4", "heads"]),
        ({"num_attention_heads": 3}, ["head_dim is missing", "128", "3"]),
        ({"head_dim": 33}, ["head_dim 33 is odd"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5"]),
        ({"vocab_size": 10**30}, ["vocab_size", "2147483647"]),
        ({"hidden_size": "128\n" * 200}, ["hidden_size", "integer"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"eos_token_id": "2"}, ["eos_token_id", "'2'"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "float32, float16, bfloat16"]),
        ({"model_type": "mixtral"}, ["'mixtral'", "supported: llama"]),
        ({"model_type": ...}, ["model_type"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["SequenceClassification", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"sliding_window": -1}, ["sliding_window", "-1"]),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, ["layer_types", "a list of 2 words"]),
        ({"sliding_window": 8, "layer_types": ["chunked_attention"] * 2}, ["layer_types", "chunked_attention"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["layer_types has sliding_attention", "no sliding_window"]),
        ({"sliding_window": 8, "max_window_layers": -1}, ["max_window_layers", "-1"]),
        ({"sliding_window": 8, "use_sliding_window": 1}, ["use_sliding_window", "true or false"]),
        ({"model_type": "mistral"}, ["LlamaForCausalLM", "supported: MistralForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "default, linear, llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["'dynamic'"]),
        ({"rope_scaling": {"factor": 4.0}}, ["rope_scaling", "rope_type"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "0"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ["low_freq_factor", "high_freq_factor"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
        ({"rope_theta": -1}, ["rope_theta", "-1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3}, ["disagree"]),
        ({"text_config": {"model_type": "qwen2"}}, ["'qwen2'"]),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_bad_hf_config_is_one_line_with_file_and_key(changes: dict[str, Any], words: list[str]) -> None:
    message = error_of(from_hf, **changes)
    assert message.startswith("dir/config.json")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "qwen2"}, ["'qwen2'", "supported: llama"]),
        ({"general.architecture": 7}, ["general.architecture"]),
        ({"llama.block_count": 0}, ["llama.block_count", "0"]),
        ({"llama.attention.head_count_kv": 0}, ["llama.attention.head_count_kv", "0"]),
        ({"llama.attention.head_count": 0}, ["llama.attention.head_count", "0"]),
        ({"llama.attention.head_count": 6, "llama.attention.key_length": 32}, ["6", "4"]),
        ({"llama.attention.head_count_kv": [2, 1]}, ["llama.attention.head_count_kv", "[2, 1]"]),
        ({"llama.embedding_length": ...}, ["missing key llama.embedding_length"]),
        ({"llama.attention.key_length": 33}, ["odd"]),
        ({"llama.attention.value_length": 64}, ["value_length 64", "32"]),
        ({"llama.rope.dimension_count": 16}, ["dimension_count 16", "32"]),
        ({"llama.rope.scaling.type": "yarn"}, ["'yarn'"]),
        ({"llama.expert_count": 8}, ["mixture of experts", "8"]),
        ({"llama.vocab_size": ...}, ["llama.vocab_size"]),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_bad_gguf_metadata_is_one_line_with_file_and_key(changes: dict[str, Any], words: list[str]) -> None:
    if changes.get("llama.attention.head_count") == 6:
        changes = changes | {"llama.attention.head_count_kv": 4}
    message = error_of(from_gguf, changes)
    assert message.startswith("x.gguf")
    for word in words:
        assert word in message


def test_B26_heads_that_do_not_divide_name_both_numbers() -> None:
    message = error_of(from_hf, num_attention_heads=6, num_key_value_heads=4, hidden_size=384)
    assert "6 attention heads are not divisible by 4 key/value heads" in message


def test_gguf_linear_scaling_and_vocabulary_from_tokens() -> None:
    config = from_gguf(
        {
            "llama.vocab_size": ...,
            "tokenizer.ggml.tokens": ["a", "b", "c"],
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 4.0,
            "tokenizer.ggml.eot_token_id": 7,
        }
    )
    assert config.vocab_size == 3
    assert config.rope == RopeConfig("linear", 10000.0, 4.0)
    assert config.eos_token_ids == (2, 7)


# RoPE


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_B61_llama3_frequencies_with_either_key(key: str) -> None:
    block = {key if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    config = from_hf(head_dim=128, rope_theta=500000.0, rope_scaling=block)
    inv_freq = rope_inv_freq(config.rope, 128)
    plain = rope_inv_freq(RopeConfig("default", 500000.0), 128)
    expected = {0: 1.0, 28: 0.00321145, 29: 0.00216657, 33: 0.000312694, 63: 3.068926e-07}
    for index, value in expected.items():
        assert inv_freq[index] == pytest.approx(value, rel=2e-6)
    np.testing.assert_array_equal(inv_freq[:29], plain[:29])
    assert inv_freq[29] / plain[29] == pytest.approx(0.82817, abs=1e-5)
    assert inv_freq[33] / plain[33] == pytest.approx(0.27143, abs=1e-5)
    np.testing.assert_array_equal(inv_freq[35:], plain[35:] / 8)


def transformers_inv_freq(config: dict[str, Any]) -> np.ndarray:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**config))
    return rotary.inv_freq.numpy()


ROPE_CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500000.0},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama-3.2": {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"factor": 32.0}},
    "rope_parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    "rope_parameters-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}},
}


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", ROPE_CONFIGS)
def test_M10_frequencies_are_those_of_transformers(name: str, head_dim: int) -> None:
    settings = {"head_dim": head_dim, "max_position_embeddings": 131072} | ROPE_CONFIGS[name]
    rope = from_hf(**settings).rope
    expected = transformers_inv_freq(HF | settings)
    # transformers blends in float32, which costs a head size that no Llama 3 has a little more.
    rtol = 3e-6 if head_dim == 96 else 1e-6
    np.testing.assert_allclose(rope_inv_freq(rope, head_dim), expected, rtol=rtol, atol=0)


def test_M10_angles_of_llama_31_at_the_positions_that_matter() -> None:
    settings = {"head_dim": 128, "max_position_embeddings": 131072} | ROPE_CONFIGS["llama-3.1"]
    mine = rope_inv_freq(from_hf(**settings).rope, 128).astype(np.float64)
    theirs = transformers_inv_freq(HF | settings).astype(np.float64)
    for position in (0, 8191, 8192, 131071):
        np.testing.assert_allclose(position * mine, position * theirs, rtol=1e-6, atol=0)


def test_B95_rope_inside_text_config_is_honoured() -> None:
    nested = from_hf(text_config={"rope_scaling": LLAMA3, "rope_theta": 500000.0})
    assert nested.rope == from_hf(rope_scaling=LLAMA3, rope_theta=500000.0).rope
    assert nested.rope.kind == "llama3"


def test_B95_linear_position_4000_is_the_unscaled_1000() -> None:
    linear = from_hf(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}).rope
    plain = rope_inv_freq(RopeConfig("default", 10000.0), 64)
    np.testing.assert_array_equal(4000 * rope_inv_freq(linear, 64), 1000 * plain)


@pytest.mark.parametrize(
    ("rope", "head_dim"),
    [
        (RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192), 128),
        (RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192), 64),
        (RopeConfig("llama3", 10000.0, 4.0, 1.0, 6.0, 2048), 128),
    ],
    ids=["llama-3.1", "llama-3.2", "other"],
)
def test_gguf_frequency_factors_are_llama3_scaling(rope: RopeConfig, head_dim: int) -> None:
    plain = RopeConfig("default", rope.theta)
    factors = rope_inv_freq(plain, head_dim) / rope_inv_freq(rope, head_dim)
    loaded = RopeConfig("default", rope.theta, freq_factors=tuple(float(f) for f in factors))
    np.testing.assert_allclose(rope_inv_freq(loaded, head_dim), rope_inv_freq(rope, head_dim), rtol=1e-6)
    found = llama3_from_factors(loaded, head_dim)
    assert found.freq_factors is None
    np.testing.assert_allclose(rope_inv_freq(found, head_dim), rope_inv_freq(rope, head_dim), rtol=1e-5)


def test_frequency_factors_without_llama3_form_are_refused_by_name() -> None:
    factors = tuple(1.0 + 3 * (i % 2) for i in range(32))
    message = error_of(llama3_from_factors, RopeConfig("default", 10000.0, freq_factors=factors), 64)
    assert "rope_freqs.weight" in message
