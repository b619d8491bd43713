"""progress(), and `python -m checks status`: what has been done, in text."""

from __future__ import annotations

from collections.abc import Iterator

from checks.exercises import has_checks, table
from checks.student.home import home, read_progress
from checks.student.questions import questions
from checks.student.results import read_results

_DONE = {
    "passed": "passed",
    "restored": "restored, not checked",
    "skipped": "skipped, the reference is used",
    "tried": "not yet",
}


def progress() -> None:
    """Print what was passed, skipped, predicted and answered, lab by lab, and what was measured."""
    print("\n".join(lines()))


def lines() -> Iterator[str]:
    state = read_progress()
    rows = [row for row in table().values() if has_checks(row.lab)]
    passed = sum(state["exercises"].get(row.id, {}).get("status") == "passed" for row in rows)
    yield f"{passed} of {len(rows)} exercises passed. Your work is in {home()}"
    for lab in dict.fromkeys(row.lab for row in rows):
        yield f"Lab {lab}"
        for row in (row for row in rows if row.lab == lab):
            entry = state["exercises"].get(row.id, {})
            done = _DONE.get(entry.get("status", ""), "-")
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
    results = read_results()
    yield "The journey so far" + ("" if results else ": no experiment has run yet")
    for result in results:
        yield f"  Lab {result['lab']}  {result['tokens_per_second']:9.3g} tokens/s  {result['what']}"
    if state["use"]:
        yield "Chosen with use(): " + ", ".join(f"{seam} from {whose}" for seam, whose in sorted(state["use"].items()))
