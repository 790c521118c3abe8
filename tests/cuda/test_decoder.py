"""Decoding with weights in tiles and sampling on the device, against the host's steps: interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, live, no_attention, paged, storage_of

import kvcore
from kvcore.backends import load_backend
from kvcore.backends.cuda.device import make_decoder
from kvcore.backends.cuda.fused_ops import FusedOps
from kvcore.backends.cuda.linear import WeightTiles
from kvcore.cache import Cache
from kvcore.decoding import device_source, draw, token_source
from kvcore.errors import KvcoreError
from kvcore.layout import Cap
from kvcore.modes import MODES
from kvcore.sampling import Sampler, SamplingParams

IDS = np.random.default_rng(3).integers(5, 256, (2, 300))
FORMS: dict[str, Any] = {"dense": None, "affine": {"bits": 4, "group_size": 32}}


def load(folder: Any, monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> kvcore.Model:
    """On the CPU too, where the backend itself would not choose the kernels."""
    backend = load_backend("cuda", TORCH_DEVICE)
    backend = replace(backend, fused_ops=lambda: FusedOps(backend.ops.device), make_decoder=make_decoder)
    monkeypatch.setattr("kvcore.loading.load_backend", lambda *_: backend)
    return kvcore.load(folder, backend="cuda", dtype="float16", kernels="auto" if fused else "graph")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> kvcore.Model:
    """On a GPU with weights in tiles, which the interpreter takes long for."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, dtype="float16", heads=2, kv_heads=1)
    write_tiny_tokenizer(folder)
    return load(folder, patch, fused=TORCH_DEVICE is None)


def new_cache(model: kvcore.Model, mode: str, **settings: Any) -> Cache:
    return paged(model.backend, replace(SPEC, mode=MODES[mode], **settings))


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_tiles_is_the_model(form: str, tmp_path: Any, patch: pytest.MonkeyPatch) -> None:
    """A prompt that is multiplied by dense weights, one that goes through tiles, and biases everywhere."""
    write_tiny_llama(
        tmp_path, dtype="float16", heads=2, kv_heads=1, layers=1, intermediate=64, attention_bias=True, mlp_bias=True,
        quantize=FORMS[form],
    )  # fmt: skip
    write_tiny_tokenizer(tmp_path)
    plain, fused = (load(tmp_path, patch, fused=fused) for fused in (False, True))
    assert isinstance(fused.params.layers[0].gate_up.weight, WeightTiles)
    caches = [paged(each.backend, replace(SPEC, mode=MODES["fp16"], num_layers=1)) for each in (plain, fused)]
    for ids in (IDS[:1, :130], IDS[:1, 130:132]):
        want, got = (each.forward(ids, cache) for each, cache in zip((plain, fused), caches, strict=True))
        assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


def steps(model: kvcore.Model, cache: Cache, prompt: list[int], params: SamplingParams) -> list[int]:
    """Prompt, hand-over and decode through `generate`."""
    generation = model.generate(prompt, params, cache=cache)
    "".join(generation)
    assert generation.finish_reason == "length"
    return generation.token_ids


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[] if m == "turbo4" else pytest.mark.full) for m in MODES])
def test_tokens_over_a_fold_are_those_of_the_host(model: kvcore.Model, mode: str) -> None:
    params, host = SamplingParams(max_tokens=4), replace(model, backend=replace(model.backend, make_decoder=None))
    caches = [new_cache(model, mode) for _ in range(2)]
    prompt = IDS[0, :254].tolist()
    want, got = (steps(each, cache, prompt, params) for each, cache in zip((host, model), caches, strict=True))
    assert got == want
    assert live(caches[1]) == live(caches[0])
    assert caches[1].offset == 257
    assert caches[1].stats().rows_folded == (128 if MODES[mode].quantized else 0)


def test_the_same_seed_draws_the_host_s_tokens(model: kvcore.Model) -> None:
    host = replace(model, backend=replace(model.backend, make_decoder=None))
    params = SamplingParams(max_tokens=5, seed=7, temperature=2.0, top_k=100, top_p=0.9, repetition_penalty=1.2)
    prompt = IDS[0, :20].tolist()
    want, got = (steps(each, new_cache(each, "fp16"), prompt, params) for each in (host, model))
    assert got == want
    assert len(set(got)) > 2


