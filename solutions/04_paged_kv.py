# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "04"
#     title: Paged KV
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 75 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Lab 03 (the KV cache)
#     required: required; from here on your parts run inside the engine
# ---

# %% [markdown] id="title"
# # Lab 04 · Paged KV
#
# In Lab 03 each request reserved memory for the longest text it might become, and used a fraction of it. Today you hand memory
# out in small blocks, when a token needs one. You write the pool, the rule for when a block is needed, the arithmetic that
# finds a token again, and attention that reads through it. At the end an engine serves text with your five parts in it.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("4.1")` gives a hint.

# %% id="setup"
import random
import statistics
import time

import torch

from checks import (
    components,
    hint,
    journey,
    need,
    new_figure,
    predict,
    progress,
    quiz,
    recall,
    reset,
    save_result,
    show,
    show_diff,
    skip,
    solution,
    start,
    use,
)
from minivllm import LLM, SamplingParams
from minivllm.attention.contiguous import ContiguousKVCache, forward_with_cache
from minivllm.core.request import Request

lab = start("04")

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Build a block pool, and grow block tables only when a token needs a slot.
# - Find any token's slot from its position, write keys and values there, and attend through block tables.
# - Put all of it into a running engine, and check that it says the same as before.
# - Measure what paging wins on the same memory, and what the block size decides.

# %% [markdown] id="big-idea"
# ## The big idea
#
# A hotel takes bookings for groups. Nobody says how many will come, so for each group it blocks a whole floor. Eight groups,
# eight floors, and the hotel is full, though most rooms are empty. The new manager hands out single rooms, as guests arrive,
# wherever one is free, and keeps a list at the desk: group A, rooms 12, 3, 47. Now the hotel is full when its rooms are full.
#
# A room is a **block**: `block_size` token slots of the cache. The list is the **block table** of a request. The desk is the
# **block pool**. Operating systems have managed memory this way since the 1960s; vLLM brought it to the KV cache.
#
# ```text
# position of a token     0 1 2 3 | 4 5 6 7 | 8 9 . .          block size 4
# block table             [ 7,        3,        9 ]            token 6: entry 1, so block 3, row 2
# ```
#
# **Where the picture breaks.** Guests mind the way between their rooms; a GPU hardly minds. A hotel knows when a guest leaves;
# an engine may have to put a request out in the middle of its stay, when all rooms are taken and everybody's group grows (Lab
# 05). And two groups never share a room, but two requests that begin with the same words can share blocks (Lab 07).

# %% [markdown] id="predict"
# ## Predict first
#
# Two commitments. You will meet each again beside its plot.
#
# {{question 4.p1}}

# %% id="predict-4-p1"
predict("4.p1", "many")

# %% [markdown] id="predict-4-p2-text"
# {{question 4.p2}}

# %% id="predict-4-p2"
predict("4.p2", "little")

# %% [markdown] id="example"
# ## A small example, by hand
#
# Block size 4, and three requests: A has 6 tokens, B has 3, C has 9; none may become longer than 12. Here is one cache of 36
# slots, used in both ways.

# %% id="example-layouts"
from matplotlib.patches import Rectangle

OWNER_COLOURS = {"A": "#0072B2", "B": "#E69F00", "C": "#009E73", "D": "#CC79A7"}


