"""Exercises 10.2 and 10.3: what an n-gram drafter proposes, and which drafts a greedy target keeps. Cases and judges, in the
parent only."""

from __future__ import annotations

import random
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import count, kind_of

# ----------------------------------------------------------------------------------------------- 10.2 NgramDrafter.propose


def propose_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"10.2:{seed}")
    by_hand: list[tuple[list[int], int, int, int]] = [  # tokens, k, longest, shortest
        ([7, 8, 9, 5, 7, 8], 1, 2, 2),
        ([7, 8, 9, 5, 7, 8], 2, 2, 2),
        ([7, 8, 9, 7, 8], 2, 2, 2),
        ([1, 2, 3, 4], 2, 2, 1),
        ([5, 7, 6, 7], 1, 1, 1),
        ([7, 8, 9, 8], 1, 2, 2),
        ([7, 8, 1, 7, 8, 2, 7, 8], 1, 2, 2),
        ([1, 2, 3, 7, 5, 2, 3, 8, 5, 1, 2, 3], 1, 3, 1),
        ([1, 2, 3, 7, 5, 2, 3, 8, 5, 1, 2, 3], 1, 2, 1),
        ([1, 2, 3, 9, 8, 3], 2, 3, 1),
        ([1, 2, 3, 9, 8, 3], 2, 3, 2),
        ([4, 1, 2, 9, 4, 4, 1, 2], 3, 5, 2),
        ([9, 1, 2, 1, 2], 5, 3, 2),
        ([7, 7], 3, 3, 1),
        ([7, 7, 7], 4, 2, 1),
        ([7, 7, 7], 3, 5, 2),
        ([7, 5, 7, 7], 1, 2, 1),
        ([7, 5, 7, 7], 1, 2, 2),
        ([3, 1, 2, 3, 1], 4, 2, 2),
        ([], 3, 2, 1),
        ([6], 3, 2, 1),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 3, 5, 3),
        ([0, 5, 1, 0, 5], 1, 3, 2),
        ([40000, 5, 9, 40000, 5], 2, 3, 2),
    ]
    cases = [_propose_case([tokens], k, longest, shortest) for tokens, k, longest, shortest in by_hand]
    cases.append(_propose_case([[7, 8, 9, 7, 8], [3, 7, 8], [7, 8, 5, 7, 8]], 1, 2, 2))
    for vocabulary, length in ((2, 12), (3, 30), (4, 60 * scale), (6, 200 * scale)):
        longest = rng.randint(1, 5)
        tokens = [rng.randrange(vocabulary) for _ in range(length)]
        cases.append(_propose_case([tokens], rng.randint(1, 6), longest, rng.randint(1, longest)))
    return cases


def _propose_case(sequences: list[list[int]], k: int, longest: int, shortest: int) -> Case:
    shown = [str(s) if len(s) <= 14 else f"[{s[0]}, {s[1]}, ... {len(s)} tokens]" for s in sequences]
    calls = ", then ".join(f"propose({s}, {k})" for s in shown)
    return {
        "sequences": sequences,
        "k": k,
        "longest": longest,
        "shortest": shortest,
        "call": f"NgramDrafter({longest}, {shortest}).{calls}",
    }


def judge_propose(case: Case, output: Any) -> Verdict:
    k, longest, shortest = case["k"], case["longest"], case["shortest"]
    for tokens, answer in zip(case["sequences"], output, strict=True):
        returned, wanted = answer["returned"], _drafts(tokens, k, longest, shortest)
        if wrong := _judge_ids(returned):
            return wrong
        if list(returned) != wanted:
            told = f"After {_shown(tokens)} it proposed {list(returned)}, and should propose {wanted}."
            return Verdict("wrong value", f"{told} {_why_drafts(tokens, k, longest, shortest, list(returned), wanted)}")
        if answer["changed"]:
            return Verdict(
                "input changed", "The drafts are right, but the array token_ids was changed. Leave it as it is: .copy()"
            )
    return RIGHT


def _judge_ids(returned: Any) -> Verdict | None:
    if returned is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing? Without a match it is an empty list.")
    if isinstance(returned, (list, tuple)) and all(type(t) is int for t in returned):
        return None
    if isinstance(returned, (list, tuple)) and len(returned):
        item = next(t for t in returned if type(t) is not int)
        return Verdict("wrong type", f"It should return a list of token ids, and returned a list with {kind_of(item)} in it.")
    return Verdict("wrong type", f"It should return a list of token ids, and returned {kind_of(returned)}.")


