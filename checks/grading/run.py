"""python -m checks grade SUBMISSIONS --out DIR: a class in one run.

    OUT/.state/run.json                what the run grades: each lab's points; and what it was not asked for
    OUT/.state/alice-04-1a2b3c4d.json  one record a student and lab, written when it is done
    OUT/.run/                          the secret seed, and what each record was made from: only instructors may see it
    OUT/.trees/                        what graded children import; there while it runs
    OUT/gradebook.csv, ...             computed from the records (outputs.py)

Interrupted, or killed, a run goes on where it was: a record stands while the file that was handed in, the lab, the checks and
the seed are what they were. Points do not depend on how many are graded at once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from checks.authoring.source import ROOT, sources
from checks.exercises import find, has_checks
from checks.grading.isolation import close_memory, has_namespaces, in_container, isolation, narrowed_environment
from checks.grading.one import Task, grade, is_full, not_graded, read
from checks.grading.outputs import write_all
from checks.grading.points import Grader, exercises_of
from checks.grading.rebuild import written_in
from checks.grading.records import GRADER_ERROR, Incident, Isolation, PassedOver, Submission
from checks.grading.submissions import PROGRESS, Found, find_submissions, guess_lab, recognize, student_id_in
from checks.grading.trees import Trees
from checks.grading.worth import worth
from checks.sandbox.folders import sweep
from checks.sandbox.sandbox import close_server
from checks.student.home import write_atomically
from checks.student.ipynb import Unreadable

Result = TypeVar("Result")
STATE, PRIVATE, TREES = ".state", ".run", ".trees"
_GRADED_BY = ("exercises/*.py", "exercises/*.yaml", "quizzes/*.yaml", "sandbox/*.py", "grading/*.py")


@dataclass(frozen=True)
class Options:
    """The command line. `labs` None: every lab that has checks and a source."""

    submissions: Path
    out: Path
    labs: tuple[str, ...] | None = None
    jobs: int = 1
    roster: Path | None = None
    overrides: Path | None = None
    hidden_seed: str | None = None
    exercise: str | None = None
    nbval: bool = True


def run(options: Options, say: Callable[[str], None] = print) -> int:
    """Grade, and write the outputs. Returns the exit status. Raises ValueError for options that cannot be meant, and OSError
    naming the file where the disk is full; what is graded by then stands."""
    labs = _labs(options)
    state, private = options.out / STATE, options.out / PRIVATE
    state.mkdir(parents=True, exist_ok=True)
    private.mkdir(mode=0o700, exist_ok=True)
    with _alone(private, options.out):
        sweep()
        return _run(options, labs, state, private, say)


@contextlib.contextmanager
def _alone(private: Path, out: Path) -> Iterator[None]:
    """Two runs into one folder would take each other's trees away. A run that was killed holds nothing."""
    try:
        with FileLock(private / "lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"Another run is grading into {out}. Wait until it has ended, or take another --out.") from None


def _run(options: Options, labs: Sequence[str], state: Path, private: Path, say: Callable[[str], None]) -> int:
    secret = _secret(private, options.hidden_seed)
    if not in_container():  # there, the one that started it has done so: it knows where the files are
        options = with_the_last_ones_files(options, say)
    level = isolation()
    tasks, others = _tasks(find_submissions(options.submissions), labs, level)
    if options.exercise:
        tasks = _only(tasks, options.exercise, state)
    told = {"labs": _worths(state, labs, tasks), "passed_over": [asdict(other) for other in others]}
    write_atomically(state / "run.json", json.dumps(told, indent=1) + "\n")
    by = _graded_by(secret)
    pending = [task for task in tasks if options.exercise or not _is_done(state, private, task, by)]
    say(f"{len(tasks)} submissions, {len(tasks) - len(pending)} graded before. Isolation: {level}.")
    if others:
        say(_passed_over(others, labs))
    if level == "container" and not has_namespaces():
        say("In this container no process may make namespaces: students' code is apart from this machine, not from the grader.")
    if level == "not isolated":
        say("This system gives a process no namespaces of its own: see INSTRUCTORS.md on what that means, and on --container.")
    trees = Trees((options.out / TREES).resolve())
    grader = Grader(trees, secret, (str(state.resolve()), str(private.resolve())))
    try:
        if pending:
            trees.build(
                [row for lab in sorted({t.lab for t in pending} - {""}) for row in exercises_of(lab) if has_checks(lab)]
            )
        with narrowed_environment():
            for task, record in _in_parallel(grade, grader, pending, options.jobs, "points"):
                _keep(state, private, task, record or not_graded(task, "the end of its process"), by)
            write_all(state, options.out, options.roster, options.overrides)
            if options.nbval and not options.exercise:
                _nbval(options, state, grader, tasks)
    finally:
        close_server()  # it sees the trees that go now, and would go on seeing them where another run puts its own
        trees.remove()
    write_all(state, options.out, options.roster, options.overrides)
    say(f"Written to {options.out}: gradebook.csv, feedback/, report.html, incidents.csv and the rest.")
    return 0


def _nbval(options: Options, state: Path, grader: Grader, tasks: Sequence[Task]) -> None:
    """The rebuilt notebooks, run as a whole. After the points, which do not wait for it."""
    from checks.grading.nbval_run import run_cells

    records = {task: Submission.from_json((state / f"{_name(task)}.json").read_text(encoding="utf-8")) for task in tasks}
    waiting = [task for task in tasks if task.lab and records[task].exercises and not records[task].nbval]
    for task, cells in _in_parallel(run_cells, grader, waiting, options.jobs, "notebooks"):
        if cells:
            write_atomically(state / f"{_name(task)}.json", replace(records[task], nbval=cells).to_json())


# ---------------------------------------------------------------------------------------------------------- what is graded


def _labs(options: Options) -> tuple[str, ...]:
    known = [path.stem[:2] for path in sources() if has_checks(path.stem[:2])]
    wanted = tuple(lab.zfill(2) for lab in options.labs) if options.labs else tuple(known)
    if unknown := [lab for lab in wanted if lab not in known]:
        raise ValueError(f"There is no Lab {', '.join(unknown)} to grade. There are: {', '.join(known)}.")
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: at least 1 is needed.")
    if options.exercise and find(options.exercise).lab not in wanted:
        raise ValueError(f"Exercise {options.exercise} is not in the labs {', '.join(wanted)}.")
    return wanted


def _passed_over(others: Sequence[PassedOver], labs: Sequence[str]) -> str:
    """The line of the summary: how many notebooks of which labs."""
    counted = Counter(other.lab for other in others)
    each = ", ".join(f"{n} of Lab {lab}" for lab, n in sorted(counted.items()))
    was = "s were" if len(others) > 1 else " was"
    return f"{len(others)} notebook{was} not graded: {each}; asked for: {', '.join(labs)}. incidents.csv has the files."


def _tasks(found: Iterable[Found], labs: Sequence[str], level: Isolation) -> tuple[list[Task], list[PassedOver]]:
    """One task a student and lab, and what is of other labs. Of several files the latest counts, as far as their names tell;
    else the one with more work in it. The instructor is told."""
    found = list(found)
    ids = {f.student: told for f in found if f.name.endswith(PROGRESS) and (told := student_id_in(f))}
    slugs = {path.stem[:2]: path.stem for path in sources() if path.stem[:2] in labs}
    chosen: dict[tuple[str, str], list[tuple[int, Found]]] = {}
    others: list[PassedOver] = []
    for file in found:
        if file.name.endswith(PROGRESS):
            continue
        try:
            notebook = read(file)
            lab, work = recognize(notebook) or "", written_in(notebook)
        except Unreadable:
            lab, work = guess_lab(file.name, slugs) or (labs[0] if len(labs) == 1 else ""), -1
        if not lab or lab in labs:
            chosen.setdefault((file.student, lab), []).append((work, file))
        else:
            others.append(PassedOver(file.student, lab, file.name))
    tasks = []
    for (student, lab), files in sorted(chosen.items()):
        files.sort(key=lambda f: (f[0] >= 0, f[1].time, f[0], f[1].name))
        last = files[-1][1]
        notes = [Incident("several_files", f.name, f"{last.name} was graded instead") for _, f in files[:-1]]
        tasks.append(Task(last, lab, level, ids.get(student), tuple(notes)))
    return tasks, others


def _only(tasks: Iterable[Task], exercise: str, state: Path) -> list[Task]:
    """For a regrade: the tasks of this exercise's lab that have a record, with it."""
    found = []
    for task in tasks:
        path = state / f"{_name(task)}.json"
        if task.lab == find(exercise).lab and path.is_file():
            found.append(replace(task, only=exercise, before=Submission.from_json(path.read_text(encoding="utf-8"))))
    return found


def _worths(state: Path, labs: Sequence[str], tasks: Iterable[Task]) -> dict[str, dict[str, float]]:
    """The points of every lab that was graded into this folder, now or before."""
    path = state / "run.json"
    before: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))["labs"] if path.is_file() else {}
    present = {task.lab for task in tasks} & set(labs)
    return dict(sorted({**before, **{lab: worth(lab) for lab in present}}.items()))


