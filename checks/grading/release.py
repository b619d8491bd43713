"""python -m checks release --labs 00-07 --out DIR: the folder a student is given.

In it is what the labs and their checks need, and nothing else: the notebooks, `checks` without what is for instructors, and all
of `minivllm`, since what a student has not written yet is minivllm's. That is why the answers that are engine code can be read
there, by who looks for them, and in the checks the answers to the questions; answers that are no engine code (solutions/) are
not in it, unless --with-answers says so.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (nbformat has no type annotations)

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from checks.authoring.build import build
from checks.authoring.source import ROOT, SOLUTIONS, Source, SourceError, engine_names, read_source, sources
from checks.exercises import table
from checks.grading.tables import number
from checks.grading.worth import worth_of

ERRATA = SOLUTIONS / "errata.yaml"
INSTRUCTORS = ("checks.grading", "checks.authoring.build", "checks.authoring.validate", "checks.nbval_plugin")
FILES = ("pyproject.toml", "environment.yml", "LICENSE", "labs/GLOSSARY.md", "labs/AGENTS.md")
_RESULT = "release.json"
_BEHIND_TABLE = "\n## How an exercise works\n"  # in labs/README.md


@dataclass(frozen=True)
class Erratum:
    """What version `version` of a lab corrects. `exercises` are those whose answers may change by it."""

    lab: str
    version: int
    what: str
    exercises: tuple[str, ...]


def parse_labs(text: str | None) -> list[Source]:
    """ "00-07", "04,05", "4": the sources of these labs, all if there is no text. Raises ValueError naming what there is."""
    there = {path.stem[:2]: path for path in sources()}
    wanted: list[str] = []
    for part in (text or ",".join(there)).split(","):
        found = re.fullmatch(r"\s*(\d\d?)(?:\s*-\s*(\d\d?))?\s*", part)
        if not found:
            raise ValueError(f"--labs takes numbers, as in 00-07 or 04,05, not {text!r}")
        wanted += [f"{lab:02}" for lab in range(int(found[1]), int(found[2] or found[1]) + 1)]
    if missing := [lab for lab in wanted if lab not in there] or ([] if wanted else [text or ""]):
        raise ValueError(f"There is no Lab {', '.join(missing)} in {SOLUTIONS.name}/. There are: {', '.join(there)}.")
    return [read_source(there[lab]) for lab in dict.fromkeys(wanted)]


def release(labs: list[Source], out: Path, *, with_answers: bool = False) -> None:
    """Write the student folder. Raises ValueError if `out` is not empty, or a lab's version has no erratum that explains it."""
    refuse_full(out)
    errata = errata_of(labs)
    for source in labs:
        notebook = build(source)[1]
        _write(out / "labs" / f"{source.name}.ipynb", nbformat.writes(notebook) + "\n")
        if with_answers:
            _copy(source.path, out)
    names = [source.lab for source in labs]
    for path in [*_files(names), *_engine()]:
        _copy(path, out)
    _write(out / "labs" / "README.md", _labs_readme(labs))
    for name, text in (("README.md", readme(labs, errata)), ("Makefile", MAKEFILE), (".gitignore", IGNORED)):
        _write(out / name, text)
    _write(out / _RESULT, json.dumps(manifest(labs, errata), indent=1) + "\n")


