"""The engine's decode steps with sampling on the device, against the host's: interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import TORCH_DEVICE, no_attention
from triton_device import DEVICE

import kvcore
from kvcore.backends.cuda import group_decoder
from kvcore.backends.cuda.attention import attend_rows
from kvcore.backends.cuda.device import group_decoder_on
from kvcore.backends.cuda.group_decoder import GroupDecoder, bucket_of
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.engine import Engine, EngineConfig, Output, Request
from kvcore.errors import NOT_FINITE, CapacityError
from kvcore.modes import MODES
from kvcore.registry import Kernel, Registry

RAW_PAGE = 2 * 64 * 128 * 2  # bytes: K and V of one layer and head, float16


def no_attention_rows(q: Any, *_: Any, **__: Any) -> Any:
    return no_attention(q)


def registry(attend: Any) -> Registry:
    return Registry(
        (
            Kernel("attend", "attend", "cuda", "fused", lambda: attend, storage="paged"),
            Kernel("fold-pages", "encode", "cuda", "fused", lambda: Fold.create, storage="paged"),
        )
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    """One layer on pages whatever the device; attention adds nothing."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, layers=1, heads=2, kv_heads=1, eos_token_id=None)
    write_tiny_tokenizer(folder)
    loaded = kvcore.load(folder, backend="cuda", device=TORCH_DEVICE, dtype="float16")
    backend = replace(loaded.backend, make_group_decoder=group_decoder_on(loaded.backend.device))
    return replace(loaded, backend=backend, registry=registry(no_attention_rows))


@pytest.fixture(autouse=True)
def _no_step_fails_unnoticed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "tried alone" not in caplog.text


def on_host(model: kvcore.Model) -> kvcore.Model:
    return replace(model, backend=replace(model.backend, make_group_decoder=None))


def engine_of(model: kvcore.Model, mode: str = "fp16", pages: int = 64, **settings: Any) -> Engine:
    settings = {"max_batch": 8, "prefix_reuse": False} | settings
    return Engine(replace(model, mode=MODES[mode]), EngineConfig(kv_cache_budget=pages * RAW_PAGE, **settings))


def decoder_of(engine: Engine) -> GroupDecoder:
    assert engine._stepper._tokens is not None
    decoder: GroupDecoder = engine._stepper._tokens._decoder
    return decoder


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 256, count).tolist())


def submit(engine: Engine, name: str, count: int, most: int, **settings: Any) -> list[Output]:
    heard: list[Output] = []
    logprobs = settings.pop("logprobs", None)
    params = kvcore.SamplingParams(max_tokens=most, **settings)
    engine.submit(Request(name, ids(count, len(name) + count), params, logprobs=logprobs), heard.append)
    return heard


def run(engine: Engine, *heard: list[Output]) -> list[str]:
    for _ in range(500):
        if all(each and each[-1].finish_reason for each in heard):
            return ["".join(output.text for output in each) for each in heard]
        engine.step()
    raise AssertionError(engine.stats())


# Some go to the host: penalties, many biases, log-probabilities.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 2.0, "seed": 2, "top_k": 100, "top_p": 0.9},
    {"temperature": 1.5, "seed": 3, "min_p": 0.02, "logit_bias": {7: 4.0, 300 - 50: -100.0}},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "logprobs": 2},
    {"logit_bias": dict.fromkeys(range(20), 1.0)},
]


def answers(model: kvcore.Model, mode: str, prompts: list[int], settings: list[dict[str, Any]], most: int) -> list[Any]:
    """Requests that join and leave one after the other."""
    engine, heard = engine_of(model, mode), []
    for i, (count, each) in enumerate(zip(prompts, settings, strict=True)):
        heard.append(submit(engine, f"r{i}", count, most + i % 3, **each))
        engine.step()
    run(engine, *heard)
    return [
        ("".join(o.text for o in each), each[-1].finish_reason, each[-1].usage, [t for o in each for t in o.tokens])
        for each in heard
    ]


def test_any_mix_of_requests_gets_the_host_s_tokens(model: kvcore.Model) -> None:
    prompts = [5, 120, 126, 30, 7, 9, 3]
    want, got = (answers(each, "fp16", prompts, SETTINGS, 6) for each in (on_host(model), model))
    assert got == want


