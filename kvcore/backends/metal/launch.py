"""One launch of a Metal kernel as data, and running it through MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvcore.backends.metal.kernels import KernelSource
from kvcore.ops import Array, Ops


@dataclass(frozen=True, slots=True)
class Launch:
    """``template`` values are dtype names, integers or truth values; ``grid`` counts threads, as MLX does.

    ``inputs`` keep their strides: nothing is copied to be contiguous. ``outputs`` are shapes and dtype names.
    """

    source: KernelSource
    inputs: tuple[Array, ...]
    template: tuple[tuple[str, str | int | bool], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    outputs: tuple[tuple[tuple[int, ...], str], ...]


Run = Callable[[Ops, Launch], list[Array]]


def run_on_metal(ops: Ops, launch: Launch) -> list[Array]:
    """The outputs of ``launch``, as lazy as every array of MLX."""
    import mlx.core as mx

    dtypes = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16, "int8": mx.int8, "uint8": mx.uint8}
    return _compiled(launch.source)(
        inputs=list(launch.inputs),
        template=[(name, dtypes[value] if isinstance(value, str) else value) for name, value in launch.template],
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=[shape for shape, _ in launch.outputs],
        output_dtypes=[dtypes[dtype] for _, dtype in launch.outputs],
    )


@lru_cache(maxsize=8)
def _compiled(source: KernelSource) -> Any:
    import mlx.core as mx

    return mx.fast.metal_kernel(
        name=f"kvcore_{source.name}",
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
        ensure_row_contiguous=False,
    )
