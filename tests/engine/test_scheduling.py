"""Who runs when: interleaved prefill, order, limits, cancelling, stopping."""

from __future__ import annotations

import threading
import time

import pytest
from driving import Heard, alone, finish, ids, new_engine, request, running_of, some_modes, submit

import kvcore
from kvcore.engine import BudgetError, ContextLengthError, Engine, EngineConfig, NotReadyError, QueueFullError
from kvcore.errors import InputError
from kvcore.modes import MODES


def test_a_long_prompt_does_not_stall_a_running_stream(model: kvcore.Model) -> None:
    """600 tokens in chunks of 40 take 15 steps; in each of them the stream gets its token."""
    engine = new_engine(model, prefill_step=40)
    (stream,) = submit(engine, request("stream", ids(10), 60))
    engine.step()
    (long,) = submit(engine, request("long", ids(600, 1), 5))
    before = running_of(engine, "stream").answer.tokens
    counts = []
    while not long.done or not long.outputs[-1].usage.completion_tokens:
        engine.step()
        counts.append(len(before))
    assert counts[:16] == list(range(counts[0], counts[0] + 16))
    done = [output.prompt_done for output in long.outputs]
    assert done[:15] == list(range(40, 601, 40)), "progress is told after every chunk"
    finish(engine, [stream, long])
    assert stream.text == alone(model, request("stream", ids(10), 60), prefill_step=40).text


def test_a_step_takes_at_most_prefill_step_tokens_of_prompts(model: kvcore.Model) -> None:
    """Of prompts of 30 tokens one fits beside another's rest only if it fits whole; each keeps its own borders."""
    engine = new_engine(model, prefill_step=64)
    heard = submit(engine, *(request(f"r{i}", ids(30, i), 40) for i in range(5)))
    run = []
    for _ in range(3):
        engine.step()
        run.append(engine.stats().prompt_tokens)
    assert run == [60, 120, 150]
    finish(engine, heard)


@pytest.mark.parametrize(("tokens", "chunks"), [(136, [64, 136]), (137, [64, 128, 137]), (72, [72])])
def test_no_small_chunk_is_left_at_the_end_of_a_prompt(model: kvcore.Model, tokens: int, chunks: list[int]) -> None:
    engine = new_engine(model, prefill_step=64)
    heard = submit(engine, request("a", ids(tokens), 2))
    run = []
    for _ in chunks:
        engine.step()
        run.append(engine.stats().prompt_tokens)
    assert run == chunks
    finish(engine, heard)


def test_requests_start_in_the_order_in_which_they_came(model: kvcore.Model) -> None:
    """A large one that has to wait for room is not overtaken by small ones that would fit."""
    per_token = 2 * 2 * 2 * 64 * 4
    engine = new_engine(model, kv_cache_budget=300 * per_token, prefix_reuse=False)
    first, large, *small = submit(
        engine,
        request("first", ids(100), 50),
        request("large", ids(200, 1), 50),
        *(request(f"s{i}", ids(10, 2 + i), 5) for i in range(3)),
    )
    engine.step()
    engine.step()
    assert engine.stats().running == 1
    assert engine.stats().waiting == 4
    while not first.done:
        assert not any(each.outputs for each in small)
        engine.step()
    finish(engine, [large, *small])
    assert large.steps[0] <= min(each.steps[0] for each in small)


def test_at_most_max_batch_requests_run(model: kvcore.Model) -> None:
    engine = new_engine(model, max_batch=2)
    heard = submit(engine, *(request(f"r{i}", ids(8, i), 6) for i in range(5)))
    while not all(each.done for each in heard):
        engine.step()
        assert engine.stats().running <= 2


def test_a_full_queue_refuses_and_says_when_to_come_back(model: kvcore.Model) -> None:
    engine = new_engine(model, max_batch=1, max_queue=2)
    heard = submit(engine, *(request(name, ids(8), 6) for name in "abc"))
    for _ in range(3):
        with pytest.raises(QueueFullError, match="3 requests run or wait, as many as may") as refused:
            submit(engine, request("d", ids(8), 6))
        assert refused.value.retry_after >= 1
        engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    while not heard[0].done:
        engine.step()
    heard += submit(engine, request("d", ids(8), 6))
    finish(engine, heard)


