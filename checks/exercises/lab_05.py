"""Lab 05's checks: what static batching wastes, why a request ends, and a scheduler of whole prompts and decodes. In the parent
only.

Exercise 5.3's model of a step is in lab_05_steps.py.
"""

from __future__ import annotations

import random
from string import ascii_uppercase
from typing import Any

from checks.exercises import RIGHT, Case, Check, Verdict
from checks.exercises.lab_05_steps import SIZE, World, judge_steps, limits_broken, steps_case, whole_prompts
from checks.exercises.words import count, is_or_are, kind_of, times
from checks.sandbox.plain import Opaque

# ------------------------------------------------------------------------------------------------------- 5.1 wasted_slots


def wasted_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"5.1:{seed}")
    by_hand = [
        ([3], 1),
        ([3, 1], 2),
        ([1, 3], 2),
        ([2, 2, 2], 3),
        ([3, 1, 2], 2),
        ([8, 1, 1, 1], 4),
        ([1, 8, 1, 8], 2),
        ([3, 1, 2, 5, 1], 3),
        ([], 4),
    ]
    drawn = [([rng.randint(1, 60 * scale) for _ in range(rng.randint(5, 20 * scale))], rng.randint(2, 4)) for _ in range(4)]
    return [
        {"lengths": lengths, "batch_size": size, "call": f"wasted_slots(lengths={lengths}, batch_size={size})"}
        for lengths, size in by_hand + drawn
    ]


def judge_wasted(case: Case, output: Any) -> Verdict:
    lengths, size, returned = case["lengths"], case["batch_size"], output["returned"]
    batches = _batches(lengths, size)
    wanted = _wasted(batches)
    if isinstance(returned, bool) or not isinstance(returned, (int, float)):
        told = "None. Is a `return` missing?" if returned is None else f"{kind_of(returned)}."
        return Verdict("wrong type", f"It should return a number of slots, and returned {told}")
    if returned != wanted:
        why = next((why for value, why in _wasted_slips(lengths, size) if value == returned), "")
        return Verdict("wrong value", f"{_by_hand(batches)} It returned {returned}, and should return {wanted}.{why}")
    if output["lengths"] != lengths:
        return Verdict("input changed", "The number is right, but the list `lengths` was changed. Leave it as it is.")
    return RIGHT


def _batches(lengths: list[int], size: int) -> list[list[int]]:
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


def _wasted(batches: list[list[int]]) -> int:
    return sum(max(batch) * len(batch) - sum(batch) for batch in batches)


def _by_hand(batches: list[list[int]]) -> str:
    if not batches:
        return "No request, no batch."
    told = [
        f"{batch} runs {count(max(batch), 'step')}: {len(batch)} * {max(batch)} - {sum(batch)} ="
        f" {len(batch) * max(batch) - sum(batch)} wasted"
        for batch in batches[:3]
    ]
    more = f"; and {count(len(batches) - 3, 'more batch').replace('batchs', 'batches')}" if len(batches) > 3 else ""
    return "; ".join(told) + more + "."


def _wasted_slips(lengths: list[int], size: int) -> list[tuple[float, str]]:
    batches, total = _batches(lengths, size), sum(lengths)
    longest = max(lengths, default=0)
    slips: list[tuple[float, str]] = [
        (
            _wasted(_batches(sorted(lengths), size)),
            " That is what is left when requests are sorted by length first. They are served in the order they come.",
        ),
        (_wasted(_batches(sorted(lengths, reverse=True), size)), " That is with the requests sorted: take them as they come."),
        (
            sum(max(batch) * size - sum(batch) for batch in batches),
            " The last batch is smaller: rows that nobody asked for are not there.",
        ),
        (longest * len(lengths) - total, " Each batch ends with *its* longest request, not with the longest of all."),
        (sum(max(batch) * len(batch) for batch in batches), " Those are all slots. Subtract those that hold a token."),
        (total, " Those are the slots that hold a token. The others are wasted."),
        (sum(max(batch) - min(batch) for batch in batches), " Every row that is shorter waits, not only the shortest."),
        (_wasted([batch for batch in batches if len(batch) == size]), " The last batch counts too, if it is not full."),
    ]
    if total:
        slots = sum(max(batch) * len(batch) for batch in batches)
        slips += [(_wasted(batches) / slots, " That is a share. Return how many slots.")]
    return slips


