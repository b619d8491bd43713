"""Lab 04's checks: the block pool, block tables that grow, slots, and attention through them. In the parent only.

The judges are in lab_04_blocks.py (who holds which block) and lab_04_tensors.py (what stands in the cache).
"""

from __future__ import annotations

from checks.exercises import Check
from checks.exercises.lab_04_blocks import judge_pool, judge_slots, pool_cases, slots_cases
from checks.exercises.lab_04_tensors import (
    decode_cases,
    judge_decode,
    judge_mapping,
    judge_write,
    mapping_cases,
    write_cases,
)

CHECKS = {
    "4.1": Check(
        cases=pool_cases,
        judge=judge_pool,
        minutes=15,
        difficulty=2,
        hints=(
            "The free list is all you need: allocate takes blocks from one end of it, free puts them back. What must be"
            " compared before anything is taken?",
            "allocate: compare n with self.num_free_blocks first. Then take n blocks from self.free_blocks (popleft) and set"
            " each one's ref_cnt to 1. free: a ref_cnt below 1 is an error; else lower it, and only at 0 the block goes back.",
            "allocate: if n > self.num_free_blocks: raise ValueError naming both; blocks = [popleft n times]; ref_cnt = 1"
            " for each; return blocks.\nfree: for each block: if ref_cnt < 1: raise ValueError; ref_cnt -= 1; if it is 0"
            " now: append it to self.free_blocks.",
        ),
    ),
    "4.2": Check(
        cases=slots_cases,
        judge=judge_slots,
        minutes=15,
        difficulty=2,
        hints=(
            "How many tokens must have a slot after this step? How many blocks is that, and how many does the request have?",
            "Tokens: request.num_computed_tokens + num_new_tokens. Blocks: that, divided by block_size, rounded up (-(-a //"
            " b)). What is missing may be 0, or even negative.",
            "blocks = the request's list, or [] if it has none yet\nmissing = max(0, blocks needed in all - len(blocks))\nif"
            " missing is more than the pool has free: return None\nnew = self.block_pool.allocate(missing); store blocks +"
            " new under the request's id; return new",
        ),
    ),
    "4.3": Check(
        cases=mapping_cases,
        judge=judge_mapping,
        minutes=8,
        difficulty=1,
        hints=(
            "With block size 4, position 6 is in entry 1 of the block table, at row 2. Which operations give 1 and 2?",
            "`positions // block_size` says which entry, `positions % block_size` which row. NumPy does both for a whole"
            " array, and `block_table[array]` looks up many entries at once.",
            "The block is block_table[positions // block_size]. Its first slot is block * block_size. Add the row.",
        ),
    ),
    "4.4": Check(
        cases=write_cases,
        judge=judge_write,
        minutes=12,
        difficulty=2,
        hints=(
            "A slot numbers the rows of all blocks, one after another. In which shape would kv_cache[0] be indexed by a slot"
            " directly?",
            "`kv_cache.flatten(1, 2)` is [2, num_blocks * block_size, Hkv, D]: still the same memory, with a slot as its"
            " index. Or leave the shape, and index with `slot_mapping // block_size` and `slot_mapping % block_size`.",
            "flat = kv_cache.flatten(1, 2); then flat[0] at slot_mapping becomes key, and flat[1] at slot_mapping becomes"
            " value (indexed assignment writes in place).",
        ),
    ),
    "4.5": Check(
        cases=decode_cases,
        judge=judge_decode,
        minutes=25,
        difficulty=3,
        hints=(
            "Do it for one sequence first, in a loop: collect its keys and values into [S, Hkv, D], then it is the attention"
            " of Lab 01 with a single query.",
            "`kv_cache[:, block_table]` is [2, M, block_size, Hkv, D]; flatten the blocks, cut off at seq_len, and you have"
            " keys and values [S, Hkv, D]. `repeat_interleave(H // Hkv, dim=1)` gives each query head its KV head.",
            "for each sequence i:\n    k, v = kv_cache[:, block_tables[i]] flattened to [2, M * block_size, Hkv, D], cut to"
            " seq_lens[i]\n"
            '    repeat both to H heads\n    scores = einsum("hd,shd->hs", q[i], k) / sqrt(D), softmax over s\n'
            '    out[i] = einsum("hs,shd->hd", weights, v)\nin float32, and back to q\'s dtype at the end',
        ),
    ),
}
