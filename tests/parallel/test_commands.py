"""Rank 0's commands: as they were sent, and caches on the other ranks that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

import kvcore
from kvcore.attention import default_registry, make_cache
from kvcore.backends import load_backend
from kvcore.cache import CacheSpec
from kvcore.communicator import Communicator
from kvcore.engine import Engine, EngineConfig, Request
from kvcore.errors import KvcoreError, UnsupportedError
from kvcore.layout import Cap, WindowPolicy
from kvcore.models.llama import forward_ragged, load_params
from kvcore.models.shard import Shard
from kvcore.modes import MODES
from kvcore.parallel import Leader, Worker, follow
from kvcore.parallel.commands import FRAME, Command, receive, send
from kvcore.parallel.leader import spec_to_json
from kvcore.parallel.worker import spec_from_json
from kvcore.weights import open_checkpoint


@pytest.mark.parametrize("count", [0, 1, FRAME - 30, FRAME - 2, FRAME, 5000])
def test_a_command_arrives_as_it_was_sent(count: int) -> None:
    ids = np.random.default_rng(count).integers(0, 2**31 - 1, (1, count)).astype(np.int32)
    sent = Command("step", {"cache": 7, "all_logits": True, "text": "grün" * 3}, ids)

    def run(ranks: Communicator) -> Command | None:
        return send(ranks, sent) if ranks.rank == 0 else receive(ranks)

    for got in on_ranks(3, run)[1:]:
        assert (got.name, got.arguments) == (sent.name, sent.arguments)
        np.testing.assert_array_equal(got.ids, ids)


def test_a_command_without_ids_has_none() -> None:
    _, got = on_ranks(2, lambda r: send(r, Command("end", {})) if r.rank == 0 else receive(r))
    assert (got.name, got.ids) == ("end", None)


@pytest.mark.parametrize("cap", [None, Cap(300, 8)])
def test_a_spec_survives_the_way(cap: Cap | None) -> None:
    spec = CacheSpec(MODES["turbo4-asym"], 2, 4, 2, 64, "bfloat16", WindowPolicy(2, 64, 32, 1), 3, None, 77, cap, "f")
    assert spec_from_json(spec_to_json(spec)) == spec


class Watched:
    """The part of `Ranks` that a leader needs."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.rank, self.size, self.name = inner, inner.rank, inner.size, inner.name
        self.all_sum, self.all_gather, self.close = inner.all_sum, inner.all_gather, inner.close
        self.monitor = Quiet()


class Quiet:
    """A monitor that has nobody to tell."""

    def fail(self, line: str, code: int) -> None:
        self.said = (line, code)


def on_model(path: Path, size: int, lead: Any, mode: str = "turbo4") -> list[Any]:
    """``lead(model)`` on rank 0; the others' caches afterwards."""
    backend, checkpoint = load_backend("reference"), open_checkpoint(path)
    whole = kvcore.load(path, backend="reference", kv_cache_mode=mode, window=WindowPolicy(2, 16, 16))

    def run(ranks: Communicator) -> Any:
        config = Shard(checkpoint.config, ranks.rank, ranks.size).local
        params = load_params(backend, checkpoint, "float32", ranks=ranks)
        model = replace(whole, config=config, params=params, registry=default_registry(backend))
        if ranks.rank == 0:
            leader = Leader(Watched(ranks))  # type: ignore[arg-type]
            found = lead(replace(model, leader=leader))
            leader.close()
            return found
        worker = Worker(
            ranks,
            lambda spec: make_cache(backend, spec),
            lambda ids, cache, every: model.forward(ids, cache, all_logits=every),
            lambda ids, caches, settings: forward_ragged(backend.ops, config, params, ids, caches, **settings),
        )
        follow(ranks, worker)
        return worker.caches

    return on_ranks(size, run)


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 200, (1, count))


def test_caches_of_other_ranks_follow_what_rank_0_does(four_heads: Path) -> None:
    def lead(model: kvcore.Model) -> Any:
        cache = model.new_cache("turbo4-delegated")
        model.forward(ids(60), cache)
        cache.begin_decode()
        cache.begin_decode()
        model.forward(ids(3, 1), cache)
        cache.rewind(50)
        fork = cache.fork()
        model.forward(ids(9, 2), fork)
        cache.drop(20, 4)
        return [(c.number, c.tokens, c.offset, c.stats()) for c in (cache, fork)], (cache, fork)

    (facts, kept), caches = on_model(four_heads, 2, lead)
    assert [number for number, *_ in facts] == sorted(caches)
    for number, tokens, offset, stats in facts:
        assert (caches[number].tokens, caches[number].offset, caches[number].stats()) == (tokens, offset, stats)
    assert facts[0][3].rows_folded > 0
    del kept


