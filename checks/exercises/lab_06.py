"""Lab 06's checks: how many tokens a request gets, one schedule for prompts and decodes, and the arrays of a mixed batch. In
the parent only.

Exercise 6.2's model of a step is in lab_05_steps.py.
"""

from __future__ import annotations

import random
from string import ascii_uppercase
from typing import Any

from checks.exercises import RIGHT, Case, Check, Verdict
from checks.exercises.lab_05_steps import World, chunk, judge_steps, limits_broken, snapshot, steps_case, unified
from checks.exercises.words import count

# ----------------------------------------------------------------------------------------------------- 6.1 num_new_tokens

_PLAIN: dict[str, Any] = {
    "tokens": 6, "outputs": 0, "computed": 5, "drafts": 0, "placeholders": 0, "budget": 16, "cached": 0, "threshold": 0,
    "num_requests": 3, "max_model_len": 100, "chunked": True,
}  # fmt: skip


def new_tokens_cases(seed: int) -> list[Case]:
    rng = random.Random(f"6.1:{seed}")
    by_hand: list[dict[str, Any]] = [
        {},
        {"tokens": 6, "computed": 0},
        {"tokens": 40, "computed": 0},
        {"tokens": 40, "computed": 32},
        {"budget": 0},
        {"tokens": 9, "computed": 0, "cached": 8},
        {"tokens": 40, "computed": 0, "threshold": 4},
        {"tokens": 5, "computed": 1, "threshold": 4},
        {"tokens": 9, "computed": 0, "threshold": 1, "num_requests": 2},
        {"tokens": 40, "computed": 0, "threshold": 4, "num_requests": 1},
        {"tokens": 40, "computed": 0, "threshold": 12, "budget": 7},
        {"tokens": 8, "computed": 7, "drafts": 3},
        {"tokens": 98, "computed": 97, "drafts": 3},
        {"tokens": 5, "computed": 5},
        {"tokens": 5, "computed": 5, "placeholders": 1},
        {"tokens": 16, "computed": 0, "chunked": False},
        {"tokens": 17, "computed": 0, "chunked": False},
        {"tokens": 24, "computed": 0, "cached": 8, "chunked": False},
        {"tokens": 8, "computed": 7, "drafts": 3, "budget": 2, "chunked": False},
        {"tokens": 25, "outputs": 20, "computed": 0, "chunked": False},
        {"tokens": 25, "outputs": 20, "computed": 0, "threshold": 8},
    ]
    drawn = []
    for _ in range(12):
        tokens = rng.randint(1, 95)
        computed = rng.choice([0, 0, rng.randint(0, tokens), tokens - 1])
        drawn.append(
            {
                "tokens": tokens,
                "computed": computed,
                "drafts": rng.choice([0, 0, 4]),
                "budget": rng.randint(0, 30),
                "cached": 4 * rng.randint(0, (tokens - 1) // 4) if computed == 0 else 0,
                "threshold": rng.choice([0, 5, 10]),
                "num_requests": rng.randint(1, 3),
                "chunked": rng.random() < 0.7,
            }
        )
    return [_new_tokens_case({**_PLAIN, **case}) for case in by_hand + drawn]


def _new_tokens_case(case: Case) -> Case:
    told = [f"{count(case['tokens'], 'token')}, {case['computed']} computed"]
    told += [f"{count(case['outputs'], 'output')} among them"] if case["outputs"] else []
    told += [f"{count(case['drafts'], 'draft')}"] if case["drafts"] else []
    told += [f"num_output_placeholders {case['placeholders']}"] if case["placeholders"] else []
    limits = [f"long_prefill_token_threshold {case['threshold']}"] if case["threshold"] else []
    limits += [f"{count(case['num_requests'], 'request')} here"] if case["threshold"] else []
    limits += ["chunked_prefill False"] if not case["chunked"] else []
    limits += [f"max_model_len {case['max_model_len']}"] if case["tokens"] + case["drafts"] >= case["max_model_len"] - 1 else []
    cached = f", num_cached_tokens={case['cached']}" if case["cached"] else ""
    call = f"num_new_tokens(request with {', '.join(told)}; budget={case['budget']}{cached})"
    return {**case, "call": f"{call}; {', '.join(limits)}" if limits else call}


def new_tokens(case: Case, **other: Any) -> int:
    """The right number, or with `other` what a mistake would make of it."""
    c = {**case, **other}
    computed = c["computed"] + c["cached"]
    known = c["tokens"] + c["drafts"] + c["placeholders"]
    n = known - computed
    if 0 < c["threshold"] < n and c["num_requests"] > 1:
        n = c["threshold"]
    n = min(n, c["max_model_len"] - 1 - computed)
    if not c["chunked"] and c["tokens"] - computed > c["budget"]:
        return 0
    return int(min(n, c["budget"]))


def judge_new_tokens(case: Case, output: Any) -> Verdict:
    if not output["own"]:
        return Verdict("missing function", "The class in this cell has no num_new_tokens of its own: it was inherited.")
    returned, wanted = output["returned"], new_tokens(case)
    if isinstance(returned, bool) or not isinstance(returned, int):
        shown = "None. Is a `return` missing?" if returned is None else f"{returned!s}."
        return Verdict("wrong type", f"It should return a number of tokens, and returned {shown}")
    if returned != wanted:
        told = f"It returned {returned}, and should return {wanted}. {_why_tokens(case, returned, wanted)}"
        return Verdict("wrong value", told.rstrip())
    if output["changed"]:
        return Verdict(
            "input changed", "The number is right, but the request was changed. Only count; `advance` and `admit` do it."
        )
    return RIGHT


def _why_tokens(case: Case, returned: int, wanted: int) -> str:
    computed = case["computed"] + case["cached"]
    lacks = case["tokens"] + case["drafts"] + case["placeholders"] - computed
    budget, threshold, limit = case["budget"], case["threshold"], case["max_model_len"] - 1 - computed
    whole = case["tokens"] - computed
    ways: list[tuple[bool, int, str]] = [
        (
            case["outputs"] > 0,
            returned,
            f"It was preempted, and computes its {count(case['outputs'], 'output')} again too: request.num_tokens counts them.",
        ),
        (
            not case["chunked"] and whole > budget,
            new_tokens(case, chunked=True),
            f"Chunks are off (self.chunked_prefill): {count(whole, 'token')} of it are missing, the budget holds {budget}, and"
            " a prompt goes in whole or not at all.",
        ),
        (
            not case["chunked"] and case["drafts"] > 0 and whole <= budget,
            0,
            "Only a prompt must go in whole. This one lacks a single token; its drafts may be cut.",
        ),
        (
            not case["chunked"] and whole == budget,
            0,
            f"Chunks are off, and the budget of {budget} holds exactly what it lacks: it goes in whole.",
        ),
        (case["chunked"] and whole > budget, 0, "Chunks are on (self.chunked_prefill is True): a piece of it is enough."),
        (
            threshold > 0 and case["num_requests"] == 1,
            new_tokens(case, num_requests=2),
            "The threshold keeps a long prompt from holding up others. There are none: len(self.requests) is 1.",
        ),
        (
            threshold > 0 and case["num_requests"] > 1,
            new_tokens(case, threshold=0),
            f"long_prefill_token_threshold is {threshold}: others are here, so a prompt gets no more than that in a step.",
        ),
        (
            case["cached"] > 0,
            new_tokens(case, cached=0),
            f"{case['cached']} tokens were found in the prefix cache: they are not computed.",
        ),
        (
            case["computed"] > 0,
            min(new_tokens(case, computed=0), budget),
            f"{case['computed']} of its tokens are computed already.",
        ),
        (
            case["drafts"] > 0,
            new_tokens(case, drafts=0),
            "Its drafts are tokens to compute too: num_tokens_with_spec counts them.",
        ),
        (
            limit < lacks,
            new_tokens(case, max_model_len=case["max_model_len"] + 1),
            f"Position {case['max_model_len'] - 1} is the last of max_model_len {case['max_model_len']}: its token is sampled,"
            " and never computed. That leaves max_model_len - 1 - num_computed.",
        ),
        (
            limit < lacks,
            new_tokens(case, max_model_len=1 << 30),
            f"max_model_len is {case['max_model_len']}: {limit} positions are left.",
        ),
        (
            case["placeholders"] > 0,
            new_tokens(case, placeholders=0),
            "A token in flight (num_output_placeholders) is one that will be there when the step runs: it counts.",
        ),
        (True, min(lacks, limit), f"The budget holds {count(budget, 'token')}."),
        (threshold == 0 and lacks > 0, 0, "A threshold of 0 means that there is none."),
        (True, budget, f"It lacks no more than {count(lacks, 'token')}."),
    ]
    return next((why for applies, value, why in ways if applies and value == returned != wanted), "")


# ----------------------------------------------------------------------------------------------------------- 6.2 schedule


def unified_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"6.2:{seed}")
    by_hand: list[tuple[str, dict[str, Any]]] = [
        ("A5+3 .", {"budget": 16}),
        ("A5+3 ...", {"budget": 16}),
        ("A5+3 B6+3 .", {"budget": 16}),
        ("A5+3 . B6+3 .", {"budget": 16}),
        ("A20+2 ...", {"budget": 16}),
        ("A5+3 B20+2 ...", {"budget": 16}),
        ("A5+3 . B6+3 C20+2 ...", {"budget": 16}),
        ("A12+2 B2+2 ...", {"budget": 8}),
        ("A2+3 B2+3 C2+3 ...", {"budget": 16, "seats": 2}),
        ("A16+2 B3+2 ...", {"budget": 16}),
        ("A10+2 B3+2 ...", {"budget": 16, "threshold": 4}),
        ("A10+2 B10+2 C2+2 ...", {"budget": 16, "chunks": False}),
        ("A5+3 B70+3 ss uu ...", {"budget": 64}),
        ("A30+2 B30+2 ...", {"budget": 8, "blocks": 10}),
        ("A7+9 B9+9 C3+2 ...", {"budget": 32, "blocks": 5}),
        ("A7+9 B7+9 C7+9 .. D2+2 ...", {"budget": 32, "blocks": 6}),
        ("A7+6 B7+6 C2+6 ...", {"budget": 32, "blocks": 5}),
        ("A24+2@9 . B1+9@0 C8+4@1 ...", {"budget": 6, "seats": 3, "threshold": 4, "blocks": 8, "policy": "priority"}),
        ("A3+9@9 . B3+9@1 . C3+9@0 . D3+9@5 ...", {"budget": 32, "blocks": 5, "policy": "priority"}),
        ("A11+9@5 . B11+9@0 ...", {"budget": 32, "blocks": 6, "policy": "priority"}),
    ]
    cases = [steps_case(unified, script, **settings) for script, settings in by_hand]
    shared = list(range(1, 10))
    twice: list[Any] = [["add", "A", shared, 2, 0], ".", ["add", "B", shared, 2, 0], "..."]
    cases.insert(7, steps_case(unified, twice, budget=16, caching=True, cached={"B": 8}))
    for budget, blocks, seats, threshold, policy in ((12, 14, 3, 0, "fcfs"), (9, 12, 8, 5, "priority"), (20, 40, 5, 7, "fcfs")):
        words = []
        for name in ascii_uppercase[: min(26, 8 * scale)]:
            words += [f"{name}{rng.randint(1, 30)}+{rng.randint(1, 9)}@{rng.randint(0, 3)}", rng.choice([".", "..", ""])]
        script = " ".join([*filter(None, words), "..."])
        limits = {"budget": budget, "blocks": blocks, "seats": seats, "threshold": threshold, "policy": policy}
        cases.append(steps_case(unified, script, **limits))
    return cases