def draw_slots(axes, rows, title, numbered):
    """Rows of slots: (owner, position) where a token is, (owner, None) where the slot is taken and
    empty, None where it is free."""
    for y, row in enumerate(rows):
        for x, slot in enumerate(row):
            owner, position = slot or (None, None)
            left, top = x + (x // 4 * 0.25 if numbered else 0), y * 1.6
            colour = OWNER_COLOURS.get(owner, "white")
            alpha = 0.25 if owner and position is None else 1.0
            axes.add_patch(
                Rectangle(
                    (left, top),
                    1,
                    1,
                    facecolor=colour,
                    alpha=alpha,
                    edgecolor="#777777",
                    linewidth=0.6,
                )
            )
            if position is not None:
                ink = "black" if owner == "B" else "white"
                axes.text(
                    left + 0.5,
                    top + 0.5,
                    f"{owner}{position}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=ink,
                )
            if x % 4 == 0 and (numbered or x == 0):
                what = f"block {y * 3 + x // 4}" if numbered else f"reserved for {owner}"
                axes.text(left, top + 1.08, what, va="top", fontsize=7)
    axes.set(xlim=(-0.1, 12.6), ylim=(4.7, -0.1), xticks=[], yticks=[], aspect="equal")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[:].set_visible(False)


lengths = {"A": 6, "B": 3, "C": 9}
reserved = [[(owner, p if p < n else None) for p in range(12)] for owner, n in lengths.items()]
tables = {"A": [1, 2], "B": [3], "C": [4, 5, 6]}
paged = [None] * 36
for owner, table in tables.items():
    for position in range(4 * len(table)):
        slot = table[position // 4] * 4 + position % 4
        paged[slot] = (owner, position if position < lengths[owner] else None)

figure, (left, right) = new_figure(width=8.0, height=1.85, columns=2)
draw_slots(left, reserved, "Reserved: 36 of 36 slots taken", numbered=False)
draw_slots(
    right,
    [paged[i : i + 12] for i in range(0, 36, 12)],
    "Paged: 24 of 36 slots taken",
    numbered=True,
)
show(
    figure,
    alt="Two pictures of a cache of 36 slots. Reserved: three rows of 12, one for each request, of which A fills 6, B 3 and C 9;"
    " the other 18 are reserved and empty. Paged: nine blocks of 4. Block 0 is empty. A fills block 1 and half of 2, B three"
    " slots of block 3, C blocks 4, 5 and one slot of 6. Blocks 7 and 8 are free.",
)

# %% [markdown] id="example-by-hand"
# Full colour is a token, pale is taken and empty, white is free. Reserved, nothing is left for a fourth request. Paged, blocks
# 7 and 8 are free (block 0 is nobody's, see below). Check by hand, with the tables A `[1, 2]`, B `[3]`, C `[4, 5, 6]`:
#
# - Where is C's token 8? Position 8 is entry 8 // 4 = 2 of the table, so block 6, row 8 % 4 = 0. With all rows numbered in one
#   go, it is **slot** 6 * 4 + 0 = 24.
# - A writes its seventh token. Does it need a block? Block 2 has room: no. And its ninth? Yes, block 7: its table becomes `[1,
#   2, 7]`.
# - B ends, and D comes with 5 tokens. It gets blocks 8 and 3: not neighbours, and it does not matter.

# %% [markdown] id="exercise-4-1-text"
# ## Exercise 4.1 · The pool
#
# {{exercise 4.1}}
#
# A block is a `KVCacheBlock`: it has a `block_id`, and a `ref_cnt` that counts the tables which hold it. Here it is 0 or 1,
# until Lab 07 lets requests share. Block 0 is the **null block**: it is never handed out, so that padding can be written
# somewhere.
#
# **`allocate(n)`** returns a list of `n` blocks that nobody held, and sets their `ref_cnt` to 1. They are not free any more.
# `n` may be 0. If fewer than `n` are free, it raises a `ValueError` whose message names `n` and the number of free blocks, and
# takes nothing.
#
# **`free(blocks)`** takes one from the `ref_cnt` of each block in the list. One that nobody holds any more (0) is free again
# and can be handed out again; one that somebody still holds is not. A block whose `ref_cnt` is 0 already, like the null
# block's, raises a `ValueError` and keeps it. (Blocks before it may have gone back by then.)
#
# Hand out free blocks in any order. Keep `num_free_blocks` right, and leave the line `capabilities` as it
# is: it tells the engine what this pool can do.

# %% id="exercise-4-1" tags=["nbval-check-output"]
from checks import check
from collections import deque

from minivllm.core.block_pool import KVCacheBlock


class BlockPool:
    """num_blocks blocks, of which block 0 is nobody's."""

    capabilities = frozenset({"allocate"})

    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_blocks = deque(self.blocks[1:])

    @property
    def num_free_blocks(self):
        return len(self.free_blocks)

    def allocate(self, n):
        """A list of n free blocks, their ref_cnt now 1. ValueError, taking nothing, if fewer are
        free."""
        # BEGIN SOLUTION
        if n > self.num_free_blocks:
            raise ValueError(f"Cannot allocate {n} blocks: {self.num_free_blocks} are free.")
        blocks = [self.free_blocks.popleft() for _ in range(n)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks
        # END SOLUTION

    def free(self, blocks):
        """Take one from each block's ref_cnt; those nobody holds any more are free. ValueError if
        nobody did."""
        # BEGIN SOLUTION
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(
                    f"Block {block.block_id} is not in use: it is freed twice, or is the null block."
                )
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_blocks.append(block)
        # END SOLUTION


check("4.1")

# %% [markdown] id="exercise-4-2-text"
# ## Exercise 4.2 · When is a new block needed?
#
# {{exercise 4.2}}
#
# The manager keeps the block tables: `self.req_to_blocks` maps a request's id (`request.request_id`) to the list of its blocks,
# in the order of its tokens. A request without blocks may have no entry.
#
# **`allocate_slots(request, num_new_tokens)`** makes room for the request's next tokens: afterwards its blocks must have slots
# for `request.num_computed_tokens + num_new_tokens` tokens in all.
#
# - Take as many blocks as are missing, and no more, from `self.block_pool` (its `allocate` and `num_free_blocks` are those of
#   exercise 4.1), put them behind those the request has, and return a list of **the new blocks only**. Often that is `[]`: the
#   last block has room, or the request holds more than it needs.
# - If the pool has too few, return `None` and change nothing: no block is taken, no table changes. Somebody else decides what
#   to do then.
# - Leave the request as it is.
# - `num_new_tokens` is at least 1: 1 in a decode step, the whole prompt in a prefill.

# %% id="exercise-4-2" tags=["nbval-check-output"]
from checks import check


class KVCacheManager:
    """The block table of every request, over a pool."""

    capabilities = frozenset({"paging"})

    def __init__(self, block_pool, block_size):
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks = {}  # request id -> its blocks

    def allocate_slots(self, request, num_new_tokens):
        """The blocks newly allocated for the next num_new_tokens tokens, or None if the pool has
        too few."""
        # BEGIN SOLUTION
        blocks = self.req_to_blocks.get(request.request_id, [])
        num_slots = request.num_computed_tokens + num_new_tokens
        num_blocks = -(-num_slots // self.block_size)  # -(-a // b) rounds up
        num_new_blocks = max(0, num_blocks - len(blocks))
        if num_new_blocks > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.allocate(num_new_blocks)
        self.req_to_blocks[request.request_id] = blocks + new_blocks
        return new_blocks
        # END SOLUTION

    def free(self, request):
        """All of the request's blocks go back, the last one first."""
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, [])[::-1])


check("4.2")

# %% [markdown] id="replay-text"
# The example from above, with your pool and your tables: A, B and C arrive, A grows to nine tokens, B ends, D comes with five.
# (Your pool may choose other numbers.)


# %% id="replay"
def new_manager(num_blocks, block_size):
    """Your manager over your pool. (minivllm's, where you skipped, knows about prefix caching; it
    is told not to.)"""
    off = (
        {"max_model_len": 1 << 20, "enable_caching": False}
        if "prefix caching" in KVCacheManager.capabilities
        else {}
    )
    return KVCacheManager(BlockPool(num_blocks), block_size, **off)


def new_request(name, num_tokens):
    return Request(
        name, prompt_token_ids=[0] * num_tokens, sampling_params=SamplingParams(), max_tokens=1
    )


def give_slots(manager, request, num_new_tokens):
    """Slots for the next tokens, which then count as computed; False if there are none."""
    if manager.allocate_slots(request, num_new_tokens) is None:
        return False
    request.num_computed_tokens += num_new_tokens
    return True


need("4.1", "4.2")  # after a restart, or if you skipped them: your saved answers, or minivllm's
manager = new_manager(num_blocks=9, block_size=4)
requests = {name: new_request(name, n) for name, n in {"A": 6, "B": 3, "C": 9, "D": 5}.items()}
for name in "ABC":
    give_slots(manager, requests[name], requests[name].num_prompt_tokens)
for _ in range(3):
    give_slots(manager, requests["A"], 1)
manager.free(requests["B"])
give_slots(manager, requests["D"], 5)
for name, blocks in manager.req_to_blocks.items():
    print(
        f"{name}: {requests[name].num_computed_tokens} tokens in blocks {[block.block_id for block in blocks]}"
    )
print(f"free: {manager.block_pool.num_free_blocks} of 8")

# %% [markdown] id="exercise-4-3-text"
# ## Exercise 4.3 · From position to slot
#
# {{exercise 4.3}}
#
# A slot numbers the rows of all blocks in one go: row `r` of block `b` is slot `b * block_size + r`.
#
# **`slot_mapping(positions, block_table, block_size)`** returns the slots of a sequence's tokens at `positions`, an array as
# long as `positions`. Both inputs are 1-D NumPy arrays of integers; the block table holds block ids. Positions come in any
# order, need not start at 0, and there may be none. Leave the inputs as they are.
#
# The engine calls this in every step with all tokens of a batch, so it should be arithmetic on whole arrays. (A loop passes
# too.)

# %% id="exercise-4-3" tags=["nbval-check-output"]
from checks import check
import numpy as np


def slot_mapping(positions, block_table, block_size):
    """The cache slots [T] of tokens at positions [T] of a sequence whose blocks are block_table
    [M], in order."""
    # solution: minivllm.worker.input_batch.slot_mapping


check("4.3")

# %% [markdown] id="exercise-4-4-text"
# ## Exercise 4.4 · Write
#
# {{exercise 4.4}}
#
# The cache of one layer is a single tensor for all requests: `kv_cache` is `[2, num_blocks, block_size, num_kv_heads,
# head_dim]`, contiguous, keys at index 0 and values at index 1.
#
# **`write_kv(key, value, kv_cache, slot_mapping)`** writes `key` and `value` (`[T, num_kv_heads, head_dim]` of a step's T
# tokens, of any requests) into it, in place: token `t` goes to slot `slot_mapping[t]` (int64 `[T]`). Every other slot stays as
# it is, except those of block 0: padding is written there, also several tokens to one slot, and what it holds does not matter.
# It returns nothing, and leaves the other inputs as they are.

# %% id="exercise-4-4" tags=["nbval-check-output"]
from checks import check
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    """Scatter key and value [T, num_kv_heads, head_dim] into the slots of kv_cache, in place."""
    # solution: minivllm.attention.reference.write_kv


check("4.4")

# %% [markdown] id="exercise-4-5-text"
# ## Exercise 4.5 · Read
#
# {{exercise 4.5}}
#
# One decode step of a batch: each of `B` sequences has one new token, whose key and value are in the cache already.
#
# **`paged_decode(q, kv_cache, block_tables, seq_lens)`** returns attention for each of them, `[B, H, D]` in `q`'s dtype.
#
# - `q` is `[B, H, D]`: one query for each sequence and head. `kv_cache` is as in 4.4.
# - `block_tables` is int32 `[B, M]`: row `i` holds sequence `i`'s blocks, in order, and 0 behind them. `seq_lens` is int32
#   `[B]` (each at least 1): how many tokens it has, the new one included. It sees all of them, and none beyond.
# - For each head: softmax over its tokens of `q · key / sqrt(D)`, then the weighted sum of the values. `H` is a multiple of
#   `num_kv_heads`: query head `h` reads KV head `h // (H // num_kv_heads)`.
# - Slots beyond a sequence's tokens hold what an earlier owner left, **perhaps NaN**, and `0 * NaN` is NaN. Inputs stay as they
#   are.
#
# A loop over sequences is fine. If `q` is bfloat16, compute in float32 and return bfloat16. On a GPU all four are there, so
# give tensors you make `device=q.device`.

# %% id="exercise-4-5" tags=["nbval-check-output"]
from checks import check
import torch


def paged_decode(q, kv_cache, block_tables, seq_lens):
    """Attention of one new token per sequence, q [B, H, D], over its history in the cache, through
    block_tables [B, M]."""
    # BEGIN SOLUTION
    _, H, D = q.shape
    num_kv_heads = kv_cache.shape[3]
    # each [B, S, num_kv_heads, D], S = M * block_size
    k, v = kv_cache[:, block_tables.long()].flatten(2, 3).float()
    there = torch.arange(k.shape[1], device=q.device) < seq_lens[:, None]  # [B, S]
    k, v = (x.repeat_interleave(H // num_kv_heads, dim=2) for x in (k, v))

    scores = torch.einsum("bhd,bshd->bhs", q.float(), k) / D**0.5
    weights = scores.masked_fill(~there[:, None, :], float("-inf")).softmax(-1)
    v = v.masked_fill(~there[:, :, None, None], 0.0)  # a weight of 0 does not silence NaN
    return torch.einsum("bhs,bshd->bhd", weights, v).to(q.dtype)
    # END SOLUTION


check("4.5")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# Five parts: the pool, the manager, the slots, the write, the read. `components()` collects the ones that passed, and
# `LLM(components=...)` uses them in place of its own. Your pool said what it can do, so the engine switches off what it cannot
# yet do. Look at the log.

# %% id="plug-in-run"
import logging
import sys

handler = logging.StreamHandler(sys.stdout)
logging.getLogger("minivllm").handlers = [handler]  # one, also if this cell runs twice
logging.getLogger("minivllm").setLevel(logging.INFO)

mine = components()
print("\n".join(line for line in mine.describe().splitlines() if line.split()[0] in mine))

llm = None  # if this cell runs twice, the first engine goes before the second comes
llm = LLM(
    lab.model, components=mine, dtype="float32", max_model_len=1024, num_gpu_blocks_override=129
)
questions = [
    "Why is the sky blue?",
    "Name three colours.",
    "What is a hotel?",
    "Say hello in French.",
]
chats = [[{"role": "user", "content": question}] for question in questions]
params = SamplingParams(temperature=0, max_tokens=12 if lab.fast else 40)
answers = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
for question, answer in zip(questions, answers):
    print(f"\n{question}\n  {answer.text.strip()}")

# %% [markdown] id="plug-in-same-text"
# Four conversations at once, out of one shared cache. Are these the right words? The same questions, to an engine of minivllm's
# parts alone. (In float32, so that rounding does not decide.)

# %% id="plug-in-same"
llm = None
reference = LLM(lab.model, dtype="float32", max_model_len=1024, num_gpu_blocks_override=129)
expected = [output.outputs[0] for output in reference.chat(chats, params, use_tqdm=False)]
reference = None
same = sum(answer.token_ids == other.token_ids for answer, other in zip(answers, expected))
print(f"{same} of {len(answers)} answers are the same, token for token")

# %% [markdown] id="plug-in-diff"
# What you changed in the engine's manager. Much of what you see go is Lab 07: blocks that are shared.

# %% id="plug-in-show-diff"
show_diff("core/kv_cache_manager.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · The same memory
#
# A cache for 16,384 tokens, and a queue of requests with real-looking lengths: most short, a few long, at most 2,048 tokens. We
# serve them twice: with 8 reservations of 2,048 tokens, and with your pool and manager. No model runs here; it is all about who
# holds what.

# %% id="experiment-serve"
SLOTS, LONGEST = 16384, 2048


def make_requests(count, seed=0):
    """(prompt tokens, output tokens) of each request."""
    rng = random.Random(seed)
    both = [(rng.lognormvariate(5.3, 0.7), rng.lognormvariate(5.0, 0.8)) for _ in range(count)]
    return [(min(1024, max(4, int(p))), min(1023, max(4, int(o)))) for p, o in both]


def serve_reserved(asked, steps):
    """Eight reservations. Returns tokens used by each request that is running after `steps`
    steps."""
    waiting, running = list(asked), []
    for _ in range(steps):
        running = [[used + 1, end] for used, end in running if used < end]
        while waiting and len(running) < SLOTS // LONGEST:
            prompt, output = waiting.pop(0)
            running.append([prompt, prompt + output])
    return [used for used, _ in running]


def serve_paged(asked, steps, block_size):
    """Your pool and manager. Returns the manager, and (requests, tokens, allocated slots) after
    each step."""
    manager = new_manager(SLOTS // block_size + 1, block_size)  # one more: the null block
    waiting = [
        (new_request(str(i), prompt), prompt + output) for i, (prompt, output) in enumerate(asked)
    ]
    running, history = [], []
    for _ in range(steps):
        for request, end in [r for r in running if r[0].num_computed_tokens >= r[1]]:
            manager.free(request)
            running.remove((request, end))
        for request, end in list(running):
            while (request, end) in running and not give_slots(manager, request, 1):
                # no block is free: the newest request has to give way (Lab 05)
                newest, its_end = running.pop()
                manager.free(newest)
                waiting.insert(
                    0, (new_request(newest.request_id, newest.num_computed_tokens), its_end)
                )
        while waiting:
            request = waiting[0][0]
            spare = manager.block_pool.num_free_blocks - request.num_prompt_tokens / block_size
            if spare < len(running) or not give_slots(manager, request, request.num_prompt_tokens):
                break  # a free block is left for everybody who runs, so that they can grow
            running.append(waiting.pop(0))
        tokens = sum(request.num_computed_tokens for request, _ in running)
        history.append(
            (len(running), tokens, SLOTS - manager.block_pool.num_free_blocks * block_size)
        )
    return manager, history


need("4.1", "4.2")
asked = make_requests(400)
reserved = serve_reserved(asked, steps=300)
manager, history = serve_paged(asked, steps=300, block_size=16)
num_paged, tokens, _ = history[-1]
used = [sum(reserved) / SLOTS, tokens / SLOTS]
print(f"reserved: {len(reserved)} requests at once, {used[0]:.0%} of the memory holds a token")
print(f"paged:    {num_paged} requests at once, {used[1]:.0%} of the memory holds a token")

# %% [markdown] id="experiment-map-text"
# And this is what the memory looks like at that moment. Each small square is a block of 16 tokens, and its colour says whose it
# is, read from the reservations on the left and from your own block tables on the right. One request, the largest, is outlined.

# %% id="experiment-map"
from matplotlib.colors import hsv_to_rgb
from matplotlib.patches import Rectangle

recall("4.p1")


def colour_of(i):
    """A colour for request i that no other has: far from its neighbours' in hue, and in turns
    strong, light and dark."""
    return torch.tensor(
        hsv_to_rgb((i * 0.618 % 1, (0.85, 0.45, 0.8)[i % 3], (0.85, 0.95, 0.5)[i % 3]))
    ).float()


def outline(axes, blocks):
    """A black line around each of these blocks."""
    for block in blocks:
        row, column = divmod(block, 32)
        axes.add_patch(
            Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.4)
        )


grid_reserved = torch.ones(1024, 3)
for i, tokens in enumerate(reserved):
    colour, first = colour_of(i), i * LONGEST // 16
    grid_reserved[first : first + LONGEST // 16] = 0.8 + 0.2 * colour  # reserved, and empty
    grid_reserved[first : first + -(-tokens // 16)] = colour
grid_paged = torch.ones(1024, 3)
for i, blocks in enumerate(manager.req_to_blocks.values()):
    for block in blocks:
        grid_paged[block.block_id - 1] = colour_of(i)
most = max(manager.req_to_blocks.values(), key=len)

figure, both = new_figure(width=8.0, height=4.3, columns=2)
titles = (
    f"Reserved: {len(reserved)} requests, {used[0]:.0%} used",
    f"Paged: {num_paged} requests, {used[1]:.0%} used",
)
for axes, grid, title in zip(both, (grid_reserved, grid_paged), titles):
    axes.imshow(grid.view(32, 32, 3), interpolation="nearest")
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    axes.set_title(title, loc="left", fontsize=10)
outline(both[1], [block.block_id - 1 for block in most])
show(
    figure,
    alt=f"Two maps of the same 1,024 blocks. Left, reserved: {len(reserved)} bands of 128 blocks, each begun in a strong colour and"
    f" pale for the rest; {used[0]:.0%} is in use. Right, paged: the blocks of {num_paged} requests in all colours, mixed like a"
    f" mosaic, and {manager.block_pool.num_free_blocks} white ones that are free; {used[1]:.0%} is in use."
    f" The {len(most)} blocks of the largest request are outlined.",
)

# %% [markdown] id="experiment-map-reading"
# Nothing was added, and several times as many requests are inside. The mosaic looks untidy, and that is the point: no block has
# to lie beside another, so no gap is ever too small. (Runs of one colour are prompts that found free blocks in a row.)

# %% [markdown] id="experiment-block-size-text"
# ## Experiment 2 · Which block size?
#
# The same requests with block sizes from 1 to 256. Three things can be measured: slots that are allocated and empty, requests
# that fit, and the time to read keys and values through the tables, which is the copy your `paged_decode` begins with.

# %% id="experiment-block-size"
config = lab.load_decoder().config
sizes = [1, 4, 16, 64, 256] if lab.fast else [1, 2, 4, 8, 16, 32, 64, 128, 256]


def cache_and_tables(block_size, batch=16, seq_len=512):
    """One layer's cache, and the tables of `batch` sequences whose blocks lie all over it."""
    blocks_each = seq_len // block_size
    shuffled = torch.randperm(batch * blocks_each, generator=torch.Generator().manual_seed(0)) + 1
    shape = (2, batch * blocks_each + 1, block_size, config.num_kv_heads, config.head_dim)
    kv_cache = torch.ones(shape, device=lab.device, dtype=lab.dtype)
    return kv_cache, shuffled.view(batch, blocks_each).to(lab.device)


def read_milliseconds(sizes):
    """The best time, by block size, to read all keys and values through the tables. The sizes take
    turns, so that a moment in which the machine is busy hurts all of them alike."""
    inputs, best = (
        {size: cache_and_tables(size) for size in sizes},
        dict.fromkeys(sizes, float("inf")),
    )
    for _ in range(20 if lab.fast else 100):
        for size, (kv_cache, tables) in inputs.items():
            started = time.perf_counter()
            kv_cache[:, tables][0, 0, 0, 0, 0, 0].item()  # .item() waits for a GPU
            best[size] = min(best[size], (time.perf_counter() - started) * 1000)
    return best


need("4.1", "4.2")
rows, milliseconds = {}, read_milliseconds(sizes)
for size in sizes:
    _, history = serve_paged(asked, steps=300, block_size=size)
    full = history[150:]  # the pool is full by then
    requests, tokens, slots = (statistics.mean(column) for column in zip(*full))
    rows[size] = {
        "empty": 100 * (1 - tokens / slots),
        "requests": requests,
        "ms": milliseconds[size],
    }
    print(
        f"block size {size:3}: {rows[size]['empty']:4.1f} % of slots empty, {requests:4.1f} requests,"
        f" {-(-512 // size):3} entries for 512 tokens, {rows[size]['ms']:5.2f} ms to read"
    )

# %% id="experiment-block-size-plot"
slower = rows[1]["ms"] / min(row["ms"] for row in rows.values())
recall("4.p2", but="" if slower > 1.1 else "reading token by token was not slower.")
figure, both = new_figure(width=8.0, height=3.0, columns=2)
labels = {"empty": "% of allocated slots empty", "ms": "ms to read 16 x 512 tokens of a layer"}
for axes, (column, label) in zip(both, labels.items()):
    axes.plot(sizes, [row[column] for row in rows.values()], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, sizes)
    axes.set_ylim(0)
    axes.set_xlabel("block size")
    axes.set_title(label, loc="left", fontsize=10)
show(
    figure,
    alt="Two curves against the block size. Empty slots: "
    + ", ".join(f"{row['empty']:.1f} % at {size}" for size, row in rows.items())
    + ". Time to read: "
    + ", ".join(f"{row['ms']:.2f} ms at {size}" for size, row in rows.items())
    + ".",
)
print(f"Reading token by token takes {slower:.1f} times as long as in the best pieces.")
if slower < 3:
    row_bytes = config.num_kv_heads * config.head_dim * lab.dtype.itemsize
    print(
        f"That is little here: one token's key is {row_bytes} bytes in a row,"
        f" {row_bytes // 64} cache lines, a fair piece by itself."
    )


# %% [markdown] id="experiment-block-size-reading"
# The waste is half a block per request: it doubles with the size, and is about 2 % at 16. Reading single tokens is slowest, and
# from some size on larger pieces win nothing. Sharing, in Lab 07, will also want small blocks. So engines use 16 or 32.

# %% [markdown] id="experiment-speed-text"
# ## Experiment 3 · What it buys
#
# More requests in the same memory means more requests in a batch. Take the memory of **one** reservation of 2,048 tokens. Lab
# 03's engine serves one request in it, then the next. Yours takes them all at once.

# %% id="experiment-speed"
num_requests, num_new, rounds = (8, 8, 1) if lab.fast else (16, 16, 3)
rng = random.Random(1)
prompts = [
    [rng.randrange(100, 10000) for _ in range(rng.randint(8, 60))] for _ in range(num_requests)
]
decoder = lab.load_decoder()
logging.getLogger("minivllm").setLevel(logging.WARNING)


def one_after_another():
    """Lab 03: a contiguous cache, one request at a time. Half of the requests: the rate does not
    depend on how many wait."""
    for prompt in prompts[: num_requests // 2]:
        cache = ContiguousKVCache(
            config.num_layers, 2048, config.num_kv_heads, config.head_dim, lab.dtype, lab.device
        )
        new, start = prompt, 0
        for _ in range(num_new):
            positions = torch.arange(start, start + len(new), device=lab.device)
            logits = forward_with_cache(
                decoder, torch.tensor(new, device=lab.device), positions, cache
            )
            start += len(new)
            new = [int(logits[-1].argmax())]


def all_at_once():
    """Your parts in the engine; its pool holds as many tokens as the one cache above."""
    llm.generate(prompts, params, use_tqdm=False)


def alone():
    llm.generate(prompts[:1], params, use_tqdm=False)


params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
dtype = str(lab.dtype).removeprefix("torch.")
llm = LLM(lab.model, components=mine, dtype=dtype, max_model_len=2048, num_gpu_blocks_override=129)
at_once = f"paged, {num_requests} at once"
runs = {
    "contiguous, one after another": (one_after_another, num_requests // 2),
    at_once: (all_at_once, num_requests),
    "paged, one alone": (alone, 1),
}
all_at_once()  # the first runs do not count: they warm up
alone()
speeds = dict.fromkeys(runs, 0.0)
for _ in range(rounds):  # in turns, and the best of each: a run can be disturbed
    for name, (run, count) in runs.items():
        started = time.perf_counter()
        run()
        speeds[name] = max(speeds[name], count * num_new / (time.perf_counter() - started))
llm = None
for name, speed in speeds.items():
    print(f"{name:30} {speed:7.1f} tokens/s")
save_result(
    "04",
    tokens_per_second=speeds[at_once],
    what=f"paged KV, {num_requests} requests at once",
    data={
        "device": lab.device,
        "dtype": dtype,
        "model": lab.model,
        "speeds": speeds,
        "block_sizes": rows,
    },
    requests=num_requests,
    alone=speeds["paged, one alone"],
)

# %% [markdown] id="experiment-speed-reading"
# **Where it does not help.** A request that is alone gains nothing from paging: there is nobody to share the memory with, and every read
# goes through a table. (Where the two single speeds differ, that is the rest of the engine. It computes logits for the newest token only,
# for instance.) The gain is the batch that now fits.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Handing out a block that somebody holds.** Two requests write over each other, and both texts are fluent and wrong. The
#   pool shows it only when it wraps around.
# - **Freeing twice.** The block stands in the free list twice: the same accident, a little later.
# - **Off by one at a block's edge.** 8 tokens fill two blocks of 4. The third is needed with the ninth token, not with the
#   eighth.
# - **Taking blocks, then finding there are too few.** What was taken is held by nobody and never comes back.
# - **Reading to the end of the last block.** What stands behind the last token is another's, or NaN. Mask the scores *and* the
#   values.
# - **`position * block_id`, or block ids that are taken in order.** It works in every test with fresh blocks, and fails when
#   the pool wraps around.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` (or `need`) | The kernel was restarted. Run the set-up cell at the top, then this one |
# | `name 'new_manager' is not defined` (or `asked`, `mine`, `rows`) | An earlier cell of the experiment has not run since the kernel started: Run, Run All Above |
# | "block 7 is in two tables (requests A and C)" | Follow block 7 through the script of the message: when did it go back to the free list? |
# | "my_engine keeps the reference" | Your method uses an attribute that only your notebook's class has. Keep to what the given `__init__` sets |
# | The engine's log does not say that caching is off | Is exercise 4.1 passed? `progress()` tells, and `mine.describe()` says whose part is in use |
# | Not all answers are the same | `use("attention.decode", "reference")` takes minivllm's part for that seam; do so seam by seam to find the one that differs |
# | I want to use the debugger | `check("4.1", here=True)` runs in this kernel: put `breakpoint()` into your method |
# | I am stuck | `hint("4.1")`, again for the next one, then `solution("4.1")`. `skip("4.1")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, between the quotation marks in place of the question mark, and run the cell.
#
# {{question 4.q1}}

# %% id="quiz-4-q1" tags=["nbval-check-output"]
quiz("4.q1", "c")

# %% [markdown] id="quiz-4-q2-text"
# {{question 4.q2}}

# %% id="quiz-4-q2" tags=["nbval-check-output"]
quiz("4.q2", "a")

# %% [markdown] id="quiz-4-q3-text"
# {{question 4.q3}}

# %% id="quiz-4-q3" tags=["nbval-check-output"]
quiz("4.q3", "b")

# %% [markdown] id="quiz-4-q4-text"
# {{question 4.q4}}

# %% id="quiz-4-q4" tags=["nbval-check-output"]
quiz("4.q4", lambda requests, tokens: requests * (-tokens % 16))

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - Memory is handed out in blocks, when a token needs one. What is wasted is half a block per request, not the difference to
#   the longest text.
# - A block table turns a position into a place: entry `p // block_size`, row `p % block_size`. Blocks can lie anywhere.
# - Nothing is erased. A reader must know where its sequence ends.
# - Paging does not make a request faster. It makes room for more of them, and a larger batch is what makes an engine fast.

# %% [markdown] id="further"
# ## Further learning
#
# - Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention* (2023), arXiv:2309.06180:
#   section 3 measures the waste you measured, section 4 is this lab.
# - Prabhu et al., *vAttention* (2024), arXiv:2405.04437: the same room, from the GPU's own virtual memory, with keys and values
#   contiguous again.
# - `minivllm/core/block_pool.py`: why its free list is linked, where a deque was enough for you.
# - `minivllm/attention/cpu.py`: a decode that reads the blocks in place; your version copies them first.

# %% [markdown] id="next"
# ## Next: Lab 05, continuous batching
#
# There is room for many requests now. Who goes first, who waits, what happens when somebody ends early, and who has to give way
# when the pool is full? That is the scheduler's business, and the next lab's.

# %% id="journey"
journey()
