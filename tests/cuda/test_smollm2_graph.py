"""SmolLM2 on an NVIDIA GPU, with weights in tiles and a step as one CUDA graph, against NumPy in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from triton_device import DEVICE

import kvcore
from kvcore.backends.cuda.linear import WeightTiles
from kvcore.engine import Engine, EngineConfig, Output, Request
from kvcore.errors import ModelError
from kvcore.weights import resolve_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.smollm2,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU"),
    pytest.mark.xdist_group("smollm2-graph"),
]

NEAR = 2e-2  # two paths may part where the reference's best token is less far ahead
TOKENS = 64
# Greedy answers whose best token is never between NEAR and 0.06 ahead: float16 moves such a distance by up to 0.04.
PROMPTS = {
    "count": ("1, 2, 3, 4, 5, 6, 7, 8,", True),
    "table": ("2 x 1 = 2\n2 x 2 = 4\n2 x 3 = 6\n", True),
    "poem": ("Write a poem about the sea.", False),
}


@pytest.fixture(scope="module")
def reference() -> kvcore.Model:
    try:
        path = resolve_model(None).path
    except ModelError as error:
        pytest.skip(str(error))
    return kvcore.load(path, backend="reference", dtype="float32")


@pytest.fixture(scope="module")
def gpu(reference: kvcore.Model) -> kvcore.Model:
    model = kvcore.load(None, backend="cuda", dtype="float16", kernels="fused")
    assert isinstance(model.params.layers[0].gate_up.weight, WeightTiles)
    return model


def ids_of(model: kvcore.Model, name: str) -> list[int]:
    text, raw = PROMPTS[name]
    return model.encode(text, raw=raw)


def greedy(model: kvcore.Model, name: str) -> list[int]:
    generation = model.generate(
        ids_of(model, name), kvcore.SamplingParams(max_tokens=TOKENS), cache=model.new_cache("fp16")
    )
    "".join(generation)
    assert len(generation.token_ids) == TOKENS
    return generation.token_ids


def with_graph(model: kvcore.Model, graph: bool, made: list[Any]) -> kvcore.Model:
    """The model with steps in a graph or launched one by one; its decoders go to ``made``."""
    make: Any = model.backend.make_decoder

    def decoder(*args: Any, **how: Any) -> Any:
        made.append(make(*args, **(how | {"graph": graph})))
        return made[-1]

    return replace(model, backend=replace(model.backend, make_decoder=decoder))


@pytest.fixture(scope="module")
def answers(gpu: kvcore.Model) -> dict[str, list[int]]:
    made: list[Any] = []
    found = {name: greedy(with_graph(gpu, True, made), name) for name in PROMPTS}
    assert len(made) == len(PROMPTS)
    assert all(each.no_graph is None and each.capture_seconds > 0 for each in made)
    return found


def same_up_to_a_near_tie(reference: kvcore.Model, prompt: Sequence[int], got: list[int], want: list[int]) -> int:
    """How many tokens are the same. After them the reference's two best are those that differ, within `NEAR`."""
    assert len(got) == len(want)
    count = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), len(want))
    if count < len(want):
        ids = np.array([[*prompt, *want[:count]]])
        scores = reference.forward(ids, reference.new_cache("fp16"))[0, -1]
        first, second = (int(token) for token in np.argsort(scores)[:-3:-1])
        assert {first, second} == {got[count], want[count]}, count
        assert scores[first] - scores[second] < NEAR, count
    return count


@pytest.mark.parametrize("name", PROMPTS)
def test_a_greedy_answer_is_the_reference_s(name: str, reference: kvcore.Model, answers: dict[str, list[int]]) -> None:
    want = greedy(reference, name)
    assert same_up_to_a_near_tie(reference, ids_of(reference, name), answers[name], want) >= 16


@pytest.mark.parametrize("name", PROMPTS)
def test_steps_without_a_graph_give_the_same_tokens(
    name: str, gpu: kvcore.Model, answers: dict[str, list[int]]
) -> None:
    made: list[Any] = []
    assert greedy(with_graph(gpu, False, made), name) == answers[name]
    assert [each.no_graph for each in made] == ["switched off"]


def test_requests_in_a_batch_give_the_answers_of_each_alone(
    reference: kvcore.Model, gpu: kvcore.Model, answers: dict[str, list[int]]
) -> None:
    """Four at a time, one of them twice."""
    engine = Engine(gpu, EngineConfig(kv_cache_budget=256 << 20, max_batch=4, prefix_reuse=False))
    heard: dict[str, list[Output]] = {}
    for i, name in enumerate((*PROMPTS, "count")):
        params = kvcore.SamplingParams(max_tokens=TOKENS)
        heard[f"{i} {name}"] = []
        request = Request(str(i), tuple(ids_of(gpu, name)), params, logprobs=0)
        engine.submit(request, heard[f"{i} {name}"].append)
    together = 0
    for _ in range(100 * TOKENS):
        if all(each and each[-1].finish_reason for each in heard.values()):
            break
        engine.step()
        together = max(together, len(engine._running))
    assert together == 4
    assert engine.stats().fallbacks == {}
    for key, outputs in heard.items():
        assert outputs[-1].finish_reason == "length", outputs[-1].error
        name = key.partition(" ")[2]
        got = [token.token for output in outputs for token in output.tokens]
        assert same_up_to_a_near_tie(reference, ids_of(gpu, name), got, answers[name]) >= 16