# ------------------------------------------------------------------------------------------------------ 5.2 finish_reason

EOS, STOP_ID, OTHER = 7, 9, 50


def finish_cases(seed: int) -> list[Case]:
    """The model's end token is 7, the user's stop token 9."""
    rng = random.Random(f"5.2:{seed}")
    by_hand: list[tuple[list[int], list[int], int, bool, bool]] = [
        ([1], [OTHER], 5, True, True),
        ([1], [EOS], 5, True, True),
        ([1], [STOP_ID], 5, True, True),
        ([1], [OTHER, OTHER], 2, True, True),
        ([1], [OTHER], 2, True, True),
        ([1, 2, 3, 4], [OTHER], 3, True, True),
        ([1], [OTHER, EOS], 2, True, True),
        ([1], [OTHER, STOP_ID], 2, True, True),
        ([EOS, STOP_ID], [OTHER], 5, True, True),
        ([1], [EOS], 5, False, True),
        ([1], [STOP_ID], 5, True, False),
        ([1], [EOS, EOS], 2, False, False),
    ]
    drawn = [
        (
            [rng.choice([1, 2, EOS, STOP_ID]) for _ in range(rng.randint(1, 9))],
            [OTHER] * rng.randint(0, 5) + [rng.choice([OTHER, OTHER, EOS, STOP_ID])],
            rng.randint(6, 7),
            rng.random() < 0.7,
            rng.random() < 0.7,
        )
        for _ in range(6)
    ]
    return [_finish_case(*parts) for parts in by_hand + drawn]


def _finish_case(prompt: list[int], outputs: list[int], max_tokens: int, with_eos: bool, with_stop: bool) -> Case:
    eos, stop = [EOS] if with_eos else [], [STOP_ID] if with_stop else []
    request = f"prompt {prompt}, outputs {outputs}, max_tokens={max_tokens}, stop_eos_ids={set(eos) or '{}'}"
    call = f"finish_reason(request with {request}, stop_token_ids={set(stop) or '{}'}; token_id={outputs[-1]})"
    return {
        "prompt": prompt, "outputs": outputs, "max_tokens": max_tokens, "stop_eos_ids": eos, "stop_token_ids": stop,
        "call": call,
    }  # fmt: skip


def judge_finish(case: Case, output: Any) -> Verdict:
    outputs, limit, token = case["outputs"], case["max_tokens"], case["outputs"][-1]
    stops = token in case["stop_eos_ids"] or token in case["stop_token_ids"]
    wanted = "stop" if stops else "length" if len(outputs) >= limit else None
    returned = output["returned"]
    if returned is not None and not output["is_reason"]:
        if returned in ("stop", "length"):
            told = f"It returned the text {returned!r}. Return FinishReason.{returned.upper()}: the engine compares with `is`."
            return Verdict("wrong type", told)
        shown = str(returned) if isinstance(returned, Opaque) else repr(returned)
        told = "FinishReason.STOP, FinishReason.LENGTH, or None"
        return Verdict("wrong type", f"It should return {told} where it goes on, and returned {shown}.")
    if returned != wanted:
        shown = f"It returned {_reason(returned)}, and should return {_reason(wanted)}."
        return Verdict("wrong value", f"{shown} {_why_finish(case, returned, wanted)}".rstrip())
    if output["changed"]:
        return Verdict(
            "input changed", "The reason is right, but the request was changed. Only say why it ends; the caller ends it."
        )
    return RIGHT


def _reason(value: Any) -> str:
    return "None" if value is None else f"FinishReason.{str(value).upper()}"


