"""One file of my_engine/ as text: minivllm's file with the student's functions in the places of its own.

A function takes the place of the function of its name; a method likewise, and the helper methods of its class come along. A
class that says what it can do (`capabilities = ...`) is a *stage*: an earlier, simpler form of the engine's class, complete in
itself (Lab 04's pool knows no hashes). Of a stage every member is taken, that attribute too, so that what runs is what was
checked; only an `__init__` with other parameters than the engine's stays behind. Once a later lab's answer for the same class
has passed, the stage has done its work and is left out.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checks.exercises import Row
from checks.sandbox.cell import Function, bound_names, find_function, first_line, name_of

MARK = "# my_engine: "
Member = Function | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Answer:
    """A passed exercise and the text of its cell."""

    row: Row
    source: str

    @property
    def functions(self) -> list[str]:
        return [name_of(f) for f in self.row.functions]

    @property
    def classes(self) -> set[str]:
        return {name.partition(".")[0] for name in self.functions if "." in name}


def assemble(reference: str, answers: Sequence[Answer]) -> str:
    """The reference file's text with the answers in it, the one that counts most last.

    What else an answer's cell defines (imports, constants, helpers) goes in front of its first function. Where such a name
    means something else in the file already, it is renamed in the answer. Raises ValueError for an answer that cannot be moved.
    """
    used = in_force(answers)
    text = reference
    for answer in used:
        text = _put(text, answer)
    try:
        compile(text, "my_engine", "exec")
    except SyntaxError as error:  # a notebook's cell may await at its top level, a file may not
        raise ValueError(
            f"a file cannot hold what this cell holds ({error.msg}). A line that awaits outside of a function goes elsewhere."
        ) from None
    ids = sorted(answer.row.id for answer in used)
    exercises = f"exercise{'s' if len(ids) > 1 else ''} {', '.join(ids)}"
    return (
        f"{MARK}minivllm's file with your answers to {exercises} in it. Written by check(); edit the notebook instead.\n{text}"
    )


def in_force(answers: Sequence[Answer]) -> list[Answer]:
    """The answers that are used, the one that counts most last: not the stages that a later lab's answer for the same class has
    overtaken, and not those whose functions all have a later answer."""
    used: list[Answer] = []
    for i, answer in reversed(list(enumerate(answers))):
        later = {name for other in answers[i + 1 :] if other.row.lab != answer.row.lab for name in other.classes}
        tree = ast.parse(answer.source)
        overtaken = any(_is_stage(_class(tree, name)) for name in answer.classes & later)
        replaced = {name for other in used for name in other.functions}
        if not overtaken and not set(answer.functions) <= replaced:
            used.insert(0, answer)
    return used


def _put(text: str, answer: Answer) -> str:
    """The text with one answer in it."""
    own_module = "minivllm." + (answer.row.file or "").removesuffix(".py").replace("/", ".")
    taken = {name: key for node in ast.parse(text).body for name, key in _bindings(node).items()}
    # Importing a name of this very file from minivllm means the name that stands here.
    taken_as = {name: {key, f"{own_module}.{name}"} for name, key in taken.items()}
    source = _without_collisions(answer, taken_as)
    tree, lines = ast.parse(source), source.splitlines()
    pieces: list[tuple[str, Member]] = [(f, _function(tree, f, answer)) for f in answer.functions if "." not in f]
    for name in dict.fromkeys(f.partition(".")[0] for f in answer.functions if "." in f):
        pieces += _members(text, tree, name, answer)

    extras = _extras(tree, {name.partition(".")[0] for name in answer.functions}, taken_as, own_module)
    before = [line for node in extras for line in lines[first_line(node) - 1 : node.end_lineno]]
    before = [f"# --- exercise {answer.row.id}: what your functions use", *before, "", ""] if before else []
    for name, node in pieces:
        own = textwrap.dedent("\n".join(lines[first_line(node) - 1 : node.end_lineno]))
        text = _replace(text, name, f"# --- exercise {answer.row.id}: yours\n{own}", before)
        before = []
    return text


def _function(tree: ast.Module, name: str, answer: Answer) -> Function:
    found = find_function(tree, name)
    if found is None:  # by assignment, perhaps: only a whole definition can be moved
        raise ValueError(f"my_engine needs {name} as a `def` in the cell of exercise {answer.row.id}.")
    return found


# ------------------------------------------------------------------------------------------------------------- classes


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found[-1] if found else None


def _is_stage(node: ast.ClassDef | None) -> bool:
    return node is not None and "capabilities" in _members_of(node)


def _members_of(node: ast.ClassDef) -> dict[str, Member]:
    """Methods and class attributes by name."""
    found: dict[str, Member] = {}
    for statement in node.body:
        if isinstance(statement, Function):
            found[statement.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
    return found


def _members(text: str, tree: ast.Module, name: str, answer: Answer) -> list[tuple[str, Member]]:
    """The members of the student's class that go into the engine's, as ("Class.member", node)."""
    theirs, ours = _class(ast.parse(text), name), _class(tree, name)
    wanted = [f.partition(".")[2] for f in answer.functions if f.startswith(f"{name}.")]
    if ours is None or theirs is None:
        raise ValueError(f"my_engine needs {name} as a `class` in the cell of exercise {answer.row.id}.")
    for method in wanted:
        _function(tree, f"{name}.{method}", answer)
    have, own = _members_of(theirs), _members_of(ours)
    if _is_stage(ours):
        chosen = [m for m in own if m != "__init__" or _parameters(own[m]) == _parameters(have.get(m))]
    else:
        chosen = [m for m in own if m in wanted or (m not in have and isinstance(own[m], Function))]
    _refuse_unknown_attributes(theirs, {m: own[m] for m in chosen}, answer)
    return [(f"{name}.{m}", own[m]) for m in chosen]


def _parameters(node: Member | None) -> list[str] | None:
    if not isinstance(node, Function):
        return None
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)][1:]


def _refuse_unknown_attributes(theirs: ast.ClassDef, chosen: dict[str, Member], answer: Answer) -> None:
    """A method that reads an attribute which only the lab's `__init__` set would fail in the engine: say so now."""
    in_class = _members_of(theirs)
    known = {*in_class, *chosen}
    for node in (*in_class.values(), *chosen.values()):
        known |= {name for name, is_read in _attributes(node) if not is_read}
    for member, node in chosen.items():
        for name, is_read in _attributes(node):
            if is_read and name not in known:
                raise ValueError(
                    f"{theirs.name}.{member} uses self.{name}, and minivllm's {theirs.name} has no such attribute. In exercise"
                    f" {answer.row.id} keep to what the given __init__ sets."
                )


