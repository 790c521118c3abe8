"""`kvcore generate`: text, statistics, JSON, modes, the environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from outcome import Cli
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
import kvcore.generate
from kvcore.advise import ModelShape, Plan, kv_bytes
from kvcore.cache import Cache
from kvcore.modes import MODES
from kvcore.runtime import Model
from kvcore.text import Tokenizer

LONG = "The rivers of the north run cold. " * 9  # 297 characters: more tokens than a window and a page
REFERENCE = ("--backend", "reference")


def test_text_goes_to_stdout_and_statistics_to_stderr(cli: Cli, tiny: Path) -> None:
    outcome = cli("generate", "--model", tiny, "--prompt", "hi", "--max-tokens", 8, *REFERENCE)
    model = kvcore.load(tiny, backend="reference")
    text = "".join(model.generate("hi", kvcore.SamplingParams(max_tokens=8)))
    assert (outcome.code, outcome.out) == (0, text if text.endswith("\n") else f"{text}\n")
    speed, cache, kernels = outcome.err.splitlines()
    assert speed.startswith(f"kvcore: prompt: {len(model.encode('hi'))} tokens, ")
    assert "generation: 8 tokens" in speed
    assert "first token after" in speed
    assert cache.startswith("kvcore: cache: mode fp16 (requested fp16), 0.05 MiB for 26 tokens; rows: 0 quantized")
    assert "attend: attend-graph (graph); reference on cpu (numpy " in kernels
    assert kernels.endswith("float32")


def test_json_is_one_object_with_the_same_facts(cli: Cli, tiny: Path) -> None:
    found = cli("generate", "--model", tiny, "--prompt", "hi", "--max-tokens", 8, "--json", *REFERENCE).json
    model = kvcore.load(tiny, backend="reference")
    generation = model.generate("hi", kvcore.SamplingParams(max_tokens=8))
    assert (found["text"], found["token_ids"]) == ("".join(generation), generation.token_ids)
    assert found["finish_reason"] == generation.finish_reason == "length"
    assert found["stats"]["prompt_tokens"] == len(model.encode("hi"))
    assert found["cache"]["tokens"] == found["cache"]["rows_raw"] == len(generation.prompt) + 7
    assert found["mode"] == {"requested": "fp16", "effective": "fp16"}
    assert found["backend"]["name"] == "reference"
    assert found["backend"]["device"] == "cpu"
    assert found["backend"]["versions"] == {"numpy": np.__version__}
    assert [(k["op"], k["kind"], k["rejected"]) for k in found["kernels"]] == [
        ("encode", "graph", []),
        ("attend", "graph", []),
    ]
    assert (found["dtype"], found["model"]) == ("float32", tiny.name)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_folds_and_reports_its_exact_bytes(cli: Cli, tiny: Path, mode: str) -> None:
    args = ["--model", tiny, "--raw", "--prompt", LONG, "--max-tokens", 3, "--json", *REFERENCE]
    found = cli("generate", *args, "--kv-cache-mode", mode).json["cache"]
    shape = ModelShape.from_config(kvcore.load(tiny, backend="reference").config)
    plan = Plan(shape, found["tokens"], 16, 1e9, dtype="float32")
    assert found["tokens"] > 256
    assert found["rows_folded"] == (128 if MODES[mode].quantized else 0)
    assert found["kv_bytes"] == kv_bytes(plan, MODES[mode], found["tokens"])
    assert found["kv_bytes_raw"] == kv_bytes(plan, MODES["fp16"], found["tokens"])
    layout = MODES[mode].layout(64)
    assert found["bytes_per_token"] == 2 * 2 * layout.bytes_per_token("float32")  # layers, KV heads
    assert found["bytes_per_token_raw"] == 2 * 2 * 512


DEVICES = {"torch on the CPU": ("cuda", "cpu", "torch"), "MLX": ("metal", "cpu", "mlx")}


@pytest.mark.parametrize(("backend", "device", "package"), DEVICES.values(), ids=DEVICES.keys())
def test_B76_the_real_device_is_reported(cli: Cli, tiny: Path, backend: str, device: str, package: str) -> None:
    pytest.importorskip(package)
    flags = ["--backend", backend, "--device", device]
    outcome = cli("generate", "--model", tiny, "--prompt", "hi", "--max-tokens", 2, "--json", *flags)
    assert (outcome.json["backend"]["name"], outcome.json["backend"]["device"]) == (backend, "cpu")
    assert f"{backend} on cpu" in outcome.err.splitlines()[-1]


def test_a_prompt_from_a_pipe_has_no_final_line_break(cli: Cli, tiny: Path) -> None:
    args = ["generate", "--model", tiny, "--max-tokens", 4, "--json", *REFERENCE]
    assert (
        cli(*args, "--prompt", "-", stdin="größer\n".encode()).json["token_ids"]
        == cli(*args, "--prompt", "größer").json["token_ids"]
    )


# Text


def test_verbose_shows_prompt_ids_decisions_and_what_is_ignored(cli: Cli, tiny: Path) -> None:
    flags = ["--verbose", "--max-tokens", 2, "--top-p", 0.5, "--recent-tokens", 32, "--system", "Be brief."]
    lines = cli("generate", "--model", tiny, "--prompt", "hi", *flags, *REFERENCE).err.splitlines()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ids = Tokenizer.from_folder(tiny).encode_chat(messages)
    assert ids.count(1) == 1  # one BOS, though the template writes it and the tokenizer adds it
    assert lines[0] == f"kvcore: prompt ids: {ids}"
    assert lines[1:3] == ["kvcore: encode: encode-graph (graph)", "kvcore: attend: attend-graph (graph)"]
    assert lines[3].startswith("kvcore: ignored: --recent-tokens: no effect in mode fp16")
    assert lines[4].startswith("kvcore: ignored: --top-p: no effect at temperature 0")


def test_M7_without_a_chat_template_the_prompt_is_used_as_it_is_and_that_is_said(cli: Cli, short: Path) -> None:
    args = ["generate", "--model", short, "--prompt", "hi", "--max-tokens", 4, *REFERENCE]
    said, raw = cli(*args), cli(*args, "--raw")
    assert said.out == raw.out
    assert said.err.splitlines()[0].startswith(f"kvcore: {short.name} has no chat template: the prompt is used as")
    assert "template" not in raw.err


def test_B55_a_system_message_without_a_chat_template_is_refused(cli: Cli, short: Path) -> None:
    outcome = cli("generate", "--model", short, "--prompt", "hi", "--system", "x", *REFERENCE)
    assert outcome.code == 2
    assert "--system needs a chat template" in outcome.err.splitlines()[-1]


def test_a_chat_template_from_a_file_is_used(cli: Cli, short: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}!")
    args = ["generate", "--model", short, "--max-tokens", 3, "--json", *REFERENCE]
    templated = cli(*args, "--prompt", "hi", "--chat-template", tmp_path / "t.jinja")
    assert templated.json["token_ids"] == cli(*args, "--raw", "--prompt", "hi!").json["token_ids"]


def test_B94_max_tokens_is_capped_at_the_context(cli: Cli, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "eos_token_ids", frozenset())
    args = ["--model", short, "--raw", "--prompt", "\x07" * 7, "--max-tokens", 125, "--json", *REFERENCE]
    found = cli("generate", *args).json
    assert found["stats"]["prompt_tokens"] == 8  # and the BOS
    assert (found["stats"]["generation_tokens"], found["finish_reason"]) == (120, "length")


def test_M9_stop_strings_are_cut_off(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["generate", "--model", tiny, "--raw", "--prompt", "hi", "--max-tokens", 40, "--json", *REFERENCE]
    text = cli(*args).json["text"]
    stop = text[12:15]
    expected = text[: text.index(stop)]
    found = cli(*args, "--stop", "no such text", "--stop", stop).json
    assert (found["text"], found["finish_reason"]) == (expected, "stop")
    monkeypatch.setenv("KVCORE_STOP", f"no such text\n{stop}")
    assert cli(*args).json["text"] == expected


def test_a_seed_repeats_a_sample(cli: Cli, tiny: Path) -> None:
    args = ["generate", "--model", tiny, "--prompt", "hi", "--max-tokens", 8, "--json", *REFERENCE]
    first, same, other = (cli(*args, "--temp", 1, "--seed", seed).json["token_ids"] for seed in (1, 1, 2))
    assert first == same != other


# Modes


REQUESTS = {
    "alias": (["--kv-cache-mode", "k8v4"], "k8v4", "int8-turbo4"),
    "pair": (["--cache-type-k", "int8", "--cache-type-v", "turbo4"], "int8/turbo4", "int8-turbo4"),
    "values alone": (["--cache-type-v", "turbo3"], "fp16/turbo3", "turbo3-asym"),
    "bits": (["--kv-bits", "3"], "kv-bits 3", "turbo3-asym"),
    "two that agree": (["--kv-bits", "4", "--kv-cache-mode", "turbo4-sym"], "turbo4-sym", "turbo4"),
}


@pytest.mark.parametrize(("flags", "requested", "effective"), REQUESTS.values(), ids=REQUESTS.keys())
def test_the_requested_and_the_effective_mode_are_reported(
    cli: Cli, tiny: Path, flags: list[str], requested: str, effective: str
) -> None:
    args = ["--model", tiny, "--prompt", "hi", "--max-tokens", 2, "--json", *REFERENCE]
    outcome = cli("generate", *args, *flags)
    assert outcome.json["mode"] == {"requested": requested, "effective": effective}
    assert f"cache: mode {effective} (requested {requested})" in outcome.err


def test_q8_0_is_int8_and_says_how_they_differ(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--prompt", "hi", "--max-tokens", 2, "--kv-cache-mode", "q8_0", *REFERENCE]
    outcome = cli("generate", *args)
    assert outcome.err.splitlines()[0].startswith("kvcore: q8_0 is taken as int8")
    assert "mode int8 (requested q8_0)" in outcome.err


def test_boundary_layers_that_leave_no_layer_to_quantize_are_never_silent(cli: Cli, tiny: Path) -> None:
    args = ["--model", tiny, "--prompt", "hi", "--max-tokens", 2, "--json", *REFERENCE]
    outcome = cli("generate", *args, "--kv-cache-mode", "int8", "--boundary-layers", 1)
    assert outcome.json["mode"] == {"requested": "int8", "effective": "fp16"}
    assert "keeps all 2 layers raw: nothing of mode int8 remains" in outcome.err.splitlines()[0]


def test_B78_the_environment_sets_the_mode_and_the_flag_wins(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", "--model", tiny, "--prompt", "hi", "--max-tokens", 2, "--json", *REFERENCE]
    monkeypatch.setenv("KVCORE_KV_CACHE_MODE", "turbo4")
    assert cli(*args).json["mode"]["effective"] == "turbo4"
    assert cli(*args, "--kv-cache-mode", "int8").json["mode"]["effective"] == "int8"
    assert cli(*args, "--kv-bits", "8").json["mode"]["effective"] == "int8"  # another flag for the same choice


def test_B78_a_misspelled_variable_is_the_same_error_as_the_flag(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", "--model", tiny, "--prompt", "hi"]
    by_flag = cli(*args, "--kv-cache-mode", "turbo5").refused()
    monkeypatch.setenv("KVCORE_KV_CACHE_MODE", "turbo5")
    assert cli(*args).refused() == by_flag
    assert all(mode in by_flag for mode in MODES)


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_B78_smollm2_by_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_KV_CACHE_MODE", "turbo4")
    monkeypatch.setenv("KVCORE_MAX_TOKENS", "1")
    prompt = "Name three rivers. " * 70
    found = cli("generate", "--json", "--dtype", "float16", "--prompt", prompt, *REFERENCE).json
    assert found["mode"]["effective"] == "turbo4"
    assert (found["cache"]["bytes_per_token"], found["cache"]["bytes_per_token_raw"]) == (6210, 23040)
    assert found["cache"]["rows_folded"] > 0


# Counting


class Clock:
    """Stands in for the module `time`: moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_B82_tokens_are_counted_not_characters(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tokens of 8 letters, 10 ms each after a prefill of 300 ms."""
    write_tiny_tokenizer(write_tiny_llama(tmp_path, vocab=320))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([f"word{i:04}" for i in range(20)])
    backend.save(str(tmp_path / "tokenizer.json"))
    words = iter(backend.token_to_id(f"word{i:04}") for i in range(20))
    clock = Clock()

    def step(_model: Model, ids: Sequence[int], cache: Cache) -> np.ndarray:
        clock.now += 0.3 if len(ids) > 1 else 0.01
        row = np.zeros((1, 2, len(ids), 64), np.float32)
        for layer in cache.layers:
            layer.append(row, row)
        logits = np.full(320, -1.0, np.float32)
        logits[next(words)] = 1.0
        return logits

    monkeypatch.setattr(Model, "_step", step)
    monkeypatch.setattr(kvcore.generate, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    args = ["--model", tmp_path, "--raw", "--prompt", "hello", "--max-tokens", 20, "--json", *REFERENCE]
    found = cli("generate", *args).json
    stats = found["stats"]
    assert found["text"] == "".join(f"word{i:04}" for i in range(20))
    assert stats["generation_tokens"] == 20
    assert math.isclose(stats["generation_tokens_per_second"], 100.0)  # 19 tokens in 190 ms
    assert stats["prompt_tokens"] == len(Tokenizer.from_folder(tmp_path).encode("hello"))
    assert math.isclose(stats["prompt_tokens_per_second"], stats["prompt_tokens"] / 0.3)
    assert math.isclose(stats["time_to_first_token"], 0.3)
