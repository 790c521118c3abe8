"""Tensors of a llama GGUF under Hugging Face names.

Q8_0, Q4_0 and Q4_1 are affine with groups of 32, so they become AffineWeight without loss; other quantized
types are dequantized by the gguf package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError
from kvcore.models.config import LlamaConfig
from kvcore.models.fields import quoted
from kvcore.weights.gguf_header import Bytes, GgufHeader, GgufTensor
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

ROPE_FACTORS = "rope_freqs.weight"
GROUP = 32

_DENSE = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a llama tensor; a name that llama does not have comes back as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{int(layer[1])}.{_LAYER[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def unpermuted_rows(out: int, heads: int) -> npt.NDArray[np.intp]:
    """Row order that undoes llama.cpp's permutation of q and k.

    llama.cpp interleaves the two halves of each head's dimensions, because its RoPE rotates neighbours where
    Hugging Face's rotates the halves.
    """
    return np.arange(out).reshape(heads, out // heads // 2, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The tensors of one file by Hugging Face name; ``config`` says how many heads q and k have."""

    header: GgufHeader
    config: LlamaConfig
    by_name: Mapping[str, GgufTensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.by_name.items()}

    def load(self, name: str) -> Weight:
        tensor = self.by_name[name]
        blocks = self.header.blocks(tensor)
        rows = self._row_order(name)
        if len(tensor.shape) == 1:
            vector = _dense(blocks, tensor).array
            return DenseWeight(vector if rows is None else vector[rows])
        if rows is not None:  # a row moves with all it has: codes, scales and biases
            blocks = blocks[rows]
        if tensor.type_name in _AFFINE and len(tensor.shape) == 2:
            return _AFFINE[tensor.type_name](blocks)
        return _dense(blocks, tensor)

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        if ".self_attn.q_proj." in name:
            heads = self.config.num_heads
        elif ".self_attn.k_proj." in name:
            heads = self.config.num_kv_heads
        else:
            return None
        return unpermuted_rows(heads * self.config.head_dim, heads)


def open_tensors(header: GgufHeader, config: LlamaConfig) -> GgufTensors:
    by_name: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if tensor.type_name not in _DENSE and tensor.type_name not in _AFFINE:
            _check_dequantizable(header, tensor)
        by_name[hf_name(name)] = tensor
    return GgufTensors(header, config, by_name)


def rope_factors(header: GgufHeader, head_dim: int) -> tuple[float, ...] | None:
    """The numbers that divide RoPE's inverse frequencies, where the file has them and they are not all 1."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    where = f"{header.path}: tensor {ROPE_FACTORS}"
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{where} must be F32 {[head_dim // 2]}, is {tensor.type_name} {list(tensor.shape)}")
    factors = header.blocks(tensor).reshape(-1).view("<f4")
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise ModelError(f"{where} holds a number that is not positive")
    return None if np.all(factors == 1) else tuple(float(factor) for factor in factors)


def dequantized_types(tensors: GgufTensors) -> dict[str, int]:
    """How many tensors of which type have no affine form and load as float32."""
    counts: dict[str, int] = {}
    for tensor in tensors.by_name.values():
        if tensor.type_name not in _DENSE and tensor.type_name not in _AFFINE:
            counts[tensor.type_name] = counts.get(tensor.type_name, 0) + 1
    return counts


def _dense(blocks: Bytes, tensor: GgufTensor) -> DenseWeight:
    if tensor.type_name in _DENSE:
        flat = blocks.reshape(-1).view(_DENSE[tensor.type_name])
    else:
        flat = _dequantize(blocks, tensor.type_name)
    return DenseWeight(flat.reshape(tensor.shape))


def _check_dequantizable(header: GgufHeader, tensor: GgufTensor) -> None:
    try:
        _dequantize(np.zeros((1, 1, tensor.block_bytes), np.uint8), tensor.type_name)
    except NotImplementedError as error:
        raise ModelError(
            f"{header.path}: tensor {quoted(tensor.name)} has type {tensor.type_name}, "
            f"which the gguf package cannot dequantize"
        ) from error


def _dequantize(blocks: Bytes, type_name: str) -> npt.NDArray[np.float32]:
    """float32 [rows, columns]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: npt.NDArray[np.float32] = dequantize(
        np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1), GGMLQuantizationType[type_name]
    )
    return values


def _halves(blocks: Bytes, index: int) -> npt.NDArray[np.float16]:
    """The float16 at bytes [2 * index, 2 * index + 2) of each block: [rows, groups]."""
    return np.ascontiguousarray(blocks[..., 2 * index : 2 * index + 2]).view("<f2")[..., 0]


def _times(scales: npt.NDArray[np.float16], power: int) -> npt.NDArray[np.generic]:
    """``-power * scales``, power a power of two: exact in float16 unless it overflows, then in float32."""
    exact = scales.astype(np.float32) * np.float32(-power)
    fits = np.all(~(np.abs(exact) > np.finfo(np.float16).max))
    return exact.astype(np.float16) if fits else exact


def _affine(codes: Bytes, scales: npt.NDArray[np.float16], biases: npt.NDArray[np.generic], bits: int) -> AffineWeight:
    words = np.ascontiguousarray(codes).reshape(codes.shape[0], -1).view("<u4")
    return AffineWeight(
        words.astype(np.uint32, copy=False), scales.astype(biases.dtype, copy=False), biases, bits, GROUP
    )


def _from_q8_0(blocks: Bytes) -> AffineWeight:
    """d, 32 signed codes: w = d q = d (q + 128) - 128 d."""
    scales = _halves(blocks, 0)
    return _affine(blocks[..., 2:] ^ np.uint8(0x80), scales, _times(scales, 128), bits=8)


def _from_q4_0(blocks: Bytes) -> AffineWeight:
    """d, 32 codes: w = d q - 8 d."""
    scales = _halves(blocks, 0)
    return _affine(_nibbles_in_order(blocks[..., 2:]), scales, _times(scales, 8), bits=4)


def _from_q4_1(blocks: Bytes) -> AffineWeight:
    """d, m, 32 codes: w = d q + m."""
    return _affine(_nibbles_in_order(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 1), bits=4)


def _nibbles_in_order(packed: Bytes) -> Bytes:
    """ggml keeps elements 0-15 of a block in low nibbles, 16-31 in high ones; MLX keeps neighbours together."""
    even, odd = packed[..., 0::2], packed[..., 1::2]
    low = (even & 0x0F) | (odd << 4)
    high = (even >> 4) | (odd & 0xF0)
    return np.concatenate([low, high], axis=-1)


_AFFINE: dict[str, Callable[[Bytes], AffineWeight]] = {
    "Q8_0": _from_q8_0,
    "Q4_0": _from_q4_0,
    "Q4_1": _from_q4_1,
}
