"""A checkpoint of any supported format: config, weights by Hugging Face name, where its tokenizer is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from kvcore.errors import ModelError
from kvcore.models.config import LlamaConfig
from kvcore.models.fields import Fields, quoted
from kvcore.weights.expected import EMBEDDING, HEAD, NORM, check_layer_count, check_shapes, parameter_shapes
from kvcore.weights.folder import FolderTensors, check_folder, open_files
from kvcore.weights.gguf import dequantized_types, open_tensors, rope_factors
from kvcore.weights.gguf_header import read_gguf_header
from kvcore.weights.json_file import read_json
from kvcore.weights.mlx import module_formats, module_settings
from kvcore.weights.source import resolve_model
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

DENSE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """tokenizer.json and its companions in a folder."""

    path: Path


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """``tokenizer.*`` in the metadata of the GGUF file at ``path``."""

    metadata: dict[str, object]
    path: Path


class Tensors(Protocol):
    """Tensors of one format under Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def load(self, name: str) -> Weight: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened and checked checkpoint. Weights are read, mapped from the files, only by ``load``."""

    config: LlamaConfig
    format: Literal["gguf", "mlx", "hf"]
    where: str
    model_name: str
    tokenizer: FolderTokenizer | GgufTokenizer
    notices: tuple[str, ...]
    tensors: Tensors

    def names(self) -> list[str]:
        """Every parameter of the model, Hugging Face names in the order of use."""
        return list(parameter_shapes(self.config))

    def load(self, name: str) -> Weight:
        """The weight of one of ``names()``. Arrays may be read-only views of the file."""
        if name not in parameter_shapes(self.config):
            raise ModelError(f"{self.where}: the model has no weight {quoted(name)}")
        return self.tensors.load(name)


def open_checkpoint(
    model: str | os.PathLike[str] | None = None, notify: Callable[[str], None] = lambda _text: None
) -> Checkpoint:
    """Open a folder, a .gguf file, a hub id, or None for the embedded SmolLM2. Reads headers, not weights.

    ``notify`` hears of a download before it starts. Raises ModelError where the files are missing, damaged,
    contradictory or not a supported llama.
    """
    source = resolve_model(model, notify)
    if source.path.is_dir():
        return _open_folder(source.path, source.name)
    return _open_gguf(source.path, source.name)


def _open_folder(folder: Path, name: str | None) -> Checkpoint:
    check_folder(folder)
    where = str(folder / "config.json")
    settings = read_json(folder / "config.json")
    quantization = module_settings(settings, where)
    config = LlamaConfig.from_hf(settings, where)
    files, notices = open_files(folder)
    plain = FolderTensors(files, {})
    entries = plain.entries()
    check_layer_count(config.num_layers, len(entries), where)
    config = _completed(config, Fields(settings, where), plain, folder)
    shapes = parameter_shapes(replace(config, tie_embeddings=False))
    tensors = FolderTensors(files, module_formats(entries, shapes, quantization, str(folder)))
    check_shapes(tensors.shapes(), config, str(folder))
    _check_dtypes(config, tensors, folder)
    return Checkpoint(
        config=config,
        format="mlx" if tensors.formats else "hf",
        where=str(folder),
        model_name=name or folder.resolve().name,
        tokenizer=FolderTokenizer(folder),
        notices=notices + _tied_notices(config, tensors),
        tensors=tensors,
    )


def _check_dtypes(config: LlamaConfig, tensors: FolderTensors, folder: Path) -> None:
    entries = tensors.entries()
    for name in parameter_shapes(config):
        dtype = entries[name].dtype
        if name.removesuffix(".weight") not in tensors.formats and dtype not in DENSE_DTYPES:
            raise ModelError(
                f"{folder}: {name} has dtype {quoted(dtype)}, not supported (supported: {', '.join(DENSE_DTYPES)})"
            )


def _completed(config: LlamaConfig, settings: Fields, tensors: FolderTensors, folder: Path) -> LlamaConfig:
    """What config.json leaves open, from the tensors; token ids that generation_config.json adds."""
    entries = tensors.entries()
    if settings.get("tie_word_embeddings") is None:
        config = replace(config, tie_embeddings=HEAD not in entries)
    if settings.get("dtype") is None and settings.get("torch_dtype") is None and NORM in entries:
        config = replace(config, dtype=DENSE_DTYPES.get(entries[NORM].dtype, config.dtype))
    path = folder / "generation_config.json"
    if not path.is_file():
        return config
    generation = Fields(read_json(path), str(path))
    bos = generation.token_ids("bos_token_id")
    if config.bos_token_id is None and bos:
        config = replace(config, bos_token_id=bos[0])
    eos = dict.fromkeys(config.eos_token_ids + generation.token_ids("eos_token_id"))
    return replace(config, eos_token_ids=tuple(eos))


def _tied_notices(config: LlamaConfig, tensors: Tensors) -> tuple[str, ...]:
    """A tied model may carry a copy of its embedding as lm_head; another head would be silently dropped."""
    if not config.tie_embeddings or HEAD not in tensors.shapes():
        return ()
    if _same(tensors.load(EMBEDDING), tensors.load(HEAD)):
        return ()
    return (f"{HEAD} differs from {EMBEDDING} and is ignored: config.json says tie_word_embeddings",)


def _same(left: Weight, right: Weight) -> bool:
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    if isinstance(left, DenseWeight) and isinstance(right, DenseWeight):
        pairs = [(left.array, right.array)]
    elif isinstance(left, AffineWeight) and isinstance(right, AffineWeight) and left.bits == right.bits:
        pairs = [(left.codes, right.codes), (left.scales, right.scales), (left.biases, right.biases)]
    return bool(pairs) and all(np.array_equal(a, b) for a, b in pairs)


def _open_gguf(path: Path, name: str | None) -> Checkpoint:
    header = read_gguf_header(path)
    where = str(path)
    config = LlamaConfig.from_gguf(header.metadata, where)
    check_layer_count(config.num_layers, len(header.tensors), where)
    tensors = open_tensors(header, config)
    found = tensors.by_name
    config = replace(
        config,
        tie_embeddings=HEAD not in found,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in found,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in found,
        rope=replace(config.rope, freq_factors=rope_factors(header, config.head_dim)),
    )
    check_shapes(tensors.shapes(), config, where)
    config = replace(config, dtype=DENSE_DTYPES.get(found[EMBEDDING].type_name, config.dtype))
    counts = dequantized_types(tensors)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    notice = f"{path.name}: {listed} tensors are dequantized, having no affine form (kvcore convert requantizes)"
    title = header.metadata.get("general.name")
    return Checkpoint(
        config=config,
        format="gguf",
        where=where,
        model_name=name or (title if isinstance(title, str) and title else path.stem),
        tokenizer=GgufTokenizer(header.metadata, path),
        notices=(notice,) if counts else (),
        tensors=tensors,
    )
