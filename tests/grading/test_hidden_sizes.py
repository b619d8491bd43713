"""Hidden tests are the same cases with a secret seed and larger sizes, in every exercise that has a size."""

from __future__ import annotations

import inspect
import re

import pytest

from checks.exercises import Case, Row, check_of, has_checks, table
from checks.grading.points import HIDDEN_SCALE, WITHOUT_SIZE, hidden_cases, public_cases
from checks.sandbox.plain import pack

CHECKED = [row for row in table().values() if has_checks(row.lab)]
SIZED = [row for row in CHECKED if row.id not in WITHOUT_SIZE]


def is_larger(larger: Case, plain: Case) -> bool:
    """In what a child is sent: more of it, or larger counts in the call that is made."""
    characters = len(repr(pack(larger))) > 1.25 * len(repr(pack(plain)))
    return characters or _total(larger["call"]) > 1.25 * _total(plain["call"])


def _total(call: str) -> int:
    return sum(int(number) for number in re.findall(r"\b\d{1,6}\b", call))


def test_an_exercise_has_larger_cases_or_is_said_to_have_no_size() -> None:
    scaled = [row.id for row in CHECKED if "scale" in inspect.signature(check_of(row).cases).parameters]
    assert scaled == [row.id for row in SIZED] and set(WITHOUT_SIZE) < {row.id for row in CHECKED}


@pytest.mark.parametrize("row", SIZED, ids=lambda row: row.id)
def test_hidden_cases_are_larger_and_the_public_ones_what_they_were(row: Row) -> None:
    make = check_of(row).cases
    for seed in (0, 1, 2**40 + 7):
        plain, larger = make(seed), make(seed, scale=HIDDEN_SCALE)  # type: ignore[call-arg]
        assert pack(make(seed, scale=1)) == pack(plain)  # type: ignore[call-arg]
        assert any(is_larger(*pair) for pair in zip(larger, plain, strict=False)) and len(larger) >= len(plain)
    assert not {repr(case) for case in hidden_cases(row, "s")} & {repr(case) for case in public_cases(row)}


@pytest.mark.parametrize("row", SIZED, ids=lambda row: row.id)
def test_any_secret_makes_cases(row: Row) -> None:
    for seed in range(15):
        assert check_of(row).cases(seed * 7_919_993, scale=HIDDEN_SCALE)  # type: ignore[call-arg]
