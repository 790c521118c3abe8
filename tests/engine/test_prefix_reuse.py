"""Rows of finished and of running requests in new ones: how many, what it changes, and what stops it."""

from __future__ import annotations

import numpy as np
import pytest
from driving import Heard, alone, finish, ids, new_engine, request, some_modes, submit

import kvcore
from kvcore.cache import Prefixes
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES


def ask(engine: kvcore.engine.Engine, name: str, prompt: tuple[int, ...], count: int = 12, **more: object) -> Heard:
    (heard,) = submit(engine, request(name, prompt, count, **more))
    finish(engine, [heard])
    return heard


def by_the_formula(mode: str, shared: int, page: int = 32, recent: int = 32) -> int:
    """Design, section 1: whole pages of the shared tokens, but for the recent ones in a mode with a window."""
    return page * max(0, (shared - (recent if MODES[mode].quantized else 0)) // page)


@some_modes
def test_S5_cached_tokens_are_those_of_the_formula(model: kvcore.Model, mode: str) -> None:
    """100 tokens shared, then others; and a finished answer that the next prompt extends is adopted to its last row."""
    engine = new_engine(model)
    prompt = ids(100)
    first = ask(engine, "a", (*prompt, *ids(20, 1)), mode=mode)
    second = ask(engine, "b", (*prompt, *ids(20, 2)), mode=mode)
    assert first.last.usage.cached_tokens == 0
    assert second.last.usage.cached_tokens == by_the_formula(mode, 100)
    tokens = (*prompt, *ids(20, 1))
    want = alone(model, request("x", tokens, 12, mode=mode, logprobs=0))
    answer = tuple(each.token for output in want.outputs for each in output.tokens)
    third = ask(engine, "c", (*tokens, *answer, 9, 9), mode=mode)
    assert third.last.usage.cached_tokens == 120 + 12 - 1, "the last token of an answer has no row"
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prefix_misses) == (2, 1)
    assert stats.cached_tokens == second.last.usage.cached_tokens + third.last.usage.cached_tokens
    assert stats.prompt_tokens == 120 + 120 + 134 - stats.cached_tokens


@some_modes
def test_B119_a_reused_prefix_gives_the_text_of_a_run_that_is_cut_there(model: kvcore.Model, mode: str) -> None:
    """The twin has folded as many rows and has no raw tail, as if it had come so far by itself."""
    prompt, engine = ids(100), new_engine(model)
    ask(engine, "a", (*prompt, *ids(20, 1)), mode=mode)
    tokens = (*prompt, *ids(20, 2))
    got = ask(engine, "b", tokens, 40, mode=mode)
    cache = model.new_cache(mode)
    recent = 32 if MODES[mode].quantized else 0
    model.prefill(tokens[: got.last.usage.cached_tokens + recent], cache)
    cache.begin_decode()
    cache.trim(recent)
    want = model.generate(tokens, kvcore.SamplingParams(max_tokens=40), cache=cache)
    assert got.text == "".join(want)
    if not MODES[mode].quantized:
        assert got.text == alone(model, request("x", tokens, 40, mode=mode)).text


@some_modes
def test_B85_B10_the_same_prompt_again_gives_the_same_answers(model: kvcore.Model, mode: str) -> None:
    """At a page less one, a page, a page and one, and so on; requests 2 to 5 are alike."""
    for count in (31, 32, 33, 64, 96, 97):
        engine = new_engine(model)
        heard = [ask(engine, str(i), ids(count), mode=mode, logprobs=0) for i in range(5)]
        assert len({each.text for each in heard[1:]}) == 1
        cached = [each.last.usage.cached_tokens for each in heard]
        want = min(count - 1, by_the_formula(mode, count))
        assert cached == [0, want, want, want, want]
        if not MODES[mode].quantized:
            assert heard[0].text == heard[1].text


@some_modes
def test_a_running_request_shares_its_prompt(model: kvcore.Model, mode: str) -> None:
    engine = new_engine(model)
    (running,) = submit(engine, request("a", ids(100), 300, mode=mode))
    while len(running.outputs) < 3:
        engine.step()
    shorter = ask(engine, "b", (*ids(100), 7, 8), mode=mode)
    assert shorter.last.usage.cached_tokens == 100, "a snapshot: the whole prompt of the other"
    assert not running.done
    finish(engine, [running])
    assert running.text == alone(model, request("a", ids(100), 300, mode=mode)).text


@pytest.mark.parametrize("mode", ["int8", "turbo4"])
def test_B21_a_batch_of_requests_with_and_without_a_prefix(model: kvcore.Model, mode: str) -> None:
    prefix = ids(70)
    requests = [request(f"p{i}", (*prefix, *ids(5, 10 + i)), 20, mode=mode) for i in range(4)]
    requests += [request(f"q{i}", ids(2, 20 + i), 20, mode=mode) for i in range(4)]
    batch, one_by_one = new_engine(model), new_engine(model)
    for engine in (batch, one_by_one):
        ask(engine, "warm", (*prefix, 11), mode=mode)
    heard = submit(batch, *requests)
    finish(batch, heard)
    for each, got in zip(requests, heard, strict=True):
        (want,) = submit(one_by_one, each)
        finish(one_by_one, [want])
        assert got.text == want.text
        assert (got.last.usage.cached_tokens > 0) == each.id.startswith("p")


def test_requests_that_come_together_share_what_the_first_one_runs(model: kvcore.Model) -> None:
    """A prompt is looked up when it is its turn, not when it comes."""
    engine = new_engine(model)
    heard = submit(engine, *(request(f"r{i}", (*ids(96), *ids(3, i)), 5) for i in range(6)))
    finish(engine, heard)
    assert [each.last.usage.cached_tokens for each in heard] == [0] + 5 * [96]


