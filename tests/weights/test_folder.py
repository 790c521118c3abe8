"""Model folders: plain and MLX-quantized, sharded, incomplete, contradictory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny import TinyLlama, write_tiny_gguf, write_tiny_llama

from kvcore.errors import ModelError
from kvcore.weights import AffineWeight, DenseWeight, open_checkpoint

Q4 = {"bits": 4, "group_size": 64}


def error_of(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ... deletes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def change_tensors(folder: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    """Set tensors of model.safetensors; None deletes one."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors") | changes
    kept = {name: array for name, array in tensors.items() if array is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


def mlx_value(folder: Path, name: str, bits: int, group_size: int) -> np.ndarray:
    """A quantized weight as mlx.core dequantizes it."""
    mx = pytest.importorskip("mlx.core")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    module = name.removesuffix(".weight")
    parts = (mx.array(tensors[f"{module}.{part}"]) for part in ("weight", "scales", "biases"))
    return np.array(mx.dequantize(*parts, group_size=group_size, bits=bits))


@pytest.mark.parametrize("shards", [1, 3], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_checkpoint(tmp_path: Path, dtype: str, shards: int) -> None:
    shape = {"attention_bias": True, "head_dim": 96}
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "m", dtype=dtype, shards=shards, **shape))
    assert checkpoint.format == "hf"
    assert checkpoint.config.dtype == dtype
    assert checkpoint.model_name == "m"
    assert checkpoint.notices == ()
    tensors = TinyLlama(**shape).tensors()
    assert set(checkpoint.names()) == set(tensors)
    for name, original in tensors.items():
        weight = checkpoint.load(name)
        assert isinstance(weight, DenseWeight)
        assert weight.array.dtype.name == dtype
        np.testing.assert_array_equal(weight.array, original.astype(weight.array.dtype))


def test_dtype_comes_from_the_tensors_where_config_is_silent(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", dtype="bfloat16")
    change_json(folder / "config.json", torch_dtype=...)
    assert open_checkpoint(folder).config.dtype == "bfloat16"


# Quantization


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8], ids=lambda bits: f"{bits}bit")
@pytest.mark.parametrize("group_size", [32, 64, 128], ids=lambda size: f"g{size}")
def test_mlx_checkpoint(tmp_path: Path, bits: int, group_size: int) -> None:
    folder = write_tiny_llama(tmp_path / "m", quantize={"bits": bits, "group_size": group_size}, shards=1)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "mlx"
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"):
        weight = checkpoint.load(name)
        assert isinstance(weight, AffineWeight)
        assert (weight.bits, weight.group_size) == (bits, group_size)
        expected = mlx_value(folder, name, bits, group_size)
        np.testing.assert_allclose(weight.dequantize(), expected, atol=1e-6)
    assert isinstance(checkpoint.load("model.norm.weight"), DenseWeight)


def test_M1_B63_each_module_has_its_own_bits_and_group(tmp_path: Path) -> None:
    overrides = {
        "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 32},
        "model.layers.0.mlp.up_proj": {"bits": 6, "group_size": 64},
        "lm_head": False,
    }
    folder = write_tiny_llama(tmp_path / "m", quantize=Q4 | {"overrides": overrides})
    checkpoint = open_checkpoint(folder)
    found = {
        module: checkpoint.load(f"{module}.weight")
        for module in [*overrides, "model.embed_tokens", "model.layers.0.mlp.down_proj"]
    }
    formats = {
        module: (weight.bits, weight.group_size) if isinstance(weight, AffineWeight) else None
        for module, weight in found.items()
    }
    assert formats == {
        "model.layers.1.mlp.down_proj": (8, 32),
        "model.layers.0.mlp.up_proj": (6, 64),
        "lm_head": None,
        "model.embed_tokens": (4, 64),
        "model.layers.0.mlp.down_proj": (4, 64),
    }
    for module, form in formats.items():
        if form is not None:
            expected = mlx_value(folder, f"{module}.weight", *form)
            np.testing.assert_allclose(found[module].dequantize(), expected, atol=1e-6)
    np.testing.assert_array_equal(found["lm_head"].dequantize(), TinyLlama().tensors()["lm_head.weight"])


