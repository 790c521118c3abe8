"""`kvcore advise`: what each mode would cost a model, from its shape alone."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.advise import SHAPES, ModeCost, ModelShape, Plan, mode_costs, unsupported
from kvcore.cli.options import AdviseOptions, CommonOptions, WindowOptions
from kvcore.cli.session import window_policy
from kvcore.cli.sizes import parse_size
from kvcore.cli.terminal import note
from kvcore.errors import InputError, ModelError
from kvcore.loading import resolve_dtype
from kvcore.models.config import LlamaConfig
from kvcore.models.fields import Fields
from kvcore.modes import MODES
from kvcore.ops import ITEMSIZE
from kvcore.recommend import BASIS, FIDELITY, Recommendation, recommend
from kvcore.weights.folder import open_files
from kvcore.weights.gguf_header import read_gguf_header
from kvcore.weights.json_file import read_json
from kvcore.weights.source import HUB_ID

AFFINE_OVERHEAD = 32 / 64  # a 16-bit scale and bias per group of 64
FLOOR = (
    "The floor is the bytes that a step must read (weights and cache) over the bandwidth. It is computed, not "
    "measured: no kernel is faster, and which kernels a mode has today is what `kvcore doctor` shows."
)


@dataclass(frozen=True, slots=True)
class Source:
    """A model's shape, and the bits per weight of its checkpoint, scales included."""

    name: str
    shape: ModelShape
    bits_per_weight: float


def advise(options: AdviseOptions, window: WindowOptions, common: CommonOptions) -> None:
    """Print a row per mode."""
    source, plan = read_plan(options, window)
    costs = mode_costs(plan)
    found = recommend(plan, costs, options.max_kl)
    if common.json:
        print(json.dumps(_report(source, plan, costs, found), indent=2))
    else:
        advice = _advice(plan, costs, found)
        print("\n".join([*_heading(source, plan), "", *_table(plan, costs), "", *advice, *_remarks(plan)]))


def read_plan(options: AdviseOptions, window: WindowOptions) -> tuple[Source, Plan]:
    """The model and the plan that the options mean."""
    dtype = resolve_dtype(options.dtype) or "float16"
    if not (math.isfinite(options.bandwidth) and options.bandwidth > 0):
        raise InputError(f"--bandwidth {options.bandwidth}: must be a number of GB/s above 0")
    memory = (
        None if options.memory is None else parse_size("--memory", options.memory, example="24GiB or 80GB", unit=True)
    )
    bits = None if options.weight_bits is None else _bits(options.weight_bits)
    source = read_source(options.model)
    return source, Plan(
        shape=source.shape,
        context=_context(options.context, source.shape.max_position),
        bits_per_weight=bits or source.bits_per_weight,
        bandwidth=options.bandwidth * 1e9,
        batch=options.batch,
        dtype=dtype,
        window=window_policy(window),
        memory=memory,
    )


def read_source(model: str) -> Source:
    """The shape of a named model, a folder with a config.json, a GGUF file or a hub id."""
    if model in SHAPES:
        return Source(model, SHAPES[model], 16)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_config(path / "config.json", path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path)
    if path.exists() or HUB_ID.fullmatch(model) is None:
        raise ModelError(
            f"{model} is no model: give {', '.join(SHAPES)}, a folder with a config.json, a .gguf file "
            "or a hub id ORG/NAME"
        )
    return _from_config(hub_config(model), model)


def _from_config(path: Path, name: str) -> Source:
    settings = read_json(path)
    config = LlamaConfig.from_hf(settings, str(path))
    fields, shape = Fields(settings, str(path)), ModelShape.from_config(config)
    if fields.get("quantization") is None:
        return Source(name, shape, 8 * ITEMSIZE[config.dtype])
    with suppress(ModelError):  # without weights the config is all there is
        files, _ = open_files(path.parent)  # modules may differ
        entries = [file.entries[tensor] for tensor, file in files.items()]
        held = sum(entry.end - entry.start for entry in entries if len(entry.shape) == 2)
        return Source(name, shape, 8 * held / shape.weights)
    block = Fields(fields.block("quantization"), f"{path}: quantization")
    scales = 2 * 8 * ITEMSIZE[config.dtype] / block.count("group_size")  # a scale and a bias per group
    return Source(name, shape, block.count("bits") + scales)


def _from_gguf(path: Path) -> Source:
    header = read_gguf_header(path)
    config = LlamaConfig.from_gguf(header.metadata, str(path))
    matrices = [tensor for tensor in header.tensors.values() if len(tensor.shape) == 2]
    if not matrices:
        raise ModelError(f"{path} holds no weights")
    shape = replace(ModelShape.from_config(config), tie_embeddings="output.weight" not in header.tensors)
    bits = 8 * sum(tensor.nbytes for tensor in matrices) / sum(math.prod(tensor.shape) for tensor in matrices)
    return Source(path.stem, shape, bits)


