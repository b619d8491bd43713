"""Running a stranger's Jinja program: chat templates come with the weights. May not know messages, tokenizers, torch.

Jinja's sandbox keeps a template out of Python. It does not keep it from running for ever or filling the memory, which takes no
loop: `{% set x = x ~ x %}` forty times is 2^40 characters. So a rendering has a budget. Every loop step and every call costs a
step; whatever a template writes, joins, builds or hands to a function costs its size; and the few operations whose result is
larger than what they are given are asked beforehand. What it may call is what `transformers` offers templates:
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and `continue`, and the `generation` tag, which marks
text for training and means nothing here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # loop steps and calls of one rendering together
MAX_SECONDS = 10.0
MAX_RENDERED_CHARS = 20_000_000
MAX_HANDLED_CHARS = 200_000_000  # read and made by one rendering, over all its operations
MAX_REPEAT = 1_000_000  # longest string or list a template may make by multiplication
MAX_WIDTH = 1_000  # to which a text may be padded or indented
MAX_INTEGER_BITS = 4_096

_WIDTHS = ("center", "ljust", "rjust", "zfill", "indent")
_WRITING_FILTERS = ("string", "tojson", "unique", "sort", "groupby")  # they go into what they are given
_LOOKING_FILTERS = ("length", "count", "first", "last", "default", "d")  # they do not even go through it
_CONTAINERS = (Mapping, list, tuple, set)
_PER_OBJECT = 64  # what an element of a list costs, in characters: about its bytes
_REFUSED_METHODS = ("expandtabs", "translate", "format_map", "encode", "to_bytes")  # bytes would be a second world to guard
_REFUSED_FILTERS = ("batch", "slice", "center", "pprint", "urlize", "wordwrap", "xmlattr", "filesizeformat")


def run_template(source: str, variables: Mapping[str, Any]) -> str:
    """What the template writes. Raises whatever a stranger's program may raise, and SecurityError where it runs away."""
    token = _budget.set(_Budget())
    try:
        return _bounded_join(_compile(source).generate(dict(variables)))
    finally:
        _budget.reset(token)


# ---------------------------------------------------------------- the budget


class _Budget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self.steps, self.chars = MAX_STEPS, MAX_HANDLED_CHARS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError(f"it took {MAX_STEPS:,} steps without coming to an end.")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it ran for {MAX_SECONDS:g} seconds without coming to an end.")

    def handle(self, *values: Any) -> None:
        """Pay for values that are read or were made, lists as they are: what is in them is not touched."""
        self._pay(sum(len(v) if isinstance(v, str) else 8 * len(v) if isinstance(v, _CONTAINERS) else 1 for v in values))

    def write_out(self, *values: Any) -> None:
        """Pay for values that become text or part of a list: for all that is in them, as often as it would be written."""
        self._pay(_weight(values, self.chars))

    def _pay(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise SecurityError(f"it handled more than {MAX_HANDLED_CHARS:,} characters.")


_budget: ContextVar[_Budget] = ContextVar("_budget")  # out of the template's reach, one for each rendering


def _weight(values: Iterable[Any], limit: int) -> int:
    """Characters of the values, written out, and the objects they are made of. Stops at `limit`."""
    total, stack = 0, list(values)
    while stack and total <= limit:
        value = stack.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, _CONTAINERS):
            total += _PER_OBJECT * len(value)
            if total <= limit:
                stack += value.values() if isinstance(value, Mapping) else value
        else:
            total += 1
    return total


