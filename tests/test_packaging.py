"""What is shipped, what importing it costs, and what the automation offers."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = ("torch", "mlx", "transformers", "huggingface_hub")
LIGHT_COMMANDS = {"import": ["-c", "import kvcore"], "help": ["-m", "kvcore", "--help"]}
SESSIONS = {
    *("generate", "tests", "tests-full", "lint", "types", "build", "docs", "parity"),
    *("tests-metal", "tests-cuda", "bench-reference", "bench-metal", "bench-cuda"),
}

LINKS = """
[good](other.md) [good](other.md#a-turbo4-page-in-short) [outside](https://example.org/x) [good](#top)
![bad](gone.png) [bad](other.md#no-heading) `[code](gone.md)` [good][ref]

[bad]: gone/page.md
[ref]: other.md
```
[code](gone.md)
```
# Top
"""

light_command = pytest.mark.parametrize("args", LIGHT_COMMANDS.values(), ids=LIGHT_COMMANDS.keys())


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=ROOT, check=True, capture_output=True, text=True)


@light_command
def test_a_light_command_imports_no_framework(args: list[str]) -> None:
    trace = run_python("-X", "importtime", *args).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in trace.splitlines()}
    assert "kvcore" in imported, "the trace of imports was not understood"
    assert imported.isdisjoint(HEAVY)


@light_command
def test_a_light_command_takes_under_300_ms(args: list[str]) -> None:
    assert min(cpu_seconds(args) for _ in range(5)) < 0.3


def cpu_seconds(args: list[str]) -> float:
    """Seconds of one run on one core: on a busy machine the clock on the wall times the neighbours."""
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_names_the_main_job() -> None:
    assert "generate" in run_python("-m", "kvcore", "--help").stdout


def test_the_package_is_typed_and_says_so_where_it_is_installed() -> None:
    assert (ROOT / "kvcore" / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["kvcore"]


def test_every_folder_of_modules_is_a_package_that_the_wheel_includes() -> None:
    folders = {path.parent for path in (ROOT / "kvcore").rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_the_console_script_is_kvcore_and_its_target_exists() -> None:
    assert list(PROJECT["project"]["scripts"]) == ["kvcore"]
    module, _, function = PROJECT["project"]["scripts"]["kvcore"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_one_file_states_the_version() -> None:
    import kvcore

    assert re.fullmatch(r"\d+\.\d+\.\d+([ab]|rc|\.dev)?\d*", kvcore.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvcore.version.__version__"}
    assignments = [p for p in (ROOT / "kvcore").rglob("*.py") if "__version__ =" in p.read_text(encoding="utf-8")]
    assert assignments == [ROOT / "kvcore" / "version.py"]


def test_an_installed_kvcore_has_the_version_of_its_source() -> None:
    import kvcore

    try:
        installed = importlib.metadata.version("kvcore")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kvcore runs from its checkout here, it is not installed")
    assert installed == kvcore.__version__


def test_the_licence_is_apache_2_and_is_shipped() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    (name,) = PROJECT["project"]["license-files"]
    assert "Apache License\n                           Version 2.0" in (ROOT / name).read_text(encoding="utf-8")


def test_each_extra_of_the_design_exists_and_the_base_is_free_of_frameworks() -> None:
    assert {"cuda", "metal", "hf", "server", "bench", "dev"} <= set(PROJECT["project"]["optional-dependencies"])
    base = {re.split(r"[<>=~!;\[ ]", spec)[0] for spec in PROJECT["project"]["dependencies"]}
    assert base.isdisjoint({*HEAVY, "huggingface-hub", "triton"})


def test_each_dependency_has_a_floor_and_a_ceiling() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    specs = [*PROJECT["project"]["dependencies"], *(spec for extra in extras for spec in extra)]
    # nox is versioned by date: it has no next major version to stay below.
    assert [s for s in specs if not re.search(r">=\d[^,]*,<\d", s) and not s.startswith("nox>=")] == []


def test_nox_offers_each_session() -> None:
    decorators = [
        (node.name, ast.unparse(decorator))
        for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    named = {name: re.search(r"name='([^']+)'", text) for name, text in decorators if text.startswith("nox.session")}
    assert {match[1] if match else name for name, match in named.items()} >= SESSIONS


def test_ci_runs_as_a_program() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def docs_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_check_names_each_link_that_leads_nowhere(docs_check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `turbo4` page, in short\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(LINKS)
    assert docs_check.broken_links(page) == ["gone.png", "other.md#no-heading", "gone/page.md"]


def test_docs_check_replaces_only_what_stands_between_the_markers(docs_check: ModuleType) -> None:
    text = f"intro\n{docs_check.BEGIN}\nold\n{docs_check.END}\nrest\n"
    fresh = docs_check.with_generated(text, "| new |\n")
    assert fresh == f"intro\n{docs_check.BEGIN}\n| new |\n{docs_check.END}\nrest\n"
    assert docs_check.with_generated(fresh, "| new |\n") == fresh


@pytest.mark.parametrize(
    "wrong", ["", "{b} x", "{e} x {b}", "{b} {e} {b} {e}"], ids=["none", "open", "swapped", "twice"]
)
def test_docs_check_refuses_misplaced_markers(docs_check: ModuleType, wrong: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        docs_check.with_generated(wrong.format(b=docs_check.BEGIN, e=docs_check.END), "new")
