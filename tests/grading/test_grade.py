"""A term's submissions in one run: fair points, nothing hangs, and the instructor learns what was odd."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checks.grading import one
from checks.grading.records import Submission
from checks.grading.run import run
from tests.grading import mangled
from tests.grading.conftest import SECRET, options


def records(out: Path) -> dict[str, Submission]:
    found = [Submission.from_json(p.read_text(encoding="utf-8")) for p in (out / ".state").glob("*-*.json")]
    return {record.student: record for record in found}


def status(term: SimpleNamespace, student: str, exercise: str = "4.3") -> str:
    return next(r.status for r in records(term.out)[student].exercises if r.exercise == exercise)


def kinds(term: SimpleNamespace, student: str) -> set[str]:
    return {incident.kind for incident in records(term.out)[student].incidents}


def test_sixty_mangled_submissions_get_exactly_the_points_they_earned(term: SimpleNamespace) -> None:
    assert term.status == 0
    assert len(term.expected) > 60
    written = (term.out / "gradebook.csv").read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    assert written == mangled.gradebook(term.expected)


@pytest.mark.parametrize(
    ("student", "expected"),
    [
        ("untouched", "not_attempted"),
        ("wrong", "failed"),
        ("one_right", "passed"),
        ("endless_loop", "time_limit"),
        ("ignores_signals", "time_limit"),
        ("sleeps", "time_limit"),
        ("memory_hog", "memory_limit"),
        ("prints_for_ever", "output_limit"),
        ("os_exit", "crashed"),
        ("crashes", "crashed"),
        ("imports_the_answer", "copied"),
        ("importlib", "copied"),
        ("reads_the_source", "copied"),
        ("reads_the_clone", "copied"),
        ("learned_by_heart", "failed"),
        ("not_json", "missing"),
    ],
)
def test_the_status_says_what_happened(term: SimpleNamespace, student: str, expected: str) -> None:
    assert status(term, student) == expected


@pytest.mark.parametrize(
    ("student", "kind"),
    [
        ("check_deleted", "check_deleted"),
        ("check_of_another", "check_changed"),
        ("cell_turned_into_text", "check_changed"),
        ("skip_comment", "skip_tag"),
        ("raises_tag", "skip_tag"),
        ("right_then_stub", "duplicate_cell"),
        ("replaces_check", "tampering"),
        ("defines_check", "tampering"),
        ("imports_the_answer", "copied"),
        ("endless_loop", "time_limit"),
        ("old_version", "wrong_version"),
        ("format_4_2", "old_format"),
        ("metadata_lost", "renamed"),
        ("empty", "empty"),
        ("not_json", "not_json"),
        ("huge", "too_large"),
        ("format_3", "unreadable"),
        ("broken_zip", "unreadable"),
        ("unrelated", "unknown_lab"),
        ("late-one_4714", "several_files"),
    ],
)
def test_the_instructor_is_told_what_was_odd(term: SimpleNamespace, student: str, kind: str) -> None:
    assert kind in kinds(term, student)


def test_an_ordinary_submission_has_no_incident(term: SimpleNamespace) -> None:
    for student in ("one_right", "all_right", "untouched", "wrong", "flat"):
        assert not records(term.out)[student].incidents


def test_the_reference_word_for_word_is_flagged_and_keeps_its_points(term: SimpleNamespace) -> None:
    result = next(r for r in records(term.out)["the_reference"].exercises if r.exercise == "4.3")
    (said,) = result.flags
    assert result.points == result.max_points
    for part in ("slot_mapping: the same code as this project's reference", "nor were other students", "costs no points"):
        assert part in said
    rows = (term.out / "incidents.csv").read_text(encoding="utf-8")
    assert said in rows and said not in (term.out / "feedback" / "the_reference.html").read_text(encoding="utf-8")


def test_a_plain_number_counts_as_answered_where_the_students_numbers_did_not_come_along(term: SimpleNamespace) -> None:
    told = {q.question: q for q in records(term.out)["own_numbers"].quizzes}
    assert told["4.q4"].status == "wrong"
    told = {q.question: q for q in records(term.out)["all_right"].quizzes}
    assert told["4.q2"].status == "not_answered" and "one of its choices, a, b, c" in told["4.q2"].message


def test_a_file_in_a_zip_never_lands_elsewhere(term: SimpleNamespace) -> None:
    assert not list(term.submissions.parent.rglob("evil.txt"))
    assert not list(term.submissions.rglob("gradebook.csv"))


# ------------------------------------------------------------------------------------------------- going on, and again


@pytest.fixture
def few(tmp_path: Path, short_limits: None) -> Path:
    for name, raw in (("a", mangled.solved()), ("b", mangled.with_body("return positions")), ("c", mangled.lab())):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "04_paged_kv.ipynb").write_text(json.dumps(raw), encoding="utf-8")
    return tmp_path / "in"


def test_a_run_that_was_stopped_goes_on_where_it_was(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import checks.grading.run as module

    graded: list[str] = []
    real = module.grade

    def counting(grader, task):  # type: ignore[no-untyped-def]
        if len(graded) == 2:
            raise KeyboardInterrupt
        graded.append(task.found.student)
        return real(grader, task)

    monkeypatch.setattr(module, "grade", counting)
    with pytest.raises(KeyboardInterrupt):
        run(options(few, tmp_path / "out"), say=lambda _: None)
    assert graded == ["a", "b"]
    graded.clear()
    run(options(few, tmp_path / "out"), say=lambda _: None)
    assert graded == ["c"]
    (few / "b" / "04_paged_kv.ipynb").write_text(json.dumps(mangled.solved()), encoding="utf-8")
    graded.clear()
    run(options(few, tmp_path / "out"), say=lambda _: None)
    assert graded == ["b"]


def test_regrading_one_exercise_leaves_the_rest_as_it_was(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checks.exercises import RIGHT
    from checks.exercises.lab_04 import CHECKS

    out = tmp_path / "out"
    overrides = tmp_path / "overrides.csv"
    overrides.write_text("student,item,points,reason\nc,4.5,max,shown in class\n", encoding="utf-8")
    run(options(few, out, overrides=overrides), say=lambda _: None)
    before = records(out)
    generous = type(CHECKS["4.3"])(**{**vars(CHECKS["4.3"]), "judge": lambda case, output: RIGHT})
    monkeypatch.setitem(CHECKS, "4.3", generous)
    monkeypatch.setitem(CHECKS, "4.4", generous)
    run(options(few, out, exercise="4.3"), say=lambda _: None)
    after = records(out)
    assert [r.points for r in after["b"].exercises] == [0, 0, 1, 0, 0]
    assert "shown in class" in (out / "feedback" / "c.html").read_text(encoding="utf-8")  # though nobody named the file again
    assert [r for r in after["c"].exercises if r.exercise != "4.3"] == [r for r in before["c"].exercises if r.exercise != "4.3"]


def test_the_result_is_the_same_however_many_are_graded_at_once_and_after_a_kill(few: Path, tmp_path: Path) -> None:
    """One job in this process; two in others, killed after the first record, which goes on where it was."""
    run(options(few, tmp_path / "one"), say=lambda _: None)
    out = tmp_path / "two"
    command = [
        sys.executable,
        "-m",
        "checks",
        "grade",
        str(few),
        "--out",
        str(out),
        "--jobs",
        "2",
        "--no-nbval",
        "--hidden-seed",
        SECRET,
    ]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    quiet: dict[str, Any] = {
        "cwd": mangled.ROOT,
        "env": environment,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    process = subprocess.Popen(command, **quiet)
    while not list(out.glob(".run/*.key")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in out.glob(".run/*.key")}
    deadline = time.monotonic() + 60
    while [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in read_or_nothing(p)]:
        assert time.monotonic() < deadline, "a process of the killed run goes on"
        time.sleep(0.1)
    assert subprocess.run(command, **quiet).returncode == 0
    assert not list(temporary.glob("minivllm-*"))  # what the killed run left is swept
    assert {name: (out / ".run" / name).stat().st_mtime_ns for name in done} == done
    for name in ("gradebook.csv", "incidents.csv", "report.html", "junit.xml"):
        assert (tmp_path / "one" / name).read_bytes() == (out / name).read_bytes()


def test_notebooks_of_other_labs_are_counted_and_named(few: Path, tmp_path: Path) -> None:
    for name in ("a", "d"):  # d handed in nothing else
        (few / name).mkdir(exist_ok=True)
        (few / name / "05.ipynb").write_text(json.dumps(one.official("05").raw), encoding="utf-8")
    for name in ("b", "c"):
        (few / name / "04_paged_kv.ipynb").unlink()
    said: list[str] = []
    run(options(few, tmp_path / "out", labs=("04",)), say=said.append)
    assert "2 notebooks were not graded: 2 of Lab 05; asked for: 04. incidents.csv has the files." in said
    with (tmp_path / "out" / "incidents.csv").open(encoding="utf-8") as file:
        assert [(r["student"], r["file"]) for r in csv.DictReader(file) if r["kind"] == "another lab"] == [
            ("a", "a/05.ipynb"), ("d", "d/05.ipynb"),
        ]  # fmt: skip
    run(options(few, tmp_path / "out", labs=("04", "05")), say=lambda _: None)
    assert "another lab" not in (tmp_path / "out" / "incidents.csv").read_text(encoding="utf-8")


def read_or_nothing(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_of_several_files_the_one_with_work_in_it_counts(few: Path, tmp_path: Path) -> None:
    (few / "c" / "04_paged_kv-Copy1.ipynb").write_text(json.dumps(mangled.solved()), encoding="utf-8")
    run(options(few, tmp_path / "out"), say=lambda _: None)
    assert records(tmp_path / "out")["c"].file == "c/04_paged_kv-Copy1.ipynb"


def test_every_row_has_the_same_maximum(term: SimpleNamespace) -> None:
    with (term.out / "gradebook.csv").open(encoding="utf-8-sig", newline="") as file:
        assert len({row["max"] for row in csv.DictReader(file)}) == 1
