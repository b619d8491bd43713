"""Lab 09, beside the student's code: runs in the child, and knows no answer. lab_09.py judges what comes back."""

from __future__ import annotations

import copy
import linecache
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from checks.exercises import Case
from minivllm.worker.graph_safety import find_faults
from minivllm.worker.graphs import DecodeBuffers
from minivllm.worker.input_batch import NO_DRAFT, StepInputs
from minivllm.worker.operator_graph import OperatorGraph

BLOCK_SIZE = 4
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------ 9.1 decode_step

VOCABULARY, WIDTH, HEADS, TABLE_WIDTH = 32, 8, 2, 3


def toy_model(seed: int) -> SimpleNamespace:
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    matrices = {name: draw(WIDTH, WIDTH) / 2 for name in "qkvo"}
    return SimpleNamespace(embed=draw(VOCABULARY, WIDTH), position=draw(64, WIDTH), num_heads=HEADS, **matrices)


def old_cache(case: Case, step: int) -> torch.Tensor:
    """What earlier steps wrote: of every slot, so that one read too many shows. Each step finds another."""
    shape = (2, case["num_blocks"], BLOCK_SIZE, HEADS, WIDTH // HEADS)
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * case["seed"] + step))


def tables_of(case: Case) -> torch.Tensor:
    """[rows, TABLE_WIDTH]: real rows have blocks of their own, in no order; padding rows the null block."""
    tables = torch.zeros(case["rows"], TABLE_WIDTH, dtype=torch.int32)
    tables[: len(case["blocks"])] = torch.tensor(case["blocks"], dtype=torch.int32)
    return tables


