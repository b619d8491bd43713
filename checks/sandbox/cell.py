"""What can be read from an exercise cell without running it. Pure `ast`; shared by the check, the builder and the child."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
VERBS = ("check", "hint", "skip", "solution", "reset", "predict", "quiz", "progress", "use", "start")


def own_statements(tree: ast.Module) -> list[ast.stmt]:
    """The cell's top-level statements without `from checks import ...` and without calls of what that brings
    (`check("2.1")`)."""

    def is_ours(node: ast.stmt) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module == "checks"
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            return called.value.id == "checks"
        return isinstance(called, ast.Name) and called.id in VERBS

    return [node for node in tree.body if not is_ours(node)]


def own_source(source: str) -> str:
    """The text of `own_statements`, comments between them included."""
    tree = ast.parse(source)
    kept = {id(node) for node in own_statements(tree)}
    lines = source.splitlines()
    for node in tree.body:
        if id(node) not in kept:
            lines[first_line(node) - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - first_line(node) + 1)
    return "\n".join(lines).strip() + "\n"


def first_line(node: ast.stmt) -> int:
    """Where a statement begins, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(int(d.lineno) for d in decorators)])


def name_of(signature: str) -> str:
    """ "BlockPool.free(blocks)" -> "BlockPool.free" """
    return signature.partition("(")[0].strip()


def find_function(tree: ast.Module, name: str) -> Function | None:
    """The definition of a function ("f") or a method ("C.f") at the top of a module; of several, the last."""
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for wanted in classes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == wanted]
        if not found:
            return None
        body = found[-1].body
    functions = [node for node in body if isinstance(node, Function) and node.name == function]
    return functions[-1] if functions else None


def parsed(text: str) -> ast.Module | None:
    """A cell's text as a tree; None where Python cannot read it: no Python, a null byte, ten thousand brackets."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def body_without_docstring(function: Function) -> list[ast.stmt]:
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return function.body[1:] if is_docstring else function.body


def is_stub(function: Function) -> bool:
    """Whether nothing has been written: the body is `raise NotImplementedError(...)`, `pass`, `...`, or only a docstring."""

    def is_nothing(node: ast.stmt) -> bool:
        if isinstance(node, ast.Pass):
            return True
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Constant) and node.value.value is ...
        raised = node.exc if isinstance(node, ast.Raise) else None
        raised = raised.func if isinstance(raised, ast.Call) else raised
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"

    return all(is_nothing(node) for node in body_without_docstring(function))


def parse_parameters(signature: str) -> ast.arguments | None:
    """The parameters of "name(a, b, *, c)"; None if they are only hinted at ("name(...)")."""
    try:
        node = ast.parse(f"def f({signature.partition('(')[2]}: pass").body[0]
    except SyntaxError:
        return None
    assert isinstance(node, ast.FunctionDef)
    return node.args


def bound_names(node: ast.stmt) -> Iterator[str]:
    """The names a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    else:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def remember_text(filename: str, text: str) -> None:
    """Let a text that is compiled under a name that is no file be found by that name: @triton.jit reads a function's source."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
