"""The commands and what they take. Each imports its module when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcore.cli.command import add_command
from kvcore.cli.options import (
    AdviseOptions,
    AttentionBenchOptions,
    BackendOptions,
    BenchOptions,
    CacheBenchOptions,
    CommonOptions,
    ConvertOptions,
    DecodeBenchOptions,
    DoctorOptions,
    EvalOptions,
    ExportOptions,
    GenerateBenchOptions,
    LifeOptions,
    LinearBenchOptions,
    ModelBenchOptions,
    ModelOption,
    ModeOptions,
    ParallelOptions,
    PlanOptions,
    PromptOption,
    RatesBenchOptions,
    RayOptions,
    SamplingOptions,
    ServeBenchOptions,
    ServeDefaultOptions,
    ServeOptions,
    TextOptions,
    TransformersBenchOptions,
    WindowOptions,
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # rich costs most of the time of --help
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    help="Quantized KV caches for llama-family models, on NVIDIA, Apple and NumPy.",
    epilog="Each flag is also an environment variable, --kv-cache-mode for example KVCORE_KV_CACHE_MODE; "
    "the flag wins. Text and JSON go to stdout, progress, notes and statistics to stderr. "
    "Exit codes: 0, 1 for a failure, 2 for bad input, 130 when interrupted.",
)


@app.callback()
def kvcore(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    if debug:
        ctx.obj["debug"] = True
    if version:
        from kvcore.version import __version__

        typer.echo(f"kvcore {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def generate(
    prompt: PromptOption,
    model: ModelOption,
    mode: ModeOptions,
    sampling: SamplingOptions,
    text: TextOptions,
    backend: BackendOptions,
    window: WindowOptions,
    life: LifeOptions,
    parallel: ParallelOptions,
    common: CommonOptions,
) -> None:
    """Answer one prompt, streamed to stdout."""
    from kvcore.cli.generate import generate as run
    from kvcore.cli.session import Settings

    run(prompt.prompt, Settings(model, mode, sampling, text, backend, window, life, common, parallel))


def chat(
    model: ModelOption,
    mode: ModeOptions,
    sampling: SamplingOptions,
    text: TextOptions,
    backend: BackendOptions,
    window: WindowOptions,
    life: LifeOptions,
    parallel: ParallelOptions,
    common: CommonOptions,
) -> None:
    """Talk with a model, keeping its cache.

    /reset starts a new conversation, /stats shows the cache, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    from kvcore.cli.chat import chat as run
    from kvcore.cli.session import Settings

    run(Settings(model, mode, sampling, text, backend, window, life, common, parallel))


def cache_prompt(
    prompt: PromptOption,
    model: ModelOption,
    mode: ModeOptions,
    text: TextOptions,
    backend: BackendOptions,
    window: WindowOptions,
    life: LifeOptions,
    common: CommonOptions,
) -> None:
    """Run a prompt once and keep its cache.

    The file serves --prompt-cache of generate and chat, on any backend.
    """
    from kvcore.cli.cache_prompt import cache_prompt as run
    from kvcore.cli.session import Settings

    run(prompt.prompt, Settings(model, mode, SamplingOptions(), text, backend, window, life, common))