# --------------------------------------------------------------------------------------------------------------- resuming


def with_the_last_ones_files(options: Options, say: Callable[[str], None]) -> Options:
    """Roster and overrides as given, else those of the last run into this folder: a regrade must not undo what they say."""
    private = options.out / PRIVATE
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = private / "files.json"
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    given = {"roster": options.roster, "overrides": options.overrides}
    for name, file in given.items():
        if file is not None:
            known[name] = str(file.resolve())
        elif name in known and Path(known[name]).is_file():
            given[name] = Path(known[name])
            say(f"With the {name} of the last run: {known[name]}")
        elif name in known:
            raise ValueError(f"The last run had --{name} {known[name]}, which is gone. Name the file where it is now.")
    write_atomically(path, json.dumps(known, indent=1) + "\n")
    return replace(options, roster=given["roster"], overrides=given["overrides"])


def _secret(private: Path, given: str | None) -> str:
    """The hidden seed: as given, else this folder's own, drawn once."""
    path = private / "seed"
    if given is not None:
        return given
    if not path.is_file():
        write_atomically(path, secrets.token_hex(16))
        path.chmod(0o600)
    return path.read_text(encoding="utf-8")


def _graded_by(secret: str) -> str:
    """A digest of all that decides about points beside the submissions."""
    digest = hashlib.sha256(secret.encode())
    for pattern in _GRADED_BY:
        for path in sorted((ROOT / "checks").glob(pattern)):
            digest.update(path.read_bytes())
    for source in sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _name(task: Task) -> str:
    """A file name that is safe anywhere, and different for different students."""
    student = task.found.student
    plain = re.sub(r"[^a-zA-Z0-9]+", "-", student).strip("-")[:40] or "student"
    lab = task.lab or "unknown-" + hashlib.sha256(task.found.name.encode(errors="replace")).hexdigest()[:4]
    return f"{plain}-{lab}-{hashlib.sha256(student.encode(errors='replace')).hexdigest()[:8]}"


