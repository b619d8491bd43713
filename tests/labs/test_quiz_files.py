"""Files of questions of any shape: read as what they say, or refused with the file, the question and the key."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.student.questions import QUIZZES, Question, QuizError, read_questions, value

CHOICE = {
    "id": "4.q1",
    "text": "Which?",
    "choices": {"a": {"text": "A", "why": "x"}, "b": {"text": "B", "why": "y"}},
    "answer": "a",
}
DRAWN = {
    "id": "4.q2",
    "text": "{n} of {m}?",
    "draw": {"n": [1, 9], "m": [2, 5]},
    "answer": "n * -(-m // 2)",
    "slips": [{"value": "n", "why": "z"}],
    "why": "w",
}
Rows = list[dict[str, Any]]


def read(folder: Path, content: str | bytes) -> dict[str, Question]:
    path = folder / "04.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return read_questions(path)


@pytest.mark.parametrize("path", sorted(QUIZZES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_of_the_labs_are_read(path: Path) -> None:
    assert len(read_questions(path)) >= 5


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    choice, drawn = read(tmp_path, yaml.safe_dump([CHOICE, DRAWN])).values()
    assert choice.choices["b"].why == "y" and choice.answer == "a" and not choice.draw
    assert drawn.draw == {"n": (1, 9), "m": (2, 5)} and drawn.slips == (("n", "z"),)
    assert value(drawn.answer or "", {"n": 3, "m": 5}) == 9


def change(row: dict[str, Any], **values: Any) -> Rows:
    return [{**copy.deepcopy(row), **values}]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (change(CHOICE, id=4.1), "question number 1, id: it is like 4.q1"),
        (change(CHOICE, id="four"), "question number 1, id: it is like 4.q1"),
        ([CHOICE, CHOICE], "question 4.q1, id: there are two"),
        ([[CHOICE]], "question number 1: each question is a mapping"),
        (change(CHOICE, text=5), "question 4.q1, text: it has to be text, not 5"),
        (change(CHOICE, text=None), "question 4.q1, text: it has to be text, not None"),
        (change(CHOICE, kind="essay"), "question 4.q1, 'kind': there is no such key"),
        (change(CHOICE, choices=[]), "question 4.q1, choices: it has to be a mapping, not a list"),
        (change(CHOICE, choices={"a": "A"}), "question 4.q1, choices, 'a': it has to be a mapping"),
        (change(CHOICE, choices={"a": {"text": "A"}}), "question 4.q1, choices, 'a', why: it has to be text, not None"),
        (change(CHOICE, choices={True: {"text": "A", "why": "x"}}), "question 4.q1, choices: the choice True has to be text"),
        (change(CHOICE, answer="z"), "question 4.q1, answer: 'z' is none of the choices: a, b"),
        (change(CHOICE, slips=[{"value": "1", "why": "x"}]), "question 4.q1, slips: it is a list, of a question with drawn"),
        (change(CHOICE, draw={"n": [1, 2]}), "question 4.q1, choices: a question has choices or drawn numbers"),
        (change(DRAWN, draw={"n": [9, 1]}), r"question 4.q2, draw, n: it is two whole numbers, \[low, high\]"),
        (change(DRAWN, draw={"n": [1.5, 2]}), "question 4.q2, draw, n: it is two whole numbers"),
        (change(DRAWN, draw={"n": "1-9"}), "question 4.q2, draw, n: it is two whole numbers"),
        (change(DRAWN, draw={"a b": [1, 2]}), "question 4.q2, draw: 'a b' is no name"),
        (change(DRAWN, answer=None), "question 4.q2, answer: drawn numbers need one"),
        (change(DRAWN, answer="n + k"), "question 4.q2, answer: it has to be arithmetic"),
        (change(DRAWN, answer="__import__('os')"), "question 4.q2, answer: it has to be arithmetic"),
        (change(DRAWN, answer="9**9**9"), "question 4.q2, answer: it has to be arithmetic"),
        (change(DRAWN, answer="((n**9)**9)**9"), "question 4.q2, answer: it has to be arithmetic"),
        (change(DRAWN, answer="n / (m - 2)"), "question 4.q2, answer: it has no value with m = 2, n = 1"),
        (change(DRAWN, answer="n / (m - 3)"), "question 4.q2, answer: it has no value with m = 3: it divides by m - 3"),
        (change(DRAWN, answer="n % (n - m)"), "question 4.q2, answer: it has no value with m = 2, n = 2: it divides by n - m"),
        (change(DRAWN, slips=[{"value": "1 // (3 - m)", "why": "x"}]), "question 4.q2, slips, number 1, value: .* with m = 3"),
        (change(DRAWN, draw={"n": [1, 300000], "m": [2, 5]}), "question 4.q2, draw, n: .* are more than 10,000 values"),
        (
            change(DRAWN, answer="n / (n + m)", draw={"n": [1, 9000], "m": [1, 9000]}),
            r"question 4.q2, answer: n \+ m may be more than 200,000 numbers",
        ),
        (change(DRAWN, slips=[{"value": "n."}]), "question 4.q2, slips, number 1: it has value and why"),
        (change(DRAWN, slips=[{"value": "n.", "why": "x"}]), "question 4.q2, slips, number 1, value: it has to be arithmetic"),
        (change(DRAWN, text="{k} of {m}"), "question 4.q2, text: {k} is none of the drawn numbers"),
        (change(DRAWN, text="{n.real} of {m:9999999999}"), "question 4.q2, text: {n.real} is none"),
        (change(DRAWN, text="{n"), "question 4.q2, text: a brace stands alone"),
    ],
)  # fmt: skip
def test_a_question_that_cannot_be_meant_is_named_with_its_key(tmp_path: Path, rows: Rows, told: str) -> None:
    with pytest.raises(QuizError, match=rf"^04\.yaml, {told}"):
        read(tmp_path, yaml.dump(rows, Dumper=_Plain))


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


BOMB = "a: &a [x, x, x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "it is a list of questions"),
        ("a: 1", "it is a list of questions"),
        (BOMB, "line 2: an alias"),
        (MERGES, "line 2: an alias"),
        ("- &x [*x]", "line 1: an alias"),
        ("- {id: 4.q1, id: 4.q2}", "line 1: the key 'id' is there twice"),
        ("[" * 5000, "cannot be read as YAML"),
        ("- id: !!timestamp 4.q1", "cannot be read as YAML"),
        ("- id: !!python/object/apply:os.system [true]", "cannot be read as YAML"),
        ("- id: 2001-99-99", "cannot be read as YAML"),
        ("- {? [a]: b}", "cannot be read as YAML"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        ("- {id: 4.q1, text: x, draw: {n: [1, 2]}, answer: 0x" + "f" * 6000 + "}", "question 4.q1, answer: it has to be arith"),
        ("- " + "9" * 5000, "cannot be read as YAML"),
        ("x" * (300 << 10), "has more than 256 KiB"),
    ],
)
def test_a_file_that_is_no_list_of_questions_is_named(tmp_path: Path, content: str | bytes, told: str) -> None:
    with pytest.raises(QuizError, match=rf"^04\.yaml.*{told}") as caught:
        read(tmp_path, content)
    assert len(str(caught.value)) < 400


# ---------------------------------------------------------------------------------------------------------------- search

_words = st.sampled_from(["", "a", "?", "n", "n * m", "9**9", "{n}", "{n!r:>99}", "4.q1", "yes", "\ud800"]) | st.text(
    max_size=8
)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | _words | st.dates() | st.binary(max_size=3)
_anything = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_scalars, inner, max_size=3), max_leaves=6
)
_keys = st.sampled_from([*CHOICE, *DRAWN]) | _words


@st.composite
def _files(draw: st.DrawFn) -> Any:
    """Good questions with something else in one place or more."""
    rows: list[Any] = copy.deepcopy(draw(st.lists(st.sampled_from([CHOICE, DRAWN]), max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = rows
        for _ in range(draw(st.integers(0, 4))):
            inner = list(place.values()) if isinstance(place, dict) else place
            inner = [one for one in inner if isinstance(one, (dict, list)) and one]
            if not inner:
                break
            place = draw(st.sampled_from(inner))
        if isinstance(place, dict):
            place[draw(st.sampled_from(sorted(place, key=repr)) if place and draw(st.booleans()) else _keys)] = draw(_anything)
        elif place:
            place[draw(st.integers(0, len(place) - 1))] = draw(_anything)
    return rows


def fine_or_refused(folder: Path, content: str | bytes) -> None:
    """Read to what can be asked, shown and marked, or refused by name."""
    try:
        found = read(folder, content)
    except ValueError as error:
        assert isinstance(error, QuizError) and str(error).startswith("04.yaml") and len(str(error)) < 600
        assert re.match(r"04\.yaml( cannot| has|: it is a list|, line \d|, question )", str(error))
        return
    for question in found.values():
        numbers = question.numbers("somebody")
        question.text.format(**numbers) if question.draw else question.text
        assert question.draw or question.answer is None or question.answer in question.choices


@given(_files() | _anything)
def test_a_file_of_any_questions_is_read_or_refused_by_file_question_and_key(tmp_path_factory: Any, rows: Any) -> None:
    fine_or_refused(tmp_path_factory.getbasetemp(), yaml.dump(rows, Dumper=_Plain, allow_unicode=True))


@settings(max_examples=60)
@given(st.text(alphabet="-?:{}[]*&!|>'\"<#%@ \n\tab0.~", max_size=60) | st.text(max_size=30) | st.binary(max_size=40))
def test_a_file_of_any_text_is_read_or_refused(tmp_path_factory: Any, content: str | bytes) -> None:
    fine_or_refused(tmp_path_factory.getbasetemp(), content)
