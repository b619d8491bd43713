"""Is it the student's own? Two questions to the text of an answer: does it take minivllm's answer (then it counts nothing), and
is it the reference, word for word (then somebody should look; short answers are often alike). Students are not compared with
each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache

from checks.authoring.source import Missing, answer_source
from checks.exercises import Row
from checks.sandbox.cell import body_without_docstring, find_function, name_of


def takes_the_answer(source: str, withheld: Mapping[str, set[str]]) -> str | None:
    """The dotted name of minivllm's own answer that a cell imports or names, if it does. `withheld` are functions by file of
    the engine. What a cell reaches in other ways (importlib, super()) is noticed when it runs."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    answers = {f"{_module(file)}.{function}" for file, functions in withheld.items() for function in functions}
    imported = dict(_imported(tree))
    for name in imported.values():
        if name in answers:
            return name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node, imported)) in answers:
            return dotted
    return None


def _module(file: str) -> str:
    return "minivllm." + file.removesuffix(".py").replace("/", ".")


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in the cell, what it stands for), of all its imports of minivllm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "minivllm":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "minivllm":
                    yield (alias.asname, alias.name) if alias.asname else ("minivllm", "minivllm")


def _dotted(node: ast.expr, imported: Mapping[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    start = imported.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([start, *reversed(parts)]) if start else ""


def remark(row: Row) -> str:
    """What the instructor is told of an answer that is the reference."""
    names = " and ".join(name_of(function) for function in row.functions)
    return (
        f"{names}: the same code as this project's reference answer, with the same names; comments, docstrings, type hints and"
        " layout were not compared, nor were other students. It costs no points by itself: short functions are often alike."
    )


def is_the_reference(source: str, row: Row) -> bool:
    """Whether every function asked for is the reference's: the same tree, docstrings and type hints aside."""
    reference = _reference(row)
    return bool(reference) and _shapes(source, row) == reference


@lru_cache(maxsize=256)
def _reference(row: Row) -> tuple[str, ...]:
    try:
        return _shapes(answer_source(row), row)
    except Missing:
        return ()


def _shapes(source: str, row: Row) -> tuple[str, ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = [find_function(tree, name_of(function)) for function in row.functions]
    if any(function is None for function in found):
        return ()
    return tuple(_shape(function) for function in found if function is not None)


def _shape(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    body = ast.Module(body=body_without_docstring(function), type_ignores=[])
    for node in ast.walk(body):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
    return f"{names} {ast.dump(body)}"
