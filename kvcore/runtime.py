"""`load` and `Model`: a checkpoint on a backend, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import index
from pathlib import Path

import numpy as np

from kvcore.attention import convert_cache, decide, default_registry, make_cache
from kvcore.backends import Backend, load_backend
from kvcore.cache import Cache, CacheSpec
from kvcore.errors import InputError
from kvcore.generate import DEFAULT_PREFILL_STEP, Generation
from kvcore.layout import DEFAULT_KEEP, Cap, WindowPolicy
from kvcore.models.config import LlamaConfig
from kvcore.models.llama import LlamaParams, forward, load_params
from kvcore.modes import Mode, resolve_mode
from kvcore.promptcache import Fingerprint, Identity, check_target, read_prompt_cache, write_prompt_cache
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
    fingerprint: str = ""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)

    def new_cache(
        self,
        kv_cache_mode: str | Mode | None = None,
        *,
        batch: int = 1,
        capacity: int | None = None,
        max_kv_size: int | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> Cache:
        """An empty cache in the model's mode, or in another one.

        ``capacity``: tokens that will come, so that paged storage reserves them at once. It grows beyond them.
        ``max_kv_size``: most live rows of a layer; of longer sequences the first ``keep`` and the newest stay.
        KvcoreError where there is no memory, InputError for a cap that cannot be.
        """
        mode = self.mode if kv_cache_mode is None else _as_mode(kv_cache_mode)
        spec = _cache_spec(self.config, mode, self.params.dtype, self.window, batch, capacity)
        spec = replace(spec, model=self.fingerprint)
        if max_kv_size is not None:
            spec = replace(spec, cap=Cap(max_kv_size, keep))
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
        max_kv_size: int | None = None,
        keep: int = DEFAULT_KEEP,
        context_shift: bool = True,
    ) -> Generation:
        """Text for ``prompt``, piece by piece: iterate over the result.

        With a ``cache`` the prompt must extend what it holds; that part is not run again. ``max_kv_size`` and ``keep``
        are those of `new_cache`, for a cache of its own. Without ``context_shift`` the answer ends, with finish reason
        "length", where a token would exceed ``max_kv_size``.
        Raises InputError for an empty prompt or one that the model's context does not hold.
        """
        ids, params = self.encode(prompt, raw=raw), params or SamplingParams()
        if cache is None:
            capacity = min(self.config.max_position, len(ids) + params.max_tokens)
            shifts = max_kv_size if context_shift else None
            cache = self.new_cache(capacity=capacity, max_kv_size=shifts, keep=keep)
        return Generation(
            self._step,
            self.tokenizer,
            cache,
            ids,
            params,
            eos_token_ids=self.eos_token_ids,
            max_position=self.config.max_position,
            prefill_step=prefill_step,
            max_kv_size=None if context_shift else max_kv_size,
        )

    def prefill(
        self,
        ids: Sequence[int],
        cache: Cache,
        *,
        prefill_step: int = DEFAULT_PREFILL_STEP,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """Run ``ids`` in chunks, for their rows alone. ``progress(done, total)`` counts tokens."""
        for begin in range(0, len(ids), prefill_step):
            self._step(ids[begin : begin + prefill_step], cache)
            progress(min(len(ids), begin + prefill_step), len(ids))

    def save_cache(self, path: str | Path, cache: Cache, tokens: Sequence[int]) -> int:
        """Write ``cache``, which has seen ``tokens``, to a prompt-cache file; returns its size in bytes.

        InputError where the two do not fit or no file can be there, KvcoreError where writing fails; then an older file
        at ``path`` is unchanged.
        """
        target = Path(path).expanduser()
        check_target(target)
        spec, identity = cache.spec, self._identity(cache.mode)
        return write_prompt_cache(target, self.backend.ops, cache.export(), tokens, identity, spec.dtype, spec.cap)

    def load_cache(
        self,
        path: str | Path,
        kv_cache_mode: str | Mode | None = None,
        *,
        capacity: int | None = None,
        max_kv_size: int | None = None,
        keep: int = DEFAULT_KEEP,
    ) -> tuple[Cache, tuple[int, ...]]:
        """The cache of a prompt-cache file, and the tokens that it has seen.

        InputError where the file was made with another model, tokenizer, mode or window, naming both values, and where
        rows in the middle were dropped under another cap; ModelError where it is damaged.
        """
        cache = self.new_cache(kv_cache_mode, capacity=capacity, max_kv_size=max_kv_size, keep=keep)
        source = Path(path).expanduser()
        layouts = [layer.layout for layer in cache.layers]
        found = read_prompt_cache(source, layouts, self.config.num_kv_heads, self._identity(cache.mode))
        if found.rows.holes and found.cap != cache.spec.cap:
            theirs, ours = (_words(cap) for cap in (found.cap, cache.spec.cap))
            raise InputError(
                f"{source} does not fit this run: it was cut to {theirs}, here there is {ours}: use the same cap, "
                "or make the file again"
            )
        self._checked_ids(found.tokens)
        cache.load(found.rows)
        return cache, found.tokens

    def convert_cache(self, cache: Cache, kv_cache_mode: str | Mode) -> Cache:
        """A cache in another mode with the same rows; the old one stays: see `kvcore.attention.convert_cache`."""
        mode = _as_mode(kv_cache_mode)
        return convert_cache(self.backend, cache, mode, kernels=self.kernels, registry=self.registry)

    def _identity(self, mode: Mode) -> Identity:
        layout = mode.layout(self.config.head_dim)
        return Identity(
            model=self.fingerprint,
            tokenizer=self.tokenizer.digest(),
            rope={**asdict(self.config.rope), "freq_factors": list(self.config.rope.freq_factors or ())},
            mode=mode.name,
            layout={
                "k": layout.k.name,
                "v": layout.v.name,
                "k_dim": layout.k_dim,
                "v_dim": layout.v_dim,
                "kv_heads": self.config.num_kv_heads,
            },
            window=asdict(self.window) if mode.quantized else {},
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
    fingerprint = Fingerprint(checkpoint.config)
    return Model(
        backend=loaded,
        config=checkpoint.config,
        params=load_params(loaded, checkpoint, compute, progress, fingerprint.add),
        tokenizer=tokenizer,
        mode=mode,
        window=window,
        registry=registry,
        kernels=kernels,
        name=checkpoint.model_name,
        notices=(*notices, *([loaded.notice] if loaded.notice else []), *checkpoint.notices),
        fingerprint=fingerprint.hexdigest(),
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


def _words(cap: Cap | None) -> str:
    return "no cap" if cap is None else f"max_kv_size {cap.tokens} with keep {cap.keep}"


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
