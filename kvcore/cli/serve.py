"""`kvcore serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kvcore.cli.options import (
    BackendOptions,
    CommonOptions,
    LifeOptions,
    ModelOption,
    ModeOptions,
    ParallelOptions,
    SamplingOptions,
    ServeDefaultOptions,
    ServeOptions,
    TextOptions,
    WindowOptions,
)
from kvcore.cli.ranks import leads, note_ranks, work
from kvcore.cli.session import ModeChoice, Settings, choose_mode, load_model, note_cap
from kvcore.cli.sizes import parse_size
from kvcore.cli.terminal import note
from kvcore.errors import InputError
from kvcore.modes import resolve_mode
from kvcore.sampling import SamplingParams
from kvcore.weights.source import HUB_ID

if TYPE_CHECKING:
    from kvcore.server.served import Served

_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@dataclass(frozen=True, slots=True)
class Budget:
    """--kv-cache-budget: bytes, or a share of the memory that is free once the model is there; both None without it."""

    bytes: int | None = None
    share: float | None = None


def serve(
    model: ModelOption,
    mode: ModeOptions,
    options: ServeOptions,
    defaults: ServeDefaultOptions,
    backend: BackendOptions,
    window: WindowOptions,
    parallel: ParallelOptions | None = None,
) -> None:
    """Listen at once, load behind it, answer until a signal. What can be checked before the model loads is.

    Of several ranks the first one does; the others work for it.
    """
    parallel = parallel or ParallelOptions()
    if not leads(parallel):
        work(lambda: load_model(_settings(model, mode, options, backend, window, parallel), choose_mode(mode).mode))
    check_options(model, mode, options, defaults, backend, window)

    from kvcore.server.logs import configure
    from kvcore.server.metrics import Metrics
    from kvcore.server.run import listen
    from kvcore.server.run import serve as run
    from kvcore.server.state import HttpSettings, ServerState

    sock = listen(options.host, options.port)
    host, port = sock.getsockname()[:2]
    configure(options.log_format)
    state = ServerState(
        HttpSettings(
            api_key=options.api_key,
            allowed_origins=tuple(filter(None, (each.strip() for each in options.allowed_origins.split(",")))),
            shutdown_timeout=options.shutdown_timeout,
        ),
        Metrics(),
    )
    shown = f"[{host}]" if ":" in host else host
    note(f"listening on http://{shown}:{port} (a chat at /, the API at /v1); loading the model")
    if options.api_key is None and not _loopback(host):
        note(f"anybody who reaches {shown} can use this server: set KVCORE_API_KEY to ask for a key")

    def load() -> Served:
        return served_from_options(model, mode, options, defaults, backend, window, parallel)

    if code := run(state, sock, load):
        raise typer.Exit(code)


def check_options(
    model: ModelOption,
    mode: ModeOptions,
    options: ServeOptions,
    defaults: ServeDefaultOptions,
    backend: BackendOptions,
    window: WindowOptions,
) -> None:
    """InputError for what no model could be served with."""
    _check_packages()
    choose_mode(mode)
    _settings(model, mode, options, backend, window).check_life()
    _check(options)
    _check_defaults(defaults)
    parse_budget(options.kv_cache_budget)


def served_from_options(
    model: ModelOption,
    mode: ModeOptions,
    options: ServeOptions,
    defaults: ServeDefaultOptions,
    backend: BackendOptions,
    window: WindowOptions,
    parallel: ParallelOptions | None = None,
) -> Served:
    """The model behind a started engine, as options that have been checked say."""
    settings, choice = _settings(model, mode, options, backend, window, parallel), choose_mode(mode)
    budget, names = parse_budget(options.kv_cache_budget), _names(options.served_model_name)
    return load_served(settings, choice, options, defaults, budget, names)


def load_served(
    settings: Settings,
    choice: ModeChoice,
    options: ServeOptions,
    defaults: ServeDefaultOptions,
    budget: Budget,
    names: tuple[str, ...],
) -> Served:
    """The model behind a started engine. Runs on the loading thread."""
    from kvcore.engine.config import EngineConfig
    from kvcore.server.load import budget_of, start
    from kvcore.server.served import Defaults

    model = load_model(settings, choice.mode)
    if options.max_model_len is not None and options.max_model_len > model.config.max_position:
        raise InputError(
            f"--max-model-len {options.max_model_len}: the model's context holds {model.config.max_position} tokens"
        )
    note_cap(settings, choice.mode)
    note_ranks(model)
    if model.tokenizer.chat_template is None:
        note(f"{model.name} has no chat template: only /v1/completions answers (--chat-template FILE gives one)")
    config = EngineConfig(
        kv_cache_budget=budget.bytes if budget.share is None else budget_of(budget.share, model),
        max_batch=options.max_batch,
        max_queue=options.max_queue,
        max_model_len=options.max_model_len,
        max_kv_size=options.max_kv_size,
        keep=options.keep,
        context_shift=settings.shifts,
        prefill_step=options.prefill_step_size,
        modes=tuple(mode.strip() for mode in options.request_modes.split(",") if mode.strip()),
    )
    own = Defaults(
        max_tokens=defaults.max_tokens,
        temperature=defaults.temp,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )
    hub_id = settings.model.model if settings.model.model and HUB_ID.fullmatch(settings.model.model) else None
    known = names or tuple(dict.fromkeys(filter(None, (model.name, hub_id))))
    return start(model, config, requested_mode=choice.requested, names=known, defaults=own)


def parse_budget(given: str | None) -> Budget:
    """InputError for what is neither a size nor a share."""
    if given is None:
        return Budget()
    text = given.strip()
    if match := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", text, re.ASCII):
        share = float(match[1]) / 100
    elif re.fullmatch(r"(0|1)?\.\d{1,6}|1", text, re.ASCII):
        share = float(text)
    else:
        try:
            return Budget(bytes=parse_size("--kv-cache-budget", given, example="512MiB or 2G"))
        except InputError as error:
            raise InputError(f"--kv-cache-budget {given}: give a size such as 8GiB, or a share such as 80%") from error
    if not 0 < share <= 1:
        raise InputError(f"--kv-cache-budget {given}: a share must be above 0% and at most 100%")
    return Budget(share=share)


def _check_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        words = ", ".join(name.replace("_", "-") for name in missing)
        raise InputError(f"kvcore serve needs {words}: pip install 'kvcore[server]'")


def _settings(
    model: ModelOption,
    mode: ModeOptions,
    options: ServeOptions,
    backend: BackendOptions,
    window: WindowOptions,
    parallel: ParallelOptions | None = None,
) -> Settings:
    return Settings(
        model=model,
        mode=mode,
        sampling=SamplingOptions(),
        text=TextOptions(chat_template=options.chat_template),
        backend=backend,
        window=window,
        life=LifeOptions(max_kv_size=options.max_kv_size, keep=options.keep, context_shift=options.context_shift),
        common=CommonOptions(debug=options.debug),
        parallel=parallel or ParallelOptions(),
    )


def _check(options: ServeOptions) -> None:
    """InputError for the first option out of range."""
    from kvcore.server.logs import FORMATS

    if not 0 <= options.port < 65536:
        raise InputError(f"--port {options.port}: must be from 0 to 65535")
    for name in ("max_batch", "max_queue", "prefill_step_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if options.max_model_len is not None and options.max_model_len < 2:
        raise InputError(f"--max-model-len {options.max_model_len}: must be 2 or more, for a prompt and an answer")
    if not (math.isfinite(options.shutdown_timeout) and options.shutdown_timeout >= 0):
        raise InputError(f"--shutdown-timeout {options.shutdown_timeout}: must be 0 or more seconds")
    if options.log_format not in FORMATS:
        raise InputError(f"--log-format {options.log_format}: choose auto, json or text")
    if options.api_key is not None and not (options.api_key.isascii() and options.api_key.strip() == options.api_key):
        raise InputError("--api-key: must be ASCII without spaces around it, as a header can carry it")
    if options.api_key == "":
        raise InputError("--api-key: is empty; give a key, or leave it out")
    for origin in filter(None, (each.strip() for each in options.allowed_origins.split(","))):
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise InputError(f"--allowed-origins {origin}: give a scheme and a host, such as https://example.com, or *")
    for mode in filter(None, (each.strip() for each in options.request_modes.split(","))):
        resolve_mode(mode)
    _names(options.served_model_name)


def _check_defaults(defaults: ServeDefaultOptions) -> None:
    """InputError where no request could take them."""
    if defaults.max_tokens is not None and defaults.max_tokens < 1:
        raise InputError(f"--max-tokens {defaults.max_tokens}: must be 1 or more")
    if defaults.temp > 2:
        raise InputError(f"--temp {defaults.temp}: must be at most 2, as in a request")
    SamplingParams(
        temperature=defaults.temp,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )


def _names(given: str | None) -> tuple[str, ...]:
    if given is None:
        return ()
    names = tuple(name.strip() for name in given.split(","))
    if not all(names):
        raise InputError(f"--served-model-name {given}: a name is empty")
    return names


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
