"""Questions, predictions, and the table of exercises: data that must agree with the engine and with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checks.authoring.source import sources
from checks.exercises import check_of, find, has_checks, table
from checks.student import results
from checks.student.failure import CheckFailed
from checks.student.home import read_progress, student_id
from checks.student.questions import questions
from checks.student.quiz import find_question, predict, quiz, recall
from minivllm.components import SEAMS

ROOT = Path(__file__).resolve().parents[2]
BUILT = [path.stem[:2] for path in sources()]
LATER_SEAMS = {"drafter", "rejection_sampler", "graph_runner"}  # their labs come with the engine parts


# ------------------------------------------------------------------------------------------------------------ table


def test_exercises_are_in_the_courses_order() -> None:
    ids = [tuple(map(int, i.split("."))) for i in table()]
    assert ids == sorted(ids) and len(set(ids)) == len(ids) >= 40


def test_every_seam_is_one_of_the_engines_or_of_a_later_lab() -> None:
    for row in table().values():
        assert row.seam is None or row.seam in SEAMS or (row.seam in LATER_SEAMS and row.lab not in BUILT)


@pytest.mark.parametrize("row", [row for row in table().values() if row.lab in BUILT], ids=lambda row: row.id)
def test_a_built_labs_exercises_fit_the_engine(row: object) -> None:
    assert row.functions
    if row.file:
        assert (ROOT / "minivllm" / row.file).is_file()
    if row.seam:
        assert row.capabilities <= SEAMS[row.seam].capabilities
        assert row.file in (SEAMS[row.seam].file, SEAMS[row.seam].triton_file) or row.seam == "sampler"


@pytest.mark.parametrize("exercise", [i for i, row in table().items() if has_checks(row.lab) and row.lab in BUILT])
def test_cases_are_plain_named_and_follow_the_seed(exercise: str) -> None:
    from checks.sandbox.plain import pack, unpack

    check = check_of(find(exercise))
    cases = check.cases(0)
    assert all(isinstance(case["call"], str) for case in cases)
    assert pack(unpack(pack(cases))) == pack(cases) == pack(check.cases(0))
    assert pack(check.cases(1)) != pack(cases)


# ------------------------------------------------------------------------------------------------------------- quiz


@pytest.mark.parametrize("lab", BUILT)
def test_every_choice_has_an_explanation_of_its_own(lab: str) -> None:
    for question in questions(lab).values():
        reasons = [choice.why for choice in question.choices.values()]
        assert all(reasons) and len(set(reasons)) == len(reasons)
        assert question.answer is None or question.draw or question.answer in question.choices


def test_a_right_and_a_wrong_answer_are_explained_and_remembered(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiz("2.q1", "a")
    assert capsys.readouterr().out.startswith("Not this one. A model keeps nothing")
    assert read_progress()["quiz"]["2.q1"] == {"answer": "a", "right": False}
    quiz("2.q1", "b")
    assert capsys.readouterr().out.startswith("Right. A token sees only")
    assert read_progress()["quiz"]["2.q1"] == {"answer": "b", "right": True}


def test_a_wrong_answer_after_a_right_one_takes_nothing_away(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiz("2.q1", "b")
    quiz("2.q1", "a")
    shown = capsys.readouterr().out
    assert "Not this one. A model keeps nothing" in shown and "You had it right before, and that stays." in shown
    assert read_progress()["quiz"]["2.q1"] == {"answer": "b", "right": True}


@pytest.mark.parametrize("answer", ["B", " b ", "b)", "(b)", "'b'"])
def test_a_letter_is_taken_as_it_is_meant(student: Path, capsys: pytest.CaptureFixture[str], answer: str) -> None:
    quiz("2.Q1", answer)
    assert capsys.readouterr().out.startswith("Right.") and read_progress()["quiz"]["2.q1"]["answer"] == "b"


@pytest.mark.parametrize("answer", [3000, "3000", "3,000", " 3000."])
def test_a_choice_that_is_a_number_may_be_written_as_one(student: Path, answer: object) -> None:
    predict("1.p1", answer)  # type: ignore[arg-type]
    assert read_progress()["predictions"]["1.p1"]["answer"] == "3000"


def test_a_number_in_quotation_marks_is_a_number(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = find_question("2.q4").numbers(student_id())
    right = sum(range(numbers["prompt"], numbers["prompt"] + numbers["new"]))
    for answer in (f"{right}", f" {right:,} ", np.int64(right), torch.tensor(right)):
        quiz("2.q4", answer)  # type: ignore[arg-type]
        assert capsys.readouterr().out.startswith("Right.") and read_progress()["quiz"]["2.q4"]["answer"] == right


def test_an_unanswered_question_is_shown_and_does_not_fail(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiz("2.q1", "?")
    shown = capsys.readouterr().out
    assert "   a: Only token 101" in shown and 'quiz("2.q1", "a")' in shown and "2.q1" not in read_progress()["quiz"]


def test_numbers_are_drawn_for_each_student_and_stay(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = find_question("2.q4")
    assert asked.numbers("one") == asked.numbers("one")
    assert len({str(asked.numbers(f"student {i}")) for i in range(20)}) > 15
    quiz("2.q4")
    first = capsys.readouterr().out
    quiz("2.q4")
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda prompt, new: new * prompt + new * (new - 1) / 2, "Right."),
        (lambda prompt, new: sum(range(prompt, prompt + new)), "Right."),
        (lambda prompt, new: prompt + new, "Not this one. That would be enough if results were kept"),
        (lambda prompt, new: prompt * new, "Not this one. Nearly"),
        (7, "Not this one. 7 is not right"),
    ],
)
def test_a_numeric_answer_is_marked_and_common_slips_have_words(
    student: Path, capsys: pytest.CaptureFixture[str], answer: object, words: str
) -> None:
    quiz("2.q4", answer)
    assert capsys.readouterr().out.startswith(words)


def test_where_two_slips_lead_to_one_number_both_are_told(monkeypatch: pytest.MonkeyPatch, student: Path) -> None:
    from checks.student import quiz as module

    asked = module.find_question("6.q2")
    monkeypatch.setattr(type(asked), "numbers", lambda self, who: {"decodes": 11, "prompt": 1282, "budget": 221})
    is_right, why = module._mark_number(asked, 6)
    assert not is_right and "The decodes come first" in why and " Or: " in why and "round up" in why


def test_impossible_answers_and_questions_say_what_there_is(student: Path) -> None:
    with pytest.raises(CheckFailed, match="'z' is not one of the choices: a, b, c"):
        quiz("2.q1", "z")
    for answer in ("many", "nan", True, None, [1]):
        with pytest.raises(CheckFailed, match=r'answered with a number.* quiz\("2\.q4", 1234\).* lambda prompt, new: \.\.\.'):
            quiz("2.q4", answer)  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match=r"The formula of 2\.q4 takes prompt, new, by these names"):
        quiz("2.q4", lambda a, b: a * b)
    with pytest.raises(CheckFailed, match=r"There is no question '2\.q9'\. There are: 2\.p1, 2\.q1"):
        quiz("2.q9")
    with pytest.raises(CheckFailed, match="is a prediction"):
        quiz("2.p1", "line")


def test_a_number_of_thousands_of_digits_is_refused_in_words(student: Path) -> None:
    huge: Any = 16**5000
    for question in ("2.q1", "2.q4"):
        with pytest.raises(CheckFailed, match="a number of thousands of digits"):
            quiz(question, huge)
    with pytest.raises(CheckFailed, match="There is no question a number of thousands of digits"):
        quiz(huge, "a")


def test_a_prediction_is_noted_recalled_and_then_kept(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict("2.p1", "same")
    predict("2.p1", "square")
    recall("2.p1")
    shown = capsys.readouterr().out
    assert "Noted: It stays the same" in shown and "You predicted: It grows with the square" in shown
    predict("2.p1", "line")
    assert "It stays." in capsys.readouterr().out
    recall("2.p1")
    assert "You predicted: It grows with the square" in capsys.readouterr().out


def test_recalling_without_a_prediction_says_so(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recall("2.p1")
    assert "You made no prediction" in capsys.readouterr().out


def test_a_run_that_does_not_show_the_effect_says_so_first(student: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict("2.p1", "line")
    recall("2.p1", but="One length was measured.")
    shown = capsys.readouterr().out
    assert shown.index("This run does not show it: One length was measured.") < shown.index("Yes. Every token")


def test_buttons_have_nothing_in_their_place_where_widgets_do_not_render(run_cells: object) -> None:
    (shown,) = run_cells('from checks import quiz\nquiz("2.q1", "?")')
    assert shown.endswith("and run the cell.\n")  # the widget's own plain text is empty


# ---------------------------------------------------------------------------------------------------------- figures


def test_a_figure_is_displayed_with_its_text(run_cells: object) -> None:
    shown, refused = run_cells(
        "from checks import new_figure, show\nfigure, axes = new_figure()\nshow(figure, alt='Nothing in it.')",
        "show(figure, alt='')",
    )
    assert shown == "Nothing in it." and "needs alt=" in refused


def test_the_journey_is_drawn_from_the_results(run_cells: object, student: Path) -> None:
    empty, _, drawn = run_cells(
        "from checks import journey, save_result\njourney()", "save_result('02', 12.5, 'naive', {'n': [1]})", "journey()"
    )
    assert "No results yet" in empty
    assert drawn == "Your journey so far, in tokens per second. One request: Lab 02: naive: 12.5."
    assert (student / "results" / "02.json").is_file()


def test_the_journey_keeps_one_requests_speed_and_everybodys_apart(student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(results, "show", lambda figure, alt: drawn.append(alt))
    monkeypatch.delenv("MINIVLLM_FAST", raising=False)
    results.save_result("02", 3.4, "naive", {})
    results.save_result("04", 151.0, "16 at once", {}, requests=16, alone=30.2)
    results.save_result("07", 9000.0, "second turn", {}, quantity="Reading a prompt")
    results.journey()
    assert drawn[0].removeprefix("Your journey so far, in tokens per second. ").split(". ") == [
        "One request: Lab 02: naive: 3.4; Lab 04: one request alone: 30.2",
        "Many requests at once, all together: Lab 04: 16 at once: 151",
        "Reading a prompt: Lab 07: second turn: 9,000.",
    ]


def test_the_journey_says_what_was_not_measured_alike(
    student: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "show", lambda figure, alt: None)
    monkeypatch.delenv("MINIVLLM_FAST", raising=False)
    for lab, dtype in (("00", "bfloat16"), ("01", "float32"), ("02", "bfloat16")):
        results.save_result(lab, 1.0, "x", {"device": "cpu", "dtype": dtype})
    monkeypatch.setenv("MINIVLLM_FAST", "1")
    results.save_result("03", 1.0, "x", {"device": "cpu", "dtype": "bfloat16"})
    results.journey()
    assert capsys.readouterr().out == "Not measured like the others: Lab 01 (float32); Lab 03 (a shrunk run).\n"


def test_reference_results_are_results_with_a_name() -> None:
    for path in (ROOT / "labs" / "reference_results").glob("[0-9][0-9]-*.json"):
        found = results.reference_results(path.name[:2])
        assert found and all(r["name"] and r["tokens_per_second"] > 0 for r in found)
