"""quiz and predict: questions answered by typing into a cell, so that the answer lives in the notebook.

The questions are data, checks/quizzes/NN.yaml; the builder writes them into the notebook as text. Where widgets work, radio
buttons write the line to paste; where they do not, nothing is missing.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable
from typing import Any

from checks.exercises.words import wrapped
from checks.student.failure import CheckFailed
from checks.student.home import changing_progress, read_progress, student_id
from checks.student.notebook import current_shell
from checks.student.questions import Question, has_decimal_comma, is_close, questions, value, written_number

OPEN = "?"  # what stands in a lab where the answer goes


def find_question(question: str) -> Question:
    """Raises CheckFailed naming the questions there are."""
    name = _written(question).strip().lower()[:20]
    if not name:
        raise CheckFailed('Which question? Its number and your answer go between the brackets: quiz("2.q1", "b").')
    lab = name.partition(".")[0].zfill(2)
    known = questions(lab) if re.fullmatch("[0-9]{2}", lab) else {}
    if name not in known:
        raise CheckFailed(f"There is no question {_shown(question, 40)}. There are: {', '.join(known) or 'none in this lab'}.")
    return known[name]


def quiz(question: str = "", answer: str | float | Callable[..., float] = OPEN) -> None:
    """Answer a question: `quiz("2.q1", "b")`, or a number. A formula over the drawn numbers, a function, is taken too. Without
    an answer the question is shown. An answer is explained whether it is right or wrong, and may be changed; what was right
    once stays right."""
    asked = find_question(question)
    if asked.answer is None:
        raise CheckFailed(f'{asked.id} is a prediction: predict("{asked.id}", ...).')
    if _is_open(answer):
        _show(asked)
        return
    if asked.draw:
        told: str | float = "a formula" if callable(answer) else _number(asked, answer)
        right, why = _mark_number(asked, answer)
    else:
        told = _choice(asked, answer)
        right, why = told == asked.answer, asked.choices[told].why
    with changing_progress() as state:
        was_right = state["quiz"].get(asked.id, {}).get("right", False)
        if right or not was_right:
            state["quiz"][asked.id] = {"answer": told, "right": right}
    print(wrapped(f"{'Right' if right else 'Not this one'}. {why}"))
    if was_right and not right:
        print("(You had it right before, and that stays.)")


def _is_open(answer: Any) -> bool:
    return isinstance(answer, str) and answer.strip() in (OPEN, "")


def _choice(asked: Question, answer: Any) -> str:
    """The choice that is meant: "B", " b) " and "b" are the same, and so are 3000, "3000" and "3,000"."""
    wanted = _written(answer).strip(" \t\n.:()'\"").lower()
    for key in asked.choices:
        if key.lower() in (wanted, wanted.replace(",", "")):
            return key
    example = f'{_verb(asked)}("{asked.id}", "{next(iter(asked.choices))}")'
    raise CheckFailed(
        f"{asked.id}: {_shown(answer)} is not one of the choices: {', '.join(asked.choices)}."
        f" Write one of them, as in {example}."
    )


def _number(asked: Question, answer: Any) -> float:
    """An answer as a number: 6721, "6721", "6,721", a NumPy or torch scalar."""
    given = answer
    if isinstance(answer, str):
        if point := has_decimal_comma(answer):
            raise CheckFailed(f"{asked.id}: is {answer.strip()!r} meant as {point}? Decimals take a point, thousands a comma.")
        given = written_number(answer)
    elif hasattr(answer, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # no tensor of one number
            given = answer.item()
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not abs(given) < 1e300:  # NaN is not less, either
        names = ", ".join(asked.draw)
        raise CheckFailed(
            f"{asked.id} is answered with a number, not {_shown(answer)}. Write it in digits, without a unit:"
            f' quiz("{asked.id}", 1234), or as a formula: quiz("{asked.id}", lambda {names}: ...).'
        )
    return given


def _written(given: Any) -> str:
    try:
        return str(given)
    except ValueError:  # an integer of so many digits that Python does not write it
        return "a number of thousands of digits"


def _shown(answer: Any, most: int = 60) -> str:
    try:
        return f"{answer!r:.{most}}"
    except ValueError:
        return _written(answer)


def _mark_number(asked: Question, answer: Any) -> tuple[bool, str]:
    numbers = asked.numbers(student_id())
    if callable(answer):
        try:
            answer = answer(**numbers)
        except TypeError as error:
            names = ", ".join(numbers)
            told = f"The formula of {asked.id} takes {names}, by these names: lambda {names}: ... ({error})"
            raise CheckFailed(told) from None
        except Exception as error:  # the student's own: told by name, like every other answer
            raise CheckFailed(f"The formula of {asked.id} raised {type(error).__name__}: {error}.") from None
    given = _number(asked, answer)
    if is_close(given, value(asked.answer or "", numbers)):
        return True, asked.why
    fitting = [why for expression, why in asked.slips if is_close(given, value(expression, numbers))]
    if fitting:  # with some numbers two slips lead to one result
        return False, " Or: ".join(dict.fromkeys(fitting))
    return False, f"{given:g} is not right. Do the same with small numbers first, on paper."


def is_right(asked: Question, given: float, student: str) -> bool:
    """Whether a number answers a numeric question with the numbers drawn for this student. For grading."""
    return is_close(given, value(asked.answer or "", asked.numbers(student)))


def predict(question: str = "", answer: str = OPEN) -> None:
    """Commit to a prediction before the experiment: `predict("2.p1", "line")`. With the question alone it says again, beside
    the plot, what was predicted, and what that would have meant. A prediction can be changed until it has been recalled."""
    asked = find_question(question)
    if asked.answer is not None:
        raise CheckFailed(f'{asked.id} is a quiz question: quiz("{asked.id}", ...).')
    made = read_progress()["predictions"].get(asked.id)
    if _is_open(answer):
        _show(asked)
        return
    answer = _choice(asked, answer)
    if made and made.get("recalled") and made["answer"] != answer:
        print(f"Your prediction was {made['answer']!r}, and you have seen the result. It stays.")
    else:
        with changing_progress() as state:
            state["predictions"][asked.id] = {"answer": answer, "recalled": bool(made and made.get("recalled"))}
        print(wrapped(f"Noted: {asked.choices[answer].text} The plot will tell."))


def recall(question: str, but: str = "") -> None:
    """Say again, beside the plot, what was predicted, and what is to be said of it. `but` is a sentence for a run that does not
    show the effect: it is told first."""
    asked = find_question(question)
    with changing_progress() as state:
        made = state["predictions"].get(asked.id)
        if made:
            made["recalled"] = True
    if made is None:
        print(f"You made no prediction for {asked.id}. Next time: the surprise is half of the learning.")
        return
    choice = asked.choices[made["answer"]]
    print(wrapped(f"You predicted: {choice.text}"))
    if but:
        print(wrapped(f"This run does not show it: {but} Where the effect is seen:"))
    print(wrapped(choice.why))


def as_markdown(asked: Question) -> str:
    """The question as the builder writes it into the notebook. Drawn numbers are the student's, so they come from running the
    cell."""
    kind = "Predict" if asked.answer is None else "Question"
    text = asked.text
    if asked.draw:
        letters = {name: f"*{name}*" for name in asked.draw}
        text = text.format(**letters) + " (Run the cell: your numbers are your own.)"
    lines = [f"**{kind} {asked.id}** · {text}", ""]
    lines += [f"- `{key}` · {choice.text}" for key, choice in asked.choices.items()]
    return "\n".join(lines).rstrip()


def _show(asked: Question) -> None:
    text = asked.text.format(**asked.numbers(student_id())) if asked.draw else asked.text
    verb = _verb(asked)
    print(wrapped(f"{asked.id}  {text}"))
    for key, choice in asked.choices.items():
        print(textwrap.indent(wrapped(f"{key}: {choice.text}", "  "), "   "))
    example = next(iter(asked.choices), "1234").join(('"', '"')) if asked.choices else "1234"
    print(
        wrapped(
            f'Not answered yet. Write your answer in place of "?", as in {verb}("{asked.id}", {example}), and run the cell.'
        )
    )
    _show_buttons(asked, verb)


def _verb(asked: Question) -> str:
    return "predict" if asked.answer is None else "quiz"


def _show_buttons(asked: Question, verb: str) -> None:
    """Radio buttons that write the line to paste. Only in a live front end; the text above is complete without them."""
    shell = current_shell()
    if not asked.choices or shell is None or not hasattr(shell, "kernel"):
        return
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return
    line = ipywidgets.HTML()
    buttons = ipywidgets.RadioButtons(
        options=[(f"{key}: {choice.text}", key) for key, choice in asked.choices.items()],
        value=None,
        description=f"{asked.id}",
        layout={"width": "max-content", "max_width": "100%"},
    )

    def on_choice(change: dict[str, Any]) -> None:
        line.value = f'To answer, write: <code>{verb}("{asked.id}", "{change["new"]}")</code>'

    buttons.observe(on_choice, names="value")
    box = ipywidgets.VBox([buttons, line])
    # A front end without widgets shows the plain text of the bundle: nothing, since the question stands above.
    bundle = {"application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": box.model_id}}
    display({**bundle, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]
