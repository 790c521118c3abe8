"""Metal kernels on the CPU: their bodies compiled as C++ against tests/metal/shim, run under several schedules.

`Shim` is a stand-in for `kvcore.backends.metal.launch.run_on_metal` on NumPy arrays. It writes the signature around a
body that `mx.fast.metal_kernel` writes, compiles it with g++, and places every input in memory of
its own between pages that may not be touched, strides and all. Libraries are kept by the hash of their source.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvcore.backends.metal.kernels import KernelSource
from kvcore.backends.metal.launch import Launch
from kvcore.ops import Ops

HEADER = Path(__file__).parent / "metal" / "shim" / "metal.hpp"
COMPILER = shutil.which("g++") if sys.platform == "linux" else None
NO_COMPILER = "no g++, or not Linux: Metal kernels cannot run on the CPU"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-gnu-unique", "-fno-strict-aliasing", "-ffp-contract=off", "-w"),
    *("-U_FORTIFY_SOURCE", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    *(("-fcf-protection=none",) if platform.machine() == "x86_64" else ()),
)
SCHEDULES = {"in order": 0, "reversed": 1, "random": 2}
TYPES = {
    "float32": "float",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "int32": "int",
    "int8": "int8_t",
    "uint8": "uint8_t",
}
FEW = 8  # MLX passes an input with fewer elements as a constant
ATTRIBUTES = {
    "threadgroup_position_in_grid": "uint3",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
}
_SHARED_ARRAY = re.compile(r"^threadgroup (\w+) (\w+)\[(.+)\];$", re.MULTILINE)


class KernelFault(AssertionError):
    """What the shim found: a stray access, a write beside an array, lanes or simdgroups that wait for each other."""


@dataclass(frozen=True)
class Key:
    """What one compiled function is for: a kernel, the types of its inputs and outputs, and its template's values."""

    source: KernelSource
    inputs: tuple[tuple[str, bool], ...]
    outputs: tuple[str, ...]
    template: tuple[tuple[str, str | int | bool], ...]


def key_of(launch: Launch) -> Key:
    inputs = tuple((x.dtype.name, x.size < FEW) for x in launch.inputs)
    return Key(launch.source, inputs, tuple(dtype for _, dtype in launch.outputs), launch.template)


def function_text(key: Key, number: int) -> str:
    """The kernel as MLX would declare it, an instance of its template, and a C function that runs it."""
    source, body = key.source, key.source.body
    parameters, passed, index = [], [], 0
    for name, (dtype, few) in zip(source.inputs, key.inputs, strict=True):
        parameters.append(f"const {'constant' if few else 'device'} {TYPES[dtype]}* {name}")
        passed.append(f"(const {TYPES[dtype]}*)a[{index}]")
        index += 1
        if f"{name}_strides" in body:
            parameters.append(f"const constant int64_t* {name}_strides")
            passed.append(f"(const int64_t*)a[{index}]")
            index += 1
    for name, dtype in zip(source.outputs, key.outputs, strict=True):
        parameters.append(f"device {TYPES[dtype]}* {name}")
        passed.append(f"({TYPES[dtype]}*)a[{index}]")
        index += 1
    position = dict(zip(ATTRIBUTES, ("group", "lane", "simdgroup"), strict=True))
    parameters += [f"{ATTRIBUTES[name]} {name}" for name in ATTRIBUTES if name in body]
    passed += [position[name] for name in ATTRIBUTES if name in body]
    kinds = {str: "typename", int: "int", bool: "bool"}
    declared = ", ".join(f"{kinds[type(value)]} {name}" for name, value in key.template)
    values = ", ".join(TYPES[value] if isinstance(value, str) else str(value).lower() for _, value in key.template)
    return f"""
namespace kernel_{number} {{
template <{declared}>
static void run({", ".join(parameters)}) {{
{_with_shared_arrays(body)}
}}
static void body(void* arguments, uint3 group, uint lane, uint simdgroup) {{
  void** a = (void**)arguments;
  run<{values}>({", ".join(passed)});
}}
}}
extern "C" int run_{number}(void* a, const uint* grid, const uint* shape, int schedule, uint64_t seed, char* out) {{
  return shim::run(kernel_{number}::body, a, grid, shape, schedule, seed, out);
}}
"""


def _with_shared_arrays(body: str) -> str:
    """Declarations of threadgroup memory, as places in the shim's arena."""
    count = iter(range(100))
    return _SHARED_ARRAY.sub(
        lambda m: f"{m[1]}* {m[2]} = shim::threadgroup_array<{m[1]}, ({m[3]})>({next(count)});", body
    )


def library_text(keys: Sequence[Key]) -> str:
    """All of ``keys`` in one translation unit, with each set of headers in front of the kernels that have it."""
    parts = [f'#include "{HEADER}"']
    headers = list(dict.fromkeys(key.source.header for key in keys))
    for place, header in enumerate(headers):
        parts += [f"namespace header_{place} {{", header]
        parts += [function_text(key, number) for number, key in enumerate(keys) if key.source.header == header]
        parts.append("}")
    return "\n".join(parts)


