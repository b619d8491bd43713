"""my_engine/: the student's engine, a mirror of minivllm/ made from the answers that passed.

Each file is minivllm's own with the functions of passed exercises replaced by the student's text, so what is not passed, or is
skipped, is the reference, and a diff of the two files shows exactly what the student wrote. It is rebuilt from the answers
whenever it is asked for: nothing in it is edited by hand.
"""

from __future__ import annotations

import ast
import difflib
import io
import textwrap
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import minivllm
from checks.exercises import Row, has_checks, table
from checks.sandbox.cell import bound_names, find_function, first_line, name_of
from checks.student.home import answers_dir, changing_progress, engine_dir, locked, read_progress, write_atomically
from minivllm.components import SEAMS, Components

MARK = "# my_engine: "
REFERENCE = Path(minivllm.__file__).parent


@dataclass(frozen=True)
class Answer:
    """A passed exercise and the text of its cell."""

    row: Row
    source: str


def components() -> Components:
    """The student's parts, for `LLM(components=...)`: the passed exercises' ones. What is missing is minivllm's."""
    with locked():
        build()
    chosen = read_progress()["use"]
    files = {seam.file for seam in SEAMS.values()} | {"sampling/logits.py"}
    if not any((engine_dir() / file).is_file() for file in files):  # what the first labs build is no component
        return Components()
    parts = Components.from_dir(engine_dir())
    return Components({seam: part for seam, part in parts.items() if chosen.get(seam) != "reference"})


def use(seam: str, exercise: str | None) -> None:
    """Say whose part a seam is: `use("attention.decode", "4.5")` takes that exercise's answer although a later one passed;
    `use("sampler", "reference")` takes minivllm's; `use("sampler", None)` goes back to the rule, the latest that passed."""
    if seam not in SEAMS:
        raise ValueError(f"{seam!r} is not a component. Components are: {', '.join(SEAMS)}.")
    fitting = [i for i, row in table().items() if row.seam == seam and has_checks(row.lab)]
    if exercise not in (None, "reference", *fitting):
        raise ValueError(f"Exercise {exercise!r} does not build the {seam}. These do: {', '.join(fitting) or 'none yet'}.")
    with changing_progress() as state:
        state["use"].pop(seam, None)
        if exercise is not None:
            state["use"][seam] = exercise
    with locked():
        build()
    whose = {None: "yours, the latest that passed", "reference": "minivllm's"}.get(exercise, f"your answer to {exercise}")
    print(f"{seam}: {whose}.")


def save_answer(row: Row, source: str) -> None:
    """Keep a passed cell, and put its functions into my_engine/. Raises ValueError, keeping nothing, if they cannot be moved
    there."""
    if row.file:
        assemble((REFERENCE / row.file).read_text(encoding="utf-8"), [Answer(row, source)])
    with locked():
        write_atomically(answers_dir() / f"{row.id}.py", source)
        build()


def forget_answer(row: Row) -> None:
    with locked():
        (answers_dir() / f"{row.id}.py").unlink(missing_ok=True)
        build()


def build() -> None:
    """Make my_engine/ what the passed answers say. Idempotent; files that say the same already are left alone."""
    wanted = {file: assemble((REFERENCE / file).read_text(encoding="utf-8"), answers) for file, answers in _by_file().items()}
    for path in engine_dir().rglob("*.py"):
        file = path.relative_to(engine_dir()).as_posix()
        if file not in wanted and path.read_text(encoding="utf-8").startswith(MARK):
            path.unlink()
    for file, text in wanted.items():
        path = engine_dir() / file
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)


def _by_file() -> dict[str, list[Answer]]:
    """The passed answers of each engine file, the one that counts last: the latest lab's, or the one `use` names."""
    chosen, found = read_progress()["use"], dict[str, list[Answer]]()
    for row in table().values():
        path = answers_dir() / f"{row.id}.py"
        if row.file and path.is_file() and (REFERENCE / row.file).is_file():
            found.setdefault(row.file, []).append(Answer(row, path.read_text(encoding="utf-8")))
    for answers in found.values():
        answers.sort(key=lambda a: chosen.get(a.row.seam or "") == a.row.id)
    return found


