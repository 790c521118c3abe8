"""Conversion: lossless where it can be, as MLX quantizes where asked, atomic, readable by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny import write_tiny_gguf, write_tiny_llama

from kvcore.errors import InputError, KvcoreError
from kvcore.models.config import RopeConfig
from kvcore.models.rope import rope_inv_freq
from kvcore.weights import AffineWeight, Checkpoint, DenseWeight, open_checkpoint
from kvcore.weights.save import write_hf, write_mlx


def assert_same_weights(left: Checkpoint, right: Checkpoint) -> None:
    assert left.names() == right.names()
    for name in left.names():
        np.testing.assert_array_equal(left.load(name).dequantize(), right.load(name).dequantize(), name)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0", "Q4_1"])
def test_affine_gguf_passes_through_unchanged(tmp_path: Path, qtype: str, tie: bool) -> None:
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype=qtype, tie=tie, attention_bias=True))
    report = write_mlx(source, tmp_path / "out")
    copy = open_checkpoint(tmp_path / "out")
    assert copy.format == "mlx"
    assert copy.config == source.config
    assert_same_weights(source, copy)
    assert report.kept_full == ()
    assert report.files == ("model.safetensors",)
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert report.nbytes == sum(array.nbytes for array in stored.values())
    bits = {"Q8_0": 9, "Q4_0": 5, "Q4_1": 5}[qtype]
    assert bits < report.bits_per_weight < bits + 0.4


@pytest.mark.smollm2
def test_real_model_converts_without_loss(tmp_path: Path, smollm2: Path) -> None:
    source = open_checkpoint(smollm2)
    calls: list[tuple[int, int]] = []
    report = write_mlx(source, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    copy = open_checkpoint(tmp_path / "out")
    assert copy.config == source.config
    assert_same_weights(source, copy)
    assert calls == [(i, 272) for i in range(1, 273)]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert report.parameters == 134_515_008
    assert 5.8 < report.bits_per_weight < 5.9


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (3, 32), (8, 128)])
def test_quantizes_as_mlx_does(tmp_path: Path, dtype: str, bits: int, group_size: int) -> None:
    mx = pytest.importorskip("mlx.core")
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", dtype=dtype))
    write_mlx(source, tmp_path / "out", bits=bits, group_size=group_size)
    copy = open_checkpoint(tmp_path / "out")
    assert copy.config == source.config
    for module in ("model.embed_tokens", "lm_head", "model.layers.1.mlp.down_proj"):
        weight = copy.load(f"{module}.weight")
        assert isinstance(weight, AffineWeight)
        original = mx.array(source.load(f"{module}.weight").dequantize()).astype(getattr(mx, dtype))
        codes, scales, biases = mx.quantize(original, group_size, bits)
        np.testing.assert_array_equal(weight.codes, np.array(codes))
        for mine, theirs in ((weight.scales, scales), (weight.biases, biases)):
            assert mine.dtype.name == dtype
            np.testing.assert_array_equal(mine.astype(np.float32), np.array(theirs.astype(mx.float32)))


def test_B63_modules_that_no_group_divides_are_left_and_named(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", intermediate=96))
    report = write_mlx(source, tmp_path / "out", bits=4, group_size=64)
    named = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))
    assert report.kept_full == named
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 4} | dict.fromkeys(named, False)
    copy = open_checkpoint(tmp_path / "out")
    for module in named:
        np.testing.assert_array_equal(
            copy.load(f"{module}.weight").dequantize(), source.load(f"{module}.weight").dequantize()
        )
    assert write_mlx(source, tmp_path / "g32", bits=4, group_size=32).kept_full == ()


def test_B63_overrides_survive(tmp_path: Path) -> None:
    overrides = {"model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 8}, "lm_head": False}
    folder = write_tiny_llama(
        tmp_path / "m", dtype="float16", quantize={"bits": 4, "group_size": 64, "overrides": overrides}
    )
    source = open_checkpoint(folder)
    write_mlx(source, tmp_path / "out")
    assert_same_weights(source, open_checkpoint(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 4} | overrides


def test_requantizing_an_affine_checkpoint(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="Q8_0"))
    report = write_mlx(source, tmp_path / "out", bits=4)
    weight = open_checkpoint(tmp_path / "out").load("lm_head.weight")
    assert isinstance(weight, AffineWeight)
    assert (weight.bits, weight.group_size) == (4, 64)
    assert 4.5 < report.bits_per_weight < 4.8
    original = source.load("lm_head.weight").dequantize()
    error = np.linalg.norm(weight.dequantize() - original) / np.linalg.norm(original)
    assert 0.01 < error < 0.12


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_plain_safetensors_round_once(tmp_path: Path, dtype: str | None) -> None:
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="Q4_1", tie=True))
    report = write_hf(source, tmp_path / "out", dtype=dtype)
    copy = open_checkpoint(tmp_path / "out")
    assert copy.format == "hf"
    assert copy.config.dtype == (dtype or "float16")
    assert report.bits_per_weight == (32 if dtype == "float32" else 16)
    for name in source.names():
        weight = copy.load(name)
        assert isinstance(weight, DenseWeight)
        expected = source.load(name).dequantize().astype(weight.array.dtype)
        np.testing.assert_array_equal(weight.array, expected, name)


def test_k_quants_are_written_in_the_compute_dtype(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", qtype="Q6_K", hidden=256, intermediate=512)
    source = open_checkpoint(path)
    write_mlx(source, tmp_path / "out")
    weight = open_checkpoint(tmp_path / "out").load("lm_head.weight")
    assert isinstance(weight, DenseWeight)
    assert weight.array.dtype == np.float16
    write_mlx(source, tmp_path / "q4", bits=4)
    assert isinstance(open_checkpoint(tmp_path / "q4").load("lm_head.weight"), AffineWeight)


def test_vectors_change_dtype_only_without_loss(tmp_path: Path) -> None:
    exact = {"model.norm.weight": np.full(128, 1.5, np.float32)}
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="Q8_0", extra_tensors=exact))
    write_mlx(source, tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.norm.weight"].dtype == np.float16
    assert stored["model.layers.0.input_layernorm.weight"].dtype == np.float32


def test_shards_have_an_index(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m"))
    report = write_mlx(source, tmp_path / "out", bits=4, max_shard_bytes=100_000)
    count = len(report.files)
    assert count > 2
    assert report.files[0] == f"model-00001-of-{count:05}.safetensors"
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted(report.files)
    assert all((tmp_path / "out" / file).stat().st_size < 110_000 for file in report.files)
    write_mlx(source, tmp_path / "single", bits=4)
    assert_same_weights(open_checkpoint(tmp_path / "single"), open_checkpoint(tmp_path / "out"))


def test_llama3_rope_of_a_gguf_becomes_config_keys(tmp_path: Path) -> None:
    llama3 = RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)
    factors = rope_inv_freq(RopeConfig("default", 500000.0), 64) / rope_inv_freq(llama3, 64)
    path = write_tiny_gguf(tmp_path / "x.gguf", rope_theta=500000.0, rope_factors=factors)
    write_mlx(open_checkpoint(path), tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config.rope == llama3


def test_token_ids_are_written_to_both_configs(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", eos_token_id=[2, 7]))
    write_hf(source, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 7]}


# The folder


@pytest.mark.parametrize("write", [write_mlx, write_hf])
def test_a_target_that_holds_something_is_refused(tmp_path: Path, write: Any) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", layers=1))
    (tmp_path / "file").touch()
    for target in (tmp_path / "m", tmp_path / "file"):
        with pytest.raises(InputError, match="not an empty folder"):
            write(source, target)
    (tmp_path / "empty").mkdir()
    assert write(source, tmp_path / "empty").files == ("model.safetensors",)


def test_an_impossible_place_is_refused(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", layers=1))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write to"):
        write_hf(source, tmp_path / "file" / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_a_failure_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", layers=1))

    def fail(_folder: Path) -> None:
        raise error

    expected = KvcoreError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if isinstance(error, OSError) else None):
        write_mlx(source, tmp_path / "out", bits=4, extra=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_extra_files_appear_with_the_folder(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", layers=1))
    write_mlx(source, tmp_path / "out", extra=lambda folder: (folder / "tokenizer.json").touch())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 7}, "7 bits"),
        ({"bits": 4, "group_size": 48}, "groups of 48"),
        ({"group_size": 32}, "needs a number of bits"),
    ],
    ids=["bits", "group", "group-only"],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: dict[str, int], words: str) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "m", layers=1))
    with pytest.raises(InputError, match=words):
        write_mlx(source, tmp_path / "out", **settings)
    with pytest.raises(InputError, match="unknown dtype 'int4'"):
        write_hf(source, tmp_path / "out", dtype="int4")


# Other readers


def test_transformers_loads_a_converted_gguf_with_equal_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {"head_dim": 32, "rope_theta": 500000.0, "attention_bias": True}
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="Q8_0", **shape))
    write_hf(source, tmp_path / "out", dtype="float32")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float32
    state = model.state_dict()
    assert set(state) == set(source.names())
    for name, tensor in state.items():
        np.testing.assert_array_equal(tensor.numpy(), source.load(name).dequantize(), name)
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    assert model.config.head_dim == 32


def test_M3_converted_gguf_has_the_original_s_logits(tmp_path: Path) -> None:
    """The permutation of q and k shows in logits only: transformers runs both."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    original = transformers.LlamaForCausalLM.from_pretrained(write_tiny_llama(tmp_path / "m"))
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="F32"))
    write_hf(source, tmp_path / "out", dtype="float32")
    converted = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(48)[None] * 5 % 256
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=0)


def test_mlx_lm_s_conventions(tmp_path: Path) -> None:
    """mlx-lm takes a module as quantized where it has scales, and passes an override to ``nn.quantize``."""
    nn = pytest.importorskip("mlx.nn")
    mx = pytest.importorskip("mlx.core")
    source = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", qtype="Q4_1"))
    write_mlx(source, tmp_path / "out")
    stored = mx.load(str(tmp_path / "out" / "model.safetensors"))
    layer = nn.QuantizedLinear(128, 256, bias=False, group_size=32, bits=4)
    at = "model.layers.0.mlp.up_proj"
    parts = [(part, stored[f"{at}.{part}"]) for part in ("weight", "scales", "biases")]
    layer.load_weights(parts)
    inputs = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    expected = inputs @ source.load(f"{at}.weight").dequantize().T
    np.testing.assert_allclose(np.array(layer(mx.array(inputs))), expected, atol=2e-3)
