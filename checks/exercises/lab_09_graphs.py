"""Exercises 9.2 and 9.3: buckets, padding, capture and replay. Cases and judges, in the parent only; lab_09.py gathers them."""

from __future__ import annotations

import random
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_09_run import BLOCK_SIZE, NAMES, NUM_SLOTS, STALE
from checks.exercises.words import count, kind_of
from minivllm.worker.graphs import bucket_sizes

# ------------------------------------------------------------------------------------------------------------ 9.2 fill


def fill_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"9.2:{seed}")
    cases: list[Case] = [
        {"max_num_seqs": most, "ns": ns, "call": f"GraphRunner(max_num_seqs={most}): pick_bucket(n) for n in {ns}"}
        for most, ns in ((1, [1]), (4, [1, 2, 3, 4]), (20, [1, 5, 8, 9, 16, 17, 20]), (20, [21]), (600, [257, 512, 513, 600]))
    ]
    by_hand: list[tuple[int, int, list[int], list[list[int]]]] = [
        (1, 1, [3], [[2]]),
        (2, 2, [4, 1], [[3], [1]]),
        (4, 2, [5, 2], [[1, 2], [3, 0]]),
        (4, 4, [5, 2, 8], [[1, 2], [3, 0], [5, 4]]),
        (20, 8, [1, 12, 4, 9, 2], [[4, 0, 0], [1, 6, 2], [3, 0, 0], [9, 5, 8], [7, 0, 0]]),
        (20, 20, [13], [[2, 7, 1, 3]]),
    ]
    cases += [_fill_case(rng, *parts) for parts in by_hand]
    for most in (8, 32 * scale):
        n = rng.randint(most // 2 + 1, most - 1)
        lens = [rng.randint(1, 4 * BLOCK_SIZE) for _ in range(n)]
        needed = [-(-length // BLOCK_SIZE) for length in lens]
        ids = iter(rng.sample(range(1, 1 + sum(needed)), sum(needed)))
        tables = [[next(ids) for _ in range(k)] + [0] * (max(needed) - k) for k in needed]
        bucket = next(size for size in bucket_sizes(most) if size >= n)
        cases.append(_fill_case(rng, most, bucket, lens, tables))
    return cases


def _fill_case(rng: random.Random, most: int, bucket: int, seq_lens: list[int], blocks: list[list[int]]) -> Case:
    shown = f"seq_lens {seq_lens}" if len(seq_lens) <= 6 else f"{len(seq_lens)} rows"
    return {
        "max_num_seqs": most,
        "max_blocks": 5,
        "bucket": bucket,
        "seq_lens": seq_lens,
        "blocks": blocks,
        "token_ids": [rng.randrange(10, 40000) for _ in seq_lens],
        "call": f"GraphRunner(max_num_seqs={most}).fill(a step of {count(len(seq_lens), 'decode')}: {shown}, bucket={bucket})",
    }


def judge_fill(case: Case, output: Any) -> Verdict:
    return _judge_pick(case, output["picked"]) if "ns" in case else _judge_rows(case, output)


def _judge_pick(case: Case, picked: list[Any]) -> Verdict:
    sizes = bucket_sizes(case["max_num_seqs"])
    for n, found in zip(case["ns"], picked, strict=True):
        wanted = next((size for size in sizes if size >= n), None)
        if found == wanted and type(found) is type(wanted):
            continue
        told = f"pick_bucket({n}) returned {found!r}. self.buckets is {_some(sizes)}"
        if wanted is None:
            return Verdict("wrong value", f"{told}: none of them holds {count(n, 'row')}, so it should return None.")
        if not isinstance(found, int):
            return Verdict("wrong value", f"{told}, and {wanted} is the smallest that holds {count(n, 'row')}.")
        why = f"too few for {count(n, 'row')}" if found < n else "and a smaller one would do" if found in sizes else "not in it"
        return Verdict("wrong value", f"{told}. {found} is {why}: it should return {wanted}.")
    return RIGHT


def _some(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 8 else f"[{', '.join(map(str, sizes[:6]))}, ..., {sizes[-1]}]"


_PADDING = {
    "input_ids": "any token will do, and 0 is one",
    "positions": "the first token of a sequence, so 0",
    "slot_mapping": "0, the first slot of the null block; any other may be somebody's",
    "seq_lens": "1, the token itself",
    "block_tables": "0, the null block",
}


def _judge_rows(case: Case, output: Any) -> Verdict:
    n, bucket = len(case["seq_lens"]), case["bucket"]
    for name in output["moved"]:
        told = (
            f"buffers.{name} is another tensor now. A graph reads the memory it was recorded on, and that still holds the old"
        )
        return Verdict("wrong value", f"{told} numbers: copy into it, buffers.{name}[...] = ... or .copy_(...).")
    real = _real_rows(case)
    for name in NAMES:
        rows = output["rows"][name]
        if len(rows) != bucket:
            return Verdict("wrong shape", f"buffers.{name} has {len(rows)} rows now, and had more than {bucket - 1}.")
        for i, row in enumerate(rows):
            if i < n and not _same(name, row, real[name][i], case["seq_lens"][i]):
                old = f" That is what an earlier step left there: {STALE}." if _first(row) == STALE else ""
                told = f"buffers.{name}[{i}] is {row}, and should be {real[name][i]}, as in the step's inputs."
                return Verdict("wrong value", told + old)
            if i >= n and (wrong := _padding_wrong(name, row)):
                what = f"buffers.{name}[{i}] is {row}. Row {i} is padding (the step has {count(n, 'row')}, the bucket {bucket})"
                return Verdict("wrong value", f"{what}, and {wrong} It should be {_PADDING[name]}.")
    if output["starts"] != list(range(len(output["starts"]))):
        return Verdict("wrong value", "query_start_loc was changed. Rows of one token each start at 0, 1, 2, ...: leave it.")
    if output["changed"]:
        return Verdict("input changed", f"The buffers are right, but inputs.{output['changed'][0]} was changed. Only read it.")
    return RIGHT


def _real_rows(case: Case) -> dict[str, list[Any]]:
    positions = [n - 1 for n in case["seq_lens"]]
    slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p, table in zip(positions, case["blocks"], strict=True)]
    return {
        "input_ids": case["token_ids"],
        "positions": positions,
        "slot_mapping": slots,
        "seq_lens": case["seq_lens"],
        "block_tables": case["blocks"],
    }


def _same(name: str, found: Any, wanted: Any, seq_len: int) -> bool:
    if name != "block_tables":
        return bool(found == wanted)
    used = -(-seq_len // BLOCK_SIZE)
    return bool(found[:used] == wanted[:used])  # nobody reads beyond


def _first(row: Any) -> Any:
    return row[0] if isinstance(row, list) else row


def _padding_wrong(name: str, row: Any) -> str | None:
    """What a padding row would do with this number; None if no harm."""
    value = _first(row)
    if value == STALE and name not in ("input_ids", "positions"):
        return "holds what an earlier, larger step left there."
    if name == "input_ids":
        return None if 0 <= value < 40000 else "is looked up in the embedding, where there is no such row."
    if name == "positions":
        return None if 0 <= value < BLOCK_SIZE * 5 else "no sequence has such a position."
    if name == "slot_mapping":
        return None if value == 0 else f"writes its key and value to slot {value}."
    if name == "seq_lens":
        if value < 1:
            return f"reads {count(max(value, 0), 'token')}: a softmax over nothing is NaN."
        return None if value == 1 else f"reads {value} tokens, and only the first of them was written."
    return None if value == 0 else f"reads block {value}, which may be somebody's."


# -------------------------------------------------------------------------------------------------- 9.3 capture, replay


def graph_cases(seed: int, scale: int = 1) -> list[Case]:
    """Rows are [token, position, slot, block]. `before`: what the buffers hold when capture() is called."""
    rng = random.Random(f"9.3:{seed}")
    cases = [
        _graph_case(1, [], [(1, [[5, 0, 4, 1]])]),
        _graph_case(1, [], [(1, [[5, 0, 4, 1]]), (1, [[6, 1, 5, 1]])]),
        _graph_case(1, [[7, 2, 10, 2]], [(1, [[5, 0, 4, 1]])]),
        _graph_case(4, [], [(1, [[5, 0, 4, 1]]), (4, [[6, 1, 5, 1], [8, 0, 12, 3], [9, 3, 19, 4]]), (2, [[3, 0, 8, 2]])]),
        _graph_case(8, [[7, 2, 10, 2], [8, 0, 20, 5]], [(8, [[i, i, 4 + i, 1 + i] for i in range(6)]), (4, [[11, 0, 9, 2]])]),
    ]
    rounds = []
    for _ in range(5 * scale):
        bucket = rng.choice([1, 2, 4, 8, 11])
        slots = rng.sample(range(4, NUM_SLOTS), bucket)
        count_of_rows = rng.randint(bucket // 2 + 1, bucket)
        rounds.append((bucket, [[rng.randrange(1, 99), rng.randrange(9), s, s // 4] for s in slots[:count_of_rows]]))
    return [*cases, _graph_case(11, [[3, 1, 30, 7]], rounds)]


def _graph_case(most: int, before: list[list[int]], replays: list[tuple[int, list[list[int]]]]) -> Case:
    calls = "; ".join(f"fill {count(len(rows), 'row')}, replay({bucket})" for bucket, rows in replays[:3])
    more = f"; ... ({count(len(replays), 'replay')})" if len(replays) > 3 else ""
    full = " while the buffers hold an earlier step" if before else ""
    call = f"runner = GraphRunner(max_num_seqs={most}); runner.capture(){full}; {calls}{more}"
    return {"max_num_seqs": most, "before": before, "replays": [list(r) for r in replays], "call": call}


def judge_graphs(case: Case, output: Any) -> Verdict:
    if output["moved"]:
        told = "capture() put other buffers into self.buffers. Graphs read the memory they were recorded on: record on the ones"
        return Verdict("wrong value", f"{told} that are there.")
    if wrong := _judge_kept(output) or _judge_recording(case, output):
        return wrong
    for number, ((bucket, rows), answer) in enumerate(zip(case["replays"], output["replays"], strict=True), start=1):
        if wrong := _judge_replay(case, number, bucket, rows, answer):
            return wrong
    return RIGHT


def _judge_kept(output: Any) -> Verdict | None:
    if output["kept"] is None:
        return Verdict("wrong type", "self.graphs should stay a dictionary: bucket -> what replay() needs of it.")
    keys, are_numbers = output["kept"]
    missing = [size for size in output["buckets"] if str(size) not in keys or not are_numbers]
    if missing:
        told = f"After capture() self.graphs has the keys [{', '.join(keys)}], and no {missing[0]}. Every bucket of"
        return Verdict("wrong value", f"{told} self.buckets gets a graph; run() looks there whether it has one.")
    extra = sorted(set(keys) - {str(size) for size in output["buckets"]})
    if extra:
        return Verdict("wrong value", f"self.graphs has a key {extra[0]}, which is none of self.buckets {output['buckets']}.")
    return None


def _judge_recording(case: Case, output: Any) -> Verdict | None:
    calls = output["calls"]
    for call in calls:
        if not call["own"]:
            told = "decode_step was given tensors that are not the first rows of self.buffers: what is put into the buffers"
            return Verdict(
                "wrong calls", f"{told} later never reaches that graph. self.buffers.first(bucket) are views of them."
            )
    recorded = [call["rows"] for call in calls if call["recorded"]]
    for size in output["buckets"]:
        if size not in recorded:
            told = f"decode_step was never called with {count(size, 'row')} inside `with graph.capture():`"
            return Verdict("wrong calls", f"{told}, so nothing was recorded for bucket {size}.")
        first = next(call for call in calls if call["rows"] == size)
        if first["recorded"]:
            told = f"The first call of decode_step with {count(size, 'row')} is the one that is recorded. A size's first call"
            why = "compiles kernels and allocates workspaces, and a recording breaks at that"
            return Verdict("wrong calls", f"{told} {why}: call it once before.")
    if recorded != sorted(recorded, reverse=True):
        told = f"The buckets were recorded in the order {recorded}. Take the largest first: graphs share one memory, and the"
        return Verdict("wrong calls", f"{told} smaller ones fit into what the largest took.")
    if len(recorded) > len(output["buckets"]):
        return Verdict("wrong calls", f"decode_step was recorded {len(recorded)} times for {len(output['buckets'])} buckets.")
    changed = (output["cache"] != torch.arange(1000, 1000 + NUM_SLOTS)).nonzero().flatten().tolist()
    if any(slot >= BLOCK_SIZE for slot in changed):
        slot = next(slot for slot in changed if slot >= BLOCK_SIZE)
        token = next((row[0] for row in case["before"] if row[2] == slot), None)
        told = f"capture() wrote to slot {slot}, which is somebody's: the buffers still held an earlier step's rows"
        return Verdict("wrong value", f"{told} (token {token}). Make every row padding first: self.buffers.clear().")
    return None


def _judge_replay(case: Case, number: int, bucket: int, rows: list[list[int]], answer: Any) -> Verdict | None:
    where = f"Replay {number}, replay({bucket}): "
    if answer["called"]:
        told = "it called decode_step. That is the step itself, with all its Python and launches; the recording is run by"
        return Verdict("wrong calls", f"{where}{told} graph.replay().")
    hidden = answer["hidden"]
    if isinstance(hidden, tuple) or not isinstance(hidden, torch.Tensor):
        shown = "None (is a `return` missing?)" if hidden is None else kind_of(hidden)
        return Verdict("wrong type", f"{where}it returned {shown}, and should return the hidden states, a tensor.")
    padded = rows + [[0, 0, 0, 0]] * (bucket - len(rows))
    wanted = torch.tensor([[token, position, 1000 + slot, block] for token, position, slot, block in padded])
    if list(hidden.shape) != list(wanted.shape):
        told = f"it returned {_rows_of(hidden)}, and should return {count(bucket, 'row')}"
        return Verdict("wrong shape", f"{where}{told}, all that this bucket's graph computes.")
    if torch.equal(hidden, wanted):
        written = {slot: token for token, _, slot, _ in rows}
        changed = (answer["cache"] != torch.arange(1000, 1000 + NUM_SLOTS)).nonzero().flatten().tolist()
        foreign = next((slot for slot in changed if slot >= BLOCK_SIZE and slot not in written), None)
        if foreign is not None:
            told = f"the rows it returned are right, but slot {foreign} was written too. It belongs to a row behind the"
            told += (
                " bucket's, where an earlier step's numbers stand: a larger bucket's graph was run. Each bucket has its own,"
            )
            return Verdict("wrong value", f"{where}{told} self.graphs[bucket].")
        missing = next((slot for slot, token in written.items() if answer["cache"][slot] != token), None)
        if missing is None:
            return None
        return Verdict("wrong value", f"{where}the result is right, but slot {missing} was not written: was this graph run?")
    row = next(i for i in range(bucket) if not torch.equal(hidden[i], wanted[i]))
    shown = (
        f"row {row} has [token, position, ...] = {hidden[row].tolist()[:2]}, and the buffers hold {wanted[row].tolist()[:2]}."
    )
    ran = all(answer["cache"][slot] == token for token, _, slot, _ in rows)
    if not ran:
        return Verdict("wrong value", f"{where}{shown} That is yesterday's answer: nothing was run. graph.replay() does it.")
    told = "The graph ran, and wrote its result where the *recorded* call put it: keep what decode_step returned inside"
    return Verdict("wrong value", f"{where}{shown} {told} `with graph.capture():`, and return that.")


def _rows_of(hidden: torch.Tensor) -> str:
    return count(hidden.shape[0], "row") if hidden.dim() == 2 else f"shape {list(hidden.shape)}"
