"""Schedulers driven step by step (exercises 5.3 and 6.2): scripts, a model of what each step should be, and the words for what
it is instead. In the parent only. The model counts tokens and blocks, and shares no code with minivllm's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import count, is_or_are

SIZE = 4  # tokens of a block


@dataclass
class Req:
    """A request as the model sees it."""

    name: str
    prompt: int
    outputs: int
    priority: int
    order: int
    tokens: int = 0
    computed: int = 0
    blocks: int = 0
    cached: int = 0  # what the prefix cache has of it

    @property
    def key(self) -> tuple[int, int]:
        return self.priority, self.order


@dataclass
class World:
    """Queues, blocks and limits; the two rules say what a step is."""

    case: Case
    waiting: list[Req] = field(default_factory=list)
    running: list[Req] = field(default_factory=list)
    steps: list[list[tuple[Req, bool]]] = field(default_factory=list)  # in flight: request, whether it yields a token
    num_seen: int = 0
    num_used: int = 0

    @property
    def by_priority(self) -> bool:
        return bool(self.case["policy"] == "priority")

    @property
    def free(self) -> int:
        return int(self.case["blocks"]) - self.num_used

    def add(self, name: str, prompt: int | list[int], outputs: int, priority: int) -> None:
        length = prompt if isinstance(prompt, int) else len(prompt)
        request = Req(name, length, outputs, priority, self.num_seen, tokens=length)
        request.cached = self.case["cached"].get(name, 0)
        self.num_seen += 1
        self._queue(request, at_front=False)

    def _queue(self, request: Req, at_front: bool) -> None:
        self.waiting.insert(0 if at_front else len(self.waiting), request)
        if self.by_priority:
            self.waiting.sort(key=lambda r: r.key)

    def missing(self, request: Req, tokens: int) -> int:
        """Blocks it lacks for so many tokens."""
        return max(0, -(-tokens // SIZE) - request.blocks)

    def take(self, request: Req, tokens: int) -> None:
        new = self.missing(request, tokens)
        self.num_used += new
        request.blocks += new

    def preempt(self, request: Req) -> None:
        self.running.remove(request)
        self.num_used -= request.blocks
        request.blocks = request.computed = 0
        self._queue(request, at_front=True)

    def victim(self) -> Req:
        return max(self.running, key=lambda r: r.key) if self.by_priority else self.running[-1]

    def update(self) -> None:
        for request, yields in self.steps.pop(0):
            if yields:
                request.tokens += 1
                if request.tokens - request.prompt == request.outputs:
                    self.running.remove(request)
                    self.num_used -= request.blocks

    def make_room(self, request: Req, tokens: int, planned: dict[str, int], preempted: list[str]) -> bool:
        while self.missing(request, tokens) > self.free:
            victim = self.victim()
            planned.pop(victim.name, None)
            self.preempt(victim)
            preempted.append(victim.name)
            if victim is request:
                return False
        self.take(request, tokens)
        return True

    def send(self, planned: dict[str, int]) -> None:
        """The step is under way: its tokens count as computed."""
        step = []
        for request in [r for r in self.running if r.name in planned]:
            request.computed += planned[request.name]
            step.append((request, request.computed == request.tokens))
        self.steps.append(step)


Rule = Callable[[World], tuple[dict[str, int], list[str]]]


def whole_prompts(world: World) -> tuple[dict[str, int], list[str]]:
    """Lab 05's rule: prompts first, whole, as long as they fit; without any, a token for everybody."""
    planned: dict[str, int] = {}
    preempted: list[str] = []
    while world.waiting and len(world.running) < world.case["seats"]:
        head = world.waiting[0]
        too_many = sum(planned.values()) + head.tokens > world.case["budget"]
        if too_many or world.missing(head, head.tokens) > world.free:
            break
        world.running.append(world.waiting.pop(0))
        world.take(head, head.tokens)
        planned[head.name] = head.tokens
    if planned:
        return planned, preempted
    for request in list(world.running):
        if request not in world.running:
            continue
        if not world.make_room(request, request.computed + 1, planned, preempted):
            break
        planned[request.name] = 1
    return planned, preempted


