"""Source and exercise in, report out: the whole of a check, with no notebook and no student's folder. Grading calls this
too."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from checks.exercises import Case, Row, Verdict, check_of, runner_of
from checks.sandbox.cell import find_function, is_stub, name_of
from checks.sandbox.jail import Jail
from checks.sandbox.sandbox import HAS_FORK, Limits, Outcome, Request, run_in_child

Judge = Callable[[Case, Any], Verdict]


@dataclass(frozen=True)
class Grading:
    """What grading does otherwise: its cases, a jail, minivllm without the answer (`tree`), and `forbidden` folders."""

    jail: Jail
    tree: str
    forbidden: tuple[str, ...] = ()
    cases: tuple[Case, ...] | None = None  # None: those of the seed


@dataclass(frozen=True)
class Report:
    """How an answer did. `verdict` is the first that is not right, in the order of the cases (smallest first); `call` is its
    case; `output` is what the student's code printed."""

    verdict: Verdict
    call: str | None
    cases: int
    right: int
    output: str
    ended: str = "done"  # how the child ended (Outcome.ended); "done" too where none was needed
    withheld: bool = False  # minivllm's own answer, which is not there while grading, was reached for

    @property
    def passed(self) -> bool:
        return self.verdict.passed


def evaluate(
    row: Row,
    source: str,
    *,
    seed: int = 0,
    limits: Limits | None = None,
    notebook: Mapping[str, str] | None = None,
    fork: bool = HAS_FORK,
    grading: Grading | None = None,
) -> Report:
    """Check `source`, a cell's text, as an answer to exercise `row`. `notebook` are the names that exist elsewhere in the
    student's notebook ("module" or "value"), only to word an undefined name."""
    check = check_of(row)
    cases = check.cases(seed) if grading is None or grading.cases is None else list(grading.cases)
    verdict = before_running(row, source)
    if verdict:
        return Report(verdict, None, len(cases), 0, "")
    limits = limits or check.limits
    words = _Words(source, notebook or {}, limits)

    def report_of(run: str, judge: Judge, cases: list[Case]) -> Report:
        request = Request(source, f"<exercise {row.id}>", row.functions, runner_of(row), run, cases)
        if grading is not None:
            request = replace(request, tree=grading.tree, strict=True, forbidden=grading.forbidden)
        return _report(judge, cases, run_in_child(request, limits, fork=fork, jail=grading.jail if grading else None), words)

    report = report_of(row.id, check.judge, cases)
    if check.second is None or not report.passed:
        return report
    second = report_of(check.second.run, check.second.judge, check.second.cases())
    if second.passed:  # what the student's code printed has been shown once
        return replace(report, withheld=report.withheld or second.withheld)
    return replace(second, call=None, cases=report.cases, right=report.right, output=report.output)


def _report(judge: Judge, cases: list[Case], outcome: Outcome, words: _Words) -> Report:
    """The first verdict that is not right, if there is one."""
    verdicts = _verdicts(judge, cases, outcome, words)
    right = sum(v.passed for v in verdicts)
    withheld = any(m.get("withheld") for m in outcome.messages)
    for index, verdict in enumerate(verdicts):
        if not verdict.passed:
            call = (
                cases[index]["call"] if any(m["case"] is not None or m["kind"] == "ready" for m in outcome.messages) else None
            )
            return Report(verdict, call, len(cases), right, outcome.output, outcome.ended, withheld)
    return Report(Verdict("passed"), None, len(cases), right, outcome.output, outcome.ended, withheld)


