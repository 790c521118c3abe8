"""Bad input: each is one line on stderr that says what failed and what to do, exit code 2, no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outcome import Cli
from tiny import write_tiny_gguf, write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore.cli.generate
from kvcore.cli.errors import explain
from kvcore.errors import KvcoreError

BAD_SETTINGS = {
    "unknown mode": (["--kv-cache-mode", "turbo5"], "unknown KV cache mode 'turbo5': choose one of fp16, int8"),
    "unknown backend": (["--backend", "vulkan"], "unknown backend 'vulkan': choose one of auto, reference"),
    "unknown cache type": (["--cache-type-k", "q4_0"], "unknown cache type 'q4_0': choose one of fp16, int8"),
    "B79 impossible pair": (
        ["--cache-type-k", "int8", "--cache-type-v", "turbo3"],
        "fp16/fp16, int8/int8, int8/turbo4, fp16/turbo4, fp16/turbo3, turbo4/turbo4",
    ),
    "B79 keys smaller than values": (
        ["--cache-type-k", "turbo4", "--cache-type-v", "fp16"],
        "the K/V pairs are",
    ),
    "unknown bits": (["--kv-bits", "5"], "--kv-bits 5: choose one of 16 (fp16), 8 (int8), 4 (turbo4)"),
    "mode against bits": (
        ["--kv-cache-mode", "turbo4", "--kv-bits", "8"],
        "--kv-cache-mode turbo4 means turbo4 but --kv-bits 8 means int8: give one of them",
    ),
    "mode against types": (
        ["--kv-cache-mode", "int8", "--cache-type-k", "int8", "--cache-type-v", "turbo4"],
        "--cache-type-k int8 --cache-type-v turbo4 means int8-turbo4",
    ),
    "max-tokens 0": (["--max-tokens", "0"], "max_tokens 0: must be 1 or more"),
    "max-tokens negative": (["--max-tokens", "-5"], "max_tokens -5: must be 1 or more"),
    "temperature negative": (["--temp", "-1"], "temperature -1.0: must be a number at least 0"),
    "temperature NaN": (["--temp", "nan"], "temperature nan: must be a number"),
    "top-p above 1": (["--top-p", "1.5"], "top_p 1.5: must be a number above 0 and at most 1"),
    "seed negative": (["--seed", "-1"], "seed -1: must be from 0"),
    "empty stop string": (["--stop", ""], "an empty stop string would stop at once"),
    "prefill step 0": (["--prefill-step-size", "0"], "'--prefill-step-size'"),
    "unknown dtype": (["--dtype", "fp8"], "unknown dtype 'fp8': choose one of auto, float32"),
    "unknown kernels": (
        ["--kernels", "best"],
        "unknown kernel policy 'best': choose one of auto, fused, graph",
    ),
    "device without backend": (["--device", "cpu"], "--device cpu needs a backend by name"),
    "device of another backend": (["--backend", "reference", "--device", "cuda"], "runs on cpu only"),
    "more sinks than a page": (["--sink-tokens", "200"], "sink_tokens 200: must not exceed page_size 128"),
    "B72 no fused kernel": (
        ["--backend", "reference", "--kernels", "fused", "--kv-cache-mode", "turbo4"],
        "no fused encode kernel exists for backend reference yet",
    ),
    "system without template": (["--raw", "--system", "x"], "--system needs the chat template"),
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "no such template": (["--chat-template", "/no/such/file"], "--chat-template /no/such/file: No such file"),
    "not a number": (["--max-tokens", "ten"], "'--max-tokens'"),
    "unknown flag": (["--max-token", "3"], "No such option"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_a_bad_setting_is_one_line(cli: Cli, tiny: Path, flags: list[str], message: str) -> None:
    assert message in cli("generate", "--model", tiny, "--prompt", "hi", *flags).refused()


def test_a_bad_setting_is_refused_before_the_model_is_read(cli: Cli) -> None:
    assert "max_tokens" in cli("generate", "--model", "/nowhere", "--prompt", "a", "--max-tokens=0").refused()


def test_a_missing_prompt_says_how_to_give_one(cli: Cli, tiny: Path) -> None:
    message = cli("generate", "--model", tiny).refused()
    assert message == "no prompt: give --prompt TEXT, or --prompt - to read it from standard input"


def test_a_checkout_without_its_dependencies_is_one_line() -> None:
    hidden = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('kvcore', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvcore: error: no package typer: install kvcore's dependencies with pip install .\n"


def test_an_unknown_command_is_one_line(cli: Cli) -> None:
    assert "generatte" in cli("generatte").refused()


@pytest.mark.parametrize(
    ("data", "byte"), [(b"\xe6\xad", "byte 0 is 0xe6"), (b"ok \xff", "byte 3 is 0xff")], ids=["cut", "invalid"]
)
def test_B52_a_prompt_that_is_not_utf8(cli: Cli, tiny: Path, data: bytes, byte: str) -> None:
    message = cli("generate", "--model", tiny, "--prompt", "-", stdin=data).refused()
    assert f"standard input is not UTF-8: {byte}" in message


def test_B92_a_prompt_longer_than_the_context_names_both_numbers(cli: Cli, short: Path) -> None:
    message = cli("generate", "--model", short, "--raw", "--prompt", "-", stdin=b"\x07" * 199).refused()
    assert "the prompt has 200 tokens, the model's context holds 128" in message  # 199 and the BOS
    assert "-" not in message.replace("--", "")


def test_B76_cuda_without_a_gpu_says_which_backends_work(cli: Cli, tiny: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is an NVIDIA GPU here")
    message = cli("generate", "--model", tiny, "--prompt", "hi", "--backend", "cuda").refused()
    assert message.startswith("backend cuda: this torch is a CPU build")
    assert "backends that work here: reference" in message


# Models


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound model in a folder of its own, to be damaged."""
    return write_tiny_tokenizer(write_tiny_llama(tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1000])
    return path