def assemble(reference: str, answers: Iterable[Answer]) -> str:
    """The reference file's text with the functions of the answers in place of its own.

    What else an answer's cell defines (imports, constants, helpers) goes in front of its first function. Where such a name
    means something else in the file already, it is renamed in the answer.
    """
    text, ids = reference, []
    for answer in answers:
        text = _put(text, answer)
        ids.append(answer.row.id)
    compile(text, "my_engine", "exec")
    exercises = f"exercise{'s' if len(ids) > 1 else ''} {', '.join(sorted(ids))}"
    return (
        f"{MARK}minivllm's file with your answers to {exercises} in it. Written by check(); edit the notebook instead.\n{text}"
    )


def _put(text: str, answer: Answer) -> str:
    wanted = [name_of(f) for f in answer.row.functions]
    taken = {name: key for node in ast.parse(text).body for name, key in _bindings(node).items()}
    source = _without_collisions(answer, wanted, taken)
    tree, source_lines = ast.parse(source), source.splitlines()
    mine = [f.split(".")[0] for f in wanted]
    extras = [
        node
        for node in tree.body
        if not isinstance(node, ast.Expr)
        and not (set(bound_names(node)) & set(mine))
        and (any(taken.get(name) != key for name, key in _bindings(node).items()) or _imports_submodule(node))
    ]
    before = [line for node in extras for line in source_lines[first_line(node) - 1 : node.end_lineno]]
    before = [f"# --- exercise {answer.row.id}: what your functions use", *before, "", ""] if before else []
    for name in wanted:
        theirs, ours = find_function(ast.parse(text), name), find_function(tree, name)
        if (
            theirs is None or ours is None
        ):  # written as a class of its own, or by assignment: only a whole definition can be moved
            raise ValueError(f"my_engine needs {name} as a `def` in the cell of exercise {answer.row.id}.")
        lines = text.splitlines()
        indent = " " * theirs.col_offset
        own = textwrap.dedent("\n".join(source_lines[first_line(ours) - 1 : ours.end_lineno]))
        own = textwrap.indent(f"# --- exercise {answer.row.id}: yours\n{own}", indent)
        lines[first_line(theirs) - 1 : theirs.end_lineno] = own.splitlines()
        if before:
            top = next(n for n in ast.parse(text).body if first_line(n) <= theirs.lineno <= (n.end_lineno or 0))
            lines[first_line(top) - 1 : first_line(top) - 1] = before
            before = []
        text = "\n".join(lines) + "\n"
    return text


def _bindings(node: ast.stmt) -> dict[str, str]:
    """The names a statement defines, each with a text that is equal where the meaning is."""
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names if node.module != "__future__"}
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0] for a in node.names}
    return {name: ast.dump(node) for name in bound_names(node)}


def _imports_submodule(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and any("." in a.name for a in node.names)


def _without_collisions(answer: Answer, wanted: list[str], taken: dict[str, str]) -> str:
    """The answer's text, in which names that mean something else in the file carry the exercise's number."""
    suffix, renamed = "_" + answer.row.id.replace(".", "_"), {}
    for node in ast.parse(answer.source).body:
        for name, key in _bindings(node).items():
            if name not in [w.split(".")[0] for w in wanted] and taken.get(name, key) != key:
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


def show_diff(file: str) -> None:
    """Print what differs between my_engine's file and minivllm's: "-" lines are minivllm's, "+" lines yours."""
    components()
    mine = engine_dir() / file
    if not mine.is_file():
        print(f"my_engine has no {file} yet: no exercise that builds it has passed, so minivllm's is in use.")
        return
    theirs, ours = (path.read_text(encoding="utf-8").splitlines() for path in (REFERENCE / file, mine))
    ours = [line for line in ours if not line.startswith(MARK)]
    lines = list(difflib.unified_diff(theirs, ours, f"minivllm/{file}", f"my_engine/{file}", lineterm="", n=1))
    print("\n".join(lines) if lines else f"Your {file} and minivllm's are the same, line for line.")
