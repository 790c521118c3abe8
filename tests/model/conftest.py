"""What the tests of the model share: SmolLM2 on each backend, and by transformers; tiny models; a text."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest
from llamas import Loader, Transformers

import kvcore
from kvcore.errors import ModelError
from kvcore.weights import resolve_model

TESTS = Path(__file__).resolve().parents[1]
BACKENDS = {
    "reference": ("reference", None),
    "mlx": ("metal", None),
    "torch": ("cuda", os.environ.get("KVCORE_TEST_CUDA_DEVICE", "cpu")),
}
PACKAGES = {"reference": "numpy", "mlx": "mlx", "torch": "torch"}
SMOLLM2_CONFIG = {  # written by hand, so that no reading of the metadata is shared
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve_model(None).path
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Loader:
    """SmolLM2 in float32 on "reference", "mlx" or "torch", loaded once."""

    @functools.cache
    def load(name: str) -> kvcore.Model:
        backend, device = BACKENDS[name]
        return kvcore.load(smollm2_path, backend=backend, device=device, dtype="float32")

    def checked(name: str) -> kvcore.Model:
        pytest.importorskip(PACKAGES[name])
        return load(name)

    return checked


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_path: Path) -> Transformers:
    """SmolLM2 with the weights that transformers itself reads from the GGUF file, q and k rows in order."""
    pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = Transformers(SMOLLM2_CONFIG)
    tensors = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=model.model)["tensors"]
    model.load({name: tensor.numpy() for name, tensor in tensors.items()})
    return model


@pytest.fixture(scope="session")
def text_ids(smollm2_path: Path) -> np.ndarray:
    """SmolLM2's tokens of jargon.txt, int64, more than 2,048 of them."""
    from kvcore.text import load_tokenizer
    from kvcore.weights import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint(smollm2_path).tokenizer)
    text = (TESTS / "data" / "jargon.txt").read_text(encoding="utf-8")
    return np.asarray(tokenizer.encode(text))
