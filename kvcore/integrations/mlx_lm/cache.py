"""`KvcoreCache`: one layer's rows of one sequence, in mlx-lm's cache protocol."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvcore.backends import Backend, load_backend
from kvcore.cache import CacheSpec
from kvcore.errors import InputError, UnsupportedError
from kvcore.integrations.mlx_lm.library import ONE_STATE, pack_state, register, unpack_state
from kvcore.integrations.rows import Rows, open_rows
from kvcore.layout import KVView, WindowPolicy
from kvcore.modes import MODES, Mode

_DTYPES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class CausalMask:
    """The mask of a kvcore layer, as a word: a query sees what is before it, within ``window`` where there is one."""

    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What a layer's cache is made for: the model's global index of the layer and the user's choices."""

    mode: Mode
    layer: int
    num_layers: int
    window: WindowPolicy = field(default_factory=WindowPolicy)
    kernels: str = "auto"


@lru_cache(maxsize=1)
def _backend() -> Backend:
    return load_backend("metal")


@register
class KvcoreCache:
    """K and V of one layer in one of kvcore's modes.

    It has what mlx-lm's own cache has, but no arrays of keys and values: attention reads the rows as they are stored,
    so it works inside `patched` only. Rows are folded before the next step, so that a trim after speculative
    verification comes first.
    """

    def __init__(self, settings: LayerSettings) -> None:
        self.settings = settings
        self.offset = 0
        self._rows: Rows | None = None
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hand ``keys`` and ``values`` [1, Hkv, n, D] to the attention that follows, which stores them."""
        from kvcore.integrations.mlx_lm.patch import check_patched

        check_patched()
        if keys.shape[0] != 1:
            raise InputError(f"{keys.shape[0]} sequences in one KvcoreCache: merge one cache for each")
        self._check_attended()
        self.settle(int(keys.shape[2]))
        self._new = keys, values
        self.offset += int(keys.shape[2])
        return keys, values

    def attend(self, q: mx.array, scale: float, mask: Any) -> mx.array:
        """Store the step's rows and attend: ``q`` [1, Hq, n, D] -> [1, Hq, n, D_v].

        ``mask``: a `CausalMask`, None or "causal" for the same without a window, or bool [.., n, tokens].
        """
        if self._new is None:
            raise UnsupportedError("layers that share keys and values: kvcore's cache does not serve this model")
        keys, values = self._new
        self._new = None
        if self._rows is None:
            self._rows = self._open(q, keys, values)
        if isinstance(mask, mx.array):
            if mask.dtype != mx.bool_:
                raise UnsupportedError(f"attention mask of {mask.dtype}: kvcore takes boolean ones")
            self._rows.append(keys, values)
            allowed = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            return self._rows.attend_masked(q, scale, allowed[..., -self._rows.tokens :])
        window = mask.window if isinstance(mask, CausalMask) else None
        return self._rows.step(q, keys, values, scale, window)

    def settle(self, count: int) -> None:
        """Before ``count`` new rows: the hand-over of a delegated mode, where this is it, and folding what is due."""
        if self._rows is None:
            return
        if count == 1 and self.settings.mode.delegated:
            self._rows.hand_over(None)
        else:
            self._rows.commit()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> CausalMask:
        return CausalMask(window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens, or all that there are; returns how many. Folded rows are not unfolded."""
        self._check_attended()
        n = min(self.offset, n)
        if self._rows is not None:
            self._rows.trim(n)
        self.offset -= n
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, spare room included, as in mlx-lm's own."""
        return 0 if self._rows is None else self._rows.allocated_bytes()

    @property
    def rows(self) -> Rows | None:
        """The rows; None before the first step."""
        return self._rows

    def copy(self) -> KvcoreCache:
        """A cache with the same rows, in the same arrays until one of the two writes."""
        self._check_attended()
        other = KvcoreCache(self.settings)
        other.offset = self.offset
        other._rows = None if self._rows is None else self._rows.copy()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> KvcoreCache:
        return self.copy()

    @classmethod
    def merge(cls, caches: list[KvcoreCache]) -> Any:
        """A batch of copies of ``caches``, whatever their lengths; some may be empty."""
        from kvcore.integrations.mlx_lm.batch import KvcoreBatchCache

        return KvcoreBatchCache([cache.copy() for cache in caches])

    # Saving

    @property
    def state(self) -> Any:
        """Live rows alone, no spare room. One form from mlx-lm 0.32 on; before, the header is in `meta_state`."""
        return pack_state(self._header(), self._arrays())

    @state.setter
    def state(self, state: Any) -> None:
        if ONE_STATE:
            self._restore(*unpack_state(state))
        else:
            self._pending_state = state

    @property
    def meta_state(self) -> str:
        return json.dumps(self._header())

    @meta_state.setter
    def meta_state(self, meta_state: str) -> None:
        self._restore(*unpack_state(self._pending_state, meta_state))
        del self._pending_state

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> KvcoreCache:
        cache = cls.__new__(cls)
        cache._restore(*unpack_state(state, meta_state))
        return cache

    def _header(self) -> dict[str, Any]:
        settings, rows = self.settings, self._rows
        shape = None if rows is None else (rows.heads, rows.layout.k_dim, rows.layout.v_dim, rows.dtype, rows.folding)
        return {
            "mode": settings.mode.name,
            "layer": settings.layer,
            "num_layers": settings.num_layers,
            "window": asdict(settings.window),
            "kernels": settings.kernels,
            "offset": self.offset,
            "rows_folded": 0 if rows is None else rows.rows_folded,
            "page_rows": () if rows is None else rows.view().page_rows,
            "shape": shape,
        }

    def _arrays(self) -> dict[str, mx.array]:
        if self._rows is None or self.offset == 0:
            return {}
        view = self._rows.view()
        named = {"tail_k": view.tail_k, "tail_v": view.tail_v, "sink_k": view.sink_k, "sink_v": view.sink_v}
        named["centers_k"] = view.k_centers
        for part, planes in (("k", view.k_planes), ("v", view.v_planes)):
            named |= {f"plane_{part}_{name}": plane for name, plane in planes.items()}
        return {name: array for name, array in named.items() if array is not None and array.size}

    def _restore(self, header: dict[str, Any], arrays: dict[str, mx.array]) -> None:
        mode = MODES[header["mode"]]
        window = WindowPolicy(**header["window"])
        self.settings = LayerSettings(mode, header["layer"], header["num_layers"], window, header["kernels"])
        self.offset, self._rows, self._new = header["offset"], None, None
        if header["shape"] is None:
            return
        heads, k_dim, v_dim, dtype, folding = header["shape"]
        self._rows = rows = self._open_rows(heads, heads, k_dim, v_dim, dtype)
        rows.folding = folding
        page_rows = tuple(header.get("page_rows", ()))
        if rows.layout.k.centred and sum(page_rows) != header["rows_folded"]:
            raise InputError(
                f"a cache in mode {mode.name} that was saved without its keys' centres: run its prompt again"
            )
        rows.fill(_view_of(rows, header["rows_folded"], page_rows, arrays))

    def _open(self, q: mx.array, keys: mx.array, values: mx.array) -> Rows:
        if keys.dtype not in _DTYPES:
            raise UnsupportedError(f"rows of {keys.dtype}: kvcore takes float32, float16 and bfloat16")
        dims = int(keys.shape[3]), int(values.shape[3])
        return self._open_rows(int(q.shape[1]), int(keys.shape[1]), *dims, _DTYPES[keys.dtype])

    def _open_rows(self, q_heads: int, heads: int, k_dim: int, v_dim: int, dtype: str) -> Rows:
        spec = CacheSpec(
            mode=self.settings.mode,
            num_layers=self.settings.num_layers,
            num_q_heads=q_heads,
            num_kv_heads=heads,
            head_dim=k_dim,
            dtype=dtype,
            window=self.settings.window,
            v_head_dim=None if v_dim == k_dim else v_dim,
        )
        return open_rows(_backend(), spec, self.settings.layer, kernels=self.settings.kernels)

    def _check_attended(self) -> None:
        if self._new is not None:
            raise InputError(
                f"layer {self.settings.layer}: its last rows never reached kvcore's attention: the step failed, or "
                "this model does not call scaled_dot_product_attention; use a new cache, or mlx-lm's own for this model"
            )


def _view_of(rows: Rows, folded: int, page_rows: tuple[int, ...], arrays: dict[str, mx.array]) -> KVView:
    empty = rows.view()
    planes = {
        part: {name: arrays.get(f"plane_{part}_{name}", none) for name, none in had.items()}
        for part, had in (("k", empty.k_planes), ("v", empty.v_planes))
    }
    sinks = arrays.get("sink_k")
    return KVView(
        layout=rows.layout,
        sinks=0 if sinks is None else int(sinks.shape[2]),
        folded=folded,
        sink_k=sinks,
        sink_v=arrays.get("sink_v"),
        k_planes=planes["k"],
        v_planes=planes["v"],
        tail_k=arrays.get("tail_k", empty.tail_k),
        tail_v=arrays.get("tail_v", empty.tail_v),
        k_rotation=empty.k_rotation,
        v_rotation=empty.v_rotation,
        k_centers=arrays.get("centers_k"),
        page_rows=page_rows,
    )
