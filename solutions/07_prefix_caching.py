# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "07"
#     title: Prefix caching
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 75 minutes, and 20 more for exercise 7.4
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Labs 04 and 06 (paged KV; the token budget)
#     required: required, but for exercise 7.4
# ---

# %% [markdown] id="title"
# # Lab 07 · Prefix caching
#
# Nearly every prompt begins like another one: the same instructions, the same document, the same conversation one turn earlier. Its keys
# and values have been computed, and still lie in some block. Today you find them. You give blocks names, look up how far a prompt is
# known, and decide which block must go when memory runs out. At the end the second turn of a long chat answers after one step.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("7.1")` gives a hint.

# %% id="setup"
import logging
import time

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
from minivllm import LLM, Components, EngineConfig, SamplingParams
from minivllm.bench import metrics
from minivllm.bench.replay import replay
from minivllm.bench.workloads import make
from minivllm.observe.clock import VirtualClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.sim.echo import EchoExecutor

lab = start("07")

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Name a block so that equal names mean equal keys and values, whoever asks.
# - Find how much of a prompt is cached, and say why one token is always left over.
# - Keep blocks that nobody uses, and give them up in the right order.
# - Measure where a prefix cache pays, where it does not, and what it gives away.

# %% [markdown] id="big-idea"
# ## The big idea
#
# A restaurant finds that almost every guest begins with the same soup. (Lab 05's picture broke here: to its scheduler all guests are
# strangers.) So the kitchen stops pouring away what is left in a pot, and writes on the pot what is in it. If the next order begins
# like that, the soup is there. Only when a pot is needed does it empty one: the one nobody has asked for the longest.
#
# A pot is a **block**, the writing on it its **hash**. A block that nobody holds goes back to the free list, *but keeps its hash*. If a
# prompt with that beginning comes before the block is handed out again, the block is used as it is. The cache has no memory of its
# own: it is the free memory, not yet overwritten.
#
# **Only beginnings.** A token's key and value depend on all tokens before it, so a block's name must say all of that. A chain does:
#
# ```text
# tokens        a b c d | e f g h | i j          block size 4; the last block is not full: no name
# names           h0    |   h1    |              h0 = H(None, abcd)     h1 = H(h0, efgh)
# ```
#
# Equal `h1` means equal `efgh` and equal `h0`, so equal `abcd`. One comparison stands for the whole past.
#
# **Where the picture breaks.** Soup is eaten; a block is only read, and a hundred requests may read it at once. And no guest learns what
# others ordered before. Here the time to the first token tells: that is a leak, and we come to it.

# %% [markdown] id="predict"
# ## Predict first
#
# {{question 7.p1}}

# %% id="predict-7-p1"
predict("7.p1", "step")

# %% [markdown] id="predict-7-p2-text"
# {{question 7.p2}}

# %% id="predict-7-p2"
predict("7.p2", "fall")

# %% [markdown] id="example"
# ## A small example, by hand
#
# Block size 4. Request A has computed the ten tokens `abcdefghij`, in blocks 1, 2 and 3. Blocks 1 and 2 are full, so they have names.
# Now come B with `abcdef` and three tokens of its own, C with exactly `abcdefgh`, and D, which differs from A in its first token.

# %% id="example-figure"
from matplotlib.patches import Rectangle

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"


