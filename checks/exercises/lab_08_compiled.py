"""Lab 08's kernels and the compiler: what the interpreter runs, a GPU may not. Cases and judge, in the parent only; lab_08.py
gathers them.

The interpreter is Python, so it runs a list, a plain function, a variable that changes its type. The compiler does not, and
without this a cell that passes would fail many cells later.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Second, Verdict
from checks.exercises.lab_08_attention import attend_cases, combine_cases
from checks.exercises.lab_08_first import first_cases

CAPABILITY = 80  # an A100: the oldest that knows bfloat16
DTYPES = ("float32", "float16", "bfloat16")


def compiled(exercise: str) -> Second | None:
    """None where there is a GPU: there the kernels of all cases have been compiled, and run."""
    if torch.cuda.is_available():
        return None
    return Second(f"{exercise} compiled", lambda: [_case(exercise, case) for case in _CASES[exercise]()], judge_compiled)


def _case(exercise: str, case: Case) -> Case:
    return {"exercise": exercise, "case": case, "capability": CAPABILITY, "call": case["call"]}


def _attend() -> list[Case]:
    """A launch with HEAD_DIM below D and several KV heads, with each dtype a cache can have."""
    case = next(case for case in attend_cases(0) if case["HEAD_DIM"] < case["D"] and case["kv_heads"] > 1)
    return [{**case, "dtype": dtype} for dtype in DTYPES]


def _first() -> list[Case]:
    cases = first_cases(0)
    return [next(case for case in cases if case["kernel"] == kernel) for kernel in ("add", "gather")]


def _combine() -> list[Case]:
    return [{**combine_cases(0)[-1], "dtype": dtype} for dtype in DTYPES]


_CASES = {"8.1": _first, "8.3": _attend, "8.4": _combine}


NARROW = (
    "In every case here the result is right. But all addresses are computed in 32 bits, and a cache of 40 GB has 20 billion"
    " numbers: behind 2 billion block * BLOCK_SIZE * TOKEN_STRIDE wraps around, and reads somewhere else. Convert the block"
    " numbers before they are multiplied: tl.load(block_table + ...).to(tl.int64)."
)


NARROW_PRODUCT = (
    "In every case here the result is right. But some addresses, of the keys or of the values, are multiplied in 32 bits, and"
    " a cache of 40 GB has 20 billion numbers: behind 2 billion block * BLOCK_SIZE * TOKEN_STRIDE wraps around, and converting"
    " what comes out does not bring it back. Convert the block numbers before they are multiplied, for keys and for values:"
    " tl.load(block_table + ...).to(tl.int64)."
)


def judge_compiled(case: Case, output: Any) -> Verdict:
    if output["refused"] is None and case["exercise"] == "8.3" and (output["wide"] is False or output["narrow"]):
        return Verdict("wrong value", NARROW_PRODUCT if output["wide"] else NARROW)
    if output["refused"] is None:
        return RIGHT
    line, text, said, plain = output["refused"]
    reason = _reason(f"Unsupported function referenced: <function {plain}" if plain else said)
    where = f"\n    line {line:>3} | {text.strip()}" if line else ""
    dtype = case["case"].get("dtype", "float32")
    return Verdict(
        "does not compile",
        "In the interpreter every case is right. But the compiler, which makes the kernel's code for a GPU (sm_80,"
        f" {dtype}), refuses it:{where}\n{_shortened(said)}{reason}",
    )


def _shortened(said: str) -> str:
    """The compiler's words without Python around them: no addresses, no `AssertionError("...")`."""
    said = re.sub(r" at 0x[0-9a-f]+", "", said)
    inner = re.fullmatch(r"\w+\((['\"])(.*)\1\)", said.strip(), re.DOTALL)
    said = (inner[2] if inner else said).strip()
    return said if len(said) < 200 else said[: said.find(". ", 60) + 1 or 600]


SHAPES = (
    "Sizes in tl.arange, tl.zeros and tl.full are powers of two, known when the kernel is compiled: arguments with"
    " `: tl.constexpr` behind their name, or numbers you write. Mask what is beyond."
)
# What the compiler says, and what that means to someone who wrote Python.
_NUMBER = "Begin with {0} = 0.0 for one number, or {0} = tl.zeros([...], tl.float32) for a vector, not with 0."
_REASONS = [
    (r"f-string", 'A kernel knows no f-strings of its values. Give print the words and the values: print("o", o).'),
    (
        r"Loop-carried variable (\w+) has initial type int32 but is re-assigned to .*fp",
        "In a compiled kernel a variable has one type: what {0} is before the loop it must be after each round. " + _NUMBER,
    ),
    (
        r"initial value for `(\w+)` is of type int32.* redefines it as fp",
        "In a compiled kernel a variable has one type, on whichever way it came. " + _NUMBER,
    ),
    (
        r"(?<!\w)(sum|any|all|pow|sorted|round) is not defined",
        "{0} is Python's own, and no function of a kernel. tl has those that take a vector or a rectangle: tl.sum(x, axis),"
        " tl.max(x, axis).",
    ),
    (r"must have type `?constexpr|must be of type tl\.constexpr", SHAPES),
    (r"must be a power of 2", SHAPES),
    (
        r"Loop-carried variable (\w+) has initial type",
        "In a compiled kernel a variable has one type: what {0} is before the loop it must be after each round. Begin with that"
        " type (tl.zeros([...], tl.float32)), or convert with .to(...) where it is assigned.",
    ),
    (
        r"initial value for `(\w+)` is of type",
        "In a compiled kernel a variable has one type, on whichever way it came: convert {0} with .to(...).",
    ),
    (
        r"Unsupported function referenced: <(?:built-in )?(?:function|class|method) '?([\w.]+)",
        "{0} is a plain Python function. A kernel calls tl's functions, and those with @triton.jit above them.",
    ),
    (
        r"global variable (\w+)",
        "{0} stands outside of the kernel, which sees its arguments and its own names alone. Write the number itself.",
    ),
    (
        r"comprehension|list|dict|unsupported AST node|not supported|unsupported",
        "A kernel knows a small part of Python: assignments, arithmetic, `for ... in range(...)`, `if`, calls of tl. No lists,"
        " no break, no lambda, no try.",
    ),
    (r"Both operands must be same dtype", "tl.dot takes equal dtypes, whatever the cache has: x.to(y.dtype) converts."),
    (r"undefined|is not defined", "A name that is set inside an `if` or a loop must be set before it too."),
]


def _reason(said: str) -> str:
    for pattern, why in _REASONS:
        if found := re.search(pattern, said):
            return "\n" + why.format(*found.groups())
    return ""
