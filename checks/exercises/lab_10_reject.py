"""Exercise 10.4: rejection sampling. Cases and judge, in the parent only.

The judge does not compare with one right answer. Where chance plays no part it knows the answer; elsewhere it draws 200,000
times and tests the distribution of every token, given that all before it were accepted, and how often drafts were accepted. A
right answer fails all of these tests together with probability 1e-6, whatever the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_10_run import FEW, drawn_drafts
from checks.exercises.words import count, kind_of
from minivllm.sampling.sampler import INVALID

P_LEAST = 1e-6  # of a right answer, over all tests of all cases
DRAWS, FEWER = 200_000, 60_000  # the first finds a bias of 2 %; the second is for mixed up rows and numbers
NUM_TESTS = 200  # there are fewer; each gets its share of P_LEAST
V = 5
NEARLY_ONE = 1 - 2.0**-53
Row = list[float]

# -------------------------------------------------------------------------------------------------------------- the cases


def reject_cases(seed: int) -> list[Case]:
    return [*_given_cases(), *_drawn_cases(random.Random(f"10.4:{seed}"))]


def _only(token: int) -> Row:
    return [float(t == token) for t in range(V)]


def _given_cases() -> list[Case]:
    """Whatever the noise says, there is one answer: a draft that the target wants at least as much as the drafter, or not at
    all; one token left to draw."""
    most = [0.1, 0.0, 0.7, 0.1, 0.1]
    half = [0.25, 0.0, 0.5, 0.25, 0.0]
    gone = [0.6, 0.0, 0.4, 0.0, 0.0]
    low, high = [0.1, 0.1], [0.999, 0.999]
    cases = [
        _given("a draft that p wants more than q", [[2]], [[half]], [[most, _only(4)]], [[[0.999, 0.05], low]], [[2, 4]]),
        _given(
            "a draft the target never says", [[2]], [[_only(2)]], [[_only(0), _only(4)]], [[[0.0, 0.5], low]], [[0, INVALID]]
        ),
        _given("a draft the target is sure of", [[2]], [[_only(2)]], [[_only(2), _only(1)]], [[high, high]], [[2, 1]]),
        _given(
            "a draft that p lacks; q's other token is p's most likely one",
            [[1], [1]],
            [[[0.6, 0.4, 0.0, 0.0, 0.0]]] * 2,
            [[gone, _only(4)]] * 2,
            [[[0.0, 0.1], low], [[0.5, 0.95], high]],
            [[2, INVALID]] * 2,
        ),
        _given(
            "three drafts, the second is refused",
            [[2, 3, 4]],
            [[_only(2), _only(3), _only(4)]],
            [[_only(2), _only(1), _only(4), _only(0)]],
            [[low] * 4],
            [[2, 1, INVALID, INVALID]],
        ),
        _given(
            "three drafts, all are kept",
            [[2, 3, 4]],
            [[_only(2), _only(3), _only(4)]],
            [[_only(2), _only(3), _only(4), _only(0)]],
            [[high] * 4],
            [[2, 3, 4, 0]],
        ),
        _given(
            "three requests, which keep two, none and one of their drafts",
            [[2, 3], [2, 3], [2, 3]],
            [[_only(2), _only(3)]] * 3,
            [[_only(2), _only(3), _only(4)], [_only(1), _only(3), _only(0)], [_only(2), _only(0), _only(1)]],
            [[low] * 3] * 3,
            [[2, 3, 4], [1, INVALID, INVALID], [2, 0, INVALID]],
        ),
    ]
    nothing = [0.6 - 6e-8, 0.4, 0.0, 0.0, 0.0]
    cases.append(
        _given(
            "p is q but for a rounding error, and the draft is refused by a hair",
            [[0]],
            [[[0.6, 0.4, 0.0, 0.0, 0.0]]],
            [[nothing, _only(4)]],
            [[[NEARLY_ONE, 0.5], low]],
            None,
        )
    )
    return cases


def _given(
    what: str, drafts: list[list[int]], q: list[list[Row]], p: list[list[Row]], noise: list[list[Row]], answer: Any
) -> Case:
    return {
        "kind": "given",
        "draft_ids": drafts,
        "draft_probs": q,
        "target_probs": p,
        "noise": noise,
        "answer": answer,
        "k": len(drafts[0]),
        "call": f"rejection_sample(...): {what}, draft_ids {drafts}",
    }


def _drawn_cases(rng: random.Random) -> list[Case]:
    p = [0.5, 0.05, 0.2, 0.15, 0.1]
    q = [0.1, 0.4, 0.2, 0.0, 0.3]
    return [
        _drawn(rng, "a drafter that is certain, and right half of the time", [_only(0)], [p, _other(rng)]),
        _drawn(rng, "a drafter with another opinion", [q], [p, _other(rng)]),
        _drawn(rng, "top-k has removed three tokens of p, which q still drafts", [q], [[0.6, 0.0, 0.4, 0.0, 0.0], p]),
        _drawn(rng, "two drafts; the target's rows depend on what was drafted", [q, _other(rng)], [p], table=True, draws=FEWER),
        _drawn(rng, "three drafts", [_other(rng) for _ in range(3)], [_other(rng) for _ in range(4)], draws=FEWER),
    ]


def _other(rng: random.Random) -> Row:
    weights = [rng.uniform(0.3, 2) ** 2 for _ in range(V)]
    return [w / sum(weights) for w in weights]


def _drawn(rng: random.Random, what: str, q: list[Row], p: list[Row], table: bool = False, draws: int = DRAWS) -> Case:
    return {
        "kind": "drawn",
        "q": q,
        "p": p,
        "table": [_other(rng) for _ in range(V)] if table else None,
        "k": len(q),
        "draws": draws,
        "noise_seed": rng.randrange(1 << 30),
        "call": f"rejection_sample(...) of {draws:,} requests: {what}",
    }


# -------------------------------------------------------------------------------------------------------------- the judge


def judge_reject(case: Case, output: Any) -> Verdict:
    if wrong := _judge_form(case, output):
        return wrong
    answers = output["returned"].long()
    if case["kind"] == "given":
        verdict = _judge_given(case, answers)
    else:
        verdict = _judge_drawn(case, answers, output)
    if verdict is None and output["changed"]:
        told = f"The answers are right, but {output['changed'][0]} was changed. Leave what is passed in as it is."
        return Verdict("input changed", told)
    return verdict or RIGHT


def _judge_form(case: Case, output: Any) -> Verdict | None:
    returned = output["returned"]
    if returned is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not isinstance(returned, torch.Tensor):
        return Verdict("wrong type", f"It should return a tensor [B, k + 1] of token ids, and returned {kind_of(returned)}.")
    if "float" in output["was"] or "bool" in output["was"]:
        return Verdict("wrong type", f"Token ids are integers; the tensor is {output['was']}.")
    k = case["k"]
    rows = len(case["draft_ids"]) if case["kind"] == "given" else len(returned)
    if returned.dim() != 2 or list(returned.shape) != [rows, k + 1]:
        B = f"{rows}" if case["kind"] == "given" else "B"
        told = f"It returned shape {list(returned.shape)}. {count(k, 'draft')} make at most {k + 1} tokens: [{B}, {k + 1}]."
        return Verdict("wrong shape", told)
    return None


def _judge_given(case: Case, answers: torch.Tensor) -> Verdict | None:
    if case["answer"] is None:
        return _judge_hair(answers[0].tolist())
    for row, (got, wanted) in enumerate(zip(answers.tolist(), case["answer"], strict=True)):
        if got == wanted:
            continue
        drafts, k = case["draft_ids"][row], case["k"]
        n = next((i for i in range(k + 1) if i == k or wanted[i] != drafts[i] or wanted[i + 1] == INVALID), k)
        told = f"Request {row}: it returned {got}, and should return {wanted}. {_why_given(got, wanted, drafts, n)}"
        at = min(n, k - 1)
        rows = [
            f"    q of draft {at + 1}  {case['draft_probs'][row][at]}",
            f"    p there       {case['target_probs'][row][at]}",
        ]
        return Verdict("wrong value", "\n".join([told, *rows]))
    return None


def _judge_hair(got: list[int]) -> Verdict | None:
    if got in ([0, INVALID], [1, INVALID], [0, 4]):
        return None
    told = f"It returned {got}. Here max(p - q, 0) is zero everywhere, so there is nothing to draw from."
    return Verdict("wrong value", f"{told} It happens by rounding, when p and q are all but equal: draw from p then.")


def _why_given(got: list[int], wanted: list[int], drafts: list[int], n: int) -> str:
    """`n`: how many drafts the right answer keeps."""
    if n == len(drafts) and got[:n] == drafts and got[n] == INVALID:
        return (
            "Either the last draft was refused, which the target gives at least as much probability as the drafter (p >= q:"
            " always kept); or the token behind the last draft is missing: it comes for nothing, from the target's last row."
        )
    if n < len(drafts) and got[: n + 1] == drafts[: n + 1]:
        return f"Draft {n + 1} was kept, which the target gives probability 0."
    if got[: n + 1] == wanted[: n + 1] or (n < len(drafts) and got[n + 1 :] != wanted[n + 1 :] and got[n] == wanted[n]):
        return f"Behind the first refused draft an answer ends: {INVALID} (INVALID) from there on."
    if got[:n] != drafts[:n]:
        return "A draft that the target gives at least as much probability as the drafter (p >= q) is always kept."
    if n < len(drafts):
        return (
            "A refused draft is replaced by a draw from what p has more than q, max(p - q, 0): not from p itself, whose other"
            " tokens the drafter has already had its chance to propose."
        )
    return f"After {count(n, 'draft')} the next token is drawn from the target's row {n} (rows count from 0)."


def _judge_drawn(case: Case, answers: torch.Tensor, output: dict[str, Any]) -> Verdict | None:
    if wrong := _judge_structure(case, answers, drawn_drafts(case)[: len(answers)]):
        return wrong
    for i, condition, wanted, counts in _tables(case, answers):
        q = torch.tensor(case["q"][i], dtype=torch.float64) if i < case["k"] else None
        if _differs(counts, wanted):
            return Verdict("wrong value", _told_distribution(case, i, condition, wanted, q, counts))
        if q is not None and (told := _told_acceptance(i, condition, wanted, q, answers)):
            return Verdict("wrong value", told)
    if not output["repeats"]:
        told = "With the same noise it gave other tokens the second time. All chance comes from `noise`: it is what makes a"
        return Verdict("wrong calls", f"{told} request with a seed repeatable, alone and beside others.")
    if not output["alone"]:
        told = f"The first {FEW} requests got other tokens when there were more behind them."
        return Verdict("wrong value", f"{told} Each request's answer depends on its own rows and noise alone.")
    return None


def _judge_structure(case: Case, answers: torch.Tensor, draft_ids: torch.Tensor) -> Verdict | None:
    """Ids that exist, drafts in front, INVALID behind."""
    k, valid = case["k"], answers != INVALID
    if bool(((answers < INVALID) | (answers >= V)).any()):
        value = int(answers[(answers < INVALID) | (answers >= V)][0])
        return Verdict("wrong value", f"There is a token {value} among the answers; ids are 0 to {V - 1}, or INVALID (-1).")
    if not bool(valid[:, 0].all()):
        return Verdict("wrong value", "Some requests got no token. Each gets one at least: that in the refused draft's place.")
    for i in range(1, k + 1):
        if bool((valid[:, i] & ~valid[:, i - 1]).any()):
            return Verdict("wrong value", "Some answers have INVALID in the middle. It stands behind the last token only.")
        if bool((rows := valid[:, i] & (answers[:, i - 1] != draft_ids[:, i - 1])).any()):
            row = int(rows.nonzero()[0])
            told = (
                f"Request {row}: drafts {draft_ids[row].tolist()}, answer {answers[row].tolist()}. Draft {i} was refused, and"
            )
            return Verdict(
                "wrong value", f"{told} the answer goes on: its further rows were computed behind the refused draft."
            )
    return None


Table = tuple[int, str, torch.Tensor, torch.Tensor]


def _tables(case: Case, answers: torch.Tensor) -> Iterator[Table]:
    """(place, on what condition, what its distribution should be, how often each token came), for each place of an answer."""
    for i in range(case["k"] + 1):
        there = answers[:, i] != INVALID
        if i == 0 or case["table"] is None:
            p = torch.tensor(case["p"][i], dtype=torch.float64)
            yield i, "", p / p.sum(), torch.bincount(answers[there, i], minlength=V)
            continue
        for before in range(V):
            chosen = there & (answers[:, i - 1] == before)
            p = torch.tensor(case["table"][before], dtype=torch.float64)
            yield i, f" after token {before}", p / p.sum(), torch.bincount(answers[chosen, i], minlength=V)


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's test: how probable counts [V] at least so far from probs [V] are. 0 if there is a token that cannot be."""
    if int(counts[probs == 0].sum()):
        return 0.0
    possible = probs > 0
    expected = probs[possible] * counts.sum()
    if len(expected) < 2 or float(expected.sum()) == 0:
        return 1.0
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