@pytest.mark.parametrize(("batch", "queue"), [(4, 0), (4, 2), (1, 5)])
def test_a_burst_fills_the_batch_before_the_queue(model: kvcore.Model, batch: int, queue: int) -> None:
    """All before the engine has seen the first: as many as run, and as many as wait."""
    engine = new_engine(model, max_batch=batch, max_queue=queue)
    heard = submit(engine, *(request(f"r{i}", ids(8), 6) for i in range(batch + queue)))
    with pytest.raises(QueueFullError):
        submit(engine, request("more", ids(8), 6))
    finish(engine, heard)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (5, 256)}, "token id 256: the vocabulary has ids 0 to 255"),
        ({"logit_bias": {300: 1.0}}, "logit_bias of token 300: the vocabulary has ids 0 to 255"),
        ({"logprobs": 21}, "logprobs 21: must be from 0 to 20"),
        ({"mode": "int9"}, "unknown KV cache mode 'int9'"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(model: kvcore.Model, settings: dict[str, object], message: str) -> None:
    engine = new_engine(model)
    with pytest.raises(InputError, match=message):
        submit(engine, request("a", settings.pop("prompt", ids(5)), **settings))
    assert engine.stats().waiting == 0


def test_B92_a_prompt_beyond_the_context_is_refused_with_both_numbers(model: kvcore.Model) -> None:
    engine = new_engine(model, max_model_len=128)
    with pytest.raises(ContextLengthError, match="the prompt has 200 tokens, the context holds 128"):
        submit(engine, request("a", ids(200)))
    with pytest.raises(InputError, match="max_model_len 5000: the model's context holds 4096"):
        new_engine(model, max_model_len=5000)


def test_B94_an_answer_ends_at_the_context_with_length(model: kvcore.Model) -> None:
    engine = new_engine(model, max_model_len=128)
    (heard,) = submit(engine, request("a", ids(8), 125))
    finish(engine, [heard])
    assert (heard.reason, heard.last.usage.completion_tokens) == ("length", 120)


def test_without_a_context_shift_an_answer_ends_at_max_kv_size(model: kvcore.Model) -> None:
    engine = new_engine(model, max_kv_size=64, context_shift=False)
    (heard,) = submit(engine, request("a", ids(50), 100))
    finish(engine, [heard])
    assert (heard.reason, heard.last.usage.completion_tokens) == ("length", 14)
    with pytest.raises(ContextLengthError, match="64 tokens, the context holds 64"):
        submit(engine, request("b", ids(64)))


@some_modes
def test_a_cap_holds_in_a_batch_as_in_generate(model: kvcore.Model, mode: str) -> None:
    engine = new_engine(model, max_kv_size=96, prefill_step=50)
    requests = [request(f"r{i}", ids(120 + 40 * i, i), 60, mode=mode) for i in range(3)]
    heard = submit(engine, *requests)
    finish(engine, heard)
    for each, got in zip(requests, heard, strict=True):
        cache = model.new_cache(mode, max_kv_size=96)
        want = model.generate(each.prompt, each.params, cache=cache, prefill_step=50)
        assert got.text == "".join(want)
        assert cache.tokens <= 96


@some_modes
def test_B132_a_prompt_that_can_never_fit_is_refused_with_both_amounts(model: kvcore.Model, mode: str) -> None:
    """And an answer that would not fit ends with "length" where the budget does."""
    engine = new_engine(model, kv_cache_budget=1 << 18)
    with pytest.raises(
        BudgetError, match=rf"3000 tokens in mode {mode} needs \d+ bytes, all there is are 262144 bytes"
    ):
        submit(engine, request("a", ids(3000), mode=mode))
    small, long = submit(engine, request("b", ids(4), 1, mode=mode), request("c", ids(4), 10**6, mode=mode))
    while not long.done:
        engine.step()
        assert engine.stats().kv[mode].used <= 1 << 18
    assert small.reason == long.reason == "length"
    assert long.last.usage.completion_tokens > 60


def test_a_request_chooses_its_mode(model: kvcore.Model) -> None:
    engine = new_engine(model)
    requests = [request(f"r{i}", ids(150, 7), 30, mode=mode) for i, mode in enumerate(MODES)]
    heard = submit(engine, *requests)
    for _ in range(8):
        engine.step()
    kv = engine.stats().kv
    assert {mode for mode, use in kv.items() if use.running} == set(MODES)
    assert kv["turbo4"].running < kv["int8"].running < kv["fp16"].running
    finish(engine, heard)
    for each, got in zip(requests, heard, strict=True):
        assert got.text == alone(model, each).text


# Cancelling


def test_a_cancelled_request_frees_everything_at_the_next_step(model: kvcore.Model) -> None:
    engine = new_engine(model, prefix_reuse=False)
    decoding, other = submit(engine, request("a", ids(40), 1000), request("b", ids(40, 1), 1000))
    for _ in range(5):
        engine.step()
    (prefilling,) = submit(engine, request("c", ids(2000, 2), 5))
    engine.step()
    (waiting,) = submit(engine, request("d", ids(30, 3), 5))
    for name in "acdd":
        engine.cancel(name)
    engine.cancel("unknown")
    engine.step()
    assert [each.reason for each in (decoding, prefilling, waiting)] == ["cancelled"] * 3
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished) == (1, 0, {"cancelled": 3})
    engine.cancel("b")
    engine.step()
    assert engine.stats().kv["fp16"].used == 0
    assert decoding.text == alone(model, request("a", ids(40), 30)).text[: len(decoding.text)]
    assert other.done


