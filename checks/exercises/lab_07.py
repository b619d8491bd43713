"""Lab 07's checks: the name of a block, the longest cached prefix, who is evicted first, and a radix tree. In the parent only.

The judges are in lab_07_lookup.py (7.1, 7.2), lab_07_pool.py (7.3) and lab_07_tree.py (7.4).
"""

from __future__ import annotations

from checks.exercises import Check
from checks.exercises.lab_07_lookup import hash_cases, hit_cases, judge_hash, judge_hit
from checks.exercises.lab_07_pool import judge_pool, pool_cases
from checks.exercises.lab_07_tree import judge_match, match_cases

CHECKS = {
    "7.1": Check(
        cases=hash_cases,
        judge=judge_hash,
        minutes=12,
        difficulty=2,
        hints=(
            "A hash takes bytes. Which bytes say all three, so that no two different inputs are written alike? [1, 23] and"
            " [12, 3] must not both become 123.",
            'Every token in the same number of bytes settles the borders: array("q", tokens).tobytes() uses 8 for each. The'
            " parent is bytes already; for None take as many zero bytes. repr(extra).encode() will do for the rest.",
            'digest = hashlib.sha256(b"\\0" * 32 if there is no parent, else parent)\n'
            'digest.update(...) with array("q", tokens).tobytes(), then with repr(extra).encode()\nreturn digest.digest()',
        ),
    ),
    "7.2": Check(
        cases=hit_cases,
        judge=judge_hit,
        minutes=15,
        difficulty=2,
        hints=(
            "Walk along the request's hashes from the first. What ends the walk? And how many blocks may be found at most, if"
            " one token must be left over to compute?",
            "Of n tokens, n - 1 may come from the cache: (request.num_tokens - 1) // self.block_size blocks at most."
            " self.block_pool.get_cached_block(hash) gives a block, or None: then stop, for what is behind a gap is no use.",
            "hashes = extend_block_hashes(request, self.block_size, self.hash_block), cut to the most there may be\nfor each"
            " hash: block = self.block_pool.get_cached_block(hash); if it is None: break; append it\nreturn the list",
        ),
    ),
    "7.3": Check(
        cases=pool_cases,
        judge=judge_pool,
        minutes=20,
        difficulty=3,
        hints=(
            "The free list is in the order in which blocks die: the front is handed out next. Where does a block belong that"
            " nobody can find, and where one that may be hit again? And where is a block that somebody holds?",
            "free: lower ref_cnt; only at 0 does the block go into the list: self.free_block_queue.append(block) if it has a"
            " block_hash, prepend(block) if not. touch: a block with ref_cnt 0 stands in the list, and has to leave it"
            " (remove) before its ref_cnt goes up.",
            "free: for each block: ValueError if ref_cnt < 1; ref_cnt -= 1; if it is 0 now: prepend where block_hash is None,"
            " append otherwise\ntouch: for each block: if ref_cnt == 0: self.free_block_queue.remove(block); ref_cnt += 1",
        ),
    ),
    "7.4": Check(
        cases=match_cases,
        judge=judge_match,
        minutes=20,
        difficulty=3,
        hints=(
            "From the node you are at, the next key tells which child to go to. Then compare key by key with what that child"
            " holds: all of it may fit, or only a part.",
            "node.children.get(keys[len(hits)]) is the child, or None: no further. Inside it stop at the first key that"
            " differs, and where your own keys end. If all of the child fitted, go on from the child.",
            "node, hits = self.root, []\nwhile there are keys left and the child of keys[len(hits)] is not None:\n    for each"
            " key and block of the child:\n        if the keys are used up, or the next one is another: return hits\n"
            "        append the block\n    node = child\nreturn hits",
        ),
    ),
}
