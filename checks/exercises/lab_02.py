"""Lab 02's checks: greedy generation, temperature and top-k, top-p. In the parent only.

The judges do not compare with one right answer: they know, for each row, which tokens must stay, which may, and how many at
least. So every right way of writing it passes, ties included, and a wrong one can be told what it did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Check, Verdict
from checks.exercises.lab_02_run import best_next_tokens
from checks.exercises.words import count, described, numbers, times
from minivllm.sampling_params import GREEDY_EPS

NEG_INF = float("-inf")
OFF_TEXT = "this setting is off"

# ---------------------------------------------------------------------------------------------------- 2.1 greedy_generate


def generate_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"2.1:{seed}")
    shapes = [(1, 1), (2, 1), (2, 2), (3, 0), (3, 5), (5, 8), (9 * scale, 20 * scale)]
    return [_generate_case(rng, length, new) for length, new in shapes]


def _generate_case(rng: random.Random, length: int, new: int) -> Case:
    """One prompt whose right continuation cannot be had by looking at the wrong row or at the newest token alone."""
    while True:
        case: Case = {
            "vocab_size": rng.choice([7, 11, 17]),
            "salt": rng.randrange(1000),
            "prompt": [rng.randrange(7) for _ in range(length)],
            "max_new_tokens": new,
        }
        case["call"] = f"greedy_generate(model, {case['prompt']}, {new})"
        if new == 0 or length == 1 or _favourites(case, case["prompt"])[0] != _favourites(case, case["prompt"])[-1]:
            return case


def _favourites(case: Case, token_ids: list[int]) -> list[int]:
    return best_next_tokens(token_ids, case["vocab_size"], case["salt"])


def judge_generate(case: Case, output: Any) -> Verdict:
    produced = new_tokens(case, output)
    if isinstance(produced, Verdict):
        return produced
    prompt = case["prompt"]
    return (
        _judge_calls(prompt, case["max_new_tokens"], produced, output["calls"])
        or _judge_tokens(case, produced)
        or _judge_prompt(prompt, output["prompt"])
    )


def new_tokens(case: Case, output: Any) -> list[int] | Verdict:
    """What 2.1 and 3.2 ask for, a list of token ids without the prompt's; or what is returned instead."""
    prompt, new, returned = case["prompt"], case["max_new_tokens"], output["returned"]
    if returned is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if output["tensors"]:
        return Verdict("wrong type", _tensors_reason(output["tensors"]))
    if not isinstance(returned, (list, tuple)) or not all(type(t) is int for t in returned):
        return Verdict("wrong type", f"It should return a list of token ids (integers), and returned {described(returned)}.")
    produced = list(returned)
    if produced[: len(prompt)] == prompt and len(produced) == len(prompt) + new and new:
        return Verdict("wrong value", f"It returned the prompt as well: {produced}. Return the new tokens only ({new}).")
    return produced


def _tensors_reason(tensors: str) -> str:
    """Tokens that are right, and are tensors."""
    if tensors == "whole":
        return "It should return a list of integers, and returned a tensor: .tolist() makes a list of it."
    return "It should return a list of integers, and returned a list of tensors of one number each: int(...) makes one of each."


