"""`kvcore cache-prompt`: run a prompt once, and keep its cache in a file."""

from __future__ import annotations

import json
from pathlib import Path

from kvcore.cli.generate import prompt_ids
from kvcore.cli.prompt import read_prompt
from kvcore.cli.result import bytes_per_token, effective_mode
from kvcore.cli.session import Settings, choose_mode, load_model, note_cap, uses_template
from kvcore.cli.terminal import mib, note, progress_bar
from kvcore.errors import InputError
from kvcore.promptcache import check_target


def cache_prompt(prompt: str | None, settings: Settings) -> None:
    """Write the cache of ``prompt`` to --prompt-cache. What can be checked before the model is loaded is checked."""
    life, choice = settings.life, choose_mode(settings.mode)
    raw = settings.text.raw
    settings.cap()
    settings.budget()
    if life.prompt_cache is None:
        raise InputError("no file: give --prompt-cache FILE to write to")
    path = Path(life.prompt_cache).expanduser()
    check_target(path)
    text = read_prompt(prompt)
    model = load_model(settings, choice.mode)
    ids = prompt_ids(model, text, settings.text.system, raw=not uses_template(model, raw))
    if not ids:
        raise InputError("the prompt is empty: give some text with --prompt")
    if len(ids) >= model.config.max_position:
        raise InputError(
            f"the prompt has {len(ids)} tokens, the model's context holds {model.config.max_position}: shorten it"
        )
    note_cap(settings, choice.mode)
    cache = model.new_cache(capacity=len(ids), max_kv_size=life.max_kv_size, keep=life.keep)
    cache.require(len(ids))
    with progress_bar("running the prompt") as progress:
        model.prefill(ids, cache, prefill_step=settings.text.prefill_step_size, progress=progress)
    size = model.save_cache(path, cache, ids)
    if settings.common.json:
        about = {"mode": effective_mode(cache), "cache": cache.stats().to_dict() | bytes_per_token(cache)}
        print(json.dumps({"file": str(path), "bytes": size, "tokens": len(ids), **about}))
    note(f"{path}: {len(ids)} tokens in mode {effective_mode(cache)}, {mib(size)}")
