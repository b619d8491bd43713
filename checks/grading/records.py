"""What grading finds out, as data: one Submission a student and lab, one JSON file each. Everything that is handed on (the
gradebook, the feedback, the reports) is computed from the folder of these files and from nothing else.

Knows nothing of notebooks, checks or processes, and imports nothing of this package.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

ExerciseStatus = Literal[
    "passed", "failed", "not_attempted", "missing", "copied", "time_limit", "memory_limit", "output_limit", "crashed", "error",
]  # fmt: skip
QuizStatus = Literal["right", "wrong", "not_answered", "answered"]
CellStatus = Literal["passed", "failed", "skipped", "not_run"]
Isolation = Literal["container", "namespaces", "not isolated"]
OPEN = ("not_attempted", "missing", "not_answered")  # the statuses of what nobody answered
GRADER_ERROR = "grader_error"  # the kind of incident for what is no student's fault


@dataclass(frozen=True, slots=True)
class ExerciseResult:
    """An exercise's points and why. `message` is the verdict of the public cases, in the student's terms; `hidden` is a fixed
    category and never anything that the student's code said, nor an expected value. Status "error" is the grader's fault."""

    exercise: str
    points: float
    max_points: float
    status: ExerciseStatus
    message: str = ""
    hidden: str = ""
    category: str = ""  # the verdict's: it says whether the message may have words of the student's code in it
    flags: tuple[str, ...] = ()  # remarks that cost nothing (copying.py)


@dataclass(frozen=True, slots=True)
class QuizResult:
    """An answer to a question. "answered": a question that counts as completion, whatever the answer."""

    question: str
    points: float
    max_points: float
    status: QuizStatus
    message: str = ""


@dataclass(frozen=True, slots=True)
class CellResult:
    """What nbval says of one cell of the rebuilt notebook. `category` is a fixed word, never the cell's output."""

    cell: str
    exercise: str | None
    status: CellStatus
    category: str = ""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something the instructor should know of: an edited check, a forged file, a time-out. Costs no points by itself."""

    kind: str
    cell_or_file: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A notebook that was not graded since it is of a lab that the run was not asked for."""

    student: str
    lab: str
    file: str


@dataclass(frozen=True, slots=True)
class Submission:
    """All that is known of one student's notebook of one lab. `file` is the name it was handed in under."""

    student: str
    lab: str
    lab_version: str
    file: str
    exercises: tuple[ExerciseResult, ...] = ()
    quizzes: tuple[QuizResult, ...] = ()
    nbval: tuple[CellResult, ...] = ()
    incidents: tuple[Incident, ...] = ()
    isolation: Isolation = "not isolated"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Submission:
        """Raises ValueError for text that is not a Submission's."""
        try:
            raw: dict[str, Any] = json.loads(text)
            raw["exercises"] = tuple(ExerciseResult(**{**r, "flags": tuple(r["flags"])}) for r in raw["exercises"])
            raw["quizzes"] = tuple(QuizResult(**r) for r in raw["quizzes"])
            raw["nbval"] = tuple(CellResult(**r) for r in raw["nbval"])
            raw["incidents"] = tuple(Incident(**r) for r in raw["incidents"])
            return cls(**raw)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a grading record: {error}") from None
