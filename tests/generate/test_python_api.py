"""kvcore as a library: the names it exposes, their types, and the example in its docstring."""

from __future__ import annotations

import inspect
import io
import textwrap
import typing
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.backends import Backend
from kvcore.errors import InputError, KvcoreError, UnsupportedError
from kvcore.registry import Registry

PUBLIC = {
    *("load", "Model", "Generation", "GenerationStats", "SamplingParams", "Cache", "CacheStats", "Mode", "MODES"),
    *("WindowPolicy", "Registry", "KernelQuery", "Decision", "__version__"),
    *("KvcoreError", "InputError", "ModelError", "UnsupportedError", "BackendError", "CapacityError"),
}
MODES = ("fp16", "int8", "int8-turbo4", "turbo4-asym", "turbo4-delegated", "turbo3-asym", "turbo4")


# Names and types


def test_the_public_names_are_exposed() -> None:
    assert set(kvcore.__all__) == PUBLIC
    assert set(dir(kvcore)) >= PUBLIC
    assert all(getattr(kvcore, name) is not None for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvcore' has no attribute 'generate_fast'"):
        kvcore.generate_fast  # noqa: B018


def test_a_public_name_is_the_object_of_its_home() -> None:
    from kvcore.cache import Cache
    from kvcore.loading import load

    assert kvcore.load is load
    assert kvcore.Cache is Cache
    assert kvcore.Registry is Registry


def test_every_error_is_a_KvcoreError_with_an_exit_code() -> None:
    errors = [getattr(kvcore, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, KvcoreError) for error in errors)
    assert {error.exit_code for error in errors if issubclass(error, InputError)} == {2}
    assert KvcoreError.exit_code == 1


TYPED = [
    kvcore.load,
    *(kvcore.Model.generate, kvcore.Model.new_cache, kvcore.Model.forward, kvcore.Model.encode),
    *(kvcore.Generation.__init__, kvcore.Generation.__iter__, kvcore.Generation.cancel),
    *(kvcore.Cache.trim, kvcore.Cache.commit, kvcore.Cache.stats, kvcore.Cache.dense),
]


@pytest.mark.parametrize("function", TYPED, ids=lambda function: function.__qualname__)
def test_public_functions_are_fully_annotated(function: typing.Any) -> None:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters)
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


def test_iterating_a_generation_is_declared_to_give_text() -> None:
    assert typing.get_type_hints(kvcore.Generation.__iter__)["return"] == Iterator[str]
    assert typing.get_type_hints(kvcore.load)["return"] is kvcore.Model


# Loading


def test_load_takes_a_path_or_its_text(tiny_folder: Path) -> None:
    for model in (kvcore.load(tiny_folder, backend="reference"), kvcore.load(str(tiny_folder), backend="reference")):
        assert model.config.vocab_size == 256
        assert model.name == tiny_folder.name
        assert model.mode.name == "fp16"


@pytest.mark.parametrize("mode", MODES)
def test_load_takes_a_mode_by_name_or_as_a_value(tiny_folder: Path, mode: str) -> None:
    by_name = kvcore.load(tiny_folder, backend="reference", kv_cache_mode=mode)
    by_value = kvcore.load(tiny_folder, backend="reference", kv_cache_mode=kvcore.MODES[mode])
    assert by_name.mode is by_value.mode is kvcore.MODES[mode]
    assert by_name.new_cache().mode.name == mode
    assert set(kvcore.MODES) == set(MODES)


def test_an_alias_that_is_not_quite_the_mode_leaves_a_notice(tiny_folder: Path) -> None:
    """q8_0 has a scale per 32 values; int8 is what it gets, and that is said."""
    model = kvcore.load(tiny_folder, backend="reference", kv_cache_mode="q8_0")
    assert model.mode.name == "int8"
    assert any("q8_0 is taken as int8" in notice for notice in model.notices)
    assert not any("q8_0" in n for n in kvcore.load(tiny_folder, backend="reference", kv_cache_mode="i8").notices)


