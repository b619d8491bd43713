"""What a student is told, in fixed sentences. Nothing here comes from a submission, and nothing names a case's answer.

Statuses, incidents and what hidden tests may say each have one sentence; what is not in these lists is told in general words,
so a record that says too much cannot be shown by mistake.
"""

from __future__ import annotations

import builtins
import re
from functools import cache
from pathlib import Path

import checks.exercises
from checks.exercises import CATEGORIES

EXERCISES = Path(checks.exercises.__file__).parent

PREFIX = "hidden tests: "
HIDDEN_WORDS = CATEGORIES | {
    "wrong result", "too slow, or it never ended", "too much memory", "too much output", "it ended Python",
    "an error was raised", "failed",
}  # fmt: skip

# status -> (class of pages.py, what it is called)
STATUS = {
    "passed": ("good", "✓ passed"),
    "failed": ("bad", "✗ not right"),
    "not_attempted": ("open", "○ not attempted"),
    "missing": ("open", "○ not in the notebook"),
    "copied": ("bad", "✗ taken from minivllm"),
    "time_limit": ("bad", "✗ over the time limit"),
    "memory_limit": ("bad", "✗ over the memory limit"),
    "output_limit": ("bad", "✗ printed too much"),
    "crashed": ("bad", "✗ ended the process"),
    "error": ("open", "○ could not be graded yet"),
    "right": ("good", "✓ right"),
    "wrong": ("bad", "✗ wrong"),
    "not_answered": ("open", "○ not answered"),
    "answered": ("good", "✓ answered"),
}
UNKNOWN_STATUS = ("open", "○ see your instructor")

# Told where the record has no message of its own.
EXPLAINED = {
    "missing": "No cell of this exercise was found in what you handed in.",
    "copied": "The answer is minivllm's own. The exercise is to write it.",
    "time_limit": "Your code was stopped: it ran longer than a check may. Look for a loop that does not end.",
    "memory_limit": "Your code was stopped: it used more memory than a check may.",
    "output_limit": "Your code was stopped: it printed without end.",
    "crashed": "Your code ended the process it ran in (sys.exit, os._exit, or a crash).",
    "error": "This is not your doing. Your instructor will grade it again.",
}

INCIDENTS = {
    "check_changed": "A check's cell differs from the official one. The official one was used.",
    "check_deleted": "A check was missing. The official one was used; the maximum is the same for everybody.",
    "skip_tag": "A cell was marked to be skipped, or to be allowed to fail. The mark was not used.",
    "duplicate_cell": "An exercise is in the notebook more than once. The last cell that is not a stub was graded.",
    "duplicate_submission": "There is more than one notebook of this lab. The better one counts.",
    "several_files": "More than one notebook of this lab was handed in. The latest was graded.",
    "renamed": "The notebook does not say which lab it is. It was recognized by its exercises.",
    "solution_notebook": "This is the solution notebook of the lab, or was made from it. Your instructor will look at it.",
    "copied": "An answer is minivllm's own, and counts nothing.",
    "crashed": "An answer ended the process it ran in.",
    "unreadable": "A file could not be read as a notebook, and was not graded.",
    "not_json": "A file is not a notebook (it is no JSON, or was cut off while it was saved), and was not graded.",
    "too_large": "A file or a cell is too large to be graded. Clear the notebook's outputs and save it again.",
    "empty": "A file is empty, and was not graded.",
    "wrong_version": "The notebook is of another version of the lab. Your answers were put into the version that is graded.",
    "unknown_lab": "A notebook does not say which lab it is, and was not graded.",
    "forged_file": "A file came along that looks like one of the grader's. It was not used.",
    "time_limit": "Something in the notebook ran longer than it may, and was stopped.",
    "memory_limit": "Something in the notebook used more memory than it may, and was stopped.",
    "output_limit": "Something in the notebook printed more than it may, and was stopped.",
    "tampering": "Something in the notebook tried to change how it is checked. Your instructor will look at it.",
    "old_format": "The notebook was saved in an older format. It was read all the same.",
}
OTHER_INCIDENT = "Your instructor will look at something in this file."

CELL_WORDS = ("its check was red", "it took too long", "an error was raised", "the notebook did not come this far")