def _made_from(task: Task, by: str) -> str:
    digest = hashlib.sha256(f"{by}:{task.found.name}:{task.isolation}:{task.student_id}:{task.notes}".encode(errors="replace"))
    digest.update(task.found.data or str(task.found.size).encode())
    return digest.hexdigest()


def _is_done(state: Path, private: Path, task: Task, by: str) -> bool:
    key, record = private / f"{_name(task)}.key", state / f"{_name(task)}.json"
    return record.is_file() and key.is_file() and key.read_text(encoding="utf-8") == _made_from(task, by)


def _keep(state: Path, private: Path, task: Task, record: Submission, by: str) -> None:
    """The record first: if it ends between the two, this one is graded again. So is what the grader itself failed on."""
    write_atomically(state / f"{_name(task)}.json", record.to_json())
    if any(incident.kind == GRADER_ERROR for incident in record.incidents):
        (private / f"{_name(task)}.key").unlink(missing_ok=True)
    else:
        write_atomically(private / f"{_name(task)}.key", _made_from(task, by))


# ------------------------------------------------------------------------------------------------------------- in parallel

Work = Callable[[Grader, Task], Result]


def _in_parallel(
    work: Work[Result], grader: Grader, tasks: Sequence[Task], jobs: int, what: str
) -> Iterator[tuple[Task, Result | None]]:
    """(task, result) as they get done. If a worker is killed (by a system out of memory, say), the rest is done one by one; a
    task that kills its worker again has the result None."""
    with _progress(len(tasks), what) as advance:
        if jobs == 1:
            for task in tasks:
                yield task, work(grader, task)
                advance()
            return
        waiting = list(tasks)
        try:
            for task, result in _in_pool(work, grader, list(waiting), jobs):
                waiting.remove(task)
                yield task, result
                advance()
            return
        except BrokenProcessPool:
            pass
        for task in waiting:
            result_or_none: Result | None = None
            with contextlib.suppress(BrokenProcessPool):
                ((_, result_or_none),) = _in_pool(work, grader, [task], 1)
            yield task, result_or_none
            advance()


def _in_pool(work: Work[Result], grader: Grader, tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Result]]:
    """At most two tasks a worker are on their way, so that what was handed in is not all in memory twice."""
    context = get_context("spawn")
    rest = iter(tasks)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        running: dict[Future[Result], Task] = {}
        while True:
            for task in rest:
                running[pool.submit(work, grader, task)] = task
                if len(running) >= 2 * jobs:
                    break
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


def _start_worker(parent: int) -> None:
    """A worker ends with the run, however that ends."""
    close_memory()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; else a line every tenth of the way."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as bar:
            line = bar.add_task(what, total=total)
            yield lambda: bar.advance(line)
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == total or done % max(1, total // 10) == 0:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    yield advance


def main(arguments: argparse.Namespace) -> int:
    """`python -m checks grade`. Returns the exit status."""
    from checks.grading.release import parse_labs

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # behind the walls is no GPU, and points are the same on every machine
    try:
        options = Options(
            submissions=Path(arguments.submissions),
            out=Path(arguments.out),
            labs=tuple(source.lab for source in parse_labs(arguments.labs)) if arguments.labs else None,
            jobs=arguments.jobs or max(1, (os.cpu_count() or 2) // 2),
            roster=Path(arguments.roster) if arguments.roster else None,
            overrides=Path(arguments.overrides) if arguments.overrides else None,
            hidden_seed=arguments.hidden_seed,
            exercise=arguments.exercise,
            nbval=not arguments.no_nbval,
        )
        if arguments.container:
            from checks.grading.container import run_in_container

            return run_in_container(with_the_last_ones_files(options, print))
        return run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(_disk_words(error, Path(arguments.out)), file=sys.stderr)
        return 1
    finally:
        close_server()


def _disk_words(error: OSError, out: Path) -> str:
    told = f"Grading stopped: {error.filename or out}: {error.strerror or error}."
    if is_full(error):
        told += " Make room there, and run the same again."
    return f"{told} What was graded by now is kept, and each file in {out} is whole, the old one or the new one."
