"""`kvcore export vllm-command`: every word is one that the pinned vLLM knows."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tiny

from tiny import TinyLlama, write_tiny_gguf, write_tiny_llama

from kvcore.cli import run
from kvcore.export import VllmSettings, vllm_command, vllm_options
from kvcore.export.vllm import NEAREST
from kvcore.layout import WindowPolicy
from kvcore.models.config import LlamaConfig
from kvcore.modes import MODES

CONFIG = LlamaConfig.from_hf(TinyLlama(layers=6).hf_config(), "test")


def settings(**more: Any) -> VllmSettings:
    return VllmSettings(**{"model": "org/name", "mode": MODES["int8"]} | more)


def test_every_mode_has_a_stored_form_that_vllm_knows() -> None:
    assert set(NEAREST) == set(MODES)
    assert {form for form, _ in NEAREST.values()} <= set(vllm_options()["kv_cache_dtypes"])


def test_the_list_of_options_says_where_it_is_from() -> None:
    known = vllm_options()
    assert known["version"] == "0.33.0"
    assert "arg_utils.py" in known["source"]
    assert len(known["options"]) > 300
    assert all(name.startswith("--") for name in known["options"])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_emitted_option_is_in_the_list(mode: Any) -> None:
    every = settings(
        mode=mode,
        dtype="bfloat16",
        window=WindowPolicy(boundary_layers=2),
        ranks=2,
        context=1024,
        max_batch=32,
        cache_bytes=2**30,
        served_name="it",
        host="0.0.0.0",
        port=8080,
        chat_template="t.jinja",
    )
    command = vllm_command(every, CONFIG, "hf")
    known = vllm_options()
    emitted = [word for word in command.words if word.startswith("--")]
    assert set(emitted) <= set(known["options"])
    assert len(emitted) == (11 if mode.quantized else 10)
    assert command.words[:3] == ("vllm", "serve", "org/name")
    assert command.words[command.words.index("--dtype") + 1] in known["dtypes"]
    assert command.words[command.words.index("--kv-cache-dtype") + 1] in known["kv_cache_dtypes"]
    assert shlex.split(command.line) == list(command.words)


def test_layers_that_stay_raw_are_named_one_by_one() -> None:
    words = vllm_command(settings(window=WindowPolicy(boundary_layers=2)), CONFIG, "hf").words
    assert words[words.index("--kv-cache-dtype-skip-layers") + 1 :] == ("0", "1", "4", "5")


def test_fp16_is_the_same_there_and_quantized_modes_are_not() -> None:
    assert vllm_command(settings(mode=MODES["fp16"]), CONFIG, "hf").differs == ()
    for mode in MODES.values():
        differs = vllm_command(settings(mode=mode), CONFIG, "hf").differs
        assert any("the first 4 and the newest 128 tokens" in text for text in differs) is mode.quantized


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "my model", heads=4, kv_heads=4)


def said(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = run(["export", "vllm-command", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_line_goes_to_stdout_and_the_rest_to_stderr(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, err = said(
        capsys, "--model", folder, "--kv-cache-mode", "turbo4", "--tensor-parallel", 2, "--context", "2k"
    )
    quoted = shlex.quote(str(folder))
    expected = (
        f"vllm serve {quoted} --kv-cache-dtype turboquant_4bit_nc --max-model-len 2048 --tensor-parallel-size 2\n"
    )
    assert (code, out) == (0, expected)
    assert err.startswith("kvcore: for vLLM 0.33.0, mode turbo4\n")
    assert "kvcore: differs: " in err


def test_json_has_the_words(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    _, out, _ = said(capsys, "--model", folder, "--kv-bits", 8, "--json", "--kv-cache-budget", "2GiB")
    found = json.loads(out)
    assert found["vllm"] == "0.33.0"
    assert found["command"][3:] == ["--kv-cache-dtype", "int8_per_token_head", "--kv-cache-memory-bytes", str(2**31)]


@pytest.mark.parametrize(("form", "what"), [("gguf", "GGUF files"), ("mlx", "MLX-quantized weights")])
def test_weights_that_vllm_does_not_read_are_converted_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, what: str
) -> None:
    if form == "gguf":
        model = write_tiny_gguf(tmp_path / "m.gguf", heads=4, kv_heads=4)
    else:
        model = write_tiny_llama(tmp_path / "m", heads=4, kv_heads=4, quantize={"bits": 4, "group_size": 64})
    code, out, err = said(capsys, "--model", model)
    assert (code, out) == (0, "vllm serve m-hf --kv-cache-dtype auto\n")
    assert f"does not read {what}: first run kvcore convert --model {model} --to hf --out m-hf" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no --model: vLLM serves a folder or a hub id"),
        (("--model", "FOLDER", "--tensor-parallel", "3"), "4 query heads over 3 ranks"),
        (("--model", "FOLDER", "--context", "8k"), "--context 8k: 8192 tokens are more than the 4096"),
        (("--model", "FOLDER", "--kv-cache-mode", "int3"), "int3"),
        (("--model", "no/such/folder"), "no such folder"),
        (("--model", "org/name", "--kv-cache-mode", "turbo5"), "turbo5"),  # before the hub is asked
    ],
)
def test_what_vllm_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, args: tuple[str, ...], message: str
) -> None:
    code, out, err = said(capsys, *(str(folder) if arg == "FOLDER" else arg for arg in args))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
