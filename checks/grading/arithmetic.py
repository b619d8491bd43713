"""What an answer like 32 * (-388 % 16) or round(384.2) comes to, without running any code of a student's: numbers, arithmetic,
a few functions of numbers, and names that the cell gives one such value.
"""

from __future__ import annotations

import ast
import contextlib
import math
import operator
from collections.abc import Callable
from typing import Any

from checks.student.calls import bound_once

_MAX_NODES = 200
_MOST = 1e300
_MAX_POWER = 64
_MAX_PLACES = 20  # of round: 10 ** -places is computed
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "float": float,
    "int": int,
    "max": max,
    "min": min,
    "round": round,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
}


class _NoNumber(Exception):
    pass


def number_of(expression: str, cell: str = "") -> float | None:
    """The number, or None for what is not arithmetic, has no value, or would take long."""
    try:
        return _value(ast.parse(expression, mode="eval").body, _known(cell))
    except (_NoNumber, SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


def _known(cell: str) -> dict[str, float]:
    """The names that a cell binds once, at its top, to a number."""
    known: dict[str, float] = {}
    for name, bound in bound_once(cell).items():
        with contextlib.suppress(_NoNumber, ValueError, TypeError, ArithmeticError, RecursionError):
            known[name] = _value(bound, known)
    return known


def _value(node: ast.expr, known: dict[str, float]) -> float:
    if sum(1 for _ in ast.walk(node)) > _MAX_NODES:
        raise _NoNumber
    return _of(node, known)


def _of(node: ast.expr, known: dict[str, float]) -> float:
    found: Any
    if isinstance(node, ast.Constant):
        found = node.value
    elif isinstance(node, ast.Name) and node.id in known:
        found = known[node.id]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        found = _UNARY[type(node.op)](_of(node.operand, known))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _of(node.left, known), _of(node.right, known)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_POWER:
            raise _NoNumber
        found = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and not node.keywords and ast.unparse(node.func) in _FUNCTIONS:
        name, given = ast.unparse(node.func), [_of(argument, known) for argument in node.args]
        if name == "round" and len(given) > 1 and abs(given[1]) > _MAX_PLACES:
            raise _NoNumber
        found = _FUNCTIONS[name](*given)
    else:
        raise _NoNumber
    if type(found) not in (int, float) or not abs(found) < _MOST:  # a text, True, a complex power; too large, NaN
        raise _NoNumber
    return found  # type: ignore[no-any-return]