def hub_config(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ModelError(
            f"no such folder: {name}; to read its config from the Hugging Face hub: pip install 'kvcore[hf]'"
        ) from error
    note(f"no such folder: {name}; reading config.json from the Hugging Face hub")
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # its own errors, those of its HTTP client, those of the disk
        raise ModelError(f"no such folder: {name}, and the hub gave no config.json: {error}") from error


def _context(given: str | None, limit: int) -> int:
    if given is None:
        return limit
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", given.strip())
    tokens = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if tokens < 1:
        raise InputError(f"--context {given}: give a number of tokens, such as 32768 or 32k")
    if tokens > limit:
        raise InputError(f"--context {given}: {tokens} tokens are more than the {limit} that the model holds")
    return tokens


def _bits(given: float) -> float:
    """Whole numbers up to 8 mean MLX's affine form, with its scales; anything else is taken as it is."""
    if not 1 <= given <= 32:
        raise InputError(f"--weight-bits {given:g}: must be from 1 to 32")
    return given + AFFINE_OVERHEAD if given <= 8 and given.is_integer() else given


def _heading(source: Source, plan: Plan) -> list[str]:
    shape = plan.shape
    bandwidth = f"{plan.bandwidth / 1e9:g} GB/s"
    usual = " (the default: one H200)" if plan.bandwidth == AdviseOptions().bandwidth * 1e9 else ""
    memory = "" if plan.memory is None else f", memory {plan.memory / 2**30:.2f} GiB"
    return [
        f"{source.name}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"context up to {shape.max_position}",
        f"weights: {plan.bits_per_weight:.2f} bits each, {plan.weight_bytes / 1e6:,.0f} MB, "
        f"of which a step reads {plan.streamed_bytes / 1e6:,.0f} MB",
        f"plan: context {plan.context}, batch {plan.batch}, raw rows in {plan.dtype}, "
        f"bandwidth {bandwidth}{usual}{memory}",
    ]


def _table(plan: Plan, costs: list[ModeCost]) -> list[str]:
    fits = plan.memory is not None
    titles = (
        "mode",
        "bytes/token",
        f"MiB at {plan.context}",
        "vs fp16",
        "largest context",
        "floor ms/step",
        "tok/s",
    )
    rows = [
        (
            cost.mode,
            f"{cost.bytes_per_token:,}",
            f"{cost.kv_bytes / 2**20:,.1f}",
            f"{cost.fp16_ratio:.2f}x",
            f"{cost.largest_context:,}" if fits else "",
            f"{cost.floor_seconds * 1e3:.3f}",
            f"{cost.tokens_per_second:,.0f}",
        )
        for cost in costs
    ]
    keep = [i for i in range(len(titles)) if fits or titles[i] != "largest context"]
    table = [[row[i] for i in keep] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]


def _remarks(plan: Plan) -> list[str]:
    remarks = [
        FLOOR,
        "MiB and tok/s count the raw rows of the window exactly; bytes/token is what a token adds beyond it.",
    ]
    if plan.memory is not None:
        remarks.append("The largest context is per sequence, beside the weights; working memory is not counted.")
        if plan.memory < plan.weight_bytes:
            remarks.append("The memory does not hold the weights.")
    for mode in MODES.values():
        remarks += [f"{mode.name} is not possible: {reason}" for reason in dict.fromkeys(unsupported(plan.shape, mode))]
    return remarks


def _advice(plan: Plan, costs: list[ModeCost], found: Recommendation) -> list[str]:
    if found.mode is None:
        return [f"recommended: none, because {found.reason}.", ""]
    cost, measured = next(cost for cost in costs if cost.mode == found.mode), FIDELITY[found.mode]
    return [
        f"recommended: {found.mode}, {found.reason}. {cost.kv_bytes / 2**20:,.1f} MiB for {plan.context:,} tokens, "
        f"floor {cost.floor_seconds * 1e3:.3f} ms/step, KL {measured.kl:.2g}, top-1 {measured.top1:.1%}.",
        BASIS,
        "",
    ]


def _report(source: Source, plan: Plan, costs: list[ModeCost], found: Recommendation) -> dict[str, Any]:
    return {
        "model": source.name,
        "plan": asdict(plan),
        "weight_bytes": round(plan.weight_bytes),
        "streamed_bytes": round(plan.streamed_bytes),
        "modes": [asdict(cost) | {"fidelity": asdict(FIDELITY[cost.mode])} for cost in costs],
        "recommended": asdict(found),
        "fidelity_basis": BASIS,
        "impossible": {mode.name: reasons for mode in MODES.values() if (reasons := unsupported(plan.shape, mode))},
        "note": FLOOR,
    }
