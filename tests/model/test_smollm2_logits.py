"""SmolLM2 on each backend against transformers: logits over real text, greedy answers, the converted folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llamas import Loader, Transformers, assert_argmax_agrees, load_on, logits, margins

import kvcore
from kvcore.weights import AffineWeight, open_checkpoint
from kvcore.weights.save import write_mlx

pytestmark = pytest.mark.smollm2

each_backend = pytest.mark.parametrize(
    "name",
    [
        pytest.param("reference", marks=pytest.mark.xdist_group("smollm2")),
        pytest.param("mlx", marks=pytest.mark.xdist_group("mlx")),
        pytest.param("torch", marks=pytest.mark.xdist_group("smollm2")),
    ],
)
on_smollm2_worker = pytest.mark.xdist_group("smollm2")
TOKENS = 300
CLEAR = 1e-3  # a step whose best token is less far ahead ends a comparison of greedy texts
QUESTIONS = (
    "Explain in a few sentences how rain forms.",
    "Write a short story about a lighthouse keeper and his dog.",
    "What should I look for when I buy a used bicycle?",
)


@pytest.fixture(scope="module")
def ids(text_ids: np.ndarray) -> np.ndarray:
    return text_ids[:TOKENS]


@pytest.fixture(scope="module")
def wanted(hf_smollm2: Transformers, ids: np.ndarray) -> np.ndarray:
    return hf_smollm2.logits(ids)


@on_smollm2_worker
def test_M3_weights_are_those_of_an_outside_gguf_reader(smollm2_path: Path, hf_smollm2: Transformers) -> None:
    """Bit for bit, the rows of q and k in Hugging Face's order: transformers undoes llama.cpp's permutation too."""
    checkpoint, state = open_checkpoint(smollm2_path), hf_smollm2.model.state_dict()
    assert set(checkpoint.names()) == set(state) - {"lm_head.weight"}
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.load(name).dequantize(), state[name].numpy(), err_msg=name)


@on_smollm2_worker
def test_transformers_on_kvcore_s_dequantized_weights(
    smollm2_path: Path, hf_smollm2: Transformers, smollm2: Loader, ids: np.ndarray
) -> None:
    """The other way round: kvcore's config and weights, moved to transformers, give kvcore's logits."""
    checkpoint = open_checkpoint(smollm2_path)
    moved = Transformers(checkpoint.config.to_hf())
    moved.load({name: checkpoint.load(name).dequantize() for name in checkpoint.names()})
    want, got = moved.logits(ids), logits(smollm2("reference"), ids)
    assert np.abs(got - want).max() <= 2e-3
    assert_argmax_agrees(got, want, 4e-3)


@each_backend
def test_logits_follow_transformers(name: str, smollm2: Loader, ids: np.ndarray, wanted: np.ndarray) -> None:
    got = logits(smollm2(name), ids)
    assert got.dtype == np.float32
    assert got.shape == wanted.shape == (TOKENS, 49152)
    assert np.abs(got - wanted).max() <= 2e-3
    assert_argmax_agrees(got, wanted, 4e-3)


@each_backend
@pytest.mark.parametrize(
    "question",
    [QUESTIONS[0], *(pytest.param(each, marks=pytest.mark.full) for each in QUESTIONS[1:])],
    ids=["rain", "story", "bicycle"],
)
def test_greedy_answers_follow_transformers(
    name: str, question: str, smollm2: Loader, hf_smollm2: Transformers
) -> None:
    """64 tokens are those that transformers takes after the same prefix, up to the first step of its own whose best
    token is less than 1e-3 ahead: beyond it two float32 paths may part."""
    generation = smollm2(name).generate(question, kvcore.SamplingParams(max_tokens=64))
    text = "".join(generation)
    start, answer = len(generation.prompt), generation.token_ids
    scores = hf_smollm2.logits(np.array([*generation.prompt, *answer]))[start - 1 : -1]
    close = np.flatnonzero(margins(scores) < CLEAR)
    compared = len(answer) if len(close) == 0 else int(close[0])
    assert compared >= 32
    assert answer[:compared] == scores[:compared].argmax(-1).tolist()
    assert len(answer) == 64 or generation.finish_reason == "stop"
    assert len(text) > 100


@pytest.fixture(scope="session")
def converted(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvcore convert` writes by default: MLX-quantized safetensors."""
    folder = tmp_path_factory.mktemp("converted") / "smollm2"
    checkpoint = open_checkpoint(smollm2_path)
    from kvcore.text import load_tokenizer

    write_mlx(checkpoint, folder, extra=load_tokenizer(checkpoint.tokenizer).save)
    return folder


@on_smollm2_worker
def test_the_conversion_to_mlx_is_lossless(converted: Path, smollm2: Loader, ids: np.ndarray) -> None:
    """Q4_1 and Q8_0 are affine: the same codes, so bit-equal logits; the file is not larger than it must be."""
    gguf, mlx = smollm2("reference"), kvcore.load(converted, backend="reference")
    assert mlx.encode("Name three rivers.") == gguf.encode("Name three rivers.")
    assert mlx.eos_token_ids == gguf.eos_token_ids
    np.testing.assert_array_equal(logits(mlx, ids), logits(gguf, ids))


@on_smollm2_worker
def test_the_converted_folder_keeps_codes_packed(converted: Path) -> None:
    checkpoint = open_checkpoint(converted)
    assert checkpoint.format == "mlx"
    bits = {name: checkpoint.load(name) for name in checkpoint.names() if name.endswith("_proj.weight")}
    assert {w.bits for w in bits.values() if isinstance(w, AffineWeight)} == {4}
    assert all(isinstance(weight, AffineWeight) for weight in bits.values())
    embedding = checkpoint.load("model.embed_tokens.weight")
    assert isinstance(embedding, AffineWeight)
    assert (embedding.bits, embedding.group_size) == (8, 32)


@pytest.mark.xdist_group("mlx")
def test_the_converted_folder_loads_on_mlx(converted: Path, smollm2: Loader, ids: np.ndarray) -> None:
    """By kvcore alone: mlx-lm is not needed."""
    gguf = smollm2("mlx")
    mlx = load_on(gguf.backend, converted, dtype="float32")
    np.testing.assert_allclose(logits(mlx, ids[:16]), logits(gguf, ids[:16]), rtol=0, atol=1e-6)
