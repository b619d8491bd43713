"""Small wrong turns in an answer: a comparison flipped, a number off by one, a statement dropped, two arguments swapped.

Works on the syntax tree of an exercise's own functions. A mutant is named by its exercise, the statement it stands in, and that
statement afterwards, so that a name stays true while other lines change.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from checks.exercises import Row
from checks.sandbox.cell import Function, body_without_docstring, find_function, name_of

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    exercise: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.exercise}: {self.before}  =>  {self.after}"


def mutants(row: Row, source: str) -> Iterator[Mutant]:
    """All mutants of an answer, in the order of its lines. Of two that come out the same, one."""
    original = ast.parse(source)
    for function in row.functions:
        target = find_function(original, name_of(function))
        assert target is not None, function
        seen = {ast.dump(target)}
        for statement in _statements(body_without_docstring(target)):
            for change in _changes(statement):
                tree = copy.deepcopy(original)
                there = find_function(tree, name_of(function))
                assert there is not None
                after = change(_twin(there, statement))
                if ast.dump(there) in seen:
                    continue
                seen.add(ast.dump(there))
                text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
                yield Mutant(row.id, _line(statement), after, text)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, part, []))


def _line(statement: ast.AST) -> str:
    """The statement's own line: of a compound one, its head."""
    return ast.unparse(statement).splitlines()[0]


def _twin(function: Function, node: ast.AST) -> tuple[list[ast.stmt], int]:
    """Where the copy of a statement stands: the list it is in, and its place there."""

    def find(body: list[ast.stmt]) -> tuple[list[ast.stmt], int] | None:
        for index, statement in enumerate(body):
            if (statement.lineno, statement.col_offset) == (node.lineno, node.col_offset):  # type: ignore[attr-defined]
                return body, index
            for part in ("body", "orelse", "finalbody"):
                if inner := find(getattr(statement, part, [])):
                    return inner
        return None

    found = find(function.body)
    assert found is not None
    return found


Change = Callable[[tuple[list[ast.stmt], int]], str]
Edit = Callable[[Any], None]


def _changes(statement: ast.stmt) -> Iterator[Change]:
    """What can be done to a statement, each to be applied to its twin in a copy of the tree. Returns the line it became."""

    def drop(place: tuple[list[ast.stmt], int]) -> str:
        body, index = place
        body[index] = ast.copy_location(ast.Pass(), body[index])
        return "(dropped)"

    def edited(number: int, edit: Edit) -> Change:
        def change(place: tuple[list[ast.stmt], int]) -> str:
            twin = place[0][place[1]]
            edit(_own_nodes(twin)[number])  # the same number in both trees
            return _line(ast.fix_missing_locations(twin))

        return change

    yield drop
    for number, node in enumerate(_own_nodes(statement)):
        for edit in _edits(node):
            yield edited(number, edit)


def _own_nodes(statement: ast.stmt) -> list[ast.AST]:
    """The statement and the nodes of its own line; not those of the statements inside it."""
    fields = [value for name, value in ast.iter_fields(statement) if name not in ("body", "orelse", "finalbody")]
    heads = [node for value in fields for node in (value if isinstance(value, list) else [value]) if isinstance(node, ast.AST)]
    return [statement, *(node for head in heads for node in ast.walk(head))]


def _edits(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPPED:
        yield lambda n: n.ops.__setitem__(0, _FLIPPED[type(n.ops[0])]())
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _OTHER_OPERATOR:
        yield lambda n: setattr(n, "op", _OTHER_OPERATOR[type(n.op)]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda n: setattr(n, "value", n.value + 1)
        yield lambda n: setattr(n, "value", n.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    if isinstance(node, ast.BoolOp):
        yield lambda n: setattr(n, "op", ast.Or() if isinstance(n.op, ast.And) else ast.And())
    if isinstance(node, ast.Call) and not any(isinstance(a, ast.Starred) for a in node.args):
        for first in range(len(node.args) - 1):
            yield lambda n, i=first: n.args.__setitem__(slice(i, i + 2), n.args[i : i + 2][::-1])  # type: ignore[misc]
