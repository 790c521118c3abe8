"""Which variants are measured, what is kept between runs, and the rows that come out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llamas import random_ids, tiny_folder

import kvcore
from kvcore.errors import InputError
from kvcore.eval import table
from kvcore.eval.codecs import product_codec, product_variant
from kvcore.eval.metrics import Positions
from kvcore.eval.probes import PROBES, answer_logprob, attention, greedy, planted
from kvcore.eval.rows import RawRows
from kvcore.eval.state import State
from kvcore.eval.text import SAMPLE_STARTS, Text, sample_text, tokenize
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

WINDOW = WindowPolicy(sink_tokens=2, recent_tokens=16, page_size=16)
ABOUT = {"model": "tiny", "context": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    loaded = kvcore.load(tiny_folder(tmp_path_factory.mktemp("tiny")), backend="reference")
    return replace(loaded, window=WINDOW)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text("random", "0" * 64, random_ids(400), (10, 200), 96)


def test_groups_aliases_and_windows() -> None:
    rows = RawRows.of(WINDOW)
    chosen = table.variants("fp16,modes, k8v4,kivi-4bit-g32", rows, ["own", "sliding", "none"])
    keys = [variant.key for variant in chosen]
    assert len(keys) == len(set(keys)) == 1 + 3 * (6 + 1)
    assert keys[:2] == ["fp16 [4+128/128]", "int8 [2+16/16]"]
    assert "kivi-4bit-g32 [2+16/1]" in keys
    assert "turbo4 [none]" in keys
    assert len(table.variants("baselines,trials", rows)) == len(table.BASELINES) + len(table.TRIALS)


@pytest.mark.parametrize(
    ("words", "windows", "said"),
    [("turbo5", ["own"], "or of baselines: llama-q8_0"), ("int8", ["half"], "unknown window 'half'")],
)
def test_unknown_words(words: str, windows: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        table.variants(words, RawRows(), windows)


def test_rows_and_resuming(model: kvcore.Model, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = table.variants("fp16,int8,turbo4,llama-q4_0", RawRows.of(WINDOW), ["own", "none"])
    path = tmp_path / "deep" / "state.npz"
    seen: list[tuple[int, int]] = []
    first = table.measure(model, text, chosen, "one-pass", State(path, ABOUT), lambda *at: seen.append(at))
    assert (seen[0], seen[-1]) == ((0, 14), (14, 14))
    assert list(path.parent.iterdir()) == [path], "no half-written file stays"

    def never(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(table, "raw_logits", never)
    state = State(path, ABOUT)
    assert len(state) == 14
    again = table.measure(model, text, chosen, "one-pass", state)
    rows, same = (table.rows(model, text, chosen, measured, 32) for measured in (first, again))
    assert rows == same
    by_key = {(row["variant"], row["window"]): row for row in rows}
    floor = by_key["fp16 (noise floor)", ""]
    assert 0 <= floor["kl"] < 1e-9
    assert by_key["turbo4", "2+16/16"]["kl"] > by_key["int8", "2+16/16"]["kl"] > 100 * floor["kl"]
    assert by_key["turbo4", "none"]["kl"] > by_key["turbo4", "2+16/16"]["kl"]
    turbo4 = by_key["turbo4", "2+16/16"]
    assert (turbo4["bytes"], turbo4["positions"], turbo4["all_positions"]) == (76, 128, 192)
    assert turbo4["bytes_at_context"] == ((96 - 80 + 2) * 256 + 80 * 76) / 96


def test_what_a_mode_stored_before_is_measured_anew() -> None:
    """The mode turbo4 of before it had its keys centred."""
    now = product_variant(MODES["turbo4"], RawRows())
    before = replace(now, k=product_codec("turbo4"))
    assert before.key == now.key
    assert table.state_key(before, 0) != table.state_key(now, 0)


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    State(path, ABOUT).put("x", Positions(*np.zeros((4, 3))))
    with pytest.raises(InputError, match="belongs to a run with another context: delete it"):
        State(path, {**ABOUT, "context": 97})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match="not a state of kvcore eval"):
        State(path, ABOUT)


@pytest.mark.smollm2
def test_the_sample_and_its_windows(smollm2: kvcore.Model) -> None:
    got = tokenize(smollm2.tokenizer, None, context=1024, windows=6)
    assert len(got.ids) == 405_655
    assert got.starts == SAMPLE_STARTS
    assert "public domain" in got.name
    spread = tokenize(smollm2.tokenizer, None, context=4096, windows=7)
    assert len(spread.starts) == 7
    assert spread.starts[-1] + 4096 <= len(spread.ids)


@pytest.mark.smollm2
def test_a_text_of_ones_own(smollm2: kvcore.Model, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(sample_text()[:4000], encoding="utf-8")
    got = tokenize(smollm2.tokenizer, path, context=300, windows=2)
    assert (got.name, len(got.starts)) == ("mine.txt", 2)
    for context, starts, said in ((9999, None, "the text has"), (300, [9999], "a window at token 9999")):
        with pytest.raises(InputError, match=said):
            tokenize(smollm2.tokenizer, path, context=context, windows=2, starts=starts)


def test_attention_error_of_given_rows(model: kvcore.Model, text: Text) -> None:
    rows = {row["variant"]: row for row in attention(model, text, table.variants("fp16,modes", RawRows.of(WINDOW)))}
    assert rows["fp16"]["attention_error"] < 1e-6
    assert rows["int8"]["attention_error"] < rows["turbo4-asym"]["attention_error"] < rows["turbo4"]["attention_error"]
    assert len(rows["int8"]["by_layer"]) == model.config.num_layers


def test_greedy_steps_count_to_the_first_difference(model: kvcore.Model, text: Text) -> None:
    chosen = table.variants("int8,turbo4,kivi-4bit-g32", RawRows.of(WINDOW))
    rows = greedy(model, replace(text, starts=(10,)), chosen)
    assert [row["variant"] for row in rows] == ["int8", "turbo4"]
    assert all(0 <= row["steps"][0] <= row["of"] for row in rows)


@pytest.mark.full
@pytest.mark.smollm2
def test_a_fact_is_planted_where_it_should_be(smollm2: kvcore.Model, sample_ids: np.ndarray) -> None:
    text = Text("x", "0", sample_ids, (0,), 400)
    prompt, answer = planted(smollm2, text, 0.1)
    assert len(prompt) == 400
    said = smollm2.tokenizer.decode(prompt)
    assert 0.03 < said.index("The access code of the north gate is 7241.") / len(said) < 0.2
    assert said.endswith("The access code of the north gate is")
    raw = answer_logprob(smollm2, "fp16", prompt, answer)
    assert -3 < raw < 0
    assert abs(answer_logprob(smollm2, "turbo4", prompt, answer) - raw) < 0.5
    assert set(PROBES) == {"attention", "greedy", "retrieval"}
    assert set(MODES) >= {"turbo4"}