def test_B63_module_of_width_96_is_quantized_in_groups_of_32(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", intermediate=96, quantize={"bits": 4, "group_size": 32})
    weight = open_checkpoint(folder).load("model.layers.0.mlp.down_proj.weight")
    assert isinstance(weight, AffineWeight)
    assert weight.shape == (128, 96)


def test_B165_bits_come_from_the_shapes_where_config_is_silent(tmp_path: Path) -> None:
    unlisted = {"model.embed_tokens": {"bits": 8, "group_size": 64}}
    overrides = {
        "model.layers.0.mlp.up_proj": {"bits": 6, "group_size": 64},
        "model.layers.1.mlp.up_proj": {"bits": 3, "group_size": 64},
    }
    quantize = Q4 | {"unlisted": unlisted, "overrides": overrides}
    folder = write_tiny_llama(tmp_path / "m", tie=True, quantize=quantize)
    checkpoint = open_checkpoint(folder)
    for module, bits in (("model.embed_tokens", 8), *((m, o["bits"]) for m, o in overrides.items())):
        weight = checkpoint.load(f"{module}.weight")
        assert isinstance(weight, AffineWeight)
        assert weight.bits == bits
        expected = mlx_value(folder, f"{module}.weight", bits, 64)
        np.testing.assert_allclose(weight.dequantize(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"bits": 6, "group_size": 64}, ["6 bits in groups of 64", "4 bits in groups of 64"]),
        ({"bits": 4, "group_size": 32}, ["4 bits in groups of 32", "4 bits in groups of 64"]),
        ({"bits": 8}, ["8 bits", "4 bits"]),
        (False, ["not quantized", "4 bits in groups of 64"]),
    ],
    ids=["bits", "group", "bits-only", "false"],
)
def test_B165_contradiction_names_module_and_both_numbers(tmp_path: Path, override: object, words: list[str]) -> None:
    folder = write_tiny_llama(tmp_path / "m", quantize=Q4)
    module = "model.layers.1.mlp.up_proj"
    change_json(folder / "config.json", quantization=Q4 | {module: override})
    message = error_of(folder)
    for word in [module, *words]:
        assert word in message


