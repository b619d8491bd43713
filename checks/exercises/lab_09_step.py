"""Exercise 9.1: a decode step that can be captured. Cases and judge, in the parent only; lab_09.py gathers them."""

from __future__ import annotations

import random
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_09_run import BLOCK_SIZE, TABLE_WIDTH, VOCABULARY, WIDTH, old_cache, toy_model
from checks.exercises.words import count, is_or_are, kind_of, numbers


def repair_cases(seed: int) -> list[Case]:
    """Two steps each: the one that is recorded, and a later one, in which sequences are longer and need more blocks."""
    rng = random.Random(f"9.1:{seed}")
    by_hand = [
        (1, [[1, 2, 3]], [3], [6]),
        (2, [[2, 1, 3]], [4], [9]),
        (2, [[3, 1, 6], [5, 2, 4]], [2, 4], [5, 7]),
        (4, [[3, 1, 7], [5, 2, 9], [8, 4, 6]], [1, 4, 3], [12, 5, 1]),
    ]
    cases = [_case(rng, *parts) for parts in by_hand]
    for _ in range(2):
        real = rng.randint(3, 6)
        ids = rng.sample(range(1, 1 + TABLE_WIDTH * real), TABLE_WIDTH * real)
        blocks = [ids[TABLE_WIDTH * i : TABLE_WIDTH * (i + 1)] for i in range(real)]
        first = [rng.randint(1, BLOCK_SIZE) for _ in range(real)]
        later = [rng.randint(BLOCK_SIZE + 1, TABLE_WIDTH * BLOCK_SIZE), *(rng.randint(1, 12) for _ in range(real - 1))]
        cases.append(_case(rng, real + 2, blocks, first, later))
    return cases


def _case(rng: random.Random, rows: int, blocks: list[list[int]], first: list[int], later: list[int]) -> Case:
    def step(lens: list[int]) -> dict[str, list[int]]:
        return {"token_ids": [rng.randrange(1, VOCABULARY) for _ in lens], "seq_lens": lens}

    padding = f" and {count(rows - len(blocks), 'padding row')}" if rows > len(blocks) else ""
    call = f"decode_step of {count(len(first), 'sequence')}{padding}, recorded with seq_lens {first}, replayed with {later}"
    return {
        "rows": rows,
        "blocks": blocks,
        "num_blocks": 1 + max(max(table) for table in blocks),
        "steps": [step(first), step(later)],
        "seed": rng.randrange(1000),
        "call": call,
    }


def judge_repair(case: Case, output: Any) -> Verdict:
    hidden = output["hidden"]
    if not isinstance(hidden, torch.Tensor):
        returned = "None (is a `return` missing?)" if hidden is None else kind_of(hidden)
        return Verdict("wrong type", f"It should return the hidden states, a tensor, and returned {returned}.")
    wanted, cache = _expected(case, 0)
    if list(hidden.shape) != [case["rows"], WIDTH]:
        told = f"It returned shape {list(hidden.shape)}, and should return [{case['rows']}, {WIDTH}]: a row for each of the"
        return Verdict("wrong shape", f"{told} buffers' rows, padding included. A graph's shapes are the same every time.")
    if wrong := _differs(case, hidden, output["cache"], wanted, cache, 0):
        return Verdict("wrong value", f"Run as it is, not recorded yet: {wrong}")
    if output["changed"]:
        return Verdict("input changed", "The step changes the buffers. Only the engine fills them, before each replay.")
    if left := _faults(case, output):
        shown = "\n".join(f"- {line}" for line in left)
        told = f"It computes the right numbers, and {count(len(left), 'line')} {is_or_are(len(left))} left that no recording"
        return Verdict("wrong calls", f"{told} repeats:\n{shown}")
    wanted, cache = _expected(case, 1)
    why = "Something in it is still as it was when it was recorded: a number, or a tensor, that does not come from the buffers."
    if "replay_error" in output:
        return Verdict("wrong value", f"The replay broke: {output['replay_error']}\n{why}")
    if wrong := _differs(case, output["replayed"], output["replayed_cache"], wanted, cache, 1):
        return Verdict("wrong value", f"Recorded in one step and replayed in the next: {wrong} {why}")
    return RIGHT


# -------------------------------------------------------------------------------------------------------- what is left

