"""`kvcore convert`: what it writes, and that `generate` reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outcome import Cli
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.text import Tokenizer

ANSWER = ("--backend", "reference", "--prompt", "hi", "--max-tokens", "6", "--json")


def answer(cli: Cli, model: Path) -> list[int]:
    ids = cli("generate", "--model", model, *ANSWER).json["token_ids"]
    assert isinstance(ids, list)
    return ids


def test_plain_weights_become_4_bits_with_tokenizer_and_template(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "mlx"
    outcome = cli("convert", "--model", tiny, "--out", out)
    assert outcome.code == 0
    assert outcome.out.startswith(f"{out}: ")
    assert "5.04 bits per weight on average" in outcome.out  # 4, float32 scales and biases, and vectors
    assert json.loads((out / "config.json").read_text())["quantization"] == {"group_size": 64, "bits": 4}
    assert answer(cli, out)
    prompt = [{"role": "user", "content": "hi"}]
    assert Tokenizer.from_folder(out).encode_chat(prompt) == Tokenizer.from_folder(tiny).encode_chat(prompt)


def test_plain_safetensors_of_the_same_dtype_answer_the_same(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    report = cli("convert", "--model", tiny, "--out", tmp_path / "hf", "--to", "hf", "--json").json
    assert (report["bits_per_weight"], report["files"]) == (32, ["model.safetensors"])
    assert answer(cli, tmp_path / "hf") == answer(cli, tiny)


def test_quantized_weights_pass_unchanged_unless_bits_are_asked_for(cli: Cli, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", quantize={"bits": 8, "group_size": 32})
    write_tiny_tokenizer(source, chat_template=CHAT_TEMPLATE)
    assert cli("convert", "--model", source, "--out", tmp_path / "same").code == 0
    assert answer(cli, tmp_path / "same") == answer(cli, source)
    assert cli("convert", "--model", source, "--out", tmp_path / "less", "--q-bits", 3).code == 0
    config = json.loads((tmp_path / "less" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 3}


def test_modules_left_in_full_precision_are_named(cli: Cli, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", hidden=96)
    write_tiny_tokenizer(source)
    outcome = cli("convert", "--model", source, "--out", tmp_path / "out")
    assert "left in full precision, as no group divides their width: model.embed_tokens" in outcome.out
    assert "and 4 more" in outcome.out  # embedding, head, and in 2 layers q, k, v, gate, up; 8 are shown
    assert answer(cli, tmp_path / "out")


@pytest.mark.parametrize("to", ["mlx", "hf"])
def test_another_dtype_is_recorded(cli: Cli, tiny: Path, tmp_path: Path, to: str) -> None:
    assert cli("convert", "--model", tiny, "--out", tmp_path / to, "--to", to, "--dtype", "fp16").code == 0
    assert kvcore.load(tmp_path / to).config.dtype == "float16"


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_the_embedded_gguf_converts_and_answers(cli: Cli, tmp_path: Path) -> None:
    assert cli("convert", "--out", tmp_path / "mlx").out.rstrip().endswith("5.84 bits per weight on average")
    found = cli("generate", "--model", tmp_path / "mlx", *ANSWER).json
    assert found["text"] == "Hello there! How can I"
