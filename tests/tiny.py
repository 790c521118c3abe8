"""Seeded random llamas of a few hundred kilobytes, as Hugging Face or MLX folders and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from kvcore.weights.affine import affine_quantize, pack

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Shape of a tiny llama; ``tensors()`` are its weights, the same for the same fields."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 128
    intermediate: int = 256
    vocab: int = 256
    tie: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: Mapping[str, object] | None = None
    rope_theta: float = 10000.0
    max_position: int = 4096
    seed: int = 0
    eos_token_id: int | list[int] | None = 2
    bos_token_id: int | None = 1
    sliding_window: int | None = None  # a mistral
    layer_types: tuple[str, ...] | None = None  # with it, a ministral

    def tensors(self) -> dict[str, np.ndarray]:
        """float32 arrays by Hugging Face name."""
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = {
            "self_attn.q_proj": (q, self.hidden, self.attention_bias),
            "self_attn.k_proj": (kv, self.hidden, self.attention_bias),
            "self_attn.v_proj": (kv, self.hidden, self.attention_bias),
            "self_attn.o_proj": (self.hidden, q, self.attention_bias),
            "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
        }
        tensors = {"model.embed_tokens.weight": normal(self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, (out, inputs, has_bias) in linear.items():
                tensors[f"{at}.{name}.weight"] = normal(out, inputs)
                if has_bias:
                    tensors[f"{at}.{name}.bias"] = normal(out)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{at}.{norm}.weight"] = 1 + 0.1 * normal(self.hidden)
        tensors["model.norm.weight"] = 1 + 0.1 * normal(self.hidden)
        head = normal(self.vocab, self.hidden)
        return tensors if self.tie else tensors | {"lm_head.weight": head}

    def hf_config(self) -> dict[str, Any]:
        """The config.json, without dtype and quantization."""
        name, sliding = "Llama", {}
        if self.sliding_window is not None:
            name = "Mistral" if self.layer_types is None else "Ministral"
            sliding = {"sliding_window": self.sliding_window}
            sliding |= {} if self.layer_types is None else {"layer_types": list(self.layer_types)}
        return {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": name.lower(),
            **sliding,
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tie,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
        }


def write_tiny_llama(
    folder: Path,
    *,
    dtype: str = "float32",
    shards: int = 1,
    quantize: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    **shape: Any,
) -> Path:
    """Write config.json and safetensors of ``TinyLlama(**shape)``; return the folder. No tokenizer.

    ``quantize`` makes an MLX checkpoint: {"bits", "group_size", "overrides": {module: {"bits", "group_size"} or
    False}, "unlisted": {...}}; modules in ``unlisted`` differ likewise, but config.json does not say so.
    """
    tiny = TinyLlama(**shape)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.hf_config() | {"torch_dtype": dtype}
    tensors = tiny.tensors() | dict(extra_tensors or {})
    if quantize is None:
        stored = {name: array.astype(_dtype(dtype)) for name, array in tensors.items()}
    else:
        stored = _mlx_tensors(tensors, dtype, quantize)
        config["quantization"] = {"group_size": quantize["group_size"], "bits": quantize["bits"]}
        config["quantization"] |= quantize.get("overrides", {})
    write_folder(folder, config, stored, shards)
    return folder


def write_folder(folder: Path, config: Mapping[str, Any], stored: Mapping[str, np.ndarray], shards: int) -> None:
    """config.json and one or several safetensors files with an index."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        save_file(dict(stored), folder / "model.safetensors")
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: stored[name] for name in list(stored)[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tiny_gguf(
    path: Path,
    *,
    qtype: str = "Q8_0",
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    rope_factors: np.ndarray | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    **shape: Any,
) -> Path:
    """Write ``TinyLlama(**shape)`` as llama.cpp's converter does: q and k permuted, matrices in ``qtype``.

    ``metadata`` adds keys (a tokenizer, say). Types that the gguf package cannot make get seeded random blocks.
    """
    tiny = TinyLlama(**shape)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(tiny.layers)
    writer.add_context_length(tiny.max_position)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.intermediate)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_rope_freq_base(tiny.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tiny.vocab)
    if tiny.bos_token_id is not None:
        writer.add_bos_token_id(tiny.bos_token_id)
    if isinstance(tiny.eos_token_id, int):
        writer.add_eos_token_id(tiny.eos_token_id)
    if metadata is not None:
        metadata(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    for name, array in (tiny.tensors() | dict(extra_tensors or {})).items():
        _add_gguf_tensor(writer, name, llama_cpp_rows(name, array, tiny), gguf.GGMLQuantizationType[qtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, module = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{HF_TO_GGUF[module]}.{kind}"
    return f"{HF_TO_GGUF.get(stem, stem)}.{kind}"


def llama_cpp_rows(name: str, array: np.ndarray, tiny: TinyLlama) -> np.ndarray:
    """Rows of q and k in llama.cpp's order: the halves of each head interleaved."""
    heads = {"q_proj": tiny.heads, "k_proj": tiny.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return array
    split = array.reshape(heads, 2, tiny.head_dim // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def random_blocks(rows: int, columns: int, qtype: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    """Raw bytes [rows, bytes per row] of a K-quant with small float16 scales, random codes elsewhere."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}[qtype.name]
    for place in places:
        blocks[..., place : place + 2] = scale
    return blocks.reshape(rows, -1)


def _add_gguf_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, qtype: gguf.GGMLQuantizationType) -> None:
    if array.ndim == 1 or qtype.name == "F32":
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
        return
    try:
        raw = gguf.quants.quantize(np.ascontiguousarray(array), qtype)
    except NotImplementedError:
        raw = random_blocks(*array.shape, qtype, seed=len(name))
    writer.add_tensor(gguf_name(name), raw, raw_dtype=qtype)


def _mlx_tensors(tensors: Mapping[str, np.ndarray], dtype: str, quantize: Mapping[str, Any]) -> dict[str, np.ndarray]:
    usual = {"bits": quantize["bits"], "group_size": quantize["group_size"]}
    differing = quantize.get("overrides", {}) | quantize.get("unlisted", {})
    stored = {}
    for name, array in tensors.items():
        module = name.removesuffix(".weight")
        setting = differing.get(module, usual)
        if array.ndim == 1 or setting is False or array.shape[1] % setting["group_size"]:
            stored[name] = array.astype(_dtype(dtype))
            continue
        values = array.astype(_dtype(dtype)).astype(np.float32)
        codes, scales, biases = affine_quantize(values, setting["bits"], setting["group_size"])
        stored[name] = pack(codes, setting["bits"])
        stored[f"{module}.scales"] = scales.astype(_dtype(dtype))
        stored[f"{module}.biases"] = biases.astype(_dtype(dtype))
    return stored


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
