"""kvcore's Metal kernels behind mlx-lm: their launches run on the CPU, as C++."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import numpy as np
from metal_shim import COMPILER, NO_COMPILER, Shim
from mlx_lm.generate import BatchGenerator
from mlx_models import SMALL, greedy, ids, logits, tiny

from kvcore.backends import load_backend
from kvcore.backends.metal.attention import attend
from kvcore.backends.metal.capabilities import KERNELS
from kvcore.backends.metal.encode import encode
from kvcore.backends.metal.launch import Launch
from kvcore.integrations.mlx_lm import cache as plugin
from kvcore.integrations.mlx_lm import make_prompt_cache, patched
from kvcore.ops import Ops

pytestmark = [
    pytest.mark.xdist_group("metal"),
    pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER),
]


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Shim:
    """MLX as if on an Apple GPU; its arrays visit the shim as NumPy's."""
    shim, backend = Shim("random"), load_backend("metal")

    def run(ops: Ops, launch: Launch) -> list[Any]:
        inputs = tuple(ops.to_numpy(x) for x in launch.inputs)
        return [ops.asarray(x) for x in shim.run(ops, replace(launch, inputs=inputs))]

    kernels = {"encode": partial(encode, run=run), "attend": partial(attend, run=run)}
    fused = tuple(replace(kernel, load=lambda op=kernel.op: kernels[op]) for kernel in KERNELS)
    apple = replace(backend, kernels=fused, arch="applegpu_g16s")
    monkeypatch.setattr(plugin, "_backend", lambda: apple)
    return shim


@pytest.mark.parametrize("mode", ["fp16", "turbo4", "int8-turbo4"])
def test_steps_are_those_of_the_graph_and_run_fused(mode: str, shim: Shim) -> None:
    model, prompt = tiny(), ids(100)
    fused, graph = (make_prompt_cache(model, mode, window=SMALL, kernels=kernels) for kernels in ("fused", "graph"))
    with patched(model):
        for part in (prompt[:90], prompt[90:91], prompt[91:]):
            got, want = logits(model, part, fused), logits(model, part, graph)
            assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)
    assert shim.launches["combine"] == 2 * 2  # two layers in each step; the prompt is longer than the kernel takes
    assert ("encode" in shim.launches) == (mode != "fp16")


def test_a_batch_of_unequal_prompts_runs_fused_sequence_by_sequence(shim: Shim) -> None:
    model, prompts = tiny(), [ids(70, 1), ids(40, 2)]
    with patched(model):
        want = [
            greedy(model, prompt, 3, prompt_cache=make_prompt_cache(model, "fp16", kernels="graph"))
            for prompt in prompts
        ]
    with patched(model, "fp16"):
        generator = BatchGenerator(model, max_tokens=3)
        owners = generator.insert(prompts, [3] * 2)
        found: dict[int, list[int]] = {owner: [] for owner in owners}
        while any(len(tokens) < 3 for tokens in found.values()):
            for response in generator.next()[1]:
                found[response.uid].append(response.token)
    assert [found[owner] for owner in owners] == want
    assert shim.launches["combine"] > 0


def test_no_dense_rows_are_made_in_a_step(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's attention, which unpacks pages, does not run."""
    model = tiny()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the graph path ran")

    with patched(model):
        cache = make_prompt_cache(model, "turbo4", window=SMALL)
        logits(model, ids(100), cache)
        for module in ("kvcore.attention.attend_graph", "kvcore.attention._attend_pages"):
            monkeypatch.setattr(module, refuse)
        logits(model, [5], cache)
    assert cache[0].rows.rows_folded == 64
