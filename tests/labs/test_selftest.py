"""The self-test of prerequisites: it works offline and without a notebook, and its answers are true."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from checks.student.questions import questions
from checks.student.selftest import selftest

ASKED = questions("selftest")
RIGHT = [question.answer for question in ASKED.values()]


def answering(*answers: str | None) -> Callable[[str], str]:
    """An `input` that gives these answers, then ends."""
    left: Iterator[str | None] = iter(answers)

    def ask(prompt: str) -> str:
        try:
            return next(left) or ""
        except StopIteration:
            raise EOFError from None

    return ask


def test_ten_questions_with_a_word_on_every_choice_and_something_to_read() -> None:
    assert len(ASKED) == 10
    for question in ASKED.values():
        assert question.answer in question.choices and question.why
        assert len(question.choices) >= 3 and all(choice.why for choice in question.choices.values())


def test_the_answer_is_not_always_the_same_letter() -> None:
    assert max(RIGHT.count(letter) for letter in "abc") <= 4


def test_all_right_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(answering(*RIGHT)) == 10
    shown = capsys.readouterr().out
    assert "10 of 10 right. You are ready for Lab 00." in shown and "Worth reading" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_wrong_answer_is_explained_and_told_what_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(answering("a", *RIGHT[1:])) == 9
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not this one. b = a makes no copy" in shown and "It is b: Two names, one list." in shown
    assert "Worth reading before, or when you meet it: 1. Python's tutorial, 'Data Structures'" in shown


def test_nonsense_is_asked_again_enter_passes_and_the_end_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(answering("zebra", "B", "")) == 1
    shown = capsys.readouterr().out
    assert "One of a, b, c, please." in shown and "Stopped." in shown and "1 of 2 right." in shown


def test_what_it_says_about_python_and_torch_is_so() -> None:
    a = [1, 2, 3]
    b = a
    b.append(4)
    assert len(a) == 4 and -(-9 // 4) == 3
    assert list((torch.ones(4, 1, 8) + torch.ones(3, 8)).shape) == [4, 3, 8]
    x = torch.arange(60).view(10, 6)
    halves = torch.stack([x[:, :3], x[:, 3:]], dim=1)
    assert torch.equal(x.view(10, 2, 3), halves)
    assert not torch.equal(x.view(2, 10, 3).transpose(0, 1), halves)
    assert not torch.equal(x.reshape(10, 3, 2).transpose(1, 2), halves)
    assert torch.zeros(4).softmax(-1).tolist() == [0.25] * 4
    assert torch.tensor([0.0, 1.0, float("-inf")]).softmax(-1)[2] == 0
    scores = torch.tensor([0.5, 1.0])
    assert torch.allclose((scores + 100).softmax(-1), scores.softmax(-1))
