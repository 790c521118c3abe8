"""`load`: from a checkpoint to a `Model`, in one process or among several."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvcore.attention import decide, default_registry
from kvcore.backends import Backend, load_backend
from kvcore.cache import Cache
from kvcore.communicator import SINGLE, Communicator, SharedSteps
from kvcore.decoding import device_source
from kvcore.errors import InputError
from kvcore.generate import TokenSource
from kvcore.layout import WindowPolicy
from kvcore.models.llama import Ragged, forward_ragged, load_params
from kvcore.models.shard import Shard
from kvcore.modes import Mode
from kvcore.parallel import Leader, Ranks, Worker, follow, join
from kvcore.promptcache import Fingerprint
from kvcore.runtime import Model, as_mode, check_budget, spec_of
from kvcore.text import load_tokenizer
from kvcore.weights import open_checkpoint

DTYPES = ("auto", "float32", "float16", "bfloat16")
_DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def load(
    model: str | Path | None = None,
    *,
    backend: str = "auto",
    device: str | None = None,
    kv_cache_mode: str | Mode = "fp16",
    dtype: str = "auto",
    kernels: str = "auto",
    window: WindowPolicy | None = None,
    kv_cache_budget: int | None = None,
    chat_template: str | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    notify: Callable[[str], None] = lambda _text: None,
    tensor_parallel: int = 1,
) -> Model:
    """Load a model: a folder, a .gguf file, a hub id, or None for the embedded SmolLM2.

    ``dtype`` is the compute dtype and that of raw cache rows; "auto" takes float32 on a CPU and the checkpoint's own on
    a GPU. ``kv_cache_budget``: most bytes that the rows of a cache may take.
    ``progress(done, total)`` counts layers, ``notify`` hears of a download before it starts. Raises InputError,
    ModelError, BackendError or UnsupportedError before any weight is read where a setting cannot be met.

    ``tensor_parallel`` processes, started by torchrun or mlx.launch, share the model. Only rank 0 returns; the others
    work for it until it ends, and then raise SystemExit.
    """
    notices: list[str] = []
    mode = as_mode(kv_cache_mode, notices.append)
    compute = resolve_dtype(dtype)
    ranks: Ranks | None = None
    if tensor_parallel == 1:
        loaded = load_backend(backend, device)
    else:
        loaded, ranks = join(tensor_parallel, backend, device)
    if kernels != "graph" and loaded.fused_ops is not None:
        loaded = replace(loaded, ops=loaded.fused_ops())
    check_budget(kv_cache_budget)
    with nullcontext() if ranks is None else ranks.reported():
        made = _load(
            model, loaded, mode, compute, kernels, window or WindowPolicy(), chat_template, progress, notify, ranks
        )
        made = replace(made, notices=(*notices, *made.notices), budget=kv_cache_budget)
        if ranks is None:
            return made
        if ranks.rank:
            _work(made, ranks)
    leader = Leader(ranks)
    atexit.register(leader.close)
    return replace(made, leader=leader)


def _load(
    model: str | Path | None,
    backend: Backend,
    mode: Mode,
    compute: str | None,
    kernels: str,
    window: WindowPolicy,
    chat_template: str | None,
    progress: Callable[[int, int], None],
    notify: Callable[[str], None],
    ranks: Ranks | None,
) -> Model:
    among: Communicator = ranks or SINGLE
    checkpoint = open_checkpoint(model, notify)
    compute = compute or backend.default_dtype or checkpoint.config.dtype
    registry = default_registry(backend)
    config = Shard(checkpoint.config, among.rank, among.size).local
    decide(backend, registry, spec_of(config, mode, compute, window), kernels)
    tokenizer = load_tokenizer(checkpoint.tokenizer, chat_template)
    fingerprint = Fingerprint(checkpoint.config)
    notices: list[str] = []
    params = load_params(backend, checkpoint, compute, progress, fingerprint.add, among, notices.append)
    return Model(
        backend=backend,
        config=config,
        params=params,
        tokenizer=tokenizer,
        mode=mode,
        window=window,
        registry=registry,
        kernels=kernels,
        name=checkpoint.model_name,
        notices=(*([backend.notice] if backend.notice else []), *checkpoint.notices, *notices),
        fingerprint=fingerprint.hexdigest(),
    )


def _work(model: Model, ranks: Ranks) -> NoReturn:
    """A rank other than 0: run its share of what rank 0 does, to the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of a terminal; rank 0 decides

    ops = model.backend.ops

    def step(ids: np.ndarray, cache: Cache, all_logits: bool) -> None:
        model._own_forward(ids, cache, all_logits)
        ops.evaluate(*cache.arrays())

    def ragged(ids: Sequence[np.ndarray], caches: Sequence[Cache], settings: Mapping[str, Any]) -> Ragged:
        ran = forward_ragged(ops, model.config, model.params, ids, caches, **settings)
        ops.evaluate(ran.logits, *(array for cache in caches for array in cache.arrays()))
        return ran

    def decoder(
        cache: Cache, draws: Sequence[Mapping[str, Any]], seen: Sequence[Sequence[int]], among: SharedSteps
    ) -> TokenSource:
        return device_source(model.backend, model.config, model.params, cache, draws, seen, [], among=among)

    follow(ranks, Worker(ranks, model._own_cache, step, ragged, decoder))
    ranks.close()
    raise SystemExit(0)


def resolve_dtype(name: str) -> str | None:
    """The dtype of that name or alias (fp32, fp16, bf16); None for "auto"."""
    wanted = _DTYPE_ALIASES.get(name, name)
    if wanted not in DTYPES:
        raise InputError(f"unknown dtype '{name}': choose one of {', '.join(DTYPES)}")
    return None if wanted == "auto" else wanted