@pytest.mark.parametrize("mode", ["turbo4", *(pytest.param(m, marks=pytest.mark.full) for m in MODES if m != "turbo4")])
def test_tokens_over_a_fold_with_attention(model: kvcore.Model, mode: str) -> None:
    """Three sequences, in a step of four slots; one folds meanwhile."""
    attending = replace(model, registry=registry(attend_rows))
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}, {}]
    want, got = (answers(each, mode, [254, 3, 5], settings, 3) for each in (on_host(attending), attending))
    assert got == want


def test_logits_reach_the_host_only_where_it_asks(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = engine_of(model), []
    read = GroupDecoder.read

    def reading(self: GroupDecoder) -> Any:
        found = read(self)
        rows.append([isinstance(each, int) for each in found])
        return found

    monkeypatch.setattr(GroupDecoder, "read", reading)
    heard = [submit(engine, f"r{i}", 4 + i, 4, **each) for i, each in enumerate(SETTINGS)]
    run(engine, *heard)
    assert rows[-1] == [True, True, True, True, False, False, False]
    assert engine.stats().decoding == ("launched one by one (not on a GPU), sampling on the device" if DEVICE == "cpu"
        else decoder_of(engine).words)  # fmt: skip


def test_logits_that_are_not_finite_end_one_request(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in one row, minus infinity in another, both of which the host would refuse."""
    want = answers(on_host(model), "fp16", [5, 6, 7], [{}] * 3, 8)
    engine = engine_of(model)
    decoder = decoder_of(engine)
    forward = decoder._run
    bad: dict[int, float] = {}

    def poisoned(*args: Any) -> Any:
        logits = forward(*args)
        for row, value in bad.items():
            logits[row, 7] = value
        return logits

    monkeypatch.setattr(decoder, "_run", poisoned)
    decoder.no_graph = "poisoned by a test"
    heard = [submit(engine, f"r{i}", count, 8 + i, temperature=0.0) for i, count in enumerate((5, 6, 7))]
    for _ in range(4):
        engine.step()
    bad |= {0: float("nan"), 2: -float("inf")}
    engine.step()
    bad.clear()
    texts = run(engine, *heard)
    assert [each[-1].finish_reason for each in heard] == ["error", "length", "error"]
    assert {heard[0][-1].error, heard[2][-1].error} == {NOT_FINITE}
    assert texts[1] == want[1][0]


def test_tables_that_widen_keep_every_row(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across a doubling, in the middle of a stream."""
    monkeypatch.setattr(group_decoder, "FIRST_WIDTH", 1)
    want = answers(on_host(model), "fp16", [10, 126, 254], [{}] * 3, 5)
    engine = engine_of(model)
    heard = []
    widths = set()
    for i, count in enumerate((10, 126, 254)):
        heard.append(submit(engine, f"r{i}", count, 5 + i, temperature=0.0))
        engine.step()
        widths.add(decoder_of(engine)._width)
    texts = run(engine, *heard)
    assert texts == [each[0] for each in want]
    assert decoder_of(engine)._width == 4
    assert 1 in widths


def test_two_pools_take_turns_and_idle_slots_name_the_first_page(model: kvcore.Model) -> None:
    """Kernels load from the first page of an idle slot, and the other pool may have fewer."""
    texts = []
    for each in (on_host(model), model):
        engine, heard = engine_of(each, "int8", modes=("fp16",)), []
        for i in range(6):
            params = kvcore.SamplingParams(max_tokens=6 + i)
            heard.append([])
            request = Request(f"r{i}", ids(250 if i < 3 else 5, i), params, mode="fp16" if i % 2 else None)
            engine.submit(request, heard[-1].append)
        texts.append(run(engine, *heard))
    assert texts[0] == texts[1]
    run(engine, submit(engine, "a", 5, 4))
    run(engine, *(submit(engine, f"b{i}", 140, 4) for i in range(3)))
    assert decoder_of(engine)._tables[:, :3].any()
    assert not decoder_of(engine)._tables[:, 3].any()


def test_a_failing_step_is_run_again_one_by_one_with_the_same_draws(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [{"temperature": 1.0, "seed": 1}, {"temperature": 1.5, "seed": 2, "top_p": 0.9}, {}]
    want = answers(on_host(model), "fp16", [5, 6, 7], settings, 6)
    engine = engine_of(model)
    decoder, calls = decoder_of(engine), [0]
    forward = decoder._run

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args)

    monkeypatch.setattr(decoder, "_run", failing)
    decoder.no_graph = "failing in a test"
    heard = []
    for i, (count, each) in enumerate(zip((5, 6, 7), settings, strict=True)):
        heard.append(submit(engine, f"r{i}", count, 6 + i, **each))
        engine.step()
    assert run(engine, *heard) == [each[0] for each in want]
    assert calls[0] > 3
    assert engine.stats().preemptions == 0


def test_a_read_that_fails_runs_all_of_them_again(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [{"temperature": 1.0, "seed": 1}, {}]
    want = answers(on_host(model), "fp16", [5, 6], settings, 6)
    engine = engine_of(model)
    decoder = decoder_of(engine)
    heard = [submit(engine, f"r{i}", 5 + i, 6 + i, **each) for i, each in enumerate(settings)]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:

        def lost() -> Any:
            raise CapacityError("gone")

        patch.setattr(decoder, "read", lost)
        engine.step()
    assert engine.stats().preemptions == 2
    assert run(engine, *heard) == [each[0] for each in want]


class FakeGraph:
    """Stands for a CUDA graph on the CPU: replaying computes again."""

    def __init__(self) -> None:
        self.compute: Any = None

    def replay(self) -> None:
        self.compute()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that are captured, by their bucket, as if on a GPU."""
    captured: list[int] = []

    def capture(self: GroupDecoder, step: Any, bucket: int, mix: Any) -> None:
        step.graph = FakeGraph()
        step.graph.compute = lambda: self._compute(step, bucket, mix)
        captured.append(bucket)

    monkeypatch.setattr(GroupDecoder, "_capture", capture)
    return captured


def captures(model: kvcore.Model) -> Engine:
    engine = engine_of(model)
    decoder_of(engine).no_graph = None
    return engine


def test_a_bucket_is_captured_the_second_time_and_once(model: kvcore.Model, graphs: list[int]) -> None:
    engine = captures(model)
    heard = [submit(engine, f"r{i}", 5 + i, 6) for i in range(3)]
    run(engine, *heard)
    assert graphs == [4]
    heard = [submit(engine, f"r{i}", 9 + i, 6) for i in range(4)]
    run(engine, *heard)
    assert graphs == [4]
    run(engine, submit(engine, "a", 5, 6, temperature=1.0, seed=0))
    assert graphs == [4, 1]


def test_the_graphs_used_least_recently_go(
    model: kvcore.Model, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_decoder, "MAX_GRAPHS", 2)
    engine = captures(model)
    for count in (1, 2, 3, 1, 2):
        run(engine, *(submit(engine, f"r{i}", 5 + i, 4) for i in range(count)))
        assert decoder_of(engine).graphs <= 2
    assert graphs == [1, 2, 4, 1, 2]


def test_a_capture_that_fails_leaves_launches_and_a_reason(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "graph", broken)
    want = answers(on_host(model), "fp16", [5], [{}], 6)
    engine = captures(model)
    assert run(engine, submit(engine, "r0", 5, 6)) == [want[0][0]]
    assert engine.stats().decoding == (
        "launched one by one (capture failed: CUDA error: operation not permitted when stream is capturing), sampling "
        "on the device"
    )


def test_a_backend_that_promises_rows_alone_has_none(model: kvcore.Model) -> None:
    blocked = replace(model, backend=replace(model.backend, row_block=16))
    assert blocked.group_tokens(8) is None
    assert on_host(model).group_tokens(8) is None
    assert engine_of(on_host(model)).stats().decoding == "launched one by one, sampling on the host"


def test_buckets() -> None:
    assert [bucket_of(n) for n in (1, 3, 5, 9, 17, 33, 64, 65, 81)] == [1, 4, 8, 12, 24, 48, 64, 80, 96]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_graphs_give_what_launches_give(model: kvcore.Model) -> None:
    """Over a fold, with joins and leaves; after the first steps nothing is captured anew."""
    attending = replace(model, registry=registry(attend_rows))
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9},
    ]
    texts = []
    for graph in (True, False):
        engine = engine_of(attending, "turbo4")
        if not graph:
            decoder_of(engine).no_graph = "switched off"
        heard = [submit(engine, f"r{i}", 200 + i, 60 + 20 * i, **each) for i, each in enumerate(settings)]
        texts.append(run(engine, *heard))
        assert (decoder_of(engine).captures > 0) is graph
        assert graph is False or decoder_of(engine).no_graph is None
    assert texts[0] == texts[1]