def _judge_calls(prompt: list[int], new: int, produced: list[int], calls: list[list[int]]) -> Verdict | None:
    """What the model was shown, call by call."""
    for number, seen in enumerate(calls[:new]):
        wanted = prompt + produced[:number]
        if seen == wanted:
            continue
        told = f"Call {number + 1} of the model saw {seen}, and should have seen {wanted}"
        if number and seen == wanted[-1:]:
            why = ": only the newest token. Nothing is remembered between calls (that is Lab 03), so pass the whole sequence."
        elif number and seen == calls[number - 1]:
            why = ": the same as the call before. Append each new token before the next call."
        elif len(seen) < len(wanted):
            why = ": tokens are missing. The model has to see the prompt and every token so far."
        else:
            why = ", prompt first, then the new tokens in order."
        return Verdict("wrong calls", told + why)
    told = f"It called the model {times(len(calls))} to make {count(new, 'token')}."
    if len(calls) > new:
        extra = "No call is needed at all." if new == 0 else "The last call's logits are not used."
        if new and calls[-1] == calls[-2]:
            extra = "Two calls saw the same tokens. One call for each token is enough, and none before the loop."
        return Verdict("wrong calls", f"{told} {extra}")
    if len(produced) != new:
        hint = " How often does the loop run? (Nothing ends it early: end tokens come later.)" if len(produced) < new else ""
        return Verdict(
            "wrong value", f"It returned {count(len(produced), 'token')}: {produced}. It should return exactly {new}.{hint}"
        )
    if len(calls) < new:
        return Verdict("wrong calls", f"{told} Each token needs a call.")
    return None


def _judge_tokens(case: Case, produced: list[int]) -> Verdict | None:
    """Each token must be the favourite of the last row for the sequence it was computed from."""
    for number, token in enumerate(produced):
        sequence = case["prompt"] + produced[:number]
        rows = _favourites(case, sequence)
        if token == rows[-1]:
            continue
        V = case["vocab_size"]
        if token == (rows[-1] - 1) % V:
            why = "That is the smallest logit of the last row (argmin). Take the largest."
        elif token == rows[0] and len(rows) > 1:
            why = "That is the favourite of row 0 (or of all rows at once: argmax of the whole matrix)."
            why += " Row t predicts what follows token t, so the next token is in the last row."
        elif token >= V:
            why = f"There are only {V} tokens. Was argmax taken over all rows at once?"
        elif len(rows) > 1 and token in rows[:-1]:
            why = f"That is the favourite of row {rows.index(token)}. What comes next is in the last row, logits[-1]."
        else:
            why = "The next token is the argmax of the last row, logits[-1]."
        return Verdict("wrong value", f"After {sequence} it chose token {token}, and should choose {rows[-1]}. {why}")
    return None


def _judge_prompt(before: list[int], after: Any) -> Verdict:
    if after == before:
        return RIGHT
    return Verdict(
        "input changed",
        f"The tokens are right, but the caller's list was changed from {before} to {after}."
        " Work on a copy: tokens = list(token_ids).",
    )


# ---------------------------------------------------------------------------------- 2.2 and 2.3: what the three have in common


@dataclass(frozen=True)
class Allowed:
    """What a row may look like afterwards. `must` stay, `may` stay (they tie at the boundary), at least `least` in all. `why`
    says how the boundary came about, in numbers."""

    must: frozenset[int]
    may: frozenset[int]
    least: int
    why: str


def _judge_form(case: Case, output: Any) -> Verdict | None:
    """Type, shape, NaN, and the inputs left as they were."""
    returned, logits = output["returned"], torch.tensor(case["logits"])
    if returned is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not isinstance(returned, torch.Tensor):
        return Verdict("wrong type", f"It should return a tensor of logits, and returned {described(returned)}.")
    if returned.shape != logits.shape:
        return Verdict("wrong shape", f"It returned shape {list(returned.shape)} for logits of shape {list(logits.shape)}.")
    if returned.dtype != torch.float32:
        return Verdict("wrong type", f"It returned {returned.dtype}; logits stay float32.")
    for name, before in (("logits", logits), ("setting", torch.tensor(case["setting"]))):
        if not torch.equal(output[name], before):
            what = "logits" if name == "logits" else case["call"].rpartition(", ")[2].partition("=")[0]
            return Verdict(
                "input changed",
                f"It changed its input {what} in place. Return a new tensor: names that end in an underscore"
                " (div_, masked_fill_) write into what they got.",
            )
    if returned.isnan().any():
        row = int(returned.isnan().any(-1).nonzero()[0])
        return Verdict("wrong value", f"Row {row} has NaN in it: {_numbers(returned[row])}. {_nan_reason(case, row)}")
    return None


