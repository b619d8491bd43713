"""Exercises 4.3 to 4.5: from positions to slots, and attention through block tables. Cases and judges, in the parent only;
lab_04.py gathers them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_04_run import decode_inputs, new_tokens, old_cache
from checks.exercises.words import count, described, numbers

# ----------------------------------------------------------------------------------------------------- 4.3 slot_mapping


def mapping_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"4.3:{seed}")
    by_hand: list[tuple[list[int], list[int], int]] = [
        ([1, 2], [3], 4),
        ([0, 1, 2, 3], [7], 4),
        ([4], [7, 3], 4),
        ([3, 4], [7, 3], 4),
        ([8], [7, 3, 9], 4),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 9], 4),
        ([0, 1, 2], [5, 2, 8], 1),
        ([15, 16, 17, 31, 32], [6, 2, 4, 0, 0], 16),
        ([9, 0, 4], [7, 3, 9, 0], 4),
        ([], [7, 3], 4),
    ]
    cases = [_mapping_case(*parts) for parts in by_hand]
    for size in (3, 8, 16):
        table = rng.sample(range(1, 60 * scale), 12 * scale)
        start = rng.randint(0, 5 * size)
        cases.append(_mapping_case(list(range(start, start + rng.randint(2, 6 * size * scale))), table, size))
    return cases


def _mapping_case(positions: list[int], block_table: list[int], block_size: int) -> Case:
    shown = str(positions) if len(positions) <= 12 else f"[{positions[0]}, ..., {positions[-1]}]"
    call = f"slot_mapping(positions={shown}, block_table={block_table}, block_size={block_size})"
    return {"positions": positions, "block_table": block_table, "block_size": block_size, "call": call}


def judge_mapping(case: Case, output: Any) -> Verdict:
    positions, table, size = case["positions"], case["block_table"], case["block_size"]
    if "slots" not in output:
        made = " np.array(...) makes one of it." if isinstance(output["returned"], list) else ""
        return Verdict(
            "wrong type", f"It should return a NumPy array of slots, and returned {described(output['returned'])}.{made}"
        )
    slots = output["slots"]
    if output["shape"] != [len(positions)]:
        return Verdict("wrong shape", f"It returned shape {output['shape']}, and should return one slot for each position.")
    if "int" not in output["dtype"] and positions:
        return Verdict("wrong type", _no_integers(output["dtype"], slots))
    for position, slot in zip(positions, slots, strict=True):
        block, offset = table[position // size], position % size
        if slot == block * size + offset:
            continue
        told = f"Position {position} is in entry {position // size} of the table, block {block}, at row {offset}: slot"
        told += f" {block} * {size} + {offset} = {block * size + offset}. It returned {slot}."
        return Verdict("wrong value", told + _slots_reason(case, slots))
    if output["positions"] != positions or output["block_table"] != table:
        what = "positions" if output["positions"] != positions else "block_table"
        return Verdict("input changed", f"The slots are right, but {what} was changed in place. Compute a new array.")
    return RIGHT


def _no_integers(dtype: str, slots: list[Any]) -> str:
    shown = f"{slots[:8]}".replace("]", ", ...]" if len(slots) > 8 else "]")
    if any(slot != int(slot) for slot in slots):
        return f"Slots are whole numbers, and it returned {shown}. Use // to divide."
    return (
        f"The array has dtype {dtype}: {shown}. A slot is an index, so it takes integers. (np.zeros and np.empty make floats"
        " unless they are given a dtype, and / makes floats where // does not.)"
    )


def _slots_reason(case: Case, slots: list[int]) -> str:
    """The word for the mistake that gives all of these slots."""
    table, size = case["block_table"], case["block_size"]
    entries = [divmod(position, size) for position in case["positions"]]
    ways: list[tuple[list[int], str]] = [
        (case["positions"], "That is the position itself, as if the blocks lay in order: look the block up in the table."),
        ([table[e] for e, _ in entries], "That is the block. Each block has block_size slots."),
        ([table[e] * size for e, _ in entries], "That is the block's first slot."),
        ([table[e] + row for e, row in entries], "That is block + row. Each block has block_size slots."),
        (
            [table[0] * size + p for p in case["positions"]],
            "That is counted from the first block on. The next block can be anywhere.",
        ),
        (
            [table[e] * size + p for (e, _), p in zip(entries, case["positions"], strict=True)],
            "Within the block, position % block_size counts, not the position.",
        ),
        (
            [table[i // size % len(table)] * size + i % size for i in range(len(entries))],
            "Those are the slots of positions 0, 1, ...: the positions given need not start at 0.",
        ),
        ([table[min(e + 1, len(table) - 1)] * size + row for e, row in entries], "That is the next entry of the table."),
    ]
    return next((f" {why}" for way, why in ways if way == slots), "")


# ------------------------------------------------------------------------------------------------------------ 4.4 write_kv


def write_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"4.4:{seed}")
    by_hand = [
        (3, 4, 1, 1, [4]),
        (3, 4, 1, 2, [6]),
        (4, 4, 2, 2, [4, 5, 6]),
        (4, 4, 2, 2, [7, 12, 13]),
        (4, 4, 2, 2, [13, 5, 9]),
        (5, 4, 2, 4, [18, 4, 0, 9, 0]),
        (4, 1, 2, 2, [3, 1]),
        (3, 4, 2, 2, []),
    ]
    cases = [_write_case(*parts) for parts in by_hand]
    for blocks, size in ((9 * scale, 4), (6 * scale, 16)):
        slots = rng.sample(range(size, blocks * size), rng.randint(5, 20 * scale))
        cases.append(_write_case(blocks, size, 3, 8, slots))
    return cases


def _write_case(num_blocks: int, block_size: int, heads: int, dim: int, slots: list[int]) -> Case:
    tokens = f"<{count(len(slots), 'token')}>"
    call = f"write_kv(key {tokens}, value {tokens}, kv_cache [2, {num_blocks}, {block_size}, {heads}, {dim}], "
    call += f"slot_mapping={slots})"
    return {"num_blocks": num_blocks, "block_size": block_size, "heads": heads, "dim": dim, "slots": slots, "call": call}


def judge_write(case: Case, output: Any) -> Verdict:
    slots, size = case["slots"], case["block_size"]
    shape = case["num_blocks"], size, case["heads"], case["dim"]
    old = old_cache(*shape)
    tokens = [new_tokens(len(slots), case["heads"], case["dim"], value) for value in (False, True)]
    found = output["kv_cache"]
    wanted = old.clone()
    for t, slot in enumerate(slots):
        for part in (0, 1):
            wanted[part, slot // size, slot % size] = tokens[part][t]
    for part, name in ((0, "key"), (1, "value")):
        for slot in range(size, case["num_blocks"] * size):  # the null block may hold anything
            here = found[part, slot // size, slot % size]
            if torch.allclose(here, wanted[part, slot // size, slot % size], atol=1e-3):
                continue
            place = f"Slot {slot} (block {slot // size}, row {slot % size})"
            if slot not in slots:
                told = f"{place} belongs to another token, and was overwritten: it holds {_whose(here, name)}."
                return Verdict("wrong value", told)
            token = tokens[part][slots.index(slot)]
            if torch.allclose(here, old[part, slot // size, slot % size] + token, atol=1e-3):
                told = f"{place} should hold the {name} of token {slots.index(slot)}, which was added to what was there before."
                return Verdict("wrong value", f"{told} Assign it (=): an earlier owner's numbers are overwritten.")
            wrong = f"{place} should hold the {name} of token {slots.index(slot)}, and holds {_whose(here, name)}."
            if torch.equal(found, old):
                wrong += " The cache is as it was: a copy of it was written to, perhaps. Write into kv_cache itself, in place."
            return Verdict("wrong value", wrong + _where_it_went(found[part], tokens[part][slots.index(slot)], slot, size))
    for name, before in (("key", tokens[0]), ("value", tokens[1]), ("slots", torch.tensor(slots, dtype=torch.int64))):
        if not torch.equal(output[name], before):
            return Verdict("input changed", f"The cache is right, but {name.replace('slots', 'slot_mapping')} was changed.")
    return RIGHT


def _where_it_went(cache: torch.Tensor, token: torch.Tensor, slot: int, size: int) -> str:
    """Where in the keys (or values) a token's numbers stand, if they stand anywhere."""
    there = (cache - token).abs().flatten(2).amax(-1) < 1e-3  # [num_blocks, block_size]
    if not there.any():
        return ""
    block, row = (int(i) for i in there.nonzero()[0])
    if [block, row] == [slot % size, slot // size]:
        return f" It stands in block {block}, row {row}: block and row are swapped. The block is slot // block_size."
    return f" It stands in slot {block * size + row} (block {block}, row {row})."


def _whose(numbers: torch.Tensor, name: str) -> str:
    """What stands in a slot, read from the numbers (see new_tokens and old_cache)."""
    first = float(numbers.flatten()[0])
    kind = "value" if first < 0 else "key"
    if abs(first) >= 1000:
        return f"what was there before (the old {kind} of slot {round(abs(first)) - 1000})"
    if abs(first) >= 100:
        what = f"the {kind} of token {int(abs(first) + 1e-3) - 100}"
        inner = numbers.flatten().abs() - int(abs(first) + 1e-3)
        right = torch.arange(numbers.numel()) / 100
        return (
            what if kind != name or torch.allclose(inner, right, atol=1e-3) else f"{what}, its heads or dimensions out of order"
        )
    return f"{first:g}"


# -------------------------------------------------------------------------------------------------------- 4.5 paged_decode


def decode_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"4.5:{seed}")
    by_hand: list[dict[str, Any]] = [
        {"block_tables": [[1]], "seq_lens": [4], "heads": 1, "kv_heads": 1},
        {"block_tables": [[1]], "seq_lens": [3], "heads": 1, "kv_heads": 1},
        {"block_tables": [[2, 1]], "seq_lens": [6], "heads": 1, "kv_heads": 1},
        {"block_tables": [[2, 1]], "seq_lens": [1], "heads": 1, "kv_heads": 1},
        {"block_tables": [[3, 1]], "seq_lens": [7], "heads": 4, "kv_heads": 2},
        {"block_tables": [[3, 1], [2, 4]], "seq_lens": [7, 5], "heads": 2, "kv_heads": 1, "low_scores": True},
        {"block_tables": [[5, 3, 1], [2, 0, 0]], "seq_lens": [9, 4], "heads": 2, "kv_heads": 2},
        {"block_tables": [[3, 1]], "seq_lens": [6], "heads": 2, "kv_heads": 2, "stale": "nan"},
        {"block_tables": [[5, 3, 1], [2, 0, 0], [4, 6, 0]], "seq_lens": [12, 1, 5], "heads": 6, "kv_heads": 2, "stale": "nan"},
    ]
    cases = [_decode_case(i, **case) for i, case in enumerate(by_hand)]
    for dtype in ("float32", "bfloat16"):
        size, lens = 16, [rng.randint(1, 70 * scale) for _ in range(5)]
        ids = rng.sample(range(1, 40 * scale), sum(-(-n // size) for n in lens))
        width = -(-max(lens) // size)
        tables = []
        for n in lens:
            own, ids = ids[: -(-n // size)], ids[-(-n // size) :]
            tables.append(own + [0] * (width - len(own)))
        more = {"block_size": size, "num_blocks": 40 * scale, "dim": 32, "dtype": dtype, "stale": "nan"}
        cases.append(_decode_case(seed, tables, lens, 9, 3, **more))
    close = {"dim": 16, "dtype": "bfloat16", "close_scores": True}
    cases.append(_decode_case(seed, [[3, 1], [2, 4]], [8, 6], 4, 2, **close))
    return cases


def _decode_case(seed: int, block_tables: list[list[int]], seq_lens: list[int], heads: int, kv_heads: int, **more: Any) -> Case:
    case = {
        "seed": seed, "block_tables": block_tables, "seq_lens": seq_lens, "heads": heads, "kv_heads": kv_heads,
        "num_blocks": 7, "block_size": 4, "dim": 4, "dtype": "float32", "stale": "large", "close_scores": False,
        "low_scores": False,
        **more,
    }  # fmt: skip
    q, cache = [len(seq_lens), heads, case["dim"]], [2, case["num_blocks"], case["block_size"], kv_heads, case["dim"]]
    shown = f"block_tables={block_tables}" if len(block_tables) <= 3 else f"<{len(block_tables)} block tables>"
    extra = f" of {case['dtype']}" if case["dtype"] != "float32" else ""
    extra += ", unused slots NaN" if case["stale"] == "nan" else ""
    case["call"] = f"paged_decode(q {q}, kv_cache {cache}, {shown}, seq_lens={seq_lens}){extra}"
    return case


def judge_decode(case: Case, output: Any) -> Verdict:
    inputs, returned = decode_inputs(case), output["returned"]
    if not isinstance(returned, torch.Tensor):
        return Verdict("wrong type", f"It should return a tensor, and returned {described(returned)}.")
    if returned.shape != inputs["q"].shape:
        told = f"It returned shape {list(returned.shape)}, and should return q's: {list(inputs['q'].shape)}, [B, H, D]."
        return Verdict("wrong shape", told)
    if returned.dtype != inputs["q"].dtype:
        kinds = [str(dtype).removeprefix("torch.") for dtype in (returned.dtype, inputs["q"].dtype)]
        return Verdict("wrong type", f"It returned {kinds[0]}; q is {kinds[1]}, and so is the result.")
    for row, seq_len in enumerate(case["seq_lens"]):
        for head in range(case["heads"]):
            wrong = _judge_row(case, inputs, returned, row, head)
            if wrong:
                where = f"Sequence {row} (blocks {_used(case, row)}, {count(seq_len, 'token')}), head {head}: "
                return Verdict("wrong value", where + wrong)
    if output["changed"]:
        return Verdict("input changed", f"The result is right, but {output['changed'][0]} was changed in place.")
    return RIGHT


def _judge_row(case: Case, inputs: dict[str, torch.Tensor], returned: torch.Tensor, row: int, head: int) -> str | None:
    tolerance = 3e-2 if case["dtype"] == "bfloat16" else 1e-4
    found = returned[row, head].double()

    def is_right(other: torch.Tensor) -> bool:
        return bool(torch.allclose(found, other, atol=tolerance, rtol=tolerance))

    seq_len, size = case["seq_lens"][row], case["block_size"]
    slots = [case["block_tables"][row][p // size] * size + p % size for p in range(seq_len)]
    kv_head = head // (case["heads"] // case["kv_heads"])
    wanted = _attend(inputs, row, head, slots, kv_head)
    if is_right(wanted):
        return None
    told = f"it returned {numbers(found)}, and should return {numbers(wanted)}."
    if found.isnan().any():
        if case["stale"] == "nan":
            return told + (
                f" Slots beyond token {seq_len - 1} hold NaN. A masked score gives weight 0, and 0 * NaN is NaN: leave such"
                " values out, or replace them by 0."
            )
        return told + " NaN comes out of a softmax over nothing but -inf."
    if case["low_scores"] and is_right(torch.zeros_like(found)):  # all of the weight is where no token is
        return told + " All scores are below -1,000 here. A masked one must be -inf: -100 is larger than those that count."
    for other, why in _other_ways(case, inputs, row, head, slots, kv_head):
        if is_right(other):
            return f"{told} {why}"
    if case["close_scores"]:
        return told + " All scores are near 100 here, where bfloat16 has steps of 0.5: convert to float32 before you multiply."
    if case["stale"] == "large" and float(found.abs().max()) > 8:
        return told + f" Numbers as large are an earlier owner's: slots beyond token {seq_len - 1} are not this sequence's."
    return told


def _other_ways(
    case: Case, inputs: dict[str, torch.Tensor], row: int, head: int, slots: list[int], kv_head: int
) -> Iterable[tuple[torch.Tensor, str]]:
    """What common mistakes would give, each with the word for it."""
    D, H, Hkv = case["dim"], case["heads"], case["kv_heads"]
    size, table = case["block_size"], case["block_tables"][row]
    yield _attend(inputs, row, head, slots, kv_head, scale=1.0), "The scores are not scaled: divide them by sqrt(D)."
    yield _attend(inputs, row, head, slots, kv_head, scale=1.0 / D), "Scores are divided by the square root of D, not by D."
    if len(slots) > 1:
        yield _attend(inputs, row, head, slots[:-1], kv_head), "The newest token is missing: seq_lens counts it."
    everything = [block * size + i for block in table for i in range(size)]
    yield (
        _attend(inputs, row, head, everything, kv_head),
        f"That is attention over all slots of the table's blocks. Only the first {len(slots)} are this sequence's.",
    )
    yield _attend(inputs, row, head, everything[: len(slots) + 1], kv_head), "That is one token too many."
    in_order = list(range(len(slots)))
    yield (
        _attend(inputs, row, head, in_order, kv_head),
        "That reads the cache from its start: the block table says where to read.",
    )
    from_first = [table[0] * size + i for i in in_order]
    if from_first[-1] < case["num_blocks"] * size:
        yield (
            _attend(inputs, row, head, from_first, kv_head),
            "That reads on behind the first block. The next block can be anywhere: look it up.",
        )
    for other in range(Hkv):
        if other != kv_head:
            yield (
                _attend(inputs, row, head, slots, other),
                f"That is KV head {other}. Query head {head} reads KV head {head} // {H // Hkv} = {kv_head}: neighbours share"
                " one.",
            )
    for other_row, n in enumerate(case["seq_lens"]):
        other_slots = [table[p // size] * size + p % size for p in range(min(n, len(table) * size))]
        if other_row != row:
            yield _attend(inputs, row, head, other_slots, kv_head), f"That uses the length of sequence {other_row}, {n}."
    k_as_v = _attend(inputs, row, head, slots, kv_head, value_part=0)
    yield k_as_v, "That is the weighted sum of the keys. kv_cache[1] holds the values."
    k, v = inputs["kv_cache"].double().flatten(1, 2)[:, everything, kv_head].nan_to_num()
    scores = k @ inputs["q"][row, head].double() / D**0.5
    scores[len(slots) :] = 0.0
    v[len(slots) :] = 0.0
    yield (
        scores.softmax(0) @ v,
        "A hidden token's score is -inf, not 0: softmax turns 0 into exp(0) = 1, a weight like any other.",
    )
    yield v[: len(slots)].mean(0), "All tokens got the same weight."
    all_scores = torch.stack([_scores(inputs, row, h, slots, h // (H // Hkv)) for h in range(H)])
    yield all_scores.softmax(0)[head] @ v[: len(slots)], "The softmax runs over a sequence's tokens, not over heads."


def _attend(
    inputs: dict[str, torch.Tensor],
    row: int,
    head: int,
    slots: list[int],
    kv_head: int,
    scale: float | None = None,
    value_part: int = 1,
) -> torch.Tensor:
    """Attention of one head over some slots, from its definition, in float64: [D]."""
    values = inputs["kv_cache"].double().flatten(1, 2)[value_part, slots, kv_head]
    return _scores(inputs, row, head, slots, kv_head, scale).softmax(0) @ values


def _scores(
    inputs: dict[str, torch.Tensor], row: int, head: int, slots: list[int], kv_head: int, scale: float | None = None
) -> torch.Tensor:
    q = inputs["q"][row, head].double()
    keys = inputs["kv_cache"][0].double().flatten(0, 1)[slots, kv_head]
    return keys @ q * (len(q) ** -0.5 if scale is None else scale)


def _used(case: Case, row: int) -> list[int]:
    used: list[int] = case["block_tables"][row][: -(-case["seq_lens"][row] // case["block_size"])]
    return used


# ------------------------------------------------------------------------------------------------------------------- words
