"""Which kernel runs an operation, and why not another: capabilities, decisions, reasons.

A `Kernel` states its constraints once. `Registry.resolve` checks every candidate against a `KernelQuery` and
returns a `Decision`: the kernel taken, and every rejected candidate with all of its reasons. Nothing is
resolved per token: a cache resolves its operations when it is made.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvcore.errors import BackendError, InputError, UnsupportedError

OPS = ("encode", "attend", "linear")
POLICIES = ("auto", "fused", "graph")
Kind = Literal["fused", "graph"]
Storage = Literal["contiguous", "paged"]


@dataclass(frozen=True, slots=True)
class KernelQuery:
    """Everything that a kernel may be particular about. ``arch`` is "cpu", "sm_90", "apple-m3", ..."""

    op: str
    backend: str
    k_codec: str
    v_codec: str
    dtype: str
    head_dim: int
    gqa_ratio: int = 1
    query_class: str = "decode"  # "decode" (1 row), "verify" (2 to 16 rows), "prefill"
    mask: str = "causal"  # or "sliding"
    windowed: bool = False
    v_head_dim: int | None = None  # where it differs from head_dim
    page_size: int = 128
    sink_tokens: int = 0
    boundary_layers: int = 0
    arch: str = "cpu"

    def describe(self) -> str:
        return f"{self.op} k={self.k_codec} v={self.v_codec} {self.dtype} head_dim={self.head_dim} on {self.backend}"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One field of the query and what a kernel takes there: a test, and ``words`` for it.

    ``only`` is a field and a value: the constraint holds for queries with that value there.
    """

    field: str
    words: str
    takes: Callable[[Any], bool]
    only: tuple[str, str] | None = None

    def reason_against(self, query: KernelQuery) -> str | None:
        value = getattr(query, self.field)
        if self.takes(value) or not self.concerns(query):
            return None
        return f"{self.field} {value}: needs {self.words}"

    def concerns(self, query: KernelQuery) -> bool:
        return self.only is None or getattr(query, self.only[0]) == self.only[1]


def needs(field_name: str, *allowed: object) -> Constraint:
    """``needs("head_dim", 64, 128)``: the kernel takes only these values of that query field."""
    *rest, last = (str(x) for x in allowed)
    words = f"{', '.join(rest)} or {last}" if rest else last
    return Constraint(field_name, words, lambda value: value in allowed)


def needs_between(field_name: str, smallest: int, largest: int) -> Constraint:
    return Constraint(field_name, f"{smallest} to {largest}", lambda value: smallest <= value <= largest)


def needs_multiple(field_name: str, step: int, largest: int, *, only: tuple[str, str] | None = None) -> Constraint:
    words = f"a multiple of {step} up to {largest}"
    return Constraint(field_name, words, lambda value: value <= largest and value % step == 0, only)