_KINDS = {
    "host read": "Python asks the device for a number, and goes by it. A replay asks nobody: it goes the way of the recording",
    "host copy": "makes a tensor of Python's numbers. They are copied when it is recorded; every replay has those old ones",
    "data-dependent shape": "how many rows come out depends on the data. A recorded operator has one shape, for ever",
    "fresh input": "reads a tensor that is a new one in every step. The recording knows the old one's memory, not the name",
    "wait": "waits for the device. While a step is recorded there is nothing to wait for",
}
_HOST = {
    "token_ids": "host.token_ids is a new tensor in every step. The recording knows the old one's memory, not the name",
    "seq_lens": "host.seq_lens are Python's numbers. The recording has those of its own step in it",
    "num_blocks": "host.num_blocks is a number of Python's: {recorded} in the recording, for ever, and {later} in a later step",
}
_INSTEAD = {"token_ids": "buffers.input_ids", "seq_lens": "buffers.seq_lens", "num_blocks": "the whole of buffers.block_tables"}


def _faults(case: Case, output: Any) -> list[str]:
    """A sentence for each line that is still wrong, in the order of the lines. What the checker does not see, since Python's
    numbers are nobody's tensors, shows in that the result depends on them."""
    found: dict[int, str] = {}
    read_at = {line: name for name, line, _ in output["depends"] if line is not None}
    for kind, call, line, code in output["faults"]:
        if line not in found:
            found[line] = f"line {line}, `{code}`: {_KINDS[kind]} ({kind}: {call}).{_instead(read_at.get(line))}"
    for name, line, code in output["depends"]:
        if line in found or (line is None and found):
            continue
        lens = [max(step["seq_lens"]) for step in case["steps"]]
        recorded, later = (-(-n // BLOCK_SIZE) for n in lens)
        where = f"line {line}, `{code}`: " if line is not None else ""
        told = _HOST[name].format(recorded=recorded, later=later)
        found[line or 0] = f"{where}{told}.{_instead(name)}"
    return [found[line] for line in sorted(found)]


def _instead(name: str | None) -> str:
    return f" Use {_INSTEAD[name]}." if name else ""


# ------------------------------------------------------------------------------------------------------ right answers


def _expected(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the real rows, and the cache afterwards, from the definition of attention, in float64."""
    model, cache = toy_model(case["seed"]), old_cache(case, step).double()
    slots = cache.flatten(1, 2)
    now, rows = case["steps"][step], []
    xs = []
    for token_id, n, table in zip(now["token_ids"], now["seq_lens"], case["blocks"], strict=True):
        x = (model.embed[token_id] + model.position[n - 1]).double()
        slot = table[(n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
        slots[0, slot] = (x @ model.k.double()).view(model.num_heads, -1)
        slots[1, slot] = (x @ model.v.double()).view(model.num_heads, -1)
        xs.append(x)
    for x, n, table in zip(xs, now["seq_lens"], case["blocks"], strict=True):
        own = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(n)]
        q = (x @ model.q.double()).view(model.num_heads, -1)
        scores = torch.einsum("hd,shd->hs", q, slots[0, own]) / q.shape[1] ** 0.5
        attended = torch.einsum("hs,shd->hd", scores.softmax(-1), slots[1, own])
        rows.append(x + attended.flatten() @ model.o.double())
    return torch.stack(rows), cache


def _differs(
    case: Case, hidden: torch.Tensor, cache: torch.Tensor, wanted: torch.Tensor, wanted_cache: torch.Tensor, step: int
) -> str | None:
    """What is wrong with a step's result, in words. Rows of padding may hold anything, and so may the null block."""
    for block in range(1, case["num_blocks"]):
        for row in range(BLOCK_SIZE):
            if torch.allclose(cache[:, block, row].double(), wanted_cache[:, block, row], atol=1e-4, rtol=1e-4):
                continue
            slot = block * BLOCK_SIZE + row
            is_new = not torch.equal(wanted_cache[:, block, row], old_cache(case, step)[:, block, row].double())
            if not is_new:
                return f"slot {slot} of the KV cache was overwritten. It belongs to an earlier token."
            return f"slot {slot} of the KV cache should hold the new token's key and value, and does not."
    for i, n in enumerate(case["steps"][step]["seq_lens"]):
        if not torch.allclose(hidden[i].double(), wanted[i], atol=1e-3, rtol=1e-3):
            told = f"the hidden state of sequence {i} ({count(n, 'token')}) is {numbers(hidden[i], 3)}, and should be"
            return f"{told} {numbers(wanted[i], 3)}."
    return None
