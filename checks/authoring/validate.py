"""What a lab must have, and what must not be in it. Each problem is one line that names the file and the place."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from nbformat import NotebookNode

from checks.authoring.source import Source, SourceError, engine_names, engine_parameters
from checks.exercises import check_of, find, has_checks, table
from checks.sandbox.cell import body_without_docstring, find_function, is_stub, name_of
from checks.student.questions import questions

# The parts of every lab, as ids of its cells, in the order a student meets them.
PARTS = (
    "box", "objectives", "big-idea", "predict", "example", "plug-in", "experiment", "mistakes", "help", "check-yourself",
    "takeaways", "further", "next",
)  # fmt: skip
MAX_CELLS, MAX_WORDS = 60, 3000


def problems_of(source: Source, solution: NotebookNode, lab: NotebookNode) -> list[str]:
    """Everything that keeps a lab from being handed out; empty if it is fine."""
    found = [
        *_header(source), *_parts(source), *_exercises(source), *_questions(source), *_figures(source), *_size(lab),
        *_leaks(solution, lab),
    ]  # fmt: skip
    return [f"{source.path.name}: {problem}" for problem in found]


def _header(source: Source) -> Iterator[str]:
    if not source.name.startswith(f"{source.header.get('lab')}_"):
        yield f"the header says lab {source.header.get('lab')!r}, the file's name another"


def _parts(source: Source) -> Iterator[str]:
    ids = [cell.id for cell in source.cells]
    there = [part for part in PARTS if part in ids]
    yield from (f"the part {part!r} is missing: a cell with that id" for part in PARTS if part not in ids)
    if there != sorted(there, key=ids.index):
        yield f"the parts are not in order: {', '.join(sorted(there, key=ids.index))}"


def _exercises(source: Source) -> Iterator[str]:
    cells = {cell.exercise: cell for cell in source.cells if cell.exercise}
    for cell in source.cells:
        marked = "SOLUTION" in cell.text or engine_names(cell.text)
        if cell.kind == "code" and marked and not cell.exercise:
            yield f"line {cell.line}: an answer stands in a cell whose last line is not check(...)"
    for row in table().values():
        if row.lab == source.lab and row.id not in cells and not row.optional:
            yield f"exercise {row.id} of the table has no cell"
    for exercise, cell in cells.items():
        where = f"line {cell.line}, exercise {exercise}"
        if table().get(exercise) is None or table()[exercise].lab != source.lab:
            yield f"{where}: not an exercise of lab {source.lab} in table.yaml"
            continue
        if not has_checks(source.lab):
            yield f"{where}: there is no lab_{source.lab}.py with its check"
            continue
        if cell.text.splitlines()[0] != "from checks import check":
            yield f"{where}: its first line is not `from checks import check`"
        if f"{{{{exercise {exercise}}}}}" not in "".join(c.text for c in source.cells):
            yield f"{where}: no text has its line {{{{exercise {exercise}}}}}"
        yield from (f"{where}: {problem}" for problem in _check_data(exercise))
        yield from (f"{where}: {problem}" for problem in _answer(cell.text))


def _check_data(exercise: str) -> Iterator[str]:
    try:
        check = check_of(find(exercise))
    except KeyError:
        yield "it has no check"
        return
    if not check.hints or not all(text.strip() for text in check.hints):
        yield "it has no hints"
    if not 1 <= check.minutes <= 60:
        yield f"minutes is {check.minutes}, not 1 to 60"
    if check.difficulty not in (1, 2, 3):
        yield f"difficulty is {check.difficulty}, not 1, 2 or 3"
    if not check.cases(0):
        yield "its check has no cases"


def _answer(text: str) -> Iterator[str]:
    """An answer taken from the engine must fit the signature that the student sees."""
    tree = ast.parse(text)
    for name in engine_names(text):
        parts = name.split(".")
        method = ".".join(parts[-2:]) if parts[-2][:1].isupper() else parts[-1]  # of a class, or of a module
        function = find_function(tree, method)
        if function is None:
            yield f"{name} is the answer of no function of that name in the cell"
            continue
        try:
            wanted = engine_parameters(name)
        except SourceError as error:
            yield str(error)
            continue
        if [a.arg for a in function.args.args] != wanted:
            yield f"{function.name}({', '.join(a.arg for a in function.args.args)}) has {', '.join(wanted)} in the engine"


def _questions(source: Source) -> Iterator[str]:
    text = "\n".join(cell.text for cell in source.cells)
    for question in questions(source.lab).values():
        verb = "predict" if question.answer is None else "quiz"
        if f"{{{{question {question.id}}}}}" not in text or f'{verb}("{question.id}"' not in text:
            yield f"question {question.id} is not asked: it needs {{{{question {question.id}}}}} and a cell {verb}(...)"
        for key, choice in question.choices.items():
            if not choice.why:
                yield f"question {question.id}: choice {key} has no explanation"
        if question.answer is not None and not question.draw and question.answer not in question.choices:
            yield f"question {question.id}: its answer {question.answer!r} is none of its choices"


def _figures(source: Source) -> Iterator[str]:
    for cell in source.cells:
        where = f"line {cell.line}"
        if cell.kind == "markdown":
            if re.search(r"data:image|!\[[^\]]*\]\(attachment:", cell.text):
                yield f"{where}: a picture inside the text; draw it from data, or link to a file"
            if re.search(r"!\[\s*\]\(", cell.text) or re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", cell.text):
                yield f"{where}: a picture without alternative text"
            continue
        if "pyplot" in cell.text:
            yield f"{where}: pyplot shows figures without alternative text; use new_figure() and show(figure, alt=...)"
        for node in ast.walk(ast.parse(cell.text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "show":
                alt = next((k.value for k in node.keywords if k.arg == "alt"), node.args[1] if len(node.args) > 1 else None)
                if alt is None or (isinstance(alt, ast.Constant) and not str(alt.value).strip()):
                    yield f"{where}: a figure without alternative text: show(figure, alt=...)"


def _size(lab: NotebookNode) -> Iterator[str]:
    words = sum(len(cell.source.split()) for cell in lab.cells if cell.cell_type == "markdown")
    if len(lab.cells) > MAX_CELLS:
        yield f"{len(lab.cells)} cells; a lab has at most {MAX_CELLS}"
    if words > MAX_WORDS:
        yield f"{words} words; a lab has at most {MAX_WORDS}"


# ---------------------------------------------------------------------------------------------------------------- leaks


def _leaks(solution: NotebookNode, lab: NotebookNode) -> Iterator[str]:
    """Answers that can be read in the lab: a body that is no stub, or statements of an answer anywhere else, text included."""
    answers: dict[str, tuple[str, set[str]]] = {}
    for given, blank in zip(solution.cells, lab.cells, strict=True):
        exercise = given.metadata.get("minivllm", {}).get("exercise")
        if not exercise or exercise not in table():
            continue
        for name in map(name_of, table()[exercise].functions):
            stub = find_function(ast.parse(blank.source), name)
            answer = find_function(ast.parse(given.source), name)
            if answer is None:
                yield f"exercise {exercise}: its cell does not define {name}"
            elif stub is None or not is_stub(stub):
                yield f"exercise {exercise}: {name} is answered in the lab"
            else:
                answers[name] = exercise, _pieces(body_without_docstring(answer))
    for cell in lab.cells:
        there = _pieces_of_cell(cell)
        for name, (exercise, pieces) in answers.items():
            if pieces & there:
                yield f"exercise {exercise}: a part of {name}'s answer stands in cell {cell.id} of the lab"


def _pieces(body: list[ast.stmt]) -> set[str]:
    """What identifies an answer: its compound statements, and each two statements in a row. Names and layout do not matter to a
    reader, so neither do positions; a single simple statement (`return logits`) may stand anywhere."""
    compound = {ast.dump(node) for node in body if isinstance(node, (ast.For, ast.While, ast.If, ast.With))}
    pairs = {ast.dump(a) + ast.dump(b) for a, b in itertools.pairwise(body)}
    only = {ast.dump(body[0])} if len(body) == 1 else set()
    return compound | pairs | only


def _pieces_of_cell(cell: NotebookNode) -> set[str]:
    texts = [cell.source] if cell.cell_type == "code" else re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)
    found: set[str] = set()
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list):
                continue
            found |= _pieces(body) | {ast.dump(node) for node in body}
    return found