def put(buffers: DecodeBuffers, case: Case, step: int) -> None:
    """A step's inputs into the static buffers, as the engine does before each."""
    buffers.clear()
    ids, lens = case["steps"][step]["token_ids"], case["steps"][step]["seq_lens"]
    tables = tables_of(case)
    for row, (token_id, n) in enumerate(zip(ids, lens, strict=True)):
        buffers.input_ids[row], buffers.positions[row], buffers.seq_lens[row] = token_id, n - 1, n
        buffers.slot_mapping[row] = tables[row, (n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
        buffers.block_tables[row] = tables[row]


class Host:
    """What Python knows of a step. `read` remembers from which lines of the student's something was asked."""

    def __init__(self, case: Case, step: int) -> None:
        now = case["steps"][step]
        padding = case["rows"] - len(now["seq_lens"])
        lens = [*now["seq_lens"], *[1] * padding]
        self._values = {
            "token_ids": torch.tensor([*now["token_ids"], *[0] * padding]),
            "seq_lens": lens,
            "num_blocks": -(-max(lens) // BLOCK_SIZE),
        }
        self.read: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"host has token_ids, seq_lens and num_blocks; no {name}")
        frame = sys._getframe(1)
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        self.read.setdefault(name, [frame.f_lineno, code])
        return self._values[name]

    def take(self, name: str, other: Host) -> None:
        """Say of one thing what another step's host would say."""
        self._values[name] = other._values[name]


def run_repair(module: ModuleType, case: Case) -> dict[str, Any]:
    """The student's step as it is, under the checker, and recorded in one step and replayed in the next."""
    model, buffers = toy_model(case["seed"]), DecodeBuffers.allocate(case["rows"], TABLE_WIDTH, CPU)

    def run(step: int, host: Host) -> tuple[Any, torch.Tensor]:
        kv_cache = old_cache(case, step)
        put(buffers, case, step)
        before = [tensor.clone() for tensor in buffers.tensors()]
        hidden = module.decode_step(model, kv_cache, buffers, host)
        changed = [not torch.equal(a, b) for a, b in zip(before, buffers.tensors(), strict=True)]
        answer["changed"] = answer["changed"] or any(changed)
        return hidden, kv_cache

    answer: dict[str, Any] = {"changed": False}
    hidden, kv_cache = run(0, Host(case, 0))
    answer |= {"hidden": copy_of(hidden), "cache": kv_cache}
    if not isinstance(hidden, torch.Tensor):
        return answer

    kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]  # constants of the cell: they stay
    weights = [value for value in vars(model).values() if isinstance(value, torch.Tensor)]
    static_cache = old_cache(case, 0)
    static = [*weights, *kept, *buffers.tensors(), static_cache]
    put(buffers, case, 0)
    host = Host(case, 0)
    faults = find_faults(lambda: module.decode_step(model, static_cache, buffers, host), static, bodies={})
    answer["faults"] = [[fault.kind, fault.call, int(fault.where.rpartition(":")[2]), fault.code] for fault in faults]

    answer["depends"] = []
    for name in ("token_ids", "seq_lens", "num_blocks"):
        right, stale = Host(case, 1), Host(case, 1)
        stale.take(name, Host(case, 0))
        wanted = run(1, right)
        try:
            same = _same(case, run(1, stale), wanted)
        except Exception:
            same = False
        if not same and _same(case, run(1, right), wanted):  # else it never gives the same twice, whatever it is told
            answer["depends"].append([name, *stale.read.get(name, [None, ""])])

    static_cache.copy_(old_cache(case, 0))
    put(buffers, case, 0)
    graph = OperatorGraph()
    with graph.capture():
        recorded = module.decode_step(model, static_cache, buffers, Host(case, 0))
    static_cache.copy_(old_cache(case, 1))
    put(buffers, case, 1)
    try:
        graph.replay()
        answer |= {"replayed": copy_of(recorded), "replayed_cache": static_cache}
    except Exception as error:
        answer["replay_error"] = str(error)[:300]
    return answer


def _same(case: Case, one: tuple[Any, torch.Tensor], other: tuple[Any, torch.Tensor]) -> bool:
    """Whether two runs gave the same hidden states of real rows, and wrote the same outside the null block."""
    real = len(case["blocks"])
    return torch.equal(one[0][:real], other[0][:real]) and torch.equal(one[1][:, 1:], other[1][:, 1:])


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


# ----------------------------------------------------------------------------------------------- 9.2 pick_bucket, fill

STALE = 9  # what an earlier, larger step left in the buffers
NAMES = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables")


def no_step(buffers: DecodeBuffers) -> torch.Tensor:
    raise AssertionError("decode_step is not called here")


def decodes(seq_lens: list[int], blocks: list[list[int]], token_ids: list[int]) -> StepInputs:
    """A step of decodes, as the engine builds it."""
    n = len(seq_lens)
    lens, tables = np.array(seq_lens, dtype=np.int32), np.array(blocks, dtype=np.int32).reshape(n, -1)
    positions = lens.astype(np.int64) - 1
    return StepInputs(
        req_ids=[str(i) for i in range(n)],
        rows=np.arange(n),
        token_starts=np.arange(n + 1),
        num_decodes=n,
        input_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        query_start_loc=np.arange(n + 1, dtype=np.int32),
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=tables[np.arange(n), positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        sample_rows=np.arange(n),
        logits_indices=np.arange(n),
        sample_row_of=np.arange(n),
        ahead=np.zeros(n, dtype=np.int64),
        draft_ids=np.full(n, NO_DRAFT),
    )


def run_fill(module: ModuleType, case: Case) -> dict[str, Any]:
    if "ns" in case:
        runner = module.GraphRunner(no_step, case["max_num_seqs"], 4, CPU)
        return {"picked": [runner.pick_bucket(n) for n in case["ns"]]}
    runner = module.GraphRunner(no_step, case["max_num_seqs"], case["max_blocks"], CPU)
    buffers = runner.buffers
    for name in NAMES:
        getattr(buffers, name).fill_(STALE)
    before = {name: getattr(buffers, name) for name in NAMES}
    places = {name: tensor.data_ptr() for name, tensor in before.items()}
    inputs = decodes(case["seq_lens"], case["blocks"], case["token_ids"])
    given = copy.deepcopy(inputs)
    runner.fill(inputs, case["bucket"])
    now = runner.buffers
    moved = [name for name in NAMES if getattr(now, name).data_ptr() != places[name]]
    return {
        "moved": moved,
        "shapes": {name: list(getattr(now, name).shape) for name in NAMES},
        "rows": {name: getattr(now, name)[: case["bucket"]].tolist() for name in NAMES},
        "starts": now.query_start_loc.tolist(),
        "changed": [name for name in NAMES if not np.array_equal(getattr(given, name), getattr(inputs, name))],
    }


# ------------------------------------------------------------------------------------------------ 9.3 capture and replay

NUM_SLOTS = 64


class Step:
    """A decode step that shows what it read: row i's hidden state is [its token, its position, what its slot held before, the
    sum of its table]. `calls` are its calls: rows, whether they were recorded, and whether they read the runner's buffers."""

    def __init__(self) -> None:
        self.cache = torch.arange(1000, 1000 + NUM_SLOTS)
        self.calls: list[dict[str, Any]] = []
        self.places: dict[str, int] = {}

    def __call__(self, buffers: DecodeBuffers) -> torch.Tensor:
        places = {name: getattr(buffers, name).data_ptr() for name in NAMES}
        is_recorded = _get_current_dispatch_mode() is not None
        self.calls.append({"rows": len(buffers.seq_lens), "recorded": is_recorded, "own": places == self.places})
        before = self.cache[buffers.slot_mapping]
        hidden = torch.stack([buffers.input_ids, buffers.positions, before, buffers.block_tables.sum(1)], dim=1)
        self.cache.index_copy_(0, buffers.slot_mapping, buffers.input_ids)
        return hidden


def run_graphs(module: ModuleType, case: Case) -> dict[str, Any]:
    """A runner whose buffers hold a step's rows records all buckets; then steps come, in buckets of several sizes."""
    step = Step()
    runner = module.GraphRunner(step, case["max_num_seqs"], 3, CPU)
    buffers = runner.buffers
    step.places = {name: getattr(buffers, name).data_ptr() for name in NAMES}
    write_rows(buffers, case["before"])
    returned = runner.capture()
    kept = runner.graphs
    recorded = [list(map(str, kept)), all(type(key) is int for key in kept)] if isinstance(kept, dict) else None
    answer: dict[str, Any] = {
        "returned": returned,
        "calls": list(step.calls),
        "cache": step.cache.clone(),
        "buckets": list(runner.buckets),
        "kept": recorded,
        "moved": runner.buffers is not buffers,
        "replays": [],
    }
    if recorded is None or set(kept) != set(runner.buckets):
        return answer
    for bucket, rows in case["replays"]:
        buffers.clear()
        write_rows(buffers, rows)
        leave_behind(buffers, bucket, rows)
        step.cache.copy_(torch.arange(1000, 1000 + NUM_SLOTS))
        count = len(step.calls)
        hidden = runner.replay(bucket)
        answer["replays"].append({"hidden": copy_of(hidden), "cache": step.cache.clone(), "called": len(step.calls) - count})
    return answer


def write_rows(buffers: DecodeBuffers, rows: list[list[int]]) -> None:
    """Rows of [token, position, slot, block]."""
    for i, (token, position, slot, block) in enumerate(rows):
        buffers.input_ids[i], buffers.positions[i], buffers.slot_mapping[i] = token, position, slot
        buffers.seq_lens[i] = position + 1
        buffers.block_tables[i, 0] = block


def leave_behind(buffers: DecodeBuffers, bucket: int, rows: list[list[int]]) -> None:
    """Rows behind the bucket hold what an earlier, larger step left there: whoever computes them too writes to their slots."""
    taken = {row[2] for row in rows}
    free = (slot for slot in range(NUM_SLOTS - 1, BLOCK_SIZE, -1) if slot not in taken)
    for i, slot in zip(range(bucket, len(buffers.slot_mapping)), free, strict=False):
        buffers.slot_mapping[i], buffers.input_ids[i] = slot, STALE


RUN = {"9.1": run_repair, "9.2": run_fill, "9.3": run_graphs}
