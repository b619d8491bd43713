"""python -m checks selftest: ten small questions on what the labs take for granted. Offline, and kept nowhere."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from checks.student.questions import Question, questions

ENOUGH = 8


def selftest(ask: Callable[[str], str] = input) -> int:
    """Ask them all; Enter passes over one, the end of the input ends it. Returns how many were right."""
    asked = list(questions("selftest").values())
    print(f"{len(asked)} questions, a few minutes. Write a letter; Enter alone passes over a question.\n")
    right, to_read = 0, []
    for number, question in enumerate(asked, start=1):
        _print(f"{number}. {question.text}", "   ")
        for key, choice in question.choices.items():
            print(f"     {key}  {choice.text}")
        try:
            answer = _read(question, ask)
        except EOFError:
            print("\nStopped.")
            asked = asked[: number - 1]
            break
        if answer == question.answer:
            right += 1
            _print(f"   Right. {question.choices[answer].why}", "   ")
        else:
            to_read.append(question)
            said = f"Not this one. {question.choices[answer].why} " if answer else ""
            _print(f"   {said}It is {question.answer}: {question.choices[question.answer or ''].why}", "   ")
        print()
    _sum_up(right, len(asked), to_read)
    return right


def _read(question: Question, ask: Callable[[str], str]) -> str:
    while True:
        answer = ask("   > ").strip().lower()
        if not answer or answer in question.choices:
            return answer
        print(f"   One of {', '.join(question.choices)}, please.")


def _sum_up(right: int, asked: int, to_read: list[Question]) -> None:
    print(f"{right} of {asked} right." + (" You are ready for Lab 00." if right >= ENOUGH else ""))
    if to_read:
        print("Worth reading before, or when you meet it:")
        for question in to_read:
            _print(f"  {question.id.partition('.')[2]:>2}. {question.why}", "      ")


def _print(text: str, indent: str) -> None:
    print(textwrap.fill(text, 79, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))
