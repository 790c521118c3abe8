"""Logits of tiny models in every stored form, against transformers on weights that somebody else dequantized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llamas import Transformers, load_on, logits, random_ids, tiny_folder, tiny_gguf
from tiny import TinyLlama, write_folder

from kvcore.backends import Backend
from kvcore.errors import ModelError
from kvcore.weights import open_checkpoint
from kvcore.weights.save import write_hf

IDS = random_ids(40)
CLOSE = 1e-4  # float32 against float32


def assert_logits(backend: Backend, path: Path, want: np.ndarray, atol: float = CLOSE) -> None:
    np.testing.assert_allclose(logits(load_on(backend, path, dtype="float32"), IDS), want, rtol=0, atol=atol)


# Shapes and biases

SHAPES = {
    "plain": {},
    "q-k-v-o-biases": {"attention_bias": True},
    "mlp-biases": {"mlp_bias": True},
    "all-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie": True},
    "head-dim-below-hidden-over-heads": {"head_dim": 16},
    "head-dim-above-hidden-over-heads": {"hidden": 96, "head_dim": 80, "heads": 6, "kv_heads": 2},
    "C7-gqa-1": {"heads": 2, "kv_heads": 2},
    "C7-gqa-3": {"hidden": 144, "heads": 9, "kv_heads": 3, "head_dim": 32},
    "C7-gqa-7": {"hidden": 112, "heads": 7, "kv_heads": 1, "head_dim": 32},
    "C7-gqa-8": {"heads": 8, "kv_heads": 1, "head_dim": 32},
    "hidden-no-multiple-of-64": {"hidden": 72, "intermediate": 88, "head_dim": 24},
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@each_shape
def test_logits_follow_transformers(backend: Backend, tmp_path: Path, shape: dict[str, Any]) -> None:
    want = Transformers.tiny(TinyLlama(**shape)).logits(IDS)
    assert_logits(backend, tiny_folder(tmp_path, **shape), want)


@each_shape
def test_M3_a_gguf_gives_the_logits_of_the_safetensors_original(
    reference: Backend, tmp_path: Path, shape: dict[str, Any]
) -> None:
    """float32 tensors, q and k permuted as llama.cpp's converter does (biases too)."""
    want = Transformers.tiny(TinyLlama(**shape)).logits(IDS)
    assert_logits(reference, tiny_gguf(tmp_path, qtype="F32", **shape), want)