def test_B165_override_of_a_plain_module_is_a_contradiction(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", quantize=Q4 | {"unlisted": {"lm_head": False}})
    open_checkpoint(folder)
    change_json(folder / "config.json", quantization=Q4 | {"lm_head": {"bits": 8, "group_size": 64}})
    message = error_of(folder)
    assert "lm_head: config.json says 8 bits in groups of 64, but the tensor is F32" in message


def test_quantization_config_is_the_older_name(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", quantize=Q4)
    change_json(folder / "config.json", quantization=..., quantization_config=Q4)
    assert open_checkpoint(folder).format == "mlx"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["'awq'", "MLX affine"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["'gptq'"]),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ["'bitsandbytes'"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["'fp8'"]),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, ["'mxfp4'", "affine"]),
        ({"quantization": Q4 | {"lm_head": {"mode": "nvfp4"}}}, ["'lm_head'", "'nvfp4'"]),
        ({"quantization": {"bits": 7, "group_size": 64}}, ["bits 7", "(2, 3, 4, 5, 6, 8)"]),
        ({"quantization": {"bits": 4, "group_size": 48}}, ["group_size 48"]),
        ({"quantization": {"bits": "4"}}, ["bits", "'4'"]),
        ({"quantization": 4}, ["quantization", "object"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_unsupported_quantization_is_refused_by_name(tmp_path: Path, config: dict[str, Any], words: list[str]) -> None:
    folder = write_tiny_llama(tmp_path / "m", layers=1)
    change_json(folder / "config.json", **config)
    message = error_of(folder)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head.biases": None}, ["missing: lm_head.biases"]),
        ({"lm_head.scales": None}, ["missing: lm_head.scales"]),
        ({"lm_head.scales": np.zeros((256, 3), np.float32)}, ["lm_head", "[256, 3]", "[256, 128]"]),
        ({"lm_head.weight": np.zeros((256, 15), np.uint32)}, ["lm_head", "[256, 15]"]),
        ({"lm_head.biases": np.zeros((256, 2), np.float16)}, ["lm_head", "F16"]),
        ({"lm_head.scales": np.zeros((256, 2), np.uint32)}, ["lm_head", "U32"]),
    ],
    ids=["no-biases", "no-scales", "scales-shape", "codes-shape", "biases-dtype", "scales-dtype"],
)
def test_damaged_module_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    folder = write_tiny_llama(tmp_path / "m", quantize=Q4)
    change_tensors(folder, changes)
    message = error_of(folder)
    for word in words:
        assert word in message


# Presence and shapes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm.weight": None}, ["missing: model.norm.weight"]),
        ({"model.layers.1.mlp.up_proj.weight": None}, ["missing: model.layers.1.mlp.up_proj.weight"]),
        ({"model.layers.0.mlp.up_proj.bias": np.zeros(256)}, ["superfluous: model.layers.0.mlp.up_proj.bias"]),
        ({"vision.weight": np.zeros(2)}, ["superfluous: vision.weight"]),
        ({"model.norm.weight": np.zeros(64)}, ["wrong shape: model.norm.weight [64] instead of [128]"]),
        ({f"x{i}": np.zeros(1) for i in range(9)}, ["superfluous: x0, x1, x2 and 6 more"]),
        ({"lm_head.weight": None}, ["missing: lm_head.weight", "tie_word_embeddings"]),
        ({"a\nb" * 99: np.zeros(1)}, ["superfluous: a\\nba\\nb"]),
    ],
    ids=["norm", "up_proj", "bias", "vision", "shape", "many", "head", "long-name"],
)
def test_B59_missing_superfluous_and_wrong_tensors_are_named(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    float32 = {k: None if v is None else v.astype(np.float32) for k, v in changes.items()}
    change_tensors(folder, float32)
    message = error_of(folder)
    for word in words:
        assert word in message


def test_biases_that_config_declares_must_be_there(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    change_json(folder / "config.json", attention_bias=True)
    message = error_of(folder)
    assert "missing: model.layers.0.self_attn.q_proj.bias" in message
    assert "5 more" in message


def test_rotary_tables_of_older_checkpoints_are_harmless(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(32, np.float32)}
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "m", extra_tensors=extra))
    assert not any("inv_freq" in name for name in checkpoint.names())


def test_other_float_types_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    change_tensors(folder, {"model.norm.weight": np.ones(128, np.float64)})
    message = error_of(folder)
    assert "model.norm.weight has dtype 'F64'" in message
    assert "F32, F16, BF16" in message


def test_more_layers_than_tensors_is_refused_at_once(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    change_json(folder / "config.json", num_hidden_layers=2**31 - 1)
    assert "2147483647 layers" in error_of(folder)


def test_unknown_names_cannot_be_loaded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "m", tie=True))
    with pytest.raises(ModelError, match=r"'lm_head\.weight'"):
        checkpoint.load("lm_head.weight")


# Tied embeddings


@pytest.mark.parametrize("quantize", [None, Q4], ids=["hf", "mlx"])
def test_M2_B59_tied_embeddings(tmp_path: Path, quantize: dict[str, Any] | None) -> None:
    tensors = TinyLlama(tie=True).tensors()
    same = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    other = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    for label, extra, notices in (("without", {}, 0), ("same", same, 0), ("different", other, 1)):
        folder = write_tiny_llama(tmp_path / label, tie=True, quantize=quantize, extra_tensors=extra)
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config.tie_embeddings
        assert "lm_head.weight" not in checkpoint.names()
        assert len(checkpoint.notices) == notices
        assert all("lm_head.weight" in notice for notice in checkpoint.notices)
    untied = write_tiny_llama(tmp_path / "untied", tie=True, quantize=quantize)
    change_json(untied / "config.json", tie_word_embeddings=False)
    assert "missing: lm_head.weight" in error_of(untied)


