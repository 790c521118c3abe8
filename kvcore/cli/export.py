"""`kvcore export vllm-command`."""

from __future__ import annotations

import json
from pathlib import Path

from kvcore.cli.advise import _context, hub_config
from kvcore.cli.options import (
    CommonOptions,
    ExportOptions,
    ModelOption,
    ModeOptions,
    ParallelOptions,
    WindowOptions,
)
from kvcore.cli.session import choose_mode, window_policy
from kvcore.cli.sizes import parse_size
from kvcore.cli.terminal import note
from kvcore.errors import InputError
from kvcore.export import VllmSettings, vllm_command
from kvcore.loading import resolve_dtype
from kvcore.models.config import LlamaConfig
from kvcore.weights import open_checkpoint
from kvcore.weights.json_file import read_json
from kvcore.weights.source import HUB_ID


def export_vllm(
    model: ModelOption,
    mode: ModeOptions,
    options: ExportOptions,
    parallel: ParallelOptions,
    window: WindowOptions,
    common: CommonOptions,
) -> None:
    """The line on stdout, what differs on stderr; both in one object with --json."""
    if model.model is None:
        raise InputError("no --model: vLLM serves a folder or a hub id, and has no embedded model")
    chosen = choose_mode(mode).mode  # before the hub is asked
    config, kind = _shape(model.model)
    settings = VllmSettings(
        model=model.model,
        mode=chosen,
        dtype=resolve_dtype(options.dtype),
        window=window_policy(window),
        ranks=parallel.tensor_parallel,
        context=None if options.context is None else _context(options.context, config.max_position),
        max_batch=options.max_batch,
        cache_bytes=None
        if options.kv_cache_budget is None
        else parse_size("--kv-cache-budget", options.kv_cache_budget, example="512MiB or 2G"),
        served_name=options.served_model_name,
        host=options.host,
        port=options.port,
        chat_template=options.chat_template,
    )
    command = vllm_command(settings, config, kind)
    if common.json:
        found = {"vllm": command.version, "command": list(command.words), "differs": list(command.differs)}
        print(json.dumps(found, indent=2))
        return
    print(command.line)
    note(f"for vLLM {command.version}, mode {settings.mode.name}")
    for text in command.differs:
        note(f"differs: {text}")


def _shape(model: str) -> tuple[LlamaConfig, str]:
    """The model's config and the format of its weights, of which none is read."""
    if Path(model).expanduser().exists() or HUB_ID.fullmatch(model) is None:
        checkpoint = open_checkpoint(model)
        return checkpoint.config, checkpoint.format
    path = hub_config(model)
    settings = read_json(path)
    return LlamaConfig.from_hf(settings, str(path)), "mlx" if "quantization" in settings else "hf"
