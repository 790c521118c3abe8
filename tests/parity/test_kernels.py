"""Every registered kernel against the specification: generated from the registry, so none can be without.

A kernel is run on each question of a grid that its own constraints accept. A new operation needs a check here, one for
each kind of storage. Without a GPU the CUDA kernels run in Triton's interpreter: as on an sm_80, but float16 only, and
on every fifth question, for it is slow. Without Metal its kernels run as C++, on every 17th (tests/metal has more).
With a GPU, kernels are compiled for each question: a test for each mode and head size shares that among workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from metal_shim import COMPILER, NO_COMPILER, Shim
from oracle import (
    BACKENDS,
    DTYPES,
    SMALL,
    assert_centers_follow_spec,
    assert_planes_follow_spec,
    cast,
    coded_rows,
    exact_attention,
    filled,
    gaussian,
    relative_error,
    to_numpy,
)
from triton_device import DEVICE

from kvcore.attention import GRAPH_KERNELS, default_registry
from kvcore.backends import Backend, load_backend
from kvcore.backends.cuda.capabilities import KERNELS
from kvcore.backends.metal.attention import attend
from kvcore.backends.metal.capabilities import KERNELS as METAL_KERNELS
from kvcore.backends.metal.encode import encode
from kvcore.cache import Cache, CacheSpec
from kvcore.layout import CODECS, Rotation, WindowPolicy
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
Part = tuple[()] | tuple[str, int]  # a mode and a head size, or all of them
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 4e-3}


def installed() -> Iterator[tuple[str, str, str | None]]:
    for test_id, (name, device, package) in BACKENDS.items():
        if importlib.util.find_spec(package) is not None:
            yield test_id, name, device


def skip_without(packages: Sequence[str]) -> list[pytest.MarkDecorator]:
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return [pytest.mark.skip(reason=f"the package {package} is not installed") for package in absent]


def marks_of(backend: Backend, kernel: Kernel) -> list[pytest.MarkDecorator]:
    marks = skip_without(kernel.requires)
    if on_shim(backend, kernel):
        marks.append(pytest.mark.xdist_group("metal"))
        if COMPILER is None:
            marks.append(pytest.mark.skip(reason=NO_COMPILER))
    return marks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per backend that is installed here and kernel of its registry."""
    if metafunc.function is test_a_registered_kernel_agrees_with_the_specification:
        cases = [
            pytest.param(backend, kernel, part, id="-".join(map(str, (test_id, kernel.name, *part))), marks=marks)
            for test_id, backend in ((test_id, load_backend(*where)) for test_id, *where in installed())
            for kernel in default_registry(backend).kernels
            for marks in [marks_of(backend, kernel)]
            for part in parts(backend, kernel)
        ]
        metafunc.parametrize(("on", "kernel", "part"), cases)


def parts(backend: Backend, kernel: Kernel) -> list[Part]:
    """What has a test each."""
    if kernel.storage != "paged" or DEVICE == "cpu":
        return [()]
    accepted = (q for q in questions(placed(backend, kernel), kernel) if not kernel.reasons_against(q))
    return list(dict.fromkeys((mode_of(query), query.head_dim) for query in accepted))


def placed(backend: Backend, kernel: Kernel) -> Backend:
    """Kernels for pages run where Triton does: compiled ones take no CPU tensors."""
    if kernel.storage == "paged" and backend.device == "cpu" and DEVICE != "cpu":
        return load_backend(backend.name, DEVICE)
    return backend


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
            arch=arch_for(backend, kernel),
        )


def arch_for(backend: Backend, kernel: Kernel) -> str:
    if interpreted(backend, kernel):
        return "sm_80"
    return "applegpu" if on_shim(backend, kernel) else backend.arch


def interpreted(backend: Backend, kernel: Kernel) -> bool:
    return kernel.storage == "paged" and backend.device == "cpu"


def on_shim(backend: Backend, kernel: Kernel) -> bool:
    return kernel.name in SHIMMED and backend.device != "metal"


def verify(backend: Backend, kernel: Kernel, part: Part = ()) -> int:
    """Run ``kernel`` on every question of the part that it accepts; how many those were."""
    backend = placed(backend, kernel)
    check = CHECKS.get((kernel.op, kernel.storage))
    if check is None:
        pytest.fail(f"{kernel.name}: operation {kernel.op} has no parity check")
    accepted = [query for query in questions(backend, kernel) if not kernel.reasons_against(query)]
    if not accepted:
        pytest.fail(f"{kernel.name}: accepts none of the {len(GRID)} questions, so nothing of it is tested")
    if part:
        accepted = [query for query in accepted if (mode_of(query), query.head_dim) == part]
    if interpreted(backend, kernel):
        accepted = [query for query in accepted if query.dtype == "float16"][::5]
    run = kernel.load()
    if on_shim(backend, kernel):
        accepted, run, backend = accepted[::17], SHIMMED[kernel.name](run), load_backend("reference")
    for query in accepted:
        check(backend, run, query)
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
    mode = mode_of(query)
    k, v = (gaussian(1, 2, 110, dim, seed=seed, dtype=query.dtype) for seed in (0, 1))
    layer = filled(backend, mode, k, v, heads=heads, dtype=query.dtype, window=SMALL).layers[0]
    for rows in (1, 5):
        q = cast(gaussian(1, heads[0], rows, dim, seed=2), query.dtype)
        out = ops.to_numpy(run(ops, ops.asarray(q), layer.view(), dim**-0.5, None))
        assert out.dtype == q.dtype
        assert relative_error(out, exact_attention(backend, layer, q, dim**-0.5)) <= LIMITS[query.dtype]


