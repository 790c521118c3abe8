"""What the registry says of the CUDA kernels: which caches they serve, and why not others. No torch is needed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kvcore.attention import GRAPH_KERNELS, decide, make_cache
from kvcore.backends import Backend
from kvcore.backends.cuda.capabilities import KERNELS
from kvcore.cache import CacheSpec
from kvcore.errors import UnsupportedError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES
from kvcore.registry import Kernel, KernelQuery, Registry

NAMES = ("fold-pages", "attend-pages")
QUERY = KernelQuery(
    *("attend", "cuda", "turbo4", "turbo4", "float16"),
    head_dim=128,
    gqa_ratio=4,
    windowed=True,
    sink_tokens=4,
    arch="sm_90",
)


def without_packages(kernel: Kernel) -> Kernel:
    """Constraints alone: Triton need not be installed, and nothing is imported."""
    return replace(kernel, requires=(), load=lambda: lambda *_, **__: None)


REGISTRY = Registry((*map(without_packages, KERNELS), *GRAPH_KERNELS))


def reasons(**fields: Any) -> list[str]:
    """Why the attention kernel does not serve a query that differs in ``fields``; the other kernel agrees."""
    query = replace(QUERY, **fields)
    fold, attend = (without_packages(kernel).reasons_against(query) for kernel in KERNELS)
    assert fold == attend
    return attend


def on_gpu(backend: Backend, arch: str = "sm_90") -> Backend:
    return replace(backend, name="cuda", arch=arch)


def spec(mode: str, **fields: Any) -> CacheSpec:
    return replace(CacheSpec(MODES[mode], 2, 8, 2, 128, "bfloat16"), **fields)


def test_the_declarations_import_neither_torch_nor_triton() -> None:
    code = "import sys, kvcore.backends.cuda.capabilities; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16"},
        {"head_dim": 16},
        {"head_dim": 80},
        {"head_dim": 256},
        {"gqa_ratio": 1},
        {"gqa_ratio": 16},
        {"sink_tokens": 0},
        {"sink_tokens": 16},
        {"v_head_dim": 128},
        {"mask": "sliding"},
        {"query_class": "prefill"},
        {"arch": "sm_80"},
        {"arch": "sm_120"},
        {"v_codec": "turbo3", "head_dim": 192},
    ],
    ids=str,
)
def test_what_the_kernels_serve(fields: dict[str, Any]) -> None:
    assert reasons(**fields) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "float32"}, "dtype float32: needs float16 or bfloat16"),
        ({"k_codec": "turbo3"}, "k_codec turbo3: needs raw, int8 or turbo4"),
        ({"head_dim": 72}, "head_dim 72: needs a multiple of 16 up to 256"),
        ({"head_dim": 272}, "head_dim 272: needs a multiple of 16 up to 256"),
        ({"head_dim": 80, "v_codec": "turbo3"}, "head_dim 80: needs a multiple of 64 up to 256"),
        ({"v_head_dim": 64}, "v_head_dim 64: needs that of K, 128"),
        ({"gqa_ratio": 17}, "gqa_ratio 17: needs 1 to 16"),
        ({"page_size": 32}, "page_size 32: needs 128"),
        ({"sink_tokens": 17}, "sink_tokens 17: needs 0 to 16"),
        ({"boundary_layers": 1}, "boundary_layers 1: needs 0"),
        ({"arch": "cpu"}, "arch cpu: needs an NVIDIA GPU of sm_80 or newer"),
        ({"arch": "sm_75"}, "arch sm_75: needs an NVIDIA GPU of sm_80 or newer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_each_misfit_has_its_reason(fields: dict[str, Any], words: str) -> None:
    assert reasons(**fields) == [words]


def test_all_misfits_are_named_together() -> None:
    assert len(reasons(dtype="float32", head_dim=72, page_size=32, sink_tokens=20, arch="cpu")) == 5


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_gets_pages_in_every_mode_and_graph_where_that_is_asked_for(reference: Backend, mode: str) -> None:
    for policy in ("auto", "fused"):
        decisions = decide(on_gpu(reference), REGISTRY, spec(mode), policy)
        assert [(d.kernel, d.kind, d.storage) for d in decisions] == [(name, "fused", "paged") for name in NAMES]
        assert decisions[0].to_dict()["storage"] == "paged"
    decisions = decide(on_gpu(reference), REGISTRY, spec(mode), "graph")
    assert {d.storage for d in decisions} == {"contiguous"}


@pytest.mark.parametrize("mode", MODES)
def test_torch_on_the_cpu_is_served_by_graph_kernels(reference: Backend, mode: str) -> None:
    decisions = decide(on_gpu(reference, "cpu"), REGISTRY, spec(mode))
    assert [d.kind for d in decisions] == ["graph", "graph"]
    assert [r.reasons for d in decisions for r in d.rejected] == [
        ("arch cpu: needs an NVIDIA GPU of sm_80 or newer",)
    ] * 2
    with pytest.raises(UnsupportedError, match=r"fold-pages: arch cpu: needs an NVIDIA GPU.*use --kernels auto"):
        decide(on_gpu(reference, "cpu"), REGISTRY, spec(mode), "fused")


def test_the_window_matters_only_where_rows_fold(reference: Backend) -> None:
    odd = WindowPolicy(sink_tokens=20, recent_tokens=64, page_size=64, boundary_layers=1)
    assert {d.storage for d in decide(on_gpu(reference), REGISTRY, spec("fp16", window=odd))} == {"paged"}
    decisions = decide(on_gpu(reference), REGISTRY, spec("turbo4", window=odd))
    assert {d.storage for d in decisions} == {"contiguous"}
    assert [len(d.rejected[0].reasons) for d in decisions] == [3, 3]


def test_paged_kernels_make_paged_storage(reference: Backend) -> None:
    """With what the registry chose."""
    made: list[tuple[Any, ...]] = []

    def storage(shape: Any, **kernels: Any) -> str:
        made.append((shape.name, shape.capacity, *sorted(kernels)))
        return "storage"

    backend = replace(on_gpu(reference), paged_storage=storage)
    cache = make_cache(backend, spec("turbo4", capacity=1000), registry=REGISTRY)
    assert cache.storage == "storage"
    assert made == [("turbo4", 1000, "attend", "make_fold")]


def test_kernels_of_two_kinds_of_storage_are_refused(reference: Backend) -> None:
    half = Registry((without_packages(KERNELS[1]), *GRAPH_KERNELS))
    with pytest.raises(UnsupportedError) as caught:
        make_cache(on_gpu(reference), spec("turbo4"), registry=half)
    assert str(caught.value) == (
        "one cache cannot serve both kernels: encode-graph works on contiguous storage, attend-pages works on "
        "paged storage; use --kernels graph"
    )


def test_a_backend_without_pages_says_so(reference: Backend) -> None:
    with pytest.raises(UnsupportedError, match="no paged storage: use --kernels graph"):
        make_cache(on_gpu(reference), spec("turbo4"), registry=REGISTRY)