def source(model: kvcore.Model, cache: Cache, params: SamplingParams, seen: Any, **how: Any) -> Any:
    samplers = [Sampler(params) for _ in range(cache.spec.batch)]
    made = token_source(model.backend, model.config, model.params, cache, samplers, seen, **how)
    assert made is not None
    return made


def test_a_batch_decodes_as_its_sequences_alone(model: kvcore.Model) -> None:
    params = SamplingParams(max_tokens=5)
    prompts = IDS[:, :40]
    cache = new_cache(model, "int8", batch=2)
    first = model.forward(prompts, cache)[:, -1].argmax(-1)
    got = np.array(list(source(model, cache, params, prompts).tokens(first.tolist(), 4)))
    for row in range(2):
        alone = steps(model, new_cache(model, "int8"), prompts[row].tolist(), params)
        assert [first[row], *got[:, row]] == alone


def test_a_source_that_is_closed_leaves_the_rows_of_what_was_read(model: kvcore.Model) -> None:
    cache = new_cache(model, "turbo4")
    first = int(model.forward(IDS[:1, :254], cache)[0, -1].argmax())
    with closing(source(model, cache, SamplingParams(), IDS[:1, :254]).tokens([first], 100)) as tokens:
        next(tokens)
    assert (cache.offset, cache.stats().rows_folded) == (255, 0)  # the step that nobody read would have folded
    free = storage_of(cache).raw.free_pages
    assert free + len(storage_of(cache).tables.entries(0)[1]) == storage_of(cache).raw.pages


def test_logits_that_are_not_finite_end_it(model: kvcore.Model) -> None:
    broken = replace(model, params=replace(model.params, norm=model.params.norm * float("nan")))
    cache = new_cache(model, "fp16")
    first = int(model.forward(IDS[:1, :10], cache)[0, -1].argmax())
    with pytest.raises(KvcoreError, match="logits are not finite"):
        next(source(broken, cache, SamplingParams(), IDS[:1, :10]).tokens([first], 3))


@pytest.mark.skipif(TORCH_DEVICE is not None, reason="needs an NVIDIA GPU")
def test_a_graph_is_captured_once_for_every_length(model: kvcore.Model) -> None:
    params = SamplingParams()
    prompt, tokens = IDS[:1, :250], []
    for graph in (True, False):
        cache = new_cache(model, "turbo4", capacity=400)
        first = int(model.forward(prompt, cache)[0, -1].argmax())
        made = source(model, cache, params, prompt, graph=graph)
        tokens.append([ids for (ids,) in made.tokens([first], 140)])
        assert made.no_graph == (None if graph else "switched off")
        assert (made.capture_seconds > 0) == graph
    assert tokens[0] == tokens[1]


class Elsewhere:
    """Another rank, which finds no room for a step."""

    alone = False

    def command(self, *_: Any) -> Any:
        return nullcontext()

    def end(self, kept: int, forget: Any) -> None:
        forget()

    def any(self, _: bool) -> bool:
        return True

    def chosen(self, tokens: Any) -> Any:
        return tokens


def test_a_step_that_another_rank_has_no_room_for_is_not_launched(model: kvcore.Model) -> None:
    cache = new_cache(model, "int8")
    first = int(model.forward(IDS[:1, :10], cache)[0, -1].argmax())
    sampler, draws = Sampler(SamplingParams()), [draw(SamplingParams())]
    params = model.params
    made = device_source(model.backend, model.config, params, cache, draws, [[]], [sampler], among=Elsewhere())
    with pytest.raises(KvcoreError, match="another rank could not run this step"):
        next(made.tokens([first], 3))
    assert (cache.offset, cache.stats().tokens) == (10, 10)


def test_a_step_that_fails_under_a_cap_leaves_no_row(model: kvcore.Model) -> None:
    """Before it the oldest row has gone, so that there are as many as before with the one that was not computed."""
    cache = paged(model.backend, replace(SPEC, mode=MODES["fp16"], cap=Cap(20, 4)), attend=no_attention)
    first = int(model.forward(IDS[:1, :10], cache)[0, -1].argmax())
    made = source(model, cache, SamplingParams(), IDS[:1, :10])

    def lacking(_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    tokens = made.tokens([first], 60)
    read = [next(tokens) for _ in range(13)]
    made._run = lacking
    with pytest.raises(torch.OutOfMemoryError):
        next(tokens)
    assert cache.offset == 10 + len(read)
    assert cache.stats().tokens < 20
