"""The sources of the Metal kernels: one body a file, in Metal Shading Language, with what they share as headers.

`mx.fast.metal_kernel` writes a signature around a body: the inputs by name, ``NAME_strides`` of those whose strides the
body names, then the outputs, and the thread's position.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel: its text, that of its headers, and the names of its arrays."""

    name: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _source(name: str, headers: tuple[str, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> KernelSource:
    return KernelSource(name, "\n".join(map(_read, headers)), _read(name), inputs, outputs)


def _read(name: str) -> str:
    return (resources.files(__package__) / f"{name}.metal").read_text(encoding="utf-8")


SIMDS = 4  # simdgroups of a threadgroup, as in common.metal
THREADS = 32 * SIMDS
CODEC_NUMBERS = {"raw": 0, "int8": 1, "turbo4": 2, "turbo3": 3}

ENCODE = _source("encode", ("common",), ("rows", "matrix", "signs", "levels", "factor", "dims"), ("codes", "scale"))
ROTATE = _source("rotate", ("common",), ("q", "matrix", "signs", "factor", "dims"), ("turned",))
ATTEND = _source(
    "attend",
    ("common", "rows"),
    (
        *("q", "turned", "k_codes", "k_scale", "v_codes", "v_scale", "sink_k", "sink_v", "tail_k", "tail_v"),
        *("k_levels", "v_levels", "page_bias", "page_of", "factor", "dims"),
    ),
    ("sums", "stats"),
)
COMBINE = _source("combine", ("common",), ("sums", "stats", "matrix", "signs", "dims"), ("out",))
SOURCES = (ENCODE, ROTATE, ATTEND, COMBINE)
