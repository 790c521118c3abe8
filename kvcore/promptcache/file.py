"""The file: safetensors with canonical planes, raw rows in the compute dtype, and JSON about them in its metadata.

Tensors of layer i are ``layers.{i}.{k,v}.{sinks,tail}`` [B, Hkv, rows, D] in the compute dtype and
``layers.{i}.{k,v}.folded.{plane}`` [B, Hkv, rows, width], as docs/modes.md describes them; ``tokens`` int32 are the ids
of every position. Where rows in the middle were dropped, the holes say where. A centred K adds
``layers.{i}.k.folded.center`` float16 [B, Hkv, pages, D] and ``layers.{i}.k.folded.page_rows`` int32 [pages].

Version 1 had no centres, and is the same where there are none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.cache import CacheRows, Hole
from kvcore.errors import InputError, ModelError
from kvcore.layout import Cap, KVView, Layout
from kvcore.models.fields import quoted
from kvcore.ops import ITEMSIZE, Ops
from kvcore.promptcache.atomic import check_target, write_atomically
from kvcore.promptcache.identity import Identity
from kvcore.weights.json_file import parse_json
from kvcore.weights.safetensors import CODE_DTYPES, DTYPES, SafetensorsFile, open_safetensors, write_safetensors

__all__ = ["PromptCache", "check_target", "read_prompt_cache", "write_prompt_cache"]

FORMAT, VERSION = "kvcore-prompt-cache", 2
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class PromptCache:
    """A file's contents: the rows of ``tokens``, host arrays."""

    identity: Identity
    dtype: str
    tokens: tuple[int, ...]
    rows: CacheRows
    cap: Cap | None = None


def write_prompt_cache(
    path: Path,
    ops: Ops,
    rows: CacheRows,
    tokens: Sequence[int],
    identity: Identity,
    dtype: str,
    cap: Cap | None = None,
) -> int:
    """Write exported rows and the ids of every position; returns the file's size in bytes.

    InputError where ids and rows do not fit, KvcoreError where writing fails; then an older file is unchanged.
    """
    if len(tokens) != rows.offset:
        raise InputError(f"{len(tokens)} token ids for a cache at position {rows.offset}: give the id of each position")
    arrays: Arrays = {"tokens": np.asarray(tokens, np.int32)}
    for layer, view in enumerate(rows.views):
        arrays |= {name: np.asarray(ops.to_numpy(array)) for name, array in _arrays(view, layer).items()}
        if view.page_rows:
            arrays[f"layers.{layer}.k.folded.page_rows"] = np.asarray(view.page_rows, np.int32)
    about = {
        "version": VERSION,
        "dtype": dtype,
        "layers": len(rows.views),
        "offset": rows.offset,
        "holes": [list(hole) for hole in rows.holes],
        "handed_over": rows.handed_over,
        "cap": None if cap is None else [cap.tokens, cap.keep],
        "crc32": _checksum(arrays),
        **identity.to_dict(),
    }
    metadata = {"format": FORMAT, "cache": json.dumps(about)}
    write_atomically(path, lambda file: write_safetensors(file, arrays, metadata))
    return path.stat().st_size


def read_prompt_cache(path: Path, layouts: Sequence[Layout], kv_heads: int, identity: Identity) -> PromptCache:
    """Read and check a file for a cache of one sequence with these ``layouts``, one for each layer.

    InputError where it was made with something else, naming both values; ModelError where it is missing, damaged or
    something other than a prompt cache.
    """
    file = open_safetensors(path)
    about = _about(file, path)
    try:
        theirs = Identity(**{name: about[name] for name in identity.to_dict()})
        if about["version"] == 1 and theirs.mode == identity.mode and "k_center" in identity.layout:
            raise InputError(
                f"{path} has format version 1, whose keys in mode {theirs.mode} have no centres: this kvcore reads "
                f"version {VERSION} of them, so make the file again"
            )
        theirs.check(identity, str(path))
        holes = tuple(Hole(_whole(at), _whole(count)) for at, count in about["holes"])
        cap = None if about["cap"] is None else Cap(*map(_whole, about["cap"]))
        dtype, handed_over, layers = str(about["dtype"]), about["handed_over"], _whole(about["layers"])
        offset, crc = _whole(about["offset"]), _whole(about["crc32"])
        if dtype not in ITEMSIZE or not isinstance(handed_over, bool):
            raise ValueError(f"dtype {quoted(dtype)} or handed_over {quoted(handed_over)}")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged: its description lacks or misspells {error}") from error
    if layers != len(layouts):
        raise ModelError(f"{path} is damaged: it has {layers} layers, the model {len(layouts)}")
    arrays: Arrays = {name: file.array(name, DTYPES | CODE_DTYPES) for name in file.entries}
    if _checksum(arrays) != crc:
        raise ModelError(f"{path} is damaged: the checksum of its tensors is not the one it names; make it again")
    tokens = tuple(int(i) for i in _take(arrays, "tokens", "int32", (offset,), path))
    reader = _Reader(arrays, path, dtype, kv_heads, identity)
    rows = CacheRows(tuple(reader.view(i, layout) for i, layout in enumerate(layouts)), holes, handed_over)
    if rows.offset != offset or any(view.tokens != rows.tokens for view in rows.views):
        raise ModelError(f"{path} is damaged: its layers hold {rows.offset} positions, its description says {offset}")
    ends = [-1, *(hole.at for hole in holes), rows.tokens + 1]
    if any(b <= a for a, b in pairwise(ends)) or any(hole.missing < 1 for hole in holes):
        raise ModelError(f"{path} is damaged: {quoted([*map(list, holes)])} are no holes among {rows.tokens} rows")
    if len({view.page_rows for view in rows.views if view.folded}) > 1:
        raise ModelError(f"{path} is damaged: the pages of its layers have different rows")
    return PromptCache(identity, dtype, tokens, rows, cap)


