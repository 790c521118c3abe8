"""kvcore's caches inside mlx-lm, on tiny random models."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as mlx_cache
from mlx_models import FAMILIES, SMALL, greedy, ids, logits, tiny

from kvcore.errors import InputError, UnsupportedError
from kvcore.integrations.mlx_lm import KvcoreBatchCache, KvcoreCache, library, make_prompt_cache, patched
from kvcore.modes import MODES

pytestmark = pytest.mark.xdist_group("mlx-lm")

ERROR = {"int8": 6e-5, "int8-turbo4": 0.0105, "turbo4": 0.0105, "turbo4-asym": 0.0105, "turbo4-delegated": 0.0105}
ERROR["turbo3-asym"] = 0.038  # relative squared error of a folded row, the worse of K and V


def cache(model: Any, mode: str) -> list[Any]:
    return make_prompt_cache(model, mode, window=SMALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp16_generates_what_stock_does(family: str) -> None:
    model, prompt = tiny(family), ids()
    want = greedy(model, prompt)
    with patched(model):
        assert greedy(model, prompt) == want  # no kvcore cache: mlx-lm's own
        assert greedy(model, prompt, prompt_cache=cache(model, "fp16")) == want
    with patched(model, "fp16", window=SMALL):
        assert greedy(model, prompt) == want
    assert greedy(model, prompt) == want


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.quantized])
def test_each_mode_is_within_its_codecs_error(family: str, mode: str) -> None:
    model, prompt = tiny(family), ids(150)
    raw, folded = cache(model, "fp16"), cache(model, mode)
    with patched(model):
        for part in (prompt[:100], prompt[100:101], prompt[101:]):
            want, got = logits(model, part, raw), logits(model, part, folded)
    index = next(i for i, layer in enumerate(folded) if isinstance(layer, KvcoreCache))
    rows = folded[index].rows
    rows.commit()
    assert rows.rows_folded == 96
    if index == 0:  # which has the same inputs, whatever attention reads
        for mine, exact in zip(rows.dense(), raw[0].rows.dense(), strict=True):
            mine, exact = (np.array(each[:, :, 4:96]) for each in (mine, exact))
            assert ((mine - exact) ** 2).sum() / (exact**2).sum() <= ERROR[mode]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.2


def test_sliding_layers_keep_mlx_lms_cache() -> None:
    model = tiny("gemma3")
    kinds = [type(layer).__name__ for layer in make_prompt_cache(model, "turbo4")]
    assert kinds == ["RotatingKVCache", "KvcoreCache"]


@pytest.mark.parametrize("mode", list(MODES))
def test_B16_a_saved_cache_goes_on_as_the_one_in_memory(mode: str, tmp_path: Path) -> None:
    model, prompt = tiny(), ids(150)
    held = cache(model, mode)
    with patched(model):
        logits(model, prompt, held)
        logits(model, [7], held)
        mlx_cache.save_prompt_cache(str(tmp_path / "c.safetensors"), held)
        restored = mlx_cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
        assert [layer.offset for layer in restored] == [151, 151]
        assert np.array_equal(logits(model, ids(40, 1), restored), logits(model, ids(40, 1), held))


def test_B17_L7_an_empty_or_short_cache_is_saved_too(tmp_path: Path) -> None:
    model = tiny()
    with patched(model):
        for tokens in ([], [5, 6, 7])[not library.ONE_STATE :]:  # before 0.32 mlx-lm saves no empty one
            held = cache(model, "turbo4")
            if tokens:
                logits(model, tokens, held)
            mlx_cache.save_prompt_cache(str(tmp_path / "c.safetensors"), held)
            restored = mlx_cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
            assert np.array_equal(logits(model, [9, 8], restored), logits(model, [9, 8], held))


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_trim_comes_before_folding(mode: str) -> None:
    model, prompt = tiny(), ids(100)
    held, fresh = cache(model, mode), cache(model, mode)
    with patched(model):
        logits(model, prompt[:80], held)
        logits(model, prompt[80:], held)
        assert mlx_cache.trim_prompt_cache(held, 15) == 15
        logits(model, prompt[:80], fresh)
        logits(model, prompt[80:85], fresh)
        np.testing.assert_allclose(logits(model, [7, 8], held), logits(model, [7, 8], fresh), rtol=1e-3, atol=1e-3)
    assert mlx_cache.trim_prompt_cache(held, 1000) == 87
    assert held[0].empty()


@pytest.mark.parametrize("mode", list(MODES))
def test_L11_a_batch_of_unequal_prompts_is_each_alone(mode: str) -> None:
    """Lengths on both sides of a fold, one sequence with a history and two without."""
    model = tiny()
    prompts = [ids(3, 1), ids(40, 2), ids(300, 3)]
    with patched(model, mode, window=SMALL):
        alone = [greedy(model, prompt, 12) for prompt in prompts]
        warm = make_prompt_cache(model, mode, window=SMALL)
        logits(model, prompts[2][:100], warm)
        generator = BatchGenerator(model, max_tokens=12, prefill_step_size=64)
        uids = generator.insert(
            [prompts[0], prompts[1], prompts[2][100:]],
            [12] * 3,
            caches=[cache(model, mode), cache(model, mode), warm],
        )
        got: dict[int, list[int]] = {uid: [] for uid in uids}
        while any(len(tokens) < 12 for tokens in got.values()):
            for each in generator.next()[1]:
                got[each.uid].append(each.token)
    if mode == "fp16":
        assert [got[uid] for uid in uids] == alone
    assert [len(got[uid]) for uid in uids] == [12, 12, 12]


def test_B21_merge_with_an_empty_one_filter_extend_and_extract() -> None:
    model = tiny()
    with patched(model):
        singles = [cache(model, "turbo4") for _ in range(3)]
        for i, each in enumerate(singles):
            if i:  # the first stays empty
                logits(model, ids(70 * i, i), each)
        merged = [singles[0][layer].merge([each[layer] for each in singles]) for layer in range(2)]
        assert isinstance(merged[0], KvcoreBatchCache)
        assert merged[0].offset.tolist() == [0, 70, 140]
        assert merged[0].nbytes == sum(each[0].nbytes for each in singles)
        step = mx.array([[7], [8], [9]])
        together = np.array(model(step, cache=merged)[:, 0])
        alone = [logits(model, [7 + i], copy.deepcopy(each))[0] for i, each in enumerate(singles)]
        np.testing.assert_allclose(together, np.stack(alone), rtol=1e-3, atol=1e-4)
        for layer in merged:
            layer.filter([2, 0])
        assert merged[0].offset.tolist() == [141, 1]
        for layer, extra in zip(merged, singles[1], strict=True):
            layer.extend(extra.merge([extra]))
        assert merged[0].offset.tolist() == [141, 1, 70]
        taken = merged[0].extract(0)
        assert (taken.offset, singles[2][0].offset) == (141, 140)
        assert merged[0].trim(1) == 1
        assert (merged[0].offset.tolist(), taken.offset) == ([140, 0, 69], 141)


def test_L10_an_offset_that_was_read_does_not_change() -> None:
    model = tiny()
    with patched(model):
        batch = KvcoreBatchCache.merge([cache(model, "turbo4")[0] for _ in range(2)])
        before, single = batch.offset, cache(model, "turbo4")
        kept = single[0].offset
        logits(model, ids(5), single)
        rows = mx.zeros((2, 2, 3, 64))
        batch.update_and_fetch(rows, rows)
        batch.attend(mx.zeros((2, 4, 3, 64)), 0.125, None)
    assert (before.tolist(), kept) == ([0, 0], 0)
    assert (batch.offset.tolist(), single[0].offset) == ([3, 3], 5)


def test_B38_a_copy_of_a_prompts_cache_shares_its_rows() -> None:
    model, prompt = tiny(), ids(150)
    with patched(model):
        held = cache(model, "turbo4")
        logits(model, prompt, held)
        copied = copy.deepcopy(held)
        for old, new in zip(held, copied, strict=True):
            assert all(a is b for a, b in zip(old.rows.arrays(), new.rows.arrays(), strict=True))
        want = logits(model, [7], copied)
        assert np.array_equal(logits(model, [7], held), want)


def test_the_servers_prompt_cache_takes_them() -> None:
    model, prompt = tiny(), ids(150)
    with patched(model, "turbo4", window=SMALL):
        made = mlx_cache.make_prompt_cache(model)
        assert isinstance(made[0], KvcoreCache)
        logits(model, prompt, made)
        store = mlx_cache.LRUPromptCache(max_size=4)
        store.insert_cache("model", prompt, made)
        assert store.nbytes == sum(layer.nbytes for layer in made) > 0
        shared, rest = store.fetch_nearest_cache("model", [*prompt[:120], 9, 9])
        assert (shared[0].offset, rest) == (120, [9, 9])
        assert made[0].offset == 150
        logits(model, rest, shared)
        assert (made[0].offset, shared[0].offset) == (150, 122)


def test_speculative_decoding_of_fp16_is_stocks() -> None:
    from mlx_lm.generate import speculative_generate_step

    model, draft, prompt = tiny(), tiny(), ids()
    want = greedy(model, prompt, 20)
    with patched(model):
        held = [*cache(model, "fp16"), *cache(draft, "fp16")]
        steps = speculative_generate_step(mx.array(prompt), model, draft, max_tokens=20, prompt_cache=held)
        assert [int(token) for token, *_ in steps] == want


def test_delegated_folds_at_the_first_single_token() -> None:
    model = tiny()
    held = cache(model, "turbo4-delegated")
    with patched(model):
        logits(model, ids(150), held)
        logits(model, ids(50), held)
        assert held[0].rows.rows_folded == 0
        logits(model, [5], held)
    assert held[0].rows.rows_folded == 160


def test_no_attribute_reroutes_mlx_lms_attention() -> None:
    model = tiny()
    assert not hasattr(cache(model, "turbo4")[0], "bits")
    assert not hasattr(cache(model, "turbo4")[0], "to_quantized")


# What is patched, and errors


def test_only_the_models_module_changes_and_only_inside() -> None:
    model = tiny()
    module, base = sys.modules[type(model).__module__], sys.modules["mlx_lm.models.base"]
    before = module.scaled_dot_product_attention, base.scaled_dot_product_attention
    with patched(model, "int8"):
        assert module.scaled_dot_product_attention is not before[0]
        assert base.scaled_dot_product_attention is before[1]
        assert "make_cache" in vars(model)
    assert "make_cache" not in vars(model)
    with pytest.raises(RuntimeError), patched(model, "int8"):
        raise RuntimeError
    assert (module.scaled_dot_product_attention, base.scaled_dot_product_attention) == before
    assert "make_cache" not in vars(model)


def test_outside_of_the_block_a_cache_is_refused() -> None:
    model = tiny()
    with pytest.raises(InputError, match="outside of"):
        logits(model, [1, 2], cache(model, "int8"))


def test_other_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    with pytest.raises(InputError, match="unknown KV cache mode"):
        make_prompt_cache(model, "int5")
    with pytest.raises(UnsupportedError, match="fused"), patched(model, "int8", kernels="fused"):
        logits(model, [1, 2], mlx_cache.make_prompt_cache(model))
    monkeypatch.delattr(sys.modules[type(model).__module__], "scaled_dot_product_attention")
    with pytest.raises(UnsupportedError, match="does not call"), patched(model):
        pass


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_a_version_outside_the_range_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.integrations import versions

    monkeypatch.setattr(versions.importlib.metadata, "version", lambda _name: version)
    with pytest.raises(UnsupportedError, match=r"mlx-lm .*: kvcore works inside versions from") as error:
        versions.require("mlx-lm", library.LEAST, library.BELOW, "mlx-lm")
    assert "\n" not in str(error.value)
