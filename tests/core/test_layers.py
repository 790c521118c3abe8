"""The arrows between the layers: a lower one never imports a higher one, and modes and backends never meet."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the bottom up; the packages of one line may import each other.
LAYERS = (
    ("errors", "version", "ops", "communicator"),
    ("layout",),
    ("registry",),
    ("backends",),
    ("modes",),
    ("cache",),
    ("attention",),
    ("weights", "text", "models", "sampling"),
    ("promptcache",),
    ("generate", "decoding", "parallel"),
    ("runtime",),
    ("loading", "advise", "recommend", "planning", "export"),
    ("engine",),
    ("server",),
    ("cli", "bench", "eval"),
    ("integrations",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# What a backend may import beside its own folder: whole packages, or one module of a package.
BACKEND_IMPORTS = ("errors", "ops", "communicator", "layout", "registry", "backends.load", "weights.types")
# Each framework belongs to its backend; benchmarks measure beside it, and integrations live inside its libraries.
FRAMEWORKS = {"torch": "backends.cuda", "triton": "backends.cuda", "mlx": "backends.metal"}
BESIDE = ("bench", "integrations")


def source_tree() -> dict[str, str]:
    """Module name below kvcore -> source; the package's own __init__ is a facade of lazy imports."""
    modules = {}
    for path in sorted((ROOT / "kvcore").rglob("*.py")):
        parts = path.relative_to(ROOT / "kvcore").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            modules[name] = path.read_text(encoding="utf-8")
    return modules


def violations(modules: Mapping[str, str]) -> list[str]:
    """One line per import that goes against an arrow."""
    packages = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)}
    found = []
    for name, source in modules.items():
        for target in imports(name, source, is_package=name in packages):
            if (reason := against(name, target)) is not None:
                found.append(f"{name} imports {target}: {reason}")
    return found


def imports(name: str, source: str, *, is_package: bool) -> Iterator[str]:
    """Every import in a module, wherever it stands, as ``kvcore.cache.rows`` or ``torch``."""
    home = ["kvcore", *name.split(".")]
    if not is_package:
        home.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "kvcore":
                yield from (f"kvcore.{alias.name}" for alias in node.names)
            else:
                yield module


def against(name: str, target: str) -> str | None:
    """Why module ``name`` may not import ``target``; None where it may."""
    package, _, inner = target.partition(".")
    if package in FRAMEWORKS and not (within(name, FRAMEWORKS[package]) or any(within(name, each) for each in BESIDE)):
        return f"{package} belongs to {FRAMEWORKS[package]}"
    if package != "kvcore":
        return None
    ours, theirs = name.split(".")[0], inner.split(".")[0]
    for each in (ours, theirs):
        if each not in RANK:
            return f"{each or 'kvcore'} has no place in the layers"
    own = ".".join(name.split(".")[:2])
    if ours == "backends" and own != "backends.load" and own != "backends":
        allowed = within(inner, own) or any(within(inner, each) for each in BACKEND_IMPORTS)
        return None if allowed else "a backend may not import it"
    if ours in ("modes", "cache") and theirs == "backends":
        return f"{ours} and backends meet in layout"
    return None if RANK[theirs] <= RANK[ours] else f"{theirs} is above {ours}"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_every_import_follows_the_arrows() -> None:
    assert violations(source_tree()) == []


def test_every_module_has_a_place_in_the_layers() -> None:
    assert {name.split(".")[0] for name in source_tree()} <= set(RANK)


def test_the_tree_that_is_checked_is_the_package() -> None:
    modules = source_tree()
    assert {"ops", "attention", "cache", "cache.layer", "backends.metal.ops", "modes.turbo"} <= set(modules)
    found = set(imports("cache.layer", modules["cache.layer"], is_package=False))
    assert {"kvcore.cache.rows", "kvcore.cache.view", "kvcore.layout"} <= found


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("layout.planes", "from kvcore.modes import MODES", "modes is above layout"),
        ("registry", "import kvcore.cache.layer", "cache is above registry"),
        ("cache.rows", "from kvcore import attention", "attention is above cache"),
        ("cache.rows", "from ..attention import make_cache", "attention is above cache"),
        ("modes.int8", "from kvcore.backends import load_backend", "modes and backends meet in layout"),
        ("cache.layer", "from kvcore.backends.reference import spec", "cache and backends meet in layout"),
        ("backends.cuda.ops", "from kvcore.modes import turbo", "a backend may not import it"),
        ("backends.cuda.ops", "from ...cache import RowBuffer", "a backend may not import it"),
        ("backends.metal", "from kvcore.backends.cuda import load", "a backend may not import it"),
        ("backends.metal.ops", "from kvcore.weights import Weight", "a backend may not import it"),
        ("backends.load", "from kvcore.modes import MODES", "modes is above backends"),
        ("errors", "def f():\n    from kvcore.layout import Layout", "layout is above errors"),
        ("ops", "if TYPE_CHECKING:\n    from kvcore.layout import Layout", "layout is above ops"),
        ("models.llama", "from kvcore.runtime import load", "runtime is above models"),
        ("runtime", "from kvcore.cli import app", "cli is above runtime"),
        ("cache.layer", "import torch.nn", "torch belongs to backends.cuda"),
        ("models.llama", "from mlx.core import array", "mlx belongs to backends.metal"),
        ("cli.app", "from kvcore.integrations import rows", "integrations is above cli"),
        ("shiny", "from kvcore.errors import InputError", "shiny has no place in the layers"),
        ("cache.rows", "from kvcore.shiny import light", "shiny has no place in the layers"),
    ],
)
def test_a_reversed_arrow_is_found(name: str, source: str, reason: str) -> None:
    (found,) = violations({"cache": "", "backends": "", "modes": "", name: source, f"{name.split('.')[0]}.other": ""})
    assert found.endswith(reason)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("modes.turbo", "from kvcore.layout import Codec\nfrom kvcore.modes.int8 import FP16_MAX"),
        ("backends.cuda", "import torch\nfrom kvcore.backends.load import Backend\nfrom .ops import TorchOps"),
        ("backends.metal.ops", "import mlx.core as mx\nfrom kvcore.weights.types import AffineWeight"),
        ("bench.peers", "import torch\nfrom kvcore.backends.cuda.ops import TorchOps"),
        ("integrations.mlx_lm.cache", "import mlx.core as mx\nfrom kvcore.attention import decide"),
        ("attention", "import numpy\nfrom kvcore import backends, cache"),
        ("weights.checkpoint", "from kvcore.models.config import LlamaConfig"),
        ("models.llama", "from kvcore.weights import Checkpoint"),
    ],
)
def test_an_arrow_that_points_down_is_not(name: str, source: str) -> None:
    assert violations({name: source, f"{name}.other": ""} if name == "backends.cuda" else {name: source}) == []