def _attributes(node: Member) -> Iterator[tuple[str, bool]]:
    """The attributes of `self` that a method names, and whether it reads them."""
    if not isinstance(node, Function) or not node.args.args:
        return
    me = node.args.args[0].arg
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == me:
            yield inner.attr, isinstance(inner.ctx, ast.Load)


# ---------------------------------------------------------------------------------------------------------------- text


def _replace(text: str, name: str, own: str, before: list[str]) -> str:
    """The text with the function or member `name` replaced by `own`, or added to its class. `before` goes in front of what
    stands at the top level there."""
    tree, lines = ast.parse(text), text.splitlines()
    class_name, _, member = name.rpartition(".")
    holder = _class(tree, class_name) if class_name else None
    theirs: ast.stmt | None
    if holder is not None:
        theirs, indent = _members_of(holder).get(member), " " * holder.body[0].col_offset
        start = first_line(theirs) - 1 if theirs is not None else holder.end_lineno or 0
    else:
        theirs, indent = find_function(tree, name), ""
        if theirs is None:
            raise ValueError(f"minivllm's file has no function {name}.")
        start = first_line(theirs) - 1
    end = (theirs.end_lineno or 0) if theirs is not None else start
    space = [""] if theirs is None else []
    lines[start:end] = [*space, *textwrap.indent(own, indent).splitlines()]
    top = next(n for n in tree.body if first_line(n) <= start + (theirs is not None) <= (n.end_lineno or 0))
    lines[first_line(top) - 1 : first_line(top) - 1] = before
    return "\n".join(lines) + "\n"


def _extras(tree: ast.Module, mine: set[str], taken_as: dict[str, set[str]], own_module: str) -> list[ast.stmt]:
    """What else a cell defines and the file lacks. Not the import of this very file whose class the student's only derives
    from: its members stand here."""
    return [
        node
        for node in tree.body
        if not isinstance(node, ast.Expr)
        and not (set(bound_names(node)) & mine)
        and not _is_import_for_bases(node, tree, own_module)
        and (any(key not in taken_as.get(name, ()) for name, key in _bindings(node).items()) or _imports_submodule(node))
    ]


def _is_import_for_bases(node: ast.stmt, tree: ast.Module, own_module: str) -> bool:
    if not isinstance(node, ast.Import) or [(a.name, a.asname) for a in node.names] != [(own_module, None)]:
        return False
    bases = {id(n) for c in tree.body if isinstance(c, ast.ClassDef) for base in c.bases for n in ast.walk(base)}
    package = own_module.partition(".")[0]
    return not any(isinstance(n, ast.Name) and n.id == package and id(n) not in bases for n in ast.walk(tree))


def _bindings(node: ast.stmt) -> dict[str, str]:
    """The names a statement defines, each with a text that is equal where the meaning is."""
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names if node.module != "__future__"}
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0] for a in node.names}
    return {name: ast.dump(node) for name in bound_names(node)}


def _imports_submodule(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and any("." in a.name and not a.asname for a in node.names)


def _without_collisions(answer: Answer, taken_as: dict[str, set[str]]) -> str:
    """The answer's text, in which names that mean something else in the file carry the exercise's number."""
    mine = {name.partition(".")[0] for name in answer.functions}
    suffix, renamed = "_" + answer.row.id.replace(".", "_"), {}
    for node in ast.parse(answer.source).body:
        for name, key in _bindings(node).items():
            if name not in mine and key not in taken_as.get(name, {key}):
                renamed[name] = name + suffix
    return _rename(answer.source, renamed) if renamed else answer.source


def _rename(source: str, names: dict[str, str]) -> str:
    """Rename plain names (not attributes) everywhere; an imported name keeps its origin: `from m import f as f_2_2`."""
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    imports = {
        (alias.lineno, alias.col_offset): alias.asname is None
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for before, token in reversed(list(zip([tokens[0], *tokens], tokens, strict=False))):
        if token.type != tokenize.NAME or token.string not in names or before.string == ".":
            continue
        new = names[token.string]
        if token.start in imports:
            if not imports[token.start]:
                continue  # `import a as b`: a is not ours to rename
            new = f"{token.string} as {new}"
        row, column = token.start
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(token.string) :]
    return "".join(lines)
