"""`load` and `Model`: a checkpoint on a backend, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path

import numpy as np

from kvcore.attention import decide, default_registry, make_cache
from kvcore.backends import Backend, load_backend
from kvcore.cache import Cache, CacheSpec
from kvcore.errors import InputError
from kvcore.generate import DEFAULT_PREFILL_STEP, Generation
from kvcore.layout import WindowPolicy
from kvcore.models.config import LlamaConfig
from kvcore.models.llama import LlamaParams, forward, load_params
from kvcore.modes import Mode, resolve_mode
from kvcore.registry import Registry
from kvcore.sampling import SamplingParams
from kvcore.text import Tokenizer, load_tokenizer
from kvcore.weights import open_checkpoint

DTYPES = ("auto", "float32", "float16", "bfloat16")
_DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. Immutable: each generation has a cache of its own unless it is given one."""

    backend: Backend
    config: LlamaConfig
    params: LlamaParams
    tokenizer: Tokenizer
    mode: Mode
    window: WindowPolicy
    registry: Registry
    kernels: str
    name: str
    notices: tuple[str, ...] = ()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)

    def new_cache(
        self, kv_cache_mode: str | Mode | None = None, *, batch: int = 1, capacity: int | None = None
    ) -> Cache:
        """An empty cache in the model's mode, or in another one.

        ``capacity``: tokens that will come, so that paged storage reserves them at once. It grows beyond them.
        KvcoreError where there is no memory for them.
        """
        mode = self.mode if kv_cache_mode is None else _as_mode(kv_cache_mode)
        spec = _cache_spec(self.config, mode, self.params.dtype, self.window, batch, capacity)
        return make_cache(self.backend, spec, kernels=self.kernels, registry=self.registry)

    def forward(self, ids: np.ndarray, cache: Cache, *, all_logits: bool = False) -> np.ndarray:
        """``ids`` int [B, T] at the cache's offset -> float32 logits [B, T or 1, vocab] on the host."""
        logits = forward(self.backend.ops, self.config, self.params, ids, cache, all_logits=all_logits)
        return self.backend.ops.to_numpy(logits)

    def encode(self, prompt: str | Messages | Sequence[int], *, raw: bool = False) -> list[int]:
        """Token ids of a prompt: text goes through the chat template as one user message unless ``raw`` or the model
        has no template; messages always do; ids pass through."""
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                return self.tokenizer.encode(prompt)
            return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        return self._checked_ids(prompt)  # type: ignore[arg-type]

    def generate(
        self,
        prompt: str | Messages | Sequence[int],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        cache: Cache | None = None,
        prefill_step: int = DEFAULT_PREFILL_STEP,
    ) -> Generation:
        """Text for ``prompt``, piece by piece: iterate over the result.

        With a ``cache`` the prompt must extend what it holds; that part is not run again.
        Raises InputError for an empty prompt or one that the model's context does not hold.
        """
        ids, params = self.encode(prompt, raw=raw), params or SamplingParams()
        if cache is None:
            cache = self.new_cache(capacity=min(self.config.max_position, len(ids) + params.max_tokens))
        return Generation(
            self._step,
            self.tokenizer,
            cache,
            ids,
            params,
            eos_token_ids=self.eos_token_ids,
            max_position=self.config.max_position,
            prefill_step=prefill_step,
        )

    def _step(self, ids: Sequence[int], cache: Cache) -> np.ndarray:
        logits = self.forward(np.asarray(ids, np.int32)[None], cache)
        self.backend.ops.evaluate(*cache.arrays())
        last: np.ndarray = logits[0, -1]
        return last

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        checked = [index(i) for i in ids]
        bad = next((i for i in checked if not 0 <= i < self.config.vocab_size), None)
        if bad is not None:
            raise InputError(f"token id {bad}: the vocabulary has ids 0 to {self.config.vocab_size - 1}")
        return checked


def load(
    model: str | Path | None = None,
    *,
    backend: str = "auto",
    device: str | None = None,
    kv_cache_mode: str | Mode = "fp16",
    dtype: str = "auto",
    kernels: str = "auto",
    window: WindowPolicy | None = None,
    chat_template: str | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    notify: Callable[[str], None] = lambda _text: None,
) -> Model:
    """Load a model: a folder, a .gguf file, a hub id, or None for the embedded SmolLM2.

    ``dtype`` is the compute dtype and that of raw cache rows; "auto" takes float32 on a CPU and the checkpoint's own on
    a GPU. ``progress(done, total)`` counts layers, ``notify`` hears of a download before it starts. Raises InputError,
    ModelError, BackendError or UnsupportedError before any weight is read where a setting cannot be met.
    """
    notices: list[str] = []
    mode = _as_mode(kv_cache_mode, notices.append)
    loaded = load_backend(backend, device)
    compute = resolve_dtype(dtype)
    checkpoint = open_checkpoint(model, notify)
    compute = compute or loaded.default_dtype or checkpoint.config.dtype
    registry = default_registry(loaded)
    window = window or WindowPolicy()
    decide(loaded, registry, _cache_spec(checkpoint.config, mode, compute, window), kernels)
    tokenizer = load_tokenizer(checkpoint.tokenizer, chat_template)
    return Model(
        backend=loaded,
        config=checkpoint.config,
        params=load_params(loaded, checkpoint, compute, progress),
        tokenizer=tokenizer,
        mode=mode,
        window=window,
        registry=registry,
        kernels=kernels,
        name=checkpoint.model_name,
        notices=(*notices, *([loaded.notice] if loaded.notice else []), *checkpoint.notices),
    )


def resolve_dtype(name: str) -> str | None:
    """The dtype of that name or alias (fp32, fp16, bf16); None for "auto"."""
    wanted = _DTYPE_ALIASES.get(name, name)
    if wanted not in DTYPES:
        raise InputError(f"unknown dtype '{name}': choose one of {', '.join(DTYPES)}")
    return None if wanted == "auto" else wanted


def _as_mode(mode: str | Mode, notice: Callable[[str], None] = lambda _text: None) -> Mode:
    return mode if isinstance(mode, Mode) else resolve_mode(mode, notice)


def _cache_spec(
    config: LlamaConfig, mode: Mode, dtype: str, window: WindowPolicy, batch: int = 1, capacity: int | None = None
) -> CacheSpec:
    return CacheSpec(
        mode=mode,
        num_layers=config.num_layers,
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        window=window,
        batch=batch,
        capacity=capacity,
    )
