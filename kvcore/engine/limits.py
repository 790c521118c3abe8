"""What a request may ask for, and where its answer ends at the latest."""

from __future__ import annotations

from kvcore.cache import Cache, CacheSpec
from kvcore.engine.config import EngineConfig
from kvcore.engine.memory import ByteMemory, Memory, RowCosts, covers, default_budget
from kvcore.engine.paged import PageMemory, raw_pages_for
from kvcore.engine.types import BudgetError, ContextLengthError, ModeError, Request
from kvcore.errors import InputError, KvcoreError
from kvcore.generate import longest_chunk
from kvcore.modes import MODES, resolve_mode
from kvcore.runtime import Model

MAX_ALTERNATIVES = 20
LARGEST_CHUNK = 2048  # where nobody says: running streams wait for it


def chunk_of(model: Model, config: EngineConfig) -> int:
    """Tokens of a chunk of prefill."""
    return config.prefill_step or min(model.backend.prefill_step, LARGEST_CHUNK)


def make_memory(model: Model, config: EngineConfig) -> Memory:
    """Where the engine's caches come from: pools of pages where the mode's kernels work on them, else contiguous rows.

    CapacityError for a budget that holds no page or that the device has not, InputError for modes that do not go
    together or a cap that cannot be.
    """
    cap = config.max_kv_size if config.context_shift else None
    budget = config.kv_cache_budget or default_budget(model.backend)
    specs: dict[str, CacheSpec] = {}
    for mode in MODES:
        try:
            specs[mode] = model.cache_spec(mode, max_kv_size=cap, keep=config.keep)
            specs[mode].shape()
        except KvcoreError:
            if mode == model.mode.name:
                raise
    wanted = dict.fromkeys((model.mode.name, *(resolve_mode(mode).name for mode in config.modes)))
    costs = {mode: RowCosts(spec, longest_chunk(chunk_of(model, config))) for mode, spec in specs.items()}

    def make(mode: str, pools: object | None = None) -> Cache:
        return model.new_cache(mode, max_kv_size=cap, keep=config.keep, pools=pools)

    share, pools = budget // len(wanted), {}
    for mode in wanted:
        raw_pages = raw_pages_for(costs[mode], config.max_batch, model.config.max_position)
        pools[mode] = model.new_pools(specs[mode], share, raw_pages=raw_pages)
        if pools[mode] is None:
            break
    else:
        return PageMemory({mode: costs[mode] for mode in wanted}, pools, make, budget)
    if len(pools) > 1:
        raise InputError(
            f"modes {', '.join(pools)}: some work on pages and some on contiguous rows here, which one budget cannot "
            "serve: use --kernels graph, or one server for each mode"
        )
    return ByteMemory(costs, make, budget)


class Limits:
    """Checks requests against the model, the configuration and the budget."""

    def __init__(self, model: Model, config: EngineConfig, memory: Memory) -> None:
        self._model, self._memory = model, memory
        context = model.config.max_position
        self.context = min(context, config.max_model_len or context)
        if config.max_model_len is not None and config.max_model_len > context:
            raise InputError(f"max_model_len {config.max_model_len}: the model's context holds {context} tokens")
        self._cap = None if config.context_shift else config.max_kv_size
        self._most: dict[str, int] = {}

    def check(self, request: Request) -> tuple[str, int]:
        """The mode and the most tokens of the answer. Errors are those of `Engine.submit`."""
        prompt, vocab = len(request.prompt), self._model.config.vocab_size
        if not prompt:
            raise InputError("the prompt is empty: give at least one token of text")
        bad = next((token for token in request.prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise InputError(f"token id {bad}: the vocabulary has ids 0 to {vocab - 1}")
        request.params.check_vocabulary(vocab)
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_ALTERNATIVES:
            raise InputError(f"logprobs {request.logprobs}: must be from 0 to {MAX_ALTERNATIVES}")
        mode = self._mode(request.mode)
        context = min(self.context, self._cap or self.context)
        if prompt >= context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, the context holds {context}: shorten the prompt to leave room for "
                "an answer"
            )
        needs, most = self._memory.needs(mode, prompt, prompt + 1), self._tokens_in_budget(mode)
        if not covers(self._memory.capacity(mode), needs):
            raise BudgetError(
                f"a prompt of {prompt} tokens in mode {mode} needs {self._memory.describe(mode, needs)}, all there is "
                f"are {self._memory.describe(mode, self._memory.capacity(mode))}: shorten the prompt, use a smaller "
                "cache mode, or give the server a larger budget"
            )
        return mode, min(request.params.max_tokens, context - prompt, most - prompt)

    def _mode(self, wanted: str | None) -> str:
        if wanted is None:
            return self._model.mode.name
        mode, allowed = resolve_mode(wanted).name, self._memory.modes()
        if allowed is not None and mode not in allowed:
            raise ModeError(f"cache mode {mode}: this server has room for {', '.join(allowed)} only")
        return mode

    def _tokens_in_budget(self, mode: str) -> int:
        """The longest sequence that the whole budget holds."""
        if mode not in self._most:
            low, high, capacity = 0, self.context + 1, self._memory.capacity(mode)
            while low < high:
                middle = (low + high + 1) // 2
                fits = covers(capacity, self._memory.needs(mode, 0, middle))
                low, high = (middle, high) if fits else (low, middle - 1)
            self._most[mode] = low
        return self._most[mode]
