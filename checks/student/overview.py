"""progress(), and `python -m checks status`: what has been done, in text."""

from __future__ import annotations

from collections.abc import Iterator

from checks.exercises import has_checks, table
from checks.student.home import read_progress
from checks.student.quiz import questions


def progress() -> None:
    """Print what was passed, skipped, predicted and answered, lab by lab."""
    print("\n".join(lines()))


def lines() -> Iterator[str]:
    state = read_progress()
    for lab in dict.fromkeys(row.lab for row in table().values() if has_checks(row.lab)):
        yield f"Lab {lab}"
        for row in (row for row in table().values() if row.lab == lab):
            entry = state["exercises"].get(row.id, {})
            done = {"passed": "passed", "skipped": "skipped, the reference is used", "tried": "not yet"}.get(
                entry.get("status"), "-"
            )
            hints = f", hints opened: {entry['hints']}" if entry.get("hints") else ""
            seen = ", solution seen" if entry.get("solution_seen") else ""
            yield f"  {row.id:5} {row.asks:58} {done}{hints}{seen}"
        asked = questions(lab)
        quizzes = [q for q in asked.values() if q.answer is not None]
        right = sum(bool(state["quiz"].get(q.id, {}).get("right")) for q in quizzes)
        answered = sum(q.id in state["quiz"] for q in quizzes)
        predicted = sum(q.id in state["predictions"] for q in asked.values() if q.answer is None)
        predictions = len(asked) - len(quizzes)
        yield f"  questions: {answered} of {len(quizzes)} answered, {right} right; predictions: {predicted} of {predictions}"