def _differs(counts: torch.Tensor, probs: torch.Tensor) -> bool:
    return p_value(counts, probs) < P_LEAST / NUM_TESTS


def _told_acceptance(i: int, condition: str, p: torch.Tensor, q: torch.Tensor, answers: torch.Tensor) -> str:
    """Words, if draft i is kept more or less often than the rule says. That is exact all the same, or would have been told."""
    reached = answers[:, i] != INVALID
    if condition:
        reached &= answers[:, i - 1] == int(condition.rpartition(" ")[2])
    kept = reached & (answers[:, i + 1] != INVALID)
    counts = torch.stack([kept.sum(), reached.sum() - kept.sum()])
    rate = float(torch.minimum(p, q / q.sum()).sum())
    if not _differs(counts, torch.tensor([rate, 1 - rate], dtype=torch.float64)):
        return ""
    return (
        f"The tokens are distributed as they should be, but draft {i + 1} was kept in {float(kept.sum() / reached.sum()):.1%}"
        f" of its requests{condition}, and can be kept in {rate:.1%}: with probability min(1, p / q). What is thrown away makes"
        " nothing exacter, only slower."
    )


def _told_distribution(
    case: Case, i: int, condition: str, wanted: torch.Tensor, q: torch.Tensor | None, counts: torch.Tensor
) -> str:
    total = int(counts.sum())
    shares = counts / total
    token = int(((shares - wanted).abs() / (wanted + 1e-3).sqrt()).argmax())
    place = ["first", "second", "third", "fourth"][i]
    lines = [
        f"Of {total:,} {place} tokens{condition} the shares are not the target's (chance: less than 1 in 200 million):",
        "    token        " + "".join(f"{t:>9}" for t in range(V)),
        "    should be    " + "".join(f"{100 * float(x):8.2f}%" for x in wanted),
        "    are          " + "".join(f"{100 * float(x):8.2f}%" for x in shares),
        *(["    drafter's q  " + "".join(f"{100 * float(x):8.2f}%" for x in q)] if q is not None else []),
        "",
        _why_distribution(case, i, wanted, q, counts, token),
    ]
    return "\n".join(lines)


