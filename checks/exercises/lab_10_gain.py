"""Exercise 10.1: what speculation can gain. Cases and judge, in the parent only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import kind_of


def gain_cases(seed: int) -> list[Case]:
    rng = random.Random(f"10.1:{seed}")
    tokens = [(0.5, 1), (0.5, 3), (0.0, 3), (1.0, 3), (0.8, 1), (0.8, 0), (1.0, 0), (0.25, 8)]
    tokens += [(round(rng.uniform(0.1, 0.95), 2), rng.randint(2, 12)) for _ in range(3)]
    speedups: list[tuple[float, ...]] = [
        (0.5, 1, 0.0),
        (0.5, 3, 0.0),
        (0.5, 1, 0.25),
        (0.5, 3, 0.125),
        (0.0, 4, 0.25),
        (1.0, 4, 0.0),
        (1.0, 4, 1.0),
        (0.75, 0, 0.5),
        (0.5, 3, 0.0, 1.5),
        (0.5, 3, 0.125, 2.0),
    ]
    speedups += [
        (round(rng.uniform(0.1, 0.95), 2), rng.randint(2, 8), round(rng.uniform(0.02, 0.4), 2), round(rng.uniform(1.1, 4), 2))
        for _ in range(3)
    ]
    return [_gain_case("expected_tokens", *a) for a in tokens] + [_gain_case("expected_speedup", *a) for a in speedups]


def _gain_case(function: str, *arguments: float) -> Case:
    return {"function": function, "arguments": list(arguments), "call": f"{function}({', '.join(f'{a:g}' for a in arguments)})"}


def judge_gain(case: Case, output: Any) -> Verdict:
    if output is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not isinstance(output, (int, float)) or isinstance(output, bool):
        return Verdict("wrong type", f"It should return a number, and returned {kind_of(output)}.")
    wanted: float
    why: Callable[..., str]
    if case["function"] == "expected_tokens":
        wanted, why = _tokens(*case["arguments"]), _why_tokens
    else:
        wanted, why = _speedup(*case["arguments"]), _why_speedup
    if math.isclose(output, wanted, rel_tol=1e-6):
        return RIGHT
    return Verdict(
        "wrong value", f"It returned {output:.6g}, and should return {wanted:.6g}. {why(output, *case['arguments'])}"
    )


def _tokens(acceptance: float, k: int) -> float:
    return sum(acceptance**i for i in range(k + 1))


def _speedup(acceptance: float, k: int, cost_ratio: float, verify_ratio: float = 1.0) -> float:
    return _tokens(acceptance, k) / (k * cost_ratio + verify_ratio)


def _is(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-12)


def _why_tokens(got: float, a: float, k: int) -> str:
    terms = " + ".join(["1", *(f"{a:g}" + (f"^{i}" if i > 1 else "") for i in range(1, k + 1))][:5])
    right = f"One token comes in any case, draft i only if the first i are all right: {terms}{' + ...' if k > 4 else ''}."
    if _is(got, _tokens(a, k) - 1):
        return f"The target's own token is missing. {right}"
    if _is(got, 1 + a * k) or _is(got, a * k):
        return f"A draft counts only if all before it are right, too: the second one with probability {a:g} x {a:g}. {right}"
    if k and _is(got, _tokens(a, k - 1)):
        return f"The last draft is missing. {right}"
    if _is(got, _tokens(a, k + 1)):
        return f"One term too many. {right}"
    if _is(got, k + 1):
        return f"That is the most there can be, if all drafts are right. {right}"
    return right


def _why_speedup(got: float, a: float, k: int, c: float, v: float = 1.0) -> str:
    tokens = _tokens(a, k)
    right = f"{tokens:.4g} tokens in the time of {k} drafts at {c:g} and a verification at {v:g}, in units of one plain step."
    if v != 1 and _is(got, tokens / (k * c + 1)):
        return f"verify_ratio is left out. {right}"
    if v != 1 and _is(got, tokens / ((k * c + 1) * v)):
        return f"verify_ratio is of the target's step alone, drafting costs the same as before. {right}"
    if _is(got, tokens / (c + v)):
        return f"Each of the {k} drafts costs {c:g}. {right}"
    if _is(got, tokens / ((k + 1) * c + v)):
        return f"The target's own token is not drafted. {right}"
    if k * c and _is(got, tokens / (k * c)):
        return f"The verification takes time, too. {right}"
    if _is(got, (k * c + v) / tokens):
        return f"That is the time of a token. The speed-up is its inverse. {right}"
    if _is(got, tokens):
        return f"That is how many tokens; now divide by how long they take. {right}"
    return right
