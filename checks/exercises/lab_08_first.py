"""Exercise 8.1: a masked add, a gather through a block table. Cases and judge, in the parent only; lab_08.py gathers them."""

from __future__ import annotations

import random
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_08_run import slots_of
from checks.exercises.words import count, numbers


def first_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"8.1:{seed}")
    adds = [(8, 8), (5, 8), (16, 8), (20, 8), (1, 4), (rng.randint(65 * scale, 90 * scale), 32)]
    gathers: list[tuple[list[int], int, int, int, int]] = [  # table, length, block size, width, tile
        ([1], 4, 4, 2, 4),
        ([3, 1], 8, 4, 2, 8),
        ([3, 1], 6, 4, 2, 8),
        ([2, 5, 1], 9, 4, 4, 4),
        ([4], 1, 4, 2, 8),
    ]
    size = rng.choice([3, 8])
    length = rng.randint(33 * scale, 60 * scale)
    gathers.append((rng.sample(range(1, 24 * scale), -(-length // size)), length, size, 8, 32))
    return [add_case(*parts) for parts in adds] + [gather_case(*parts) for parts in gathers]


def add_case(n: int, block: int) -> Case:
    return {
        "kernel": "add",
        "n": n,
        "BLOCK": block,
        "call": f"add_kernel[({-(-n // block)},)](out, x, y, n={n}, BLOCK={block})",
    }


def gather_case(table: list[int], seq_len: int, size: int, width: int, tile: int) -> Case:
    call = f"gather_kernel[({-(-seq_len // tile)},)](out, cache, block_table={table}, seq_len={seq_len}, BLOCK_SIZE={size},"
    call += f" WIDTH={width}, TILE={tile})"
    return {
        "kernel": "gather", "block_table": table, "seq_len": seq_len, "BLOCK_SIZE": size, "WIDTH": width, "TILE": tile,
        "num_blocks": 1 + max(6, *table), "call": call,
    }  # fmt: skip


def judge_first(case: Case, output: Any) -> Verdict:
    return with_and(_judge_first(case, output), output)


def with_and(verdict: Verdict, output: Any) -> Verdict:
    """A wrong result of a kernel that has `and` between conditions."""
    if verdict.category != "wrong value" or not output.get("and"):
        return verdict
    told = "The kernel has `and` or `or`, which take a vector as one truth. Combine conditions with & and |, each in brackets."
    return Verdict(verdict.category, f"{verdict.message} {told}")


def _judge_first(case: Case, output: Any) -> Verdict:
    if "plain" in output:
        return no_jit(output["plain"])
    if output["stray"] and output["stray"][1]:
        return Verdict("wrong value", _stray(case, *output["stray"]))
    if not output["around"]:
        return Verdict("wrong value", f"It wrote beyond out, which has {_size(case)}. Give tl.store a mask.")
    wrong = _wrong_sum(output["out"]) if case["kernel"] == "add" else _wrong_rows(case, output["out"])
    if wrong:
        return Verdict("wrong value", wrong)
    if output["changed"]:
        return Verdict("input changed", f"The sum is right, but {output['changed'][0]} was written to.")
    if output["stray"]:
        return Verdict("wrong value", "What it writes is right. But " + _stray(case, *output["stray"]))
    if output["foreign"]:
        return Verdict("wrong value", "What it writes is right. But " + _foreign(case, *output["foreign"]))
    return RIGHT


def no_jit(name: str) -> Verdict:
    return Verdict(
        "wrong type", f"{name} is a plain Python function: keep the line @triton.jit above it, which makes it a kernel."
    )


def _size(case: Case) -> str:
    return count(case["n"], "number") if case["kernel"] == "add" else count(case["seq_len"], "row")


def _stray(case: Case, program: int, is_write: bool, name: str | None, offset: int) -> str:
    """A load or a store where the program has no business."""
    verb = "writes to" if is_write else "reads"
    who = f"program {program} {verb} "
    if name is None:
        return who + "memory that belongs to none of its arguments. Look at how the address is computed."
    if case["kernel"] == "add":
        rest = f"and there are {case['n']}." if offset >= 0 else "and the first is 0."
        return f"{who}{name}[{offset}], {rest} On a GPU that is somebody else's memory: mask={'offsets < n'} leaves it alone."
    if name == "block_table":
        entries = -(-case["seq_len"] // case["BLOCK_SIZE"])
        return (
            f"{who}entry {offset} of the block table, and the sequence has {count(entries, 'block')}. Positions from"
            f" {case['seq_len']} on do not exist: mask that load too."
        )
    row, column = divmod(offset, case["WIDTH"])
    if name == "cache":
        block, place = divmod(row, case["BLOCK_SIZE"])
        return (
            f"{who}row {place} of block {block} (column {column}), which holds no token of this sequence. Its tokens are in the"
            f" slots {slots_of(case)[:8]}. Mask positions from seq_len on."
        )
    return f"{who}out[{row}, {column}], and out has {count(case['seq_len'], 'row')}. Mask positions from seq_len on."


def _foreign(case: Case, program: int, is_write: bool, name: str, offset: int) -> str:
    """A load or a store that is another program's: the work is done twice, or by one for all."""
    does = f"program {program} {'writes to' if is_write else 'reads'}"
    if case["kernel"] == "add":
        size, what, sizes, place = case["BLOCK"], "numbers", "BLOCK", f"{name}[{offset}]"
    else:
        size, what, sizes = case["TILE"], "positions", "TILE"
        place = f"entry {offset} of block_table"
        if name != "block_table":
            place = f"row {offset // case['WIDTH']} of {'the cache' if name == 'cache' else name}"
    return (
        f"{does} {place}, which another program does: program p has the {what} p * {sizes} to p * {sizes} + {sizes} - 1 alone,"
        f" here {program * size} to {(program + 1) * size - 1}. (tl.arange(0, {sizes}) counts them; {sizes} is {size} here.)"
    )


def _wrong_sum(out: torch.Tensor) -> str | None:
    for i, found in enumerate(out.tolist()):
        right = 101.0 * (i + 1)
        if found == right:
            continue
        told = f"x[{i}] + y[{i}] is {i + 1} + {100 * (i + 1)} = {right:g}. out[{i}] is {found:g}."
        if found == -1:
            return f"{told} Nothing was written there. Program p has the numbers from p * BLOCK on." + _nothing_at_all(out)
        if found in (i + 1, 100.0 * (i + 1)):
            return f"{told} That is one of the two alone."
        if found % 101 == 0 and found > 0:
            return f"{told} That is the sum for place {found / 101 - 1:.0f}: load and store at the same offsets."
        if found != found:
            return f"{told} NaN stands behind the end of x and y: is the address right?"
        return told
    return None


def _nothing_at_all(out: torch.Tensor) -> str:
    return " (It wrote nothing at all: tl.store is what writes.)" if bool((out == -1).all()) else ""


def _wrong_rows(case: Case, out: torch.Tensor) -> str | None:
    width, size, slots = case["WIDTH"], case["BLOCK_SIZE"], slots_of(case)
    for position, slot in enumerate(slots):
        right = slot + torch.arange(width) / 100
        found = out[position]
        if torch.allclose(found, right, atol=2e-3):
            continue
        block, row = divmod(slot, size)
        told = f"Position {position} is in row {row} of block {block} (slot {slot}), so out[{position}] should be"
        told += f" {numbers(right, spec='.2f')}, and is {numbers(found, spec='.2f')}."
        return told + _why_rows(case, found, position)
    return None


def _why_rows(case: Case, found: torch.Tensor, position: int) -> str:
    if bool((found == -1).all()):
        return " Nothing was written there."
    table, size = case["block_table"], case["BLOCK_SIZE"]
    if bool(found.isnan().any()):
        return " NaN stands outside of the cache: the address is wrong."
    slot = int(float(found[0]) + 1e-3) % 1000
    own = table[position // size] * size + position % size
    ways = {
        own // case["WIDTH"]: "Row r of the cache begins at r * WIDTH.",
        position: "That is slot number position, as if the blocks lay in order: load the block from the table.",
        table[position // size]: "That is the block's number. Each block has BLOCK_SIZE rows.",
        table[position // size] * size: "That is the block's first row.",
        table[0] * size + position: "That is counted from the first block on. The next block can be anywhere.",
    }
    inner = found - float(found[0].floor())
    if not torch.allclose(inner, torch.arange(len(found)) / 100, atol=2e-3):
        return " Those are no neighbours in a row of the cache: row r begins at r * WIDTH."
    whose = " (1,000 and more stand where no token of this sequence is.)" if float(found[0]) >= 1000 else ""
    return f" That is slot {slot}.{whose} {ways.get(slot, '')}".rstrip()
