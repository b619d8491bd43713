"""Exercises 7.1 and 7.2: what a block is called, and how far a request's prefix is cached. Cases and judges, in the parent
only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.blocks_run import NUMBER
from checks.exercises.words import count, kind_of
from checks.sandbox.plain import Opaque

# --------------------------------------------------------------------------------------------------------- 7.1 hash_block

Call = list[Any]  # [number of the call that made the parent, or its bytes in hexadecimal, or None; tokens; extra]
SALT_A, SALT_B, LORA_A = [["salt", "a"]], [["salt", "b"]], [["lora", "a"]]
_PAIRS = [[["lora", "a"], ["salt", "b"]], [["lora", "a"], ["salt", "c"]], [["salt", "b"], ["lora", "a"]], [["lora", "a"]]]
_SIGNS = ("", ",", ";", ":", "=", "|", "/", " ", "\n", "\0")
_BORDERS = [[["a", f"1{between}b{inside}2"]] for between in _SIGNS for inside in _SIGNS]  # written out, ("a", "1"), ("b", "2")
_PARENTS = [bytes(200 if i == at else i + 1 for i in range(32)) for at in (0, 10, 20, 31)]  # one byte differs


def hash_cases(seed: int, scale: int = 1) -> list[Case]:
    """Each case is a few calls. What is the same must get the same name, and nothing else may."""
    rng = random.Random(f"7.1:{seed}")
    by_hand: list[list[Call]] = [
        [[None, [5, 9, 2, 7], []]],
        [[None, [5, 9, 2, 7], []], [None, [5, 9, 2, 7], []]],
        [[None, [5, 9, 2, 7], []], [None, [5, 9, 2, 8], []]],
        [[None, [5, 9, 2, 7], []], [None, [9, 5, 2, 7], []]],
        [[None, [1, 23], []], [None, [12, 3], []], [None, [123, 0], []]],
        [[None, [300, 1], []], [None, [44, 1], []], [None, [300 + 65536, 1], []]],
        [[None, [5, 9], []], [0, [3, 4], []], [None, [3, 4], []]],
        [[None, [5, 9], []], [None, [6, 9], []], [0, [3, 4], []], [1, [3, 4], []]],
        [[None, [3, 4], []], [0, [3, 4], []], [1, [3, 4], []]],
        [[None, [5, 9], []], [None, [5, 9], SALT_A], [None, [5, 9], SALT_B], [None, [5, 9], SALT_A]],
        [[None, [5, 9], SALT_A], [None, [5, 9], LORA_A]],
        [[None, [5, 9], [["lora", "a"], ["salt", "b"]]], [None, [5, 9], [["lora", "ab"], ["salt", ""]]]],
        [[None, [5, 9], SALT_A], [None, [5, 9], SALT_B], [0, [3, 4], []], [1, [3, 4], []]],
    ]
    long = list(range(100, 115))
    by_hand += [
        [[None, [*long, 7], []], [None, [*long, 8], []]],
        [[None, [5, 9], pairs] for pairs in _PAIRS],
        [[None, [5, 9], pairs] for pairs in [[["a", "1"], ["b", "2"]], [["a", "bc"]], [["ab", "c"]], *_BORDERS]],
        [[parent.hex(), [3, 4], []] for parent in _PARENTS],
    ]
    chain = [[rng.randrange(49152) for _ in range(16)] for _ in range(6 * scale)]
    other = [row[:] for row in chain]
    other[rng.randrange(2)][rng.randrange(16)] += 1
    calls: list[Call] = []
    for rows in (chain, other):
        calls += [[None if i == 0 else len(calls) + i - 1, tokens, []] for i, tokens in enumerate(rows)]
    return [_hash_case(calls) for calls in [*by_hand, calls]]


def _hash_case(calls: list[Call]) -> Case:
    parents = {parent for parent, _, _ in calls if isinstance(parent, int)}
    shown = [(f"h{i} = " if i in parents else "") + _show_call(call) for i, call in enumerate(calls)]
    return {"calls": calls, "call": "; ".join(shown if len(shown) <= 5 else [*shown[:3], f"... ({len(shown)} calls)"])}


def _show_call(call: Call) -> str:
    parent, tokens, extra = call
    pairs = tuple(map(tuple, extra))
    shown = str(tokens) if len(tokens) <= 6 else f"[{tokens[0]}, {tokens[1]}, ... {count(len(tokens), 'token')}]"
    before = f"bytes.fromhex({parent!r})" if isinstance(parent, str) else "None" if parent is None else f"h{parent}"
    return f"hash_block({before}, {shown}{f', {pairs}' if pairs else ''})"


def judge_hash(case: Case, output: Any) -> Verdict:
    calls, returned = case["calls"], output["returned"]
    for call, (kind, value) in zip(calls, returned, strict=True):
        if wrong := _judge_type(kind, value, _show_call(call)):
            return wrong
    if output["calls_hash"]:
        told = f"{_show_call(calls[0])} calls Python's hash(). It has 64 bits and can be forced to collide, and a digest of it"
        return Verdict("wrong value", f"{told} collides with it. Give the digest the parent, the tokens and extra themselves.")
    for j, second in enumerate(calls):
        for i, first in enumerate(calls[:j]):
            is_same, looks_same = _meaning(calls, i) == _meaning(calls, j), returned[i] == returned[j]
            if is_same and not looks_same:
                told = f"{_show_call(first)} was called twice, and the names differ. The same block must be found again."
                return Verdict("wrong value", told)
            if looks_same and not is_same:
                told = f"{_show_call(first)} and {_show_call(second)} have the same name. {_why_other(calls, i, j)}"
                return Verdict("wrong value", told)
    if output["tokens"] != [tokens for _, tokens, _ in calls]:
        return Verdict("input changed", "The names are right, but the list `tokens` was changed. Leave it as it is.")
    return RIGHT


def _judge_type(kind: str, value: Any, call: str) -> Verdict | None:
    if kind == "bytes":
        if len(value) >= 40:  # hexadecimal: 20 bytes
            return None
        told = f"{call} returned {count(len(value) // 2, 'byte')}. With so few, two blocks meet by chance, or by intent: take"
        return Verdict("wrong value", f"{told} all of a digest like SHA-256's.")
    why = ""
    if value is None:
        return Verdict("wrong type", f"{call} should return bytes, and returned None. Is a `return` missing?")
    if type(value) is int:
        why = " Python's hash() has 64 bits and can be forced to collide; then one user reads another's KV."
    elif isinstance(value, str):
        why = " .digest() gives bytes, .hexdigest() gives text."
    elif isinstance(value, tuple):
        why = " A tuple that holds its parent holds the whole past: it grows with every block. A digest stays small."
    return Verdict("wrong type", f"{call} should return bytes, and returned {kind_of(value)}.{why}")


def _meaning(calls: list[Call], index: int) -> Any:
    parent, tokens, extra = calls[index]
    return _meaning(calls, parent) if isinstance(parent, int) else parent, tokens, extra


def _why_other(calls: list[Call], i: int, j: int) -> str:
    (_, first, extra), (_, second, other) = calls[i], calls[j]
    if _meaning(calls, i)[0] != _meaning(calls, j)[0]:
        return "What stands before them differs, so their KV does: the parent belongs into the name."
    if extra != other:
        pairs = [tuple(map(tuple, x)) for x in (extra, other)]
        told = f"Their extra keys are {pairs[0]} and {pairs[1]}: one tenant would find the other's block."
        if sorted(pairs[0]) == sorted(pairs[1]):
            return f"{told} The order of the pairs counts."
        if "".join(map("".join, extra)) == "".join(map("".join, other)) or len(extra) != len(other):
            return f"{told} Every pair counts, and a text may hold any sign: repr(extra) says where each begins and ends."
        return told
    if sorted(first) == sorted(second):
        return "The same tokens in another order are another text."
    if "".join(map(str, first)) == "".join(map(str, second)) or sum(first) == sum(second):
        return "Written one after the other, without borders, they look alike. Give every token the same number of bytes."
    if [t % 256 for t in first] == [t % 256 for t in second] or [t % 65536 for t in first] == [t % 65536 for t in second]:
        return "A token id does not fit into one byte, or two."
    return "Every token counts."


# ---------------------------------------------------------------------------------------------- 7.2 find_longest_cache_hit


def hit_cases(seed: int, scale: int = 1) -> list[Case]:
    """A request of some tokens, and which of its blocks are cached: numbers of its own blocks, first is 0."""
    rng = random.Random(f"7.2:{seed}")
    by_hand = [
        (9, 0, []),
        (9, 0, [0, 1]),
        (9, 0, [0]),
        (10, 0, [0, 1]),
        (8, 0, [0, 1]),
        (4, 0, [0]),
        (5, 0, [0]),
        (3, 0, []),
        (13, 0, [0, 2]),
        (13, 0, [1, 2]),
        (14, 6, [0, 1, 2]),
        (6, 10, [0, 1, 2, 3]),
        (1, 8, [0, 1]),
    ]
    cases = [_hit_case(rng, 4, *args) for args in by_hand]
    cases += [_hit_case(rng, 4, 14, 0, [0, 1, 2], held) for held in ([0], [1], [0, 1, 2])]
    for size in (1, 3, 16):
        tokens = rng.randint(4 * size * scale, 8 * size * scale)
        blocks = tokens // size
        cached = sorted(rng.sample(range(blocks), rng.randint(blocks // 2, blocks)))
        cases += [_hit_case(rng, size, tokens, 0, cached), _hit_case(rng, size, 6 * size, 0, list(range(6)))]
    return cases


def _hit_case(
    rng: random.Random, size: int, num_prompt: int, num_outputs: int, cached: list[int], held: Sequence[int] = ()
) -> Case:
    tokens = [rng.randrange(100, 1000) for _ in range(num_prompt + num_outputs)]
    ids = rng.sample(range(1, 40), len(cached))
    state = f"a request of {count(num_prompt, 'token')}" + (f" and {count(num_outputs, 'output')}" if num_outputs else "")
    holders = dict.fromkeys(held, ", which another request holds")
    places = zip(cached[:4], ids, strict=False)
    found = ", ".join(f"its block {i} is cached (in block {b}{holders.get(i, '')})" for i, b in places)
    more = f", and {len(cached) - 4} more" if len(cached) > 4 else ""
    call = f"find_longest_cache_hit(request): block size {size}, {state}; {found or 'nothing of it is cached'}{more}"
    return {
        "block_size": size,
        "tokens": tokens,
        "num_prompt": num_prompt,
        "cached": dict(zip(map(str, cached), ids, strict=True)),
        "held": [block for i, block in zip(cached, ids, strict=True) if i in held],
        "call": call,
    }


def judge_hit(case: Case, output: Any) -> Verdict:
    size, num_tokens = case["block_size"], len(case["tokens"])
    cached = {int(i): block for i, block in case["cached"].items()}
    run = 0
    while run in cached:
        run += 1
    wanted = [cached[i] for i in range(min(run, (num_tokens - 1) // size))]
    returned = output["returned"]
    if wrong := _judge_list(returned):
        return wrong
    if returned != wanted:
        why = _why_hits(case, cached, run, returned)
        return Verdict("wrong value", f"It returned blocks {returned}, and should return {wanted}.{why}")
    if output["has_copies"]:
        return Verdict(
            "wrong value", "The numbers are right, but those are copies. Return the blocks of get_cached_block itself."
        )
    if output["names_changed"]:
        told = "The blocks are right, but the list that extend_block_hashes returned was changed. It is the request's own:"
        return Verdict("input changed", f"{told} its blocks would be hashed again. Take a slice, which is a copy.")
    if output["changed"] or output["num_free"] != output["num_free_before"]:
        told = "The blocks are right, but the pool was changed. A lookup takes nothing: the request may not fit yet."
        return Verdict("wrong calls", told)
    return RIGHT


def _judge_list(returned: Any, source: str = "that get_cached_block gives") -> Verdict | None:
    if returned is None:
        return Verdict("wrong type", "It should return a list of blocks, and returned None. Is a `return` missing?")
    if isinstance(returned, list) and all(type(block) is int for block in returned):
        return None
    if isinstance(returned, list) and any(block is None for block in returned):
        return Verdict("wrong value", "There is a None among the blocks: get_cached_block found nothing there. Stop before it.")
    if isinstance(returned, list) and NUMBER in returned:
        told = "It should return the blocks themselves, and returned their numbers."
        return Verdict("wrong type", f"{told} The engine asks each for its ref_cnt: leave out .block_id.")
    if isinstance(returned, list) and all(isinstance(block, Opaque) and "bytes" in block.type_name for block in returned):
        return Verdict("wrong type", "It should return blocks, and returned hashes. get_cached_block(hash) gives the block.")
    what = kind_of(returned)
    if isinstance(returned, list):
        what = f"a list with {kind_of(next(block for block in returned if type(block) is not int))} in it"
    return Verdict("wrong type", f"It should return a list of the blocks {source}, and returned {what}.")


def _why_hits(case: Case, cached: dict[int, int], run: int, returned: list[int]) -> str:
    size, num_tokens, num_prompt = case["block_size"], len(case["tokens"]), case["num_prompt"]
    most = (num_tokens - 1) // size
    skipped = [block for block in case["held"] if block in [cached[i] for i in range(min(run, most))] and block not in returned]
    if case["held"] and (skipped or len(returned) < min(run, most)):
        told = f" Block {(skipped or case['held'])[0]} is held by another request."
        return f"{told} It is only read, so any number may read it at once: ref_cnt does not end the walk."
    if returned == [cached[i] for i in range(run)] and run > most:
        return (
            f" All {num_tokens} tokens would come from the cache, and no token would be computed: the next one is sampled from"
            " the last token's logits, which no cache keeps."
        )
    if returned == [cached[i] for i in sorted(cached)][: len(returned)] and len(returned) > run:
        return f" Block {run} of the request is not cached: nothing behind it can be used, for a prefix has no gaps."
    if case["num_prompt"] < num_tokens and len(returned) == min(run, max(0, num_prompt - 1) // size):
        return (
            " The request has outputs: it was preempted, and computes all its tokens again. request.num_tokens counts them all."
        )
    if len(returned) < min(run, most) and returned == [cached[i] for i in range(len(returned))]:
        return f" {count((len(returned) + 1) * size, 'token')} could be cached, and one would still be computed."
    if returned == [cached[i] for i in range(min(run, most))][::-1]:
        return " They come in the order of the tokens."
    return ""