def unified(world: World) -> tuple[dict[str, int], list[str]]:
    """Lab 06's rule: all that a request lacks, under one budget; those who run first."""
    planned: dict[str, int] = {}
    preempted: list[str] = []
    for request in list(world.running):
        if request not in world.running:
            continue
        n = chunk(world, request, request.computed, planned)
        if n == 0:
            continue
        if not world.make_room(request, request.computed + n, planned, preempted):
            break
        planned[request.name] = n
    while world.waiting and len(world.running) < world.case["seats"] and not preempted:
        head = world.waiting[0]
        n = chunk(world, head, head.cached, planned)
        if n == 0 or world.missing(head, head.tokens) > world.free:
            break
        world.running.append(world.waiting.pop(0))
        head.computed = head.cached
        world.take(head, head.computed + n)
        planned[head.name] = n
    return planned, preempted


def chunk(world: World, request: Req, computed: int, planned: dict[str, int]) -> int:
    lacks = request.tokens - computed
    threshold = world.case["threshold"]
    if 0 < threshold < lacks and len(world.running) + len(world.waiting) > 1:
        lacks = threshold
    left = int(world.case["budget"]) - sum(planned.values())
    if world.case["chunks"] is False and request.tokens - computed > left:
        return 0
    return min(lacks, left)


# ----------------------------------------------------------------------------------------------------------------- cases


def steps_case(rule: Rule, script: list[list[Any]] | str, **settings: Any) -> Case:
    """A script: lists as run_steps takes them, or words: "A5+3" adds a request of 5 prompt tokens that is to answer 3 ("A5+3@2"
    with priority 2), "s" schedules, "u" takes the oldest step in, "." is both, "..." goes on until all are done."""
    case: Case = {
        "budget": 64, "seats": 8, "blocks": 100, "policy": "fcfs", "caching": False, "threshold": 0, "chunks": None,
        "cached": {}, **settings,
    }  # fmt: skip
    words = script.split() if isinstance(script, str) else script
    case["script"] = [step for word in words for step in (_steps_of(word) if isinstance(word, str) else [word])]
    if words[-1] == "...":
        case["script"] += _until_done(rule, case)
    case["call"] = _call(case)
    return case


def _steps_of(word: str) -> list[list[Any]]:
    if word == "...":
        return []
    if set(word) <= set("su."):
        return [
            step for mark in word for step in {"s": [["schedule"]], "u": [["update"]]}.get(mark, [["schedule"], ["update"]])
        ]
    numbers, _, priority = word[1:].partition("@")
    prompt, _, outputs = numbers.partition("+")
    return [["add", word[0], int(prompt), int(outputs), int(priority or 0)]]


def _until_done(rule: Rule, case: Case) -> list[list[Any]]:
    world, more = World(case), 0
    for step in case["script"]:
        play(rule, world, step)
    while world.waiting or world.running:
        play(rule, world, ["schedule"])
        play(rule, world, ["update"])
        more += 1
        assert more < 500, "the script never ends"
    return [["schedule"], ["update"]] * more


def play(rule: Rule, world: World, step: list[Any]) -> tuple[dict[str, int], list[str]] | None:
    """One line of a script, in the model."""
    if step[0] == "add":
        world.add(*step[1:])
    elif step[0] == "update":
        world.update()
    else:
        planned, preempted = rule(world)
        world.send(planned)
        return planned, preempted
    return None


def _call(case: Case) -> str:
    limits = (
        f"max_num_batched_tokens {case['budget']}, max_num_seqs {case['seats']}, {count(case['blocks'], 'block')} of {SIZE}"
    )
    limits += ", priorities" if case["policy"] == "priority" else ""
    limits += f", long_prefill_token_threshold {case['threshold']}" if case["threshold"] else ""
    limits += ", prefix caching on" if case["caching"] else ""
    parts: list[str] = []
    run = 0
    for step in [*case["script"], ["end"]]:
        if step[0] == "schedule":
            run += 1
        if step[0] in ("add", "end") and run:
            parts.append(f"{count(run, 'step')}")
            run = 0
        if step[0] == "add":
            prompt = step[2] if isinstance(step[2], int) else len(step[2])
            importance = f", priority {step[4]}" if case["policy"] == "priority" else ""
            parts.append(f"{step[1]} comes ({count(prompt, 'prompt token')}, {step[3]} to answer{importance})")
    shown = parts if len(parts) <= 8 else [*parts[:7], f"... ({len(parts) - 7} more)"]
    return f"{limits}: {'; '.join(shown)}"


# ---------------------------------------------------------------------------------------------------------------- verdict