def _nan_reason(case: Case, row: int) -> str:
    if case["function"] == "apply_temperature" and case["setting"][row] == 0:
        return "0 / 0, and -inf / 0 where a token was removed before: a row at temperature 0 must not be divided."
    return "Removed tokens (-inf) are in the input. -inf - -inf, and -inf * 0, are NaN."


def _judge_rows(case: Case, output: Any) -> Verdict:
    """Rows filtered by top-k or top-p."""
    form = _judge_form(case, output)
    if form:
        return form
    logits, returned = torch.tensor(case["logits"]), output["returned"]
    allowed = [_allowed(case, row) for row in range(len(logits))]
    for row, rule in enumerate(allowed):
        kept = frozenset((returned[row] > NEG_INF).nonzero().flatten().tolist())
        if rule.must <= kept <= rule.must | rule.may and len(kept) >= rule.least:
            changed = [t for t in kept if returned[row, t] != logits[row, t]]
            if changed:
                return _changed_value(case, row, logits[row], returned[row], changed[0])
            continue
        why = _kept_reason(case, row, allowed, kept, returned[row])
        return Verdict("wrong value", "\n".join([*_picture(case, row), *_kept_lines(rule, kept), "", why]))
    return RIGHT


def _allowed(case: Case, row: int, setting: float | None = None) -> Allowed:
    logits = case["logits"][row]
    setting = case["setting"][row] if setting is None else setting
    if case["function"] == "apply_top_k":
        return _allowed_top_k(logits, int(setting))
    return _allowed_top_p(logits, setting)


def _finite(logits: list[float]) -> frozenset[int]:
    return frozenset(t for t, x in enumerate(logits) if x > NEG_INF)


def _tied(logits: list[float], boundary: float, least: int, why: str) -> Allowed:
    must = frozenset(t for t, x in enumerate(logits) if x > boundary)
    may = frozenset(t for t, x in enumerate(logits) if x == boundary and x > NEG_INF)
    return Allowed(must, may, least, why)


def _allowed_top_k(logits: list[float], k: int) -> Allowed:
    there = _finite(logits)
    if k <= 0 or k >= len(logits):
        return Allowed(there, frozenset(), len(there), OFF_TEXT)
    boundary = sorted(logits, reverse=True)[k - 1]
    return _tied(logits, boundary, min(k, len(there)), f"the {k} largest; number {k} has logit {boundary:g}")


def _allowed_top_p(logits: list[float], p: float) -> Allowed:
    there = _finite(logits)
    if p >= 1:
        return Allowed(there, frozenset(), len(there), OFF_TEXT)
    probs, total = _probabilities(logits), 0.0
    order = sorted(there, key=lambda t: -probs[t])
    count, token = 0, order[0]
    while count < len(order) and (total < p or not count):  # one token stays, however small p is
        token = order[count]
        total, count = total + probs[token], count + 1
    terms = " + ".join(f"{probs[t]:.2f}" for t in order[:count]) if count <= 6 else f"the {count} most probable"
    return _tied(logits, logits[token], count, f"{terms} = {total:.2f}, the first sum that reaches {p:g}")


