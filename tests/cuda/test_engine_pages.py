"""The engine over pools of pages, with the kernels in the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import TORCH_DEVICE, no_attention
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.pools import split_budget
from kvcore.cache import CacheSpec
from kvcore.engine import BudgetError, Engine, EngineConfig, ModeError, Output, Request
from kvcore.engine.memory import RowCosts
from kvcore.engine.paged import pages_of, raw_pages_for
from kvcore.modes import MODES
from kvcore.registry import Kernel, Registry

every = pytest.mark.parametrize("mode", MODES)
each_mode = pytest.mark.parametrize(  # the interpreter takes its time
    "mode", ["int8", *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != "int8")]
)
RAW_PAGE = 2 * 64 * 128 * 2  # bytes: K and V of one layer and head, float16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    """One layer on pages whatever the device, as on a GPU of sm_90; attention adds nothing."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, layers=1, heads=2, kv_heads=1, eos_token_id=None)
    write_tiny_tokenizer(folder)
    loaded = kvcore.load(folder, backend="cuda", device=TORCH_DEVICE, dtype="float16")
    kernels = [
        Kernel(name, op, "cuda", "fused", load, storage="paged")
        for name, op, load in (
            ("no-attention", "attend", lambda: no_attention_rows),
            ("fold-pages", "encode", lambda: Fold.create),
        )
    ]
    return replace(loaded, registry=Registry(tuple(kernels)))


def no_attention_rows(q: Any, *_: Any, **__: Any) -> Any:
    return no_attention(q)


def engine_of(model: kvcore.Model, mode: str, pages: int, **settings: Any) -> Engine:
    """With a budget of so many raw pages."""
    settings.setdefault("max_batch", 4)
    return Engine(replace(model, mode=MODES[mode]), EngineConfig(kv_cache_budget=pages * RAW_PAGE, **settings))


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 256, count).tolist())


def submit(engine: Engine, name: str, prompt: Sequence[int], count: int) -> list[Output]:
    heard: list[Output] = []
    engine.submit(Request(name, tuple(prompt), kvcore.SamplingParams(max_tokens=count)), heard.append)
    return heard


def run(engine: Engine, *heard: list[Output]) -> list[str]:
    for _ in range(3000):
        if all(each and each[-1].finish_reason for each in heard):
            return ["".join(output.text for output in each) for each in heard]
        engine.step()
        check(engine)
    raise AssertionError(engine.stats())


def check(engine: Engine) -> None:
    """What the pools say and what the caches hold agree, and nothing set aside has been given away."""
    memory = engine._memory
    for running in engine._running:
        assert running.cache is not None
        assert all(a <= b for a, b in zip(memory.held(running.cache), running.reserved, strict=True))
    for use in engine.stats().kv.values():
        assert use.used <= use.budget <= memory.budget
        for pages in use.pages.values():
            assert pages.free >= 0


def used(engine: Engine) -> int:
    return sum(use.used for use in engine.stats().kv.values())


@each_mode
def test_a_batch_on_pages_gives_each_request_its_own_text(model: kvcore.Model, mode: str) -> None:
    requests = [(ids(count, count), tokens) for count, tokens in ((5, 12), (140, 4), (250, 12))]
    engine = engine_of(model, mode, 64, prefix_reuse=False)
    assert engine.stats().batching.startswith("continuous batch")
    heard = [submit(engine, str(i), *each) for i, each in enumerate(requests)]
    texts = run(engine, *heard)
    for i, each in enumerate(requests):
        alone = engine_of(model, mode, 64, prefix_reuse=False)
        assert run(alone, submit(alone, str(i), *each)) == [texts[i]]
    assert used(engine) == 0


@each_mode
def test_prefixes_share_pages_by_reference(model: kvcore.Model, mode: str) -> None:
    """S5, B38: of 400 shared tokens 384 are adopted in fp16 and 256 with a window, and no page of them is copied."""
    engine = engine_of(model, mode, 64)
    first = submit(engine, "a", (*ids(400), 9), 3)
    run(engine, first)
    before = used(engine)
    second = submit(engine, "b", (*ids(400), *ids(30, 1)), 3)
    engine.step()
    want = 256 if MODES[mode].quantized else 384
    assert second[-1].usage.cached_tokens == want
    shared = engine.stats().kv[mode].pages["KV" if MODES[mode].quantized else "raw KV"].shared
    assert shared >= want // 128
    run(engine, second)
    assert used(engine) - before <= (400 - want + 33 + 256) * RAW_PAGE // 128
    assert (engine.stats().prefix_hits, engine.stats().prefixes) == (1, 4)
    engine.stop()
    assert used(engine) == 0


