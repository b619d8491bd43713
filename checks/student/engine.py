"""my_engine/: the student's engine, a mirror of minivllm/ made from the answers that passed.

Each file is minivllm's own with the functions of passed exercises replaced by the student's text (assemble.py), so what is not
passed, or is skipped, is the reference, and a diff of the two files shows exactly what the student wrote. It is rebuilt from
the answers whenever it is asked for: nothing in it is edited by hand.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import minivllm
from checks.exercises import Row, has_checks, table
from checks.sandbox.cell import name_of, parsed
from checks.student.assemble import MARK, Answer, assemble, in_force
from checks.student.failure import CheckFailed
from checks.student.home import answers_dir, changing_progress, engine_dir, locked, read_progress, write_atomically
from minivllm.components import SEAMS, Components, triton_runs_here

REFERENCE = Path(minivllm.__file__).parent


def components() -> Components:
    """The student's parts, for `LLM(components=...)`: the passed exercises' ones. What is missing is minivllm's."""
    with locked():
        build()
    chosen = read_progress()["use"]
    folder = engine_dir()
    if not (folder / "sampling" / "logits.py").is_file() and not any(seam.file_in(folder) for seam in SEAMS.values()):
        return Components()  # what the first labs build is no component
    parts = Components.from_dir(folder)
    # A file may hold other parts beside the student's: copies of minivllm's, which would only stand in its faster ones' way.
    passed = {answer.row.seam for answers in _by_file().values() for answer in answers}
    return Components({seam: part for seam, part in parts.items() if seam in passed and chosen.get(seam) != "reference"})


def use(seam: str = "", exercise: str | None = None) -> None:
    """Say whose part a seam is: `use("attention.decode", "4.5")` takes that exercise's answer although a later one passed;
    `use("sampler", "reference")` takes minivllm's; `use("sampler")` goes back to the rule, the latest that passed. Raises
    CheckFailed for what does not fit."""
    if str(seam) in table():
        its = table()[str(seam)].seam
        how = f'the component comes first: use("{its}", "{seam}").' if its else "and builds no component."
        raise CheckFailed(f"{seam!r} is an exercise, {how}")
    if not seam:
        raise CheckFailed(f'Which component? As in use("sampler", "reference"). Components are: {", ".join(SEAMS)}.')
    if seam not in SEAMS:
        close = difflib.get_close_matches(str(seam), SEAMS, n=1, cutoff=0.5)
        meant = f" Is {close[0]!r} meant?" if close else ""
        raise CheckFailed(f"{seam!r} is not a component.{meant} Components are: {', '.join(SEAMS)}.")
    exercise = None if exercise is None else str(exercise)
    fitting = [i for i, row in table().items() if row.seam == seam and has_checks(row.lab)]
    if exercise not in (None, "reference", *fitting):
        raise CheckFailed(f"Exercise {exercise!r} does not build the {seam}. These do: {', '.join(fitting) or 'none yet'}.")
    with changing_progress() as state:
        state["use"].pop(seam, None)
        if exercise is not None:
            state["use"][seam] = exercise
    with locked():
        build()
    whose = {None: "yours, the latest that passed", "reference": "minivllm's"}.get(exercise, f"your answer to {exercise}")
    print(f"{seam}: {whose}.")
    named = table().get(exercise or "")
    if named is not None and named.file == SEAMS[seam].triton_file and not triton_runs_here():
        print("It is a Triton kernel: it is taken on a GPU, or with TRITON_INTERPRET=1. Here your answer of before stays.")


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
    """The passed answers of each engine file, the one that counts last: the latest lab's, or the one `use` names. A file of
    kernels is left out where `use` names an answer of the seam's other file."""
    chosen, found = read_progress()["use"], dict[str, list[Answer]]()
    for row in table().values():
        path = answers_dir() / f"{row.id}.py"
        if row.file and path.is_file() and (REFERENCE / row.file).is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if parsed(text) is None:
                print(f"Your kept answer to {row.id}, {path}, is damaged: minivllm's part is used. Run your cell again.")
                continue
            found.setdefault(row.file, []).append(Answer(row, text))
    for seam in SEAMS.values():
        named = table().get(chosen.get(seam.name, ""))
        if seam.triton_file and named is not None and named.file != seam.triton_file:
            found.pop(seam.triton_file, None)
    for answers in found.values():
        answers.sort(key=lambda a: chosen.get(a.row.seam or "") == a.row.id)
    return found


def in_use() -> dict[str, list[str]]:
    """The exercises whose answers are in my_engine/, by the seam they build; of a seam with two files, those of the one that is
    taken here."""
    found: dict[str, list[str]] = {}
    for file, answers in _by_file().items():
        for answer in in_force(answers):
            seam = SEAMS.get(answer.row.seam or "")
            if seam is None or not seam.triton_file or seam.file_in(engine_dir()) == engine_dir() / file:
                found.setdefault(answer.row.seam or "", []).append(answer.row.id)
    return found


def overtaken_by(row: Row) -> list[str]:
    """The exercises whose answers stand in my_engine where this one's would: a later lab's, or the one that `use` names."""
    used = in_force(_by_file().get(row.file or "", []))
    if any(answer.row.id == row.id for answer in used):
        return []
    mine = {name.partition(".")[0] for name in map(name_of, row.functions)}
    return [answer.row.id for answer in used if mine & {name.partition(".")[0] for name in answer.functions}]


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
    if lines:
        print('Lines with "-" are minivllm\'s, lines with "+" are yours.\n')
    print("\n".join(lines) if lines else f"Your {file} and minivllm's are the same, line for line.")
