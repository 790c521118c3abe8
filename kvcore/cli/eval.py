"""`kvcore eval`: what a mode costs in fidelity, on a model and a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.bench import report
from kvcore.bench.environment import describe
from kvcore.cli.options import BackendOptions, CommonOptions, EvalOptions, ModelOption, WindowOptions
from kvcore.cli.session import budget_bytes, window_policy
from kvcore.cli.terminal import note, progress_bar
from kvcore.errors import InputError
from kvcore.eval import plots, probes, table
from kvcore.eval.metrics import Positions
from kvcore.eval.rows import RawRows
from kvcore.eval.score import PATHS, RAW
from kvcore.eval.state import State
from kvcore.eval.text import Text, read_text, tokenize
from kvcore.layout import WindowPolicy
from kvcore.loading import load
from kvcore.modes import MODES
from kvcore.runtime import Model

NAME = "fidelity"


def evaluate(
    model: ModelOption, options: EvalOptions, backend: BackendOptions, window: WindowOptions, common: CommonOptions
) -> None:
    """The table, and the probes that were asked for. What can be checked before the model is loaded is."""
    policy = window_policy(window)
    starts, wanted = _starts(options.starts), _words(options.probes)
    _check(options, policy, wanted)
    budget_bytes(options.kv_cache_budget)
    chosen = table.variants(options.modes, RawRows.of(policy), _words(options.keep_raw))
    read_text(options.text)
    loaded = _load(model, backend, policy, budget_bytes(options.kv_cache_budget))
    if options.context > loaded.config.max_position:
        raise InputError(f"--context {options.context}: the model's context holds {loaded.config.max_position}")
    if options.path != "one-pass" or RAW in chosen:  # then real caches are filled, a raw one first
        for name in sorted({RAW.name, *(variant.name for variant in chosen)} & {*MODES}):
            loaded.new_cache(name).require(options.context)
    text = tokenize(loaded.tokenizer, options.text, context=options.context, windows=options.windows, starts=starts)
    state_path, keep = _state_path(options)
    state = State(state_path, _about(loaded, text, options.path))
    if len(state):
        note(f"{state_path}: {len(state)} rows are there already")
    with progress_bar("scoring") as progress:
        measured = table.measure(loaded, text, chosen, options.path, state, progress)
    rows = table.rows(loaded, text, chosen, measured, _since(policy))
    found = probes.run(loaded, text, wanted, options.modes, note)
    environment = _environment(loaded, text, options.path, policy)
    _publish(environment, rows, measured, found, options, common)
    if state_path is not None and not keep:
        state_path.unlink(missing_ok=True)


def _check(options: EvalOptions, policy: WindowPolicy, wanted: Sequence[str]) -> None:
    if options.path not in PATHS:
        raise InputError(f"--path {options.path}: choose one of {', '.join(PATHS)}")
    if unknown := [word for word in wanted if word not in probes.PROBES]:
        raise InputError(f"--probes {unknown[0]}: choose among {', '.join(probes.PROBES)}")
    if options.windows < 1:
        raise InputError(f"--windows {options.windows}: must be 1 or more")
    if options.context <= _since(policy) + 1:
        raise InputError(
            f"--context {options.context}: nothing is quantized below {_since(policy)} tokens with this window; "
            "give a longer context or a smaller --recent-tokens"
        )
    if policy.boundary_layers:
        raise InputError("--boundary-layers: kvcore eval scores all layers alike, leave it out")


def _since(policy: WindowPolicy) -> int:
    """The first position that can see a folded row: before, all modes are the raw model."""
    return policy.recent_tokens + policy.page_size


def _starts(words: str | None) -> list[int] | None:
    if words is None:
        return None
    parts = [part.strip() for part in words.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"--starts {words}: must be whole numbers, comma-separated")
    return [int(part) for part in parts]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _load(model: ModelOption, backend: BackendOptions, policy: WindowPolicy, budget: int | None) -> Model:
    with progress_bar("loading") as progress:
        loaded = load(
            model.model,
            backend=backend.backend,
            device=backend.device,
            dtype=backend.dtype,
            kernels=backend.kernels,
            window=policy,
            kv_cache_budget=budget,
            progress=progress,
            notify=note,
        )
    for notice in loaded.notices:
        note(notice)
    return loaded


def _state_path(options: EvalOptions) -> tuple[Path | None, bool]:
    """The state's file, and whether it outlives the run."""
    if options.state is not None:
        return Path(options.state).expanduser(), True
    return (Path(options.out).expanduser() / f"{NAME}.state.npz" if options.out else None), False


def _about(model: Model, text: Text, path: str) -> dict[str, object]:
    return {
        "model": model.name,
        "text": text.sha256,
        "context": text.context,
        "backend": f"{model.backend.name} on {model.backend.device}",
        "dtype": model.params.dtype,
        "kernels": model.kernels,
        "path": path,
    }


def _environment(model: Model, text: Text, path: str, policy: WindowPolicy) -> dict[str, str]:
    return {
        **describe(model.backend),
        "model": model.name,
        "dtype": model.params.dtype,
        "path": path,
        "text": text.name,
        "text_sha256": text.sha256,
        "context": str(text.context),
        "window_starts": " ".join(map(str, text.starts)),
        "plain_columns": f"over positions from {_since(policy)} on, of each window; all_ over every position",
        "intervals": "95%, bootstrap of 1,000 over stretches of 32 positions, seed 0",
    }


def _publish(
    environment: Mapping[str, str],
    rows: list[dict[str, Any]],
    measured: Mapping[str, Sequence[Positions]],
    found: Mapping[str, list[dict[str, Any]]],
    options: EvalOptions,
    common: CommonOptions,
) -> None:
    if common.json:
        print(json.dumps({"environment": environment, "rows": rows, "probes": found}, indent=2))
    else:
        print(report.markdown(rows, table.COLUMNS))
        for name, lines in found.items():
            print(f"\n{name}\n\n{report.markdown(lines, _columns(lines))}")
    if options.out is None:
        return
    folder = Path(options.out).expanduser()
    paths = report.write(folder, NAME, environment, rows, table.COLUMNS)
    for name, lines in found.items():
        paths += report.write(folder, f"{NAME}-{name}", environment, lines, _columns(lines))
    paths += _plots(folder, rows, measured)
    for path in paths:
        note(f"wrote {path}")


def _columns(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A probe's columns in a table; a figure for each layer is for the other files."""
    return [name for name in lines[0] if name != "by_layer"] if lines else []


def _plots(folder: Path, rows: list[dict[str, Any]], measured: Mapping[str, Sequence[Positions]]) -> list[Path]:
    by_bytes, by_position = folder / f"{NAME}-bytes.png", folder / f"{NAME}-position.png"
    try:
        plots.kl_against_bytes(rows, by_bytes)
        plots.kl_against_position(measured, by_position)
    except ImportError:
        note("no plots: matplotlib is not installed (pip install 'kvcore[bench]')")
        return []
    return [by_bytes, by_position]