def _why_distribution(case: Case, i: int, p: torch.Tensor, q: torch.Tensor | None, counts: torch.Tensor, token: int) -> str:
    general = f"Token {token} comes too {'often' if float(counts[token] / counts.sum()) > float(p[token]) else 'seldom'}."
    if q is None:
        if i and any(not _differs(counts, _row(case, j)) for j in range(i) if case["table"] is None):
            return f"{general} After {count(i, 'draft')} that were kept, the token is drawn from the target's row {i}."
        told = "After all drafts the token is drawn from the target's last row as it is."
        return f"{general} {told} Has its number been used before?"
    for share, words in _suspects(p, q / q.sum()):
        if float(share.sum()) > 0 and not _differs(counts, share / share.sum()):
            return words
    return (
        f"{general} Is each number of `noise` used once: noise[b, i, 0] to keep draft i, noise[b, i, 1] to draw in its place?"
        " And is it row i of p that is compared with row i of q?"
    )


def _row(case: Case, i: int) -> torch.Tensor:
    p = torch.tensor(case["p"][i], dtype=torch.float64)
    return p / p.sum()


def _suspects(p: torch.Tensor, q: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
    """What comes out of likely mistakes, and what to say of each."""
    kept = torch.minimum(p, q)
    refused = 1 - kept.sum()
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum() if float(residual.sum()) > 0 else p
    yield (
        kept + refused * p,
        (
            "Those are the shares if a refused draft is replaced by a draw from p. But the drafter's tokens have had"
            " their chance already: draw from what is still owed, max(p - q, 0)."
        ),
    )
    yield q, "Those are the drafter's own shares: every draft is kept. Keep draft d with probability min(1, p(d) / q(d))."
    sure = torch.where(p >= q, q, 0.0)
    yield (
        sure + (1 - sure.sum()) * residual,
        "Those are the shares if a draft is kept only where p >= q. Where p is smaller, sometimes: u < p(d) / q(d).",
    )
    by_p = q * p
    yield (
        by_p + (1 - by_p.sum()) * residual,
        (
            "Those are the shares if d is kept with probability p(d). It was not proposed every time, but with probability"
            " q(d): divide by that."
        ),
    )
    difference = (p - q).abs()
    if float(difference.sum()) > 0:
        yield (
            kept + refused * difference / difference.sum(),
            "Those are the shares if |p - q| takes the residual's place. Where q is larger nothing is owed: max(p - q, 0).",
        )
    other = (q - p).clamp(min=0)
    if float(other.sum()) > 0:
        yield kept + refused * other / other.sum(), "Those are the shares if max(q - p, 0) is drawn from. It is p that is owed."
    turned = torch.minimum(q, torch.where(p > 0, q * q / p.clamp(min=1e-9), q))
    yield turned + (1 - turned.sum()) * residual, "Those are the shares with q / p for p / q. Keep what the *target* likes."
    once_more = torch.zeros_like(p)
    once_more[int(p.argmax())] = 1.0
    yield kept + refused * once_more, "A refused draft is replaced by p's favourite. Draw from max(p - q, 0), by chance."
    best = torch.zeros_like(p)
    best[int((p - q).argmax())] = 1.0
    yield kept + refused * best, "A refused draft is replaced by the residual's favourite. Draw from it, by chance."