def test_M3_logits_tell_a_missing_permutation(reference: Backend, tmp_path: Path) -> None:
    """The check above can fail: rows of q left in llama.cpp's order are far off."""
    tiny = TinyLlama()
    tensors = tiny.tensors()
    for name in [name for name in tensors if ".q_proj." in name]:
        heads = tensors[name].reshape(tiny.heads, 2, tiny.head_dim // 2, tiny.hidden)
        tensors[name] = heads.swapaxes(1, 2).reshape(-1, tiny.hidden)
    wrong = Transformers.tiny(tiny, tensors).logits(IDS)
    right = logits(load_on(reference, tiny_gguf(tmp_path, qtype="F32")), IDS)
    assert np.abs(right - wrong).max() > 0.1


# Quantized files


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_M3_quantized_ggufs_are_the_gguf_package_s_values(backend: Backend, tmp_path: Path, qtype: str) -> None:
    kind = gguf.GGMLQuantizationType[qtype]
    tensors = {
        name: array if array.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        for name, array in TinyLlama().tensors().items()
    }
    assert_logits(backend, tiny_gguf(tmp_path, qtype=qtype), Transformers.tiny(TinyLlama(), tensors).logits(IDS))


MLX_SETTINGS = {
    "M1-4-bit-with-8-bit-embedding-and-a-6-bit-layer": {
        "bits": 4,
        "group_size": 64,
        "overrides": {
            "model.embed_tokens": {"bits": 8, "group_size": 64},
            "model.layers.1.mlp.up_proj": {"bits": 6, "group_size": 64},
        },
    },
    "B165-bits-only-in-the-shapes": {
        "bits": 4,
        "group_size": 64,
        "overrides": {"model.layers.0.self_attn.q_proj": {"bits": 3, "group_size": 64}},
        "unlisted": {
            "model.embed_tokens": {"bits": 8, "group_size": 64},
            "model.layers.0.mlp.gate_proj": {"bits": 6, "group_size": 64},
        },
    },
    "B63-own-bits-own-group-one-left-full": {
        "bits": 4,
        "group_size": 64,
        "overrides": {"model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 32}, "lm_head": False},
    },
    "2-bit": {"bits": 2, "group_size": 32},
    "3-bit": {"bits": 3, "group_size": 128},
    "6-bit": {"bits": 6, "group_size": 32},
    "8-bit": {"bits": 8, "group_size": 64},
}
each_setting = pytest.mark.parametrize("quantize", MLX_SETTINGS.values(), ids=MLX_SETTINGS.keys())


def mlx_dequantized(folder: Path, quantize: dict[str, Any]) -> dict[str, np.ndarray]:
    """The folder's float32 weights by `mlx.core.dequantize`, bits and groups from the settings that made it."""
    mx = pytest.importorskip("mlx.core")
    stored = mx.load(str(folder / "model.safetensors"))
    usual = {"bits": quantize["bits"], "group_size": quantize["group_size"]}
    own = {**quantize.get("overrides", {}), **quantize.get("unlisted", {})}
    weights = {}
    for name, array in stored.items():
        module, _, part = name.rpartition(".")
        if f"{module}.scales" not in stored:
            weights[name] = np.array(array.astype(mx.float32))
        elif part == "weight":
            scales, biases = (stored[f"{module}.{p}"].astype(mx.float32) for p in ("scales", "biases"))
            weights[name] = np.array(mx.dequantize(array, scales, biases, **own.get(module, usual)))
    return weights


@each_setting
def test_mlx_checkpoints_are_mlx_s_values(backend: Backend, tmp_path: Path, quantize: dict[str, Any]) -> None:
    folder = tiny_folder(tmp_path, quantize=quantize)
    weights = mlx_dequantized(folder, quantize)
    assert any(np.abs(weights[name] - array).max() > 1e-3 for name, array in TinyLlama().tensors().items()), (
        "nothing is quantized"
    )
    assert_logits(backend, folder, Transformers.tiny(TinyLlama(), weights).logits(IDS))


def test_B165_a_tied_head_uses_the_embedding_s_own_bits(backend: Backend, tmp_path: Path) -> None:
    quantize = MLX_SETTINGS["B165-bits-only-in-the-shapes"]
    folder = tiny_folder(tmp_path, tie=True, quantize=quantize)
    tiny = TinyLlama(tie=True)
    assert_logits(backend, folder, Transformers.tiny(tiny, mlx_dequantized(folder, quantize)).logits(IDS))


def test_B63_a_narrow_module_with_its_own_group(backend: Backend, tmp_path: Path) -> None:
    """Width 96 is divisible by 32 only; the usual group of 64 must not decide."""
    narrow = {f"model.layers.{i}.mlp.down_proj": {"bits": 4, "group_size": 32} for i in range(2)}
    quantize = {"bits": 4, "group_size": 64, "overrides": narrow}
    folder = tiny_folder(tmp_path, intermediate=96, quantize=quantize)
    tiny = TinyLlama(intermediate=96)
    assert_logits(backend, folder, Transformers.tiny(tiny, mlx_dequantized(folder, quantize)).logits(IDS))


# Tied embeddings


def tied_folder(folder: Path, head: np.ndarray | None, quantize: dict[str, Any] | None = None) -> Path:
    extra = {} if head is None else {"lm_head.weight": head}
    return tiny_folder(folder, tie=True, extra_tensors=extra, quantize=quantize)


@pytest.mark.parametrize("quantize", [None, {"bits": 8, "group_size": 64}], ids=["hf", "mlx"])
def test_M2_B59_tied_with_and_without_a_head_in_the_file(
    reference: Backend, tmp_path: Path, quantize: dict[str, Any] | None
) -> None:
    tiny = TinyLlama(tie=True)
    embedding = tiny.tensors()["model.embed_tokens.weight"]
    without, same, other = (
        load_on(reference, tied_folder(tmp_path / name, head, quantize))
        for name, head in (("without", None), ("same", embedding), ("other", 2 * embedding))
    )
    want = logits(without, IDS)
    if quantize is None:
        np.testing.assert_allclose(want, Transformers.tiny(tiny).logits(IDS), rtol=0, atol=CLOSE)
    np.testing.assert_array_equal(logits(same, IDS), want)
    np.testing.assert_array_equal(logits(other, IDS), want)
    assert without.notices == same.notices == ()
    assert any("lm_head.weight" in notice for notice in other.notices)


def test_B59_a_gguf_is_tied_where_it_has_no_head(reference: Backend, tmp_path: Path) -> None:
    """In GGUF the tensor decides: with output.weight the model has a head of its own, be it the embedding again."""
    tied = TinyLlama(tie=True)
    want = Transformers.tiny(tied).logits(IDS)
    assert_logits(reference, tiny_gguf(tmp_path / "without", qtype="F32", tie=True), want)
    same = {"lm_head.weight": tied.tensors()["model.embed_tokens.weight"]}
    assert_logits(reference, tiny_gguf(tmp_path / "same", qtype="F32", tie=True, extra_tensors=same), want)
    own = Transformers.tiny(TinyLlama()).logits(IDS)
    assert_logits(reference, tiny_gguf(tmp_path / "with", qtype="F32"), own)
    assert np.abs(own - want).max() > 0.1


def test_B59_untied_without_a_head_names_it(reference: Backend, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, tie=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight.*tie_word_embeddings"):
        load_on(reference, folder)


# Shards, and the way back to transformers


def test_shards_and_one_file_give_the_same_logits(reference: Backend, tmp_path: Path) -> None:
    one, three = (load_on(reference, tiny_folder(tmp_path / str(n), shards=n)) for n in (1, 3))
    np.testing.assert_array_equal(logits(one, IDS), logits(three, IDS))


def test_B67_a_stray_file_beside_the_shards_changes_nothing(reference: Backend, tmp_path: Path) -> None:
    clean = tiny_folder(tmp_path / "clean", shards=3)
    stray = tiny_folder(tmp_path / "stray", shards=3)
    others = TinyLlama(seed=9)
    write_folder(tmp_path / "stray", json.loads((stray / "config.json").read_text()), others.tensors(), 1)
    model = load_on(reference, stray)
    np.testing.assert_array_equal(logits(model, IDS), logits(load_on(reference, clean), IDS))
    assert any("model.safetensors" in notice for notice in model.notices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_what_convert_writes(reference: Backend, tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {"attention_bias": True, "head_dim": 32, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    source = tiny_folder(tmp_path / "source", dtype=dtype, **shape)
    write_hf(open_checkpoint(source), tmp_path / "written")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32).eval()
    with torch.inference_mode():
        want = model(torch.as_tensor(IDS)[None]).logits[0].numpy()
    assert_logits(reference, source, want)


# Dtypes of files and of the computation


def test_B34_a_bf16_file_in_float32_is_its_exact_up_cast(reference: Backend, tmp_path: Path) -> None:
    narrow = load_on(reference, tiny_folder(tmp_path / "bf16", dtype="bfloat16"), dtype="float32")
    tensors = {name: open_checkpoint(tmp_path / "bf16").load(name).dequantize() for name in TinyLlama().tensors()}
    tiny_folder(tmp_path / "fp32", extra_tensors=tensors)
    wide = load_on(reference, tmp_path / "fp32", dtype="float32")
    np.testing.assert_array_equal(logits(narrow, IDS), logits(wide, IDS))
    np.testing.assert_allclose(
        logits(wide, IDS), Transformers.tiny(TinyLlama(), tensors).logits(IDS), rtol=0, atol=CLOSE
    )


def test_auto_dtype_is_float32_on_a_cpu_and_the_file_s_own_on_a_gpu(backend: Backend, tmp_path: Path) -> None:
    model = load_on(backend, tiny_folder(tmp_path, dtype="bfloat16"))
    assert model.params.dtype == ("float32" if backend.device == "cpu" else "bfloat16")
    assert replace(model).new_cache().spec.dtype == model.params.dtype