def test_a_forgotten_cache_is_freed_with_the_next_command(four_heads: Path) -> None:
    def lead(model: kvcore.Model) -> Any:
        model.forward(ids(4), model.new_cache())
        return model.new_cache()

    kept, caches = on_model(four_heads, 2, lead)
    assert list(caches) == [kept.number]


def test_generation_over_ranks_is_that_of_one_process(four_heads: Path) -> None:
    params = kvcore.SamplingParams(max_tokens=30)
    prompt = ids(50)[0].tolist()
    one = kvcore.load(four_heads, backend="reference", kv_cache_mode="int8", window=WindowPolicy(2, 16, 16))
    alone = one.generate(prompt, params)
    text = "".join(alone)

    def lead(model: kvcore.Model) -> Any:
        generation = model.generate(prompt, params)
        return "".join(generation), generation.token_ids, generation.cache.stats()

    (got, token_ids, stats), _ = on_model(four_heads, 2, lead, "int8")
    assert (got, token_ids) == (text, alone.token_ids)
    assert stats.kv_bytes == alone.cache.stats().kv_bytes // 2


def test_after_an_error_in_a_step_nothing_more_is_sent(four_heads: Path) -> None:
    def lead(model: kvcore.Model) -> Any:
        cache = model.new_cache()
        leader = model.leader
        assert leader is not None
        with (
            pytest.raises(ZeroDivisionError),
            leader.command(Command("call", {"cache": 1, "method": "trim", "arguments": [0]})),
        ):
            raise ZeroDivisionError("here")
        with pytest.raises(KvcoreError, match="out of step since ZeroDivisionError: here"):
            model.forward(ids(3), cache)
        leader._broken = None
        return True

    assert on_model(four_heads, 2, lead)[0] is True


def test_files_and_changes_of_mode_need_one_process(four_heads: Path, tmp_path: Path) -> None:
    def lead(model: kvcore.Model) -> Any:
        cache = model.new_cache()
        with pytest.raises(kvcore.InputError, match="2 ranks share this model"):
            model.save_cache(tmp_path / "x", cache, [])
        with pytest.raises(kvcore.InputError, match="2 ranks share this model"):
            model.load_cache(tmp_path / "x")
        with pytest.raises(kvcore.InputError, match="2 ranks share this model"):
            model.convert_cache(cache, "int8")
        with pytest.raises(UnsupportedError, match="cannot be exported"):
            cache.export()
        return True

    assert on_model(four_heads, 2, lead)[0] is True


def test_an_engine_over_ranks_gives_the_tokens_of_one_process(four_heads: Path) -> None:
    prompts = [ids(40, seed)[0].tolist() for seed in range(3)]
    prompts += [prompts[0] + ids(9, 7)[0].tolist()]

    def serve(model: kvcore.Model) -> Any:
        engine, found = Engine(model, EngineConfig(max_batch=4, prefill_step=32)), {}
        for round in (prompts[:3], prompts[3:]):
            for prompt in round:
                name = str(len(prompt) + len(found))
                found[name] = []
                request = Request(name, tuple(prompt), kvcore.SamplingParams(max_tokens=20), logprobs=0)
                engine.submit(request, lambda out: found[out.request_id].append(out))
            while engine.step():
                pass
        stats = engine.stats()
        engine.stop()
        tokens = [[each.token for out in outs for each in out.tokens] for outs in found.values()]
        return tokens, [outs[-1].finish_reason for outs in found.values()], stats.cached_tokens

    alone = serve(kvcore.load(four_heads, backend="reference", kv_cache_mode="int8", window=WindowPolicy(2, 16, 16)))
    shared, caches = on_model(four_heads, 2, serve, "int8")
    assert shared == alone
    assert alone[2] > 0
    assert len(caches) <= 9  # what has ended is freed with the next command


def test_a_cache_that_fails_on_one_rank_fails_on_all_and_the_others_go_on(four_heads: Path) -> None:
    def lead(model: kvcore.Model) -> Any:
        caches = [model.new_cache("int8") for _ in range(3)]
        model.forward_ragged([ids(20, i) for i in range(3)], caches)
        caches[1].layers[1].step = broken  # type: ignore[method-assign]
        ran = model.forward_ragged([ids(1, i) for i in range(3)], caches)
        assert list(ran.errors) == [1]
        del caches[1].layers[1].step
        again = model.forward_ragged([ids(1, i) for i in range(3)], caches)
        return [cache.tokens for cache in caches], np.asarray(again.logits), caches

    def broken(*_: Any) -> Any:
        raise RuntimeError("here only")

    (tokens, scores, caches), others = on_model(four_heads, 2, lead)
    assert tokens == [22, 21, 22]
    assert [others[cache.number].tokens for cache in caches] == tokens
    whole = kvcore.load(four_heads, backend="reference", window=WindowPolicy(2, 16, 16))
    alone = whole.new_cache("int8")
    for count in (20, 1):
        want = whole.forward(ids(count, 1), alone)
    np.testing.assert_allclose(scores[1], want[0, -1], atol=2e-4)