def test_a_listener_that_fails_ends_its_own_request_only(model: kvcore.Model) -> None:
    engine = new_engine(model)

    def broken(_output: object) -> None:
        raise BrokenPipeError

    engine.submit(request("a", ids(8), 50), broken)
    (other,) = submit(engine, request("b", ids(8, 1), 20))
    finish(engine, [other])
    assert other.text == alone(model, request("b", ids(8, 1), 20)).text
    assert engine.stats().running == 0
    assert engine.stats().listener_errors == 2, "a piece, and the end"


# A thread of its own


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_stop_lets_running_requests_finish_and_refuses_new_ones(model: kvcore.Model) -> None:
    engine = new_engine(model, max_batch=1)
    engine.start()
    running, waiting = submit(engine, request("a", ids(8), 80), request("b", ids(8), 5))
    wait_for(lambda: running.outputs)
    engine.stop()
    assert (running.reason, running.last.usage.completion_tokens) == ("length", 80)
    assert waiting.reason == "error"
    assert (waiting.last.error, waiting.last.code) == (
        "the server is shutting down: try another one, or later",
        "shutdown",
    )
    with pytest.raises(NotReadyError):
        submit(engine, request("c", ids(8)))
    assert not engine.stats().healthy


def test_stop_does_not_wait_longer_than_it_may(model: kvcore.Model) -> None:
    engine = new_engine(model)
    engine.start()
    (endless,) = submit(engine, request("a", ids(8), 4000))
    wait_for(lambda: endless.outputs)
    engine.stop(timeout=0.05)
    assert endless.reason == "error"
    assert "stopped" in str(endless.last.error)
    assert endless.last.code == "shutdown"
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcore-engine"]


def test_requests_from_many_threads(model: kvcore.Model) -> None:
    engine = new_engine(model)
    engine.start()
    heard: dict[str, Heard] = {}

    def ask(number: int) -> None:
        for turn in range(3):
            name = f"{number}/{turn}"
            heard[name] = submit(engine, request(name, ids(20, number), 10))[0]
            wait_for(lambda name=name: heard[name].done)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.stop()
    for number in range(4):
        want = alone(model, request("x", ids(20, number), 10)).text
        assert {heard[f"{number}/{turn}"].text for turn in range(3)} == {want}


def test_an_engine_that_fails_ends_every_request_and_takes_no_more(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    heard = submit(engine, request("a", ids(8), 50), request("b", ids(8), 50))
    monkeypatch.setattr(engine, "_prefill", lambda: 1 / 0)
    engine.start()
    wait_for(lambda: all(each.done for each in heard))
    assert {(each.last.error, each.last.code) for each in heard} == {
        ("the engine failed while this request ran: see the log", "internal")
    }
    assert not engine.stats().healthy
    with pytest.raises(NotReadyError, match="has failed"):
        submit(engine, request("c", ids(8)))


@pytest.mark.parametrize("setting", ["max_batch", "prefill_step", "kv_cache_budget", "max_model_len"])
def test_impossible_settings_are_refused(setting: str) -> None:
    with pytest.raises(InputError, match=f"{setting} 0: must be 1 or more"):
        EngineConfig(**{setting: 0})


def test_a_default_budget_is_a_share_of_memory(model: kvcore.Model) -> None:
    assert 1 << 26 < Engine(model).stats().budget < 1 << 42


def test_a_request_that_waits_for_room_costs_no_prefix_and_counts_one_look_up(model: kvcore.Model) -> None:
    """What is kept stays while its going would not be enough; then it goes or is used."""
    per_token = 2 * 2 * 2 * 64 * 4
    engine = new_engine(model, kv_cache_budget=525 * per_token)
    (kept,) = submit(engine, request("kept", ids(60), 2))
    finish(engine, [kept])
    running, large = submit(engine, request("a", ids(150, 1), 100), request("b", (*ids(60), *ids(200, 2)), 30))
    for _ in range(20):
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.prefixes) == (1, 1, 3)
    assert (stats.prefix_hits, stats.prefix_misses) == (0, 2)
    finish(engine, [running, large])
    assert large.last.usage.cached_tokens >= 32
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prefix_misses) == (1, 2)


def test_an_id_may_be_used_again_after_its_end(model: kvcore.Model) -> None:
    """Though the first one of that name was cancelled in the queue."""
    engine = new_engine(model, max_batch=1)
    blocker, waiting = submit(engine, request("x", ids(8, 1), 30), request("a", ids(8), 5))
    engine.step()
    with pytest.raises(InputError, match="request id 'a' is in use"):
        submit(engine, request("a", ids(8), 5))
    engine.cancel("a")
    engine.step()
    (again,) = submit(engine, request("a", ids(8), 5))
    finish(engine, [blocker, again])
    assert (waiting.reason, again.reason) == ("cancelled", "length")
    assert engine.stats().waiting == 0
