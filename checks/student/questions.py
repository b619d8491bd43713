"""The questions of the labs, read from checks/quizzes/NN.yaml. A file says exactly what is meant, or is refused with the place:
the file, the question, the key. Nothing in it is run but arithmetic over the drawn numbers.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

QUIZZES = Path(__file__).resolve().parents[1] / "quizzes"
MAX_BYTES = 256 << 10  # the largest has some ten thousand
MAX_DRAWN = 6
MAX_VALUES = 10_000  # of one drawn number
_MAX_DIVISORS = 200_000  # are looked through, for a zero
_MAX_ANSWERS = 30_000_000  # are gone through, in about a second
_AT_ONCE = 4_000_000
_KEYS = ("id", "text", "choices", "answer", "draw", "slips", "why")
_ID = re.compile(r"\d{1,2}\.[pq]\d{1,2}|selftest\.\d{1,2}")
_TOLERANCE = 0.005  # an answer may be rounded
_MAX_WRITTEN = 60  # characters of a number


class QuizError(ValueError):
    """A file of questions that cannot be meant. The message names the file, the question, and the key."""


@dataclass(frozen=True)
class Choice:
    text: str
    why: str


@dataclass(frozen=True)
class Question:
    """A choice question (`choices`, `answer` one of them), a numeric one (`draw`: name -> [low, high], `answer` an expression
    over these names, `slips`: [expression, why] for wrong answers worth a word), or a prediction (choices, no answer: the plot
    says)."""

    id: str
    text: str
    choices: dict[str, Choice]
    answer: str | None
    draw: dict[str, tuple[int, int]]
    slips: tuple[tuple[str, str], ...]
    why: str

    def numbers(self, student: str) -> dict[str, int]:
        """This student's numbers."""
        rng = random.Random(f"{student}:{self.id}")
        return {name: rng.randint(low, high) for name, (low, high) in self.draw.items()}


@cache
def questions(lab: str) -> dict[str, Question]:
    """The questions and predictions of a lab ("02") by id. Raises QuizError for a file that cannot be meant."""
    path = QUIZZES / f"{lab}.yaml"
    return read_questions(path) if path.is_file() else {}


def value(expression: str, numbers: Mapping[str, int]) -> float:
    """What an answer, or a slip, is with these numbers. Expressions are arithmetic alone: read_questions looked at them."""
    return float(eval(expression, {"__builtins__": {}}, dict(numbers)))


def is_close(given: float, wanted: float) -> bool:
    return math.isclose(given, wanted, rel_tol=_TOLERANCE)


def written_number(text: str) -> float | None:
    """A number that was written as text: "6721", "6,721", " 6 721 ". None for what is none, or may mean another ("3,5")."""
    if len(text) > _MAX_WRITTEN or has_decimal_comma(text):
        return None
    try:
        return float(text.replace(",", "").replace(" ", ""))
    except ValueError:
        return None


def has_decimal_comma(text: str) -> str | None:
    """How "3,5" is to be written if it means three and a half; None for what cannot mean that."""
    return text.strip().replace(",", ".") if re.fullmatch(r"\s*-?\d{1,40},\d{1,2}\s*", text) else None


# ------------------------------------------------------------------------------------------------------- reading a file


def read_questions(path: Path) -> dict[str, Question]:
    """The questions of a file, by id, in its order. Raises QuizError."""
    found: dict[str, Question] = {}
    for number, row in enumerate(_rows(path), start=1):
        where = f"{path.name}, question number {number}"
        if not isinstance(row, dict):
            raise QuizError(f"{where}: each question is a mapping of {', '.join(_KEYS)}, not {_shown(row)}.")
        name = row.get("id")
        if not isinstance(name, str) or not _ID.fullmatch(name):
            raise QuizError(f"{where}, id: it is like 4.q1, 4.p1 or selftest.1, as text, not {_shown(name)}.")
        if name in found:
            raise QuizError(f"{path.name}, question {name}, id: there are two of this id.")
        found[name] = _Reader(f"{path.name}, question {name}", row).question(name)
    return found