def draw_prompts(axes, prompts):
    """Rows of tokens in blocks of 4: (name, text, blocks found). Found blocks are blue and hatched, the others orange."""
    for y, (name, text, num_found) in enumerate(prompts):
        axes.text(-0.4, y * 1.5 + 0.5, name, ha="right", va="center", fontsize=10)
        for x, token in enumerate(text):
            left, found = x + x // 4 * 0.3, x // 4 < num_found
            face, hatch = (BLUE, "//") if found else (ORANGE, None)
            axes.add_patch(
                Rectangle(
                    (left, y * 1.5),
                    1,
                    1,
                    facecolor=face,
                    alpha=0.45,
                    edgecolor="#555555",
                    hatch=hatch,
                )
            )
            axes.text(left + 0.5, y * 1.5 + 0.5, token, ha="center", va="center", fontsize=10)
    axes.set(xlim=(-3, 12), ylim=(1.5 * len(prompts), -0.2), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.grid(False)


figure, axes = new_figure(width=5.5, height=2.5)
draw_prompts(
    axes,
    [("A", "abcdefghij", 0), ("B", "abcdefxyz", 1), ("C", "abcdefgh", 1), ("D", "Xbcdefghij", 0)],
)
show(
    figure,
    alt="Four prompts in blocks of 4 tokens. Blue and hatched: found in the cache; orange: computed. A, abcd efgh ij, computes"
    " everything. B, abcd efxy z, finds its first block. C, abcd efgh, finds its first block and computes the second. D, Xbcd efgh"
    " ij, finds nothing.",
)

# %% [markdown] id="example-by-hand"
# - **B** shares six tokens and finds four. Its second block is `efxy`: a block is found whole or not at all.
# - **C** is known from end to end, and still computes its second block. The next token is drawn from the *last token's logits*, and
#   nobody kept those: at least one token must go through the model.
# - **D** finds nothing, although `efgh` stands in both. Its `efgh` followed another word, and has other keys and values.
# - Now A ends. Blocks 1 and 2 keep their names; block 3 was not full, and nobody can find it. Which should be handed out first? Block 3.
#   And then? If 1 went, 2 could not be reached any more. So 2, then 1.

# %% [markdown] id="exercise-7-1-text"
# ## Exercise 7.1 · A name for a block
#
# {{exercise 7.1}}
#
# **`hash_block(parent, tokens, extra=())`** returns the name of a full block: `bytes`, all of a cryptographic digest (20 bytes or more) such as
# `hashlib.sha256(data).digest()`.
#
# - `parent`: the name of the block before it, or `None` for a request's first block.
# - `tokens`: the block's token ids, a list of integers from 0 on. (A vocabulary has tens of thousands.)
# - `extra`: what else its keys and values depend on, pairs of any strings, in an order that counts: `(("salt", "tenant 1"),)`, or `()`.
#
# Two calls give the same name exactly if all three are equal. Leave the list as it is.
#
# Python's `hash` will not do: 64 bits, and whoever can make two prompts collide reads another's cache.

# %% id="exercise-7-1" tags=["nbval-check-output"]
from checks import check
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    """The name of a block of tokens behind the block named parent (None: it is the first)."""
    # solution: minivllm.core.block_hash.hash_block


check("7.1")

# %% [markdown] id="exercise-7-2-text"
# ## Exercise 7.2 · How far is it known?
#
# {{exercise 7.2}}
#
# **`find_longest_cache_hit(request)`** returns the list of cached blocks that the request can begin with, in the order of its tokens.
#
# - `extend_block_hashes(request, self.block_size, self.hash_block)` gives the names of all the request's full blocks, in order. (It hashes
#   each block once; leave the list as it is.)
# - `self.block_pool.get_cached_block(name)` gives the block of that name, or `None`.
# - Behind the first block that is missing nothing counts: a prefix has no gaps.
# - `request.num_tokens` is how many tokens the request has, prompt *and* outputs: one that was preempted comes back with both. At least one
#   of them must be left to compute.
# - Nothing is taken. Whether there is room for the rest is decided later.

# %% id="exercise-7-2" tags=["nbval-check-output"]
from checks import check
from minivllm.core.block_hash import extend_block_hashes


class KVCacheManager:
    """The block tables, over a pool whose blocks have names. (The rest of it is Lab 04's and minivllm's.)"""

    def __init__(self, block_pool, block_size, hash_block):
        self.block_pool = block_pool
        self.block_size = block_size
        self.hash_block = hash_block

    def find_longest_cache_hit(self, request):
        """The cached blocks that hold the longest known beginning of the request; never all of its tokens."""
        # solution: minivllm.core.kv_cache_manager.KVCacheManager.find_longest_cache_hit


check("7.2")

# %% [markdown] id="exercise-7-3-text"
# ## Exercise 7.3 · Which block dies first?
#
# {{exercise 7.3}}
#
# Now the order of the free list *is* the eviction policy: `allocate` (given) takes from the front, and only there does a block lose its
# name.
#
# **`free(blocks)`** takes one holder away from each block (`ref_cnt`), in the order given. Where none is left, the block goes into
# `self.free_block_queue`: to the back (`append`) if it has a `block_hash`, to the front (`prepend`) if it has none. A block whose `ref_cnt`
# is 0 already raises a `ValueError`.
#
# **`touch(blocks)`** is called on a hit: each block gets one holder more. One that was free must leave the list
# (`self.free_block_queue.remove(block)`, wherever it stands), or somebody else is given it.
#
# The caller passes blocks **tail first** already: keep their order, and the list as it is.

# %% id="exercise-7-3" tags=["nbval-check-output"]
from checks import check
from minivllm.core.block_pool import FreeKVCacheBlockQueue, KVCacheBlock


class BlockPool:
    """num_blocks blocks, of which block 0 is nobody's. Free ones may still be found by their hash."""

    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block = {}

    @property
    def num_free_blocks(self):
        return self.free_block_queue.num_free_blocks

    def allocate(self, n):
        blocks = [self.free_block_queue.popleft() for _ in range(n)]
        for block in blocks:
            self.unpublish(block)  # evicted: here, and not before
            block.ref_cnt = 1
        return blocks

    def free(self, blocks):
        """One holder less for each. A block without any is free: at the back if it can be found, else at the front."""
        # solution: minivllm.core.block_pool.BlockPool.free

    def touch(self, blocks):
        """One holder more for each. A block that was free leaves the free list."""
        # solution: minivllm.core.block_pool.BlockPool.touch

    def get_cached_block(self, block_hash):
        return self.cached_block_hash_to_block.get(block_hash)

    def publish(self, block, block_hash):
        if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:
            block.block_hash = block_hash
            self.cached_block_hash_to_block[block_hash] = block

    def unpublish(self, block):
        if block.block_hash is not None:
            del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None


check("7.3")

# %% [markdown] id="replay-text"
# Your pool at work. A and B come and go, B begins like A, and then C needs more blocks than are nameless. Each row is the free list,
# front first; a letter says whose text can still be found in the block.


# %% id="replay"
def draw_free_list(axes, history):
    """Rows of (what happened, [(block id, whose text is in it or "")])."""
    for y, (event, row) in enumerate(history):
        axes.text(-0.3, y + 0.5, event, ha="right", va="center", fontsize=8)
        for x, (block_id, owner) in enumerate(row):
            face, hatch = {"A": (BLUE, "//"), "B": (ORANGE, ".."), "": ("white", None)}[owner]
            axes.add_patch(
                Rectangle(
                    (x, y), 0.9, 0.85, facecolor=face, alpha=0.5, hatch=hatch, edgecolor="#555555"
                )
            )
            axes.text(
                x + 0.45, y + 0.42, f"{block_id}{owner}", ha="center", va="center", fontsize=9
            )
    axes.set(xlim=(-5.2, 8), ylim=(len(history), -0.2), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(False)


need("7.3")  # after a restart
pool, history = BlockPool(8), []


def note(event):
    row = [
        (block.block_id, block.block_hash[0] if block.block_hash else "")
        for block in pool.free_block_queue
    ]
    history.append((event, row))


def name_blocks(owner, blocks):
    for i, block in enumerate(blocks):
        pool.publish(block, f"{owner}{i}")


a = pool.allocate(3)
name_blocks("A", a[:2])  # the third is not full
note("A runs in blocks 1, 2, 3")
pool.free(a[::-1])
note("A ends")
pool.touch(a[:1])
b = pool.allocate(2)
name_blocks("B", b)
note("B hits block 1, takes two")
pool.free([*b[::-1], a[0]])
note("B ends")
c = pool.allocate(5)
note("C takes five blocks")

figure, axes = new_figure(width=6.5, height=2.2)
draw_free_list(axes, history)
show(
    figure,
    alt="The free list after each event, front first. "
    + " ".join(
        f"{event}: {', '.join(f'{i}{owner}' for i, owner in row) or 'empty'}."
        for event, row in history
    ),
)

# %% [markdown] id="plug-in"
# ## Plug it in
#
# Lab 04's pool could not cache, so your engine kept prefix caching off until now. Four people ask about one text; then each asks again.
# All in float32, so that rounding does not decide, and every answer is compared with one from an engine that caches nothing.

# %% id="plug-in-run"
logging.getLogger("minivllm").setLevel(logging.WARNING)
mine = components()
print(
    "\n".join(line for line in mine.describe().splitlines() if line.split()[0] in mine), end="\n\n"
)

story = (
    make("long_document", n=1, doc_words=120, questions=1)
    .requests[0]
    .prompt.partition("\n\nQuestion")[0]
)
questions = ["What is this about?", "Name one thing it says.", "Is it long?", "Who would read it?"]
chats = [[{"role": "user", "content": f"{story}\n\n{question}"}] for question in questions]
params = SamplingParams(temperature=0, max_tokens=8 if lab.fast else 24)


def two_turns(**settings):
    """What an engine answers in two turns of each chat: [(tokens, tokens found in the cache)]."""
    answers = []
    with LLM(
        lab.model, dtype="float32", max_model_len=1024, num_gpu_blocks_override=257, **settings
    ) as llm:
        first = llm.chat(chats, params, use_tqdm=False)
        again = [
            [
                *chat,
                {"role": "assistant", "content": out.outputs[0].text},
                {"role": "user", "content": "Say that again, shorter."},
            ]
            for chat, out in zip(chats, first)
        ]
        for out in [*first, *llm.chat(again, params, use_tqdm=False)]:
            answers.append(
                (list(out.outputs[0].token_ids), len(out.prompt_token_ids), out.num_cached_tokens)
            )
    return answers


cached, cold = two_turns(components=mine), two_turns(enable_prefix_caching=False)
for i, (_, num_prompt_tokens, num_cached_tokens) in enumerate(cached):
    print(
        f"turn {i // 4 + 1}, question {i % 4 + 1}: {num_cached_tokens:3} of {num_prompt_tokens} prompt tokens were there"
    )
same = sum(a[0] == b[0] for a, b in zip(cached, cold))
print(f"{same} of {len(cold)} answers are the same as without a cache, token for token")

# %% [markdown] id="plug-in-diff"
# Look at question 2 of the first turn. All four came at once, and nothing was computed: it shares blocks that are being filled *in the
# same step*. That is sound, for a layer writes everybody's keys and values before anybody reads. And your pool, against minivllm's:

# %% id="plug-in-show-diff"
show_diff("core/block_pool.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · The second turn
#
# A conversation that begins with 1,000 tokens: its first turn, its second, and the second once more with the cache emptied
# (`reset_prefix_cache()`). First in float32: are the words the same? Then in the fast dtype: the times.

# %% id="experiment-second-turn"
tokenizer = lab.load_tokenizer()
opening = tokenizer.encode(
    make("long_document", n=1, doc_words=1000, questions=1).requests[0].prompt
)[:1000]
question = tokenizer.encode(" And then?")
# 16 of the 17 tokens have keys and values when the turn ends
decode = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)


def three_runs(llm):
    """First turn, second turn, second turn cold: each output, and the record of its times."""
    runs = []
    llm.reset_prefix_cache()
    prompt = opening
    for is_cold in (False, False, True):
        if is_cold:
            llm.reset_prefix_cache()
        elif runs:
            prompt = [*opening, *runs[0][0].outputs[0].token_ids, *question]
        output = llm.generate({"prompt_token_ids": prompt}, decode, use_tqdm=False)[0]
        runs.append((output, list(llm.trace.requests.values())[-1]))
    return runs


settings = {
    "components": mine,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 257,
    "trace": True,
}
with LLM(lab.model, dtype="float32", **settings) as llm:
    (first, _), (second, _), (cold, _) = three_runs(llm)
    print(
        f"second turn: {second.num_cached_tokens} of {len(second.prompt_token_ids)} prompt tokens came from the cache"
    )
    print(f"output as without it: {second.outputs[0].token_ids == cold.outputs[0].token_ids}")

with LLM(lab.model, dtype=str(lab.dtype).removeprefix("torch."), **settings) as llm:
    llm.generate({"prompt_token_ids": opening[:200]}, decode, use_tqdm=False)  # warm-up
    times = [[record for _, record in three_runs(llm)] for _ in range(1 if lab.fast else 3)]
ttft = [min(record.ttft for record in records) for records in zip(*times)]
step = min(record.tpot for records in times for record in records)
recall("7.p1")
names = ["first turn", "second turn", "second turn, cold"]
figure, axes = new_figure(width=6.5, height=1.9)
bars = axes.barh(
    names, [1000 * t for t in ttft], color=[GREY, BLUE, ORANGE], hatch=["", "//", ""], alpha=0.7
)
axes.bar_label(bars, [f" {1000 * t:.0f} ms" for t in ttft])
axes.axvline(1000 * step, color="black", linestyle="--")
axes.set_xlabel(f"time to first token, ms (dashed: one decode step, {1000 * step:.0f} ms)")
axes.invert_yaxis()
axes.margins(x=0.12)
axes.grid(False)
show(
    figure,
    alt="Time to first token: "
    + ", ".join(f"{name} {1000 * t:.0f} ms" for name, t in zip(names, ttft))
    + f". One decode step takes {1000 * step:.0f} ms.",
)
print(
    f"The second turn's first token takes {ttft[1] / step:.1f} decode steps; without the cache {ttft[2] / step:.1f}."
)
save_result(
    "07",
    tokens_per_second=len(second.prompt_token_ids) / ttft[1],
    what="the second turn of a chat",
    quantity="Reading a prompt",
    data={
        "device": lab.device,
        "dtype": lab.dtype,
        "model": lab.model,
        "ttft": dict(zip(names, ttft)),
        "decode_step": step,
    },
)

# %% [markdown] id="experiment-workloads-text"
# 1,016 tokens of the conversation had keys and values when the turn ended (the answer's last token was sampled, and never computed):
# 63 full blocks of 16, so 1,008. What is left fits into one small step.
#
# ## Experiment 2 · Who shares?
#
# Four loads, with your cache and without. **chat**: conversations of three turns. **few_shot**: questions behind one set of solved
# examples. **tree_of_thought**: a search that tries several continuations of each idea. **no_sharing**: no two prompts begin alike.

# %% id="experiment-workloads"
work = {
    "chat": make("chat", n=2 if lab.fast else 5, turns=3, max_tokens=4),
    "few_shot": make("few_shot", n=6 if lab.fast else 16, max_tokens=4),
    "tree_of_thought": make(
        "tree_of_thought", n=1, branches=2 if lab.fast else 3, depth=2, max_tokens=4
    ),
    "no_sharing": make("no_sharing", n=4 if lab.fast else 12, prompt_len=256, max_tokens=4),
}
rows = {}
settings |= {"dtype": str(lab.dtype).removeprefix("torch."), "num_gpu_blocks_override": 1025}
with (
    LLM(lab.model, **settings, enable_prefix_caching=False) as plain,
    LLM(lab.model, **settings) as caching,
):
    for llm in (plain, caching):
        llm.generate({"prompt_token_ids": opening[:500]}, decode, use_tqdm=False)  # warm-up
    for name, workload in work.items():
        means, rates = {plain: [], caching: []}, {}
        for llm in (plain, caching) * (1 if lab.fast else 3):  # in turns
            llm.reset_prefix_cache()
            trace = replay(llm, workload)
            means[llm].append(metrics.summarize(metrics.ttft(trace)).mean)
            rates[llm] = metrics.cache_hit_rate(trace)
        rows[name] = [(rates[llm], min(means[llm])) for llm in (plain, caching)]
for name, ((_, without), (rate, with_cache)) in rows.items():
    print(
        f"{name:16} {rate:4.0%} found, mean TTFT {without * 1000:5.0f} -> {with_cache * 1000:5.0f} ms"
    )
noise = rows["no_sharing"][1][1] / rows["no_sharing"][0][1]
if not 0.8 < noise < 1.25:
    print(
        f"no_sharing finds nothing and computes the same tokens either way: its factor of {noise:.2f} is how much this machine's"
        " speed moved meanwhile. Read the others with that in mind."
    )

figure, both = new_figure(width=8.0, height=2.6, columns=2)
at = range(len(rows))
both[0].bar(at, [100 * row[1][0] for row in rows.values()], color=BLUE, alpha=0.7, hatch="//")
both[0].set_title("% of prompt tokens found", loc="left", fontsize=10)
for i, (label, colour, hatch) in enumerate(
    (("without", ORANGE, ""), ("with the cache", BLUE, "//"))
):
    both[1].bar(
        [x + 0.4 * i - 0.2 for x in at],
        [1000 * r[i][1] for r in rows.values()],
        0.4,
        label=label,
        color=colour,
        alpha=0.7,
        hatch=hatch,
    )
both[1].set_title("mean time to first token, ms", loc="left", fontsize=10)
both[1].legend(frameon=False, fontsize=8)
for axes in both:
    axes.set_xticks(at, [name.replace("_", "\n") for name in rows], fontsize=8)
show(
    figure,
    alt="Two bar charts. "
    + " ".join(
        f"{name}: {rate:.0%} of prompt tokens found; time to first token {without * 1000:.0f} ms without the cache,"
        f" {with_cache * 1000:.0f} ms with it."
        for name, ((_, without), (rate, with_cache)) in rows.items()
    ),
)

# %% [markdown] id="experiment-block-size-text"
# **Where it does not help.** Where nobody shares there is nothing to find. And output tokens come no faster anywhere: the cache saves
# prefill, and decode is as it was.
#
# ## Experiment 3 · The block size again
#
# In Lab 04 small blocks wasted less memory. Here they also share more. No model is needed to see it: the *echo model* computes nothing and
# checks every slot. (`serve` is used again below. Its clock is made up: 10 ms a step and 0.1 ms a token.)


# %% id="experiment-block-size"
def serve(workload, parts=mine, num_blocks=4096, block_size=16, **settings):
    """A trace of the workload through an engine over the echo model, and that engine."""
    config = EngineConfig(block_size=block_size, **settings).resolved("cpu")
    core = RecordingEngineCore(
        config, EchoExecutor(num_blocks, block_size, vocab_size=49152), parts, vocab_size=49152
    )
    return replay(core, workload.encoded(tokenizer.encode), clock=VirtualClock()), core


sizes = [1, 4, 16, 64, 256] if lab.fast else [1, 2, 4, 8, 16, 32, 64, 128, 256]
shares = {
    name: [
        metrics.cache_hit_rate(serve(work[name], num_blocks=16384 // size + 1, block_size=size)[0])
        for size in sizes
    ]
    for name in ("chat", "few_shot", "tree_of_thought")
}
recall("7.p2")
figure, axes = new_figure(width=6.5, height=2.8)
for (name, values), marker in zip(shares.items(), "osD"):
    axes.plot(sizes, [100 * value for value in values], marker=marker, label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, sizes)
axes.set_ylim(0)
axes.set_xlabel("block size")
axes.set_title("% of prompt tokens found", loc="left", fontsize=10)
axes.legend(frameon=False)
show(
    figure,
    alt="The share of prompt tokens found, against the block size. "
    + " ".join(
        f"{name}: {', '.join(f'{v:.0%} at {s}' for s, v in zip(sizes, values))}."
        for name, values in shares.items()
    ),
)

# %% [markdown] id="tenants-text"
# Up to 16 some is lost, beyond it much. Hash work and table length speak for larger blocks, so most engines start with 16.
#
# ## What the cache gives away
#
# Two tenants, one engine. A has sent a confidential memo. B has not seen it, and guesses.

# %% id="tenants"
memo = "Board minutes, strictly confidential. We will close the plant in Springfield on the first of May and tell nobody before. "
memo += "All managers have been informed in person, and the press office keeps a statement ready. "
guesses = {"a wrong guess": memo.replace("close", "sell"), "the right guess": memo}
ask = SamplingParams(temperature=0, max_tokens=2)
with LLM(lab.model, components=mine, max_model_len=512, num_gpu_blocks_override=129) as llm:
    for salts in ((None, None), ("tenant A", "tenant B")):
        salted = [{} if salt is None else {"cache_salt": salt} for salt in salts]
        llm.generate({"prompt": memo + "Summarize.", **salted[0]}, ask, use_tqdm=False)
        for name, text in guesses.items():
            (reply,) = llm.generate(
                {"prompt": text + "Is that so?", **salted[1]}, ask, use_tqdm=False
            )
            print(
                f"{'with' if salts[0] else 'without'} cache_salt, {name}: {reply.num_cached_tokens} tokens were there"
            )

# %% [markdown] id="exercise-7-4-text"
# B never saw A's text, but a hit (or only the faster first token) told that the guess was right. A salt hashed into the first block makes
# another chain for every tenant. The price: tenants that could have shared a system prompt do not.
#
# ## Exercise 7.4 · The other school: a tree (optional)
#
# {{exercise 7.4}}
#
# vLLM looks up names in a dictionary. SGLang keeps a **radix tree**: a path from the root is a prompt, and paths part where prompts do. A
# node holds a run of blocks:
#
# ```text
#                  root
#             /            \
#    [abcd efgh] 7 3      [QRST] 5         the numbers are blocks
#      /        \
#   [ijkl] 9   [WXYZ] 2
# ```
#
# Nothing is hashed. A block's **key** is its tokens in the clear, with the extra keys. A `RadixNode` has `keys` and `blocks`, lists of the
# same length, and `children`, a dictionary from a child's *first* key to the child. The root holds nothing itself.
#
# **`match_prefix(keys)`** returns the blocks of the longest path that says what `keys` say: follow the child of the next key, compare key by
# key, stop inside a node where they part or where `keys` end. `keys` may be empty. Nothing is changed. (Inserting, splitting and evicting are given:
# `minivllm/core/radix_cache.py`.)

# %% id="exercise-7-4" tags=["nbval-check-output"]
from checks import check
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    """A tree of cached blocks."""

    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        """The blocks of the longest path from the root that says what keys say, in order."""
        # solution: minivllm.core.radix_cache.RadixCache.match_prefix


check("7.4")

# %% [markdown] id="tree-text"
# With `prefix_cache="radix"` the engine keeps the tree, yours if you wrote `match_prefix`. After one search for a solution it looks like this.
# Each box is a node: the number of its blocks.

# %% id="tree"
mine = components()
trees = Components(
    {
        seam: part
        for seam, part in mine.items()
        if seam in ("block_pool", "radix_cache", "scheduler")
    }
)
thoughts = make("tree_of_thought", n=1, branches=2, depth=2, thought_words=40, max_tokens=4)
_, core = serve(thoughts, trees, prefix_cache="radix")
tree = core.kv_cache_manager.radix_cache


def place_nodes(node, depth, row, places):
    """Give every node a place: x is where its first block starts, y is a row of its own for every leaf. Returns the next free row."""
    begin = row
    for child in node.children.values():
        row = place_nodes(child, depth + 1, row, places)
    row = max(row, begin + 1)
    places[id(node)] = (node, (begin + row - 1) / 2)
    return row


places = {}
num_rows = place_nodes(tree.root, 0, 0, places)
figure, axes = new_figure(width=7.5, height=0.5 + 0.28 * num_rows)
for node, y in places.values():
    if node is tree.root:
        continue
    axes.add_patch(
        Rectangle(
            (node.start, y - 0.35),
            len(node.blocks),
            0.7,
            facecolor=BLUE,
            alpha=0.45,
            edgecolor="#333333",
        )
    )
    axes.text(
        node.start + len(node.blocks) / 2,
        y,
        str(len(node.blocks)),
        ha="center",
        va="center",
        fontsize=8,
    )
    for child in node.children.values():
        axes.plot(
            [node.start + len(node.blocks)] * 2,
            [y, places[id(child)][1]],
            color="#333333",
            linewidth=0.8,
        )
deepest = max(node.start + len(node.blocks) for node in tree)
axes.set(
    xlim=(-0.2, deepest + 0.2),
    ylim=(num_rows - 0.4, -0.6),
    yticks=[],
    xlabel="blocks from the root",
)
axes.grid(False)
show(
    figure,
    alt=f"The radix tree after the search: {len(list(tree))} nodes with {len(tree)} blocks, {num_rows} leaves, {deepest} blocks deep. The"
    " problem is one run of blocks at the root; it parts into the first ideas, and each of them into what was tried after it.",
)
print(
    f"{sum(len(r.prompt_token_ids) for r in thoughts.encoded(tokenizer.encode).requests)} prompt tokens, {16 * len(tree)} in the tree"
)

# %% [markdown] id="schools-text"
# ## Experiment 4 · Hash chain or tree?
#
# The same four loads, and a pool so small that blocks must go. Then the work: naming the 64 blocks of a new prompt of 1,024 tokens, and
# finding them.

# %% id="schools"
from minivllm.core.request import Request


def microseconds(core, prompts):
    """(to name the blocks of a prompt, to find them), the median over prompts."""
    manager, times = core.kv_cache_manager, []
    for i, prompt in enumerate(prompts):
        request = Request(f"timed {i}", prompt, SamplingParams(), max_tokens=1)
        begin = time.perf_counter()
        manager.get_computed_blocks(request)
        middle = time.perf_counter()
        manager.get_computed_blocks(request)  # its names are known now
        times.append((2 * middle - begin - time.perf_counter(), time.perf_counter() - middle))
    return [1e6 * sorted(column)[len(times) // 2] for column in zip(*times)]


schools = {"hash": mine, "radix": trees}
same_prompt = make("fixed", n=1, prompt_len=1024, max_tokens=1)
print(f"{'':16}" + "".join(f"{school:>10}" for school in schools))
for name, workload in work.items():
    found = [
        metrics.cache_hit_rate(serve(workload, p, num_blocks=65, max_num_seqs=4, prefix_cache=s)[0])
        for s, p in schools.items()
    ]
    print(f"{name:16}" + "".join(f"{rate:10.1%}" for rate in found) + "   of prompt tokens found")
timed = []
for school, parts in schools.items():
    _, core = serve(same_prompt, parts, prefix_cache=school)
    timed.append(microseconds(core, [same_prompt.requests[0].prompt_token_ids] * 50))
for what, values in zip(("name 64 blocks", "find 64 blocks"), zip(*timed)):
    print(f"{what:16}" + "".join(f"{value:10.0f}" for value in values) + "   microseconds")

# %% [markdown] id="cache-aware-text"
# Both find the same. The chain's work is the hashing, the tree's is comparing; neither matters beside the prefill it saves, and neither
# grows with the pool. The tree's charm is another: it *shows* who shares with whom.
#
# ## Experiment 5 · A cache-aware order
#
# Six people ask four questions each, everyone about a document of their own, taking turns. The pool holds two documents, so first come,
# first served finds the one it needs just evicted. `scheduling_policy="longest_prefix"` takes, of those who have waited longest, the one
# with most of its prompt in the cache. (Nobody is passed over more than 64 times.)

# %% id="cache-aware"
documents = make("long_document", n=6, doc_words=300, questions=4, max_tokens=2)
any_order = Components({seam: part for seam, part in mine.items() if seam != "scheduler"})
longest = max(
    len(request.prompt_token_ids) for request in documents.encoded(tokenizer.encode).requests
)
limits = {"num_blocks": 1 + 5 * longest // 32, "max_num_seqs": 1}
figure, axes = new_figure(width=7.5, height=1.9)
told, colours = [], [BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
for y, policy in enumerate(("fcfs", "longest_prefix")):
    trace, _ = serve(documents, any_order, scheduling_policy=policy, **limits)
    order = sorted(trace.requests.values(), key=lambda request: request.first_token)
    for x, request in enumerate(order):
        number = int(request.group.removeprefix("doc-"))
        hit = request.num_cached_tokens > 0
        box = Rectangle(
            (x, y),
            0.9,
            0.8,
            facecolor=colours[number - 1],
            alpha=0.6,
            hatch="//" if hit else "",
            edgecolor="#333333",
        )
        axes.add_patch(box)
        axes.text(x + 0.45, y + 0.4, number, ha="center", va="center", fontsize=9)
    computed = sum(step.num_tokens for step in trace.steps)
    told.append(
        f"{policy}: {metrics.cache_hit_rate(trace):.0%} of prompt tokens found, {computed:,} tokens computed,"
        f" mean time to first token {metrics.summarize(metrics.ttft(trace)).mean:.2f} s"
    )
    print(told[-1])
axes.set(
    xlim=(0, len(order)),
    ylim=(2, -0.1),
    xlabel="order of service (the number is the document; hatched: found in the cache)",
)
axes.set_yticks([0.4, 1.4], ["fcfs", "longest_prefix"])
axes.set_xticks([])
axes.grid(False)
axes.spines[:].set_visible(False)
show(
    figure,
    alt="The order in which 24 questions about 6 documents are served. " + ". ".join(told) + ".",
)

# %% [markdown] id="cache-aware-reading"
# The same requests, the same memory; only the order is another, and most of the work is gone. But whoever asked first about the last
# document was passed over again and again: a cache-aware order trades fairness for work, and without its bound it could starve somebody.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Hashing a block's own tokens only.** Two texts with a paragraph in common share its blocks: fluent answers about the wrong thing.
# - **Reusing the whole prompt.** No token is computed, so there are no logits. It shows only with exact multiples of the block size.
# - **Touching too late.** Between look-up and `touch` an allocation may evict the very blocks that were found.
# - **Erasing names at `free`.** Everything works, and nothing is ever found: the cache *is* the free blocks.
# - **Freeing head first.** Every eviction takes the start of a prefix, and the rest is dead memory.
# - **Naming what is not computed.** Draft tokens may be rejected, and a step may fail: then the name must go again.
# - **One cache for all tenants.** It tells what others sent.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | Another Python runs the notebook. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` | The kernel was restarted. Run the set-up cell first |
# | `name 'BlockPool' is not defined` | Run the cell of exercise 7.3, or `skip("7.3")` |
# | `bytes must be in range(0, 256)` | Token ids are larger. `array("q", tokens).tobytes()` takes 8 bytes for each |
# | "Block 3 is not in the free list" | `touch` removes a block that somebody holds. Only one with `ref_cnt` 0 is in the list |
# | Nothing is found in "Plug it in" | `progress()`: 7.1 to 7.3 must have passed, and 6.2. Lab 04's pool cannot cache, Lab 05's scheduler does not look |
# | Not all answers are the same | `use("kv_cache_manager", "reference")` takes minivllm's part; do so seam by seam |
# | I want to use the debugger | `check("7.3", here=True)` runs in this kernel: put `breakpoint()` into your method |
# | I am stuck | `hint("7.2")`, again for the next one, then `solution("7.2")`. `skip("7.2")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 7.q1}}

# %% id="quiz-7-q1" tags=["nbval-check-output"]
quiz("7.q1", "b")

# %% [markdown] id="quiz-7-q2-text"
# {{question 7.q2}}

# %% id="quiz-7-q2" tags=["nbval-check-output"]
quiz("7.q2", "c")

# %% [markdown] id="quiz-7-q3-text"
# {{question 7.q3}}

# %% id="quiz-7-q3" tags=["nbval-check-output"]
quiz("7.q3", "a")

# %% [markdown] id="quiz-7-q4-text"
# {{question 7.q4}}

# %% id="quiz-7-q4" tags=["nbval-check-output"]
quiz("7.q4", lambda old, new, shared: shared // 16 * 16)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A block's name is a hash of its tokens *and of its parent's name*. Equal names mean equal pasts.
# - The cache is the free list with names on it. The order of that list is the eviction policy: nameless blocks first, then the tail of
#   whatever has been unused longest.
# - At least one token is always computed.
# - What is saved is prefill: time to first token, not time per token. What is lost is a little privacy, unless tenants are salted.

# %% [markdown] id="further"
# ## Further learning
#
# - Zheng et al., *SGLang: Efficient Execution of Structured Language Model Programs* (2023), arXiv:2312.07104: RadixAttention, and the
#   cache-aware order.
# - vLLM's design document *Automatic Prefix Caching*: the same hashes, with all their corner cases.
# - Gu et al., *Auditing Prompt Caching in Language Model APIs* (2025), arXiv:2502.07776: the leak, measured at public services.
# - `minivllm/core/kv_cache_manager.py`: how `free` takes back the names of steps that failed.

# %% [markdown] id="next"
# ## Next: Lab 08, a paged attention kernel in Triton
#
# It is decided now what is computed: which requests, tokens, blocks. From here on it is about *how*. Your `paged_decode` copies every key
# and value before it looks at them. A kernel of your own will read each once, where it lies.

# %% id="journey"
journey()
