"""What a graded child imports instead of this clone: the labs' machine without judges, and, for each exercise, minivllm without
that exercise's answer.

    TREES/machine/checks/...       the sandbox, and the lab_NN_run.py that call the student's code; no judge, no solution
    TREES/4.3/minivllm/...         every .py of the engine; the bodies of the functions that answer 4.3 refuse to run

The rest of the engine is there: one exercise's mistake is not paid for in another. Trees are built once a run and compiled, so
that a child imports them as fast as the real package.
"""

from __future__ import annotations

import ast
import os
import py_compile
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from checks.authoring.source import ROOT, SOLUTIONS, engine_names, read_source
from checks.exercises import Row
from checks.sandbox.cell import body_without_docstring, find_function, first_line, name_of

ENGINE = ROOT / "minivllm"
FORBIDDEN = tuple(str(ROOT / name) for name in ("minivllm", "checks", "solutions", "labs", "tests", "build", ".git"))
_MACHINE = ("__init__.py", "sandbox/*.py", "exercises/__init__.py", "exercises/table.yaml", "exercises/*_run.py")

# Functions of the engine that do what an answer does under another name.
TWINS = {
    "4.4": ("attention/naive.py:naive_write_kv", "attention/cpu.py:_write_kv", "attention/gpu.py:_write_kv"),
    "4.5": ("attention/naive.py:naive_decode", "attention/cpu.py:_paged_decode", "attention/gpu.py:_decode"),
    "8.3": ("attention/gpu.py:_decode",),
}


@dataclass(frozen=True)
class Trees:
    """The trees of one run, in `folder`."""

    folder: Path

    @property
    def machine(self) -> Path:
        return self.folder / "machine"

    def of(self, row: Row) -> Path:
        return self.folder / row.id

    def build(self, rows: list[Row]) -> None:
        """Build what these exercises need, anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for pattern in _MACHINE:
            for path in sorted((ROOT / "checks").glob(pattern)):
                _copy(path, self.machine / "checks" / path.relative_to(ROOT / "checks"))
        _compile(self.machine)
        whole = self.folder / "whole"
        for path in ENGINE.rglob("*.py"):
            _copy(path, whole / "minivllm" / path.relative_to(ENGINE))
        _compile(whole)
        for row in rows:
            shutil.copytree(whole, self.of(row), copy_function=os.link)
            self._take_out(row)
        shutil.rmtree(whole)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take_out(self, row: Row) -> None:
        for name, functions in self.withheld(row).items():
            path = self.of(row) / "minivllm" / name
            text = blanked(path.read_text(encoding="utf-8"), functions, row.id)
            path.unlink()  # it is a link to what the other trees have too
            path.write_text(text, encoding="utf-8")
            _compile_file(path)

    @lru_cache(maxsize=128)  # noqa: B019 (one object a run)
    def withheld(self, row: Row) -> dict[str, set[str]]:
        """Functions by file of the engine: the answer, where the lab takes it from and where it goes, and what has its name."""
        found: dict[str, set[str]] = {}
        for engine_name in _taken_from(row):
            file, function = _split(engine_name)
            found.setdefault(file, set()).add(function)
        for twin in TWINS.get(row.id, ()):
            file, _, function = twin.partition(":")
            found.setdefault(file, set()).add(function)
        for name in map(name_of, row.functions):
            for file in _defined().get(name, ()) if row.file or found else ():
                found.setdefault(file, set()).add(name)
        return found


@lru_cache(maxsize=1)
def _defined() -> dict[str, list[str]]:
    """The engine's files by the functions ("f", "C.f") they define."""
    found: dict[str, list[str]] = {}
    for path in sorted(ENGINE.rglob("*.py")):
        for name in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, []).append(path.relative_to(ENGINE).as_posix())
    return found


def _functions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{n.name}" for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _taken_from(row: Row) -> list[str]:
    """The engine functions that the lab's solution of this exercise is made of."""
    for path in SOLUTIONS.glob(f"{row.lab}_*.py"):
        for cell in read_source(path).cells:
            if cell.exercise == row.id:
                return engine_names(cell.text)
    return []


def _split(engine_name: str) -> tuple[str, str]:
    """ "minivllm.core.block_pool.BlockPool.free" -> ("core/block_pool.py", "BlockPool.free")"""
    parts = engine_name.split(".")[1:]
    cut = next(i for i in range(len(parts), 0, -1) if ENGINE.joinpath(*parts[:i]).with_suffix(".py").is_file())
    return "/".join(parts[:cut]) + ".py", ".".join(parts[cut:])


def blanked(text: str, functions: set[str], exercise: str) -> str:
    """A file's text in which these functions keep their signature and docstring, and refuse to run."""
    tree, lines = ast.parse(text), text.splitlines()
    found = {name: function for name in functions if (function := find_function(tree, name)) is not None}
    for name, function in sorted(found.items(), key=lambda item: -item[1].lineno):
        body = body_without_docstring(function) or function.body
        indent = " " * function.body[0].col_offset
        told = f"{name} (exercise {exercise})"
        refusal = f'{indent}raise __import__("checks.sandbox.withheld", fromlist=["refuse"]).refuse({told!r})'
        lines[first_line(body[0]) - 1 : function.end_lineno] = [refusal]
    return "\n".join(lines) + "\n"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _compile(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        _compile_file(path)


def _compile_file(path: Path) -> None:
    cached = Path(
        py_compile.compile(str(path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH) or ""
    )
    assert cached.is_file()
