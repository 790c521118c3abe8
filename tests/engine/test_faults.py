"""What goes wrong for one request is its own affair; memory that runs out is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driving import Heard, alone, finish, ids, new_engine, request, running_of, some_modes, submit

import kvcore
from kvcore.cache import Cache, LayerCache
from kvcore.engine import Engine

PER_TOKEN = 2 * 2 * 2 * 64 * 4  # bytes of a raw row of the tiny model


def three(engine: Engine, mode: str | None = None) -> list[Heard]:
    """Requests a, b and c, decoding."""
    heard = submit(engine, *(request(name, ids(40, i), 40, mode=mode) for i, name in enumerate("abc")))
    while not all(running_of(engine, name).decoding for name in "abc"):
        engine.step()
    return heard


def texts(model: kvcore.Model, mode: str | None = None) -> list[str]:
    return [alone(model, request(name, ids(40, i), 40, mode=mode)).text for i, name in enumerate("abc")]


def break_layer(cache: Cache | None, layer: int, error: Callable[[], Exception], times: int = 1) -> None:
    """Let a layer of a contiguous cache fail when it takes rows."""
    assert cache is not None
    broken = cache.layers[layer]
    assert isinstance(broken, LayerCache)
    step, left = broken.step, [times]

    def failing(*args: Any, **settings: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error()
        return step(*args, **settings)

    broken.step = failing  # type: ignore[method-assign]


@some_modes
def test_B42_an_exception_in_one_sequence_leaves_the_others_alone(model: kvcore.Model, mode: str) -> None:
    engine = new_engine(model)
    a, b, c = three(engine, mode)
    break_layer(running_of(engine, "b").cache, 1, lambda: RuntimeError("boom"))
    finish(engine, [a, b, c])
    assert (b.reason, b.last.error) == ("error", "the step failed (RuntimeError: boom)")
    assert (a.last.code, b.last.code, c.last.code) == (None, "internal", None)
    want = texts(model, mode)
    assert (a.text, c.text) == (want[0], want[2])
    (again,) = submit(engine, request("d", ids(40, 1), 40, mode=mode))
    finish(engine, [again])
    assert again.text == want[1]


def test_nan_logits_end_one_request(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(model)
    heard = three(engine)
    decode = engine._stepper.decode

    def poisoned(batch: Any, *rest: Any) -> Any:
        results = decode(batch, *rest)
        for running, result in zip(batch, results, strict=True):
            if running.request.id == "b" and len(running.answer.tokens) == 9:
                result[0, 7] = np.nan
        return results

    monkeypatch.setattr(engine._stepper, "decode", poisoned)
    finish(engine, heard)
    assert heard[1].reason == "error"
    assert str(heard[1].last.error).startswith("the model's logits are not finite")
    assert heard[1].last.code == "not_finite"
    assert heard[1].last.usage.completion_tokens == 9
    want = texts(model)
    assert heard[1].text == want[1][: len(heard[1].text)]
    assert [heard[0].text, heard[2].text] == [want[0], want[2]]


def test_a_nan_in_the_rows_of_one_sequence_stays_there(model_on: kvcore.Model) -> None:
    """Whatever the backend: the row of another sequence in the same products is what it was."""
    engine = new_engine(model_on)
    heard = three(engine)
    cache = running_of(engine, "b").cache
    assert cache is not None
    tail = cache.layers[0]._v.tail  # type: ignore[attr-defined]
    tail._buffer = tail._buffer * float("nan")
    finish(engine, heard)
    assert heard[1].reason == "error"
    assert [heard[0].text, heard[2].text] == [texts(model_on)[i] for i in (0, 2)]


def test_the_reference_names_the_row_that_cannot_be_quantized(model: kvcore.Model) -> None:
    engine = new_engine(model)
    heard = three(engine, "int8")
    cache = running_of(engine, "b").cache
    assert cache is not None
    tail = cache.layers[1]._k.tail  # type: ignore[attr-defined]
    tail._buffer[:, :, tail.start + 3] = np.inf
    before = cache.offset
    finish(engine, heard)
    assert heard[1].reason == "error"
    assert before == 40
    assert [heard[0].reason, heard[2].reason] == ["length", "length"]


@some_modes
def test_B74_memory_that_runs_out_once_is_waited_for(model: kvcore.Model, mode: str) -> None:
    """In the third chunk of a prompt, while two others stream: it is run again, and nobody's text changes."""
    engine = new_engine(model, prefill_step=16)
    a, c = submit(engine, request("a", ids(10), 60, mode=mode), request("c", ids(10, 2), 60, mode=mode))
    for _ in range(3):
        engine.step()
    (b,) = submit(engine, request("b", ids(64, 1), 20, mode=mode))
    while b.done or not b.outputs or b.outputs[-1].prompt_done < 32:
        engine.step()
    break_layer(running_of(engine, "b").cache, 0, MemoryError)
    finish(engine, [a, b, c])
    assert engine.stats().preemptions == 1
    assert engine.stats().finished == {"length": 3}
    for each, name, count, seed, most in ((a, "a", 10, 0, 60), (b, "b", 64, 1, 20), (c, "c", 10, 2, 60)):
        assert each.text == alone(model, request(name, ids(count, seed), most, mode=mode), prefill_step=16).text


