"""`kvcore doctor`, and the capability table that docs/ holds a copy of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outcome import Cli

from kvcore.backends import BACKENDS
from kvcore.cli.capabilities import capability_table
from kvcore.modes import MODES
from kvcore.registry import Kernel, needs

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ("--backend", "reference", "--json")
PAIRS = {mode.pair: mode.name for mode in MODES.values() if not mode.delegated}


def test_json_names_every_backend_package_mode_and_operation(cli: Cli) -> None:
    report = cli("doctor", "--json").json
    assert [backend["name"] for backend in report["backends"]] == list(BACKENDS)
    assert report["backends"][0]["versions"] == {"numpy": np.__version__}
    assert report["packages"]["numpy"] == np.__version__
    decided = {(row["mode"], row["op"]) for row in report["decisions"] if row["backend"] == "reference"}
    assert decided == {(mode, op) for mode in MODES for op in ("encode", "attend")}
    for backend in report["backends"]:
        assert backend["available"] or backend["reason"]
        assert backend["device"] != "cuda"


def test_the_report_for_people_says_the_same(cli: Cli) -> None:
    outcome = cli("doctor")
    assert f"reference on cpu (numpy {np.__version__}), float32" in outcome.out
    assert "kernels for a typical shape: head_dim 128, 32 query and 8 KV heads" in outcome.out
    assert "  reference turbo4            attend  attend-graph (graph)" in outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (0, "")


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_B79_each_legal_pair_is_decided_with_its_codecs(cli: Cli, pair: tuple[str, str]) -> None:
    k, v = pair
    rows = cli("doctor", *REFERENCE, "--cache-type-k", k, "--cache-type-v", v).json["decisions"]
    assert [(row["mode"], row["op"], row["kind"]) for row in rows] == [
        (PAIRS[pair], "encode", "graph"),
        (PAIRS[pair], "attend", "graph"),
    ]
    mode = MODES[PAIRS[pair]]
    assert {(row["query"]["k_codec"], row["query"]["v_codec"]) for row in rows} == {(mode.k, mode.v)}


def test_B79_an_illegal_pair_lists_the_six(cli: Cli) -> None:
    message = cli("doctor", "--cache-type-k", "int8", "--cache-type-v", "turbo3").refused()
    assert [pair for pair in ("/".join(pair) for pair in PAIRS) if pair not in message] == []
    assert len(PAIRS) == 6


def test_B76_torch_on_the_cpu_is_reported_as_cpu(cli: Cli) -> None:
    pytest.importorskip("torch")
    report = cli("doctor", "--json", "--backend", "cuda", "--device", "cpu").json
    assert [(b["name"], b["device"], b["arch"]) for b in report["backends"]] == [("cuda", "cpu", "cpu")]
    assert {row["query"]["arch"] for row in report["decisions"]} == {"cpu"}


def test_B76_an_unusable_backend_is_refused_with_its_reason(cli: Cli) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is an NVIDIA GPU here")
    assert cli("doctor", "--backend", "cuda").refused().startswith("backend cuda: this torch is a CPU build")


def test_a_mode_that_cannot_store_the_head_size_says_why(cli: Cli) -> None:
    rows = cli("doctor", *REFERENCE, "--head-dim", 100).json["decisions"]
    assert {row["mode"] for row in rows if row["kernel"] is not None} == {"fp16", "int8"}
    reasons = {reason for row in rows if row["kernel"] is None for reason in row["reasons"]}
    assert any(reason.startswith("head_dim 100: turbo4 needs a multiple of 8") for reason in reasons)
    assert cli("doctor", "--backend", "reference", "--head-dim", 100).out.count("turbo3 needs a multiple") == 1


def test_B72_fused_shows_the_reason_for_each_rejected_kernel(cli: Cli) -> None:
    outcome = cli("doctor", "--backend", "reference", "--kernels", "fused", "--kv-cache-mode", "turbo4")
    assert outcome.code == 0
    assert "no fused encode kernel exists for backend reference yet" in outcome.out


def test_the_shape_of_a_model_is_taken(cli: Cli, tiny: Path) -> None:
    report = cli("doctor", *REFERENCE, "--model", tiny, "--dtype", "bf16").json
    assert report["shape"] == f"{tiny.name}: head_dim 64, 4 query and 2 KV heads, bfloat16"
    query = report["decisions"][0]["query"]
    assert (query["head_dim"], query["gqa_ratio"], query["dtype"]) == (64, 2, "bfloat16")


# The capability table


def test_docs_hold_the_current_capability_table(cli: Cli) -> None:
    printed = cli("doctor", "--markdown").out
    assert printed == capability_table()
    assert printed in (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")


def test_the_table_has_every_backend_mode_and_operation() -> None:
    rows = [line.split("|")[1:4] for line in capability_table().splitlines()[2:]]
    named = [tuple(cell.strip() for cell in row) for row in rows]
    assert named == [(b, mode, op) for b in BACKENDS for mode in MODES for op in ("encode", "attend")]


def test_a_fused_kernel_stands_before_the_graph_with_what_it_needs() -> None:
    def load() -> Any:
        raise AssertionError("a table loads no kernel")

    kernel = Kernel(
        "attend-int8",
        "attend",
        "cuda",
        "fused",
        load,
        constraints=(needs("k_codec", "int8"), needs("v_codec", "int8"), needs("head_dim", 64, 128)),
        requires=("no_such_package",),
    )
    rows = capability_table({"cuda": (kernel,)}).splitlines()
    where = [row for row in rows if "attend-int8" in row]
    fused = "`attend-int8` (fused): head_dim 64 or 128; package no_such_package"
    assert where == [f"| cuda | int8 | attend | {fused}<br>`attend-graph` (graph) |"]
