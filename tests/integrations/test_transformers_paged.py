"""The paged store of a KVCache: the kernels run in Triton's interpreter where there is no NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import transformers
from hf_models import BASE, ids, logits
from triton_device import DEVICE

from kvcore.backends.cuda.paged import PagedStorage
from kvcore.cache import Cache
from kvcore.errors import UnsupportedError
from kvcore.integrations.transformers import KVCache, stores
from kvcore.integrations.transformers import cache as kv_cache

pytestmark = pytest.mark.xdist_group("transformers")

SHAPE = {**BASE, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A float16 llama with D = 64, whose caches open in pages whatever the device."""

    def make_cache(backend: Any, spec: Any, **_: Any) -> Cache:
        return Cache(backend.ops, spec, PagedStorage(spec.shape(), backend.device))

    def open_store(backend: Any, spec: Any, *, kernels: str, masked: bool, **_: Any) -> Any:
        if kernels == "graph" or masked:
            return stores.GraphStore.instead_of_pages(backend, spec, kernels, "the test")
        return stores.PagedStore(backend, spec, kernels)

    monkeypatch.setattr(stores, "make_cache", make_cache)
    monkeypatch.setattr(kv_cache, "open_store", open_store)
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval().half().to(DEVICE)
    made.set_attn_implementation("kvcore")
    return made


@pytest.mark.full
@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4", "turbo4-delegated"])
def test_pages_agree_with_contiguous_rows(mode: str, model: Any) -> None:
    tokens = ids(1, 262).to(DEVICE)
    paged, graph = KVCache(model.config, mode), KVCache(model.config, mode, kernels="graph")
    steps = (259, 1, 2)
    got, want = (logits(model, tokens, kv, steps).float() for kv in (paged, graph))
    assert (paged.describe()["storage"], graph.describe()["storage"]) == ("paged", "contiguous")
    assert (got - want).norm() / want.norm() < 5e-3
    assert paged.stats().rows_folded == graph.stats().rows_folded == (0 if mode == "fp16" else 128)
    for kv in (paged, graph):
        kv.crop(-2)
    assert paged.get_seq_length() == graph.get_seq_length() == 260
    got, want = (logits(model, tokens[:, :1], kv, (1,)).float() for kv in (paged, graph))
    assert (got - want).norm() / want.norm() < 5e-3


@pytest.mark.full
def test_beams_copy_the_pages_out_once_and_say_so(model: Any) -> None:
    tokens, mode = ids(2, 261).to(DEVICE), "turbo4"
    paged, graph = KVCache(model.config, mode), KVCache(model.config, mode, kernels="graph")
    for kv in (paged, graph):
        logits(model, tokens, kv, (260, 1))
        kv.reorder_cache(torch.tensor([1, 0], device=DEVICE))
    assert paged.describe()["notices"] == ["graph operations instead of fused kernels: sequences in another order"]
    assert paged.get_seq_length() == 261
    got, want = (logits(model, tokens[:, :2], kv, (1, 1)).float() for kv in (paged, graph))
    assert (got - want).norm() / want.norm() < 5e-3


def test_fused_kernels_alone_refuse_what_they_do_not_serve(model: Any) -> None:
    kv = KVCache(model.config, "int8", kernels="fused")
    logits(model, ids(2, 20).to(DEVICE), kv, (20,))
    with pytest.raises(UnsupportedError, match="sequences in another order"):
        kv.reorder_cache(torch.tensor([1, 0], device=DEVICE))