def _shown(tokens: list[int]) -> str:
    return str(tokens) if len(tokens) <= 14 else f"[... {', '.join(map(str, tokens[-12:]))}]"


def _places(tokens: list[int], length: int) -> list[int]:
    """Where, before the end, the last `length` tokens stand: the places behind them."""
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]


def _copied(tokens: list[int], place: int, k: int) -> list[int]:
    copy = list(tokens)
    for i in range(k):
        copy.append(copy[place + i])
    return copy[len(tokens) :]


def _match(tokens: list[int], longest: int, shortest: int) -> tuple[int, int] | None:
    """(length, place) of the longest suffix seen before, at its last place."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        if places := _places(tokens, length):
            return length, places[-1]
    return None


def _drafts(tokens: list[int], k: int, longest: int, shortest: int) -> list[int]:
    found = _match(tokens, longest, shortest)
    return [] if found is None else _copied(tokens, found[1], k)


def _why_drafts(tokens: list[int], k: int, longest: int, shortest: int, got: list[int], wanted: list[int]) -> str:
    found = _match(tokens, longest, shortest)
    if found is None:
        runs = f"{count(shortest, 'token')} or more"
        return f"The sequence does not end with a run of {runs} that stands in it before, so there is nothing to propose."
    length, place = found
    last = f"The last {count(length, 'token')}, {tokens[-length:]}, were seen before"
    if length == 1:
        last = f"The last token, {tokens[-1]}, was seen before"
    if not got:
        if place > len(tokens) - length:
            return f"{last}: the earlier place may overlap the end. {wanted[0]} followed."
        shorter = f" Runs count down to prompt_lookup_min = {shortest}." if length < longest else ""
        return f"{last}, and {wanted[0]} followed.{shorter}"
    if len(got) > k:
        return f"At most k = {k} drafts are wanted."
    if got == wanted[: len(got)] and len(got) < k:
        if place + len(got) >= len(tokens):
            told = "The copy has reached the end of the text, and goes on with what it has just copied:"
            return f"{told} after 1 2 1 2 come 1 2 1 2 1 ... Always propose k."
        return f"k = {k} drafts are wanted."
    if got == _copied(tokens, place - length, k):
        return f"{last}: propose what *followed* it, not the run itself."
    if place + 1 < len(tokens) and got == _copied(tokens, place + 1, k):
        return f"{last}. What followed starts one token earlier."
    if got == _copied(tokens, place - 1, k):
        return f"{last}. What followed starts one token later."
    if any(got == _copied(tokens, p, k) for n in range(longest + 1, len(tokens)) for p in _places(tokens, n)):
        told = f"{last}. More than prompt_lookup_max = {longest} tokens are not compared: of several places"
        return f"{told} the *last* counts, though a longer run may stand at another."
    earlier = _places(tokens, length)[:-1]
    if any(got[: len(tokens) - p] == _copied(tokens, p, k)[: len(got)] for p in earlier):
        return f"{last}, several times: the *last* of these places counts (a text resembles most what it said just now)."
    if length > 1 and any(got == _copied(tokens, p, k) for n in range(1, length) for p in _places(tokens, n)):
        return f"{last}. A longer run says more than a shorter one: the longest counts, wherever it stands."
    return f"{last}, and {wanted[0]} followed."


# -------------------------------------------------------------------------------------------------------- 10.3 verify_greedy

V = 6


def verify_cases(seed: int, scale: int = 1) -> list[Case]:
    """Drafts, and the target's favourite of each row: logits are made so that nothing else gives it away."""
    rng = random.Random(f"10.3:{seed}")
    by_hand = [
        ([3], [3, 1]),
        ([3], [2, 1]),
        ([3, 5, 2], [3, 5, 2, 4]),
        ([3, 5, 2], [3, 1, 2, 4]),
        ([3, 5, 2], [0, 5, 2, 4]),
        ([3, 5, 2], [3, 5, 1, 4]),
        ([3, 5, 2, 4], [3, 1, 2, 0, 5]),
        ([0, 0], [0, 0, 0]),
        ([5, 0], [0, 5, 1]),
        ([], [4]),
    ]
    for k in (2, 5, 8 * scale):
        best = [rng.randrange(V) for _ in range(k + 1)]
        wrong = rng.randrange(k)
        by_hand.append(([(t + (i == wrong)) % V for i, t in enumerate(best[:k])], best))
    return [_verify_case(rng, drafts, best) for drafts, best in by_hand]