def _why_finish(case: Case, returned: Any, wanted: str | None) -> str:
    prompt, outputs, limit, token = case["prompt"], case["outputs"], case["max_tokens"], case["outputs"][-1]
    n = len(outputs)
    if wanted == "stop":
        if returned == "length":
            return f"Token {token} ends the request by itself. That it is also the last one allowed comes second."
        kind = "stop_eos_ids" if token in case["stop_eos_ids"] else "stop_token_ids"
        return f"Token {token} is in request.{kind}."
    if wanted == "length":
        told = f"It has {count(n, 'output token')} now, this one included, and may have {limit}."
        if token == EOS and returned == "stop":
            return f"{told} Token {token} is no end token for this request: its stop_eos_ids are empty."
        return told
    if returned == "length":
        told = f"It has {n} of {count(limit, 'output token')}, token_id among them, and room for {limit - n} more."
        return f"{told} (Prompt tokens do not count.)" if n + len(prompt) >= limit else told
    if token in (EOS, STOP_ID):
        which = "stop_eos_ids" if token == EOS else "stop_token_ids"
        return (
            f"Token {token} means nothing to this request: it is not in its {which}. (It may ask to go on after an end token.)"
        )
    if set(prompt) & {EOS, STOP_ID}:
        return f"An end token stands in the prompt, where the user put it. Only the new token, {token}, can end the request."
    return ""


# ----------------------------------------------------------------------------------------------------------- 5.3 schedule


def schedule_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"5.3:{seed}")
    by_hand: list[tuple[str, dict[str, Any]]] = [
        ("A5+3 .", {"budget": 16}),
        ("A5+3 ...", {"budget": 16}),
        ("A5+3 B6+3 .", {"budget": 16}),
        ("A5+3 B6+3 C3+2 ...", {"budget": 16}),
        ("A5+3 . B6+3 .", {"budget": 16}),
        ("A5+3 . B6+3 ...", {"budget": 16}),
        ("A9+2 B7+2 ...", {"budget": 16}),
        ("A9+2 B8+2 C2+2 ...", {"budget": 16}),
        ("A2+3 B2+3 C2+3 ...", {"budget": 16, "seats": 2}),
        ("A2+1 B2+3 C2+3 ...", {"budget": 16, "seats": 2}),
        ("A1+3 B1+3 C1+3 ...", {"budget": 3, "seats": 3}),
        ("A7+9 B9+9 C3+2 ...", {"budget": 32, "blocks": 5}),
        ("A7+6 B7+6 C2+6 ...", {"budget": 32, "blocks": 5}),
        ("A7+9 B7+9 C7+9 .. D2+2 ...", {"budget": 32, "blocks": 6}),
        ("A7+3@0 . B3+7@5 . C3+6@1 ...", {"budget": 32, "blocks": 4, "policy": "priority"}),
        ("A3+9@9 . B3+9@1 . C3+9@0 . D3+9@5 ...", {"budget": 32, "blocks": 5, "policy": "priority"}),
        ("A4+9@5 . B4+9@9 . C4+9@1 ...", {"budget": 32, "blocks": 6, "policy": "priority"}),
        ("A11+9@5 . B11+9@0 ...", {"budget": 32, "blocks": 6, "policy": "priority"}),
    ]
    cases = [steps_case(whole_prompts, script, chunks=False, **settings) for script, settings in by_hand]
    for blocks, seats, policy in ((12, 3, "fcfs"), (10, 8, "priority"), (30, 4, "fcfs")):
        words = []
        for name in ascii_uppercase[: min(26, 8 * scale)]:
            words += [f"{name}{rng.randint(1, 14)}+{rng.randint(1, 9)}@{rng.randint(0, 3)}", rng.choice([".", "..", ""])]
        script = " ".join([*filter(None, words), "..."])
        cases.append(steps_case(whole_prompts, script, chunks=False, budget=24, seats=seats, blocks=blocks, policy=policy))
    return cases