def needs_nvidia(smallest: int) -> Constraint:
    """``needs_nvidia(80)``: an architecture "sm_80" or newer."""

    def takes(arch: str) -> bool:
        kind, _, number = arch.partition("_")
        return kind == "sm" and number.isdecimal() and int(number) >= smallest

    return Constraint("arch", f"an NVIDIA GPU of sm_{smallest} or newer", takes)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation on one backend.

    ``load`` returns the callable and runs only when the kernel is taken. ``requires`` names packages that must
    be importable: an absent one is a reason, one that is there and fails to import is an error. ``extra``
    checks what a constraint on one field cannot say, and returns reasons; ``extra_words`` say what. ``storage`` is the
    kind of cache that the kernel works on. ``max_rows``: a step of more query rows goes to the graph kernel.
    """

    name: str
    op: str
    backend: str  # or "*"
    kind: Kind
    load: Callable[[], Callable[..., Any]]
    constraints: tuple[Constraint, ...] = ()
    requires: tuple[str, ...] = ()
    extra: Callable[[KernelQuery], list[str]] | None = None
    extra_words: str = "further conditions"
    storage: Storage = "contiguous"
    max_rows: int | None = None

    def reasons_against(self, query: KernelQuery) -> list[str]:
        """Every reason why this kernel cannot serve ``query``; empty where it can.

        Packages are imported only for a kernel that fits otherwise.
        """
        reasons = [r for c in self.constraints if (r := c.reason_against(query)) is not None]
        if self.extra is not None:
            reasons += self.extra(query)
        missing = [package for package in self.requires if importlib.util.find_spec(package) is None]
        reasons += [f"package {package} is not installed (pip install {package})" for package in missing]
        if not reasons:
            for package in self.requires:
                check_import(package)
        return reasons


def check_import(package: str) -> None:
    """BackendError where an installed package fails to import."""
    try:
        importlib.import_module(package)
    except Exception as error:
        raise BackendError(
            f"package {package} is installed but fails to import ({type(error).__name__}: {error}); "
            f"reinstall it with: pip install --force-reinstall {package}, or use --kernels graph"
        ) from error


@dataclass(frozen=True, slots=True)
class Rejection:
    kernel: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The kernel that serves a query, with the candidates that do not and all their reasons."""

    query: KernelQuery
    kernel: str
    kind: Kind
    policy: str
    rejected: tuple[Rejection, ...] = ()
    storage: Storage = "contiguous"
    max_rows: int | None = None
    run: Callable[..., Any] = field(repr=False, compare=False, default=lambda *_: None)

    def explain(self) -> str:
        """One line: the kernel, its kind, and why better candidates were passed over."""
        why = "; ".join(f"{r.kernel}: {', '.join(r.reasons)}" for r in self.rejected)
        rows = "" if self.max_rows is None else f" up to {self.max_rows} query rows, graph beyond"
        return f"{self.query.op}: {self.kernel} ({self.kind}){rows}" + (f" because {why}" if why else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: doctor, health pages and benchmark rows show the same words."""
        return {
            "op": self.query.op,
            "kernel": self.kernel,
            "kind": self.kind,
            "policy": self.policy,
            "storage": self.storage,
            "max_rows": self.max_rows,
            "query": asdict(self.query),
            "rejected": [{"kernel": r.kernel, "reasons": list(r.reasons)} for r in self.rejected],
        }


class Registry:
    """An immutable list of kernels; earlier ones are preferred, fused before graph."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self.kernels: tuple[Kernel, ...] = tuple(sorted(kernels, key=lambda k: k.kind != "fused"))

    def candidates(self, query: KernelQuery) -> Sequence[Kernel]:
        return [k for k in self.kernels if k.op == query.op and k.backend in (query.backend, "*")]

    def resolve(self, query: KernelQuery, policy: str = "auto") -> Decision:
        """Pick the kernel for ``query``.

        Raises InputError for an unknown policy, UnsupportedError where no kernel (under "fused": no fused
        kernel) serves the query, with every reason.
        """
        if policy not in POLICIES:
            raise InputError(f"unknown kernel policy '{policy}': choose one of {', '.join(POLICIES)}")
        rejected: list[Rejection] = []
        for kernel in self.candidates(query):
            if kernel.kind == "fused" and policy == "graph":
                rejected.append(Rejection(kernel.name, ("--kernels graph was asked for",)))
                continue
            reasons = kernel.reasons_against(query)
            if not reasons and kernel.kind == "graph" and policy == "fused":
                reasons = ["it is a graph fallback, and --kernels fused was asked for"]
            if not reasons:
                passed_over, run = tuple(rejected), kernel.load()
                shown = (query, kernel.name, kernel.kind, policy, passed_over, kernel.storage, kernel.max_rows)
                return Decision(*shown, run)
            rejected.append(Rejection(kernel.name, tuple(reasons)))
        return self._refuse(query, policy, rejected)

    def _refuse(self, query: KernelQuery, policy: str, rejected: list[Rejection]) -> Decision:
        what = "fused kernel" if policy == "fused" else "kernel"
        reasons = [f"{r.kernel}: {reason}" for r in rejected for reason in r.reasons]
        if policy == "fused" and not any(k.kind == "fused" for k in self.candidates(query)):
            reasons.insert(0, f"no fused {query.op} kernel exists for backend {query.backend} yet")
        instead = "use --kernels auto" if policy == "fused" else "use another mode or backend"
        raise UnsupportedError(f"no {what} for {query.describe()}: {'; '.join(reasons)}; {instead}", reasons)
