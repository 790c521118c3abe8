"""`kvcore generate`: one prompt, one answer."""

from __future__ import annotations

import json

from kvcore.cache import Cache
from kvcore.cli.prompt import read_prompt
from kvcore.cli.ranks import leads, note_ranks, work
from kvcore.cli.result import Result
from kvcore.cli.session import Settings, choose_mode, load_model, note_cap, uses_template
from kvcore.cli.terminal import note
from kvcore.errors import InputError
from kvcore.generate import Generation
from kvcore.runtime import Model, common_prefix


def generate(prompt: str | None, settings: Settings) -> None:
    """Answer ``prompt``. Whatever can be checked before the model is loaded is checked before."""
    if not leads(settings.parallel):
        work(lambda: load_model(settings, choose_mode(settings.mode).mode))
    params = settings.sampling_params()
    choice, life = choose_mode(settings.mode), settings.life
    settings.check_life()
    text = read_prompt(prompt)
    raw, system = settings.text.raw, settings.text.system
    if not text and not raw:
        raise InputError("the prompt is empty: give some text with --prompt")
    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw leaves out: drop one of the two")
    model = load_model(settings, choice.mode)
    ids = prompt_ids(model, text, system, raw=not uses_template(model, raw))
    note_cap(settings, choice.mode)
    note_ranks(model)
    generation = model.generate(
        ids,
        params,
        cache=stored_cache(settings, model, ids),
        prefill_step=settings.text.prefill_step_size,
        max_kv_size=life.max_kv_size,
        keep=life.keep,
        context_shift=settings.shifts,
    )
    if settings.text.verbose:
        explain(settings, generation)
    stream(generation, quiet=settings.common.json)
    result = Result(model, generation, choice.requested)
    if generation.notice is not None:
        note(generation.notice)
    if settings.common.json:
        print(json.dumps(result.to_dict(), ensure_ascii=False), flush=True)
    for line in result.lines():
        note(line)


def stored_cache(settings: Settings, model: Model, ids: list[int]) -> Cache | None:
    """The cache of --prompt-cache, back at what it shares with the prompt; None without that flag."""
    path, life = settings.life.prompt_cache, settings.life
    if path is None:
        return None
    capacity = min(model.config.max_position, len(ids) + settings.sampling.max_tokens)
    shifts = life.max_kv_size if settings.shifts else None
    cache, tokens = model.load_cache(path, capacity=capacity, max_kv_size=shifts, keep=life.keep)
    shared = common_prefix(ids, tokens)
    reused = cache.rewind(min(shared, len(ids) - 1))  # the last token's logits are needed
    note(f"{path}: {reused} of {len(tokens)} tokens reused; the prompt shares {shared} of them")
    return cache


def prompt_ids(model: Model, text: str, system: str | None, *, raw: bool) -> list[int]:
    """Token ids of one user message, after the system message if there is one."""
    if raw and system is not None:
        raise InputError(f"--system needs a chat template, and {model.name} has none: give --chat-template FILE")
    if raw:
        return model.encode(text, raw=True)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return model.encode([*messages, {"role": "user", "content": text}])


def stream(generation: Generation, *, quiet: bool) -> None:
    """Run to the end, showing text as it comes unless ``quiet``."""
    for piece in generation:
        if not quiet:
            print(piece, end="", flush=True)
    if not quiet and not generation.text.endswith("\n"):
        print(flush=True)


def explain(settings: Settings, generation: Generation) -> None:
    """What --verbose adds, on stderr."""
    note(f"prompt ids: {list(generation.prompt)}")
    for decision in generation.cache.decisions:
        note(decision.explain())
    for text in settings.ignored(generation.cache.mode):
        note(f"ignored: {text}")
