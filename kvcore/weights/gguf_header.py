"""The header of a GGUF file: metadata and the table of tensors, every number checked against the file's size.

Format: the GGUF specification of ggml (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError
from kvcore.models.fields import quoted
from kvcore.weights.mapped import map_file

Bytes = npt.NDArray[np.uint8]

MAX_NAME = 127  # ggml refuses tensor names of 64 bytes and more; longer ones are damage
MAX_KEY = 65535
MAX_DIMENSIONS = 4
MAX_ARRAY = 2**22  # elements: vocabularies are far smaller, and every element becomes a Python object
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MIN_KEY_VALUE = 8 + 4 + 1  # bytes of the smallest key-value pair and tensor entry: bounds on the two counts
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the table. ``shape`` in NumPy order (rows first); ``start`` is absolute in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    block: int
    block_bytes: int
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block * self.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    data: Bytes
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]

    def blocks(self, tensor: GgufTensor) -> Bytes:
        """The tensor's raw blocks, uint8 [rows, blocks per row, block_bytes], mapped from the file."""
        raw = self.data[tensor.start : tensor.start + tensor.nbytes]
        rows = math.prod(tensor.shape[:-1])
        return raw.reshape(rows, tensor.shape[-1] // tensor.block, tensor.block_bytes)


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check. ModelError, naming the file and the field, for anything that cannot be right."""
    data = map_file(path)
    if data[:4].tobytes() != b"GGUF":
        what = "it is empty" if not data.size else f"it starts with {data[:4].tobytes()!r}, not b'GGUF'"
        raise ModelError(f"{path} is not a GGUF file: {what}")
    cursor = _Cursor(path, data, 4)
    version = cursor.scalar("I", "version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise ModelError(f"{path}: GGUF version {version}{hint} is not supported (supported: 2, 3)")
    tensor_count = cursor.count("tensor_count", _MIN_TENSOR)
    pair_count = cursor.count("metadata_kv_count", _MIN_KEY_VALUE)
    metadata: dict[str, object] = {}
    for i in range(pair_count):
        key = cursor.string(f"metadata key {i}", MAX_KEY)
        if key in metadata:
            raise ModelError(f"{path}: duplicate metadata key {quoted(key)}")
        metadata[key] = cursor.value(f"metadata {quoted(key)}")
    alignment = _alignment(path, metadata)
    entries = [cursor.tensor(i) for i in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(path, data, metadata, _placed(path, entries, start, alignment, data.size))


def _alignment(path: Path, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    powers = [2**i for i in range(MAX_ALIGNMENT.bit_length())]
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment not in powers:
        raise ModelError(
            f"{path}: general.alignment must be a power of two up to {MAX_ALIGNMENT}, is {quoted(alignment)}"
        )
    return alignment


def _placed(path: Path, entries: list[GgufTensor], start: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """Entries by name with absolute offsets; aligned, within the file and without overlap."""
    tensors: dict[str, GgufTensor] = {}
    end, previous = start, "the header"
    for entry in sorted(entries, key=lambda entry: entry.start):
        where = f"{path}: tensor {quoted(entry.name)}"
        if entry.name in tensors:
            raise ModelError(f"{where} is listed twice")
        if entry.start % alignment:
            raise ModelError(f"{where}: offset {entry.start} is not a multiple of the alignment {alignment}")
        begin = start + entry.start
        if begin < end:
            raise ModelError(f"{where}: offset {entry.start} overlaps {previous}")
        tensors[entry.name] = GgufTensor(
            entry.name, entry.shape, entry.type_name, entry.block, entry.block_bytes, begin
        )
        end, previous = begin + entry.nbytes, quoted(entry.name)
    if end > size:
        raise ModelError(f"{path} is truncated: its tensors need {end} bytes, the file has {size}")
    return tensors


class _Cursor:
    """Reads forward through the header; ``position`` never passes the end of the file."""

    def __init__(self, path: Path, data: Bytes, position: int) -> None:
        self._path = path
        self._bytes = data.data
        self.position = position

    def scalar(self, code: str, field: str) -> int:
        """One little-endian number of struct format ``code``."""
        return int(self._number(code, field))

    def count(self, field: str, smallest: int) -> int:
        """A uint64 count of things that take at least ``smallest`` bytes each."""
        count = self.scalar("Q", field)
        self._need(count * smallest, f"{field} {count}")
        return count

    def string(self, field: str, longest: int | None = None) -> str:
        length = self.scalar("Q", f"length of {field}")
        if longest is not None and length > longest:
            raise ModelError(f"{self._path}: {field} is {length} bytes long, at most {longest} are allowed")
        self._need(length, field)
        raw = bytes(self._bytes[self.position : self.position + length])
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: {field} is not UTF-8 (byte {error.start})") from error

    def value(self, field: str) -> object:
        """A metadata value as plain Python: int, float, bool, str, or a list of one of them."""
        kind = self.scalar("I", f"type of {field}")
        if kind != _ARRAY:
            return self._reader(kind, field)(field)
        kind = self.scalar("I", f"element type of {field}")
        read = self._reader(kind, field)
        dtype = np.dtype(f"<{_SCALARS.get(kind, 'Q')}")  # a string takes 8 bytes and more
        count = self.count(f"length of {field}", dtype.itemsize)
        if count > MAX_ARRAY:
            raise ModelError(f"{self._path}: {field} has {count} elements, at most {MAX_ARRAY} are allowed")
        if kind == _STRING:
            return [read(field) for _ in range(count)]
        values = np.frombuffer(self._bytes, dtype, count, self.position)
        self.position += values.nbytes
        return values.tolist()

    def tensor(self, index: int) -> GgufTensor:
        """One entry of the table, its offset still relative to the data section."""
        name = self.string(f"name of tensor {index}", MAX_NAME)
        field = f"tensor {quoted(name)}"
        rank = self.scalar("I", f"{field} dimension count")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: {field} has {rank} dimensions (1 to {MAX_DIMENSIONS} are allowed)")
        dims = [self.scalar("Q", f"{field} dimension") for _ in range(rank)]
        type_id = self.scalar("I", f"{field} type")
        offset = self.scalar("Q", f"{field} offset")
        type_name, block, block_bytes = _block_format(type_id, f"{self._path}: {field}")
        if min(dims) < 1 or max(dims) >= 2**63 or dims[0] % block:
            need = f", the first a multiple of {block} ({type_name})" if block > 1 else ""
            raise ModelError(f"{self._path}: {field} has dimensions {dims}; they must be positive{need}")
        return GgufTensor(name, tuple(reversed(dims)), type_name, block, block_bytes, offset)

    def _reader(self, kind: int, field: str) -> Callable[[str], object]:
        if kind == _STRING:
            return self.string
        if kind not in _SCALARS:
            raise ModelError(f"{self._path}: {field} has unsupported type {kind}")
        if kind == _FLOAT32:
            return lambda field: float(str(np.float32(self._number("f", field))))  # 1e-05, not 9.99999975e-06
        return lambda field: self._number(_SCALARS[kind], field)

    def _number(self, code: str, field: str) -> int | float | bool:
        self._need(struct.calcsize(f"<{code}"), field)
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value  # type: ignore[no-any-return]

    def _need(self, size: int, field: str) -> None:
        if self.position + size > len(self._bytes):
            raise ModelError(
                f"{self._path} is truncated or damaged at {field}: "
                f"needs at least {self.position + size} bytes, the file has {len(self._bytes)}"
            )


def _block_format(type_id: int, where: str) -> tuple[str, int, int]:
    """Name, elements per block and bytes per block of a ggml type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # slow to import, and only GGUF needs it

    if type_id not in GGML_QUANT_SIZES:
        raise ModelError(f"{where} has unknown type {type_id}")
    kind = GGMLQuantizationType(type_id)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return kind.name, block, block_bytes