def test_M2_config_that_does_not_say_is_settled_by_the_tensors(tmp_path: Path) -> None:
    for tie in (True, False):
        folder = write_tiny_llama(tmp_path / str(tie), tie=tie)
        change_json(folder / "config.json", tie_word_embeddings=...)
        assert open_checkpoint(folder).config.tie_embeddings is tie


def test_B59_gguf_without_an_output_tensor_is_tied(tmp_path: Path) -> None:
    for tie in (True, False):
        checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / f"{tie}.gguf", tie=tie))
        assert checkpoint.config.tie_embeddings is tie
        assert ("lm_head.weight" in checkpoint.names()) is not tie


# Which files count


@pytest.mark.parametrize("quantize", [None, Q4], ids=["hf", "mlx"])
def test_B65_missing_shard_is_named(tmp_path: Path, quantize: dict[str, Any] | None) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=3, quantize=quantize)
    open_checkpoint(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "missing model-00002-of-00003.safetensors, of 3 files" in error_of(folder)


def test_B67_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=3, dtype="bfloat16")
    before = open_checkpoint(folder).load("model.norm.weight").dequantize()
    stray = write_tiny_llama(tmp_path / "stray", quantize=Q4, seed=1) / "model.safetensors"
    (folder / "model.safetensors").write_bytes(stray.read_bytes())
    (folder / "consolidated.safetensors").write_bytes(b"not even a safetensors file")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "hf"
    np.testing.assert_array_equal(checkpoint.load("model.norm.weight").dequantize(), before)
    (notice,) = checkpoint.notices
    assert "consolidated.safetensors, model.safetensors" in notice


def test_several_files_without_index_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert "3 .safetensors files and no model.safetensors.index.json" in error_of(folder)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../x.safetensors"}, ["'../x.safetensors'", "not a file name"]),
        ({"a": 3}, ["3", "not a file name"]),
        ({}, ["names no file"]),
        ([], ["weight_map", "object"]),
        ({"a": "model-00001-of-00003.safetensors"}, ["lacks 'a'"]),
    ],
    ids=["outside", "number", "empty", "list", "tensor-not-there"],
)
def test_bad_index_is_refused(tmp_path: Path, weight_map: object, words: list[str]) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=3)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = error_of(folder)
    for word in words:
        assert word in message


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_M4_cut_json_names_the_file(tmp_path: Path, file: str) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=2)
    (folder / file).write_text('{"a": [1, 2')
    message = error_of(folder)
    assert str(folder / file) in message
    assert "line 1 column 12" in message


@pytest.mark.parametrize("case", ["empty", "only-pytorch", "no-config", "gguf-inside"])
def test_B70_incomplete_folder_says_what_is_missing_and_what_helps(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "m"
    write_tiny_llama(folder)
    if case != "no-config":
        (folder / "model.safetensors").unlink()
    if case != "only-pytorch":
        (folder / "config.json").unlink()
    if case == "only-pytorch":
        (folder / "pytorch_model.bin").touch()
    if case == "gguf-inside":
        (folder / "x.gguf").touch()
    expected = {
        "empty": ["no config.json and no .safetensors weights (found: nothing)", "hf download"],
        "only-pytorch": ["no .safetensors weights (found: config.json, pytorch_model.bin)", "save_pretrained"],
        "no-config": ["no config.json (found: model.safetensors)", "hf download"],
        "gguf-inside": ["no .safetensors weights (found: x.gguf)", f"--model {folder / 'x.gguf'}"],
    }
    message = error_of(folder)
    for word in expected[case]:
        assert word in message


# End-of-text ids


def test_M5_ids_of_both_configs_are_joined(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", eos_token_id=2, bos_token_id=None)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [2, 7], "bos_token_id": 1}))
    config = open_checkpoint(folder).config
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1
    generation.unlink()
    assert open_checkpoint(folder).config.eos_token_ids == (2,)
