"""RoPE where it shows: logits at position 10 and at position 6000, against transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import Transformers, load_on, logits, random_ids, tiny_folder, tiny_gguf
from tiny import TinyLlama

import kvcore
from kvcore.backends import Backend, load_backend
from kvcore.models.rope import RopeConfig, rope_inv_freq

TOKENS = 6001
POSITIONS = [10, 6000]  # a short prompt cannot tell the tables apart
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SHAPE = {"rope_theta": 500000.0, "max_position": 8192}
IDS = random_ids(TOKENS)


@pytest.fixture(scope="module")
def torch_cpu() -> Backend:
    pytest.importorskip("torch")
    return load_backend("cuda", "cpu")


@pytest.fixture(scope="module")
def wanted() -> dict[str, np.ndarray]:
    """transformers' logits at both positions, by kind of scaling."""
    kinds = {"default": None, "llama3": LLAMA3, "linear": LINEAR}
    return {
        kind: Transformers.tiny(TinyLlama(rope_scaling=scaling, **SHAPE)).logits(IDS)[POSITIONS]
        for kind, scaling in kinds.items()
    }


def old_key(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {"type" if key == "rope_type" else key: value for key, value in scaling.items()}


def nested(config: dict[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """What a wrapper config does: the language model's settings one level down."""
    outer = ("architectures", "model_type", "torch_dtype")
    inner = {key: value for key, value in config.items() if key not in outer}
    return {key: config[key] for key in outer} | {"text_config": inner | {"rope_scaling": dict(scaling)}}


def parameters(config: dict[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The newer key, which holds rope_theta too."""
    rest = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return rest | {"rope_parameters": {**scaling, "rope_theta": SHAPE["rope_theta"]}}


WRITTEN = {
    "rope_scaling": lambda config, scaling: config | {"rope_scaling": dict(scaling)},
    "old-key-type": lambda config, scaling: config | {"rope_scaling": old_key(scaling)},
    "text_config": nested,
    "rope_parameters": parameters,
}


def at_positions(model: kvcore.Model) -> np.ndarray:
    """Logits at both positions, run in chunks of 250 through the raw cache."""
    return logits(model, IDS, chunk=250)[POSITIONS]


def rope_folder(folder: Path, scaling: Mapping[str, Any], written: str) -> Path:
    tiny_folder(folder, **SHAPE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(WRITTEN[written](config, scaling)))
    return folder


@pytest.mark.parametrize(
    ("kind", "scaling", "written"),
    [
        pytest.param("llama3", LLAMA3, "text_config", id="llama3-text_config"),
        pytest.param("llama3", LLAMA3, "old-key-type", id="llama3-old-key-type"),
        pytest.param("linear", LINEAR, "rope_parameters", id="linear-rope_parameters"),
        pytest.param("linear", LINEAR, "rope_scaling", id="linear-rope_scaling"),
    ],
)
def test_M10_B61_B95_logits_follow_transformers_near_and_far(
    torch_cpu: Backend, tmp_path: Path, wanted: dict[str, np.ndarray], kind: str, scaling: Any, written: str
) -> None:
    got = at_positions(load_on(torch_cpu, rope_folder(tmp_path, scaling, written)))
    np.testing.assert_allclose(got, wanted[kind], rtol=0, atol=2e-3)


@pytest.mark.parametrize("scaling", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_B95_every_way_of_writing_it_gives_the_same_table(reference: Backend, tmp_path: Path, scaling: Any) -> None:
    tables = [
        load_on(reference, rope_folder(tmp_path / written, scaling, written)).params.inv_freq for written in WRITTEN
    ]
    assert all(np.array_equal(table, tables[0]) for table in tables[1:])


def test_B95_a_missing_scaling_shows_at_the_far_position(wanted: dict[str, np.ndarray]) -> None:
    """The comparison above can fail: the unscaled table is 50 tolerances away."""
    for kind in ("llama3", "linear"):
        assert np.abs(wanted[kind][1] - wanted["default"][1]).max() > 0.1


def test_the_default_table_follows_transformers_near_and_far(
    torch_cpu: Backend, tmp_path: Path, wanted: dict[str, np.ndarray]
) -> None:
    got = at_positions(load_on(torch_cpu, tiny_folder(tmp_path, **SHAPE)))
    np.testing.assert_allclose(got, wanted["default"], rtol=0, atol=2e-3)


def test_M10_gguf_frequency_factors_are_llama3(
    torch_cpu: Backend, tmp_path: Path, wanted: dict[str, np.ndarray]
) -> None:
    """llama.cpp's converter writes the scaling as rope_freqs.weight: unscaled over scaled frequency."""
    plain = RopeConfig("default", SHAPE["rope_theta"])
    scaled = RopeConfig("llama3", SHAPE["rope_theta"], 8.0, 1.0, 4.0, 1024)
    factors = rope_inv_freq(plain, 64) / rope_inv_freq(scaled, 64)
    path = tiny_gguf(tmp_path, qtype="F32", rope_factors=factors, **SHAPE)
    np.testing.assert_allclose(at_positions(load_on(torch_cpu, path)), wanted["llama3"], rtol=0, atol=2e-3)


def test_B95_linear_scaling_by_4_at_position_4000_is_position_1000() -> None:
    plain, scaled = (rope_inv_freq(RopeConfig(*args), 64) for args in (("default", 1e4), ("linear", 1e4, 4.0)))
    np.testing.assert_allclose(4000 * scaled.astype(np.float64), 1000 * plain.astype(np.float64), rtol=1e-7)
