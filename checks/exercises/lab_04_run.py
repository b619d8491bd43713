"""Lab 04, beside the student's code: runs in the child, and knows no answer. lab_04.py judges what comes back."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from checks.exercises import Case
from checks.exercises.blocks_run import ids_of
from minivllm.core.block_pool import BlockPool

# ------------------------------------------------------------------------------------------------------- 4.1 BlockPool


def run_pool(module: ModuleType, case: Case) -> dict[str, Any]:
    """A script of calls on a new pool: ["allocate", n, owner], ["free", owner], ["share", owner] (somebody else holds them
    too), ["free twice", owner] (a list with each of them twice), ["free null"]. The trace has what each gave, and the pool's
    counters after it."""
    pool = module.BlockPool(case["num_blocks"])
    capabilities = getattr(module.BlockPool, "capabilities", None)
    told = sorted(map(str, capabilities)) if isinstance(capabilities, (set, frozenset, list, tuple)) else None
    held: dict[str, list[Any]] = {}
    trace: list[Any] = []
    for name, *rest in case["script"]:
        answer: dict[str, Any] = {}
        if name == "allocate":
            n, owner = rest
            answer = _call(pool.allocate, n, may_fail=n > pool.num_free_blocks)
            if isinstance(answer.get("returned"), list):
                held[owner] = answer["returned"]
            if strangers := _no_blocks(answer.get("returned")):  # nothing more can be asked of what is no block
                trace.append({"strangers": strangers})
                break
        elif name == "share":
            for block in held[rest[0]]:
                block.ref_cnt += 1
        else:
            blocks = [pool.null_block] if name == "free null" else list(held[rest[0]]) * (2 if name == "free twice" else 1)
            answer = _call(pool.free, blocks, may_fail=name == "free twice" or any(block.ref_cnt < 1 for block in blocks))
        answer["returned"] = ids_of(answer.get("returned"))
        trace.append({**answer, "num_free": pool.num_free_blocks, "ref_cnt": [block.ref_cnt for block in pool.blocks]})
    return {"trace": trace, "capabilities": told}


def _call(action: Callable[[Any], Any], argument: Any, may_fail: bool) -> dict[str, Any]:
    """What a call gave. A ValueError is an answer; so is any other error where the call asks for what cannot be (elsewhere the
    machine shows its line)."""
    try:
        return {"returned": action(argument)}
    except Exception as error:
        if not isinstance(error, ValueError) and not may_fail:
            raise
        return {"error": [type(error).__name__, str(error)[:300]]}


def _no_blocks(returned: Any) -> str | None:
    """The type of the first element of a list that is no block."""
    items = returned if isinstance(returned, (list, tuple)) else ()
    return next((type(item).__name__ for item in items if not hasattr(item, "block_id")), None)


# --------------------------------------------------------------------------------------------------- 4.2 allocate_slots


class WatchedPool(BlockPool):
    """minivllm's pool; `asked` remembers what allocate was called with."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.asked: list[Any] = []
        self.refused = False

    def allocate(self, n: int) -> Any:
        self.asked.append(n)
        self.refused = n > self.num_free_blocks
        return super().allocate(n)


def run_slots(module: ModuleType, case: Case) -> dict[str, Any]:
    """A script of calls: ["slots", request, its computed tokens, new tokens], ["free", request]."""
    pool = WatchedPool(case["num_blocks"])
    manager = module.KVCacheManager(pool, case["block_size"])
    capabilities = getattr(module.KVCacheManager, "capabilities", None)
    told = sorted(map(str, capabilities)) if isinstance(capabilities, (set, frozenset, list, tuple)) else None
    requests: dict[str, Any] = {}
    trace: list[Any] = []
    for name, owner, *rest in case["script"]:
        request = requests.setdefault(owner, SimpleNamespace(request_id=owner, num_computed_tokens=0))
        returned = None
        if name == "slots":
            request.num_computed_tokens, n = rest
            try:
                returned = manager.allocate_slots(request, n)
            except ValueError as error:
                if not pool.refused:  # not the pool's: the machine shows its line
                    raise
                trace.append({"refused": str(error)[:300], "asked": pool.asked})
                break
            if strangers := _no_blocks(returned):
                trace.append({"strangers": strangers})
                break
            if vars(request) != {"request_id": owner, "num_computed_tokens": rest[0]}:
                trace.append({"request": repr(vars(request))[:200]})
                break
        else:
            manager.free(request)
        tables = {owner: ids_of(table) for owner, table in manager.req_to_blocks.items()}
        trace.append({"returned": ids_of(returned), "tables": tables, "num_free": pool.num_free_blocks, "asked": pool.asked})
        pool.asked = []
    return {"trace": trace, "capabilities": told}


