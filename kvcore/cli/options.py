"""The options, each declared once, in the groups that commands share.

Every flag is also an environment variable, KVCORE_ and the flag's name; the flag wins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

import typer

MODES = "fp16, int8, int8-turbo4, turbo4, turbo4-asym, turbo4-delegated, turbo3-asym"


def flag(name: str, help: str, **settings: Any) -> Any:
    """An option ``--name`` that the environment can set too."""
    variable = "KVCORE_" + name.lstrip("-").replace("-", "_").upper()
    settings.setdefault("envvar", variable)
    return typer.Option(name, help=help, show_envvar=False, **settings)


def stop_strings(given: list[str] | None) -> list[str]:
    """The flag's values, else the lines of KVCORE_STOP: a stop string may hold spaces."""
    return given or os.environ.get("KVCORE_STOP", "").splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    json: Annotated[bool, flag("--json", "Print one JSON object instead of text.")] = False
    debug: Annotated[bool, flag("--debug", "Show a traceback with an error.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOption:
    model: Annotated[
        str | None,
        flag(
            "--model",
            "Folder, .gguf file or hub id ORG/NAME; without it, the embedded SmolLM2.",
            metavar="MODEL",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeOptions:
    """Three ways to choose a mode; without any, fp16."""

    kv_cache_mode: Annotated[
        str | None, flag("--kv-cache-mode", f"One of {MODES}. Without it: fp16.", metavar="MODE")
    ] = None
    cache_type_k: Annotated[
        str | None, flag("--cache-type-k", "How keys are stored: fp16, int8 or turbo4.", metavar="TYPE")
    ] = None
    cache_type_v: Annotated[
        str | None,
        flag("--cache-type-v", "How values are stored: fp16, int8, turbo4 or turbo3.", metavar="TYPE"),
    ] = None
    kv_bits: Annotated[
        int | None, flag("--kv-bits", "16 (fp16), 8 (int8), 4 (turbo4) or 3 (turbo3-asym).", metavar="BITS")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Which rows of a quantized mode stay raw."""

    sink_tokens: Annotated[int, flag("--sink-tokens", "First tokens that stay raw in a quantized mode.")] = 4
    recent_tokens: Annotated[int, flag("--recent-tokens", "Newest tokens that stay raw.")] = 128
    page_size: Annotated[int, flag("--page-size", "Tokens that are quantized at a time.")] = 128
    boundary_layers: Annotated[int, flag("--boundary-layers", "First and last layers that stay raw.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeOptions:
    """How long rows of the cache live."""

    max_kv_size: Annotated[
        int | None, flag("--max-kv-size", "Most tokens that the cache holds; without it, as many as come.", metavar="N")
    ] = None
    keep: Annotated[int, flag("--keep", "First tokens that stay when others are dropped.", metavar="S")] = 4
    context_shift: Annotated[
        str, flag("--context-shift", "on: drop the oldest tokens after --keep; off: end there.", metavar="on|off")
    ] = "on"
    prompt_cache: Annotated[
        str | None, flag("--prompt-cache", "File with the cache of a prompt (kvcore cache-prompt).", metavar="FILE")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    backend: Annotated[
        str, flag("--backend", "auto, reference (NumPy), metal (MLX) or cuda (torch).", metavar="NAME")
    ] = "auto"
    device: Annotated[
        str | None, flag("--device", "Device of the backend: cpu, gpu, cuda or cuda:N.", metavar="DEVICE")
    ] = None
    kernels: Annotated[str, flag("--kernels", "auto, fused (refuse to fall back) or graph.", metavar="POLICY")] = "auto"
    dtype: Annotated[
        str,
        flag("--dtype", "Compute dtype and raw cache rows: auto, float32, float16 or bfloat16.", metavar="DTYPE"),
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    max_tokens: Annotated[int, flag("--max-tokens", "Most tokens to generate.")] = 256
    temp: Annotated[float, flag("--temp", "Temperature; 0 takes the likeliest token.")] = 0.0
    top_p: Annotated[float, flag("--top-p", "Keep the likeliest tokens up to this probability; 1 is off.")] = 1.0
    top_k: Annotated[int, flag("--top-k", "Keep this many tokens; 0 is off.")] = 0
    min_p: Annotated[float, flag("--min-p", "Drop tokens below this share of the best one; 0 is off.")] = 0.0
    repetition_penalty: Annotated[
        float, flag("--repetition-penalty", "Divide the scores of tokens seen before; 1 is off.")
    ] = 1.0
    seed: Annotated[int | None, flag("--seed", "Makes sampling repeatable.")] = None
    stop: Annotated[
        list[str],
        flag("--stop", "Stop before this text; repeatable.", envvar=None, callback=stop_strings, metavar="TEXT"),
    ] = ()  # type: ignore[assignment]  # typer knows lists only, and a frozen default must not be one


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    system: Annotated[str | None, flag("--system", "System message.", metavar="TEXT")] = None
    raw: Annotated[bool, flag("--raw", "Leave out the chat template: continue the text as it is.")] = False
    chat_template: Annotated[
        str | None,
        flag("--chat-template", "Jinja file to use instead of the model's template.", metavar="FILE"),
    ] = None
    prefill_step_size: Annotated[
        int, flag("--prefill-step-size", "Prompt tokens that run through the model at once.", min=1)
    ] = 512
    verbose: Annotated[bool, flag("--verbose", "Show prompt ids, kernel decisions and ignored settings.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOption:
    prompt: Annotated[str | None, flag("--prompt", "Text to answer; - reads standard input.", metavar="TEXT")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    head_dim: Annotated[int, flag("--head-dim", "Head size to decide for, without --model.", min=1)] = 128
    markdown: Annotated[
        bool,
        flag("--markdown", "Print the capability table of docs/capabilities.md, the same on every machine."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    model: Annotated[
        str,
        flag(
            "--model",
            "llama-3.1-8b, llama-3.1-70b, llama-3.2-1b, smollm2-135m, or a folder, .gguf file or hub id.",
            metavar="MODEL",
        ),
    ] = "smollm2-135m"
    context: Annotated[
        str | None, flag("--context", "Tokens, such as 32768 or 32k; without it, all that the model holds.")
    ] = None
    batch: Annotated[int, flag("--batch", "Sequences at a time.", min=1)] = 1
    memory: Annotated[str | None, flag("--memory", "Memory for weights and cache, such as 24GiB.", metavar="SIZE")] = (
        None
    )
    weight_bits: Annotated[
        float | None, flag("--weight-bits", "Bits per weight; 8 or less counts scales too.", metavar="BITS")
    ] = None
    bandwidth: Annotated[float, flag("--bandwidth", "Memory bandwidth in GB/s.")] = 4400.0
    dtype: Annotated[str, flag("--dtype", "Dtype of raw cache rows.", metavar="DTYPE")] = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    out: Annotated[str | None, flag("--out", "Folder to make; it must be new or empty.", metavar="DIR")] = None
    to: Annotated[str, flag("--to", "mlx (quantized) or hf (plain safetensors).", metavar="FORMAT")] = "mlx"
    q_bits: Annotated[
        int | None,
        flag(
            "--q-bits",
            "2, 3, 4, 5, 6 or 8. Without it, weights already quantized pass unchanged; others get 4.",
            metavar="BITS",
        ),
    ] = None
    q_group_size: Annotated[
        int | None, flag("--q-group-size", "32, 64 or 128 weights per scale; 64.", metavar="SIZE")
    ] = None
    dtype: Annotated[
        str | None,
        flag("--dtype", "float32, float16 or bfloat16; without it, the checkpoint's.", metavar="DTYPE"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What both benchmarks take."""

    modes: Annotated[str, flag("--modes", f"Modes to compare, comma-separated: {MODES}.", metavar="LIST")] = (
        "fp16,int8,int8-turbo4,turbo4"
    )
    repeats: Annotated[int, flag("--repeats", "Timed runs of each row.")] = 3
    out: Annotated[
        str | None,
        flag("--out", "Folder for the Markdown, JSON lines, CSV and plot files.", metavar="DIR"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBenchOptions:
    prompt_tokens: Annotated[
        str, flag("--prompt-tokens", "Prompt lengths, comma-separated; the ids are random.", metavar="LIST")
    ] = "32,512"
    new_tokens: Annotated[int, flag("--new-tokens", "Tokens to generate in each run.")] = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBenchOptions:
    shapes: Annotated[
        str, flag("--shapes", "BATCHxTOKENS, comma-separated; heads 32/8, head size 128.", metavar="LIST")
    ] = "1x2048,1x8192,1x32768,1x131072,4x32768,16x8192,16x32768,64x8192"
    heads: Annotated[str, flag("--heads", "Query heads, KV heads and head size.", metavar="Q/KV/D")] = "32/8/128"
    bench_dtype: Annotated[str, flag("--bench-dtype", "float16 or bfloat16.", metavar="DTYPE")] = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBenchOptions:
    batches: Annotated[str, flag("--batches", "Sequences of an append, comma-separated.", metavar="LIST")] = "1,16"
    bench_dtype: Annotated[str, flag("--bench-dtype", "float16 or bfloat16.", metavar="DTYPE")] = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    modes: Annotated[
        str,
        flag(
            "--modes",
            "Modes (or baselines, trials) to score, comma-separated; modes, baselines and trials name them all.",
            metavar="LIST",
        ),
    ] = "modes"
    text: Annotated[
        str | None, flag("--text", "UTF-8 file to score; without it, the bundled sample.", metavar="FILE")
    ] = None
    context: Annotated[int, flag("--context", "Tokens of a window of text.")] = 1024
    windows: Annotated[int, flag("--windows", "Windows of text, spread over it.")] = 6
    starts: Annotated[
        str | None, flag("--starts", "First tokens of the windows, comma-separated, instead.", metavar="LIST")
    ] = None
    keep_raw: Annotated[
        str,
        flag(
            "--keep-raw",
            "Rows that stay raw: own (the cache's policy), sliding (the same, by single rows), none; comma-separated.",
            metavar="LIST",
        ),
    ] = "own"
    path: Annotated[
        str,
        flag(
            "--path",
            "one-pass (a mask over both forms of a row), pages (the real cache, by pages) or decode (token by token).",
            metavar="PATH",
        ),
    ] = "one-pass"
    probes: Annotated[
        str,
        flag("--probes", "Also measure attention, greedy, retrieval; comma-separated.", metavar="LIST"),
    ] = ""
    out: Annotated[
        str | None, flag("--out", "Folder for the Markdown, JSON lines, CSV and plot files.", metavar="DIR")
    ] = None
    state: Annotated[
        str | None,
        flag("--state", "File of finished rows to go on from; with --out one is kept until the end.", metavar="FILE"),
    ] = None