@dataclass
class Shim:
    """``run`` has the shape of `run_on_metal`. ``launches`` counts them by kernel."""

    schedule: str = "in order"
    seed: int = 1
    change: Callable[[KernelSource], KernelSource] = lambda source: source
    launches: dict[str, int] = field(default_factory=dict)

    def run(self, ops: Ops, launch: Launch) -> list[Any]:
        launch = replace(launch, source=self.change(launch.source))
        arrays = launch.inputs
        self.launches[launch.source.name] = self.launches.get(launch.source.name, 0) + 1
        function = function_of(key_of(launch))
        at_end = self.schedule != "reversed"  # under one schedule the buffers begin at a guard page
        places = [Placed.copy_of(x, at_end) for x in arrays]
        outputs = [Placed.empty(shape, dtype, at_end) for shape, dtype in launch.outputs]
        pointers: list[int] = []
        strides = []
        for name, placed in zip(launch.source.inputs, places, strict=True):
            pointers.append(placed.address)
            if f"{name}_strides" in launch.source.body:
                strides.append(np.array(placed.strides, np.int64))
                pointers.append(strides[-1].ctypes.data)
        pointers += [placed.address for placed in outputs]
        message = ctypes.create_string_buffer(256)
        failed = function(
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_uint * 3)(*launch.grid),
            (ctypes.c_uint * 3)(*launch.threadgroup),
            SCHEDULES[self.schedule],
            ctypes.c_uint64(self.seed),
            message,
        )
        results = [placed.read() for placed in outputs]
        for placed in (*places, *outputs):
            placed.close()
        if failed:
            raise KernelFault(f"{launch.source.name}: {message.value.decode()}")
        return results


@dataclass
class Recorder:
    """In the place of a `Shim`: runs nothing, gives zeros, and notes what would have to be compiled."""

    keys: list[Key] = field(default_factory=list)

    def run(self, ops: Ops, launch: Launch) -> list[Any]:
        self.keys.append(key_of(launch))
        return [np.zeros(shape, numpy_dtype(dtype)) for shape, dtype in launch.outputs]


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE
_NO_ACCESS, _READ_WRITE = 0, 3
_SPARSE = 1 << 28  # bytes from which on an array's gaps are left as they are, which takes no memory


class Placed:
    """An array between two pages that may not be touched: flush with the one behind it, or with the one before it."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any], at_end: bool) -> None:
        """``strides`` are in elements; the array takes what they span."""
        self.shape, self.strides, self.dtype = tuple(shape), tuple(strides), dtype
        spanned = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        self._bytes = spanned * dtype.itemsize
        room = -(-max(1, self._bytes) // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, room + 2 * _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (base, base + _PAGE + room):
            if _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._guards = (base, base + _PAGE + room)
        self._start = _PAGE + (room - self._bytes if at_end else 0)
        self.address = base + self._start

    @classmethod
    def copy_of(cls, x: np.ndarray, at_end: bool) -> Placed:
        """With the strides of ``x``; what lies between its elements is NaN."""
        strides = [s // x.itemsize for s in x.strides]
        placed = cls(x.shape, strides, x.dtype, at_end)
        placed._poison()
        placed._view()[...] = x
        return placed

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: str, at_end: bool) -> Placed:
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        placed = cls(shape, strides, numpy_dtype(dtype), at_end)
        placed._poison()
        return placed

    def _poison(self) -> None:
        if self._bytes < _SPARSE:
            ctypes.memset(self.address, 0xFF, self._bytes)

    def _view(self) -> np.ndarray:
        if not self._bytes:
            return np.empty(self.shape, self.dtype)
        whole = np.frombuffer(self._map, np.uint8, self._bytes, self._start).view(self.dtype)
        return np.lib.stride_tricks.as_strided(whole, self.shape, [s * self.dtype.itemsize for s in self.strides])

    def read(self) -> np.ndarray:
        return self._view().copy()

    def close(self) -> None:
        for guard in self._guards:
            _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), _READ_WRITE)


_FUNCTIONS: dict[Key, Any] = {}


def function_of(key: Key) -> Any:
    if key not in _FUNCTIONS:
        compile_all([key])
    return _FUNCTIONS[key]


def compile_all(keys: Iterable[Key]) -> None:
    """Build what is not built yet, as one library."""
    missing = [key for key in dict.fromkeys(keys) if key not in _FUNCTIONS]
    if not missing:
        return
    library = ctypes.CDLL(str(build(library_text(missing))))
    for number, key in enumerate(missing):
        _FUNCTIONS[key] = getattr(library, f"run_{number}")


def build(text: str) -> Path:
    """The library of ``text``, compiled unless an earlier run has left it."""
    if COMPILER is None:
        raise RuntimeError(NO_COMPILER)
    whole = "\0".join((text, HEADER.read_text(encoding="utf-8"), COMPILER, *FLAGS))
    digest = hashlib.sha256(whole.encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"kvcore-metal-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            source.write_text(text, encoding="utf-8")
            done = subprocess.run([COMPILER, *FLAGS, str(source), "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the kernels do not compile:\n{done.stderr[:4000]}")
            made.rename(target)
    return target