def _arrays(view: KVView, layer: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, planes, sinks, tail in (
        ("k", view.k_planes, view.sink_k, view.tail_k),
        ("v", view.v_planes, view.sink_v, view.tail_v),
    ):
        at = f"layers.{layer}.{part}"
        found[f"{at}.tail"] = tail
        if view.folded:
            found |= {f"{at}.folded.{name}": plane for name, plane in planes.items()}
        if view.sinks:
            found[f"{at}.sinks"] = sinks
    if view.page_rows:
        found[f"layers.{layer}.k.folded.center"] = view.k_centers
    return found


def _checksum(arrays: Arrays) -> int:
    """Of all bytes, in the order of names."""
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data, crc)
    return crc


def _about(file: SafetensorsFile, path: Path) -> dict[str, Any]:
    if file.metadata.get("format") != FORMAT:
        raise ModelError(f"{path} is no prompt cache: make one with kvcore cache-prompt")
    about = parse_json(str(file.metadata.get("cache", "")).encode(), f"{path}: its description")
    if about.get("version") not in (1, VERSION):
        found = quoted(about.get("version"))
        raise ModelError(f"{path} has format version {found}, this kvcore reads 1 and {VERSION}: make the file again")
    return about


def _whole(value: object) -> int:
    """A whole number of the description. ValueError for anything else that JSON knows."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the number {quoted(value)}")
    return value


def _take(arrays: Arrays, name: str, dtype: str, shape: tuple[int, ...], path: Path) -> npt.NDArray[np.generic]:
    array = arrays.get(name)
    if array is None:
        raise ModelError(f"{path} is damaged: it has no tensor {name}")
    if str(array.dtype) != dtype or array.shape != shape:
        raise ModelError(f"{path} is damaged: {name} is {array.dtype} {array.shape}, should be {dtype} {shape}")
    return array


@dataclass(frozen=True, slots=True)
class _Reader:
    """Views of the layers, checked against their layouts."""

    arrays: Arrays
    path: Path
    dtype: str
    kv_heads: int
    identity: Identity

    def view(self, layer: int, layout: Layout) -> KVView:
        at = f"layers.{layer}"
        tail, sinks = self._count(f"{at}.k.tail"), self._count(f"{at}.k.sinks")
        folded = self._count(f"{at}.k.folded.{layout.k.planes[0].name}")
        if sinks > folded or (folded and not layout.quantized):
            raise ModelError(f"{self.path} is damaged: layer {layer} has {folded} quantized rows and {sinks} sinks")
        parts: dict[str, Mapping[str, Any]] = {}
        for part, codec, dim in (("k", layout.k, layout.k_dim), ("v", layout.v, layout.v_dim)):
            raw = {"tail": tail} | ({"sinks": sinks} if sinks else {})
            rows = {name: self._rows(f"{at}.{part}.{name}", self.dtype, n, dim) for name, n in raw.items()}
            planes = {}
            for plane in codec.planes if folded else ():
                name, dtype = f"{at}.{part}.folded.{plane.name}", plane.resolve(self.dtype)
                planes[plane.name] = self._rows(name, dtype, folded, plane.width(dim))
            parts[part] = {"planes": planes, "sinks": rows.get("sinks"), "tail": rows["tail"]}
        k, v = parts["k"], parts["v"]
        sides = (k["sinks"], v["sinks"], k["planes"], v["planes"], k["tail"], v["tail"])
        centers, page_rows = self._centers(layer, layout, folded)
        return KVView(layout, sinks, folded, *sides, None, None, k_centers=centers, page_rows=page_rows)

    def _centers(self, layer: int, layout: Layout, folded: int) -> tuple[Any, tuple[int, ...]]:
        """The view's centres and the rows of their pages, where K is centred."""
        at = f"layers.{layer}.k.folded"
        if not folded or not layout.k.centred:
            return None, ()
        pages = self._count(f"{at}.center")
        page_rows = _take(self.arrays, f"{at}.page_rows", "int32", (pages,), self.path).tolist()
        page = self.identity.window["page_size"]
        if not all(1 <= rows <= page for rows in page_rows) or sum(page_rows) != folded:
            raise ModelError(
                f"{self.path} is damaged: the pages of layer {layer} have {page_rows} rows, {folded} are quantized"
            )
        return self._rows(f"{at}.center", "float16", pages, layout.k_dim), tuple(page_rows)

    def _count(self, name: str) -> int:
        array = self.arrays.get(name)
        return 0 if array is None or array.ndim != 4 else array.shape[2]

    def _rows(self, name: str, dtype: str, count: int, width: int) -> npt.NDArray[np.generic]:
        return _take(self.arrays, name, dtype, (1, self.kv_heads, count, width), self.path)
