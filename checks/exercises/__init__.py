"""The exercises: what each asks for (table.yaml), how it is checked (lab_NN.py), and what runs beside the student's code
(lab_NN_run.py).

A check is three functions: `cases(seed)` makes inputs, smallest first; `run(module, case)` calls the student's code in the
child and returns plain data; `judge(case, output)` compares in the parent. The child never imports lab_NN.py, so no expected
value and no judge is ever near the student's code. Grading is the same three functions with a secret seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from checks.sandbox.sandbox import Limits

TABLE = Path(__file__).parent / "table.yaml"

# What a verdict can be. A fixed set, so that feedback on hidden cases can name one and give nothing away.
CATEGORIES = frozenset(
    {
        "passed", "not attempted", "syntax", "missing function", "signature", "missing package", "undefined name", "exception",
        "exit", "time", "memory", "output", "wrong type", "wrong shape", "wrong value", "wrong calls", "input changed",
        "does not compile",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What a judge says of one case. `message` is for the student: what was wrong, with the numbers of this case."""

    category: str
    message: str = ""

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ValueError(f"verdict category {self.category!r} is not one of {sorted(CATEGORIES)}")

    @property
    def passed(self) -> bool:
        return self.category == "passed"


RIGHT = Verdict("passed")
Case = dict[str, Any]


@dataclass(frozen=True)
class Second:
    """What is asked of a cell whose cases are all right, in a child of its own, which another state of the process decides
    (Triton interprets or compiles, once and for all). `run` is its key in RUN. Its cases are no secret and are not counted."""

    run: str
    cases: Callable[[], list[Case]]
    judge: Callable[[Case, Any], Verdict]


@dataclass(frozen=True)
class Check:
    """How an exercise is checked. Every case has a key "call": the call it makes, as a student would write it. `difficulty` is
    1 to 3; `hints` go from a nudge to nearly the answer. `why_not` gives the reason why it cannot be checked on this machine.
    `cases` may take a second argument, `scale`: grading asks for larger ones with it."""

    cases: Callable[[int], list[Case]]
    judge: Callable[[Case, Any], Verdict]
    minutes: int
    difficulty: int
    hints: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    why_not: Callable[[], str | None] = lambda: None
    second: Second | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table: what is asked for, and where in the engine the answer goes (None: nowhere)."""

    id: str
    asks: str
    functions: tuple[str, ...]
    file: str | None
    seam: str | None
    capabilities: frozenset[str]
    optional: bool

    @property
    def lab(self) -> str:
        return self.id.partition(".")[0].zfill(2)


@lru_cache(maxsize=1)
def table() -> dict[str, Row]:
    """The exercises of all labs, also of those that are not built yet, by id, in the course's order."""
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        row["id"]: Row(
            id=row["id"],
            asks=row["asks"],
            functions=tuple(row.get("functions", ())),
            file=row.get("file"),
            seam=row.get("seam"),
            capabilities=frozenset(row.get("capabilities", ())),
            optional=row.get("optional", False),
        )
        for row in rows
    }


def find(exercise: str) -> Row:
    """The row of an exercise. Raises ValueError naming the exercises there are."""
    row = table().get(exercise)
    if row is None or not has_checks(row.lab):
        lab = str(exercise).partition(".")[0].zfill(2)
        known = [i for i, r in table().items() if r.lab == lab] or [i for i, r in table().items() if has_checks(r.lab)]
        raise ValueError(f"There is no exercise {exercise!r} here. There are: {', '.join(known)}.")
    return row


def has_checks(lab: str) -> bool:
    return (TABLE.parent / f"lab_{lab}.py").is_file()


def check_of(row: Row) -> Check:
    checks: dict[str, Check] = importlib.import_module(f"checks.exercises.lab_{row.lab}").CHECKS
    return checks[row.id]


def runner_of(row: Row) -> str:
    return f"checks.exercises.lab_{row.lab}_run"