def before_running(row: Row, source: str) -> Verdict | None:
    """What can be said from the text alone: it does not parse, it is an IPython command, nothing has been written yet."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").rstrip("\n")
        return Verdict("syntax", f"Line {error.lineno} of the cell does not parse: {error.msg}\n    {error.lineno} | {line}")
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; ten thousand brackets
        return Verdict("syntax", f"The cell cannot be read as Python ({type(error).__name__}).")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "get_ipython":
            return Verdict(
                "syntax",
                f"Line {node.lineno} of the cell is an IPython command (% or !). A check runs plain Python: move the command to"
                " another cell.",
            )
    stubs = [name_of(f) for f in row.functions if (found := find_function(tree, name_of(f))) is not None and is_stub(found)]
    if not stubs:
        return None
    if len(stubs) == len(row.functions):
        return Verdict(
            "not attempted",
            f"Not attempted yet: replace the `raise NotImplementedError(...)` line in {' and in '.join(stubs)} by your code,"
            " then run the cell again.",
        )
    return Verdict(
        "not attempted", f"{' and '.join(stubs)} {'is' if len(stubs) == 1 else 'are'} still to be written in this cell."
    )


def _verdicts(judge: Judge, cases: list[dict[str, Any]], outcome: Outcome, words: _Words) -> list[Verdict]:
    """One verdict a case, as far as it came; how the child ended is the verdict on the case it ended in."""
    verdicts: list[Verdict] = []
    for message in outcome.messages:
        if message["kind"] == "problem":
            verdicts.append(_in_words(words, message))
        elif message["kind"] == "result" and len(verdicts) < len(cases):
            verdicts.append(_judge(judge, cases[len(verdicts)], message.get("output")))
    if outcome.ended != "done":
        verdicts.append(words.end(outcome))
    elif len(verdicts) < len(cases) and all(v.passed for v in verdicts):  # "done" without the results: someone else said it
        verdicts.append(Verdict("exit", "The check ended before all cases had run."))
    return verdicts


def _in_words(words: _Words, message: dict[str, Any]) -> Verdict:
    try:
        return words.problem(message)
    except Exception:  # no child of ours describes a problem like this: the student's code wrote it
        return Verdict("exit", "The code wrote into the check's own channel.")


def _judge(judge: Judge, case: Case, output: Any) -> Verdict:
    try:
        return judge(case, output)
    except Exception as error:  # the answer has a form no judge expects
        return Verdict("wrong type", f"The result could not be read ({type(error).__name__}: {error}).")


class _Words:
    """What went wrong in the child, in words for a student."""

    def __init__(self, source: str, notebook: Mapping[str, str], limits: Limits) -> None:
        self._lines, self._notebook, self._limits = source.splitlines(), notebook, limits

    def problem(self, problem: dict[str, Any]) -> Verdict:
        kind, name = problem["type"], problem.get("name", "")
        if kind == "MissingFunction":
            defined = name_of(problem["wanted"])
            if not problem["found"] and defined.partition(".")[0] in self._notebook:
                return Verdict(
                    "missing function",
                    f"{defined} is in another cell of your notebook. A check sees only the cell it stands in: put it there, as"
                    " the last line.",
                )
            thing = "method" if "." in defined and problem["found"] else "function"
            found = ", ".join(problem["found"]) or f"no {thing} of another name"
            return Verdict("missing function", f"Expected {problem['wanted']}, found {found}. The names have to be these.")
        if kind == "WrongSignature":
            return Verdict("signature", f"Expected {problem['wanted']}, found {', '.join(problem['found'])}.")
        if kind == "ModuleNotFoundError":
            package = name.partition(".")[0]
            return Verdict(
                "missing package",
                f"The cell imports {package!r}, which is not installed here. It is not needed: what the cell imports from the"
                " start is enough.",
            )
        if kind == "NameError" and name:
            return Verdict("undefined name", self._undefined(name, problem["line"]))
        if kind in ("SystemExit", "KeyboardInterrupt"):
            return Verdict(
                "exit", f"The code ended itself ({kind}){self._at(problem)}\nReturn the result instead of leaving Python."
            )
        if kind == "MemoryError" or "allocate memory" in problem["message"]:
            return Verdict("memory", self._memory() + self._at(problem))
        if "unsupported ScalarType BFloat16" in problem["message"]:
            told = "NumPy knows no bfloat16: x.float() first, then .numpy()."
            return Verdict("exception", f"{kind}: {problem['message']}. {told}{self._at(problem)}")
        if kind == "KeyError":  # its message is the key alone
            return Verdict("exception", f"KeyError: a dict has no key {problem['message']}.{self._at(problem)}")
        return Verdict("exception", f"{kind}: {problem['message']}{self._at(problem)}")

    def _undefined(self, name: str, line: int | None) -> str:
        if self._notebook.get(name) == "module":
            return f"{name} is imported elsewhere in your notebook; import it in this cell too (line {line} uses it)."
        if name in self._notebook:
            return f"{name} lives in your notebook; define it in this cell (line {line} uses it), or pass it as an argument."
        return f"{name} is not defined (line {line} uses it). A check sees this cell alone: define or import it here."

    def _at(self, problem: dict[str, Any]) -> str:
        """The student's own lines, from the function that was called down to the one that failed."""
        shown = [
            f"\n    line {n:>3} | {self._lines[n - 1].strip()}"
            for n, _ in problem.get("calls", [])
            if 0 < n <= len(self._lines)
        ]
        return "".join(dict.fromkeys(shown))  # a recursion repeats its line

    def _memory(self) -> str:
        return f"It needed more memory than the {self._limits.memory_bytes >> 20} MiB a check may use."

    def end(self, outcome: Outcome) -> Verdict:
        if outcome.ended == "time":
            seconds = self._limits.cpu_seconds
            return Verdict(
                "time", f"It did not come back within {seconds:g} seconds and was stopped. Is there a loop that never ends?"
            )
        if outcome.ended == "memory":
            return Verdict("memory", self._memory() + " It was stopped.")
        if outcome.ended == "output":
            limit = self._limits.output_bytes >> 20
            return Verdict(
                "output",
                f"It printed more than {limit} MiB and was stopped. Is there a print in a loop that is long, or never ends?",
            )
        if outcome.status < 0:
            return Verdict("exit", f"Python crashed while running it (signal {-outcome.status}).")
        return Verdict("exit", f"The code ended the Python process (exit status {outcome.status}). Return the result instead.")
