"""`Model`: a checkpoint on a backend, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.attention import convert_cache, make_cache, make_pools
from kvcore.backends import Backend
from kvcore.cache import Cache, CacheSpec, StepCache
from kvcore.decoding import GroupTokens, device_source, draw, group_tokens, on_device, token_source
from kvcore.errors import InputError
from kvcore.generate import Generation, TokenSource, check_step, chunks
from kvcore.layout import DEFAULT_KEEP, Cap, WindowPolicy, narrower
from kvcore.models.config import LlamaConfig
from kvcore.models.llama import LlamaParams, Ragged, forward, forward_ragged
from kvcore.modes import Mode, resolve_mode
from kvcore.parallel import Leader, RankedCache
from kvcore.promptcache import Identity, check_target, read_prompt_cache, write_prompt_cache
from kvcore.registry import Registry
from kvcore.sampling import Sampler, SamplingParams
from kvcore.text import Tokenizer

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. Immutable: each generation has a cache of its own unless it is given one.

    Of a model that several ranks share this is rank 0's: ``config`` has its own heads, ``leader`` leads the others.
    """

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
    leader: Leader | None = None
    budget: int | None = None

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
        budget: int | None = None,
        pools: object | None = None,
    ) -> Cache:
        """An empty cache in the model's mode, or in another one.

        ``capacity``: tokens that will come, so that paged storage reserves them at once. It grows beyond them.
        ``max_kv_size``: most live rows of a layer; of longer sequences the first ``keep`` and the newest stay. Where
        all layers slide, rows that none of them sees go anyway.
        ``budget``: most bytes that its rows may take (None: the model's own, if any). Room for ``capacity`` tokens, or
        for all that the budget and the model's context hold, is taken at once then.
        ``pools``: pages of `new_pools` for a cache of that mode, else it has pages of its own.
        CapacityError where there is no memory or the budget holds no token, InputError for a cap that cannot be.
        """
        spec = self.cache_spec(
            kv_cache_mode, batch=batch, capacity=capacity, max_kv_size=max_kv_size, keep=keep, budget=budget
        )
        made = self._own_cache(spec, pools)
        return made if self.leader is None else self.leader.adopt(made, spec)

    def new_pools(self, spec: CacheSpec, budget: int, *, raw_pages: int) -> Any:
        """Pages that caches of ``spec`` share: see `kvcore.attention.make_pools`. None where ranks share the model:
        their caches have pages of their own."""
        if self.leader is not None:
            return None
        return make_pools(self.backend, spec, budget, raw_pages=raw_pages, kernels=self.kernels, registry=self.registry)

    def cache_spec(
        self,
        kv_cache_mode: str | Mode | None = None,
        *,
        batch: int = 1,
        capacity: int | None = None,
        max_kv_size: int | None = None,
        keep: int = DEFAULT_KEEP,
        budget: int | None = None,
    ) -> CacheSpec:
        """What `new_cache` makes a cache of. InputError for a cap or a budget that cannot be."""
        budget = self.budget if budget is None else budget
        if budget is not None:
            check_budget(budget)
            capacity = min(capacity or self.config.max_position, self.config.max_position)
        mode = self.mode if kv_cache_mode is None else as_mode(kv_cache_mode)
        spec = spec_of(self.config, mode, self.params.dtype, self.window, batch, capacity)
        cap = None if max_kv_size is None else Cap(max_kv_size, keep)
        return replace(
            spec,
            model=self.fingerprint,
            cap=narrower(cap, self.config.common_window),
            budget=budget,
            step=self.backend.prefill_step,
        )

    def forward(self, ids: np.ndarray, cache: Cache, *, all_logits: bool = False) -> np.ndarray:
        """``ids`` int [B, T] at the cache's offset -> float32 logits [B, T or 1, vocab] on the host."""
        if isinstance(cache, RankedCache):
            return cache.run(ids, all_logits, lambda: self._own_forward(ids, cache, all_logits))
        return self._own_forward(ids, cache, all_logits)

    def forward_ragged(
        self,
        ids: Sequence[np.ndarray],
        caches: Sequence[StepCache],
        *,
        all_logits: bool = False,
        row_block: int | None = None,
    ) -> Ragged:
        """`kvcore.models.llama.forward_ragged` on this model; the ranks that share it step too."""

        def step() -> Ragged:
            ops, config, params = self.backend.ops, self.config, self.params
            return forward_ragged(ops, config, params, ids, caches, all_logits=all_logits, row_block=row_block)

        if self.leader is None:
            return step()
        return self.leader.step(ids, caches, {"all_logits": all_logits, "row_block": row_block}, step)

    def group_tokens(self, most: int) -> GroupTokens | None:
        """Steps of up to ``most`` caches with sampling on the device: see `kvcore.decoding.group_tokens`. None where
        ranks share the model."""
        if self.leader is not None:
            return None
        return group_tokens(self.backend, self.config, self.params, most=most)

    def token_source(
        self, cache: Cache, samplers: Sequence[Sampler], seen: Sequence[Sequence[int]]
    ) -> TokenSource | None:
        """See `kvcore.decoding.token_source`; the ranks that share the model decode too."""
        backend, config, params = self.backend, self.config, self.params
        if self.leader is None:
            return token_source(backend, config, params, cache, samplers, seen)
        if not isinstance(cache, RankedCache) or not on_device(backend, cache, samplers):
            return None
        draws = [draw(sampler.params) for sampler in samplers]
        if all(each["repetition_penalty"] == 1 for each in draws):
            seen = [()] * len(seen)  # nobody looks at them
        with self.leader.decoder(cache, draws, seen) as among:
            made = device_source(backend, config, params, cache, draws, seen, samplers, among=among)
        self.leader.keep(made, among.number)
        return made

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
        prefill_step: int | None = None,
        max_kv_size: int | None = None,
        keep: int = DEFAULT_KEEP,
        context_shift: bool = True,
    ) -> Generation:
        """Text for ``prompt``, piece by piece: iterate over the result.

        ``prefill_step``: tokens of the prompt that run at once, by default the backend's own number. With a ``cache``
        the prompt must extend what it holds; that part is not run again. ``max_kv_size`` and ``keep``
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
            prefill_step=self.backend.prefill_step if prefill_step is None else prefill_step,
            max_kv_size=None if context_shift else max_kv_size,
            make_source=self._source,
        )

    def prefill(
        self,
        ids: Sequence[int],
        cache: Cache,
        *,
        prefill_step: int | None = None,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """Run ``ids`` in chunks, for their rows alone. ``progress(done, total)`` counts tokens."""
        step = self.backend.prefill_step if prefill_step is None else prefill_step
        check_step(step)
        for begin, end in chunks(0, len(ids), step):
            self._step(ids[begin:end], cache)
            progress(end, len(ids))

    def save_cache(self, path: str | Path, cache: Cache, tokens: Sequence[int]) -> int:
        """Write ``cache``, which has seen ``tokens``, to a prompt-cache file; returns its size in bytes.

        InputError where the two do not fit or no file can be there, KvcoreError where writing fails; then an older file
        at ``path`` is unchanged.
        """
        self._check_files()
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
        self._check_files()
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
        self._check_files()
        mode = as_mode(kv_cache_mode)
        return convert_cache(self.backend, cache, mode, kernels=self.kernels, registry=self.registry)

    def _identity(self, mode: Mode) -> Identity:
        layout = mode.layout(self.config.head_dim)
        return Identity(
            model=self.fingerprint,
            tokenizer=self.tokenizer.digest(),
            rope={**asdict(self.config.rope), "freq_factors": list(self.config.rope.freq_factors or ())},
            mode=mode.name,
            layout=layout.describe() | {"kv_heads": self.config.num_kv_heads},
            window=asdict(self.window) if mode.quantized else {},
        )

    def _own_cache(self, spec: CacheSpec, pools: object | None = None) -> Cache:
        return make_cache(self.backend, spec, kernels=self.kernels, registry=self.registry, pools=pools)

    def _own_forward(self, ids: np.ndarray, cache: Cache, all_logits: bool) -> np.ndarray:
        logits = forward(self.backend.ops, self.config, self.params, ids, cache, all_logits=all_logits)
        return self.backend.ops.to_numpy(logits)

    def _check_files(self) -> None:
        if self.leader is not None:
            raise InputError(
                f"{self.params.ranks.size} ranks share this model, and each has the rows of its own heads: "
                "prompt caches in files and a change of mode need one process"
            )

    def _step(self, ids: Sequence[int], cache: Cache) -> np.ndarray:
        logits = self.forward(np.asarray(ids, np.int32)[None], cache)
        self.backend.ops.evaluate(*cache.arrays())
        last: np.ndarray = logits[0, -1]
        return last

    def _source(self, cache: Cache, sampler: Sampler, seen: Sequence[int]) -> TokenSource | None:
        return self.token_source(cache, [sampler], [seen])

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        checked = [index(i) for i in ids]
        bad = next((i for i in checked if not 0 <= i < self.config.vocab_size), None)
        if bad is not None:
            raise InputError(f"token id {bad}: the vocabulary has ids 0 to {self.config.vocab_size - 1}")
        return checked


def check_budget(budget: int | None) -> None:
    """InputError for a budget that cannot be."""
    if budget is not None and budget < 1:
        raise InputError(f"a KV budget of {budget} bytes: must be 1 or more")


def as_mode(mode: str | Mode, notice: Callable[[str], None] = lambda _text: None) -> Mode:
    """The mode of that name or alias (``notice`` hears of one that means something else). InputError for another."""
    return mode if isinstance(mode, Mode) else resolve_mode(mode, notice)


def spec_of(
    config: LlamaConfig, mode: Mode, dtype: str, window: WindowPolicy, batch: int = 1, capacity: int | None = None
) -> CacheSpec:
    """A cache of the model's shape."""
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
        sliding=bool(config.layer_windows),
    )


def _words(cap: Cap | None) -> str:
    return "no cap" if cap is None else f"max_kv_size {cap.tokens} with keep {cap.keep}"


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