def judge_unified(case: Case, output: Any) -> Verdict:
    return judge_steps(unified, case, output, _words_of_step)


def _words_of_step(world: World, wanted: dict[str, int], found: dict[str, int]) -> str:
    if broken := limits_broken(world, found):
        return broken
    _, gave_way = unified(snapshot(world))
    running, waiting = {r.name: r for r in world.running}, {r.name: r for r in world.waiting}
    if again := next((name for name in gave_way if name in found and name in running), ""):
        told = f"{again} gave way in this very step, and gets nothing more in it:"
        return f"{told} self.running_in_order() and self.next_in_line() pass over it."
    left = world.case["budget"]
    for name, n in wanted.items():
        request = running.get(name) or waiting[name]
        if name not in found:
            return _words_of_missing(world, name, left, found)
        if found[name] != n:
            if request.cached and found[name] >= n + request.cached - 1 and name in waiting:
                return f"{request.cached} of {name}'s tokens are in the prefix cache: get_computed_blocks found them."
            hint = ""
            if gave_way and found[name] < n:
                hint = f" {gave_way[0]} gave way in this step, and its tokens are free again: self.budget_left(step) knows."
            lacks = count(request.tokens - (request.computed if name in running else request.cached), "token")
            return (
                f"{name} lacks {lacks}, and {left} of the budget are left when its turn comes: num_new_tokens says {n}.{hint}"
            )
        left -= n
    extra = next(name for name in found if name not in wanted)
    if extra in waiting and any(r.name in running and r.name not in wanted for r in world.running):
        return f"Somebody had to give way in this step, and {extra} is let in? It would take the blocks that were just freed."
    if extra in running:
        return f"A request had to give way itself: advance said False. That ends the loop, so {extra}, behind it, gets nothing."
    return f"{extra} does not fit."


