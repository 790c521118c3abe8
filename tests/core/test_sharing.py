"""Forks, adopted prefixes, other modes: rows that several caches have, and rows that change their form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import SMALL, feed, filled, gaussian, new_cache, relative_error
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.backends import Backend
from kvcore.cache import Cache, Prefixes
from kvcore.modes import MODES

each_mode = pytest.mark.parametrize("mode", MODES)


def rows(backend: Backend, cache: Cache, layer: int = 0) -> list[np.ndarray]:
    return [backend.ops.to_numpy(x).copy() for x in cache.dense(layer)]


# Forks


@each_mode
def test_a_fork_and_its_source_go_their_own_ways(backend: Backend, mode: str) -> None:
    first, second, third = (gaussian(1, 2, 100, 64, seed=i) for i in range(3))
    source = filled(backend, mode, first, first, window=SMALL)
    before = rows(backend, source)
    fork = source.fork()
    feed(fork, backend.ops, second, second, chunk=30)
    for got, want in zip(rows(backend, source), before, strict=True):
        assert np.array_equal(got, want)
    feed(source, backend.ops, third, third, chunk=30)
    for cache, more in ((fork, second), (source, third)):
        twin = filled(backend, mode, first, first, window=SMALL)
        feed(twin, backend.ops, more, more, chunk=30)
        assert all(np.array_equal(*pair) for pair in zip(rows(backend, cache), rows(backend, twin), strict=True))
    source.drop(4, 30)
    assert (fork.offset, fork.tokens, source.offset, source.tokens) == (200, 200, 200, 170)


def test_a_fork_copies_nothing_until_it_writes(reference: Backend) -> None:
    k = gaussian(1, 2, 300, 64)
    source = filled(reference, "int8", k, k, window=SMALL)
    fork = source.fork()
    assert [id(array) for array in source.arrays()] == [id(array) for array in fork.arrays()]
    feed(fork, reference.ops, k[:, :, :1], k[:, :, :1])
    shared = {id(array) for array in source.arrays()} & {id(array) for array in fork.arrays()}
    assert len(shared) == len(source.arrays()) - 2, "the tails of K and V alone were copied"


# Prefixes


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 256, count).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), eos_token_id=None)
    return kvcore.load(write_tiny_tokenizer(folder), backend="reference", window=SMALL)


def donor(model: kvcore.Model, prompt: list[int], mode: str) -> Cache:
    cache = model.new_cache(mode)
    model.prefill(prompt, cache)
    cache.begin_decode()
    return cache


@each_mode
def test_a_prompt_that_extends_another_equals_the_run_that_left_it(model: kvcore.Model, mode: str) -> None:
    prompt, more, prefixes = ids(150), ids(20, 1), Prefixes()
    cache = donor(model, prompt, mode)
    prefixes.donate(prompt, cache)
    adopted = prefixes.adopt([*prompt, *more], cache.spec)
    assert adopted is not None
    assert adopted.offset == 150
    got, want = (model.forward(np.array([more]), each) for each in (adopted, cache))
    np.testing.assert_array_equal(got, want)
    assert (prefixes.counters.hits, prefixes.counters.misses) == (1, 0)


@pytest.mark.parametrize(
    ("shared", "raw", "folded"), [(149, 128, 96), (100, 96, 64), (64, 64, 32), (63, 32, 0), (31, 0, 0)]
)
@each_mode
def test_of_a_shorter_prefix_whole_pages_are_adopted(
    model: kvcore.Model, mode: str, shared: int, raw: int, folded: int
) -> None:
    """P ⌊L / P⌋ rows in fp16, P ⌊(L - recent) / P⌋ in a mode with a window."""
    prompt, prefixes = ids(150), Prefixes()
    cache = donor(model, prompt, mode)
    prefixes.donate(prompt, cache)
    adopted = prefixes.adopt([*prompt[:shared], 0, *ids(30, 1)], cache.spec)
    assert (0 if adopted is None else adopted.offset) == (folded if MODES[mode].quantized else raw)
    assert cache.offset == 150
    if adopted is None:
        assert prefixes.counters.misses == 1
        return
    rest = [*prompt[:shared], 0, *ids(30, 1)][adopted.offset :]
    cold = model.new_cache(mode)
    model.prefill(prompt[:shared], cold)
    got, want = model.forward(np.array([rest]), adopted), None
    want = model.forward(np.array([[0, *ids(30, 1)]]), cold)
    p, q = (np.exp(x[0, -1] - x[0, -1].max()) for x in (got, want))
    kl = float((p / p.sum() * np.log((p / p.sum()) / (q / q.sum()))).sum())
    assert kl <= (1e-6 if mode == "fp16" else 0.05)


def test_the_same_prompt_again_leaves_its_last_token_to_run(model: kvcore.Model) -> None:
    prompt, prefixes = ids(128), Prefixes()
    cache = donor(model, prompt, "fp16")
    prefixes.donate(prompt, cache)
    adopted = prefixes.adopt(prompt, cache.spec)
    assert adopted is not None
    assert adopted.offset == 127


def test_donors_are_declined_with_the_reason(model: kvcore.Model) -> None:
    prompt, prefixes = ids(150), Prefixes()
    cache = donor(model, prompt, "int8")
    prefixes.donate(prompt, cache)
    for spec, reason in (
        (replace(cache.spec, mode=MODES["turbo4"]), "mode int8 instead of turbo4"),
        (replace(cache.spec, model="other"), f"model {model.fingerprint} instead of other"),
    ):
        assert prefixes.adopt([*prompt, 7], spec) is None
        assert prefixes.counters.declined[reason] == 1
    cache.drop(4, 20)
    prefixes.clear()
    prefixes.donate(prompt, cache)
    assert prefixes.adopt([*prompt, 7], cache.spec) is None
    assert prefixes.counters.declined["it was trimmed in the middle"] == 1
    assert (prefixes.counters.hits, prefixes.counters.misses) == (0, 3)
    waiting = model.new_cache("turbo4-delegated")
    model.prefill(prompt, waiting)
    prefixes.donate(prompt, waiting)
    assert prefixes.adopt([*prompt, 7], waiting.spec) is None
    assert prefixes.counters.declined["its hand-over has not been made"] == 1


def test_the_least_recently_used_donor_goes(model: kvcore.Model) -> None:
    prefixes = Prefixes(capacity=2)
    caches = [donor(model, ids(40, seed), "fp16") for seed in range(3)]
    for seed in (0, 1):
        prefixes.donate(ids(40, seed), caches[seed])
    assert prefixes.adopt([*ids(40, 0), 7], caches[0].spec) is not None
    prefixes.donate(ids(40, 2), caches[2])
    assert prefixes.adopt([*ids(40, 1), 7], caches[1].spec) is None
    assert len(prefixes) == 2


# Other modes


@pytest.mark.parametrize("source", ["fp16", "int8", "turbo4-delegated"])
@each_mode
def test_a_live_cache_changes_its_mode(model: kvcore.Model, source: str, mode: str) -> None:
    """From raw rows the result is that of the mode itself; from quantized ones the errors add."""
    prompt = ids(150)
    cache, twin = donor(model, prompt, source), donor(model, prompt, mode)
    before = rows(model.backend, cache, 1)
    converted = model.convert_cache(cache, mode)
    assert (converted.offset, converted.mode.name) == (150, mode)
    assert replace(converted.stats(), kv_bytes_allocated=0) == replace(twin.stats(), kv_bytes_allocated=0)
    for got, want in zip(rows(model.backend, converted, 1), before, strict=True):
        assert relative_error(got, want.astype(np.float64)) <= (0.25 if mode == "turbo3-asym" else 0.15)
        assert np.array_equal(got[:, :, -32:], want[:, :, -32:]), "recent rows stay as they are"
    logits = model.forward(np.array([ids(5, 1)]), converted)
    assert np.isfinite(logits).all()
    assert all(np.array_equal(*pair) for pair in zip(rows(model.backend, cache, 1), before, strict=True))


def test_a_capped_cache_keeps_its_holes_in_another_mode(model: kvcore.Model) -> None:
    cache = model.new_cache("fp16", max_kv_size=120)
    model.prefill(ids(200), cache)
    converted = model.convert_cache(cache, "int8")
    assert (converted.offset, converted.tokens) == (200, 120)
    assert converted.stats().rows_folded == 64


def test_rows_are_loaded_into_an_empty_cache_only(reference: Backend) -> None:
    cache = filled(reference, "int8", gaussian(1, 2, 10, 64), gaussian(1, 2, 10, 64), window=SMALL)
    with pytest.raises(kvcore.InputError, match="rows are loaded into an empty cache: this one holds 10 tokens"):
        cache.load(new_cache(reference, "int8").export())
