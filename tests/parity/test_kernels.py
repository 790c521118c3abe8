"""Every registered kernel against the specification: generated from the registry, so none can be without.

A kernel is run on each question of a grid that its own constraints accept. A new operation needs a check here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from oracle import (
    BACKENDS,
    DTYPES,
    SMALL,
    assert_planes_follow_spec,
    cast,
    exact_attention,
    filled,
    gaussian,
    relative_error,
    to_numpy,
)

from kvcore.attention import GRAPH_KERNELS, default_registry
from kvcore.backends import Backend, load_backend
from kvcore.layout import CODECS, Rotation
from kvcore.modes import MODES
from kvcore.registry import Kernel, KernelQuery

GRID_MODES = ("fp16", "int8", "turbo4", "turbo3-asym", "int8-turbo4")
HEAD_DIMS, RATIOS = (64, 80, 96, 128, 256), (1, 3, 4, 8)
# A third of the product, in which each pair of values still occurs.
GRID = [
    (mode, dtype, dim, ratio)
    for mode, dtype, dim, ratio in product(GRID_MODES, DTYPES, HEAD_DIMS, RATIOS)
    if (GRID_MODES.index(mode) + DTYPES.index(dtype) + RATIOS.index(ratio)) % 3 == 0
]
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 4e-3}


def installed() -> Iterator[tuple[str, str, str | None]]:
    for test_id, (name, device, package) in BACKENDS.items():
        if importlib.util.find_spec(package) is not None:
            yield test_id, name, device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per backend that is installed here and kernel of its registry."""
    if metafunc.function is test_a_registered_kernel_agrees_with_the_specification:
        cases = [
            pytest.param(backend, kernel, id=f"{test_id}-{kernel.name}")
            for test_id, backend in ((test_id, load_backend(*where)) for test_id, *where in installed())
            for kernel in default_registry(backend).kernels
        ]
        metafunc.parametrize(("on", "kernel"), cases)


def questions(backend: Backend, kernel: Kernel) -> Iterator[KernelQuery]:
    for mode, dtype, dim, ratio in GRID:
        yield KernelQuery(
            op=kernel.op,
            backend=backend.name,
            k_codec=MODES[mode].k,
            v_codec=MODES[mode].v,
            dtype=dtype,
            head_dim=dim,
            gqa_ratio=ratio,
            windowed=MODES[mode].quantized,
            arch=backend.arch,
        )


def verify(backend: Backend, kernel: Kernel) -> int:
    """Run ``kernel`` on every question that it accepts; how many those were."""
    if kernel.op not in CHECKS:
        pytest.fail(f"{kernel.name}: operation {kernel.op} has no parity check")
    accepted = [query for query in questions(backend, kernel) if not kernel.reasons_against(query)]
    if not accepted:
        pytest.fail(f"{kernel.name}: accepts none of the {len(GRID)} questions, so nothing of it is tested")
    run = kernel.load()
    for query in accepted:
        CHECKS[kernel.op](backend, run, query)
    return len(accepted)


def check_encode(backend: Backend, run: Callable[..., Any], query: KernelQuery) -> None:
    ops, dim = backend.ops, query.head_dim
    rows = gaussian(1, 2, 70, dim, dtype=query.dtype)
    rows[0, 1, 3] = 0
    for part, name in (("k", query.k_codec), ("v", query.v_codec)):
        codec = CODECS[name]
        rotation = Rotation.create(ops, 2, part, dim) if codec.codebook else None
        planes = to_numpy(ops, run(ops, codec, ops.asarray(rows), rotation))
        if name == "raw":
            assert np.array_equal(planes["rows"], rows)
        else:
            assert_planes_follow_spec(name, planes, rows, layer=2, part=part)


def check_attend(backend: Backend, run: Callable[..., Any], query: KernelQuery) -> None:
    ops, dim, heads = backend.ops, query.head_dim, (2 * query.gqa_ratio, 2)
    mode = next(m.name for m in MODES.values() if (m.k, m.v) == (query.k_codec, query.v_codec))
    k, v = (gaussian(1, 2, 110, dim, seed=seed, dtype=query.dtype) for seed in (0, 1))
    layer = filled(backend, mode, k, v, heads=heads, dtype=query.dtype, window=SMALL).layers[0]
    for rows in (1, 5):
        q = cast(gaussian(1, heads[0], rows, dim, seed=2), query.dtype)
        out = ops.to_numpy(run(ops, ops.asarray(q), layer.view(), dim**-0.5, None))
        assert out.dtype == q.dtype
        assert relative_error(out, exact_attention(backend, layer, q, dim**-0.5)) <= LIMITS[query.dtype]


CHECKS: dict[str, Callable[[Backend, Callable[..., Any], KernelQuery], None]] = {
    "encode": check_encode,
    "attend": check_attend,
}


def test_a_registered_kernel_agrees_with_the_specification(on: Backend, kernel: Kernel) -> None:
    assert verify(on, kernel) > 0


def test_the_grid_holds_every_pair_of_values() -> None:
    axes = (GRID_MODES, DTYPES, HEAD_DIMS, RATIOS)
    for a, b in combinations(range(4), 2):
        assert {(point[a], point[b]) for point in GRID} == set(product(axes[a], axes[b]))


# The generator itself: what must not pass, does not


def test_a_kernel_of_an_unknown_operation_fails(reference: Backend) -> None:
    with pytest.raises(pytest.fail.Exception, match="operation fold has no parity check"):
        verify(reference, replace(GRAPH_KERNELS[0], name="fold-fused", op="fold"))


def test_a_kernel_that_no_question_reaches_fails(reference: Backend) -> None:
    picky = replace(GRAPH_KERNELS[1], extra=lambda query: ["never"])
    with pytest.raises(pytest.fail.Exception, match="accepts none of the"):
        verify(reference, picky)


@pytest.mark.parametrize("position", range(2), ids=[kernel.op for kernel in GRAPH_KERNELS])
def test_a_kernel_that_is_wrong_fails(reference: Backend, position: int) -> None:
    kernel = GRAPH_KERNELS[position]
    right = kernel.load()

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        if not isinstance(result, dict):
            return result * np.asarray(1.01, result.dtype)
        return {name: plane[:, :, ::-1] for name, plane in result.items()}

    with pytest.raises(AssertionError):
        verify(reference, replace(kernel, load=lambda: wrong))
