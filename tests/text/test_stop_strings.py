"""StopStringMatcher: the text ends before the first stop string, wherever the pieces' borders fall (case 23)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.text.detokenizer import StopStringMatcher

ALPHABET = st.text(alphabet="ab ", max_size=20)


def feed(pieces: list[str], stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is given out for each piece, until a match; the rest at the end."""
    matcher = StopStringMatcher(stop, include_stop_str=include)
    given_out: list[str] = []
    for piece in pieces:
        given_out.append(matcher.push(piece))
        if matcher.matched is not None:
            return given_out, matcher.matched
    return [*given_out, matcher.finish()], None


def test_text_ends_before_a_stop_string_across_borders() -> None:
    given_out, matched = feed(["Hel", "lo", " w", "orld"], ["lo wor"])
    assert ("".join(given_out), matched) == ("Hel", "lo wor")


def test_held_back_characters_come_at_the_end() -> None:
    assert feed(["Hello", " wo"], ["lo wor"]) == (["", "Hel", "lo wo"], None)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert feed(["Hel", "lo"], []) == (["Hel", "lo", ""], None)


def test_a_stop_string_of_one_character_holds_nothing_back() -> None:
    assert feed(["Hel", "lo\nyou"], ["\n"]) == (["Hel", "lo"], "\n")


def test_the_match_that_is_complete_first_wins() -> None:
    assert feed(["say END or STOP"], ["STOP", "END"]) == (["say "], "END")
    assert feed(["abcd"], ["abcd", "bc"]) == (["a"], "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert feed(["one two"], ["two", "one two"]) == ([""], "one two")


def test_with_include_stop_str_the_text_ends_after_the_match_and_nothing_is_held_back() -> None:
    assert feed(["Hel", "lo", " w", "orld"], ["lo wor"], include=True) == (["Hel", "lo", " w", "or"], "lo wor")


def test_a_match_that_ends_while_not_armed_does_not_count() -> None:
    matcher = StopStringMatcher(["ab"])
    text = matcher.push("xab", armed=False)
    assert matcher.matched is None
    text += matcher.push("b ab")
    assert (text, matcher.matched) == ("xabb ", "ab")


def test_a_match_may_begin_before_and_end_after_arming() -> None:
    matcher = StopStringMatcher(["ab"])
    text = matcher.push("xa", armed=False) + matcher.push("b")
    assert (text, matcher.matched) == ("x", "ab")


@given(
    text=ALPHABET, stop=st.lists(ALPHABET.filter(bool), max_size=3), cuts=st.lists(st.integers(0, 20)), include=st.booleans()
)
def test_the_result_depends_on_the_text_alone(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    borders = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    given_out, matched = feed(pieces, stop, include)
    ends = {end: s for s in sorted(stop, key=len) for end in range(len(s), len(text) + 1) if text[:end].endswith(s)}
    if not ends:
        assert ("".join(given_out), matched) == (text, None)
    else:
        end = min(ends)
        assert matched == ends[end]
        assert "".join(given_out) == text[: end if include else end - len(ends[end])]


@given(pieces=st.lists(ALPHABET), stop=st.lists(ALPHABET.filter(bool), min_size=1, max_size=3))
def test_never_more_is_held_back_than_could_begin_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    received = given_out = 0
    for piece in pieces:
        received += len(piece)
        given_out += len(matcher.push(piece))
        if matcher.matched is not None:
            return
        assert received - given_out <= max(map(len, stop)) - 1


@pytest.mark.parametrize("size", [1, 1000])
def test_the_text_searched_does_not_grow_with_the_output(size: int) -> None:
    matcher = StopStringMatcher(["stop"])
    for _ in range(size):
        matcher.push("some text ")
    assert len(matcher._tail) == 3