def test_progress_counts_layers(tiny_folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    kvcore.load(tiny_folder, backend="reference", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_mode": "int9"}, "unknown KV cache mode 'int9': choose one of fp16, int8"),
        ({"backend": "tpu"}, "unknown backend 'tpu': choose one of auto, reference, metal, cuda"),
        ({"dtype": "float64"}, "unknown dtype 'float64': choose one of auto, float32"),
        ({"kernels": "fused"}, "no fused kernel"),
    ],
    ids=["mode", "backend", "dtype", "kernels"],
)
def test_settings_that_cannot_be_met_are_refused_before_weights_are_read(
    tiny_folder: Path, settings: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("kvcore.loading.load_params", read)
    with pytest.raises(InputError) as refused:
        kvcore.load(tiny_folder, **{"backend": "reference", **settings})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_registry_s_decision_says_which_kernels_run(tiny_model: kvcore.Model) -> None:
    decisions = tiny_model.new_cache("turbo4").decisions
    assert [type(decision) for decision in decisions] == [kvcore.Decision] * 2
    assert {decision.query.op: decision.kernel for decision in decisions} == {
        "encode": "encode-graph",
        "attend": "attend-graph",
    }
    assert all(isinstance(decision.query, kvcore.KernelQuery) for decision in decisions)


def test_fused_kernels_on_the_reference_are_refused_with_reasons(tiny_folder: Path) -> None:
    with pytest.raises(UnsupportedError) as refused:
        kvcore.load(tiny_folder, backend="reference", kernels="fused", kv_cache_mode="turbo4")
    assert "--kernels" in str(refused.value)


# Generating


def test_iteration_yields_text(tiny_model: kvcore.Model) -> None:
    generation = tiny_model.generate("hello", kvcore.SamplingParams(max_tokens=8))
    pieces = list(generation)
    assert all(type(piece) is str and piece for piece in pieces)
    assert "".join(pieces) == generation.text
    assert isinstance(generation.stats, kvcore.GenerationStats)
    assert isinstance(generation.cache.stats(), kvcore.CacheStats)


def test_a_text_prompt_goes_through_the_chat_template_unless_raw(tiny_model: kvcore.Model) -> None:
    encode = tiny_model.tokenizer.encode
    assert tiny_model.encode("hi") == encode("<s>[user]hi<end>[assistant]")
    assert tiny_model.encode([{"role": "user", "content": "hi"}]) == tiny_model.encode("hi")
    assert tiny_model.encode("hi", raw=True) == encode("hi")
    assert tiny_model.encode([1, 5, 6]) == [1, 5, 6]
    (one, *_) = ids = tiny_model.encode(np.array([1, 5, 6]))
    assert (ids, type(one)) == ([1, 5, 6], int)
    with pytest.raises(TypeError):
        tiny_model.encode([1.5])
    assert tiny_model.generate("hi", raw=True).prompt == tuple(encode("hi"))


def test_forward_gives_logits_on_the_host(backend: Backend, tiny_folder: Path) -> None:
    device = None if backend.name == "metal" else backend.device
    model = kvcore.load(tiny_folder, backend=backend.name, device=device, dtype="float32")
    cache = model.new_cache()
    ids = np.array([[5, 6, 7]])
    every, last = model.forward(ids, model.new_cache(), all_logits=True), model.forward(ids, cache)
    assert type(every) is type(last) is np.ndarray
    assert (every.shape, last.shape, every.dtype) == ((1, 3, 256), (1, 1, 256), np.float32)
    np.testing.assert_allclose(every[:, -1:], last, rtol=0, atol=1e-5)
    assert cache.offset == 3


def test_a_batch_of_equal_lengths_is_its_rows(tiny_model: kvcore.Model) -> None:
    ids = np.array([[5, 6, 7], [9, 9, 9]])
    both = tiny_model.forward(ids, tiny_model.new_cache(batch=2), all_logits=True)
    for row in range(2):
        alone = tiny_model.forward(ids[row : row + 1], tiny_model.new_cache(), all_logits=True)
        np.testing.assert_allclose(both[row], alone[0], rtol=0, atol=1e-5)


@pytest.mark.smollm2
@pytest.mark.xdist_group("smollm2")
def test_the_example_in_the_docstring_runs_as_it_stands() -> None:
    from kvcore.weights import resolve_model

    try:
        resolve_model(None)
    except kvcore.ModelError as error:
        pytest.skip(str(error))
    start = kvcore.__doc__.index("    import kvcore")
    example = textwrap.dedent(kvcore.__doc__[start : kvcore.__doc__.index("Names are imported")])
    assert 'kv_cache_mode="turbo4"' in example
    out = io.StringIO()
    with redirect_stdout(out):
        exec(example, {})
    assert "river" in out.getvalue().lower()
