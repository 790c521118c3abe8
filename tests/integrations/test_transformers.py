"""KVCache inside transformers, on tiny random models of five families."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import transformers
from hf_models import BASE, FAMILIES, SLIDING, SMALL, cache, generate, ids, logits, padded, tiny

from kvcore.errors import InputError, UnsupportedError
from kvcore.integrations.transformers import KVCache, cache_argument, library
from kvcore.integrations.transformers import attention as kv_attention
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

pytestmark = pytest.mark.xdist_group("transformers")

QUANTIZED = [name for name, mode in MODES.items() if mode.quantized]
ERROR = {"int8": 6e-5, "int8-turbo4": 0.0105, "turbo4": 0.0105, "turbo4-asym": 0.0105, "turbo4-delegated": 0.0105}
ERROR["turbo3-asym"] = 0.038  # relative squared error of a folded row, the worse of K and V
STEPS = (70, 1, 29, 60, *[1] * 8)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_fp16_generates_what_stock_does(family: str) -> None:
    tokens = ids(2)
    want = generate(tiny(family, "sdpa"), tokens)
    model = tiny(family)
    assert torch.equal(generate(model, tokens), want)  # no kvcore cache: transformers' own
    assert torch.equal(generate(model, tokens, cache(model, "fp16")), want)


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_left_padding_changes_nothing(family: str, mode: str) -> None:
    tokens, mask = padded((60, 93, 100))
    model = tiny(family)
    want = generate(tiny(family, "sdpa"), tokens, attention_mask=mask, output_logits=True, return_dict_in_generate=True)
    got = generate(
        model, tokens, cache(model, mode), attention_mask=mask, output_logits=True, return_dict_in_generate=True
    )
    if mode == "fp16":
        assert torch.equal(got.sequences, want.sequences)
    # The second token is the first one that reads folded rows.
    assert torch.equal(got.sequences[:, 100], want.sequences[:, 100])
    error = (got.logits[1] - want.logits[1]).norm() / want.logits[1].norm()
    assert error < (1e-4 if mode == "fp16" else 0.05)


@pytest.mark.parametrize("mode", QUANTIZED)
def test_each_mode_is_within_its_codecs_error(family: str, mode: str) -> None:
    model, tokens = tiny(family), ids(1, sum(STEPS))
    raw, folded = cache(model, "fp16"), cache(model, mode)
    want, got = (logits(model, tokens, kv, STEPS) for kv in (raw, folded))
    stats = folded.stats()
    assert stats.tokens == sum(STEPS)
    assert stats.rows_folded > 0
    assert stats.kv_bytes < stats.kv_bytes_raw
    # The rows of the first layer do not depend on what attention read: they differ by the codec alone.
    first = folded.store._rows[0]
    for mine, exact in zip(first.dense(), raw.store._rows[0].dense(), strict=True):
        n = min(mine.shape[2], exact.shape[2])  # a sliding layer has forgotten some
        mine, exact = (rows[:, :, -n:][:, :, : n - first.rows_tail] for rows in (mine, exact))
        assert ((mine - exact) ** 2).sum() / (exact**2).sum() <= ERROR[mode]
    assert (got - want).norm() / want.norm() < 0.35


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_chunks_agree_with_one_forward(family: str, mode: str) -> None:
    """With no row folded before the end, pieces give the logits of the whole, the mask of the window included."""
    model, tokens = tiny(family), ids(2, 120)
    whole = logits(tiny(family, "sdpa"), tokens, transformers.DynamicCache(config=model.config), (120,))
    kv = cache(model, mode, window=WindowPolicy(recent_tokens=128, page_size=32))
    torch.testing.assert_close(logits(model, tokens, kv, (50, 7, 1, 62)), whole, rtol=1e-3, atol=1e-3)


def test_sliding_layers_forget() -> None:
    model = tiny("mistral")
    kv = cache(model, "turbo4")
    logits(model, ids(1, 600), kv, (200, *[25] * 15, *[1] * 25))
    held = kv.store._rows[0].tokens
    assert kv.get_seq_length() == 600
    assert SLIDING <= held <= SLIDING + 4 * SMALL.page_size
    kv.crop(-8)
    assert kv.get_seq_length() == 592
    with pytest.raises(UnsupportedError, match="crop"):
        kv.crop(-200)


# Beams, crop, copies


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_of_fp16_are_stocks(family: str) -> None:
    tokens, mask = padded((60, 100))
    want = generate(tiny(family, "sdpa"), tokens, attention_mask=mask, num_beams=3, max_new_tokens=20)
    model = tiny(family)
    assert torch.equal(
        generate(model, tokens, cache(model, "fp16"), attention_mask=mask, num_beams=3, max_new_tokens=20), want
    )


@pytest.mark.parametrize("mode", list(MODES))
def test_beams_run(mode: str) -> None:
    model, tokens = tiny("llama"), ids(2)
    kv = cache(model, mode)
    assert generate(model, tokens, kv, num_beams=2, max_new_tokens=8).shape == (2, 108)
    assert (kv.stats().rows_folded > 0) == (mode != "fp16")


@pytest.mark.parametrize("mode", list(MODES))
def test_B104_reorder_select_and_repeat_move_all_regions_together(mode: str) -> None:
    """Codes, scales, sinks and tail: then the sequences go on as they would have alone."""
    model, tokens, more = tiny("qwen2"), ids(3, 300), ids(3, 50, seed=1)
    kv = cache(model, mode)
    logits(model, tokens, kv, (299, 1))
    for move, order in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        plain, moved = copy.deepcopy(kv), copy.deepcopy(kv)
        for layer in (0, 1):
            before = kv.store._rows[layer].dense()
            move(moved)
            for old, new in zip(before, moved.store._rows[layer].dense(), strict=True):
                torch.testing.assert_close(new, old[order], rtol=0, atol=0)
            moved = copy.deepcopy(kv)
        move(moved)
        want = logits(model, more, plain, (50,))[order]
        torch.testing.assert_close(logits(model, more[order], moved, (50,)), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("count", [1, 30, 130])
def test_crop_then_go_on(mode: str, count: int) -> None:
    """A crop before the next step forgets rows before they fold: the cache is as if they had never been."""
    model, tokens = tiny("llama"), ids(1, 260)
    kv, fresh = cache(model, mode), cache(model, mode)
    logits(model, tokens, kv, (200, 60))
    kv.crop(-count)
    assert kv.get_seq_length() == 260 - count
    logits(model, tokens[:, : 260 - count], fresh, (200, 60 - count) if count < 60 else (260 - count,))
    more = ids(1, 20, seed=3)
    got, want = (logits(model, more, each, (19, 1)) for each in (kv, fresh))
    tolerance = 1e-3 if count < 60 or mode in ("fp16", "turbo4-delegated") else 1.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_assisted_decoding_of_fp16_is_stocks() -> None:
    tokens = ids(1)
    want = generate(tiny("llama", "sdpa"), tokens)
    model = tiny("llama")
    assert torch.equal(generate(model, tokens, cache(model, "fp16"), prompt_lookup_num_tokens=4), want)


def test_assisted_decoding_folds_accepted_rows_only() -> None:
    model, tokens = tiny("llama"), ids(1)
    kv = cache(model, "turbo4")
    out = generate(model, tokens, kv, prompt_lookup_num_tokens=4)
    assert out.shape == (1, 140)
    assert kv.get_seq_length() == 139
    assert kv.stats().rows_folded == 96


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_a_copy_of_a_prompts_cache_serves_two_continuations(mode: str) -> None:
    model, tokens = tiny("qwen3"), ids(1, 200)
    kv = cache(model, mode)
    logits(model, tokens, kv, (200,))
    first, second = copy.deepcopy(kv), copy.deepcopy(kv)
    one = logits(model, ids(1, 40, seed=1), first, (40,))
    logits(model, ids(1, 90, seed=2), second, (90,))
    assert kv.get_seq_length() == 200
    assert torch.equal(logits(model, ids(1, 40, seed=1), kv, (40,)), one)


def test_delegated_folds_at_the_first_single_token() -> None:
    model = tiny("llama")
    kv = cache(model, "turbo4-delegated")
    logits(model, ids(1, 200), kv, (150, 50))
    assert kv.stats().rows_folded == 0
    logits(model, ids(1, 1), kv, (1,))
    assert kv.stats().rows_folded == 160


def test_reset_empties_for_another_batch() -> None:
    model = tiny("llama")
    kv = cache(model, "int8")
    logits(model, ids(2), kv, (100,))
    kv.reset()
    assert kv.get_seq_length() == 0
    assert generate(model, ids(3), kv).shape == (3, 140)


def test_describe_names_mode_storage_and_kernels() -> None:
    model = tiny("llama")
    kv = cache(model, "k8v4")
    assert kv.describe()["storage"] is None
    generate(model, ids(1), kv)
    told = kv.describe()
    assert (told["mode"], told["storage"]) == ("int8-turbo4", "contiguous")
    assert {each["kernel"] for each in told["kernels"]} == {"encode-graph", "attend-graph"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_keep_their_dtype(dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)
    kv = cache(model, "turbo4")
    assert logits(model, ids(1, 200), kv, (199, 1)).dtype == dtype
    assert kv.store._rows[0].dtype == str(dtype).removeprefix("torch.")


# Masks


def test_without_the_mask_function_a_padded_batch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that the registration matters: it fails to be equal where it is left out."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    tokens, mask = padded((60, 100))
    model = tiny("llama")
    want = generate(model, tokens, cache(model, "fp16"), attention_mask=mask)
    monkeypatch.delitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "kvcore")
    assert not torch.equal(generate(model, tokens, cache(model, "fp16"), attention_mask=mask), want)


def test_a_mask_that_only_says_causal_is_marked() -> None:
    base = {"batch_size": 1, "q_length": 4, "kv_length": 10, "q_offset": 6, "kv_offset": 0}
    config = transformers.MistralConfig(sliding_window=5)
    marked = [
        ({}, True),
        ({"attention_mask": torch.ones(1, 10, dtype=torch.bool)}, True),
        ({"attention_mask": torch.arange(10)[None] > 0}, False),
        ({"local_size": 5, "config": config}, True),
        ({"local_size": 6, "config": config}, False),
        ({"allow_is_causal_skip": False}, False),
        ({"kv_length": 12}, False),
    ]
    for more, plain in marked:
        assert getattr(kv_attention.make_mask(**{**base, **more}), "_kvcore_plain", False) == plain, more


# Errors


def test_another_attention_implementation_is_refused() -> None:
    model = tiny("llama", "sdpa")
    with pytest.raises(InputError, match="attn_implementation 'sdpa'"):
        generate(model, ids(1), cache(model, "int8"))


def test_a_model_that_changes_keys_on_the_way_is_refused() -> None:
    model = tiny("llama")
    kv = cache(model, "int8")
    k = torch.zeros(1, 2, 4, 32)
    kv.layers[0].update(k, k)
    with pytest.raises(InputError, match="never reached"):
        kv.layers[0].update(k, k)


@pytest.mark.parametrize(
    ("config", "model", "what"),
    [
        (lambda base: transformers.Gemma2Config(head_dim=32, **base), "Gemma2ForCausalLM", "soft-capped"),
        (
            lambda base: transformers.GptOssConfig(**{**base, "intermediate_size": 32}, num_local_experts=4),
            "GptOssForCausalLM",
            "learned attention sinks",
        ),
    ],
)
def test_attention_of_another_kind_is_refused(config: object, model: str, what: str) -> None:
    made = getattr(transformers, model)(config(BASE)).eval()
    made.set_attn_implementation("kvcore")
    with pytest.raises(UnsupportedError, match=what):
        generate(made, ids(1), cache(made, "int8"))


def test_other_errors_are_one_line() -> None:
    config = tiny("llama").config
    for make, words in (
        (lambda: KVCache(config, "int5"), "unknown KV cache mode"),
        (lambda: KVCache(transformers.T5Config()), "encoder-decoder"),
        (lambda: KVCache(config, "int8").stats(), "empty"),
    ):
        with pytest.raises(InputError, match=words) as error:
            make()
        assert "\n" not in str(error.value)
    model = tiny("llama")
    with pytest.raises(UnsupportedError, match="fused"):
        generate(model, ids(1), cache(model, "int8", kernels="fused"))


@pytest.mark.parametrize("version", ["5.16.1", "6.0.0", "4.57.6"])
def test_a_version_outside_the_range_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.integrations import versions

    monkeypatch.setattr(versions.importlib.metadata, "version", lambda _name: version)
    with pytest.raises(UnsupportedError, match=r"transformers .*: kvcore works inside versions from 5.17"):
        versions.require("transformers", library.LEAST, library.BELOW, "transformers")


def test_the_argument_has_the_versions_name() -> None:
    assert cache_argument() == ("cache" if library.VERSION >= (5, 24) else "past_key_values")
    assert library.rows_to_remove(-3, 10) == 3
    assert library.rows_to_remove(torch.tensor(-3), 10) == 3