def test_other_modes_caps_and_the_switch_stop_reuse_and_are_counted(model: kvcore.Model) -> None:
    engine = new_engine(model)
    ask(engine, "a", ids(100), mode="int8")
    assert ask(engine, "b", (*ids(100), 7), mode="turbo4").last.usage.cached_tokens == 0
    assert engine.stats().prefix_declined == {"mode int8 instead of turbo4": 1}
    capped = new_engine(model, max_kv_size=64)
    ask(capped, "a", ids(100))
    assert ask(capped, "b", (*ids(100), 7)).last.usage.cached_tokens == 0
    assert capped.stats().prefix_declined == {"it was trimmed in the middle": 4}
    off = new_engine(model, prefix_reuse=False)
    ask(off, "a", ids(100))
    assert ask(off, "b", (*ids(100), 7)).last.usage.cached_tokens == 0
    assert (off.stats().prefixes, off.stats().prefix_misses) == (0, 0)


@some_modes
def test_B130_running_and_kept_rows_stay_within_the_budget(model: kvcore.Model, mode: str) -> None:
    """30 prompts of 120 tokens, one at a time and four at a time; the newest prefixes are the ones that are left."""
    for together in (1, 4):
        budget = 900 << 10
        engine = new_engine(model, kv_cache_budget=budget)
        for start in range(0, 30, together):
            group = range(start, min(30, start + together))
            heard = submit(engine, *(request(str(i), ids(120, i), 8, mode=mode) for i in group))
            while not all(each.done for each in heard):
                engine.step()
                assert engine.stats().kv[mode].used <= budget
        assert 0 < engine.stats().prefixes < 60
        assert engine.stats().kv[mode].prefixes > 0
        assert ask(engine, "again", (*ids(120, 29), 7), mode=mode).last.usage.cached_tokens == 120


def test_prefixes_go_before_requests_have_to_wait(model: kvcore.Model) -> None:
    per_token = 2 * 2 * 2 * 64 * 4
    engine = new_engine(model, kv_cache_budget=400 * per_token)
    ask(engine, "a", ids(150))
    assert engine.stats().kv["fp16"].prefixes > 150 * per_token
    large = ask(engine, "b", ids(350, 1), 40)
    assert (large.reason, engine.stats().preemptions) == ("length", 0)


def test_kept_prefixes_have_a_limit_of_their_own(model: kvcore.Model) -> None:
    per_token = 2 * 2 * 2 * 64 * 4
    engine = new_engine(model, prefix_bytes=250 * per_token)
    for i in range(5):
        ask(engine, str(i), ids(100, i))
        assert engine.stats().kv["fp16"].prefixes <= 250 * per_token
    assert engine.stats().prefixes == 2


# The tree of donors


def test_a_look_up_reads_the_prompt_and_not_the_donors(model: kvcore.Model) -> None:
    """Thousands of donors with one beginning: as many blocks are compared as the prompt has."""
    prefixes = Prefixes(None)
    cache = model.new_cache()
    model.prefill(ids(96), cache)
    for i in range(3000):
        prefixes.donate((*ids(64), *(5 + (i >> shift) % 200 for shift in range(32))), cache)
    compared = []

    class Counting(tuple):
        def __getitem__(self, at: object) -> object:
            compared.append(at)
            return tuple.__getitem__(self, at)

    from kvcore.cache import prefix

    (root,) = prefixes._trees.values()
    rows, donor = prefix._best(root, cache.spec, Counting((*ids(64), *(200 for _ in range(64)))))
    assert rows == 64
    assert donor is not None
    assert len(compared) < 10


@pytest.mark.parametrize("window", [WindowPolicy(), WindowPolicy(recent_tokens=40, page_size=32)], ids=str)
@some_modes
def test_what_is_adopted_is_what_a_scan_of_all_donors_finds(
    tiny_folder: object, window: WindowPolicy, mode: str
) -> None:
    """Random donors of a few words, put in and taken out; the oldest go first."""
    rng = np.random.default_rng(3)
    model = kvcore.load(str(tiny_folder), backend="reference", window=window)
    caches = {}
    for count in (20, 70, 150, 200, 300):
        caches[count] = model.new_cache(mode)
        model.prefill(ids(count), caches[count])
        caches[count].begin_decode()
    prefixes, donors = Prefixes(12), {}
    page, recent = window.page_size, window.recent_tokens if MODES[mode].quantized else 0

    def words(count: int) -> tuple[int, ...]:
        blocks = [ids(10, int(seed)) for seed in rng.integers(0, 2, count // 10)]
        return tuple(token for block in blocks for token in block)

    for _ in range(150):
        count = int(rng.choice(list(caches)))
        tokens = words(count)
        prefixes.donate(tokens, caches[count])
        donors.pop(tokens, None)
        donors[tokens] = count
        while len(donors) > 12:
            del donors[next(iter(donors))]
        prompt = (*words(int(rng.integers(1, 32)) * 10), 7)
        want = 0
        for tokens in donors:
            shared = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), len(tokens))
            shared = min(shared, len(prompt))
            whole = len(tokens) if shared == len(tokens) < len(prompt) else 0
            paged = page * max(0, (shared - recent) // page)
            want = max(want, whole, min(paged, len(prompt) - 1))
        adopted = prefixes.adopt(prompt, caches[20].spec)
        assert (0 if adopted is None else adopted.offset) == want
        order = [donor.tokens for donor in prefixes._donors.values()]
        assert set(order) == set(donors)
        donors = {tokens: donors[tokens] for tokens in order}
    prefixes.clear()
    assert (len(prefixes), prefixes._trees) == (0, {})