def judge_schedule(case: Case, output: Any) -> Verdict:
    verdict = judge_steps(whole_prompts, case, output, _words_of_step)
    if not verdict.passed:
        return verdict
    told = output["capabilities"]
    if told is None or "whole prompts" not in told or {"chunking", "mixed batches"} & set(told):
        return Verdict(
            "wrong value",
            "The steps are right. Leave the line `capabilities = ...` as it was: it tells the engine that prompts go in whole.",
        )
    return RIGHT


def _words_of_step(world: World, wanted: dict[str, int], found: dict[str, int]) -> str:
    waiting, running = {r.name: r for r in world.waiting}, {r.name: r for r in world.running}
    prompts, decodes = [n for n in found if n in waiting], [n for n in found if n in running]
    for name in prompts:
        request = waiting[name]
        if found[name] == request.prompt < request.tokens:
            outputs = request.tokens - request.prompt
            return (
                f"{name} gave way earlier, and its KV is gone. It has {request.prompt} prompt tokens and"
                f" {count(outputs, 'output')} by now, and must compute all {request.tokens}: request.num_tokens."
            )
        if found[name] != request.tokens:
            return f"{name} has {count(request.tokens, 'token')}: a prompt goes in whole or not at all. Pieces are Lab 06."
    if prompts and running and len(running) + len(prompts) > world.case["seats"]:
        late = prompts[max(0, world.case["seats"] - len(running))]
        told = f"{len(running)} {is_or_are(len(running))} running already, and max_num_seqs is {world.case['seats']}"
        return f"{told}: {late} must wait."
    if broken := limits_broken(world, found):
        return broken
    if prompts and decodes:
        return f"A step holds prompts or decodes: {decodes[0]}'s next token waits until {prompts[0]}'s prompt is through."
    if many := [name for name in decodes if found[name] != 1]:
        return f"{many[0]} runs: it gets one token a step."
    return _words_of_choice(world, wanted, found, prompts)


def _words_of_choice(world: World, wanted: dict[str, int], found: dict[str, int], prompts: list[str]) -> str:
    head = world.waiting[0] if world.waiting else None
    if head is not None and head.name in wanted and not prompts:
        total = f"{head.tokens} of {count(world.case['budget'], 'token')}"
        seats = f"{len(world.running)} of {count(world.case['seats'], 'request')} {is_or_are(len(world.running))} running"
        return f"{head.name} is first in line and fits ({total}; {seats}; it needs {count(_blocks(head.tokens), 'block')})."
    late = [name for name in wanted if name not in found]
    if prompts and late:
        return f"{late[0]} fits behind {prompts[-1]}: take prompts as long as they fit."
    if late:
        passed = "was passed over" if found else "runs and gets no token"
        why = ""
        if world.case["policy"] == "priority" and found:
            why = " Somebody gave way while you went through self.running, and everybody behind moved up: go through a copy."
        return f"{late[0]} {passed}.{why}"
    extra = [name for name in found if name not in wanted]
    if extra and not wanted:
        return (
            f"A request had to give way itself: advance said False. That ends the loop, so {extra[0]}, behind it, gets nothing."
        )
    if extra and extra[0] in {r.name for r in world.running}:
        return f"{extra[0]} gave way in this very step, so it does not run any more: look at its status before you advance it."
    return ""


