"""From a loaded model to a `Served`: an engine that runs, and what there is to say about both."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

from kvcore.attention import decide
from kvcore.engine.config import EngineConfig
from kvcore.engine.engine import Engine
from kvcore.errors import InputError
from kvcore.modes import resolve_mode
from kvcore.runtime import Model
from kvcore.server.served import Defaults, Served
from kvcore.version import __version__


def start(
    model: Model, config: EngineConfig, *, requested_mode: str, names: tuple[str, ...], defaults: Defaults
) -> Served:
    """Start an engine over ``model``, to be served under ``names``.

    InputError for a chat template that is no Jinja, and what the engine raises for its configuration.
    """
    if model.tokenizer.chat_template is not None:
        model.tokenizer.chat_template.compile()
    engine = Engine(model, config)
    engine.start()
    context = min(model.config.max_position, config.max_model_len or model.config.max_position)
    return Served(
        names=names,
        engine=engine,
        tokenizer=model.tokenizer,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=context,
        created=int(time.time()),
        fingerprint=f"kvcore-{__version__}-{model.mode.name}-{model.fingerprint[:8]}",
        mode=model.mode.name,
        check_mode=lambda name: resolve_mode(name).name,
        defaults=defaults,
        facts=facts(model, config, engine, requested_mode, context),
    )


def facts(model: Model, config: EngineConfig, engine: Engine, requested_mode: str, context: int) -> dict[str, Any]:
    """For /health and the line that says that the server is ready."""
    spec = model.cache_spec(model.mode.name)
    raw_everywhere = 2 * model.window.boundary_layers >= model.config.num_layers
    stats = engine.stats()
    return {
        "mode": {"requested": requested_mode, "effective": "fp16" if raw_everywhere else model.mode.name},
        "backend": {
            "name": model.backend.name,
            "device": model.backend.device,
            "arch": model.backend.arch,
            "versions": dict(model.backend.versions),
        },
        "kernels": [decision.to_dict() for decision in decide(model.backend, model.registry, spec, model.kernels)],
        "dtype": model.params.dtype,
        "window": asdict(model.window),
        "max_model_len": context,
        "max_batch": config.max_batch,
        "max_queue": config.max_queue,
        "cap": None
        if config.max_kv_size is None
        else {"max_kv_size": config.max_kv_size, "keep": config.keep, "context_shift": config.context_shift},
        "prefix_reuse": config.prefix_reuse,
        "tensor_parallel": model.params.ranks.size,
        "kv_cache_budget": stats.budget,
        "batching": stats.batching,
        "notices": list(model.notices),
    }


def budget_of(share: float, model: Model) -> int:
    """Bytes of a share of the device's free memory, or of the RAM where the model runs on a CPU."""
    free = model.backend.free_memory()
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = int(share * free)
    if budget < 1:
        raise InputError(f"--kv-cache-budget: {share:.0%} of {free} free bytes is nothing: free some memory")
    return budget