@pytest.mark.parametrize("mode", ["fp16", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("int8", "turbo4"))])
def test_prefixes_go_and_then_the_youngest_request_waits(model: kvcore.Model, mode: str) -> None:
    """Three answers that cross a page, in a pool that holds two of them; nobody's text changes."""
    pages = 5 if mode == "fp16" else 18
    engine = engine_of(model, mode, pages, decode_reserve=0, max_batch=3, prefill_step=128)
    kept = submit(engine, "kept", ids(100, 9), 2)
    run(engine, kept)
    heard = [submit(engine, name, ids(120, i), 20) for i, name in enumerate("abc")]
    if mode != "fp16":
        engine._memory._pools[mode].raw.alloc(engine._memory._pools[mode].raw.free_pages - 3)  # all but 3 are taken
    texts = run(engine, *heard)
    assert engine.stats().preemptions > 0
    assert {each[-1].finish_reason for each in heard} <= {"length", "stop"}
    for i, text in enumerate(texts):
        alone = engine_of(model, mode, 64, prefill_step=128)
        assert run(alone, submit(alone, "x", ids(120, i), 20)) == [text]


@every
def test_what_can_never_fit_is_refused_with_pages_and_bytes(model: kvcore.Model, mode: str) -> None:
    engine = engine_of(model, mode, 12, max_batch=1)
    with pytest.raises(BudgetError, match=rf"4000 tokens in mode {mode} needs \d+ pages \(\d+ bytes\)"):
        submit(engine, "a", ids(4000), 5)


@pytest.mark.parametrize("mode", ["fp16", pytest.param("int8", marks=pytest.mark.full)])
def test_a_cap_bounds_the_pages_of_a_request(model: kvcore.Model, mode: str) -> None:
    engine = engine_of(model, mode, 64, max_kv_size=300, prefill_step=128, prefix_reuse=False)
    heard = submit(engine, "a", ids(700), 8)
    run(engine, heard)  # which checks what is held against what was set aside


@every
def test_how_many_sequences_of_32k_a_budget_of_100_gb_admits(mode: str) -> None:
    """llama-3.1-8b in 16 bits: 23 in fp16, and in turbo4 close to the 88 that rows alone would allow."""
    spec = CacheSpec(MODES[mode], 32, 32, 8, 128, "float16")
    costs = RowCosts(spec, 512)
    pages = split_budget(spec.shape(), 100 * 10**9, raw_pages_for(costs, 96, 32768))
    needs = pages_of(costs, 0, 32768)
    fits = min(have // need for have, need in zip(pages, needs, strict=True) if need)
    least = {"fp16": 23, "int8": 42, "turbo4": 84, "int8-turbo4": 56, "turbo4-asym": 35, "turbo3-asym": 36}
    assert least.get(mode, 16) <= fits <= least.get(mode, 16) + 3


def test_a_mode_without_pages_is_refused_and_one_that_was_named_is_not(model: kvcore.Model) -> None:
    engine = engine_of(model, "int8", 64, modes=("turbo4",))
    request = Request("a", ids(5), kvcore.SamplingParams(max_tokens=2), mode="fp16")
    with pytest.raises(ModeError, match="cache mode fp16: this server has room for int8, turbo4 only"):
        engine.submit(request, lambda _output: None)
    heard: list[Output] = []
    engine.submit(replace(request, mode="turbo4"), heard.append)
    run(engine, heard)
    kv = engine.stats().kv
    assert set(kv) == {"int8", "turbo4"}
    assert sum(use.budget for use in kv.values()) <= 64 * RAW_PAGE


@each_mode
def test_cancelled_requests_give_their_pages_back(model: kvcore.Model, mode: str) -> None:
    engine = engine_of(model, mode, 64, prefix_reuse=False, prefill_step=128)
    heard = [submit(engine, str(i), ids(90 + 60 * i, i), 50) for i in range(4)]
    for _ in range(3):
        engine.step()
    for i in range(4):
        engine.cancel(str(i))
    engine.step()
    assert {each[-1].finish_reason for each in heard} == {"cancelled"}
    assert used(engine) == 0
