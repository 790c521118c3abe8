"""The nearest `vllm serve` line to a model in a cache mode, and what differs.

Options and their values are those of one vLLM version, listed in vllm_options.json with their source.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvcore.errors import InputError
from kvcore.layout import WindowPolicy
from kvcore.models.config import LlamaConfig
from kvcore.modes import Mode

# vLLM's stored form that is nearest to each mode's, and what differs beside the window.
NEAREST: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fp16": ("auto", ()),
    "int8": ("int8_per_token_head", ()),
    "int8-turbo4": (
        "turboquant_k8v4",
        ("keys are fp8 (3 mantissa bits) without a scale, not int8 with one per token and head",),
    ),
    "turbo4": (
        "turboquant_4bit_nc",
        ("keys are rotated and quantized alike, with other levels",),
    ),
    "turbo4-asym": (
        "turboquant_k8v4",
        ("keys are fp8, not raw: no stored form of vLLM has raw keys and quantized values",),
    ),
    "turbo4-delegated": (
        "turboquant_k8v4",
        (
            "keys are fp8, not raw: no stored form of vLLM has raw keys and quantized values",
            "values are quantized as they come, not from the end of the prompt on",
        ),
    ),
    "turbo3-asym": (
        "turboquant_k8v4",
        (
            "keys are fp8, not raw: no stored form of vLLM has raw keys and quantized values",
            "values have 4 bits, not 3: vLLM's 3-bit form has 3-bit keys too, and costs far more fidelity",
        ),
    ),
}
_UNIFORM = (
    "values have 16 uniform levels between each vector's smallest and largest number, not a rotation and a codebook"
)
_CONVERT = "vLLM {version} does not read {what}: first run kvcore convert --model {model} --to hf --out {out}"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a user chose; None leaves vLLM's default."""

    model: str
    mode: Mode
    dtype: str | None = None
    window: WindowPolicy = WindowPolicy()  # noqa: RUF009  # frozen
    ranks: int = 1
    context: int | None = None
    max_batch: int | None = None
    cache_bytes: int | None = None
    served_name: str | None = None
    host: str | None = None
    port: int | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """The words of a command line, and in words of our own what is not the same there."""

    version: str
    words: tuple[str, ...]
    differs: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.words)


@cache
def vllm_options() -> Mapping[str, Any]:
    """version, source, options, kv_cache_dtypes and dtypes of the pinned vLLM."""
    found: Mapping[str, Any] = json.loads((files("kvcore.export") / "vllm_options.json").read_text(encoding="utf-8"))
    return found


def vllm_command(settings: VllmSettings, config: LlamaConfig, checkpoint_format: str) -> VllmCommand:
    """``checkpoint_format``: gguf, mlx or hf, as `Checkpoint.format` says. InputError for a context beyond the model's.

    vLLM wants the ranks to divide the query heads; that is checked here too.
    """
    if settings.context is not None and not 1 <= settings.context <= config.max_position:
        raise InputError(
            f"--context {settings.context}: must be from 1 to {config.max_position}, which the model holds"
        )
    if config.num_heads % settings.ranks:
        raise InputError(
            f"{config.num_heads} query heads over {settings.ranks} ranks: vLLM needs ranks that divide them"
        )
    version = str(vllm_options()["version"])
    stored, differs = NEAREST[settings.mode.name]
    model, said = _served_model(settings.model, checkpoint_format, version)
    words = ["vllm", "serve", model, "--kv-cache-dtype", stored]
    given: dict[str, object] = {
        "--dtype": settings.dtype,
        "--max-model-len": settings.context,
        "--tensor-parallel-size": settings.ranks if settings.ranks > 1 else None,
        "--max-num-seqs": settings.max_batch,
        "--kv-cache-memory-bytes": settings.cache_bytes,
        "--served-model-name": settings.served_name,
        "--host": settings.host,
        "--port": settings.port,
        "--chat-template": settings.chat_template,
    }
    raw_layers = _raw_layers(settings.window, config.num_layers) if settings.mode.quantized else []
    for name, value in given.items():
        words += [] if value is None else [name, str(value)]
    if raw_layers:
        words += ["--kv-cache-dtype-skip-layers", *map(str, raw_layers)]
    notes = [*said, *differs, *_cache_notes(settings, stored)]
    return VllmCommand(version, tuple(words), tuple(notes))


def _served_model(model: str, checkpoint_format: str, version: str) -> tuple[str, list[str]]:
    """What to give to vLLM, and how to make it."""
    if checkpoint_format == "hf":
        return model, []
    what = {"gguf": "GGUF files", "mlx": "MLX-quantized weights"}[checkpoint_format]
    out = f"{model.rstrip('/').rpartition('/')[2].removesuffix('.gguf')}-hf"
    convert = _CONVERT.format(version=version, what=what, model=shlex.quote(model), out=shlex.quote(out))
    return out, [f"{convert}; the weights are then dense, so that they take 16 bits each"]


def _cache_notes(settings: VllmSettings, stored: str) -> list[str]:
    if not settings.mode.quantized:
        return []
    window = settings.window
    notes = [
        f"every row is quantized at once: the first {window.sink_tokens} and the newest {window.recent_tokens} tokens "
        "do not stay raw, which costs most of the fidelity that docs/fidelity.md measures"
    ]
    if stored.startswith("turboquant_"):
        notes.append(_UNIFORM)
        if not window.boundary_layers:
            notes.append("with this form vLLM itself keeps the first 2 and the last 2 layers raw")
    return notes


def _raw_layers(window: WindowPolicy, layers: int) -> list[int]:
    return [layer for layer in range(layers) if window.is_raw_layer(layer, layers)]