@jinja2.pass_context  # which also keeps Jinja from evaluating it at compile time
def _spend_steps(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.get().spend(1)
        yield item


@jinja2.pass_context
def _handled(context: Any, value: Any) -> Any:
    _budget.get().write_out(value)
    return value


@jinja2.pass_context
def _concatenated(context: Any, values: list[Any]) -> str:
    _budget.get().write_out(values)
    return "".join(map(str, values))


class _PayForAll(NodeTransformer):
    """Rewrites a template so that it pays: for steps of loops, for what it writes (into variables and macros too), for `~`, and
    for the lists it builds. (`[x, x]` of a list of such lists of ... is few objects, and endless to write or compare.)"""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("spend_steps", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_through("handled", child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _through("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _through("handled", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _through("handled", node) if node.ctx == "load" else node


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded_join(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise SecurityError(f"it wrote more than {MAX_RENDERED_CHARS:,} characters.")
    return "".join(parts)


# ---------------------------------------------------------------- the environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` is its body."""

    tags = {"generation"}  # noqa: RUF012 (how Jinja declares it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace(), without names that reach into Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _Namespace._check(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets {name!r}: names in a namespace may not start with an underscore.")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers configures it for chat templates, with our bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        self.filters = {name: _paid(name, function) for name, function in self.filters.items()}
        self.filters |= {"spend_steps": _spend_steps, "handled": _handled, "concatenated": _concatenated}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"namespace": _Namespace, "range": _spending_range}

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        _budget.get().spend(1)
        subject = getattr(getattr(called, "__wrapped__", called), "__self__", None)  # Jinja wraps str.format
        if subject is not None and called.__name__ == "join" and args:
            args = (list(args[0]), *args[1:])  # a generator could not be weighed
        if isinstance(subject, (str, list, tuple, dict, int)):
            _check_operation(called.__name__, subject, args, kwargs)
        _budget.get().handle(subject, *args, *kwargs.values())
        result = super().call(context, called, *args, **kwargs)
        _budget.get().handle(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 10_000 and abs(right) <= 100):
            raise SecurityError(f"it computes {left!r:.20} ** {right!r:.20}.")
        if operator == "%" and isinstance(left, str):
            _check_format(left, "%", right)
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
            raise SecurityError(f"it computes with integers of more than {MAX_INTEGER_BITS} bits.")
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, (str, list, tuple)) and isinstance(other, int):
                if len(one) * other > MAX_REPEAT:
                    raise SecurityError(
                        f"it repeats a text or list to {len(one) * other:,} items; the limit is {MAX_REPEAT:,}."
                    )
                _budget.get().write_out(one if isinstance(one, str) else [*one] * other)
        _budget.get().handle(left, right)
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _Sandbox()
    return environment.from_string(_PayForAll().visit(environment.parse(source)))


# ---------------------------------------------------------------- what makes more than it is given


def _check_operation(name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a method or filter is called: refuse one whose result would be far larger than what it is given."""
    if name in _REFUSED_METHODS:
        raise SecurityError(f"it calls {name}(), which chat templates are not given.")
    values = (*args, *kwargs.values())
    numbers = [value for value in values if isinstance(value, int)]
    widths = [
        *numbers,
        *(len(value) for value in values if isinstance(value, str)),
    ]  # a text to indent with is as wide as it is
    if name in _WIDTHS and any(width > MAX_WIDTH for width in widths):
        raise SecurityError(f"it widens a text to {max(widths)} characters with {name}(); the limit is {MAX_WIDTH}.")
    if name == "round" and any(abs(number) > 100 for number in numbers):
        raise SecurityError("it rounds to more than 100 digits.")
    if name == "format" and isinstance(subject, str):
        _check_format(subject, "%", *values)
        _check_format(subject, "{", *values)
    if name == "indent" and isinstance(subject, str):
        _budget.get().handle("\n" * subject.count("\n") * max([4, *widths]))
    if name == "replace" and isinstance(subject, str):
        old, new = (str(given) for given in (*args, kwargs.get("old", ""), kwargs.get("new", ""))[:2])
        if "new" in kwargs:
            new = str(kwargs["new"])
        if subject.count(old) * len(new) > MAX_RENDERED_CHARS:
            raise SecurityError(f"it replaces a text by more than {MAX_RENDERED_CHARS:,} characters.")
    if name == "join" and isinstance(subject, str) and args and isinstance(args[0], (list, tuple)):
        _budget.get().write_out(args[0], [subject] * len(args[0]))
    if name == "sum" and any(not isinstance(value, (int, float, str)) for value in (*args[1:], *kwargs.values())):
        raise SecurityError("it sums up what is no numbers.")


def _check_format(text: str, opening: str, *values: Any) -> None:
    """A format writes each value once for each place, and no wider than MAX_WIDTH: `%*d` and `{:{w}}` take the width from a
    value."""
    widths = {"%": r"%[^a-zA-Z%]*(\*|\d{4})", "{": r"\{[^{}]*:[^{}]*(\{|\d{4})"}
    if re.search(widths[opening], text):
        raise SecurityError("it formats a value to a width of thousands, or of its own making.")
    _budget.get().write_out(list(values) * text.count(opening))


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it reads and makes. (Its first arguments may be Jinja's own, which weigh nothing.)"""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget, given = _budget.get(), list(args[skip:])
        budget.spend(1)
        if name == "join" and given and isinstance(given[0], Iterable) and not isinstance(given[0], str):
            given[0] = list(given[0])  # a generator can be weighed no other way
            budget.write_out(given[0], [v for v in (*given[1:], *kwargs.values()) if isinstance(v, str)] * len(given[0]))
        if given:
            _check_operation(name, given[0], tuple(given[1:]), kwargs)
        if name in _WRITING_FILTERS:
            budget.write_out(*given)
        elif name not in _LOOKING_FILTERS:
            budget.handle(*given, *kwargs.values())
        result = function(*args[:skip], *given, **kwargs)
        budget.handle(result)
        return result

    return paid


def _spending_range(*args: int) -> range:
    numbers = safe_range(*args)
    _budget.get().spend(len(numbers))
    return numbers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    for given in (indent, *(separators or ())):
        if (isinstance(given, int) and given > 100) or (isinstance(given, str) and len(given) > 100):
            raise SecurityError(f"it indents or parts JSON by {given!r:.20}.")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
