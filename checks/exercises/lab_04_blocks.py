"""Exercises 4.1 and 4.2: who holds which block. Cases and judges, in the parent only; lab_04.py gathers them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.blocks_run import NUMBER
from checks.exercises.words import count, described, is_or_are

# ------------------------------------------------------------------------------------------------------- 4.1 BlockPool


def pool_cases(seed: int, scale: int = 1) -> list[Case]:
    """Scripts: "A2" allocates 2 blocks for request A, "-A" frees them, "+A" lets somebody else hold them too, "--A" frees a
    list that has them twice, "-0" the null block. The later ones wrap around the pool many times. `scale` makes what is drawn
    larger, for grading."""
    rng = random.Random(f"4.1:{seed}")
    by_hand = [
        (4, "A1"),
        (4, "A2 B1"),
        (3, "A2 B1"),
        (4, "A0 B3"),
        (4, "A2 -A B3"),
        (4, "A2 -A B2 C1"),
        (4, "A1 B1 C1 -B D1"),
        (4, "A2 B3 B1"),
        (3, "A1 -A A1 -A A2 -A B2"),
        (5, "A2 B1 -A C3 -B D1 -C"),
        (4, "A2 -A -A"),
        (3, "A1 --A"),
        (3, "-0"),
        (4, "A2 +A -A B2 -A B2"),
        (2, "A1 B1 -A B1"),
    ]
    cases = [_pool_case(num_blocks, script.split()) for num_blocks, script in by_hand]
    cases += [
        _pool_case(num_blocks, _random_script(rng, num_blocks, calls))
        for num_blocks, calls in ((5, 30), (8, 80), (33 * scale, 200 * scale))
    ]
    return cases


def _pool_case(num_blocks: int, words: list[str]) -> Case:
    steps: list[list[Any]] = []
    for word in words:
        if word == "-0":
            steps.append(["free null"])
        elif word.startswith("--"):
            steps.append(["free twice", word[2:]])
        elif word[0] in "+-":
            steps.append(["share" if word[0] == "+" else "free", word[1:]])
        else:
            steps.append(["allocate", int(word[1:]), word[0]])
    call = _shorten([f"pool = BlockPool({num_blocks})", *map(_show_pool_step, steps)])
    return {"num_blocks": num_blocks, "script": steps, "call": call}


def _random_script(rng: random.Random, num_blocks: int, calls: int) -> list[str]:
    held: dict[str, int] = {}
    words: list[str] = []
    while len(words) < calls:
        free = num_blocks - 1 - sum(held.values())
        idle = [name for name in "ABCDEFGH" if name not in held]
        if held and (not idle or rng.random() < 0.45):
            name = rng.choice(sorted(held))
            words.append(f"-{name}")
            del held[name]
        else:
            n = rng.randint(0, free + 1) if rng.random() < 0.3 else rng.randint(0, max(1, free // 2))
            words.append(f"{idle[0]}{n}")
            if n <= free:
                held[idle[0]] = n
    return words


def _show_pool_step(step: list[Any]) -> str:
    if step[0] == "allocate":
        return f"{step[2]} = pool.allocate({step[1]})"
    if step[0] == "share":
        return f"somebody else holds {step[1]} too (ref_cnt + 1)"
    if step[0] == "free twice":
        return f"pool.free({step[1]} + {step[1]})"
    return f"pool.free({'[null block]' if step[0] == 'free null' else step[1]})"


def _shorten(parts: list[str]) -> str:
    shown = parts if len(parts) <= 9 else [*parts[:6], f"... ({len(parts) - 1} calls)"]
    return "; ".join(shown)


@dataclass
class _Ledger:
    """What the pool should look like: who holds which block."""

    num_blocks: int
    held: dict[str, list[int]] = field(default_factory=dict)
    ref_cnt: dict[int, int] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        return self.num_blocks - 1 - sum(n > 0 for n in self.ref_cnt.values())

    def holder(self, block: int) -> str | None:
        return next((name for name, ids in self.held.items() if block in ids and self.ref_cnt.get(block, 0) > 0), None)


def judge_pool(case: Case, output: Any) -> Verdict:
    ledger = _Ledger(case["num_blocks"])
    before: list[int] = [0] * case["num_blocks"]
    for number, (step, answer) in enumerate(zip(case["script"], output["trace"], strict=False), start=1):
        if "strangers" in answer:
            told = f"it should return a list of {_count(step[1])} (KVCacheBlock objects), and its list holds elements of type"
            told += f" {answer['strangers']}. Return the blocks themselves, from self.free_blocks."
            return Verdict("wrong type", f"Call {number}, {_show_pool_step(step)}: {told}")
        if step[0] == "allocate":
            wrong = _judge_allocate(ledger, step[1], step[2], answer, before)
        elif step[0] == "share":
            for block in ledger.held[step[1]]:
                ledger.ref_cnt[block] += 1
            wrong = None
        elif step[0] == "free twice":
            if wrong := _judge_free_twice(answer):
                return Verdict(wrong.category, f"Call {number}, {_show_pool_step(step)}: {wrong.message}")
            break  # which of them have gone back is up to the student
        else:
            wrong = _judge_free(ledger, None if step[0] == "free null" else step[1], answer)
        wrong = wrong or _judge_counters(ledger, answer, step)
        if wrong:
            return Verdict(wrong.category, f"Call {number}, {_show_pool_step(step)}: {wrong.message}")
        before = answer["ref_cnt"]
    return _judge_capabilities(output["capabilities"], "allocate", "caching", "no prefix cache yet")


def _judge_allocate(ledger: _Ledger, n: int, owner: str, answer: dict[str, Any], before: list[int]) -> Verdict | None:
    free, fits = ledger.num_free, n <= ledger.num_free
    if "error" in answer:
        return _judge_allocate_error(n, free, answer["num_free"], *answer["error"])
    returned = answer["returned"]
    if not fits:
        told = f"it returned {described(returned)} although {_only(free)} free. It should raise ValueError, and take nothing."
        return Verdict("wrong value", told)
    if not isinstance(returned, list) or not all(type(block) is int for block in returned):
        return Verdict("wrong type", f"it should return a list of {_count(n)}, and returned {described(returned)}.")
    if len(returned) != n:
        return Verdict("wrong value", f"it returned {_count(len(returned))}, {returned}, and should return {n}.")
    for block in returned:
        if block == 0:
            return Verdict("wrong value", "it handed out block 0, the null block, which is nobody's.")
        if returned.count(block) > 1:
            return Verdict("wrong value", f"it handed out block {block} twice in one call: {returned}.")
        if (other := ledger.holder(block)) is not None:
            told = f"block {block} is in two tables (requests {other} and {owner}): allocate() handed it out while its ref_cnt"
            told += f" was {before[block]}." if before[block] else " should have been 1. Was it never set?"
            return Verdict("wrong value", told)
        if answer["ref_cnt"][block] != 1:
            told = (
                f"block {block} has just been handed out, and its ref_cnt is {answer['ref_cnt'][block]}. One table holds it: 1."
            )
            return Verdict("wrong value", told)
    ledger.held[owner] = returned
    ledger.ref_cnt |= dict.fromkeys(returned, 1)
    return None


def _judge_allocate_error(n: int, free: int, left: int, kind: str, message: str) -> Verdict | None:
    """`free` blocks were free before the call, `left` are after it."""
    if n <= free:
        exactly = " Taking the last one is fine." if n == free and n else ""
        return Verdict("wrong value", f'it raised {kind} ("{message}") although {_blocks(free)} free.{exactly}')
    if kind != "ValueError":
        told = f'{_only(free)} free, and it raised {kind} ("{message}").'
        return Verdict("wrong value", f"{told} Compare first, and raise ValueError with both numbers.")
    if left < free:
        told = f"{_blocks(free)} free before it, and {_blocks(left)} free after it, although it raised ValueError."
        told += " A call that is refused takes nothing: compare n with num_free_blocks before the first block is taken."
        return Verdict("wrong value", told)
    missing = [what for what, number in (("asked for", n), ("free", free)) if str(number) not in message]
    if missing:
        told = (
            f'the message "{message}" does not say how many blocks are {" and how many are ".join(missing)} ({n} and {free}).'
        )
        return Verdict("wrong value", told)
    return None


def _judge_free(ledger: _Ledger, owner: str | None, answer: dict[str, Any]) -> Verdict | None:
    blocks = [0] if owner is None else ledger.held[owner]
    unheld = [block for block in blocks if ledger.ref_cnt.get(block, 0) < 1]
    if "error" in answer:
        kind, message = answer["error"]
        if not unheld:
            return Verdict("wrong value", f'it raised {kind} ("{message}"), and nothing was wrong with that call.')
        if kind != "ValueError":
            return Verdict("wrong value", f'it raised {kind} ("{message}"). Raise ValueError for a block that nobody holds.')
        return None
    if unheld:
        what = "block 0 is the null block, and nobody's" if owner is None else f"block {unheld[0]} is free already (ref_cnt 0)"
        why = "else it stands in the free list and is handed out" + (
            " twice: two requests write over each other." if owner else "."
        )
        return Verdict("wrong value", f"{what}. It should raise ValueError, {why}")
    for block in blocks:
        ledger.ref_cnt[block] -= 1
    return None


def _judge_free_twice(answer: dict[str, Any]) -> Verdict | None:
    if answer.get("error", [""])[0] == "ValueError":
        return None
    told = f"it raised {answer['error'][0]}" if "error" in answer else "it raised nothing"
    return Verdict(
        "wrong value",
        f"each block of A is in this list twice, and {told}. When the second one's turn comes, nobody holds the block any more:"
        " that is a ValueError, else it stands in the free list twice. Look at ref_cnt right before you lower it.",
    )


def _judge_counters(ledger: _Ledger, answer: dict[str, Any], step: list[Any]) -> Verdict | None:
    for block in range(1, ledger.num_blocks):
        wanted, found = ledger.ref_cnt.get(block, 0), answer["ref_cnt"][block]
        if wanted != found:
            told = f"afterwards block {block} has ref_cnt {found}, and should have {wanted}."
            if step[0] == "free" and found > wanted:
                told += " free() takes one away: its holder is gone."
            elif "error" in answer:
                told += " A block that is refused keeps its ref_cnt: look before you lower it."
            return Verdict("wrong value", told)
    if answer["num_free"] != ledger.num_free:
        told = f"afterwards num_free_blocks is {answer['num_free']}, and should be {ledger.num_free}."
        shared = [b for b, n in ledger.ref_cnt.items() if n > 0 and step[0] == "free" and b in ledger.held[step[1]]]
        if "error" in answer:
            told += " A call that is refused takes nothing and gives nothing back: check before the first block is moved."
        elif shared:
            told += f" Block {shared[0]} still has a holder (ref_cnt {ledger.ref_cnt[shared[0]]}): it is not free yet."
        elif step[0] == "free":
            told += " Freed blocks go back to the free list, each of them once."
        return Verdict("wrong value", told)
    return None


def _judge_capabilities(found: list[str] | None, wanted: str, not_yet: str, why: str) -> Verdict:
    if found is not None and wanted in found and not_yet not in found:
        return RIGHT
    line = f'capabilities = frozenset({{"{wanted}"}})'
    return Verdict(
        "wrong value", f"The methods are right. Leave the line `{line}` in the class: it tells the engine that there is {why}."
    )


# --------------------------------------------------------------------------------------------------- 4.2 allocate_slots


def slots_cases(seed: int, scale: int = 1) -> list[Case]:
    """Scripts: "A0+6" asks for slots for 6 more tokens of request A, which has 0 computed ones; "-A" frees A."""
    rng = random.Random(f"4.2:{seed}")
    by_hand = [
        (9, 4, "A0+1"),
        (9, 4, "A0+4"),
        (9, 4, "A0+6"),
        (9, 4, "A0+3 A3+1"),
        (9, 4, "A0+3 A3+1 A4+1"),
        (9, 4, "A0+4 A4+1 A5+1"),
        (9, 4, "A0+4 A4+9"),
        (9, 1, "A0+2 A2+1"),
        (9, 4, "A0+5 B0+3 A5+1 B3+1 B4+1"),
        (4, 4, "A0+12"),
        (4, 4, "A0+13"),
        (4, 4, "A0+8 B0+5 B0+4 A8+1"),
        (4, 4, "A0+12 A12+1 -A B0+12"),
        (9, 4, "A0+8 A3+1 A8+1"),
        (4, 4, "A0+5 B0+5 -A B0+5 -B A0+12"),
    ]
    cases = [_slots_case(blocks, size, script.split()) for blocks, size, script in by_hand]
    cases += [
        _slots_case(blocks, size, _random_slots(rng, blocks, size, 40 * scale))
        for blocks, size in ((7, 4), (12, 3), (20 * scale, 16))
    ]
    return cases


def _slots_case(num_blocks: int, block_size: int, words: list[str]) -> Case:
    steps: list[list[Any]] = []
    for word in words:
        if word[0] == "-":
            steps.append(["free", word[1:]])
        else:
            computed, n = map(int, word[1:].split("+"))
            steps.append(["slots", word[0], computed, n])
    made = f"KVCacheManager(pool of {count(num_blocks - 1, 'free block')}, block_size={block_size})"
    call = _shorten([made, *map(_show_slots_step, steps)])
    return {"num_blocks": num_blocks, "block_size": block_size, "script": steps, "call": call}


def _random_slots(rng: random.Random, num_blocks: int, size: int, calls: int) -> list[str]:
    """Requests that grow a token at a time after a prompt, and are freed when the pool is full or at random."""
    tokens: dict[str, int] = {}
    words: list[str] = []
    free = num_blocks - 1
    while len(words) < calls:
        idle = [name for name in "ABCDEF" if name not in tokens]
        if tokens and rng.random() < 0.15:
            name = rng.choice(sorted(tokens))
            free += -(-tokens.pop(name) // size)
            words.append(f"-{name}")
            continue
        name = idle[0] if idle and (not tokens or rng.random() < 0.25) else rng.choice(sorted(tokens))
        had = tokens.get(name, 0)
        n = rng.randint(1, 2 * size + 1) if name not in tokens else rng.choice([1, 1, 1, size])
        words.append(f"{name}{had}+{n}")
        more = -(-(had + n) // size) - -(-had // size)
        if more <= free:
            tokens[name], free = had + n, free - more
    return words


def _show_slots_step(step: list[Any]) -> str:
    if step[0] == "free":
        return f"free({step[1]})"
    return f"allocate_slots({step[1]}, {step[3]}) with {step[2]} computed"


def judge_slots(case: Case, output: Any) -> Verdict:
    size, free = case["block_size"], case["num_blocks"] - 1
    tables: dict[str, list[int]] = {}
    for number, (step, answer) in enumerate(zip(case["script"], output["trace"], strict=False), start=1):
        owner = step[1]
        if step[0] == "free":
            free += len(tables.pop(owner, []))
            wrong = _judge_tables(tables, answer)
        else:
            wrong = _judge_slots_call(step, size, free, tables, answer)
            if not wrong and answer["returned"] is not None:
                free -= len(answer["returned"]) if isinstance(answer["returned"], list) else 0
        if wrong:
            return Verdict(wrong.category, f"Call {number}, {_show_slots_step(step)}: {wrong.message}")
    return _judge_capabilities(output["capabilities"], "paging", "prefix caching", "no prefix cache yet")


def _judge_slots_call(
    step: list[Any], size: int, free: int, tables: dict[str, list[int]], answer: dict[str, Any]
) -> Verdict | None:
    _, owner, computed, n = step
    table, returned = tables.get(owner, []), answer.get("returned")
    needed = max(0, -(-(computed + n) // size) - len(table))
    total = computed + n
    state = f"{owner} holds {_count(len(table))} of {count(size, 'slot')}, and after this step has {computed} + {n} ="
    state += f" {count(total, 'token')}: {_count(needed, 'new ')} {is_or_are(needed)} needed."
    strange = _judge_slots_stopped(step, free, needed, state, answer)
    if strange:
        return strange
    if needed > free:
        if returned is not None:
            told = f"{state} But {_only(free)} free: it should return None, and returned {described(returned)}."
            return Verdict("wrong value", told)
        return _judge_tables(tables, answer) or _judge_untouched(answer, free, state)
    if returned is None and not needed:
        told = f"{state} It returned None. Is a `return` missing? None says that the pool has too few; nothing is needed: []."
        return Verdict("wrong value", told)
    if returned is None:
        return Verdict("wrong value", f"{state} Of {_count(free)} free, it returned None. Is a `return` missing?")
    if not isinstance(returned, list) or not all(type(block) is int for block in returned):
        return Verdict("wrong type", f"It should return a list of the new blocks, and returned {described(returned)}.")
    if len(returned) != needed:
        return Verdict("wrong value", f"{state} It returned {len(returned)}.{_count_reason(step, size, table, returned)}")
    tables[owner] = [*table, *returned]
    return _judge_tables(tables, answer)


def _judge_slots_stopped(step: list[Any], free: int, needed: int, state: str, answer: dict[str, Any]) -> Verdict | None:
    """What ends a script: blocks that are none, a changed request, and calls of the pool that cannot be."""
    if "strangers" in answer:
        told = (
            f"its list holds elements of type {answer['strangers']}, and should hold the blocks that the pool's allocate gave."
        )
        return Verdict("wrong type", told)
    if "request" in answer:
        told = f"The request was changed: it is {answer['request']} now, and had {step[2]} computed tokens. Leave it as it is:"
        return Verdict("input changed", f"{told} the scheduler counts tokens, once they are computed.")
    negative = next((n for n in answer["asked"] if isinstance(n, int) and n < 0), None)
    if negative is not None:
        told = f"{state} It called allocate({negative}). A request that holds more than it needs takes no block: max(0, ...)."
        return Verdict("wrong calls", told)
    if "refused" not in answer:
        return None
    told = f"{state} It asked the pool for {_count(answer['asked'][-1])} of {_count(free)} free, which raised ValueError"
    told += f' ("{answer["refused"]}").'
    if needed > free:
        told += " Where the pool has too few, return None: compare with num_free_blocks before anything is taken."
    return Verdict("wrong value", told)


def _count_reason(step: list[Any], size: int, table: list[int], returned: list[int]) -> str:
    _, owner, computed, n = step
    if table and returned[: len(table)] == table:
        return " Return the new blocks only: the worker adds them to the table it has."
    if len(returned) == -(-(computed + n) // size) and table:
        return f" {owner} has {_count(len(table))} already; only what is missing is new."
    if computed and len(returned) == max(0, -(-n // size) - len(table)):
        return f" Did you count the {count(computed, 'token')} it has already, beside the {n} of this step?"
    if len(returned) == (computed + n) // size + 1 - len(table) and (computed + n) % size == 0:
        return f" {computed + n} tokens fill whole blocks: the next block comes with the next token."
    if len(returned) == 1:
        return " One block was taken, though more are missing: allocate(n) takes as many as are asked for."
    if len(returned) == max(0, (computed + n) // size - len(table)):
        return " A block that is not full is a block too: round up."
    if len(returned) == -(-n // size):
        return " The last block may have room: count all tokens, then subtract the blocks it has."
    return ""


def _judge_tables(tables: dict[str, list[int]], answer: dict[str, Any]) -> Verdict | None:
    """The tables are what they should be; an empty one may be there or not."""
    found = answer["tables"]
    for owner in [*tables, *found]:
        wanted, there = tables.get(owner, []), found.get(owner, [])
        if wanted == there or (not wanted and not there):
            continue
        told = f"Afterwards the block table of {owner} is {described(there)}, and should be {wanted}."
        if not isinstance(there, list):
            told += " It is a list of blocks."
        elif owner not in found and owner in tables:
            told += f" req_to_blocks has no entry {owner!r}. Its keys are request ids (request.request_id)."
            told += " Was the list stored there?"
        elif NUMBER in there:
            told += " These are bare numbers. The table is to hold the blocks themselves: they go back to the pool."
        elif wanted[-len(there) :] == there:
            told += " The new blocks join those it has, behind them."
        elif len(there) > len(wanted):
            told += " Where there is no room for all that is needed, nothing is taken." if answer["returned"] is None else ""
        return Verdict("wrong value", told)
    return None


def _judge_untouched(answer: dict[str, Any], free: int, state: str) -> Verdict | None:
    if answer["num_free"] == free:
        return None
    told = (
        f"{state} It returned None, which is right, but {answer['num_free']} of {_count(free)} are free now: some were taken."
    )
    return Verdict("wrong value", told)


# ------------------------------------------------------------------------------------------------------------------- words


def _count(n: int, kind: str = "") -> str:
    return count(n, f"{kind}block")


def _blocks(n: int) -> str:
    return f"{count(n, 'block')} {is_or_are(n)}"


def _only(n: int) -> str:
    return f"{'only ' if n else ''}{_blocks(n)}"