def serve(
    model: ModelOption,
    mode: ModeOptions,
    options: ServeOptions,
    defaults: ServeDefaultOptions,
    backend: BackendOptions,
    window: WindowOptions,
    parallel: ParallelOptions,
    replicas: RayOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Requests join and leave a running batch; prompts reuse what others have run. A small chat is at /.
    """
    from kvcore.cli.serve import serve as run
    from kvcore.cli.serve_ray import check_unused, serve_ray

    if replicas.ray:
        serve_ray(model, mode, options, defaults, backend, window, parallel, replicas)
    else:
        check_unused(replicas)
        run(model, mode, options, defaults, backend, window, parallel)


def doctor(
    model: ModelOption,
    doctor: DoctorOptions,
    mode: ModeOptions,
    backend: BackendOptions,
    common: CommonOptions,
) -> None:
    """Show what works here, and why.

    Backends, versions, and the kernel that each mode takes for each operation, with the reasons.
    """
    from kvcore.cli.doctor import doctor as run

    run(model, doctor, mode, backend, common)


def advise(
    advise: AdviseOptions,
    fleet: PlanOptions,
    parallel: ParallelOptions,
    window: WindowOptions,
    common: CommonOptions,
) -> None:
    """Compute what each cache mode costs.

    Bytes, the largest context that fits, and a floor in time per token. No weights are read. With --rps, a simulation
    of replicas under load: waiting times, tokens per second and cost.
    """
    from kvcore.cli.advise import advise as run
    from kvcore.cli.plan import check_unused, plan

    if fleet.rps is None:
        check_unused(fleet, parallel)
        run(advise, window, common)
    else:
        plan(advise, fleet, parallel, window, common)


def vllm_command(
    model: ModelOption,
    mode: ModeOptions,
    options: ExportOptions,
    parallel: ParallelOptions,
    window: WindowOptions,
    common: CommonOptions,
) -> None:
    """Print the nearest `vllm serve` line.

    For those who move to a fleet: what differs there goes to stderr.
    """
    from kvcore.cli.export import export_vllm as run

    run(model, mode, options, parallel, window, common)


def convert(model: ModelOption, convert: ConvertOptions, common: CommonOptions) -> None:
    """Write a model as safetensors, quantized or not.

    The result is a folder for --model, and for mlx-lm (mlx) or transformers (hf).
    """
    from kvcore.cli.convert import convert as run

    run(model, convert, common)


def bench_generate(
    model: ModelOption,
    bench: BenchOptions,
    options: GenerateBenchOptions,
    backend: BackendOptions,
    parallel: ParallelOptions,
    common: CommonOptions,
) -> None:
    """Time prefill and decode of a model, mode by mode.

    Modes take turns; every row carries its effective mode and kernels.
    """
    from kvcore.cli.bench import bench_generate as run

    run(model, bench, options, backend, parallel, common)


def bench_rates(
    model: ModelOption,
    bench: BenchOptions,
    options: RatesBenchOptions,
    backend: BackendOptions,
    common: CommonOptions,
) -> None:
    """Measure the rates that `kvcore advise --rates` simulates with.

    Prefill and decode of the engine at several lengths and batches, fitted; --json prints the file.
    """
    from kvcore.cli.bench import bench_rates as run

    run(model, bench, options, backend, common)


def bench_decode(
    model: ModelOption,
    bench: BenchOptions,
    options: DecodeBenchOptions,
    backend: BackendOptions,
    parallel: ParallelOptions,
    common: CommonOptions,
) -> None:
    """Time decode of a whole model at long contexts, mode by mode.

    Each row says how a step ran, its share of the floor that memory bandwidth sets, and what the cache holds.
    """
    from kvcore.cli.bench_decode import bench_decode as run

    run(model, bench, options, backend, parallel, common)


def bench_model(options: ModelBenchOptions, common: CommonOptions) -> None:
    """Write a model of a real shape with synthetic weights.

    A folder for --model that needs no download, with a tokenizer. Its text means nothing; its speed does.
    """
    from kvcore.cli.bench_model import bench_model as run

    run(options, common)


def bench_attention(bench: BenchOptions, options: AttentionBenchOptions, common: CommonOptions) -> None:
    """Time the fused attention kernels beside torch's own, or MLX's.

    Needs an NVIDIA GPU, or with --backend metal an Apple one. A kernel is checked against float64 before it is timed.
    """
    from kvcore.cli.bench import bench_attention as run

    run(bench, options, common)


def bench_cache(bench: BenchOptions, options: CacheBenchOptions, common: CommonOptions) -> None:
    """Time the kernels that write the paged cache: append, and fold beside a plain copy.

    Needs an NVIDIA GPU. Results are checked before they are timed.
    """
    from kvcore.cli.bench import bench_cache as run

    run(bench, options, common)


def bench_linear(options: LinearBenchOptions, common: CommonOptions) -> None:
    """Time the linear layers of a decode step beside torch's int4 product and cuBLAS.

    Needs an NVIDIA GPU. Weights are synthetic; results are checked against float64 before they are timed.
    """
    from kvcore.cli.bench import bench_linear as run

    run(options, common)


def bench_serve(options: ServeBenchOptions, common: CommonOptions) -> None:
    """Put a load on a server and time its answers.

    Any server with OpenAI's API. Requests arrive at random, whether or not earlier ones are done.
    """
    from kvcore.cli.bench_serve import bench_serve as run

    run(options, common)


def bench_transformers(bench: BenchOptions, options: TransformersBenchOptions, common: CommonOptions) -> None:
    """Time a decode step inside transformers: kvcore's cache beside DynamicCache and QuantizedCache.

    A random llama of few layers. Needs the extra transformers, and an NVIDIA GPU unless --device cpu.
    """
    from kvcore.cli.bench import bench_transformers as run

    run(bench, options, common)


def eval_(
    model: ModelOption, options: EvalOptions, backend: BackendOptions, window: WindowOptions, common: CommonOptions
) -> None:
    """Measure what each cache mode costs in fidelity.

    KL to the raw model, top-1 agreement and perplexity on a text, as decode sees the cache. docs/fidelity.md says how.
    """
    from kvcore.cli.eval import evaluate

    evaluate(model, options, backend, window, common)


for command in (generate, chat, serve, cache_prompt, doctor, advise, convert):
    add_command(app, command.__name__.replace("_", "-"), command)
add_command(app, "eval", eval_)

export = typer.Typer(help="The same setting on other engines.", no_args_is_help=True, rich_markup_mode=None)
add_command(export, "vllm-command", vllm_command)
app.add_typer(export, name="export")

bench = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)
add_command(bench, "generate", bench_generate)
add_command(bench, "decode", bench_decode)
add_command(bench, "model", bench_model)
add_command(bench, "rates", bench_rates)
add_command(bench, "attention", bench_attention)
add_command(bench, "cache", bench_cache)
add_command(bench, "linear", bench_linear)
add_command(bench, "serve", bench_serve)
add_command(bench, "transformers", bench_transformers)
app.add_typer(bench, name="bench")