def _probabilities(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def _kept_reason(case: Case, row: int, allowed: list[Allowed], kept: frozenset[int], returned: torch.Tensor) -> str:
    """The likeliest mistake behind a wrong set of tokens."""
    rule, before = allowed[row], torch.tensor(case["logits"][row])
    removed = sorted(kept - rule.must - rule.may)
    values = returned[returned > NEG_INF].sort(descending=True).values
    unmoved = bool((returned == before)[sorted(kept)].all())
    if not unmoved and torch.equal(values, before.sort(descending=True).values[: len(values)]):
        return "These are logits of this row in other places: it came back sorted. Token t's logit stays in column t."
    if removed and bool((returned != before)[removed].all()):
        return f"Tokens to be removed have logit {float(returned[removed[0]]):g}. A removed token has logit -inf, nothing else."
    if rule.why is OFF_TEXT:
        if case["function"] == "apply_top_p":
            return "p >= 1 switches the filter off: the row comes back as it was, however rounding adds the probabilities up."
        return "k <= 0, or k >= V, switches the filter off for its row: the row comes back as it was."
    if not kept:
        return "Nothing is left of this row. At least one token always stays."
    for setting in set(case["setting"]) - {case["setting"][row]}:
        other = _allowed(case, row, setting)
        if other.must <= kept <= other.must | other.may and len(kept) >= other.least:
            return f"That is what {setting:g} would keep, another row's setting. Each row has its own."
    return _set_reason(case, row, rule, kept)


def _set_reason(case: Case, row: int, rule: Allowed, kept: frozenset[int]) -> str:
    logits = case["logits"][row]
    order = sorted(_finite(logits), key=lambda t: -logits[t])
    if kept == frozenset(order[: rule.least - 1]):
        if case["function"] == "apply_top_p":
            return "The token that crosses p is missing. It stays: without it the sum is still below p."
        return "One too few: the k-th largest itself stays."
    if kept == frozenset(order[: rule.least + 1]):
        return "One too many: it stopped one token late."
    ascending, unscattered = kept == frozenset(order[-len(kept) :]), kept == frozenset(range(rule.least))
    if ascending and unscattered:
        return "It kept the least likely tokens: an ascending sort, or a mask in sorted order not brought back (scatter)?"
    if unscattered:
        return "It kept the first columns. A mask made in sorted order must be brought back to the vocabulary's (scatter)."
    if ascending:
        return "It kept the least likely tokens. Was it an ascending sort?"
    if len(kept) < rule.least:
        return f"At least {rule.least} tokens stay, and it kept {len(kept)}."
    if len(kept) == rule.least:
        return "The number is right, the tokens are not. Was a mask made in sorted order, and not brought back (scatter)?"
    return "It kept too many tokens."


def _changed_value(case: Case, row: int, before: torch.Tensor, after: torch.Tensor, token: int) -> Verdict:
    kept = after > NEG_INF
    if torch.allclose(after[kept], before.log_softmax(-1)[kept], atol=1e-4):
        why = "That is log_softmax: the same up to a constant, and to rounding. Return the logits that came in."
    elif torch.allclose(after[kept], before.softmax(-1)[kept], atol=1e-4):
        why = "Those are the probabilities. Return logits; the sampler takes the softmax."
    elif case["setting"][row] >= 1 and _allowed(case, row).why is OFF_TEXT:
        why = "This row's setting is off: it comes back as it was."
    else:
        why = "Tokens that stay keep their logit exactly."
    told = f"Row {row}: token {token} stays, but its logit went from {float(before[token]):.9g} to {float(after[token]):.9g}."
    return Verdict("wrong value", f"{told} {why}")


def _picture(case: Case, row: int) -> Iterator[str]:
    """The row as a small table, its likeliest tokens first if it is long."""
    logits, top_p = case["logits"][row], case["function"] == "apply_top_p"
    values = _probabilities(logits) if top_p else logits
    order = list(range(len(logits))) if len(logits) <= 8 else sorted(range(len(logits)), key=lambda t: -logits[t])[:8]
    yield f"Row {row}" + ("" if len(logits) <= 8 else f" (the 8 likeliest of {len(logits)} tokens)") + ":"
    yield "    token        " + " ".join(f"{t:>6}" for t in order)
    yield f"    {'probability' if top_p else 'logit':<12} " + " ".join(f"{_short(values[t]):>6}" for t in order)
    yield f"    {'p' if top_p else 'k':<12} {case['setting'][row]:>6g}"


def _kept_lines(rule: Allowed, kept: frozenset[int]) -> Iterator[str]:
    yield f"    should stay  {_set(rule.must | rule.may)}  ({rule.why})" + (
        f", at least {rule.least} of them" if len(rule.must | rule.may) > rule.least else ""
    )
    yield f"    you kept     {_set(kept)}"


# ------------------------------------------------------------------------------------------------ 2.2 temperature and top-k


def temperature_top_k_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"2.2:{seed}")
    by_hand: list[tuple[str, list[list[float]], list[float]]] = [
        ("apply_temperature", [[1.0, 2.0, 4.0]], [2.0]),
        ("apply_temperature", [[1.0, 2.0, 4.0]], [0.0]),
        ("apply_temperature", [[1.0, 2.0, 4.0]], [1e-6]),
        ("apply_temperature", [[1.0, 2.0, 4.0]], [1e-40]),
        ("apply_temperature", [[1.0, 0.0, 2.0], [1.0, 0.0, 2.0], [3.0, 1.0, -2.0]], [0.5, 0.0, 1.0]),
        ("apply_temperature", [[NEG_INF, 2.0, 1.0, 0.0], [NEG_INF, 2.0, 1.0, 0.0]], [0.0, 0.7]),
        ("apply_top_k", [[1.0, 3.0, 2.0]], [1]),
        ("apply_top_k", [[1.0, 3.0, 2.0, 0.0]], [2]),
        ("apply_top_k", [[1.0, 3.0, 2.0]], [0]),
        ("apply_top_k", [[1.0, 3.0, 2.0]], [-1]),
        ("apply_top_k", [[1.0, 3.0, 2.0]], [3]),
        ("apply_top_k", [[1.0, 3.0, 2.0]], [50]),
        ("apply_top_k", [[1.0, 3.0, 2.0, 0.0], [4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]], [1, 3, 0]),
        ("apply_top_k", [[2.0, 5.0, 5.0, 5.0, 1.0]], [2]),
        ("apply_top_k", [[NEG_INF, 3.0, NEG_INF, 1.0]], [3]),
        ("apply_top_k", [[NEG_INF, 3.0, NEG_INF, 1.0], [-5.0, -1.0, -3.0, -2.0]], [1, 2]),
    ]
    cases = [_logits_case(*parts) for parts in by_hand]
    for B, V in ((2, 6), (4, 30), (8, 1000 * scale)):
        logits = [[round(rng.gauss(0, 3), 3) for _ in range(V)] for _ in range(B)]
        cases.append(_logits_case("apply_temperature", logits, [rng.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(B)]))
        cases.append(_logits_case("apply_top_k", logits, [rng.choice([0, 1, 2, V // 2, V - 1, V]) for _ in range(B)]))
    return cases


def _logits_case(function: str, logits: list[list[float]], setting: list[float]) -> Case:
    name = {"apply_temperature": "temperature", "apply_top_k": "k", "apply_top_p": "p"}[function]
    rows = ", ".join(f"[{', '.join(f'{x:.4g}' for x in row)}]" for row in logits)
    shown = f"[{rows}]" if len(logits) * len(logits[0]) <= 16 else f"<{len(logits)} x {len(logits[0])}>"
    return {"function": function, "logits": logits, "setting": setting, "call": f"{function}(logits={shown}, {name}={setting})"}


def judge_temperature_top_k(case: Case, output: Any) -> Verdict:
    return _judge_temperature(case, output) if case["function"] == "apply_temperature" else _judge_rows(case, output)


def _judge_temperature(case: Case, output: Any) -> Verdict:
    form = _judge_form(case, output)
    if form:
        return form
    for row, temperature in enumerate(case["setting"]):
        before, after = torch.tensor(case["logits"][row]), output["returned"][row]
        if temperature < GREEDY_EPS:
            if int(after.argmax()) != int(before.argmax()) or bool((after == float("inf")).any()):
                told = f"Row {row} has temperature {temperature:g} and came back as {_numbers(after)}."
                return Verdict(
                    "wrong value", f"{told} It is a greedy row: its largest logit must stay token {int(before.argmax())}'s."
                )
        elif not torch.allclose(after, before / temperature, rtol=1e-4, atol=1e-5):
            return Verdict("wrong value", _temperature_reason(case, row, before, after, temperature))
    for row, temperature in enumerate(case["setting"]):
        before, after = torch.tensor(case["logits"][row]), output["returned"][row]
        if temperature < GREEDY_EPS and not torch.equal(after, before):
            return Verdict("wrong value", _greedy_reason(row, before, after, temperature))
    return RIGHT


def _greedy_reason(row: int, before: torch.Tensor, after: torch.Tensor, temperature: float) -> str:
    told = f"Row {row} has temperature {temperature:g}, below GREEDY_EPS ({GREEDY_EPS:g}): {_numbers(before)} should come back"
    told += f" as it was, and became {_numbers(after)}."
    if torch.allclose(after, before / GREEDY_EPS):
        return told + " It was divided by GREEDY_EPS: such a row is not divided at all."
    if temperature and torch.allclose(after, before / temperature):
        return told + " It was divided. A temperature need not be 0 to mean greedy: compare with GREEDY_EPS."
    return told


def _temperature_reason(case: Case, row: int, before: torch.Tensor, after: torch.Tensor, temperature: float) -> str:
    told = (
        f"Row {row}, temperature {temperature:g}: logits {_numbers(before)} should become {_numbers(before / temperature)},"
        f" and became {_numbers(after)}."
    )
    if torch.allclose(after, before * temperature, rtol=1e-4, atol=1e-5):
        return told + " It multiplied. A low temperature makes the differences larger: divide."
    if torch.allclose(after, (before / temperature).softmax(-1), atol=1e-4):
        return told + " Those are probabilities. Return logits; the sampler takes the softmax."
    settings = torch.tensor(case["setting"])
    if len(settings) == len(before) > 1 and torch.allclose(after, before / settings.clamp(min=1e-5), rtol=1e-4, atol=1e-5):
        return (
            told + " Columns were divided, not rows: [B, V] / [B] lines the settings up with the tokens. temperature[:, None]."
        )
    for other in case["setting"]:
        if other and torch.allclose(after, before / other, rtol=1e-4, atol=1e-5):
            return (
                told + f" It was divided by {other:g}, another row's temperature. Each row has its own: temperature[:, None]."
            )
    return told


# ---------------------------------------------------------------------------------------------------------------- 2.3 top-p


def top_p_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"2.3:{seed}")
    tenths = [0.1, 0.2, 0.3, 0.4]
    by_hand: list[tuple[list[list[float]], list[float]]] = [
        ([_logs(tenths)], [0.6]),
        ([_logs(tenths)], [0.05]),
        ([_logs(tenths)], [0.95]),
        ([_logs(tenths)], [1.0]),
        ([_logs([0.4, 0.1, 0.3, 0.2])], [0.6]),
        ([_logs(tenths), _logs(tenths[::-1]), _logs([0.05, 0.9, 0.03, 0.02])], [0.6, 0.35, 0.8]),
        ([_logs([0.25] * 4)], [0.6]),
        ([_logs([0.2, 0.5, 0.2, 0.1])], [0.6]),
        ([[NEG_INF, *_logs([0.5, 0.3, 0.2])], [NEG_INF, NEG_INF, 1.5, NEG_INF]], [0.7, 0.5]),
        ([[x + 7.5 for x in _logs(tenths)], [x - 20.0 for x in _logs(tenths)]], [0.6, 1.0]),
        ([[10.0, *[-9.0] * 5, -12.0]], [1.0]),
        ([[1.0, 0.0, -150.0]], [1.0]),  # a probability that is 0 in float32
        ([_logs([0.3, 0.5, 0.2])], [1e-9]),  # 1 - p is 1 in float32
    ]
    exact = [0.0, math.log(2), 0.0]  # 0.25, 0.5, 0.25: a sum that reaches p exactly, where this machine's exp is exact too
    if torch.tensor(exact).softmax(-1)[1] == 0.5:
        by_hand.append(([exact], [0.5]))
    cases = [_logits_case("apply_top_p", logits, p) for logits, p in by_hand]
    for B, V in ((2, 6), (4, 40), (8, 1000 * scale)):
        logits = [[round(rng.gauss(0, 3), 3) for _ in range(V)] for _ in range(B)]
        logits[0] = [30.0, *[round(rng.gauss(-8, 1), 3) for _ in range(V - 1)]]  # a tail that rounding swallows
        p = [1.0, *[_clear_p(rng, row) for row in logits[1:]]]
        cases.append(_logits_case("apply_top_p", logits, p))
    return cases


def _logs(probs: list[float]) -> list[float]:
    return [math.log(p) for p in probs]


def _clear_p(rng: random.Random, logits: list[float]) -> float:
    """A p that no sum of probabilities comes close to, so that float32 rounding cannot decide the case."""
    sums, total = [], 0.0
    for probability in sorted(_probabilities(logits), reverse=True):
        total += probability
        sums.append(total)
    while True:
        p = round(rng.uniform(0.1, 0.98), 4)
        if all(abs(p - s) > 2e-5 for s in sums):
            return p


# ------------------------------------------------------------------------------------------------------------------- words


def _set(tokens: frozenset[int]) -> str:
    if not tokens:
        return "no token"
    shown = ", ".join(map(str, sorted(tokens)[:8]))
    return f"token{'s' if len(tokens) > 1 else ''} {shown}" + (f", ... ({len(tokens)} in all)" if len(tokens) > 8 else "")


_numbers = partial(numbers, n=8, spec=".4g")


def _short(value: float) -> str:
    return "-inf" if value == NEG_INF else f"{value:.2f}"


CHECKS = {
    "2.1": Check(
        cases=generate_cases,
        judge=judge_generate,
        minutes=10,
        difficulty=1,
        hints=(
            "One round of the loop: give the model the whole sequence, look at one row of the logits, append one token.",
            "Row t of the logits predicts what comes after token t. The newest token is the last one, so you want `logits[-1]`."
            " The model takes a tensor: `torch.tensor(tokens)`; `.item()` turns the argmax back into a Python int.",
            "tokens = list(token_ids)\nrepeat max_new_tokens times:\n    logits = model(torch.tensor(tokens))\n"
            "    append the argmax of logits[-1] to tokens\nreturn what was added: tokens[len(token_ids):]",
        ),
    ),
    "2.2": Check(
        cases=temperature_top_k_cases,
        judge=judge_temperature_top_k,
        minutes=12,
        difficulty=2,
        hints=(
            "Both are one line for one row. What makes them interesting is the batch: logits are [B, V], the setting is [B],"
            " and `setting[:, None]` is [B, 1], which meets every token of its row.",
            "Temperature: replace the temperatures that are too small by 1 before dividing (`torch.where`). Top-k: find the"
            " value of each row's k-th largest logit, then remove what is smaller (`masked_fill`).",
            "Sort each row in descending order. The k-th largest sits in column k - 1: `sorted.gather(-1, (k - 1)[:, None])`."
            " Rows that are off have no such column: replace their k by V first, and keep them out of the mask.",
        ),
    ),
    "2.3": Check(
        cases=top_p_cases,
        judge=_judge_rows,
        minutes=12,
        difficulty=2,
        hints=(
            "Sort each row in descending order and take the softmax. Which running sum tells you that a token is no longer"
            " needed?",
            "A token stays if the probabilities *before* it add up to less than p. Then the one that crosses the line stays,"
            " and so does the first token, whatever p is. The sum before a token is `cumsum - probs`.",
            "The mask you have is in sorted order. `order` from `sort` says where each column came from, so `mask.scatter(-1,"
            " order, mask)` brings it back. Keep rows with p >= 1 out of it: rounding can make cumsum reach 1 early.",
        ),
    ),
}