def _rows(path: Path) -> list[Any]:
    if path.stat().st_size > MAX_BYTES:
        raise QuizError(f"{path.name} has more than {MAX_BYTES >> 10} KiB. Questions of one lab never have.")
    try:
        rows = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except QuizError as error:
        raise QuizError(f"{path.name}, {error}") from None
    except Exception as error:  # PyYAML's own kinds, and what its constructors raise for a tag or a date that is none
        told = " ".join(str(error).split())[:200]
        raise QuizError(f"{path.name} cannot be read as YAML ({type(error).__name__}: {told}).") from None
    if not isinstance(rows, list):
        raise QuizError(f"{path.name}: it is a list of questions (`- id: 4.q1`), not {_shown(rows)}.")
    return rows


class _Loader(yaml.SafeLoader):
    """Plain data, without what makes YAML say much in little (aliases), or something twice (keys)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise QuizError(f"line {line}: an alias (*name). Write out what it stands for.")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise QuizError(f"line {key.start_mark.line + 1}: the key {key.value!r:.40} is there twice.")
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


class _Reader:
    """One question, key by key. `where` begins every message."""

    def __init__(self, where: str, row: dict[Any, Any]) -> None:
        self._where, self._row = where, row

    def question(self, name: str) -> Question:
        if unknown := [key for key in self._row if key not in _KEYS]:
            raise self._wrong(_shown(unknown[0]), f"there is no such key. The keys are {', '.join(_KEYS)}.")
        choices, draw = self._choices(), self._draw()
        if bool(choices) == bool(draw):
            raise self._wrong("choices", "a question has choices or drawn numbers (draw), and not both.")
        answer = self._answer(choices, draw)
        if draw and answer is None:
            raise self._wrong("answer", "drawn numbers need one, an expression over them.")
        text = self._text("text", self._row.get("text"))
        try:
            fields = list(_fields(text)) if draw else []
        except ValueError:
            raise self._wrong("text", "a brace stands alone. One that is to be seen is written twice.") from None
        for field in fields:
            if field not in draw:
                raise self._wrong("text", f"{{{field}}} is none of the drawn numbers, {', '.join(draw)}.")
        slips = tuple(self._slips(draw))
        why = self._text("why", self._row["why"]) if "why" in self._row else ""
        return Question(name, text, choices, answer, draw, slips, why)

    def _wrong(self, key: str, told: str) -> QuizError:
        return QuizError(f"{self._where}, {key}: {told}")

    def _text(self, key: str, given: Any) -> str:
        if not isinstance(given, str) or not given.strip():
            raise self._wrong(key, f"it has to be text, not {_shown(given)}.")
        return given.strip()

    def _mapping(self, key: str, given: Any) -> dict[Any, Any]:
        if not isinstance(given, dict) or not given:
            raise self._wrong(key, f"it has to be a mapping, not {_shown(given)}.")
        return given

    def _choices(self) -> dict[str, Choice]:
        found: dict[str, Choice] = {}
        for key, row in self._mapping("choices", self._row["choices"]).items() if "choices" in self._row else ():
            if not isinstance(key, str) or not key.strip():
                raise self._wrong("choices", f"the choice {_shown(key)} has to be text: write it in quotation marks.")
            at = f"choices, {_shown(key)}"
            row = self._mapping(at, row)
            if extra := [k for k in row if k not in ("text", "why")]:
                raise self._wrong(at, f"it has text and why, and not {_shown(extra[0])}.")
            found[key] = Choice(self._text(f"{at}, text", row.get("text")), self._text(f"{at}, why", row.get("why")))
        return found

    def _draw(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for name, ends in self._mapping("draw", self._row["draw"]).items() if "draw" in self._row else ():
            if not isinstance(name, str) or not name.isidentifier():
                raise self._wrong("draw", f"{_shown(name)} is no name.")
            whole = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
            if not whole or not -1e9 <= ends[0] <= ends[1] <= 1e9:
                raise self._wrong(f"draw, {name}", f"it is two whole numbers, [low, high], not {_shown(ends)}.")
            if ends[1] - ends[0] >= MAX_VALUES:
                raise self._wrong(f"draw, {name}", f"{ends} are more than {MAX_VALUES:,} values. Fewer do as well.")
            found[name] = (ends[0], ends[1])
        if len(found) > MAX_DRAWN:
            raise self._wrong("draw", f"{len(found)} numbers; at most {MAX_DRAWN}.")
        return found

    def _answer(self, choices: dict[str, Choice], draw: dict[str, tuple[int, int]]) -> str | None:
        given = self._row.get("answer")
        if given is None:
            return None
        if draw:
            return self._expression("answer", given, draw)
        if not isinstance(given, str) or given not in choices:
            raise self._wrong("answer", f"{_shown(given)} is none of the choices: {', '.join(choices)}.")
        return given

    def _slips(self, draw: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
        given = self._row.get("slips", [])
        if not isinstance(given, list) or (given and not draw):
            raise self._wrong("slips", f"it is a list, of a question with drawn numbers, not {_shown(given)}.")
        for number, row in enumerate(given, start=1):
            at = f"slips, number {number}"
            row = self._mapping(at, row)
            if set(row) != {"value", "why"}:
                raise self._wrong(at, "it has value and why, and nothing else.")
            yield self._expression(f"{at}, value", row["value"], draw), self._text(f"{at}, why", row["why"])

    def _expression(self, key: str, given: Any, draw: dict[str, tuple[int, int]]) -> str:
        """Arithmetic over the drawn numbers that divides by zero nowhere, and has a value at all ends of their ranges."""
        if isinstance(given, float) or (type(given) is int and given.bit_length() < 64):
            given = repr(given)
        if not isinstance(given, str) or len(given) > 200 or not _is_arithmetic(given, draw):
            told = f"it has to be arithmetic (+ - * / // % **) over {', '.join(draw)}, not {_shown(given)}."
            raise self._wrong(key, told)
        for ends in itertools.product(*draw.values()):
            numbers = dict(zip(draw, ends, strict=True))
            try:
                fine = abs(value(given, numbers)) < 1e300
            except (ArithmeticError, TypeError):  # by zero, too large, a power that is complex
                fine = False
            if not fine:
                raise self._wrong(key, f"it has no value with {_listed(numbers)}.")
        tried = 0
        for divisor in _divisors(given):
            used = {name: range(low, high + 1) for name, (low, high) in draw.items() if name in _names_in(divisor)}
            tried += math.prod(map(len, used.values()))
            if tried > _MAX_DIVISORS:
                raise self._wrong(key, f"{divisor} may be more than {_MAX_DIVISORS:,} numbers. Divide by something smaller.")
            if zero := _zero_of(divisor, used):
                raise self._wrong(key, f"it has no value with {_listed(zero)}: it divides by {divisor}.")
        return given.strip()


def _divisors(expression: str) -> list[str]:
    """What an expression divides by, the innermost first."""
    nodes = [n for n in ast.walk(ast.parse(expression.strip(), mode="eval")) if isinstance(n, ast.BinOp)]
    return [ast.unparse(n.right) for n in reversed(nodes) if isinstance(n.op, (ast.Div, ast.FloorDiv, ast.Mod))]


def _names_in(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}


def _zero_of(divisor: str, used: Mapping[str, range]) -> dict[str, int]:
    """The first numbers with which it is zero, or has no value; {} if there are none."""
    code = compile(divisor, "<divisor>", "eval")
    for values in itertools.product(*used.values()):
        numbers = dict(zip(used, values, strict=True))
        try:
            fine = eval(code, {"__builtins__": {}}, numbers) != 0
        except ArithmeticError:  # a float that became too large
            fine = False
        if not fine:
            return numbers
    return {}


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in numbers.items())


def _shown(given: Any) -> str:
    """A value in a message: short, whatever it is."""
    if given is None or isinstance(given, (bool, float)):
        return repr(given)
    if isinstance(given, int):
        return repr(given) if given.bit_length() < 64 else "a very large number"
    return f"{given[:40]!r}" if isinstance(given, str) else f"a {type(given).__name__}"


def _fields(text: str) -> Iterator[str]:
    """The names in braces; what Python's format would make of anything more is not wanted. Raises ValueError for a brace that
    stands alone."""
    parts = string.Formatter().parse(text)
    yield from (f"{name}{spec and ':' + spec}" + (convert or "") for _, name, spec, convert in parts if name is not None)


_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd)


def _is_arithmetic(text: str, names: Mapping[str, object]) -> bool:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            fine = isinstance(node.value, (int, float)) and not isinstance(node.value, bool) and abs(node.value) < 1e12
        elif isinstance(node, ast.Name):
            fine = node.id in names
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            small, again = node.right, any(isinstance(n, ast.Pow) for n in ast.walk(node.left))  # digits without end
            fine = isinstance(small, ast.Constant) and type(small.value) is int and 0 <= small.value <= 64 and not again
        else:
            fine = isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Load, *_OPERATORS))
        if not fine:
            return False
    return True


# --------------------------------------------------------------------------------------------- without a student's numbers


def may_be_right(asked: Question, given: float) -> bool:
    """Whether a number answers the question for any numbers that it may draw."""
    possible = _possible(asked.answer or "", tuple(asked.draw.items()))
    return not possible or any(math.isclose(given, wanted, rel_tol=2 * _TOLERANCE) for wanted in possible)


@cache
def _possible(expression: str, draw: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[float, ...]:
    """All the answers there are, to 11 binary digits, so that there are some thousand at most; nothing where there are too many
    draws to go through, or where numbers are too large to be divided exactly."""
    import numpy as np

    names = _names_in(expression)
    ranges = sorted((high - low + 1, name, low, high) for name, (low, high) in draw if name in names)
    if not ranges:
        return (value(expression, {}),)
    if math.prod(size for size, *_ in ranges) > _MAX_ANSWERS or not _exact_in_floats(expression, dict(draw)):
        return ()
    alone = next(i for i in range(len(ranges) + 1) if math.prod(size for size, *_ in ranges[i:]) <= _AT_ONCE)
    single, several = ranges[:alone], ranges[alone:]
    axes = [np.arange(low, high + 1, dtype=np.float64) for _, _, low, high in several]
    others = dict(zip((name for _, name, *_ in several), np.meshgrid(*axes, indexing="ij", sparse=True), strict=True))
    found: set[float] = set()
    for first in itertools.product(*(range(low, high + 1) for _, _, low, high in single)):
        numbers = {name: float(n) for (_, name, *_), n in zip(single, first, strict=True)}
        with np.errstate(all="ignore"):
            answers = np.asarray(eval(expression, {"__builtins__": {}}, {**numbers, **others}), dtype=np.float64)
            fraction, power = np.frexp(answers[np.isfinite(answers)])
            found.update(np.unique(np.ldexp(np.round(fraction * 2048) / 2048, power)).tolist())
    return tuple(sorted(found))


def _exact_in_floats(expression: str, draw: dict[str, tuple[int, int]]) -> bool:
    """Whether floats give what Python's integers do: at some hundred draws. A remainder of a number over 2^53 does not."""
    rng = random.Random(expression)
    draws = [*itertools.product(*draw.values()), *(tuple(rng.randint(*ends) for ends in draw.values()) for _ in range(100))]
    for drawn in draws:
        numbers = dict(zip(draw, drawn, strict=True))
        floats: Any = {name: float(n) for name, n in numbers.items()}
        try:
            if not math.isclose(value(expression, numbers), value(expression, floats), rel_tol=1e-9, abs_tol=1e-9):
                return False
        except ArithmeticError:
            return False
    return True