def refusal(cli: Cli, model: str | Path) -> str:
    return cli("generate", "--model", model, "--prompt", "hi").refused()


def test_B71_no_such_folder(cli: Cli) -> None:
    assert refusal(cli, "/no/such/folder").startswith("no such folder: /no/such/folder")


def test_B71_no_such_file(cli: Cli) -> None:
    assert refusal(cli, "/no/such/x.gguf").startswith("no such file: /no/such/x.gguf")


def test_B71_a_weights_file_instead_of_its_folder(cli: Cli, model: Path) -> None:
    assert f"give its folder, --model {model}" in refusal(cli, model / "model.safetensors")


def test_B70_a_hub_id_offline(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    outcome = cli("generate", "--model", "nobody/no-such-model", "--prompt", "hi")
    first, last = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert first.startswith("kvcore: no such folder: nobody/no-such-model; looking it up")
    assert last.startswith("kvcore: error: no such folder: nobody/no-such-model")


def test_B70_an_empty_folder(cli: Cli, tmp_path: Path) -> None:
    message = refusal(cli, tmp_path)
    assert f"{tmp_path} has no config.json and no .safetensors weights (found: nothing)" in message
    assert "hf download" in message


def test_B70_only_pytorch_weights(cli: Cli, model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = refusal(cli, model)
    assert "no .safetensors weights (found: config.json, pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_B70_no_config(cli: Cli, model: Path) -> None:
    (model / "config.json").unlink()
    assert "has no config.json" in refusal(cli, model)


def test_B70_no_tokenizer(cli: Cli, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(cli, model)


def test_M4_truncated_safetensors(cli: Cli, model: Path) -> None:
    assert "model.safetensors" in refusal(cli, truncate(model / "model.safetensors").parent)


def test_M4_truncated_gguf(cli: Cli, tmp_path: Path) -> None:
    path = truncate(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert f"{path} is truncated" in refusal(cli, path)


def test_corrupt_json(cli: Cli, model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in refusal(cli, model)


def test_missing_config_keys(cli: Cli, model: Path) -> None:
    edit_config(model, hidden_size="absent", num_attention_heads="absent")
    message = refusal(cli, model)
    assert "hidden_size" in message
    assert "num_attention_heads" in message


def test_unsupported_architecture(cli: Cli, model: Path) -> None:
    edit_config(model, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert "qwen3" in refusal(cli, model)


def test_unsupported_quantization(cli: Cli, model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in refusal(cli, model)


def test_B56_a_chat_template_with_a_syntax_error(cli: Cli, model: Path) -> None:
    write_tiny_tokenizer(model, chat_template="{% if %}")
    message = refusal(cli, model)
    assert str(model) in message
    assert "syntax error" in message


# Failures that nobody foresaw


def fails_with(error: BaseException) -> Any:
    def load_model(*_: object) -> None:
        raise error

    return load_model


UNEXPECTED = {
    "a bug": (ValueError("one\ntwo"), "unexpected ValueError: one two (run with --debug for the traceback)"),
    "no memory": (MemoryError(), "out of memory"),
    "NumPy": (MemoryError("Unable to allocate 9 EiB"), "out of memory (Unable to allocate 9 EiB)"),
    "CUDA": (
        RuntimeError("CUDA out of memory. Tried 2 GiB"),
        "out of memory (CUDA out of memory. Tried 2 GiB)",
    ),
    "MLX": (RuntimeError("[malloc] Unable to allocate 8 bytes."), "out of memory ([malloc] Unable"),
}


@pytest.mark.parametrize(("error", "message"), UNEXPECTED.values(), ids=UNEXPECTED.keys())
def test_an_unexpected_exception_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(kvcore.cli.generate, "load_model", fails_with(error))
    assert cli("generate", "--prompt", "hi").refused(code=1).startswith(message)


@pytest.mark.parametrize("where", ["flag", "flag before the command", "variable"])
def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(kvcore.cli.generate, "load_model", fails_with(ValueError("broken")))
    if where == "variable":
        monkeypatch.setenv("KVCORE_DEBUG", "1")
    before = ["--debug"] if where == "flag before the command" else []
    after = ["--debug"] if where == "flag" else []
    outcome = cli(*before, "generate", "--prompt", "hi", *after)
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("kvcore: error: unexpected ValueError: broken")


def test_an_interrupt_is_130_and_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcore.cli.generate, "load_model", fails_with(KeyboardInterrupt()))
    outcome = cli("generate", "--prompt", "hi")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "kvcore: interrupted\n")


def test_a_message_of_several_lines_becomes_one() -> None:
    assert explain(KvcoreError("a\n  b\n")) == ("a b", 1)


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "kvcore", "doctor", "--markdown"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


# The other commands


def test_convert_refuses_a_folder_that_is_not_empty(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = cli("convert", "--model", tiny, "--out", tmp_path).refused()
    assert message == f"{tmp_path} exists and is not an empty folder: choose another place"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


BAD_CONVERSIONS = {
    "no target": ([], "no target: give --out DIR"),
    "unknown format": (["--out", "OUT", "--to", "gguf"], "unknown format 'gguf': choose one of mlx, hf"),
    "bits for plain weights": (["--out", "OUT", "--to", "hf", "--q-bits", "4"], "leave out --q-bits"),
    "impossible bits": (["--out", "OUT", "--q-bits", "7"], "7 bits in groups of 64: choose bits from"),
    "unknown dtype": (["--out", "OUT", "--dtype", "fp8"], "unknown dtype 'fp8'"),
    "target inside a file": (["--out", "FILE/x"], "cannot write to"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_CONVERSIONS.values(), ids=BAD_CONVERSIONS.keys())
def test_a_bad_conversion_is_one_line(cli: Cli, tiny: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    shutil.copy(tiny / "config.json", tmp_path / "file")
    places = {"OUT": str(tmp_path / "out"), "FILE/x": str(tmp_path / "file" / "x")}
    given = [places.get(flag, flag) for flag in flags]
    assert message in cli("convert", "--model", tiny, *given).refused()
    assert not (tmp_path / "out").exists()


BAD_PLANS = {
    "unknown model": (["--model", "llama-9"], "llama-9 is no model: give llama-3.1-8b"),
    "context of words": (
        ["--context", "long"],
        "--context long: give a number of tokens, such as 32768 or 32k",
    ),
    "context 0": (["--context", "0"], "--context 0: give a number of tokens"),
    "context beyond the model": (["--context", "128k"], "131072 tokens are more than the 8192"),
    "memory without unit": (["--memory", "24"], "--memory 24: give a number and a unit, such as 24GiB"),
    "bandwidth 0": (["--bandwidth", "0"], "--bandwidth 0.0: must be a number of GB/s above 0"),
    "bandwidth NaN": (["--bandwidth", "nan"], "--bandwidth nan: must be"),
    "no bits": (["--weight-bits", "0"], "--weight-bits 0: must be from 1 to 32"),
    "batch 0": (["--batch", "0"], "'--batch'"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_bad_plan_is_one_line(cli: Cli, flags: list[str], message: str) -> None:
    assert message in cli("advise", *flags).refused()
