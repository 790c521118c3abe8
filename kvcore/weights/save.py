"""Write a checkpoint as a folder that kvcore, mlx-lm and (unquantized) transformers load."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcore.errors import InputError, KvcoreError
from kvcore.models.config import COMPUTE_DTYPES
from kvcore.weights.affine import AFFINE_BITS, AFFINE_GROUP_SIZES
from kvcore.weights.checkpoint import Checkpoint
from kvcore.weights.folder import INDEX, SINGLE
from kvcore.weights.mlx import AffineFormat
from kvcore.weights.quantize import affine_format, dense_weight, narrowed, quantize_weight
from kvcore.weights.safetensors import write_safetensors
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

DEFAULT_GROUP_SIZE = 64
MAX_SHARD_BYTES = 2 * 10**9  # also the most that a conversion keeps in memory

Progress = Callable[[int, int], None]
Extra = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What was written. ``kept_full``: matrices whose width no group divides, left unquantized."""

    folder: Path
    files: tuple[str, ...]
    parameters: int
    nbytes: int
    kept_full: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Average over all parameters, scales and biases included."""
        return 8 * self.nbytes / self.parameters


def write_mlx(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda _done, _total: None,
    extra: Extra = lambda _folder: None,
) -> SaveReport:
    """Write MLX-quantized safetensors into a new or empty ``folder``.

    Without ``bits``, affine weights pass through unchanged, and other matrices go to the checkpoint's dtype;
    vectors do so only where no value changes. With ``bits``, every matrix gets that format, except where the
    group (64 unless given) does not divide its width. ``progress(done, total)`` counts tensors;
    ``extra(folder)`` adds files of its own, such as the tokenizer's. The folder appears only when complete.

    Raises InputError for impossible settings or a folder that is not empty, KvcoreError if writing fails.
    """
    wanted = _wanted_format(bits, group_size)
    dtype = checkpoint.config.dtype

    def convert(weight: Weight) -> Weight:
        if len(weight.shape) != 2:
            return narrowed(weight, dtype) if isinstance(weight, DenseWeight) else weight
        divides = wanted is not None and weight.shape[1] % wanted.group_size == 0
        if wanted is not None and divides and affine_format(weight) != wanted:
            return quantize_weight(weight, wanted, dtype)
        return weight if isinstance(weight, AffineWeight) else dense_weight(weight, dtype)

    return _write(checkpoint, folder, convert, "mlx", max_shard_bytes, progress, extra, wanted is not None)


def write_hf(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda _done, _total: None,
    extra: Extra = lambda _folder: None,
) -> SaveReport:
    """Write plain safetensors in ``dtype`` (the checkpoint's own unless given); otherwise as ``write_mlx``."""
    dtype = dtype or checkpoint.config.dtype
    if dtype not in COMPUTE_DTYPES:
        raise InputError(f"unknown dtype '{dtype}': choose one of {', '.join(COMPUTE_DTYPES)}")
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype=dtype))

    def convert(weight: Weight) -> Weight:
        return dense_weight(weight, dtype)

    return _write(checkpoint, folder, convert, "pt", max_shard_bytes, progress, extra, False)


def _wanted_format(bits: int | None, group_size: int | None) -> AffineFormat | None:
    if bits is None:
        if group_size is not None:
            raise InputError(f"a group size ({group_size}) needs a number of bits too")
        return None
    group_size = group_size or DEFAULT_GROUP_SIZE
    if bits not in AFFINE_BITS or group_size not in AFFINE_GROUP_SIZES:
        raise InputError(
            f"{bits} bits in groups of {group_size}: choose bits from {AFFINE_BITS} and groups "
            f"from {AFFINE_GROUP_SIZES}"
        )
    return AffineFormat(bits, group_size)


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    convert: Callable[[Weight], Weight],
    kind: str,
    max_shard_bytes: int,
    progress: Progress,
    extra: Extra,
    quantizes: bool,
) -> SaveReport:
    config = checkpoint.config.to_hf()
    names = checkpoint.names()
    formats: dict[str, AffineFormat | None] = {}
    sizes: Counter[AffineFormat | None] = Counter()
    with _new_folder(folder) as partial:
        shards = _Shards(partial, max_shard_bytes, kind)
        for done, name in enumerate(names, 1):
            weight = convert(checkpoint.load(name))
            found = affine_format(weight)
            sizes[found] += math.prod(weight.shape)
            if len(weight.shape) == 2:
                formats[name.removesuffix(".weight")] = found
            shards.add(name, weight)
            progress(done, len(names))
        files = shards.finish()
        _write_config(partial, config | _quantization(formats, sizes))
        extra(partial)
    kept = tuple(module for module, found in formats.items() if found is None) if quantizes else ()
    return SaveReport(folder, files, sizes.total(), shards.nbytes, kept)


def _write_config(folder: Path, config: Mapping[str, object]) -> None:
    _write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    _write_json(folder / "generation_config.json", tokens)


def _quantization(formats: Mapping[str, AffineFormat | None], sizes: Counter[AffineFormat | None]) -> dict[str, object]:
    """mlx-lm's block: the usual format, then every module that has another one (false: not quantized)."""
    usual = next((found for found, _ in sizes.most_common() if found is not None), None)
    if usual is None:
        return {}
    block: dict[str, object] = {"group_size": usual.group_size, "bits": usual.bits}
    for module, found in formats.items():
        if found is None:
            block[module] = False
        elif found != usual:
            block[module] = {"group_size": found.group_size, "bits": found.bits}
    return {"quantization": block}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, renamed to ``folder`` at the end and removed after a failure."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder: choose another place")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise KvcoreError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Shards:
    """Collects arrays into files of at most ``limit`` bytes; one file needs no index."""

    def __init__(self, folder: Path, limit: int, kind: str) -> None:
        self._folder, self._limit, self._kind = folder, limit, kind
        self._pending: dict[str, npt.NDArray[np.generic]] = {}
        self._written: list[list[str]] = []
        self.nbytes = 0

    def add(self, name: str, weight: Weight) -> None:
        arrays = _arrays(name, weight)
        pending = sum(array.nbytes for array in self._pending.values())
        if self._pending and pending + weight.nbytes > self._limit:
            self._flush()
        self._pending |= arrays
        self.nbytes += weight.nbytes

    def finish(self) -> tuple[str, ...]:
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE)
            return (SINGLE,)
        files = tuple(f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))
        for i, file in enumerate(files):
            self._part(i).rename(self._folder / file)
        weight_map = {name: file for file, names in zip(files, self._written, strict=True) for name in names}
        metadata = {"total_size": self.nbytes}
        _write_json(self._folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
        return files

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"

    def _flush(self) -> None:
        write_safetensors(self._part(len(self._written)), self._pending, {"format": self._kind})
        self._written.append(list(self._pending))
        self._pending = {}


def _arrays(name: str, weight: Weight) -> dict[str, npt.NDArray[np.generic]]:
    if isinstance(weight, DenseWeight):
        return {name: weight.array}
    module = name.removesuffix(".weight")
    return {name: weight.codes, f"{module}.scales": weight.scales, f"{module}.biases": weight.biases}
