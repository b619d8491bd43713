"""Reads a lab's source: cells in jupytext's percent format, and the places where an answer stands.

    # %% [markdown] id="big-idea"            every cell has an id of its own; it stays when the cell moves
    # %% id="exercise-2-3"                   points=2 behind it: what it counts (else checks/grading/worth.py's rule)
    def apply_top_p(logits, p):
        \"\"\"What the student reads.\"\"\"
        # solution: minivllm.sampling.logits.apply_top_p      the engine's body of that function is the answer
    def greedy_generate(...):
        # BEGIN SOLUTION                                      an answer that is no engine code stands here
        ...
        # END SOLUTION

In the lab each answer becomes `raise NotImplementedError("Exercise 2.3: apply_top_p")`.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from checks.exercises import Row
from checks.sandbox.cell import Function, body_without_docstring, find_function, own_source

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS, LABS = ROOT / "solutions", ROOT / "labs"

HEADER = ("lab", "title", "version", "gpu", "time", "download", "prerequisites", "required")
_ID = re.compile(r"^[a-zA-Z0-9-_]{1,64}$")
_MARKER = re.compile(r"^# %%(?: \[(?P<kind>\w+)\])?(?P<options>.*)$")
_OPTION = re.compile(r'(\w+)=("[^"]*"|\[[^\]]*\]|\d+(?:\.\d+)?(?!\S))')
_FROM_ENGINE = re.compile(r"^(?P<indent>\s*)# solution: (?P<name>[\w.]+)\s*$")
_BEGIN = re.compile(r"^(?P<indent>\s*)# BEGIN SOLUTION\s*$")
_END = re.compile(r"^\s*# END SOLUTION\s*$")
_CHECK = re.compile(r"""^check\(["'](?P<id>[\d.]+)["']\)\s*$""")


class Missing(LookupError):
    """The source of a lab is not here (an instructor may hand out labs without solutions)."""


class SourceError(ValueError):
    """A lab's source is not well formed. Names the file and the place."""


@dataclass
class Cell:
    kind: str  # "code" or "markdown"
    id: str
    text: str
    line: int
    tags: list[str] = field(default_factory=list)
    points: float | None = None  # what the exercise or question counts, where the source says so

    @property
    def exercise(self) -> str | None:
        """The exercise this cell is, if its last line is check("...")."""
        match = _CHECK.match(self.text.rstrip().rpartition("\n")[2]) if self.kind == "code" else None
        return match["id"] if match else None


@dataclass
class Source:
    path: Path
    header: dict[str, Any]
    cells: list[Cell]

    @property
    def lab(self) -> str:
        return str(self.header["lab"])

    @property
    def name(self) -> str:
        return self.path.stem


def sources() -> list[Path]:
    return sorted(SOLUTIONS.glob("[0-9][0-9]_*.py"))


def read_source(path: Path) -> Source:
    """Raises SourceError naming the line, for a cell without an id or options that cannot be read."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header, start = _read_header(path, lines)
    cells: list[Cell] = []
    for number, line in enumerate(lines[start:], start=start + 1):
        marker = _MARKER.match(line)
        if marker:
            options = {key: json.loads(value) for key, value in _OPTION.findall(marker["options"])}
            if "id" not in options:
                raise SourceError(f'{path.name}:{number}: a cell without an id. Write # %% id="what-it-is".')
            kind = marker["kind"] or "code"
            cells.append(Cell(kind, options["id"], "", number, options.get("tags", []), options.get("points")))
        elif cells:
            cells[-1].text += (_uncomment(path, number, line) if cells[-1].kind == "markdown" else line) + "\n"
        elif line.strip():
            raise SourceError(f"{path.name}:{number}: text before the first cell")
    for cell in cells:
        cell.text = cell.text.strip("\n")
        if not _ID.match(cell.id):
            raise SourceError(f"{path.name}:{cell.line}: {cell.id!r} is no cell id (letters, digits, - and _, at most 64)")
        if sum(other.id == cell.id for other in cells) > 1:
            raise SourceError(f"{path.name}:{cell.line}: the cell id {cell.id!r} is used twice")
    return Source(path, header, cells)


def _read_header(path: Path, lines: list[str]) -> tuple[dict[str, Any], int]:
    if not lines or lines[0] != "# ---" or "# ---" not in lines[1:]:
        raise SourceError(f"{path.name}:1: a source starts with a YAML header between two lines `# ---`")
    end = lines.index("# ---", 1)
    header = yaml.safe_load("\n".join(line.removeprefix("# ").removeprefix("#") for line in lines[1:end]))
    try:
        found = dict(header["jupyter"]["minivllm"])
    except (KeyError, TypeError):
        raise SourceError(f"{path.name}:1: the header lacks jupyter: minivllm: ({', '.join(HEADER)})") from None
    missing = [key for key in HEADER if key not in found]
    if missing:
        raise SourceError(f"{path.name}:1: the header lacks {', '.join(missing)}")
    return found, end + 1


def _uncomment(path: Path, number: int, line: str) -> str:
    if line and not line.startswith("#"):
        raise SourceError(f"{path.name}:{number}: a line of a markdown cell that is not a comment")
    return line[2:] if line.startswith("# ") else line[1:]


# ------------------------------------------------------------------------------------------------------------ answers


def with_answers(text: str, where: str = "cell") -> str:
    """A code cell as it stands in the solution notebook."""
    return "\n".join(_filled(text, where, answers=True))


def with_stubs(text: str, exercise: str, where: str = "cell") -> str:
    """A code cell as the student gets it. Raises SourceError for unbalanced markers."""
    return "\n".join(_filled(text, where, answers=False, exercise=exercise))


def _filled(text: str, where: str, answers: bool, exercise: str = "") -> list[str]:
    out: list[str] = []
    function, inside = "", False
    for line in text.splitlines():
        if found := re.match(r"\s*(?:async )?def (\w+)", line):
            function = found[1]
        stub = f'raise NotImplementedError("Exercise {exercise}: {function}")'
        if engine := _FROM_ENGINE.match(line):
            body = engine_body(engine["name"]) if answers else stub
            out += textwrap.indent(body, engine["indent"]).splitlines()
        elif begin := _BEGIN.match(line):
            if inside:
                raise SourceError(f"{where}: BEGIN SOLUTION inside a solution")
            inside = True
            if not answers:
                out.append(begin["indent"] + stub)
        elif _END.match(line):
            if not inside:
                raise SourceError(f"{where}: END SOLUTION without BEGIN SOLUTION")
            inside = False
        elif answers or not inside:
            out.append(line)
    if inside:
        raise SourceError(f"{where}: BEGIN SOLUTION without END SOLUTION")
    return out


@cache
def engine_body(name: str) -> str:
    """The body, without docstring and unindented, of a function of the engine: "minivllm.sampling.logits.apply_top_k"."""
    function, lines = _engine_function(name)
    first = body_without_docstring(function)[0].lineno
    before = function.body[0].end_lineno or 0 if function.body[0].lineno < first else function.lineno
    while first - 1 > before and lines[first - 2].strip().startswith("#"):  # comments in front of the first statement
        first -= 1
    return textwrap.dedent("\n".join(lines[first - 1 : function.end_lineno]))


def engine_parameters(name: str) -> list[str]:
    return [a.arg for a in _engine_function(name)[0].args.args]


def _engine_function(name: str) -> tuple[Function, list[str]]:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        path = ROOT.joinpath(*parts[:cut]).with_suffix(".py")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            function = find_function(ast.parse(text), ".".join(parts[cut:]))
            if function is not None:
                return function, text.splitlines()
    raise SourceError(f"# solution: {name} names no function of the engine")


def engine_names(text: str) -> list[str]:
    """The engine functions a cell takes its answers from."""
    return [found["name"] for line in text.splitlines() if (found := _FROM_ENGINE.match(line))]


def answer_source(row: Row) -> str:
    """The reference answer to an exercise, as a cell without its check. Raises Missing if the lab's source is not here."""
    for path in SOLUTIONS.glob(f"{row.lab}_*.py"):
        for cell in read_source(path).cells:
            if cell.exercise == row.id:
                return own_source(with_answers(cell.text))
    raise Missing(f"The answer to exercise {row.id} is in solutions/, which is not part of what you were given.")
