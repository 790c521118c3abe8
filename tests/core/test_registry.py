"""Decisions: which kernel, why not another, and what a user is told. The fused kernels here are fakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import SMALL, attend, exact_attention, filled, gaussian, relative_error

from kvcore.attention import GRAPH_KERNELS, attend_graph, decide, default_registry, make_cache
from kvcore.backends import Backend
from kvcore.cache import CacheSpec
from kvcore.errors import BackendError, InputError, UnsupportedError
from kvcore.modes import MODES
from kvcore.registry import POLICIES, Kernel, KernelQuery, Registry, needs

QUERY = KernelQuery("attend", "cuda", "int8", "int8", "float16", head_dim=128, gqa_ratio=4, arch="sm_90")


def never() -> Callable[..., Any]:
    raise AssertionError("a kernel that was not taken has been loaded")


def fused(*constraints: Any, name: str = "attend-fused", **settings: Any) -> Kernel:
    return Kernel(name, "attend", "cuda", "fused", settings.pop("load", never), constraints, **settings)


def taken() -> Callable[..., Any]:
    return attend_graph


def registry(*kernels: Kernel) -> Registry:
    """Graph first in the list: fused kernels are preferred wherever they stand."""
    return Registry((*GRAPH_KERNELS, *kernels))


GOOD = fused(needs("head_dim", 64, 128), needs("dtype", "float16", "bfloat16"), load=taken)
PICKY = fused(needs("head_dim", 64, 96, 128, 256), needs("dtype", "float16"), name="attend-picky")


def test_a_fused_kernel_that_serves_the_query_is_taken() -> None:
    decision = registry(GOOD).resolve(QUERY)
    assert (decision.kernel, decision.kind, decision.rejected) == ("attend-fused", "fused", ())
    assert decision.run is attend_graph
    assert decision.explain() == "attend: attend-fused (fused)"


def test_a_rejected_kernel_gives_all_its_reasons_with_both_numbers() -> None:
    decision = registry(PICKY).resolve(replace(QUERY, head_dim=80, dtype="float32"))
    assert (decision.kernel, decision.kind) == ("attend-graph", "graph")
    (rejection,) = decision.rejected
    assert rejection.kernel == "attend-picky"
    assert rejection.reasons == ("head_dim 80: needs 64, 96, 128 or 256", "dtype float32: needs float16")
    assert decision.explain() == (
        "attend: attend-graph (graph) because attend-picky: head_dim 80: needs 64, 96, 128 or 256, "
        "dtype float32: needs float16"
    )


def test_every_rejected_candidate_is_listed_in_order_of_preference() -> None:
    other = fused(needs("arch", "sm_100"), name="attend-blackwell")
    decision = registry(other, PICKY, GOOD).resolve(replace(QUERY, dtype="bfloat16"))
    assert [(r.kernel, r.reasons) for r in decision.rejected] == [
        ("attend-blackwell", ("arch sm_90: needs sm_100",)),
        ("attend-picky", ("dtype bfloat16: needs float16",)),
    ]
    assert decision.kernel == "attend-fused"


def test_kernels_of_other_backends_and_operations_are_no_candidates() -> None:
    metal = replace(GOOD, name="attend-metal", backend="metal")
    encode = replace(GOOD, name="encode-fused", op="encode")
    decision = registry(metal, encode).resolve(QUERY)
    assert (decision.kernel, decision.rejected) == ("attend-graph", ())


def test_extra_checks_add_their_reasons() -> None:
    def even_groups(query: KernelQuery) -> list[str]:
        return [] if query.gqa_ratio % 2 == 0 else [f"gqa_ratio {query.gqa_ratio}: needs an even one"]

    kernel = replace(PICKY, extra=even_groups)
    decision = registry(kernel).resolve(replace(QUERY, head_dim=80, gqa_ratio=3))
    assert decision.rejected[0].reasons == (
        "head_dim 80: needs 64, 96, 128 or 256",
        "gqa_ratio 3: needs an even one",
    )


def test_B26_head_dim_512_runs_on_graph_with_a_reason_and_fused_raises_with_the_same() -> None:
    kernels = registry(GOOD, PICKY)
    wide = replace(QUERY, head_dim=512, gqa_ratio=8)
    decision = kernels.resolve(wide)
    assert decision.kernel == "attend-graph"
    reasons = [f"{r.kernel}: {reason}" for r in decision.rejected for reason in r.reasons]
    assert reasons == [
        "attend-fused: head_dim 512: needs 64 or 128",
        "attend-picky: head_dim 512: needs 64, 96, 128 or 256",
    ]
    with pytest.raises(UnsupportedError) as caught:
        kernels.resolve(wide, "fused")
    assert list(caught.value.reasons[:2]) == reasons
    assert all(reason in str(caught.value) for reason in reasons)


# Policies


def test_policy_graph_passes_over_a_fused_kernel_and_says_so() -> None:
    decision = registry(fused()).resolve(QUERY, "graph")
    assert (decision.kernel, decision.policy) == ("attend-graph", "graph")
    assert decision.rejected[0].reasons == ("--kernels graph was asked for",)


def test_policy_fused_takes_a_fused_kernel() -> None:
    assert registry(GOOD).resolve(QUERY, "fused").kernel == "attend-fused"


def test_policy_fused_raises_with_every_reason_and_what_to_do() -> None:
    with pytest.raises(UnsupportedError) as caught:
        registry(PICKY).resolve(replace(QUERY, head_dim=80, dtype="float32"), "fused")
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert message.startswith("no fused kernel for attend k=int8 v=int8 float32 head_dim=80 on cuda: ")
    assert caught.value.reasons == (
        "attend-picky: head_dim 80: needs 64, 96, 128 or 256",
        "attend-picky: dtype float32: needs float16",
        "attend-graph: it is a graph fallback, and --kernels fused was asked for",
    )
    assert all(reason in message for reason in caught.value.reasons)
    assert message.endswith("use --kernels auto")


def test_policy_fused_says_when_no_fused_kernel_exists_at_all() -> None:
    with pytest.raises(UnsupportedError, match="no fused attend kernel exists for backend cuda yet"):
        registry().resolve(QUERY, "fused")


def test_no_kernel_at_all_is_an_error_with_its_reasons() -> None:
    with pytest.raises(UnsupportedError, match=r"attend-picky: head_dim 80.*use another mode or backend"):
        Registry([PICKY]).resolve(replace(QUERY, head_dim=80))


@pytest.mark.parametrize("policy", ["Auto", "fast", ""])
def test_an_unknown_policy_lists_the_three(policy: str) -> None:
    with pytest.raises(InputError, match=f"unknown kernel policy '{policy}': choose one of auto, fused, graph"):
        registry().resolve(QUERY, policy)


# Packages


def test_a_missing_package_is_a_reason() -> None:
    decision = registry(fused(requires=("kvcore_no_such_package",))).resolve(QUERY)
    assert decision.kernel == "attend-graph"
    assert decision.rejected[0].reasons == (
        "package kvcore_no_such_package is not installed (pip install kvcore_no_such_package)",
    )


def test_a_missing_package_is_a_reason_beside_the_others() -> None:
    kernel = replace(PICKY, requires=("kvcore_no_such_package",))
    reasons = registry(kernel).resolve(replace(QUERY, head_dim=80)).rejected[0].reasons
    assert [reason.split()[0] for reason in reasons] == ["head_dim", "package"]


def test_a_broken_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvcore_broken_package.py").write_text("raise OSError('libfoo.so.3: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for policy in ("auto", "fused"):
        with pytest.raises(BackendError) as caught:
            registry(fused(requires=("kvcore_broken_package",))).resolve(QUERY, policy)
        assert str(caught.value) == (
            "package kvcore_broken_package is installed but fails to import "
            "(OSError: libfoo.so.3: no such file); "
            "reinstall it with: pip install --force-reinstall kvcore_broken_package, or use --kernels graph"
        )
        assert caught.value.exit_code == 2


def test_a_broken_package_is_not_imported_where_it_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvcore_broken_too.py").write_text("raise OSError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = registry(replace(PICKY, requires=("kvcore_broken_too",)))
    assert broken.resolve(replace(QUERY, head_dim=80)).kernel == "attend-graph"
    assert broken.resolve(QUERY, "graph").rejected[0].reasons == ("--kernels graph was asked for",)


def test_a_package_that_imports_is_no_reason() -> None:
    assert fused(requires=("json",)).reasons_against(QUERY) == []


# Values


def test_a_decision_is_plain_values_for_json() -> None:
    decision = registry(PICKY).resolve(replace(QUERY, head_dim=80))
    shown = json.loads(json.dumps(decision.to_dict()))
    assert shown["query"]["head_dim"] == 80
    assert {name: shown[name] for name in ("op", "kernel", "kind", "policy", "rejected")} == {
        "op": "attend",
        "kernel": "attend-graph",
        "kind": "graph",
        "policy": "auto",
        "rejected": [{"kernel": "attend-picky", "reasons": ["head_dim 80: needs 64, 96, 128 or 256"]}],
    }


def test_equal_questions_get_equal_answers() -> None:
    assert registry(GOOD).resolve(QUERY) == registry(GOOD).resolve(QUERY)


@pytest.mark.parametrize(
    ("allowed", "words"),
    [((64,), "head_dim 80: needs 64"), ((64, 96), "head_dim 80: needs 64 or 96"), ((80,), None)],
    ids=["one", "two", "met"],
)
def test_a_constraint_in_words(allowed: tuple[int, ...], words: str | None) -> None:
    assert needs("head_dim", *allowed).reason_against(replace(QUERY, head_dim=80)) == words


# A cache and its kernels


def shape(mode: str, backend: Backend, *, head_dim: int = 64) -> CacheSpec:
    return CacheSpec(MODES[mode], 2, 4, 2, head_dim, "float32", SMALL)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fused"])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_a_decision_for_both_operations(backend: Backend, mode: str, policy: str) -> None:
    decisions = decide(backend, default_registry(backend), shape(mode, backend), policy)
    assert [decision.query.op for decision in decisions] == ["encode", "attend"]
    for decision in decisions:
        query = decision.query
        assert (query.backend, query.arch, query.dtype) == (backend.name, backend.arch, "float32")
        assert (query.k_codec, query.v_codec) == (MODES[mode].k, MODES[mode].v)
        assert (query.head_dim, query.gqa_ratio, query.windowed) == (64, 2, MODES[mode].quantized)


def test_B72_without_fused_kernels_auto_runs_and_fused_refuses(reference: Backend) -> None:
    with pytest.raises(UnsupportedError, match=r"no fused kernel for encode.*use --kernels auto"):
        make_cache(reference, shape("turbo4", reference), kernels="fused")
    cache = make_cache(reference, shape("turbo4", reference))
    assert [decision.kind for decision in cache.decisions] == ["graph", "graph"]


def test_a_cache_resolves_its_kernels_once_and_runs_what_was_chosen(backend: Backend) -> None:
    loads, calls = [], []

    def load() -> Callable[..., Any]:
        loads.append(1)

        def run(*arguments: Any) -> Any:
            calls.append(1)
            return attend_graph(*arguments)

        return run

    kernel = Kernel("attend-fake", "attend", backend.name, "fused", load, (needs("head_dim", 64),))
    kernels = Registry((kernel, *GRAPH_KERNELS))
    cache = make_cache(backend, shape("int8", backend), registry=kernels)
    assert [(d.kernel, d.kind) for d in cache.decisions] == [
        ("encode-graph", "graph"),
        ("attend-fake", "fused"),
    ]
    row, q = (backend.ops.asarray(gaussian(1, heads, 1, 64)) for heads in (2, 4))
    for _ in range(10):
        for layer in cache.layers:
            layer.append(row, row)
            layer.attend(q, 0.125)
            layer.commit()
    assert (len(loads), len(calls)) == (1, 20)
    other = make_cache(backend, shape("int8", backend, head_dim=80), registry=kernels)
    assert other.decisions[1].rejected[0].reasons == ("head_dim 80: needs 64",)


def test_the_default_registry_puts_a_backend_s_own_kernels_first(reference: Backend) -> None:
    own = Kernel("attend-own", "attend", "reference", "fused", taken)
    backend = replace(reference, kernels=(own,))
    cache = filled(backend, "int8", gaussian(1, 2, 100, 64), gaussian(1, 2, 100, 64), window=SMALL)
    assert cache.decisions[1].kernel == "attend-own"
    q = gaussian(1, 4, 1, 64)
    layer = cache.layers[0]
    assert relative_error(attend(backend, layer, q, 0.125), exact_attention(backend, layer, q, 0.125)) <= 1e-5
