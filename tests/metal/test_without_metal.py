"""MLX without Metal, as on Linux with mlx[cuda13]: nothing depends on `mx.quantized_matmul`, which raises there for
some shapes. No such GPU is here: MLX's CPU device stands in, under that device's name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle import SMALL, exact_attention, feed, gaussian, new_cache, relative_error
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.attention import default_registry
from kvcore.backends import Backend, load_backend
from kvcore.modes import MODES

mx = pytest.importorskip("mlx.core")


@pytest.fixture
def cuda_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX says that its default device is a GPU and that it has no Metal; quantized products raise."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("[quantized_matmul] No implementation for problem shape")

    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "quantized_matmul", refuse)


@pytest.fixture
def gpu(cuda_mlx: None) -> Backend:
    return load_backend("metal")


def test_the_backend_is_a_gpu_in_the_checkpoints_dtype(gpu: Backend) -> None:
    assert (gpu.device, gpu.arch, gpu.default_dtype) == ("gpu", "gpu", None)
    assert gpu.notice == "MLX has no Metal here: it runs on its default device, gpu"


@pytest.mark.parametrize("mode", MODES)
def test_attention_of_every_mode_takes_the_graph_and_no_quantized_product(gpu: Backend, mode: str) -> None:
    cache = new_cache(gpu, mode, window=SMALL)
    assert [decision.kind for decision in cache.decisions] == ["graph", "graph"]
    assert cache.decisions[1].rejected[0].reasons == ("arch gpu: needs an Apple GPU with Metal",)
    feed(cache, gpu.ops, gaussian(1, 2, 110, 64), gaussian(1, 2, 110, 64, seed=1))
    cache.begin_decode()
    layer, q = cache.layers[0], gaussian(1, 4, 1, 64, seed=2)
    out = gpu.ops.to_numpy(layer.attend(gpu.ops.asarray(q), 0.125, None))
    assert relative_error(out, exact_attention(gpu, layer, q, 0.125)) <= 1e-5


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4", "turbo3-asym"])
def test_a_model_with_4_bit_weights_runs(cuda_mlx: None, tmp_path: Path, mode: str) -> None:
    """The weights are dequantized once. Logits of a prompt, and of steps whose cache is folded, are the reference's:
    int8 rows may differ by a code now and then, turbo ones by an index."""
    folder = write_tiny_llama(tmp_path / "tiny", quantize={"bits": 4, "group_size": 32}, eos_token_id=None)
    write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE, eos="<end>")
    ids = np.random.default_rng(0).integers(3, 60, (1, 80))
    logits = []
    for backend in ("metal", "reference"):
        model = kvcore.load(folder, backend=backend, dtype="float32", kv_cache_mode=mode, window=SMALL)
        cache = model.new_cache()
        logits.append([model.forward(part, cache) for part in (ids[:, :70], ids[:, 70:71], ids[:, 71:80])])
    assert cache.stats().rows_folded == (32 if MODES[mode].quantized else 0)
    for got, want in zip(*logits, strict=True):
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)


def test_float32_products_are_not_rounded_to_tf32(cuda_mlx: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX reads the variable at its first product; a user's own choice stays."""
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    load_backend("metal")
    assert os.environ["MLX_ENABLE_TF32"] == "0"
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    load_backend("metal")
    assert os.environ["MLX_ENABLE_TF32"] == "1"


def test_the_fused_kernels_stay_in_the_registry_for_their_reasons(gpu: Backend) -> None:
    assert [kernel.name for kernel in default_registry(gpu).kernels if kernel.kind == "fused"] == [
        "encode-metal",
        "attend-metal",
    ]