def check_fold(backend: Backend, run: Callable[..., Any], query: KernelQuery) -> None:
    """One page of two heads, a row of zeros in it."""
    rows = {part: gaussian(1, 2, 130, query.head_dim, seed=seed, dtype=query.dtype) for seed, part in enumerate("kv")}
    rows["v"][0, 1, 3] = 0
    view = pages(backend, query, rows, make_fold=run, attend=lambda q, *_, **__: q).layers[0].view()
    assert view.folded == (128 if MODES[mode_of(query)].quantized else 0)
    for part, name, planes in (("k", query.k_codec, view.k_planes), ("v", query.v_codec, view.v_planes)):
        stored, folded = to_numpy(backend.ops, planes), rows[part][:, :, : view.folded]
        if part == "k" and view.layout.k.centred:
            assert_centers_follow_spec(backend.ops.to_numpy(view.k_centers), folded, 0, 128)
            folded = coded_rows(backend.ops, view, folded)
        if name != "raw":
            assert_planes_follow_spec(name, stored, folded, part=part)
        elif view.folded:
            assert np.array_equal(stored["rows"], folded)


def check_attend_pages(backend: Backend, run: Callable[..., Any], query: KernelQuery) -> None:
    """Sinks, a page, a tail: a step of one row, and one of many, which takes another way."""
    rows = {part: gaussian(1, 2, 130, query.head_dim, seed=seed, dtype=query.dtype) for seed, part in enumerate("kv")}
    layer = pages(backend, query, rows, attend=run).layers[0]
    for count in (1, 20):
        shapes = ((heads, seed) for seed, heads in enumerate((2 * query.gqa_ratio, 2, 2), 5))
        q, k, v = (gaussian(1, heads, count, query.head_dim, seed=seed, dtype=query.dtype) for heads, seed in shapes)
        out = backend.ops.to_numpy(layer.step(*map(backend.ops.asarray, (q, k, v)), query.head_dim**-0.5))
        assert out.dtype == q.dtype
        assert relative_error(out, exact_attention(backend, layer, q, query.head_dim**-0.5)) <= LIMITS[query.dtype]


def pages(backend: Backend, query: KernelQuery, rows: dict[str, np.ndarray], **kernels: Any) -> Cache:
    """One layer in pages that holds ``rows``, of which a page is folded in a quantized mode."""
    window = WindowPolicy(sink_tokens=4, recent_tokens=0)
    heads = 2 * query.gqa_ratio, 2
    spec = CacheSpec(MODES[mode_of(query)], 1, *heads, query.head_dim, query.dtype, window)
    cache = Cache(backend.ops, spec, backend.paged_storage(spec.shape(), **kernels))
    k, v = (backend.ops.asarray(rows[part]) for part in "kv")
    q = backend.ops.zeros((1, heads[0], int(k.shape[2]), query.head_dim), query.dtype)
    cache.layers[0].step(q, k, v, 1.0)
    cache.commit()
    return cache


def mode_of(query: KernelQuery) -> str:
    return next(m.name for m in MODES.values() if (m.k, m.v) == (query.k_codec, query.v_codec))


# How a Metal kernel runs off Metal: its launches go to the shim.
SHIMMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "encode-metal": lambda _: partial(encode, run=Shim("random").run),
    "attend-metal": lambda _: partial(attend, run=Shim("random").run),
}

CHECKS: dict[tuple[str, str], Callable[[Backend, Callable[..., Any], KernelQuery], None]] = {
    ("encode", "contiguous"): check_encode,
    ("attend", "contiguous"): check_attend,
    ("encode", "paged"): check_fold,
    ("attend", "paged"): check_attend_pages,
}


def test_a_registered_kernel_agrees_with_the_specification(on: Backend, kernel: Kernel, part: Part) -> None:
    assert verify(on, kernel, part) > 0


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


@pytest.mark.parametrize("name", ["fold-pages", "attend-pages"])
def test_a_kernel_for_pages_that_is_wrong_fails(name: str) -> None:
    pytest.importorskip("triton")
    _, backend_name, device = next(case for case in installed() if case[1] == "cuda")
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    right = kernel.load()

    def wrong(*arguments: Any, **settings: Any) -> Any:
        result = right(*arguments, **settings)
        if name == "attend-pages":
            return result * 1.01
        return replace(result, k=replace(result.k, spread=1.0), v=replace(result.v, spread=1.0))

    with pytest.raises(AssertionError):
        verify(load_backend(backend_name, device), replace(kernel, load=lambda: wrong), ("turbo4", 64))


@pytest.mark.xdist_group("metal")
@pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
@pytest.mark.parametrize("kernel", METAL_KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_for_metal_that_is_wrong_fails(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx")
    right = SHIMMED[kernel.name](kernel.load())

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        if not isinstance(result, dict):
            return result * np.asarray(1.01, result.dtype)
        return {name: plane[:, :, ::-1] for name, plane in result.items()}

    monkeypatch.setitem(SHIMMED, kernel.name, lambda _: wrong)
    backend = load_backend("metal")
    if not on_shim(backend, kernel):
        pytest.skip("this machine has Metal")
    with pytest.raises(AssertionError):
        verify(backend, kernel)