def _words_of_missing(world: World, name: str, left: int, found: dict[str, int]) -> str:
    running = {r.name: r for r in world.running}
    if name in running:
        before = [r for r in world.running[: [r.name for r in world.running].index(name)] if r.name not in found]
        idle = next((r for r in before if chunk(world, r, r.computed, {}) == 0), None)
        if idle is not None:
            return (
                f"{idle.name}'s token is in flight, so it has nothing to compute; {name}, behind it, has: go on, do not stop."
            )
        first = next((n for n in found if n not in running), None)
        after = f", and only then may {first} start" if first else ""
        return f"{name} runs, and lacks {count(running[name].tokens - running[name].computed, 'token')}: it comes first{after}."
    request = next(r for r in world.waiting if r.name == name)
    piece = " A piece of its prompt is enough to start with." if request.tokens > left else ""
    return (
        f"{name} waits, and {count(left, 'token')} of the budget and a seat are left.{piece} A step mixes prompts and decodes."
    )


# ----------------------------------------------------------------------------------------------------- 6.3 build_metadata


def metadata_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"6.3:{seed}")
    by_hand: list[tuple[list[int], list[int], list[list[int]]]] = [
        ([5], [1], [[7, 3]]),
        ([0], [3], [[5]]),
        ([0], [6], [[7, 3]]),
        ([4], [3], [[7, 3]]),
        ([5, 2], [1, 1], [[7, 3], [6, 0]]),
        ([5, 0], [1, 3], [[7, 3], [6, 0]]),
        ([5, 4, 0], [1, 3, 6], [[7, 3, 0], [6, 2, 0], [1, 9, 0]]),
        ([8, 3, 0, 4], [1, 1, 2, 8], [[7, 3, 9], [6, 0, 0], [2, 0, 0], [4, 8, 5]]),
        ([2, 11], [2, 1], [[4, 0, 0], [5, 1, 2]]),
    ]
    cases = [_metadata_case(*parts, 4) for parts in by_hand]
    for size, num_rows in ((3, 5 * scale), (16, 9 * scale)):
        scheduled = [1] * (num_rows // 2) + [rng.randint(2, 3 * size) for _ in range(num_rows - num_rows // 2)]
        computed = [rng.randint(0, 3 * size) for _ in range(num_rows)]
        blocks = [-(-(c + n) // size) for c, n in zip(computed, scheduled, strict=True)]
        ids = rng.sample(range(1, 200 * scale), sum(blocks))
        tables = []
        for width in blocks:
            tables.append(ids[:width] + [0] * (max(blocks) - width))
            ids = ids[width:]
        cases.append(_metadata_case(computed, scheduled, tables, size))
    return cases


def _metadata_case(computed: list[int], scheduled: list[int], tables: list[list[int]], size: int) -> Case:
    shown = tables if len(tables) <= 4 else f"<{len(tables)} block tables>"
    call = f"build_metadata({computed}, {scheduled}, {shown}, {size}, slot_mapping)"
    return {"computed": computed, "scheduled": scheduled, "block_tables": tables, "block_size": size, "call": call}


def metadata(case: Case) -> dict[str, list[int]]:
    """The four arrays, a token at a time."""
    size = case["block_size"]
    starts, positions, slots = [0], [], []
    for computed, n, table in zip(case["computed"], case["scheduled"], case["block_tables"], strict=True):
        starts.append(starts[-1] + n)
        for position in range(computed, computed + n):
            positions.append(position)
            slots.append(table[position // size] * size + position % size)
    seq_lens = [computed + n for computed, n in zip(case["computed"], case["scheduled"], strict=True)]
    return {"query_start_loc": starts, "seq_lens": seq_lens, "positions": positions, "slots": slots}


def judge_metadata(case: Case, output: Any) -> Verdict:
    names = "query_start_loc, seq_lens, positions, slots"
    if "returned" in output:
        shown = "None. Is a `return` missing?" if output["returned"] is None else f"{output['returned']}."
        return Verdict("wrong type", f"It should return four arrays, {names}, and returned {shown}")
    wanted = metadata(case)
    for name, found in output["arrays"].items():
        if isinstance(found, str):
            return Verdict("wrong type", f"{name} should be a NumPy array, and is a {found}.")
        kind, shape, values = found
        if shape != [len(wanted[name])]:
            told = f"{name} has shape {shape}, and should have [{len(wanted[name])}]. {_shape_reason(name, case)}"
            return Verdict("wrong shape", told.rstrip())
        if values != wanted[name]:
            told = (
                f"{name} is {_short(values)}, and should be {_short(wanted[name])}. {_value_reason(name, case, values, wanted)}"
            )
            return Verdict("wrong value", told.rstrip())
        if kind not in "iu":
            return Verdict("wrong type", f"{name} has the right values, but they are not integers (kind {kind!r}).")
    if output["changed"]:
        return Verdict("input changed", f"The arrays are right, but {output['changed'][0]} was changed in place.")
    return RIGHT


def _short(values: list[Any]) -> str:
    return str(values) if len(values) <= 14 else f"[{', '.join(map(str, values[:12]))}, ...]"


def _shape_reason(name: str, case: Case) -> str:
    rows, tokens = len(case["scheduled"]), sum(case["scheduled"])
    if name == "query_start_loc":
        return f"One entry for each of the {count(rows, 'row')}, and one for the end: it begins with 0 and ends with {tokens}."
    if name == "seq_lens":
        return f"One entry for each of the {count(rows, 'row')}."
    return f"One entry for each of the {count(tokens, 'token')} of this step."


def _value_reason(name: str, case: Case, values: list[int], wanted: dict[str, list[int]]) -> str:
    computed, scheduled = case["computed"], case["scheduled"]
    size, tables = case["block_size"], case["block_tables"]
    rows = [row for row, n in enumerate(scheduled) for _ in range(n)]
    within = [i for n in scheduled for i in range(n)]
    positions = wanted["positions"]
    ways: dict[str, list[tuple[list[Any], str]]] = {
        "query_start_loc": [
            ([0, *scheduled], "Those are the rows' lengths. Each entry is the sum of all lengths before it."),
            ([0, *wanted["seq_lens"]], "Those are sequence lengths. Only this step's tokens are in the batch."),
            (_sums(wanted["seq_lens"]), "Those are sums of sequence lengths. Only this step's tokens are in the batch."),
            ([*_sums(scheduled)[1:], sum(scheduled)], "It begins with 0: the first row's first token is token 0 of the batch."),
        ],
        "seq_lens": [
            (scheduled, "Those are the tokens of this step. What was computed before is attended to as well."),
            (computed, "That was before this step. Its own tokens are attended to as well."),
            ([n - 1 for n in wanted["seq_lens"]], "Those are the last positions. A length is one more."),
        ],
        "positions": [
            (within, "Each row begins at 0 there. A row's first token stands behind those that were computed before."),
            (
                list(range(len(rows))),
                "Those number the batch. A position numbers a sequence: it begins at num_computed_tokens.",
            ),
            ([computed[row] for row in rows], "All tokens of a row have its first position there."),
            ([p + 1 for p in positions], "They begin one too far: with 5 tokens computed, the next has position 5."),
        ],
        "slots": [
            (positions, "Those are the positions. Where a position lies, its row's block table says: map_slots."),
            (
                [_slot(tables[0], p, size) for p in positions],
                "All of them were looked up in row 0's block table. Each row has its own.",
            ),
            (
                [_slot(tables[row], i, size) for row, i in zip(rows, within, strict=True)],
                "Those are of positions that begin at 0.",
            ),
        ],
    }
    return next((why for way, why in ways[name] if way == values), _first_wrong(name, case, values, wanted, rows))


def _sums(numbers: list[int]) -> list[int]:
    return [sum(numbers[:i]) for i in range(len(numbers) + 1)]


def _slot(table: list[int], position: int, size: int) -> int:
    return table[position // size % len(table)] * size + position % size


def _first_wrong(name: str, case: Case, values: list[int], wanted: dict[str, list[int]], rows: list[int]) -> str:
    """Where it is wrong first, and what stands there."""
    i = next(i for i, (value, right) in enumerate(zip(values, wanted[name], strict=True)) if value != right)
    if name not in ("positions", "slots"):
        return f"Entry {i} is the first that differs."
    row, position = rows[i], wanted["positions"][i]
    told = f"Token {i} of the batch is row {row}'s, at position {position}"
    return f"{told}." if name == "positions" else f"{told} of table {case['block_tables'][row]}."


CHECKS = {
    "6.1": Check(
        cases=new_tokens_cases,
        judge=judge_new_tokens,
        minutes=15,
        difficulty=2,
        hints=(
            "Write down what it lacks first. Then every rule can only make the number smaller: which of them is a minimum, and"
            " which is a yes or no?",
            "num_computed = request.num_computed_tokens + num_cached_tokens. What it lacks is num_tokens_with_spec +"
            " num_output_placeholders - num_computed. The threshold counts only if it is above 0, below what is lacking, and"
            " others are here (len(self.requests) > 1).",
            "n = what it lacks\nif 0 < threshold < n and there are others: n = threshold\nn = min(n, self.max_model_len - 1 -"
            " num_computed)\nif not self.chunked_prefill and request.num_tokens - num_computed > budget: return 0\nreturn"
            " min(n, budget)",
        ),
    ),
    "6.2": Check(
        cases=unified_cases,
        judge=judge_unified,
        minutes=20,
        difficulty=2,
        hints=(
            "Two loops, and no word of prompts or decodes in them. In both, num_new_tokens says how much. What ends the first,"
            " and what ends the second?",
            "First loop: for request in self.running_in_order(). n = 0 is no reason to stop (the next may have something to"
            " do); advance saying False is. Second loop: while next_in_line() gives somebody. There, n = 0 and admit saying"
            " False both end it: nobody overtakes.",
            "step = self.open_step()\nfor request in self.running_in_order():\n    n = self.num_new_tokens(request,"
            " self.budget_left(step))\n    if n > 0 and advance says False: break\nwhile there is a request ="
            " self.next_in_line():\n    hits,"
            " num_cached_tokens = self.kv_cache_manager.get_computed_blocks(request)\n    n = num_new_tokens(request, the"
            " budget left,"
            " num_cached_tokens)\n    if n == 0, or admit(step, request, n, hits, num_cached_tokens) says False: break\nreturn"
            " self.close_step(step)",
        ),
    ),
    "6.3": Check(
        cases=metadata_cases,
        judge=judge_metadata,
        minutes=20,
        difficulty=2,
        hints=(
            "Lay the rows' tokens end to end on paper, as in the picture above. query_start_loc are the places where a row"
            " begins; what has to be added to a token's place in the batch to get its position in its sequence?",
            "np.cumsum(num_scheduled_tokens) is where rows end; put a 0 in front. For the positions, a loop over rows with"
            " np.arange(computed, computed + n) and np.concatenate does it; np.repeat does it without a loop.",
            "for each row i: positions_i = np.arange(computed_i, computed_i + n_i); slots_i = map_slots(positions_i,"
            " block_tables[i],"
            " block_size)\nreturn starts, num_computed_tokens + num_scheduled_tokens, np.concatenate(all positions),"
            " np.concatenate(all slots)",
        ),
    ),
}