def judge_steps(rule: Rule, case: Case, output: Any, words: Callable[[World, dict[str, int], dict[str, int]], str]) -> Verdict:
    """`words(world before the step, wanted, found)` says what a wrong step did."""
    if output["own"] != ["schedule"]:
        return Verdict("missing function", "The class in this cell has no schedule method of its own: it was inherited.")
    world, trace, number = World(case), iter(output["trace"]), 0
    for step in case["script"]:
        if step[0] != "schedule":
            play(rule, world, step)
            continue
        number += 1
        before = snapshot(world)
        wanted = play(rule, world, step)
        assert wanted is not None
        answer = next(trace)
        told = _wrong_return(answer) or _wrong_step(before, world, wanted, answer, words)
        if told:
            return Verdict("wrong value", f"Step {number}. {_situation(before)} {told}")
    return RIGHT


def snapshot(world: World) -> World:
    copies = {id(r): Req(**{f: getattr(r, f) for f in Req.__dataclass_fields__}) for r in (*world.waiting, *world.running)}
    waiting, running = ([copies[id(r)] for r in queue] for queue in (world.waiting, world.running))
    return World(world.case, waiting, running, num_seen=world.num_seen, num_used=world.num_used)


def _situation(world: World) -> str:
    """ "Running: A (6 tokens, 5 computed). Waiting: B (6 tokens). 3 blocks are free." """
    running = ", ".join(f"{r.name} ({count(r.tokens, 'token')}, {r.computed} computed)" for r in world.running) or "nobody"
    waiting = ", ".join(f"{r.name} ({count(r.tokens, 'token')})" for r in world.waiting) or "nobody"
    return f"Running: {running}. Waiting: {waiting}. {count(world.free, 'block').capitalize()} {is_or_are(world.free)} free."


def _wrong_return(answer: dict[str, Any]) -> str:
    if "returned" not in answer:
        return ""
    if answer["returned"] == "a step that is not closed":
        return (
            "The step was returned as it is. `return self.close_step(step)`: that counts its tokens as computed, and tells the"
            " worker who left."
        )
    return f"schedule() should return self.close_step(step), and returned {answer['returned']}. Is a `return` missing?"


def _wrong_step(
    before: World,
    after: World,
    wanted: tuple[dict[str, int], list[str]],
    answer: dict[str, Any],
    words: Callable[[World, dict[str, int], dict[str, int]], str],
) -> str:
    planned, preempted = wanted
    found = {str(name): int(n) for name, n in answer["scheduled"]}
    if answer["total"] != sum(found.values()):
        named = next((name for name in found if found[name] != planned.get(name)), "Somebody")
        total = count(answer["total"], "token")
        return f"{named} is in this step twice, for {total} in all: it started in it, and then got another."
    if found != planned:
        return f"The step is {show(found)}, and should be {show(planned)}. {words(before, planned, found)}".rstrip()
    if answer["preempted"] != preempted:
        gave = ", ".join(answer["preempted"]) or "nobody"
        return f"The step is right, but {gave} gave way, and {', '.join(preempted) or 'nobody'} should have."
    for name, queue in (("running", after.running), ("waiting", after.waiting)):
        names = [r.name for r in queue]
        if answer[name] != names:
            return f"The step is right, but afterwards self.{name} is {answer[name]}, and should be {names}."
    for request in after.running:
        if (computed := answer["computed"][request.name]) != request.computed:
            told = (
                f"{request.name} counts {count(computed, 'token')} as computed afterwards, and should count {request.computed}."
            )
            told += " What the prefix cache had is among them: admit takes the hits and their number." if request.cached else ""
            return f"The step is right, but {told}"
    return ""


def show(planned: dict[str, int]) -> str:
    """ "{A: 5, B: 6}" """
    return "{" + ", ".join(f"{name}: {n}" for name, n in planned.items()) + "}" if planned else "empty"


def limits_broken(world: World, found: dict[str, int]) -> str:
    """What no step may do, whatever the rule."""
    budget, seats = world.case["budget"], world.case["seats"]
    total = sum(found.values())
    if total > budget:
        return f"That is {total} tokens in all; max_num_batched_tokens is {budget}."
    names = {r.name for r in world.running} | set(found)
    if len(names) > seats and len(found) > len(world.running):
        return f"Then {len(names)} requests would run; max_num_seqs is {seats}."
    if 0 in found.values():
        name = next(name for name, n in found.items() if n == 0)
        return f"{name} is in it with no token: one that computes nothing is not in the step."
    line = [r.name for r in world.waiting]
    started = [name for name in found if name in line]
    skipped = [name for name in line[: max(map(line.index, started), default=-1) + 1] if name not in started]
    if skipped:
        return f"{started[-1]} starts before {skipped[0]}, which came first and does not fit yet. Nobody overtakes: stop there."
    return ""
