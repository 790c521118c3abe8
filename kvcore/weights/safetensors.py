"""Reading and writing .safetensors files.

The header is checked against the file's size before anything is allocated; arrays are views of the mapped file.
Format: an 8-byte little-endian header length, the JSON header, the data (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError
from kvcore.models.fields import quoted
from kvcore.weights.json_file import parse_json
from kvcore.weights.mapped import map_file

MAX_HEADER = 100_000_000  # the limit of the safetensors package
DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
}
CODE_DTYPES = {"I32": np.dtype("<i4"), "I8": np.dtype("i1"), "U8": np.dtype("u1")}  # of cache files, not of weights
_OTHER_SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | _OTHER_SIZES


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the header; ``start`` and ``end`` are absolute in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    path: Path
    data: npt.NDArray[np.uint8]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, object] = field(default_factory=dict)

    def array(self, name: str, dtypes: Mapping[str, np.dtype[Any]] = DTYPES) -> npt.NDArray[np.generic]:
        """A read-only view of the file (a copy where the file is not aligned). ModelError for other dtypes."""
        entry = self.entries[name]
        if entry.dtype not in dtypes:
            raise ModelError(
                f"{self.path}: {quoted(name)} has dtype {quoted(entry.dtype)}, not supported "
                f"(supported: {', '.join(dtypes)})"
            )
        flat: npt.NDArray[np.generic] = self.data[entry.start : entry.end].view(dtypes[entry.dtype])
        return (flat if flat.flags.aligned else flat.copy()).reshape(entry.shape)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Parse and check the header. ModelError, naming file and tensor, for anything that cannot be right."""
    data = map_file(path)
    if data.size < 8:
        raise ModelError(f"{path} is truncated: a safetensors file needs at least 8 bytes, it has {data.size}")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > MAX_HEADER:
        raise ModelError(
            f"{path} is not a safetensors file: header of {length} bytes (at most {MAX_HEADER} are allowed)"
        )
    start = 8 + length
    if start > data.size:
        raise ModelError(f"{path} is truncated: its header needs {start} bytes, the file has {data.size}")
    header = parse_json(data[8:start].tobytes(), f"{path}: the safetensors header")
    metadata = header.pop("__metadata__", None)
    entries = {name: _entry(value, start, f"{path}: {quoted(name)}") for name, value in header.items()}
    needed = max((entry.end for entry in entries.values()), default=start)
    if needed > data.size:
        raise ModelError(f"{path} is truncated: its tensors need {needed} bytes, the file has {data.size}")
    _check_overlap(entries, path)
    return SafetensorsFile(path, data, entries, metadata if isinstance(metadata, dict) else {})


def _entry(value: object, start: int, where: str) -> Entry:
    if not isinstance(value, dict):
        raise ModelError(f"{where}: the header entry is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str):
        raise ModelError(f"{where}: dtype is {quoted(dtype)}")
    if not _is_sizes(shape):
        raise ModelError(f"{where}: shape is {quoted(shape)}")
    if not _is_sizes(offsets) or len(cast(list[int], offsets)) != 2:
        raise ModelError(f"{where}: data_offsets is {quoted(offsets)}")
    shape, (begin, end) = cast(list[int], shape), cast(list[int], offsets)
    size = _SIZES.get(dtype)
    if end < begin or (size is not None and end - begin != math.prod(shape) * size):
        raise ModelError(f"{where}: data_offsets {quoted(offsets)} do not hold {quoted(dtype)} {quoted(shape)}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**63 for i in value)


def _check_overlap(entries: Mapping[str, Entry], path: Path) -> None:
    end, previous = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < end:
            raise ModelError(f"{path}: {quoted(name)} overlaps {quoted(previous)}")
        end, previous = entry.end, name


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str]) -> None:
    """Write arrays of the dtypes in ``DTYPES`` and ``CODE_DTYPES``. Wider elements come first, so that every array is
    aligned."""
    names = {dtype: name for name, dtype in (DTYPES | CODE_DTYPES).items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in ordered:
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