def refuse_full(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder. Choose a new one: nothing is deleted here.")


def manifest(labs: list[Source], errata: list[Erratum]) -> dict[str, Any]:
    """release.json: versions and points, for programs."""
    return {
        source.lab: {
            "title": source.header["title"],
            "version": str(source.header["version"]),
            "points": worth_of(source),
            "errata": [
                {"version": e.version, "what": e.what, "exercises": list(e.exercises)} for e in errata if e.lab == source.lab
            ],
        }
        for source in labs
    }


def errata_of(labs: list[Source]) -> list[Erratum]:
    """What later versions of these labs corrected, newest first. Raises SourceError where a lab's version and the errata
    disagree: every version after the first says what it corrects."""
    rows = yaml.safe_load(ERRATA.read_text(encoding="utf-8")) if ERRATA.is_file() else []
    errata = [Erratum(str(r["lab"]), int(r["version"]), r["what"].strip(), tuple(r.get("exercises", ()))) for r in rows or []]
    for source in labs:
        told = {e.version for e in errata if e.lab == source.lab}
        version = int(source.header["version"])
        if told != set(range(2, version + 1)):
            raise SourceError(
                f"{source.path.name} is version {version}, and {ERRATA.name} explains {sorted(told) or 'none'} of it."
                f" Each version from 2 to {version} needs an entry, and no other."
            )
    chosen = {source.lab for source in labs}
    return sorted((e for e in errata if e.lab in chosen), key=lambda e: (e.lab, -e.version))


# ------------------------------------------------------------------------------------------------------- which files


def _files(labs: list[str]) -> Iterator[Path]:
    """Everything of `checks` that runs beside a student, and the files that go along."""
    yield from (path for name in FILES if (path := ROOT / name).is_file())
    yield from sorted((ROOT / "labs" / "reference_results").glob("*.json"))
    yield from _modules(labs)
    yield ROOT / "checks" / "exercises" / "table.yaml"
    yield from sorted(path for lab in [*labs, "selftest"] if (path := ROOT / "checks" / "quizzes" / f"{lab}.yaml").is_file())


def _modules(labs: Iterable[str]) -> list[Path]:
    """The modules of `checks` that students' commands and the checks of these labs need, and what those import."""
    folder = ROOT / "checks"
    todo = [*folder.glob("*.py"), *(folder / "student").glob("*.py"), *(folder / "sandbox").glob("*.py")]
    todo += [path for lab in labs for path in (folder / "exercises").glob(f"lab_{lab}*.py")]
    todo.append(folder / "exercises" / "evaluate.py")
    todo = [path for path in todo if not _dotted(path).startswith(INSTRUCTORS)]
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += [path.parent / "__init__.py", *_imports(path)]
    return sorted(found)


def _imports(path: Path) -> Iterator[Path]:
    """The files of the modules of `checks` that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("checks.") and not name.startswith(INSTRUCTORS):
                file = ROOT / (name.replace(".", "/") + ".py")
                if file.is_file():
                    yield file


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _engine() -> Iterator[Path]:
    for path in sorted((ROOT / "minivllm").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc" and not path.name.startswith("."):
            yield path


def _copy(path: Path, out: Path) -> None:
    target = out / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


# ---------------------------------------------------------------------------------------------------------- its texts


def _labs_readme(labs: list[Source]) -> str:
    """labs/README.md, with links to the labs that are handed out alone."""
    files = {f"{source.name}.ipynb" for source in labs}
    text = (ROOT / "labs" / "README.md").read_text(encoding="utf-8")
    linked = re.sub(r"\[([^\]]+)\]\((\d\d_\w+\.ipynb)\)", lambda m: m[0] if m[2] in files else m[1], text)
    later = "" if linked == text else "\nLabs without a link come later.\n"
    return linked.replace(_BEHIND_TABLE, later + _BEHIND_TABLE, 1)


def readme(labs: list[Source], errata: list[Erratum]) -> str:
    """The folder's README: how to start, what each lab counts, what was corrected."""
    rows = []
    for source in labs:
        points = worth_of(source)
        each = ", ".join(f"{item}: {number(most)}" for item, most in points.items())
        rows.append(
            f"| [{source.lab} {source.header['title']}](labs/{source.name}.ipynb) | {source.header['version']} |"
            f" {number(sum(points.values()))} | {each} |"
        )
    told = [f"- Lab {e.lab}, version {e.version}{_concerns(e)}: {e.what}" for e in errata]
    return README.format(table="\n".join(rows), errata="\n".join(told) if told else "None so far.")


def _concerns(erratum: Erratum) -> str:
    return f" (exercise{'s' if len(erratum.exercises) > 1 else ''} {', '.join(erratum.exercises)})" if erratum.exercises else ""


README = """\
# Build an LLM inference engine

Jupyter notebooks in which you write one, step by step; each step is checked at once, on your own machine. Everything works
on a laptop without a GPU. You need Python 3.10 to 3.13, and 98 MB are fetched once.

```
make lab        # sets up an environment, fetches the model, opens JupyterLab in labs/
```

Without `make`, in this folder:

```
python3 checks/install.py --extras labs,serve
.venv/bin/python -m minivllm fetch smollm2-135m         (on Windows .venv\\Scripts\\python; WSL is faster)
.venv/bin/python -m jupyterlab labs
```

What is missing or slow, and what to do about it, says `.venv/bin/python -m checks doctor`. [labs/README.md](labs/README.md)
has everything else: hints, where your work is, how to bring it along.

## What counts

| lab | version | points | exercises, and questions (q) |
|---|---|---|---|
{table}

Half of an exercise's points are for the cases its check shows you, half for other and larger inputs of the same kind. A
question with choices counts when it is answered, right or wrong; one with numbers of your own when it is right. Hints,
predictions and the number of tries cost nothing. An exercise of 0 points is optional. Hand in the notebooks as they are;
their names do not matter.

## Errata

{errata}

A newer version of these labs takes over what you wrote: unpack it beside this folder, and run here
`.venv/bin/python -m checks update --from ../the-new-folder`.
"""

MAKEFILE = """\
# Any Python 3.10-3.13 with pip will do:  make lab PYTHON=python3.12
PYTHON ?= python3
VENV   ?= .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif

.PHONY: lab doctor
lab: $(VENV)/.labs
	$(BIN)/python -m minivllm fetch smollm2-135m
	cd labs && ../$(BIN)/python -m jupyterlab

doctor: $(VENV)/.labs
	$(BIN)/python -m checks doctor

$(VENV)/.labs: pyproject.toml checks/install.py
	$(PYTHON) checks/install.py --venv $(VENV) --extras labs,serve
	@touch $@
"""

IGNORED = """\
.venv/
__pycache__/
*.egg-info/
.ipynb_checkpoints/
labs/my_engine/
labs/results/
labs/.progress/
minivllm-work.zip
"""


def main(labs: str | None, out: str, *, nbgrader: bool, with_answers: bool) -> int:
    """`python -m checks release`. Returns the exit status."""
    try:
        chosen = parse_labs(labs)
        if nbgrader:
            from checks.grading.nbgrader_export import export

            export(chosen, Path(out))
        else:
            release(chosen, Path(out), with_answers=with_answers)
    except ValueError as error:
        print(error)
        return 1
    what = "an nbgrader course" if nbgrader else "the student folder"
    print(f"Wrote {what} with Lab{'s' if len(chosen) > 1 else ''} {', '.join(s.lab for s in chosen)} to {out}.")
    if not nbgrader and not with_answers:
        print(_answers_in_it(chosen))
    return 0


def _answers_in_it(labs: list[Source]) -> str:
    """Which answers can be read in the student folder, and which cannot."""
    absent = [
        cell.exercise
        for source in labs
        for cell in source.cells
        if cell.exercise and not engine_names(cell.text) and table()[cell.exercise].file is None
    ]
    told = (
        "Who looks for answers finds in it: those that are engine code, in minivllm/, which the labs run on; those to the"
        " questions, in checks/quizzes/; and in checks/exercises/ hints, the last nearly code, and what results are compared"
        " with."
    )
    return told + (f" Not in it are the answers to {', '.join(absent)}." if absent else "")
