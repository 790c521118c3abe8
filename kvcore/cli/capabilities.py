"""The capability table: for each backend, mode and operation the kernels that exist, and what they need.

It is made from declarations alone, so it is the same on every machine; docs/capabilities.md holds a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcore.attention import GRAPH_KERNELS
from kvcore.backends import BACKENDS
from kvcore.backends.cuda.capabilities import KERNELS as CUDA_KERNELS
from kvcore.backends.metal.capabilities import KERNELS as METAL_KERNELS
from kvcore.layout import CODECS
from kvcore.modes import MODES, Mode
from kvcore.registry import Constraint, Kernel

OPS = ("encode", "attend")
_TAKES_MODE = ("k_codec", "v_codec")  # constraints that say for which modes a kernel is, not what it needs


def capability_table(own: Mapping[str, Sequence[Kernel]] | None = None) -> str:
    """Markdown; ``own`` holds a backend's own kernels by its name, beside the graph kernels."""
    kernels = {"cuda": CUDA_KERNELS, "metal": METAL_KERNELS} if own is None else own
    lines = ["| backend | mode | operation | kernels, best first |", "| --- | --- | --- | --- |"]
    for backend in BACKENDS:
        known = sorted((*kernels.get(backend, ()), *GRAPH_KERNELS), key=lambda kernel: kernel.kind != "fused")
        for mode in MODES.values():
            for op in OPS:
                cell = "<br>".join(_cell(kernel, mode) for kernel in known if kernel.op == op and _takes(kernel, mode))
                lines.append(f"| {backend} | {mode.name} | {op} | {cell or 'none'} |")
    return "\n".join(lines) + "\n"


def _takes(kernel: Kernel, mode: Mode) -> bool:
    return all(c.takes(_stored(mode)[c.field]) for c in kernel.constraints if c.field in _TAKES_MODE)


def _stored(mode: Mode) -> dict[str, str]:
    return {"k_codec": mode.k, "v_codec": mode.v}


def _cell(kernel: Kernel, mode: Mode) -> str:
    own = [c for c in kernel.constraints if c.field not in _TAKES_MODE and _concerns(c, mode)]
    needs = [] if any(c.field == "head_dim" for c in own) else _mode_needs(mode)
    needs += [c.words if c.field == "arch" else f"{c.field} {c.words}" for c in _strictest(own)]
    if kernel.extra is not None:
        needs.append(kernel.extra_words)
    if kernel.max_rows is not None:
        needs.append(f"steps of up to {kernel.max_rows} query rows")
    needs += [f"package {package}" for package in kernel.requires]
    return f"`{kernel.name}` ({kernel.kind})" + (f": {'; '.join(needs)}" if needs else "")


def _concerns(constraint: Constraint, mode: Mode) -> bool:
    return constraint.only is None or _stored(mode)[constraint.only[0]] == constraint.only[1]


def _strictest(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Without a general constraint on a field where this mode has one of its own."""
    special = {c.field for c in constraints if c.only is not None}
    return [c for c in constraints if c.only is not None or c.field not in special]


def _mode_needs(mode: Mode) -> list[str]:
    rotates = any(CODECS[codec].codebook is not None for codec in (mode.k, mode.v))
    return ["head_dim a multiple of 8"] if rotates else []