def _blocks(tokens: int) -> int:
    return -(-tokens // SIZE)


# ------------------------------------------------------------------------------------------- 5.4 pick_victim and preempt


def preempt_cases(seed: int, scale: int = 1) -> list[Case]:
    """Requests are [name, prompt tokens, outputs so far, priority], in the order they came, or in that of `came`: who gave way
    and was admitted again runs behind those who came later."""
    rng = random.Random(f"5.4:{seed}")
    three = [["A", 7, 2, 0], ["B", 3, 1, 0], ["C", 6, 4, 0]]
    ranked = [["A", 3, 1, 1], ["B", 6, 2, 2], ["C", 3, 1, 2], ["D", 5, 1, 0]]
    by_hand: list[tuple[list[list[Any]], list[list[Any]], str, dict[str, Any]]] = [
        (three[:2], [], "pick", {}),
        (three, [], "pick", {}),
        (three, [["D", 2, 0, 0]], "pick", {}),
        (three, [["D", 2, 0, 0], ["E", 2, 0, 0]], "pick pick pick", {}),
        (three[:1], [], "pick", {}),
        (three, [], "preempt:A", {}),
        (ranked, [], "pick", {"policy": "priority"}),
        (ranked, [["E", 2, 0, 1]], "pick pick pick pick", {"policy": "priority", "came": "ACBD"}),
        (ranked, [["E", 2, 0, 3]], "preempt:D pick", {"policy": "priority"}),
        (three, [], "pick", {"caching": True}),
        (three, [], "preempt:C", {"num_preemptions": 2}),
    ]
    for policy in ("fcfs", "priority"):
        names = iter(ascii_uppercase)
        running = [[next(names), rng.randint(1, 20), rng.randint(1, 6), rng.randint(0, 3)] for _ in range(min(6 * scale, 18))]
        waiting = [[next(names), rng.randint(1, 20), 0, rng.randint(0, 3)] for _ in range(min(3 * scale, 8))]
        by_hand.append((running, waiting, "pick pick pick pick", {"policy": policy}))
    return [_preempt_case(*parts) for parts in by_hand]


def _preempt_case(running: list[list[Any]], waiting: list[list[Any]], script: str, settings: dict[str, Any]) -> Case:
    words = [word.replace(":", " ") for word in script.split()]
    ranked = settings.get("policy") == "priority"

    def told(requests: list[list[Any]]) -> str:
        return ", ".join(f"{r[0]} (priority {r[3]})" if ranked else r[0] for r in requests) or "nobody"

    do = "; ".join("preempt(pick_victim())" if word == "pick" else f"preempt({word[-1]})" for word in words)
    earlier = settings.get("num_preemptions", 0)
    do += f" (each was preempted {times(earlier)} before)" if earlier else ""
    do += f"; they came in the order {', '.join(settings['came'])}" if "came" in settings else ""
    call = f"{'priority' if ranked else 'fcfs'}, running {told(running)}, waiting {told(waiting)}: {do}"
    return {"running": running, "waiting": waiting, "script": words, "policy": "fcfs", **settings, "call": call}


def judge_preempt(case: Case, output: Any) -> Verdict:
    if missing := [name for name in ("pick_victim", "preempt") if name not in output["own"]]:
        return Verdict("missing function", f"The class in this cell has no {missing[0]} of its own: it was inherited.")
    ranked = case["policy"] == "priority"
    order = {r[0]: (r[3], i) for i, r in enumerate([*case["running"], *case["waiting"]])}
    order |= {name: (order[name][0], i) for i, name in enumerate(case.get("came", ""))}
    size = {r[0]: r[1] + r[2] for r in case["running"]}
    running, waiting = [r[0] for r in case["running"]], [r[0] for r in case["waiting"]]
    if ranked:
        waiting.sort(key=order.__getitem__)
    gone: list[str] = []
    free = 100 - sum(_blocks(size[name] - 1) for name in running)
    for number, (word, answer) in enumerate(zip(case["script"], output["trace"], strict=False), start=1):
        victim = (max(running, key=order.__getitem__) if ranked else running[-1]) if word == "pick" else word[-1]
        where = f"Call {number}: " if len(case["script"]) > 1 else ""
        if word == "pick" and (wrong := _wrong_pick(ranked, order, running, victim, answer)):
            return Verdict("wrong value", f"{where}{wrong}")
        running.remove(victim)
        gone.append(victim)
        if ranked:
            waiting = sorted([*waiting, victim], key=order.__getitem__)
        else:
            waiting.insert(0, victim)
        free += _blocks(size[victim] - 1)
        state = {
            "running": running, "waiting": waiting, "told": gone, "free": free, "num_tokens": size[victim],
            "still_cached": (size[victim] - 1) // SIZE if case.get("caching") else 0,
        }  # fmt: skip
        if wrong := _wrong_preempt(victim, answer, state, case):
            return Verdict("wrong value", f"{where}After preempt({victim}) {wrong}")
    return RIGHT


def _wrong_pick(
    ranked: bool, order: dict[str, tuple[int, int]], running: list[str], victim: str, answer: dict[str, Any]
) -> str | None:
    picked = answer["picked"]
    if answer["taken_out"]:
        return "pick_victim() took it out of self.running. It only says who it is: preempt does the rest."
    if not answer["is_request"]:
        if picked in order and picked not in running:
            return f"pick_victim() returned {picked}, which is not running. Choose among self.running."
        shown = "None (is a `return` missing?)" if picked is None else repr(picked)
        return f"pick_victim() should return a request of self.running, and returned {shown}."
    if picked == victim:
        return None
    told = f"pick_victim() returned {picked}, and should return {victim}."
    if not ranked:
        first = f" {picked} was served first, has waited longest, and would lose most." if picked == running[0] else ""
        return f"{told} Running are {', '.join(running)}, in the order they were admitted: the last of them gives way.{first}"
    if order[picked][0] == order[victim][0]:
        return f"{told} Both have priority {order[victim][0]}, and {victim} came later. request.sort_key says both at once."
    smaller = f"{victim} has priority {order[victim][0]}, {picked} has {order[picked][0]}"
    return f'{told} Under scheduling_policy="priority" a smaller number is served first: {smaller}.'


def _wrong_preempt(victim: str, found: dict[str, Any], wanted: dict[str, Any], case: Case) -> str | None:
    """What the first call that is wrong left behind, the worst first."""
    if found["held"] or found["free"] != wanted["free"]:
        told = f"its blocks are not free: {_free(found['free'], wanted['free'])}"
        return f"{told} self.kv_cache_manager.free(request) gives them back."
    if found["running"] != wanted["running"]:
        still = " It computes nothing now, so it is not running." if victim in found["running"] else ""
        return f"self.running is {found['running']}, and should be {wanted['running']}.{still}"
    if found["waiting"] != wanted["waiting"]:
        return _wrong_queue(victim, found["waiting"], wanted["waiting"], case)
    if found["num_tokens"] != wanted["num_tokens"]:
        told = f"it has {count(found['num_tokens'], 'token')}, and had {wanted['num_tokens']}."
        return f"{told} What it has written stays: the user may have read it. Only its KV is lost."
    if found["num_computed_tokens"] != 0:
        return (
            f"its num_computed_tokens is {found['num_computed_tokens']}. Its blocks are gone and will be another's, so nothing"
            " of it is computed: 0."
        )
    if found["status"] != "preempted":
        return f"its status is {found['status']!r}, and should be RequestStatus.PREEMPTED."
    if found["drafts"]:
        return "its draft tokens are still there. They were guesses for a next step that does not come: spec_token_ids = []."
    if any(isinstance(name, Opaque) for name in found["told"]):
        return "self.preempted_req_ids holds the request; its request_id is wanted."
    if found["told"] != wanted["told"]:
        return (
            f"self.preempted_req_ids is {found['told']}, and should be {wanted['told']}. The worker hears of it there; else it"
            " keeps the request, with a block table that is another's by now."
        )
    earlier = case.get("num_preemptions", 0)
    if found["num_preemptions"] != earlier + 1 and earlier:
        told = f"its num_preemptions is {found['num_preemptions']}, and should be {earlier + 1}."
        return f"{told} It had given way {times(earlier)} before: one more."
    if found["num_preemptions"] != 1 + earlier:
        return f"its num_preemptions is {found['num_preemptions']}. It has given way {times(1)}: that is counted."
    if found["still_cached"] != wanted["still_cached"]:
        return (
            "the manager has forgotten its blocks' content. free(request) comes first: it reads num_computed_tokens to know"
            " which blocks are computed and can be found again (Lab 07)."
        )
    return None


def _free(found: int, wanted: int) -> str:
    return f"{count(found, 'block')} {is_or_are(found)} free, and should be {wanted}."


def _wrong_queue(victim: str, found: list[str], wanted: list[str], case: Case) -> str:
    told = f"self.waiting is {found}, and should be {wanted}."
    if victim not in found:
        return f"{told} {victim} is in no queue any more: nobody would ever finish it."
    if found.count(victim) > 1:
        return f"{told} {victim} is in it twice."
    if case["policy"] != "priority" and found.index(victim) > 0:
        return f"{told} It came before all who wait, and has work in hand: it goes to the front, self.waiting.prepend(request)."
    return told


CHECKS = {
    "5.1": Check(
        cases=wasted_cases,
        judge=judge_wasted,
        minutes=10,
        difficulty=1,
        hints=(
            "Take the first batch alone. How many steps does it run? How many slots is that, and how many of them hold a"
            " token?",
            "`lengths[i : i + batch_size]` for i = 0, batch_size, 2 * batch_size, ... are the batches. The last may be shorter,"
            " and slicing takes care of that.",
            "for each batch: wasted += max(batch) * len(batch) - sum(batch)",
        ),
    ),
    "5.2": Check(
        cases=finish_cases,
        judge=judge_finish,
        minutes=10,
        difficulty=1,
        hints=(
            "There are two ways to end: the token says so, or there may be no more. Which one should the user be told if both"
            " are true?",
            "`token_id in request.stop_eos_ids` and `token_id in request.stop_token_ids` are the first way. The second compares"
            " request.num_output_tokens, which counts token_id already, with request.max_tokens.",
            "if token_id is in either set: return FinishReason.STOP\nif request.num_output_tokens >= request.max_tokens: return"
            " FinishReason.LENGTH\nreturn None",
        ),
    ),
    "5.3": Check(
        cases=schedule_cases,
        judge=judge_schedule,
        minutes=25,
        difficulty=3,
        hints=(
            "Two loops. The first takes requests from the front of the line, until something is in the way: what can that be?"
            " Only if it took nobody, the second goes through those who run.",
            "First loop: while somebody waits and there is a seat, peek, compare num_tokens with the budget that is left,"
            " admit. Stop at the first that does not fit. Second loop: over a copy of self.running; skip whoever is not RUNNING"
            " any more; stop when advance says False.",
            "step = self.open_step(); budget = self.max_num_batched_tokens\nwhile self.waiting and len(self.running) <"
            " self.max_num_seqs:\n    request = self.waiting.peek(); n = request.num_tokens\n    if n > budget, or not"
            " self.admit(step, request, n): break\n    budget -= n\nif step.num_scheduled_tokens is empty:\n    for request in"
            " list(self.running):\n        if it is RUNNING and not self.advance(step, request, 1): break\nreturn"
            " self.close_step(step)",
        ),
    ),
    "5.4": Check(
        cases=preempt_cases,
        judge=judge_preempt,
        minutes=15,
        difficulty=2,
        hints=(
            "The victim should be the one whose loss hurts least: who would have been served last? Then think of all who must"
            " hear of it: the pool, both queues, the request itself, the worker.",
            "FCFS: the last of self.running. Priority: the largest sort_key among them (`max(..., key=...)`). preempt: free"
            " first, then move the request from one queue to the other, then correct its counters.",
            "preempt:\n    self.kv_cache_manager.free(request)\n    take it out of self.running; status PREEMPTED\n   "
            " num_computed_tokens 0, spec_token_ids [], num_preemptions one more\n    its id into self.preempted_req_ids\n   "
            " self.waiting.prepend(request)",
        ),
    ),
}