# What a whole class may be shown of a check's message, by the verdict's category. A judge's messages are its own, but for the
# texts that it quotes; those of the other categories quote the cell, or what its code raised.
KINDS = {  # for a message that one student alone got: it may be known whose it is
    "wrong type": "The result is of another type than asked for.",
    "wrong shape": "The result has another shape than asked for.",
    "wrong value": "The result is another than asked for.",
    "wrong calls": "Something is called otherwise than asked for.",
    "input changed": "What was given to the function was changed by it.",
}
_JUDGED = tuple(KINDS)
_FOR_THE_CLASS = {
    "syntax": "The cell does not parse.",
    "missing function": "No function of the name that is asked for.",
    "signature": "The function takes other arguments than asked for.",
    "missing package": "The cell imports a package that is not there.",
    "undefined name": "A name is used that the cell does not define.",
    "does not compile": "It does not compile.",
}
_RAISED = re.compile(r"\braised ([^()]*?) \(\".*\"\)", re.DOTALL)  # how judges tell what the student's code raised
_RAISED_BARE = re.compile(r"\braised (?!nothing\b|an?\b|no\b|by\b|in\b|at\b|with\b|for\b)([^\W\d]\w*(?:\.\w+)*)")
_QUOTED = re.compile(r"""(?<!\w)[bBrRuU]{0,2}(?:'(?:[^'\\\n]|\\.){4,}'|"(?:[^"\\\n]|\\.){4,}")(?!\w)""")  # not a request's 'A'
_CUT = re.compile(r"""(?<!\w)[bBrRuU]{0,2}['"][^'"]{4,}\Z""")  # a text that was cut before its closing quotation mark
_WORD = re.compile(r"\b[^\W\d]\w*")
_TYPES = ("Tensor", "tensor", "ndarray", "NoneType", "function", "method", "generator", "coroutine", "module", "deque", "array")
_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64")
_UNREADABLE = "The result could not be read"  # evaluate.py, before the type and the message of an error


def for_the_class(category: str, message: str) -> str:
    """A check's message without the words of a student's code; "" where there is nothing to be said beyond the status. Texts
    and the names of errors go; so does every word that stands nowhere in the checks, since it came from the cell."""
    if category == "exception":
        name = message.partition(":")[0]
        return f"{name} was raised." if _is_pythons(name) else "An error that is none of Python's own was raised."
    if category not in _JUDGED:
        return _FOR_THE_CLASS.get(category, "")
    if message.startswith(_UNREADABLE):
        return f"{_UNREADABLE}."
    raised = _RAISED.sub(lambda m: f"raised {m[1]}" if _is_pythons(m[1]) else "raised an error of its own", message)
    raised = _RAISED_BARE.sub(lambda m: m[0] if _is_pythons(m[1]) else "raised an error of its own", raised)
    plain = _CUT.sub("(a text)", _QUOTED.sub("(a text)", raised))
    return _WORD.sub(lambda m: m[0] if m[0] in _known_words() else "…", plain)


@cache
def _known_words() -> frozenset[str]:
    """The words of the checks themselves, and of Python."""
    files = sorted(path for path in EXERCISES.iterdir() if path.suffix in (".py", ".yaml"))
    written = (word for path in files for word in _WORD.findall(path.read_text(encoding="utf-8")))
    return frozenset((*written, *dir(builtins), *_TYPES, *_DTYPES, "text", "nan", "inf"))


def _is_pythons(error: str) -> bool:
    """Whether it is the name of one of Python's errors: a student's own may be called anything."""
    known = getattr(builtins, error, None)
    return isinstance(known, type) and issubclass(known, BaseException)


def cell_words(said: str) -> str:
    """What may be shown of why a cell of the rebuilt notebook did not run."""
    return said if said in CELL_WORDS else "it did not run"


def hidden_words(said: str) -> str:
    """What may be shown of a record's `hidden`: "" or one of a fixed set of phrases."""
    if not said:
        return ""
    word = said.removeprefix(PREFIX)
    return f"{PREFIX}{word}" if word in HIDDEN_WORDS else f"{PREFIX}failed"
