"""Stop strings: cut exactly, never shown, never held back for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InputError
from kvcore.text import Detokenizer, StopMatcher, Tokenizer


def run(stops: Sequence[str], pieces: Iterable[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def cut(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The specification: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@st.composite
def chunked_text(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text(alphabet="ab", max_size=6), max_size=12))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4), chunked_text())
def test_any_chunking_gives_the_cut_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    shown, stopped = run(stops, pieces)
    assert ("".join(shown), stopped) == cut(stops, "".join(pieces))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4), chunked_text())
def test_B47_only_a_possible_beginning_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        seen, shown = seen + piece, shown + text
        if stopped:
            return
        held = seen.removeprefix(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_M9_stop_string_across_tokens() -> None:
    shown, stopped = run(["beta gamma"], ["alpha ", "be", "ta", " gam", "ma delta"])
    assert (shown, stopped) == (["alpha ", "", "", "", ""], True)


def test_B48_stop_inside_tokens(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    pieces = [detokenizer.add(token_id) for token_id in (48124, 27873)]
    assert pieces == ["STOP", " HERE"]
    assert run(["OP HE"], [*pieces, " more"]) == (["ST", ""], True)


@pytest.mark.parametrize("stops", [["assistant", "assume"], ["pleasure"]], ids=["end-held", "all-held"])
def test_B154_held_text_is_flushed_at_the_end(stops: list[str]) -> None:
    shown, stopped = run(stops, ["ple", "as"])
    assert ("".join(shown), stopped) == ("pleas", False)


def test_B47_text_without_the_stop_string_is_not_delayed() -> None:
    assert run(["zzzzzzzz"], ["one", " two", " pizz", "a"]) == (["one", " two", " pi", "zza", ""], False)


@pytest.mark.parametrize("pieces", [["xabcd"], ["xab", "cd"], ["x", "a", "b", "c", "d"]], ids=len)
def test_the_stop_string_that_completes_first_cuts(pieces: list[str]) -> None:
    shown, stopped = run(["abcd", "c"], pieces)
    assert ("".join(shown), stopped) == ("xab", True)


def test_no_stop_strings_pass_everything() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


def test_after_the_stop_nothing_comes() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_empty_stop_string() -> None:
    with pytest.raises(InputError, match="stop string is empty"):
        StopMatcher(["end", ""])
