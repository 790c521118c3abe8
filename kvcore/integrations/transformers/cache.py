"""`KVCache`: transformers' cache protocol over kvcore's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcore.backends import load_backend
from kvcore.cache import CacheSpec, CacheStats
from kvcore.errors import InputError, UnsupportedError
from kvcore.integrations.transformers.attention import NAME, Step, tag
from kvcore.integrations.transformers.library import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    layers_for,
    rows_to_remove,
)
from kvcore.integrations.transformers.stores import GraphStore, Store, open_store
from kvcore.layout import WindowPolicy
from kvcore.modes import Mode, resolve_mode

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class KVCache(Cache):
    """K and V of a model in one of kvcore's modes, for ``generate`` and ``forward`` with attn_implementation "kvcore".

    ``config``   the model's, by which sliding layers are known
    ``mode``     a mode's name or alias: see docs/modes.md
    ``window``   which rows stay raw
    ``kernels``  auto, fused or graph
    ``capacity`` tokens that will come, where known: paged storage on a GPU reserves them and grows beyond them

    A layer that keeps no keys and values (linear attention, shared rows) stays transformers' own. Raises InputError for
    an unknown mode and UnsupportedError for an encoder-decoder model.
    """

    def __init__(
        self,
        config: Any,
        mode: str | Mode = "turbo4",
        *,
        window: WindowPolicy | None = None,
        kernels: str = "auto",
        capacity: int | None = None,
    ) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError("encoder-decoder models have a second cache: use transformers' own for them")
        self.mode = mode if isinstance(mode, Mode) else resolve_mode(mode)
        self.window, self.kernels, self.capacity = window or WindowPolicy(), kernels, capacity
        self.store: Store | None = None
        self._config = config.get_text_config(decoder=True)
        kinds = layers_for(config)
        types = getattr(self._config, "layer_types", None) or [None] * len(kinds)
        chunked = [name == "chunked_attention" for name in types]
        super().__init__(layers=[self._layer(i, kind, chunked[i]) for i, kind in enumerate(kinds)])

    def _layer(self, index: int, kind: Any, chunked: bool) -> Any:
        if type(kind) is DynamicSlidingWindowLayer:
            return KVLayer(self, index, None if chunked else kind.sliding_window)
        return KVLayer(self, index, None) if type(kind) is DynamicLayer else kind

    @property
    def kv_layers(self) -> list[KVLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    def stats(self) -> CacheStats:
        """Rows and bytes, after folding what is due. InputError for a cache that has seen no token."""
        if self.store is None:
            raise InputError("the cache is empty: it has rows after the first forward")
        self.store.commit()
        return self.store.stats()

    def describe(self) -> dict[str, Any]:
        """Mode, storage and kernels as plain values; ``storage`` is None before the first forward."""
        store = self.store
        return {
            "mode": self.mode.name,
            "storage": None if store is None else store.name,
            "kernels": [] if store is None else [decision.to_dict() for decision in store.decisions],
            "notices": [] if store is None else list(store.notices),
        }

    def open(self, q: Tensor, k: Tensor, v: Tensor, *, masked: bool) -> Store:
        """The store, made at the first attention: only there are batch, heads and the mask known."""
        if self.store is None:
            device = "cpu" if k.device.type == "cpu" else str(k.device)
            backend = load_backend("cuda", device)
            layers = self.kv_layers
            alike = len(layers) == len(self.layers) and len({layer.sliding_window for layer in layers}) == 1
            self.store = open_store(
                backend, self._spec(q, k, v), kernels=self.kernels, masked=masked, alike=alike, layers=len(self.layers)
            )
        return self.store

    def _spec(self, q: Tensor, k: Tensor, v: Tensor) -> CacheSpec:
        if k.dtype not in _DTYPES:
            raise UnsupportedError(f"rows of {k.dtype}: kvcore takes float32, float16 and bfloat16")
        return CacheSpec(
            mode=self.mode,
            num_layers=len(self.layers),
            num_q_heads=int(q.shape[1]),
            num_kv_heads=int(k.shape[1]),
            head_dim=int(k.shape[-1]),
            dtype=_DTYPES[k.dtype],
            window=self.window,
            batch=int(k.shape[0]),
            v_head_dim=None if v.shape[-1] == k.shape[-1] else int(v.shape[-1]),
            capacity=self.capacity,
        )

    def on_graph(self, why: str) -> GraphStore | None:
        """The store as one on the graph path; None before the first forward. Pages are copied out, once."""
        if self.store is not None and not isinstance(self.store, GraphStore):
            self.store = self.store.to_graph(why)
        return self.store

    def check_attention(self) -> None:
        chosen = self._config._attn_implementation
        if chosen != NAME:
            raise InputError(
                f"a KVCache with attn_implementation '{chosen}': only '{NAME}' reads it; call "
                f"model.set_attn_implementation('{NAME}')"
            )

    def reset(self) -> None:
        """Empty, and ready for another batch."""
        self.store = None
        for layer in self.layers:
            layer.reset()


class KVLayer(CacheLayerMixin):
    """One layer of a `KVCache`, in transformers' protocol. The rows lie in the cache's store."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: KVCache, index: int, sliding_window: int | None) -> None:
        super().__init__()
        self.cache, self.index, self.sliding_window = cache, index, sliding_window
        self.is_sliding = sliding_window is not None
        self._step: Step | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: rows get their place at the first attention."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hand the new rows to attention, which stores them. What earlier steps left to fold is folded first: a crop
        between steps so comes before it."""
        if self._step is not None and self._step.k is not None:
            raise InputError(
                f"layer {self.index}: its last rows never reached attn_implementation '{NAME}': either the step "
                "failed, or this model changes keys between cache and attention; use a new cache, or transformers' own"
            )
        if self.index == self.cache.kv_layers[0].index:
            self.cache.check_attention()
        store = self.cache.store
        if store is not None:
            store.settle(self.index, int(key_states.shape[2]))
        self._step = Step(self, key_states.detach(), value_states.detach())
        return tag(key_states, self._step), value_states

    def attend(self, step: Step, q: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """Store the step's rows and attend to all; a second call with the same step (shared rows) only attends."""
        q = q.detach()
        if step.k is None or step.v is None:
            return self._graph("layers that share rows").attend(self.index, q, scale, self.sliding_window, mask)
        store = self.cache.open(q, step.k, step.v, masked=mask is not None)
        if mask is not None:
            store = self._graph("a mask for each sequence")
        self.is_initialized = True
        out = store.step(self.index, q, step.k, step.v, scale, self.sliding_window, mask)
        step.k = step.v = None
        return out

    def get_seq_length(self) -> int:
        """Tokens seen, those that a sliding layer has forgotten included."""
        return 0 if self.cache.store is None else self.cache.store.tokens(self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask, and the position of the first."""
        dropped = 0 if self.cache.store is None else self.cache.store.dropped(self.index)
        return self.get_seq_length() - dropped + query_length, dropped

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -n tokens, in this layer. Folded rows are not unfolded."""
        if self.cache.store is not None:
            count = rows_to_remove(tokens_to_remove, self.get_seq_length())
            self.cache.store.trim(self.index, count)

    def reset(self) -> None:
        self._step, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx`` of the batch, in that order: codes, scales and raw rows alike."""
        if self.cache.store is not None:
            self._graph("sequences in another order").select(self.index, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache.store is not None:
            graph = self._graph("repeated sequences")
            batch = graph.batch(self.index)
            graph.select(self.index, torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache.store is not None:
            graph = self._graph("a part of the batch")
            graph.select(self.index, torch.arange(graph.batch(self.index))[indices.cpu()])

    def offload(self) -> None:
        raise UnsupportedError("a KVCache cannot be offloaded: use a smaller mode, or transformers' own cache")

    def _graph(self, why: str) -> GraphStore:
        graph = self.cache.on_graph(why)
        assert graph is not None
        return graph
