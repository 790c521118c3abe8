"""The capability table: for each backend, mode and operation the kernels that exist, and what they need.

It is made from declarations alone, so it is the same on every machine; docs/capabilities.md holds a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvcore.attention import GRAPH_KERNELS
from kvcore.backends import BACKENDS
from kvcore.layout import CODECS
from kvcore.modes import MODES, Mode
from kvcore.registry import Constraint, Kernel

OPS = ("encode", "attend")
_TAKES_MODE = ("k_codec", "v_codec")  # constraints that say for which modes a kernel is, not what it needs


def capability_table(own: Mapping[str, Sequence[Kernel]] | None = None) -> str:
    """Markdown; ``own`` holds a backend's own kernels by its name, beside the graph kernels."""
    kernels = own or {}
    lines = ["| backend | mode | operation | kernels, best first |", "| --- | --- | --- | --- |"]
    for backend in BACKENDS:
        known = sorted((*kernels.get(backend, ()), *GRAPH_KERNELS), key=lambda kernel: kernel.kind != "fused")
        for mode in MODES.values():
            for op in OPS:
                cell = "<br>".join(_cell(kernel, mode) for kernel in known if kernel.op == op and _takes(kernel, mode))
                lines.append(f"| {backend} | {mode.name} | {op} | {cell or 'none'} |")
    return "\n".join(lines) + "\n"


def _takes(kernel: Kernel, mode: Mode) -> bool:
    stored = {"k_codec": mode.k, "v_codec": mode.v}
    return all(stored[c.field] in c.allowed for c in kernel.constraints if c.field in _TAKES_MODE)


def _cell(kernel: Kernel, mode: Mode) -> str:
    needs = [*_mode_needs(mode), *map(_need, _other(kernel.constraints))]
    needs += [f"package {package}" for package in kernel.requires]
    if kernel.extra is not None:
        needs.append("further conditions")
    return f"`{kernel.name}` ({kernel.kind})" + (f": {'; '.join(needs)}" if needs else "")


def _other(constraints: Iterable[Constraint]) -> list[Constraint]:
    return [constraint for constraint in constraints if constraint.field not in _TAKES_MODE]


def _need(constraint: Constraint) -> str:
    return f"{constraint.field} {', '.join(map(str, constraint.allowed))}"


def _mode_needs(mode: Mode) -> list[str]:
    rotates = any(CODECS[codec].codebook is not None for codec in (mode.k, mode.v))
    return ["head_dim a multiple of 8"] if rotates else []
