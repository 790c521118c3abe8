"""The options, each declared once, in the groups that commands share.

Every flag is also an environment variable, KVCORE_ and the flag's name; the flag wins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

import typer

RANDOM_MODELS = "llama-3.1-8b-4bit, llama-3.1-8b-bf16, llama-3.1-70b-4bit, llama-3.2-1b-4bit or smollm2-135m"
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
            "Folder, .gguf file or hub id ORG/NAME; without it, most commands use the embedded SmolLM2.",
            metavar="MODEL",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeOptions:
    """Three ways to choose a mode; without any, fp16."""

    kv_cache_mode: Annotated[
        str | None, flag("--kv-cache-mode", f"One of {MODES}. Without it fp16; doctor shows all.", metavar="MODE")
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
    kv_cache_budget: Annotated[
        str | None,
        flag("--kv-cache-budget", "Most bytes that the cache may take, such as 512MiB or 2G.", metavar="BYTES"),
    ] = None
    prompt_cache: Annotated[
        str | None, flag("--prompt-cache", "File of a prompt's cache, which cache-prompt writes.", metavar="FILE")
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
class ParallelOptions:
    tensor_parallel: Annotated[
        int,
        flag("--tensor-parallel", "Ranks that share weights and KV heads (see docs/scale.md).", min=1, metavar="N"),
    ] = 1


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
        int | None,
        flag(
            "--prefill-step-size",
            "Prompt tokens that run through the model at once: 512, on an NVIDIA GPU 2048.",
            min=1,
        ),
    ] = None
    verbose: Annotated[bool, flag("--verbose", "Show prompt ids, kernel decisions and ignored settings.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOption:
    prompt: Annotated[str | None, flag("--prompt", "The text; - reads standard input.", metavar="TEXT")] = None


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
    max_kl: Annotated[
        float, flag("--max-kl", "Mean KL in nats that a recommended mode may cost, as measured on SmolLM2.", min=0.0)
    ] = 5e-4
    dtype: Annotated[str, flag("--dtype", "Dtype of raw cache rows.", metavar="DTYPE")] = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A fleet to simulate; ``rps`` asks for it."""

    rps: Annotated[
        float | None, flag("--rps", "Simulate a fleet that gets this many requests per second.", metavar="R")
    ] = None
    replicas: Annotated[int, flag("--replicas", "Copies of the model.", min=1)] = 1
    prompt_lengths: Annotated[
        str,
        flag("--prompt-lengths", "512, or 256,1k,4k, or 128-2k, or normal:MEAN:DEVIATION.", metavar="TOKENS"),
    ] = "128-2k"
    output_lengths: Annotated[str, flag("--output-lengths", "The same for the answers.", metavar="TOKENS")] = "32-512"
    rates: Annotated[
        str | None, flag("--rates", "Measured rates by mode (docs/scale.md); without it, floors.", metavar="FILE")
    ] = None
    compute: Annotated[float, flag("--compute", "TFLOP/s of a device in prefill, for floors.")] = 400.0
    link_latency: Annotated[
        float, flag("--link-latency", "Microseconds of a sum over the ranks, for floors.", metavar="US")
    ] = 15.0
    max_batch: Annotated[int, flag("--max-batch", "Sequences that a replica decodes at a time.", min=1)] = 64
    prefill_step_size: Annotated[
        int, flag("--prefill-step-size", "Prompt tokens that run through the model at once.", min=1)
    ] = 512
    cost_per_hour: Annotated[
        float | None, flag("--cost-per-hour", "Price of a device, for the cost of a million tokens.", metavar="PRICE")
    ] = None
    requests: Annotated[
        int | None, flag("--requests", "Requests to simulate; without it, 2000 or 20 per replica.", min=1)
    ] = None
    seed: Annotated[int, flag("--seed", "Makes the arrivals repeatable.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    context: Annotated[
        str | None, flag("--context", "Tokens, such as 32768 or 32k; without it, all that the model holds.")
    ] = None
    dtype: Annotated[
        str, flag("--dtype", "Compute dtype and raw cache rows: auto, float32, float16 or bfloat16.", metavar="DTYPE")
    ] = "auto"
    max_batch: Annotated[int | None, flag("--max-batch", "Sequences at a time.", min=1, metavar="N")] = None
    kv_cache_budget: Annotated[
        str | None, flag("--kv-cache-budget", "Memory for the cache, such as 40GiB.", metavar="SIZE")
    ] = None
    served_model_name: Annotated[
        str | None, flag("--served-model-name", "Name of the model in the API.", metavar="NAME")
    ] = None
    host: Annotated[str | None, flag("--host", "Address to listen on.")] = None
    port: Annotated[int | None, flag("--port", "Port to listen on.", min=1, max=65535)] = None
    chat_template: Annotated[
        str | None,
        flag("--chat-template", "Jinja file to use instead of the model's template.", metavar="FILE"),
    ] = None


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
        flag("--out", "Folder for Markdown, JSON lines, CSV and, where there is one, the plot.", metavar="DIR"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBenchOptions:
    prompt_tokens: Annotated[
        str, flag("--prompt-tokens", "Prompt lengths, comma-separated; the ids are random.", metavar="LIST")
    ] = "32,512"
    new_tokens: Annotated[int, flag("--new-tokens", "Tokens to generate in each run.")] = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBenchOptions:
    random_model: Annotated[
        str | None,
        flag(
            "--random-model",
            f"Synthetic weights instead: {RANDOM_MODELS}.",
            metavar="NAME",
        ),
    ] = None
    prompt_tokens: Annotated[
        str, flag("--prompt-tokens", "Prompt lengths, comma-separated; the ids are random.", metavar="LIST")
    ] = "2048,8192,32768"
    batch: Annotated[int, flag("--batch", "Sequences that decode together.")] = 1
    max_tokens: Annotated[int, flag("--max-tokens", "Tokens to time in each run.")] = 64
    fill: Annotated[
        str, flag("--fill", "real runs the prompt; random draws its rows of K and V instead.", metavar="HOW")
    ] = "real"
    prefill_step_size: Annotated[int, flag("--prefill-step-size", "Tokens of the prompt that run at once.")] = 4096
    peer: Annotated[
        str,
        flag("--peer", "none, or transformers: its generate loop on a bf16 model of the same shape.", metavar="NAME"),
    ] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBenchOptions:
    """A model with synthetic weights, to be written."""

    random_model: Annotated[str | None, flag("--random-model", f"Its shape: {RANDOM_MODELS}.", metavar="NAME")] = None
    out: Annotated[str | None, flag("--out", "Folder to make; it must be new or empty.", metavar="DIR")] = None
    layers: Annotated[int | None, flag("--layers", "Write this many layers; without it, all.", min=1, metavar="N")] = (
        None
    )
    tokenizer: Annotated[
        str | None,
        flag(
            "--tokenizer",
            "Folder, tokenizer.json or .gguf file to take it from; without it, the embedded SmolLM2's.",
            metavar="PATH",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesBenchOptions:
    prompt_tokens: Annotated[
        str, flag("--prompt-tokens", "Prompt lengths, comma-separated; the ids are random.", metavar="LIST")
    ] = "64,256,1024"
    batches: Annotated[str, flag("--batches", "Sequences that decode together, comma-separated.", metavar="LIST")] = (
        "1,2,4,8"
    )
    new_tokens: Annotated[int, flag("--new-tokens", "Decode steps of each batch.", min=1)] = 8
    prefill_step_size: Annotated[
        int, flag("--prefill-step-size", "Prompt tokens that run through the model at once.", min=1)
    ] = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBenchOptions:
    backend: Annotated[str, flag("--backend", "cuda (an NVIDIA GPU) or metal (an Apple GPU).", metavar="BACKEND")] = (
        "cuda"
    )
    shapes: Annotated[
        str | None,
        flag("--shapes", "BATCHxTOKENS, comma-separated; without it, 1x2048 to what a GPU holds.", metavar="LIST"),
    ] = None
    heads: Annotated[str, flag("--heads", "Query heads, KV heads and head size.", metavar="Q/KV/D")] = "32/8/128"
    bench_dtype: Annotated[str, flag("--bench-dtype", "float16 or bfloat16.", metavar="DTYPE")] = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBenchOptions:
    batches: Annotated[str, flag("--batches", "Sequences of an append, comma-separated.", metavar="LIST")] = "1,16"
    bench_dtype: Annotated[str, flag("--bench-dtype", "float16 or bfloat16.", metavar="DTYPE")] = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearBenchOptions:
    random_model: Annotated[
        str,
        flag("--random-model", "llama-3.1-8b-4bit, llama-3.1-8b-bf16 or llama-3.2-1b-4bit.", metavar="NAME"),
    ] = "llama-3.1-8b-4bit"
    rows: Annotated[str, flag("--rows", "Rows of a product, comma-separated, at most 64.", metavar="LIST")] = (
        "1,2,4,8,16,32,64"
    )
    repeats: Annotated[int, flag("--repeats", "Timed runs of each row.")] = 21
    out: Annotated[str | None, flag("--out", "Folder for the Markdown, JSON lines and CSV files.", metavar="DIR")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersBenchOptions:
    layers: Annotated[int, flag("--layers", "Layers of the random model.", min=1)] = 4
    context: Annotated[int, flag("--context", "Tokens of the prompt.", min=1)] = 32768
    batch: Annotated[int, flag("--batch", "Sequences at a time.", min=1)] = 1
    heads: Annotated[str, flag("--heads", "Query heads, KV heads and head size.", metavar="Q/KV/D")] = "32/8/128"
    vocab: Annotated[int, flag("--vocab", "Vocabulary of the random model.", min=16)] = 128256
    bench_dtype: Annotated[str, flag("--bench-dtype", "float16, bfloat16 or float32.", metavar="DTYPE")] = "bfloat16"
    device: Annotated[str, flag("--device", "cuda, cuda:N or cpu.", metavar="DEVICE")] = "cuda"


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
    kv_cache_budget: Annotated[
        str | None,
        flag("--kv-cache-budget", "Most bytes that a cache may take, such as 512MiB or 2G.", metavar="BYTES"),
    ] = None
    probes: Annotated[
        str,
        flag("--probes", "Also measure attention, greedy, retrieval; comma-separated.", metavar="LIST"),
    ] = ""
    out: Annotated[
        str | None,
        flag("--out", "Folder for Markdown, JSON lines, CSV and, where there is one, the plot.", metavar="DIR"),
    ] = None
    state: Annotated[
        str | None,
        flag("--state", "File of finished rows to go on from; with --out one is kept until the end.", metavar="FILE"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and for whom to serve, and how much at a time."""

    host: Annotated[str, flag("--host", "Address to listen on; 0.0.0.0 is every one of this machine.")] = "127.0.0.1"
    port: Annotated[int, flag("--port", "Port to listen on; 0 takes a free one.")] = 8080
    api_key: Annotated[
        str | None, flag("--api-key", "Key that requests must carry; better set as KVCORE_API_KEY.", metavar="KEY")
    ] = None
    allowed_origins: Annotated[
        str,
        flag(
            "--allowed-origins",
            "Sites whose pages may send requests, comma-separated; * is every one.",
            metavar="LIST",
        ),
    ] = ""
    served_model_name: Annotated[
        str | None,
        flag("--served-model-name", "Name in answers, and further names to accept, comma-separated.", metavar="LIST"),
    ] = None
    chat_template: Annotated[
        str | None,
        flag("--chat-template", "Jinja file to use instead of the model's template.", metavar="FILE"),
    ] = None
    kv_cache_budget: Annotated[
        str | None,
        flag(
            "--kv-cache-budget",
            "Memory for all caches: a size, such as 8GiB, or a share of the free memory, such as 80%.",
            metavar="SIZE",
        ),
    ] = None
    request_modes: Annotated[
        str,
        flag(
            "--request-modes",
            "Modes that single requests may ask for where caches are in pages, comma-separated; elsewhere any.",
            metavar="LIST",
        ),
    ] = ""
    max_batch: Annotated[int, flag("--max-batch", "Most requests that run at a time.")] = 64
    max_queue: Annotated[
        int, flag("--max-queue", "Requests that may wait beside --max-batch; more are refused with status 429.")
    ] = 256
    max_model_len: Annotated[
        int | None,
        flag("--max-model-len", "Most tokens of prompt and answer; without it, the model's context.", metavar="N"),
    ] = None
    max_kv_size: Annotated[
        int | None, flag("--max-kv-size", "Most tokens that a request's cache holds.", metavar="N")
    ] = None
    keep: Annotated[int, flag("--keep", "First tokens that stay when others are dropped.", metavar="S")] = 4
    context_shift: Annotated[
        str, flag("--context-shift", "on: drop the oldest tokens after --keep; off: end there.", metavar="on|off")
    ] = "on"
    prefill_step_size: Annotated[
        int | None,
        flag("--prefill-step-size", "Prompt tokens that run at once; without it 2048 on a GPU, else 512."),
    ] = None
    shutdown_timeout: Annotated[
        float, flag("--shutdown-timeout", "Seconds that running answers get to finish after SIGTERM.")
    ] = 30.0
    log_format: Annotated[str, flag("--log-format", "json, text, or auto: text on a terminal.", metavar="FORMAT")] = (
        "auto"
    )
    debug: Annotated[bool, flag("--debug", "Show a traceback with an error.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDefaultOptions:
    """What a request gets for what it leaves out."""

    max_tokens: Annotated[
        int | None,
        flag("--max-tokens", "Most tokens of an answer; without it, as many as fit (16 at /v1/completions)."),
    ] = None
    temp: Annotated[float, flag("--temp", "Temperature; 0 takes the likeliest token.")] = 1.0
    top_p: Annotated[float, flag("--top-p", "Keep the likeliest tokens up to this probability; 1 is off.")] = 1.0
    top_k: Annotated[int, flag("--top-k", "Keep this many tokens; 0 is off.")] = 0
    min_p: Annotated[float, flag("--min-p", "Drop tokens below this share of the best one; 0 is off.")] = 0.0
    repetition_penalty: Annotated[
        float, flag("--repetition-penalty", "Divide the scores of tokens seen before; 1 is off.")
    ] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Replicas on Ray Serve; ``ray`` asks for them."""

    ray: Annotated[bool, flag("--ray", "Serve replicas on Ray Serve (see docs/scale.md).")] = False
    replicas: Annotated[int, flag("--replicas", "Copies of the model.", min=1)] = 1
    autoscale: Annotated[
        str | None,
        flag("--autoscale", "Ray's settings, such as min_replicas=1,max_replicas=4.", metavar="NAME=VALUE,..."),
    ] = None
    gpus_per_replica: Annotated[float, flag("--gpus-per-replica", "GPUs that Ray gives to each.", min=0)] = 0.0
    routing: Annotated[
        str, flag("--routing", "prefix: conversations return to their replica; balanced: by load alone.")
    ] = "prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """A load on a server."""

    url: Annotated[str, flag("--url", "The API's address, with /v1.")] = "http://127.0.0.1:8080/v1"
    api_key: Annotated[
        str | None, flag("--api-key", "Key of that server; better set as KVCORE_API_KEY.", metavar="KEY")
    ] = None
    model: Annotated[str | None, flag("--model", "Model to ask for; without it, the first that the server lists.")] = (
        None
    )
    endpoint: Annotated[str, flag("--endpoint", "chat or completions.", metavar="NAME")] = "completions"
    requests: Annotated[int, flag("--requests", "Requests to send.")] = 32
    rate: Annotated[
        str, flag("--rate", "Requests per second on average, with Poisson arrivals; inf sends all at once.")
    ] = "1"
    max_concurrency: Annotated[
        int | None, flag("--max-concurrency", "Most requests at a time; others wait on this side.", metavar="N")
    ] = None
    prompt_tokens: Annotated[
        str, flag("--prompt-tokens", "Tokens of a prompt: a number, or a range such as 256-1024.", metavar="N")
    ] = "256"
    new_tokens: Annotated[str, flag("--new-tokens", "Tokens of an answer: a number, or a range.", metavar="N")] = "64"
    shared_prefix: Annotated[
        float, flag("--shared-prefix", "Share of a prompt that all prompts have in common, 0 to 1.")
    ] = 0.0
    tokens_per_word: Annotated[
        float | None,
        flag("--tokens-per-word", "Of the words of prompts; without it, measured with one request.", metavar="X"),
    ] = None
    seed: Annotated[int, flag("--seed", "Makes lengths, words and arrivals repeatable.")] = 0
    timeout: Annotated[float, flag("--timeout", "Seconds that a request may take.")] = 600.0
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", "Ask for answers of full length (a field of kvcore, vLLM and llama-server).")
    ] = False
    out: Annotated[str | None, flag("--out", "Folder for the Markdown, JSON lines and CSV files.", metavar="DIR")] = (
        None
    )