def _verify_case(rng: random.Random, drafts: list[int], best: list[int]) -> Case:
    rows = []
    for i, token in enumerate(best):
        base = rng.choice([-40.0, 0.0, 30.0])  # a row's logits are compared within the row
        row = [base + round(rng.uniform(-2, 2), 2) for _ in range(V)]
        if i < len(drafts):
            row[drafts[i]] = base + 2.4  # a wrong draft is the second best: near is not enough
        row[token] = base + 2.5
        rows.append(row)
    told = f"favourites of the target's {count(len(best), 'row')}: {best}"
    return {
        "draft_ids": drafts,
        "target_logits": rows,
        "best": best,
        "call": f"verify_greedy({drafts}, target_logits); {told}",
    }


def judge_verify(case: Case, output: Any) -> Verdict:
    drafts, best, returned = case["draft_ids"], case["best"], output["returned"]
    num_accepted = next((i for i, d in enumerate(drafts) if best[i] != d), len(drafts))
    wanted = best[: num_accepted + 1]
    if returned is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not isinstance(returned, torch.Tensor):
        told = f"It should return a tensor of token ids, and returned {kind_of(returned)}. torch.tensor(ids) makes one."
        return Verdict("wrong type", told)
    if returned.is_floating_point() or returned.dtype == torch.bool:
        return Verdict("wrong type", f"Token ids are integers; the tensor is {returned.dtype}.")
    if returned.dim() != 1:
        return Verdict("wrong shape", f"It should return a flat tensor of ids, and returned shape {list(returned.shape)}.")
    got = returned.tolist()
    if got != wanted:
        told = f"It returned {got}, and should return {wanted}."
        return Verdict("wrong value", f"{told} {_why_verify(drafts, best, num_accepted, got)}")
    if output["changed"]:
        return Verdict("input changed", f"The answer is right, but {output['changed'][0]} was changed. Leave it as it is.")
    return RIGHT


def _why_verify(drafts: list[int], best: list[int], num_accepted: int, got: list[int]) -> str:
    right_ones = [d for i, d in enumerate(drafts) if best[i] == d]
    if got == drafts[:num_accepted]:
        return "The target's own token is missing: its row is computed, so it comes for nothing, after the last draft too."
    if len(got) == len(right_ones) + 1 > num_accepted + 1 or got[:-1] == right_ones != drafts[:num_accepted]:
        first = drafts[num_accepted]
        told = f"Draft {num_accepted + 1} ({first}) is wrong, and what comes after it was computed behind a wrong word."
        return f"{told} Nothing after the first wrong draft counts, even if it agrees."
    if num_accepted < len(drafts) and got == drafts[: num_accepted + 1]:
        return f"Draft {num_accepted + 1} is wrong: in its place stands what the target says, {best[num_accepted]}."
    if got == best and num_accepted < len(drafts):
        return "It returned every row's favourite. Those behind the first wrong draft answer another text."
    if num_accepted < len(drafts) and got[: num_accepted + 1] == drafts[: num_accepted + 1]:
        told = f"Draft {num_accepted + 1} ({drafts[num_accepted]}) is not what the target would choose there"
        return f"{told}, {best[num_accepted]} is. Near is not enough."
    if got[: num_accepted + 1] == best[: num_accepted + 1] and set(got[num_accepted + 1 :]) in ({-1}, {0}):
        return "It is filled up behind the tokens that count. Return these alone: the length says how many they are."
    if got == drafts:
        return "Those are the drafts as they came."
    if got[:num_accepted] == drafts[:num_accepted] and len(got) == num_accepted + 1:
        return f"The last token is row {num_accepted}'s favourite: row i is what the target says after draft i - 1."
    return "Row i says what comes after the drafts before i, so it is compared with draft i (both counted from 0)."
