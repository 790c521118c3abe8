"""`kvcore convert`: a checkpoint of any format as a folder of safetensors, with its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcore.cli.options import CommonOptions, ConvertOptions, ModelOption
from kvcore.cli.terminal import note, progress_bar
from kvcore.errors import InputError
from kvcore.loading import resolve_dtype
from kvcore.text import load_tokenizer
from kvcore.weights import AffineWeight, Checkpoint, open_checkpoint
from kvcore.weights.save import SaveReport, write_hf, write_mlx

DEFAULT_BITS = 4
FORMATS = ("mlx", "hf")
SHOWN = 8


def convert(model: ModelOption, options: ConvertOptions, common: CommonOptions) -> None:
    """Write the folder and say what is in it."""
    out = _checked(options)
    dtype = None if options.dtype is None else resolve_dtype(options.dtype)
    checkpoint = open_checkpoint(model.model, note)
    for notice in checkpoint.notices:
        note(notice)
    if dtype is not None:
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype=dtype))
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    with progress_bar("converting") as progress:
        if options.to == "hf":
            report = write_hf(checkpoint, out, progress=progress, extra=tokenizer.save)
        else:
            report = write_mlx(
                checkpoint,
                out,
                bits=_bits(options, checkpoint),
                group_size=options.q_group_size,
                progress=progress,
                extra=tokenizer.save,
            )
    if common.json:
        print(json.dumps(report_dict(report), indent=2))
    else:
        print("\n".join(report_lines(report)))


def _checked(options: ConvertOptions) -> Path:
    if options.out is None:
        raise InputError("no target: give --out DIR, a new or empty folder")
    if options.to not in FORMATS:
        raise InputError(f"unknown format '{options.to}': choose one of {', '.join(FORMATS)}")
    if options.to == "hf" and (options.q_bits is not None or options.q_group_size is not None):
        raise InputError("--to hf writes plain safetensors: leave out --q-bits and --q-group-size, or use --to mlx")
    return Path(options.out).expanduser()


def _bits(options: ConvertOptions, checkpoint: Checkpoint) -> int | None:
    """None leaves weights as they are: right where they are quantized already, and nothing else was asked."""
    if options.q_bits is not None:
        return options.q_bits
    first = checkpoint.load("model.layers.0.self_attn.q_proj.weight")
    quantized = isinstance(first, AffineWeight) and options.q_group_size is None
    return None if quantized else DEFAULT_BITS


def report_lines(report: SaveReport) -> list[str]:
    lines = [
        f"{report.folder}: {report.nbytes / 1e6:.1f} MB in {len(report.files)} file(s), "
        f"{report.bits_per_weight:.2f} bits per weight on average"
    ]
    if report.kept_full:
        more = len(report.kept_full) - SHOWN
        shown = ", ".join(report.kept_full[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"left in full precision, as no group divides their width: {shown}")
    return lines


def report_dict(report: SaveReport) -> dict[str, Any]:
    return {
        "folder": str(report.folder),
        "files": list(report.files),
        "parameters": report.parameters,
        "bytes": report.nbytes,
        "bits_per_weight": report.bits_per_weight,
        "kept_full": list(report.kept_full),
    }