# ----------------------------------------------------------------------------------------------------- 4.3 slot_mapping


def run_slot_mapping(module: ModuleType, case: Case) -> dict[str, Any]:
    positions = np.array(case["positions"], dtype=np.int64)
    block_table = np.array(case["block_table"], dtype=np.int32)
    returned = module.slot_mapping(positions, block_table, case["block_size"])
    answer: dict[str, Any] = {"positions": positions.tolist(), "block_table": block_table.tolist()}
    if isinstance(returned, np.ndarray):
        answer |= {"shape": list(returned.shape), "dtype": str(returned.dtype), "slots": returned.tolist()}
    else:
        answer["returned"] = returned
    return answer


# ------------------------------------------------------------------------------------------------------------ 4.4 write_kv


def new_tokens(count: int, heads: int, dim: int, value: bool) -> torch.Tensor:
    """Keys, or values, [count, heads, dim] whose numbers say whose they are: token 7's key is 107.00, 107.01, ..., its value
    the negative of that. Not contiguous, as a decoder's are not."""
    inner = torch.arange(heads * dim).view(heads, dim) / 100
    tokens = 100.0 + torch.arange(count)[:, None, None] + inner
    whole = torch.stack([tokens, -tokens], dim=1)
    return whole[:, 1] if value else whole[:, 0]


def old_cache(num_blocks: int, block_size: int, heads: int, dim: int) -> torch.Tensor:
    """A cache in use: slot s holds 1000 + s, the values the negative of it."""
    slots = 1000.0 + torch.arange(num_blocks * block_size)
    keys = slots.view(num_blocks, block_size, 1, 1).expand(-1, -1, heads, dim)
    return torch.stack([keys, -keys])


def run_write(module: ModuleType, case: Case) -> dict[str, Any]:
    heads, dim, slots = case["heads"], case["dim"], torch.tensor(case["slots"], dtype=torch.int64)
    key, value = (new_tokens(len(slots), heads, dim, v) for v in (False, True))
    kv_cache = old_cache(case["num_blocks"], case["block_size"], heads, dim)
    kept = kv_cache
    module.write_kv(key, value, kv_cache, slots)
    return {"kv_cache": kept, "key": key, "value": value, "slots": slots}


# -------------------------------------------------------------------------------------------------------- 4.5 paged_decode


def decode_inputs(case: Case) -> dict[str, torch.Tensor]:
    """q [B, H, D] and a cache in which only the slots of the case's sequences hold numbers that mean anything. The rest is
    what earlier owners left: large values, or NaN where the case says so."""
    noise = torch.Generator().manual_seed(case["seed"])
    heads, kv_heads, dim, size = case["heads"], case["kv_heads"], case["dim"], case["block_size"]
    tables, lens = case["block_tables"], case["seq_lens"]
    kv_cache = torch.randn(2, case["num_blocks"], size, kv_heads, dim, generator=noise)
    kv_cache[1] *= 20
    if case["stale"] == "nan":
        kv_cache[:] = float("nan")
    for table, seq_len in zip(tables, lens, strict=True):
        for position in range(seq_len):
            kv_cache[:, table[position // size], position % size] = torch.randn(2, kv_heads, dim, generator=noise)
    q = torch.randn(len(lens), heads, dim, generator=noise)
    if case["close_scores"]:  # all scores near 100, where bfloat16 has steps of 0.5
        q = 5 + 0.2 * q
        kv_cache[0] = 5 + 0.2 * kv_cache[0]
    if case["low_scores"]:  # all below -1,000
        q, kv_cache[0] = 30 + q, kv_cache[0] - 30
    dtype = getattr(torch, case["dtype"])
    return {
        "q": q.to(dtype),
        "kv_cache": kv_cache.to(dtype),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparing with NaN."""
    return tensor.contiguous().view(torch.uint8)


def run_decode(module: ModuleType, case: Case) -> dict[str, Any]:
    inputs = decode_inputs(case)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    returned = module.paged_decode(inputs["q"], inputs["kv_cache"], inputs["block_tables"], inputs["seq_lens"])
    changed = [name for name, tensor in inputs.items() if not torch.equal(_bits(tensor), _bits(before[name]))]
    return {"returned": returned, "changed": changed}


RUN = {"4.1": run_pool, "4.2": run_slots, "4.3": run_slot_mapping, "4.4": run_write, "4.5": run_decode}
