"""Lab 07, beside the student's code: runs in the child, and knows no answer. lab_07.py judges what comes back."""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any

from checks.exercises import Case
from checks.exercises.blocks_run import ids_of
from minivllm.core.block_hash import extend_block_hashes, hash_block
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.radix_cache import RadixNode
from minivllm.core.request import Request
from minivllm.sampling_params import SamplingParams

# ---------------------------------------------------------------------------------------------------------- 7.1 hash_block


def run_hash(module: ModuleType, case: Case) -> dict[str, Any]:
    names: list[Any] = []
    tokens_after = []
    calls_hash: list[bool] = []

    def watched(value: object) -> int:
        calls_hash.append(True)
        return hash(value)

    if "hash" not in vars(module):
        vars(module)["hash"] = watched
    for parent, tokens, extra in case["calls"]:
        given = list(tokens)
        pairs = tuple(map(tuple, extra))
        before = bytes.fromhex(parent) if isinstance(parent, str) else None if parent is None else names[parent]
        names.append(module.hash_block(before, given, pairs) if pairs else module.hash_block(before, given))
        tokens_after.append(given)
    if vars(module)["hash"] is watched:
        del vars(module)["hash"]
    returned = [["bytes", name.hex()] if isinstance(name, bytes) else ["other", name] for name in names]
    return {"returned": returned, "tokens": tokens_after, "calls_hash": bool(calls_hash)}


# ---------------------------------------------------------------------------------------------- 7.2 find_longest_cache_hit


def run_hit(module: ModuleType, case: Case) -> dict[str, Any]:
    size, tokens = case["block_size"], case["tokens"]
    pool = BlockPool(41)

    def make_request(name: str) -> Request:
        request = Request(name, tokens[: case["num_prompt"]], SamplingParams(), max_tokens=1)
        request.all_token_ids += tokens[case["num_prompt"] :]
        return request

    hashes = extend_block_hashes(make_request("earlier"), size, hash_block)
    for index, block_id in case["cached"].items():
        pool.publish(pool.blocks[block_id], hashes[int(index)])
    pool.touch([pool.blocks[block_id] for block_id in case["held"]])
    before, held = pool.num_free_blocks, [block.ref_cnt for block in pool.blocks]
    request = make_request("request")
    returned = module.KVCacheManager(pool, size, hash_block).find_longest_cache_hit(request)
    blocks = [b for b in returned if isinstance(b, KVCacheBlock)] if isinstance(returned, list) else []
    return {
        "returned": ids_of(returned),
        "has_copies": any(not any(block is own for own in pool.blocks) for block in blocks),
        "names_changed": request.block_hashes not in ([], hashes),
        "changed": held != [block.ref_cnt for block in pool.blocks],
        "num_free_before": before,
        "num_free": pool.num_free_blocks,
    }


# -------------------------------------------------------------------------------------------------------- 7.3 free, touch


def run_pool(module: ModuleType, case: Case) -> dict[str, Any]:
    """A script of calls on a new pool: ["allocate", owner, n, publish them?], ["touch", whose blocks, by whom], ["free",
    owner]. An owner that was freed before is freed again; owner "0" is the null block."""
    pool = module.BlockPool(case["num_blocks"])
    made: dict[str, list[Any]] = {"0": [pool.null_block]}
    trace: list[Any] = []
    for name, owner, *rest in case["script"]:
        answer: dict[str, Any] = {}
        if name == "allocate":
            n, cached = rest
            made[owner] = pool.allocate(n)
            for i, block in enumerate(made[owner]):
                if cached:
                    pool.publish(block, f"{owner}{i} of call {len(trace)}")
            answer["ids"] = [block.block_id for block in made[owner]]
        else:
            call = pool.touch if name == "touch" else pool.free
            blocks = list(made[owner]) if name == "touch" else made[owner][::-1]
            if name == "touch":
                made[rest[0]] = list(blocks)
            given = [id(block) for block in blocks]
            may_fail = name == "free" and any(block.ref_cnt < 1 for block in blocks)
            try:
                call(blocks)
            except Exception as error:
                if not isinstance(error, ValueError) and not may_fail:
                    raise
                answer["error"] = [type(error).__name__, str(error)[:300]]
            answer["list_changed"] = given != [id(block) for block in blocks]
        answer["free"] = [block.block_id for block in pool.free_block_queue]
        answer["ref_cnt"] = [block.ref_cnt for block in pool.blocks]
        answer["cached"] = [block.block_hash is not None for block in pool.blocks]
        trace.append(answer)
    return {"trace": trace}


# ---------------------------------------------------------------------------------------------------------- 7.4 match_prefix


def keys_of(letters: str) -> list[Hashable]:
    return [((), (ord(letter), ord(letter))) for letter in letters]


def grow(nodes: list[Any], parent: RadixNode) -> None:
    for letters, ids, children in nodes:
        blocks = [KVCacheBlock(block_id) for block_id in ids]
        node = RadixNode(keys_of(letters), blocks, parent=parent, start=parent.start + len(parent.keys))
        parent.children[node.keys[0]] = node
        grow(children, node)


def written_down(node: RadixNode) -> list[Any]:
    children = {str(key): written_down(child) for key, child in node.children.items()}
    return [list(map(str, node.keys)), ids_of(node.blocks), [block.ref_cnt for block in node.blocks], children]


def run_match(module: ModuleType, case: Case) -> dict[str, Any]:
    tree = module.RadixCache()
    grow(case["tree"], tree.root)
    keys = keys_of(case["keys"])
    before = written_down(tree.root), list(keys)
    returned = ids_of(tree.match_prefix(keys))
    changed = "the list `keys`" if keys != before[1] else "the tree" if written_down(tree.root) != before[0] else ""
    return {"returned": returned, "changed": changed}


RUN = {"7.1": run_hash, "7.2": run_hit, "7.3": run_pool, "7.4": run_match}
