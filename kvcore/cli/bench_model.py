"""`kvcore bench model`: a folder with synthetic weights."""

from __future__ import annotations

import json
from pathlib import Path

from kvcore.bench.random_model import MODELS, find_tokenizer, write_random_model
from kvcore.cli.convert import report_dict, report_lines
from kvcore.cli.options import CommonOptions, ModelBenchOptions
from kvcore.cli.terminal import progress_bar
from kvcore.errors import InputError


def bench_model(options: ModelBenchOptions, common: CommonOptions) -> None:
    """Write the folder and say what is in it."""
    if options.random_model is None:
        raise InputError(f"no shape: give --random-model, one of {', '.join(MODELS)}")
    if options.out is None:
        raise InputError("no target: give --out DIR, a new or empty folder")
    out = Path(options.out).expanduser()
    tokenizer = find_tokenizer(options.tokenizer)
    with progress_bar("writing") as progress:
        report = write_random_model(options.random_model, out, tokenizer, layers=options.layers, progress=progress)
    if common.json:
        print(json.dumps(report_dict(report), indent=2))
    else:
        print("\n".join(report_lines(report)))
