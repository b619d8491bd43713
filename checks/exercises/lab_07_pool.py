"""Exercise 7.3: blocks that are free and still worth something. Cases and judge, in the parent only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import count


def pool_cases(seed: int, scale: int = 1) -> list[Case]:
    """Scripts. "A2" allocates 2 blocks for A and publishes both, "a2" allocates 2 that are not published; "-A" frees A's, tail
    first; "=AB" gives B what A's first allocation got, by touch. "-0" frees the null block."""
    rng = random.Random(f"7.3:{seed}")
    by_hand = [
        (5, "A1 -A"),
        (5, "a1 -a"),
        (6, "A2 -A"),
        (6, "A1 B1 -A -B"),
        (6, "A2 b1 -b -A"),
        (6, "A2 b1 -A -b"),
        (6, "A2 =AB"),
        (6, "A2 =AB -A"),
        (6, "A2 =AB -A -B"),
        (6, "A2 -A =AB"),
        (6, "A2 -A =AB -B"),
        (7, "A2 C1 -A -C =AB a1 -B"),
        (5, "A2 B2 -A -B C1 D1"),
        (5, "A2 -A =AB C2 -B -C"),
        (4, "A1 -A -A"),
        (4, "-0"),
    ]
    cases = [_case(num_blocks, script.split()) for num_blocks, script in by_hand]
    return cases + [_case(n, _random_script(rng, n, calls)) for n, calls in ((7, 25), (12, 60 * scale))]


def _case(num_blocks: int, words: list[str]) -> Case:
    steps: list[list[Any]] = []
    for word in words:
        if word[0] == "=":
            steps.append(["touch", word[1], word[2]])
        elif word[0] == "-":
            steps.append(["free", word[1:]])
        else:
            steps.append(["allocate", word[0], int(word[1:]), word[0].isupper()])
    shown = [f"pool = BlockPool({num_blocks})", *map(_show_step, steps)]
    call = "; ".join(shown if len(shown) <= 9 else [*shown[:6], f"... ({count(len(steps), 'call')})"])
    return {"num_blocks": num_blocks, "script": steps, "call": call}


def _show_step(step: list[Any]) -> str:
    if step[0] == "allocate":
        _, owner, n, cached = step
        return f"{owner} = pool.allocate({n}){' and its hashes are published' if cached else ''}"
    if step[0] == "touch":
        return f"{step[2]} hits {step[1]}'s blocks: pool.touch(...)"
    return "pool.free([null block])" if step[1] == "0" else f"pool.free({step[1]}'s blocks, the last one first)"


def _random_script(rng: random.Random, num_blocks: int, calls: int) -> list[str]:
    """Owners come, hit one another's blocks, and go, while the pool evicts. A ledger keeps the script possible."""
    ledger, words = _Ledger(num_blocks), list[str]()
    names = iter([f"{letter}" for _ in range(calls) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    while len(words) < calls:
        held = sorted(ledger.held)
        name = next(names)
        if name in ledger.held or name.lower() in ledger.held:
            continue
        cached = sorted(other for other, ids in ledger.made.items() if ids and all(ledger.hash_of.get(i) == other for i in ids))
        if held and (rng.random() < 0.4 or not ledger.free):
            step: list[Any] = ["free", rng.choice(held)]
            words.append(f"-{step[1]}")
        elif cached and rng.random() < 0.4:
            step = ["touch", rng.choice(cached), name]
            words.append(f"={step[1]}{name}")
        else:
            n, own = rng.randint(1, min(3, len(ledger.free))), rng.random() < 0.75
            step = ["allocate", name if own else name.lower(), n, own]
            words.append(f"{step[1]}{n}")
        if step[0] == "allocate":
            ledger.allocated(step[1], ledger.free[: step[2]], step[3])
        else:
            ledger.apply(step)
    return words


@dataclass
class _Ledger:
    """What the pool should look like. `free` is the order in which blocks are handed out; `made` is who was given which blocks,
    `hash_of` whose hash a block carries."""

    num_blocks: int
    free: list[int] = field(default_factory=list)
    held: dict[str, list[int]] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    ref_cnt: dict[int, int] = field(default_factory=dict)
    hash_of: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))

    def allocated(self, owner: str, ids: list[int], cached: bool) -> None:
        for block in ids:
            self.free.remove(block)
            self.ref_cnt[block] = 1
            self.hash_of.pop(block, None)
            if cached:
                self.hash_of[block] = owner
        self.held[owner] = self.made[owner] = list(ids)

    def apply(self, step: list[Any]) -> None:
        if step[0] == "touch":
            self.held[step[2]] = self.made[step[2]] = list(self.made[step[1]])
            for block in self.held[step[2]]:
                if self.ref_cnt[block] == 0:
                    self.free.remove(block)
                self.ref_cnt[block] += 1
            return
        for block in reversed(self.held.pop(step[1])):
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                if block in self.hash_of:
                    self.free.append(block)
                else:
                    self.free.insert(0, block)