def test_a_request_that_finds_no_room_with_nothing_running_names_the_budget(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    monkeypatch.setattr(engine, "_free", lambda *_: False)
    (heard,) = submit(engine, request("a", ids(30), 5))
    engine.step()
    assert (heard.reason, heard.last.code) == ("error", "insufficient_kv_budget")
    assert "bytes for its cache" in str(heard.last.error)


def test_memory_that_keeps_running_out_ends_the_request_in_words(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    heard = three(engine)
    prefill = engine._stepper.prefill

    def failing(running: Any, *args: Any, **settings: Any) -> Any:
        return MemoryError() if running.request.id == "d" else prefill(running, *args, **settings)

    monkeypatch.setattr(engine._stepper, "prefill", failing)
    heard += submit(engine, request("d", ids(30), 5))
    finish(engine, heard)
    assert heard[3].last.error == "out of memory for now (MemoryError): try again later, or with a shorter prompt"
    assert heard[3].last.code == "out_of_memory"
    assert [each.text for each in heard[:3]] == texts(model)
    (again,) = submit(engine, request("e", ids(40, 1), 40))
    finish(engine, [again])
    assert again.text == texts(model)[1]


def test_a_step_that_fails_as_a_whole_is_tried_one_by_one(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that finds no memory for many rows may find it for one."""
    engine = new_engine(model)
    heard = three(engine)
    ops, failures = type(model.backend.ops), []
    silu = ops.silu

    def failing(self: Any, x: Any) -> Any:
        if not failures:
            failures.append(x.shape)
            raise MemoryError
        return silu(self, x)

    monkeypatch.setattr(ops, "silu", failing)
    finish(engine, heard)
    assert len(failures) == 1
    assert [each.text for each in heard] == texts(model)
    assert engine.stats().preemptions == 0


def test_B127_a_prefix_that_cannot_be_kept_costs_no_answer(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Cache, "fork", failing)
        patched.setattr(type(engine._prefixes._prefixes), "donate", failing)
        heard = three(engine)
        finish(engine, heard)
    assert [each.text for each in heard] == texts(model)
    assert engine.stats().prefix_declined == {"keeping it failed": 6}
    (after,) = submit(engine, request("d", ids(40), 40))
    finish(engine, [after])
    assert after.text == texts(model)[0]


# Preemption


@some_modes
def test_preempted_requests_say_what_they_would_have_said(model: kvcore.Model, mode: str) -> None:
    """Room for two of three answers, none of it set aside: the youngest waits, and is run again with its tokens."""
    requests = [request(name, ids(60, i), 120, mode=mode) for i, name in enumerate("abc")]
    engine = new_engine(model, prefix_reuse=False)
    budget = 2 * engine._memory.needs(mode, 0, 180)[0] + engine._memory.needs(mode, 60, 64)[0] // 2
    engine = new_engine(model, kv_cache_budget=budget, decode_reserve=0, prefix_reuse=False, prefill_step=48)
    heard = submit(engine, *requests)
    most = 0
    while not all(each.done for each in heard):
        engine.step()
        assert engine.stats().kv[mode].used <= budget
        most = max(most, engine.stats().running)
    assert engine.stats().preemptions > 0
    assert most >= 2
    for each, got in zip(requests, heard, strict=True):
        want = alone(model, each, prefix_reuse=False, prefill_step=48)
        assert (got.reason, got.last.usage) == ("length", want.last.usage)
        assert got.text == want.text


def test_the_oldest_request_is_never_preempted(model: kvcore.Model) -> None:
    engine = new_engine(model, kv_cache_budget=400 * PER_TOKEN, decode_reserve=0)
    heard = submit(engine, *(request(f"r{i}", ids(60, i), 200) for i in range(4)))
    finish(engine, heard)
    assert engine.stats().preemptions > 0
    done = [each.steps[-1] for each in heard]
    assert done == sorted(done)
    assert max(b - a for a, b in zip(heard[0].steps, heard[0].steps[1:], strict=False)) <= 4, "no pause"


def test_a_prompt_with_a_nan_is_not_kept_for_others(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(model)
    prefill, calls = engine._stepper.prefill, []

    def poisoned(*args: Any, **settings: Any) -> Any:
        result = prefill(*args, **settings)
        calls.append(1)
        if len(calls) == 1:
            result[-1, 0] = np.nan
        return result

    monkeypatch.setattr(engine._stepper, "prefill", poisoned)
    first, second = submit(engine, request("a", ids(60), 5), request("b", (*ids(60), 7), 5))
    finish(engine, [first, second])
    assert (first.reason, second.reason) == ("error", "length")
    assert second.last.usage.cached_tokens == 0