def judge_pool(case: Case, output: Any) -> Verdict:
    ledger = _Ledger(case["num_blocks"])
    for number, (step, answer) in enumerate(zip(case["script"], output["trace"], strict=True), start=1):
        if step[0] == "allocate":
            ledger.allocated(step[1], answer["ids"], step[3])
            continue  # given, not the student's
        refused = step[0] == "free" and step[1] not in ledger.held
        before = dict(ledger.ref_cnt)
        if not refused:
            ledger.apply(step)
        if wrong := _judge_call(ledger, step, answer, refused, before):
            return Verdict(wrong.category, f"Call {number}, {_show_step(step)}: {wrong.message}")
        ledger.free = list(answer["free"])  # among blocks without a hash any order is fine
    return RIGHT


def _judge_call(
    ledger: _Ledger, step: list[Any], answer: dict[str, Any], refused: bool, before: dict[int, int]
) -> Verdict | None:
    if refused:
        if answer.get("error", [""])[0] != "ValueError":
            told = (
                "nobody holds that block: its ref_cnt is 0. It should raise ValueError, else it stands in the free list twice."
            )
            return Verdict("wrong value", told)
        if min(answer["ref_cnt"]) < 0:
            return Verdict("wrong value", "it raised ValueError, and left a ref_cnt of -1 behind. Look first, then count down.")
        return None
    if "error" in answer:
        kind, message = answer["error"]
        why = ""
        if step[0] == "touch" and "not in the free list" in message:
            why = " A block that somebody holds is not in the free list: only one with ref_cnt 0 has to leave it."
        if "in the free list already" in message:
            why = " Put a block into the free list when its last holder lets go, and only then."
        return Verdict("wrong value", f'it raised {kind} ("{message}").{why}')
    for block, wanted in ledger.ref_cnt.items():
        if answer["ref_cnt"][block] != wanted:
            told = f"afterwards block {block} has ref_cnt {answer['ref_cnt'][block]}, and should have {wanted}."
            told += " touch() adds a holder." if step[0] == "touch" else " free() takes one holder away."
            return Verdict("wrong value", told)
    if wrong := _judge_hashes(ledger, answer) or _judge_order(ledger, step, answer["free"], before):
        return wrong
    if answer["list_changed"]:
        return Verdict(
            "input changed", "the pool is right, but the list `blocks` was changed. It is the caller's: only read it."
        )
    return None


def _judge_hashes(ledger: _Ledger, answer: dict[str, Any]) -> Verdict | None:
    for block in ledger.hash_of:
        if not answer["cached"][block]:
            told = f"afterwards block {block} has lost its hash. A free block keeps it, and can be hit, until it is handed out."
            return Verdict("wrong value", told)
    return None


def _judge_order(ledger: _Ledger, step: list[Any], found: list[int], before: dict[int, int]) -> Verdict | None:
    for block in found:
        if ledger.ref_cnt.get(block, 0) > 0:
            held = [owner for owner, ids in ledger.held.items() if block in ids]
            told = f"block {block} is in the free list, and {held[0]} holds it: it could be handed out to somebody else."
            told += " touch() takes it out of the list." if step[0] == "touch" else " It is free when its ref_cnt is 0."
            return Verdict("wrong value", told)
    if missing := [block for block in ledger.free if block not in found]:
        told = f"block {missing[0]} is nobody's, and not in the free list: it never comes back."
        return Verdict("wrong value", told)
    cached = [block for block in found if block in ledger.hash_of]
    worthless = [block for block in found if block not in ledger.hash_of]
    if cached and worthless and found.index(cached[0]) < found.index(worthless[-1]):
        freed = [block for block in ledger.free if before.get(block, 0) > 0]
        if freed and all(block in ledger.hash_of for block in freed):
            told = (
                f"the free list is {found}, front first. Block {freed[0]} has a block_hash and could be hit again, and stands"
            )
            told += f" before block {worthless[-1]}, which nobody can find: what has a hash goes to the back (append)."
            return Verdict("wrong value", told)
        told = (
            f"the free list is {found}, front first. Block {cached[0]} is cached and would be evicted before block"
            f" {worthless[-1]}, in which nobody can find anything. Where does a block without a hash belong?"
        )
        return Verdict("wrong value", told)
    wanted = [block for block in ledger.free if block in ledger.hash_of]
    if cached != wanted:
        return Verdict("wrong value", _why_order(step, cached, wanted, before))
    return None


def _why_order(step: list[Any], cached: list[int], wanted: list[int], before: dict[int, int]) -> str:
    told = f"the cached blocks stand in the free list as {cached}, front first, and should as {wanted}."
    freed = [block for block in wanted if before.get(block, 0) > 0]
    if step[0] == "free" and freed and sorted(cached[-len(freed) :]) != sorted(freed):
        soon = next(block for block in cached if block in freed)
        return f"{told} Block {soon} was used just now: it goes behind what has been unused for longer."
    if step[0] == "free":
        return f"{told} Blocks are given in the order in which they are to be evicted: keep it."
    return f"{told} touch() moves no block but those it is given."
