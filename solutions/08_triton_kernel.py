# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "08"
#     title: A paged attention kernel in Triton
#     version: 1
#     gpu: "Better (NVIDIA, Linux). Without one, kernels run in an interpreter, and are compiled for GPUs you do not have. macOS and Windows have no Triton: 8.1, 8.3 and 8.4 are skipped there, 8.2 and the questions work."
#     time: about 90 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Labs 00 and 04 (bytes and ceilings; block tables)
#     required: required on Linux
# ---

# %% [markdown] id="title"
# # Lab 08 · A paged attention kernel in Triton
#
# Lab 04's `paged_decode` copies every key and value before it looks at one. Today you write a *kernel*, a program that runs on the GPU
# itself. It reads each number once, where it lies.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code in place of `raise NotImplementedError`, run
# it, and it tells you whether the answer is right.

# %% id="setup"
import torch

from checks import (
    components,
    hint,
    interpreted,
    journey,
    my_kernels,
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
from minivllm.attention.triton_utils import HAS_TRITON, why_no_triton

lab = start("08")
if not HAS_TRITON:
    where = f"nowhere here: the lab {why_no_triton()} Exercise 8.2 and the questions work."
elif lab.device == "cuda":
    where = "on the GPU"
else:
    where = "in Triton's interpreter, and compile for GPUs that are not here"
print(f"  kernels run {where}")

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Write Triton kernels: programs, vectors of pointers, masks.
# - Compute a softmax in one pass.
# - Write the loop of a paged decode kernel, and join the parts of a history that was cut.
# - Count a kernel's bytes, and read its registers and spills.

# %% [markdown] id="big-idea"
# ## The big idea
#
# You ask a library a question. Lab 04's librarian **copies** every book that might matter onto your desk; then you read. The other way: send clerks to the shelves, each with a list of shelf marks (the block table) and
# a notepad. A clerk reads each book where it stands, once, and keeps three numbers: the best match so far, the sum of weights so far, the
# weighted answer so far. No book moves.
#
# A clerk is a **program** of a Triton kernel. A launch starts a **grid** of them, here one for each (sequence, KV head), all with the same
# code. Each works on small vectors and rectangles, **tiles**, all of whose numbers it handles at once.
#
# | Triton | what it does |
# |---|---|
# | `tl.program_id(0)` | which program am I, along axis 0 of the grid |
# | `tl.arange(0, 8)` | the vector 0 ... 7; lengths are powers of two |
# | `tl.load(pointer + offsets, mask=m, other=0.0)` | the numbers there; where `m` is false nothing is read, and `other` comes back |
# | `tl.store(pointer + offsets, x, mask=m)` | write, where `m` is true |
# | `a[:, None] * 4 + b[None, :]` | a rectangle from a column and a row |
# | `tl.dot(a, b)`, `tl.trans(a)` | matrix product, transpose |
# | `tl.max(x, 1)`, `tl.where`, `tl.exp2` ... | as in PyTorch, along axis 1; `exp2(x)` is 2 to the x |
# | `BLOCK: tl.constexpr` | a number known when the kernel is compiled, as shapes must be |
#
# A pointer is the address of a tensor's first number, and knows no shape: `x + 5` points to the sixth number from there, whether that is
# still `x` or somebody else's.
#
# **Where the picture breaks.** Memory is fetched 128 bytes at a time, so a row of a block is cheap and single numbers from all over are not.
# And the notepad is tiny: 255 *registers* a thread. If it overflows, numbers go to memory after all. That is a *spill*, and you will
# provoke one.

# %% [markdown] id="predict"
# ## Predict first
#
# {{question 8.p1}}

# %% id="predict-8-p1"
predict("8.p1", "many")

# %% [markdown] id="predict-8-p2-text"
# {{question 8.p2}}

# %% id="predict-8-p2"
predict("8.p2", "faster")

# %% [markdown] id="exercise-8-1-text"
# ## Exercise 8.1 · Two first kernels
#
# {{exercise 8.1}}
#
# **`add_kernel(out, x, y, n, BLOCK)`** writes `out[i] = x[i] + y[i]` for `i` from 0 to `n - 1`. Program `p` has the numbers `p * BLOCK` to `p * BLOCK +
# BLOCK - 1`. The last program's may reach beyond `n`: there it neither reads nor writes.
#
# **`gather_kernel(out, cache, block_table, seq_len, BLOCK_SIZE, WIDTH, TILE)`** collects a sequence's rows in order. `cache` is `[num_blocks,
# BLOCK_SIZE, WIDTH]`, `out` is `[seq_len, WIDTH]`, both contiguous float32; `block_table` holds int32 block numbers. Position `p` is in block `block_table[p //
# BLOCK_SIZE]`, row `p % BLOCK_SIZE`; row `r` of block `b` begins at `(b * BLOCK_SIZE + r) * WIDTH`. Program `i` has the positions `i * TILE` to `i * TILE + TILE - 1`. From
# `seq_len` on there is nothing: no entry of the table, no row to read or write.
#
# `WIDTH`, `TILE` and `BLOCK` are powers of two; `BLOCK_SIZE` may be any number. Tensors come as pointers: `x + offsets`, with a vector of offsets, is a
# vector of pointers. (In programs of your own: `import triton`, `import triton.language as tl`.)

# %% id="exercise-8-1" tags=["nbval-check-output"]
from checks import check
from minivllm.attention.triton_utils import tl, triton


@triton.jit
def add_kernel(out, x, y, n, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] for i < n. Program p: the BLOCK numbers from p * BLOCK on."""
    # BEGIN SOLUTION
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, total, mask=inside)
    # END SOLUTION


@triton.jit
def gather_kernel(
    out,
    cache,
    block_table,
    seq_len,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """out[p] = the cache's row of position p, for p < seq_len. Program i: the TILE positions from i * TILE on."""
    # BEGIN SOLUTION
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    inside = positions < seq_len
    blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0)
    rows = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    numbers = tl.load(cache + rows[:, None] * WIDTH + columns[None, :], mask=inside[:, None])
    tl.store(out + positions[:, None] * WIDTH + columns[None, :], numbers, mask=inside[:, None])
    # END SOLUTION


check("8.1")

# %% [markdown] id="example"
# ## A small example, by hand
#
# A clerk cannot see all scores before it computes a softmax, and need not. Take weights `2 ** (score - best)`, scores in two tiles, `[1, 3]` and `[4, 2]`,
# and values `[8, 1]` and `[2, 4]`.
#
# | | best | shrink | weights | total | weighted sum |
# |---|---|---|---|---|---|
# | before | -inf | | | 0 | 0 |
# | after `[1, 3]` | 3 | 0 | 1/4, 1 | 1.25 | 8/4 + 1 = 3 |
# | after `[4, 2]` | 4 | 2^(3 - 4) = 1/2 | 1, 1/4 | 1.25/2 + 1.25 = 1.875 | 3/2 + 2 + 4/4 = 4.5 |
#
# The result is 4.5 / 1.875 = 2.4. All at once: weights 1/8, 1/2, 1, 1/4 sum to 1.875, times the values to 4.5. When a better score turns up, all that came
# before is too large by one factor, so one multiplication repairs it.
#
# **Nothing seen yet.** Best starts at -inf. If a whole tile is hidden (scores -inf), it stays there, and -inf - -inf is NaN. Subtract 0 in its
# place: `2 ** (-inf - 0)` is 0, the weight that a hidden token should have.

# %% [markdown] id="exercise-8-2-text"
# ## Exercise 8.2 · Softmax in one pass
#
# {{exercise 8.2}}
#
# In PyTorch, with `torch.exp`. **`online_softmax(scores, values)`** returns `softmax(all scores) @ all values`, float32 `[D]`.
#
# - `scores` and `values` are iterators over tiles, equally many and at least one: tensors `[K]` and `[K, D]`, with `K` differing from tile to tile. Each tile comes
#   once; `for s, v in zip(scores, values)` is the loop.
# - Do not keep the tiles. Carry a largest score, a sum of weights and a weighted sum.
# - Scores may be large (`exp(1000)` is infinite), or -inf, also all of a tile. If *all* are -inf, return zeros.

# %% id="exercise-8-2" tags=["nbval-check-output"]
from checks import check
import torch


def online_softmax(scores, values):
    """softmax over all scores, times all values: [D]. scores yields tiles [K], values tiles [K, D], each once."""
    # BEGIN SOLUTION
    best, total, summed = torch.tensor(float("-inf")), torch.tensor(0.0), 0.0
    for score_K, value_KD in zip(scores, values):
        new_best = torch.maximum(best, score_K.max())
        reference = torch.where(new_best == float("-inf"), 0.0, new_best)
        weight_K = torch.exp(score_K - reference)
        shrink = torch.exp(best - reference)
        total = total * shrink + weight_K.sum()
        summed = summed * shrink + weight_K @ value_KD
        best = new_best
    return summed / torch.where(total == 0, 1.0, total)
    # END SOLUTION


check("8.2")

# %% [markdown] id="exercise-8-3-text"
# ## Exercise 8.3 · The paged decode kernel
#
# {{exercise 8.3}}
#
# Now both together. `decode_kernel` is given: program (sequence, KV head) loads its queries, calls `attend`, divides, and stores. Two things
# in it deserve a word:
#
# - Query heads that share a KV head (a GQA **group**) read the same keys. One program does them all, as rows `R` of its rectangles.
# - `tl.dot` runs on tensor cores, which multiply **16 rows** at least. A group of 3 becomes 16: 13 rows of zeros, which the mask keeps from being loaded and stored.
#
# **You write `attend`**: R query rows walk over the positions `first` to `stop - 1` of one sequence. It begins with `sum_RD` zeros `[R, D]`, `best_R` -inf `[R]`, `total_R` zeros
# `[R]`, all `tl.float32`; `R: tl.constexpr = q_RD.shape[0]`, `D` likewise. Then for each `start in range(first, stop, TILE)`:
#
# 1. **Positions** `start`, `start + 1`, ..., TILE of them. `inside`: those below `stop`.
# 2. **Addresses.** Load the block numbers from `block_table`, masked with `inside`, and convert them with `.to(tl.int64)` (a cache has more numbers than
#    32 bits count). A token's row is `block * BLOCK_SIZE + position % BLOCK_SIZE`. It begins `row * TOKEN_STRIDE` numbers behind `keys`, and behind `values`;
#    dimension `d` is `d` further.
# 3. **Loads** `k_KD` and `v_KD`, `[TILE, D]`, masked with inside *and* `dims < HEAD_DIM`, `other=0.0`. (`D` is HEAD_DIM rounded up to a power of two.) Other
#    slots may hold NaN, and `0 * NaN` is NaN.
# 4. **Scores** `tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee") * scale_log2`. The scale has log2(e) in it, so that `tl.exp2` gives what exp would.
#
# 5. **What a row sees.** `distance = row_positions[:, None] - positions[None, :]` is at least 0 and less than `window`, and the position inside.
#    Other scores become -inf (`tl.where`). Combine conditions with `&`, each in brackets.
# 6. **The step of 8.2**, for R rows at once, along axis 1. `tl.dot` takes equal dtypes: `tl.dot(weights_RK.to(v_KD.dtype), v_KD,
#    input_precision="ieee")`.
#
# Return `sum_RD, best_R, total_R`, not divided. If `first >= stop`, that is what they began with.

# %% id="exercise-8-3" tags=["nbval-check-output"]
from checks import check
from minivllm.attention.triton_utils import tl, triton


@triton.jit
def attend(
    q_RD,
    row_positions,
    keys,
    values,
    block_table,
    first,
    stop,
    window,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows q [R, D] at `row_positions` [R] over positions first .. stop - 1. `keys` and `values` point at the kv head's first
    row of the cache. Returns the weighted sum of values, not yet divided [R, D]; the largest score [R]; the sum of weights [R].
    """
    # solution: minivllm.attention.triton_kernels.attend


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode_kernel(
    out,
    q,
    kv_cache,
    block_tables,
    seq_lens,
    q_stride,
    values_start,
    table_stride,
    window,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One new token per sequence. Program (sequence, kv head): GROUP query heads over the sequence's whole history."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    group, dims = tl.arange(0, ROWS), tl.arange(0, D)  # ROWS: GROUP rounded up, at least 16
    offsets = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_RD = tl.load(q + seq * q_stride + offsets, mask=mask, other=0.0)
    seq_len = tl.load(seq_lens + seq)

    keys = kv_cache + kv_head * HEAD_DIM  # of slot 0; the values begin values_start further
    sum_RD, _, total_R = attend(
        q_RD,
        seq_len - 1 + group * 0,
        keys,
        keys + values_start,
        block_tables + seq * table_stride,
        tl.maximum(seq_len - window, 0),
        seq_len,
        window,
        scale_log2,
        BLOCK_SIZE,
        TOKEN_STRIDE,
        HEAD_DIM,
        TILE,
    )
    # a padding row (seq_len 0) comes out as zeros
    out_RD = sum_RD / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
    out_stride = tl.num_programs(1) * GROUP * HEAD_DIM
    tl.store(out + seq * out_stride + offsets, out_RD.to(out.dtype.element_ty), mask=mask)


check("8.3")

# %% [markdown] id="map-text"
# ## A map of what you touch
#
# Three sequences, two KV heads, blocks of 4, tiles of 8. The interpreter runs your kernel program by program and writes down every address.
# Each square is the key of one token in one head; its colour says which sequence's program read it, its number in which tile.

# %% id="map"
from matplotlib.patches import Rectangle

COLOURS = {"A": "#0072B2", "B": "#E69F00", "C": "#009E73"}
tables = {"A": [5, 2, 7], "B": [9], "C": [12, 3, 10, 1]}
lengths = {"A": 9, "B": 3, "C": 14}


def draw_map(axes, reads, num_blocks=13, block_size=4, kv_heads=2):
    """The cache, a block a box; coloured where a program read a key."""
    for slot in range(num_blocks * block_size):
        block, row = divmod(slot, block_size)
        left = block * (block_size + 0.6) + row
        for head in range(kv_heads):
            axes.add_patch(
                Rectangle((left, head), 1, 1, facecolor="white", edgecolor="#bbbbbb", linewidth=0.6)
            )
        if row == 0:
            axes.text(left, -0.15, block, fontsize=8)
    for sequence, head, part, slot, tile in reads:
        if part == 0:
            block, row = divmod(slot, block_size)
            left = block * (block_size + 0.6) + row
            face = list(COLOURS.values())[sequence]
            axes.add_patch(Rectangle((left, head), 1, 1, facecolor=face, edgecolor="#333333"))
            axes.text(
                left + 0.5,
                head + 0.5,
                tile,
                ha="center",
                va="center",
                fontsize=7,
                color="w" if sequence != 1 else "k",
            )
    axes.set(xlim=(-0.2, num_blocks * (block_size + 0.6)), ylim=(kv_heads + 0.1, -0.9), xticks=[])
    axes.set_yticks([h + 0.5 for h in range(kv_heads)], [f"KV head {h}" for h in range(kv_heads)])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(False)


if HAS_TRITON:
    seen = interpreted(
        "touched",
        block_tables=list(tables.values()),
        seq_lens=list(lengths.values()),
        block_size=4,
        kv_heads=2,
        group=3,
        head_dim=16,
        tile=8,
    )
    figure, axes = new_figure(width=9.5, height=1.6)
    draw_map(axes, seen["reads"])
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="s", linestyle="", color=c, label=n) for n, c in COLOURS.items()
    ]
    axes.legend(
        handles=handles, ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.45), frameon=False
    )
    by_owner = {
        name: sorted({slot // 4 for s, _, _, slot, _ in seen["reads"] if s == i})
        for i, name in enumerate(tables)
    }
    show(
        figure,
        alt="A map of the cache's 13 blocks of 4 slots, for two KV heads. "
        + " ".join(f"Programs of {name} read blocks {blocks}." for name, blocks in by_owner.items())
        + " Within a sequence the first 8 positions are tile 0, the next tile 1. All other slots are white: nobody read them.",
    )
    print(
        f"{seen['programs']} programs. The sequences' keys and values are {seen['cache_bytes']} bytes,"
    )
    print(
        f"{seen['read_bytes']} bytes of the cache were read, and no number more than {seen['most_reads']} time."
    )
else:
    print(f"Skipped: this cell {why_no_triton()}")

# %% [markdown] id="map-reading"
# White squares, the rest of a last block included, were not even looked at. Each key is read once
# for all heads of its group. Exact attention cannot read less.

# %% [markdown] id="exercise-8-4-text"
# ## Exercise 8.4 · Many clerks for one history
#
# {{exercise 8.4}}
#
# One user with 16,384 tokens and 8 KV heads: 8 programs, on a GPU with 132 processors. So **split-KV** (flash-decoding) cuts the history into
# parts. `split_kernel` (given in `minivllm/attention/triton_kernels.py`) is `decode_kernel` with one more axis in its grid and the `first` and `stop` of its part; it stores what
# your `attend` returns. Each part's numbers are relative to *its own* best. You join them.
#
# **`combine_kernel(out, sums, bests, totals, num_parts, HEAD_DIM, D, P)`**: program `r` does row `r` (a sequence and head).
#
# - `bests` and `totals` are `[rows, num_parts]`, `sums` is `[rows, num_parts, HEAD_DIM]`, contiguous float32. `out` is `[rows, HEAD_DIM]`.
# - A part's weights were `2 ** (score - its best)`; `totals` are their sums, `sums` their sums with the values. Multiply both with `2 ** (its best - best
#   of all)`, add over parts, divide.
# - `num_parts` is known only at the launch; `P` is a power of two at least as large, and `D` at least `HEAD_DIM`. Mask what is beyond: it is another
#   row's, or NaN.
# - A part may have seen nothing: best -inf, total 0, sums 0. If all have, store zeros.
# - Convert the result to `out`'s dtype: `.to(out.dtype.element_ty)`.

# %% id="exercise-8-4" tags=["nbval-check-output"]
from checks import check
from minivllm.attention.triton_utils import tl, triton


@triton.jit(do_not_specialize=["num_parts"])
def combine_kernel(
    out, sums, bests, totals, num_parts, HEAD_DIM: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):
    """A program per row (sequence and head). Joins the parts of its history."""
    # solution: minivllm.attention.triton_kernels.combine_kernel


check("8.4")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# `components()` takes your kernels where they run: on a GPU from now on. Elsewhere your answer to 4.5 stays, and only the interpreter runs the kernel: right numbers, thousands of times slower. One sentence we can afford: 30 layers and 3 KV heads, so 90
# programs for each token.

# %% id="plug-in-run"
prompts = ["The capital of France is"] if lab.device == "cpu" else ["The capital of France is"] * 8
num_new = 4 if lab.fast else 8
if HAS_TRITON:
    from minivllm import LLM, SamplingParams

    if lab.device == "cuda":
        from checks.student.kernels import answer

        reply = answer(lab.model, prompts, num_new)
    else:
        reply = interpreted("answer", model=lab.model, prompts=prompts, max_tokens=num_new)
    speed = len(prompts) * num_new / reply["seconds"]
    print(f"decode attention: {reply['part']}")
    print(f"{prompts[0]} ...{reply['texts'][0]!r}")

    params = SamplingParams(temperature=0, max_tokens=num_new)
    with LLM(lab.model, dtype="float32", max_model_len=128, num_gpu_blocks_override=33) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    same = sum(
        a == list(b.outputs[0].token_ids) for a, b in zip(reply["token_ids"], expected, strict=True)
    )
    print(
        f"{same} of {len(prompts)} the same as minivllm's own, token for token; {speed:.1f} tokens/s"
    )
    how = "on the GPU" if lab.device == "cuda" else "in Triton's interpreter"
    save_result(
        "08",
        tokens_per_second=speed,
        what=f"your kernel {how}",
        data={"device": lab.device, "dtype": "float32", "model": lab.model},
        requests=len(prompts),
    )
else:
    print(f"Skipped: this cell {why_no_triton()}")

# %% [markdown] id="plug-in-diff"
# Between your file and minivllm's there should be little:

# %% id="plug-in-show-diff"
show_diff("attention/triton_kernels.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · Count the bytes
#
# The same step three ways, and every byte counted: what each PyTorch operation reads and writes, and what your kernel loads and stores.
# Mixed lengths, one layer of SmolLM2 (9 heads, 3 KV heads of 64), float16.

# %% id="bytes"
from functools import partial

import torch.nn.functional as F

from minivllm.attention import reference
from minivllm.sim.hardware import best_time, count_work, measure_device

GROUP, KV_HEADS, HEAD_DIM, SIZE = 3, 3, 64, 16
seq_lens = [16, 40, 60, 90] if lab.fast else [30, 60, 100, 150, 220, 300, 400, 512]


def a_batch(seq_lens, device, dtype):
    """q, cache, tables, lens for one layer; blocks in no order."""
    blocks = [-(-n // SIZE) for n in seq_lens]
    free = (1 + torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0))).tolist()
    tables = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    for row, count in zip(tables, blocks):
        row[:count] = torch.tensor([free.pop() for _ in range(count)])
    cache = torch.randn(2, 1 + sum(blocks), SIZE, KV_HEADS, HEAD_DIM).to(dtype)
    q = torch.randn(len(seq_lens), GROUP * KV_HEADS, HEAD_DIM).to(dtype)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return tuple(t.to(device) for t in (q, cache, tables, lens))


def gather_and_sdpa(q, kv_cache, block_tables, seq_lens):
    """Copy the histories out of the cache, then PyTorch's fused attention."""
    k, v = kv_cache[:, block_tables.long()].flatten(2, 3).transpose(2, 3)  # [B, Hkv, S, D]
    visible = torch.arange(k.shape[2], device=q.device) < seq_lens[:, None, None, None]
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=visible, enable_gqa=True)
    return out[:, :, 0]


batch = a_batch(seq_lens, "cpu", torch.float16)
moved = {
    "Lab 04's paged_decode": count_work(lambda: reference.paged_decode(*batch)).bytes,
    "gather + SDPA": count_work(lambda: gather_and_sdpa(*batch)).bytes,
}
least = 2 * sum(seq_lens) * KV_HEADS * HEAD_DIM * 2  # keys and values, 2 bytes a number
if HAS_TRITON:
    seen = interpreted(
        "touched",
        block_tables=[[b for b in row if b] for row in batch[2].tolist()],
        seq_lens=seq_lens,
        block_size=SIZE,
        kv_heads=KV_HEADS,
        group=GROUP,
        head_dim=HEAD_DIM,
        tile=32,
        map_of=False,
    )
    moved["your kernel"] = seen["bytes"]
for name, count in moved.items():
    print(
        f"{name:22} {count / 1e6:6.2f} MB, {count / least:4.1f} times the keys and values themselves"
    )

# %% id="bytes-plot"
recall("8.p1")
figure, axes = new_figure(width=7.0, height=1.9)
names = list(moved)[::-1]
axes.barh(
    names, [moved[n] / 1e6 for n in names], color=["#009E73", "#56B4E9", "#E69F00"][-len(names) :]
)
axes.axvline(least / 1e6, color="black", linestyle="--", linewidth=1)
axes.annotate(
    "keys and values, once",
    (least / 1e6, len(names) - 0.45),
    xytext=(4, 0),
    textcoords="offset points",
    fontsize=8,
)
axes.grid(False)
axes.set_ylim(-0.6, len(names) - 0.1)
axes.set_xlabel("MB moved by one layer's decode attention")
show(
    figure,
    alt="Bars of megabytes moved. "
    + ", ".join(f"{n}: {moved[n] / 1e6:.2f}" for n in moved)
    + f". A dashed line at {least / 1e6:.2f} is the keys and values read once.",
)

# %% [markdown] id="bytes-reading"
# On a GPU these bytes *are* time. Where do the others lose them? Shorter sequences are padded to the longest table; what is gathered is
# written and read again; and Lab 04's converts all of it to float32. **Where the kernel does not help:** a prompt of a thousand tokens does
# a thousand times the arithmetic with the same keys, and there the copy hardly shows.
#
# With a GPU, the cell below times it against Lab 00's ceiling.

# %% id="gpu-speed"
if lab.device == "cuda" and HAS_TRITON:
    ceiling = measure_device("cuda", str(lab.dtype).removeprefix("torch.")).bandwidth
    kernels = my_kernels()
    rates = {"Lab 04's paged_decode": [], "gather + SDPA": [], "your kernel": []}
    sizes = [1, 8, 64] if lab.fast else [1, 4, 16, 64, 256]
    for size in sizes:
        batch = a_batch([1024] * size, "cuda", lab.dtype)
        useful = 2 * size * 1024 * KV_HEADS * HEAD_DIM * lab.dtype.itemsize
        for name, run in zip(
            rates, (reference.paged_decode, gather_and_sdpa, kernels.paged_decode)
        ):
            rates[name].append(useful / best_time(partial(run, *batch), seconds=0.2) / 1e9)
    figure, axes = new_figure(height=3.0)
    for (name, values), marker in zip(rates.items(), "sDo"):
        axes.loglog(sizes, values, marker=marker, label=name)
    axes.axhline(ceiling / 1e9, color="black", linestyle="--", label="the ceiling: a large copy")
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    axes.set(xlabel="sequences of 1,024 tokens", ylabel="GB/s of keys and values")
    axes.legend(frameon=False)
    told = "; ".join(f"{n}: {', '.join(f'{v:.0f}' for v in values)}" for n, values in rates.items())
    show(figure, alt=f"GB/s at {sizes} sequences. {told}. The ceiling is {ceiling / 1e9:.0f}.")
else:
    print("No GPU here, so no time is measured: the interpreter's would say nothing.")

# %% [markdown] id="registers-text"
# ## Experiment 2 · What the compiler says
#
# Triton compiles for any GPU on any Linux machine. Your kernel for an A100 (sm_80) and an H100 (sm_90), heads of 128 in bfloat16, with larger
# and larger tiles: the registers of a thread (255 at most), and the bytes that spill.


# %% id="registers"
def compile_with(tile, capability, num_warps):
    """Your decode kernel's registers, spills and assembly with tiles of so many keys. Nothing is run."""
    from minivllm.attention.triton_compile import compile_kernels

    kernels = my_kernels()
    kernels.choose_tiles = lambda *_: kernels.Tiles(kernels.MIN_ROWS, tile, num_warps, 2)
    q = torch.zeros(4, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 8, 16, 8, 128, dtype=torch.bfloat16)
    tables, lens = torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    (kernel,) = compile_kernels(
        lambda: kernels.paged_decode(q, cache, tables, lens, num_parts=1), capability
    )
    return kernel


tiles = [16, 64, 256] if lab.fast else [16, 32, 64, 128, 256]
if HAS_TRITON:
    report = {
        f"sm_{capability}, {32 * num_warps} threads": [
            compile_with(tile, capability, num_warps) for tile in tiles
        ]
        for capability, num_warps in ((80, 4), (90, 4), (90, 2))
    }
    for name, compiled in report.items():
        for tile, kernel in zip(tiles, compiled):
            print(
                f"{name}, {tile:3} keys a tile: {kernel.registers:3} registers, {kernel.spilled_bytes:4} bytes spilled,"
                f" {kernel.ptx.count('mma.sync'):3} tensor-core instructions"
            )
    figure, both = new_figure(width=8.0, height=2.6, columns=2)
    for axes, what in zip(both, ("registers", "spilled_bytes")):
        for (name, compiled), style in zip(report.items(), ("o-", "s--", "D:")):
            axes.plot(range(len(tiles)), [getattr(k, what) for k in compiled], style, label=name)
        axes.set_xticks(range(len(tiles)), tiles)
        axes.set_ylim(0)
        axes.set_xlabel("keys a tile")
        axes.set_title(what.replace("_bytes", " bytes") + " of a thread", loc="left", fontsize=10)
    both[1].legend(frameon=False, fontsize=8)
    told = [
        f"{name}: {', '.join(f'{k.registers} and {k.spilled_bytes} at {t}' for t, k in zip(tiles, compiled))}"
        for name, compiled in report.items()
    ]
    show(
        figure,
        alt="Registers and spilled bytes of a thread against the keys in a tile. "
        + ". ".join(told)
        + ".",
    )
else:
    print(f"Skipped: this cell {why_no_triton()}")

# %% [markdown] id="registers-reading"
# Keys, values and scores of a tile live in the registers of a program's threads. Once the notepad is full, numbers are written out and read
# back in every round. `minivllm` takes 64 keys and 128 threads: no spill, and registers for several programs on one processor, so
# that one computes while others wait. `mma.sync` is your `tl.dot`.

# %% [markdown] id="split-text"
# ## Experiment 3 · Cutting the history
#
# 132 processors, 8 KV heads, histories of 16,384 tokens, tiles of 64. How many tiles does the busiest processor walk, one after another, if
# each takes one program at a time? (Real ones take a few.)

# %% id="split"
recall("8.p2")
PARTS = [1, 2, 4, 8, 16, 32]
walks = {}
for sequences in (1, 16, 64):
    walks[sequences] = []
    for parts in PARTS:
        programs = sequences * 8 * parts
        tiles_each = -(-16384 // 64 // parts)
        walks[sequences].append(-(-programs // 132) * tiles_each)
figure, axes = new_figure(height=2.8)
for (sequences, values), marker in zip(walks.items(), "osD"):
    label = f"{sequences} sequence{'s' * (sequences > 1)}"
    axes.plot(PARTS, values, marker=marker, label=label)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(PARTS, PARTS)
axes.yaxis.set_major_formatter("{x:g}")
axes.set(xlabel="parts of each history", ylabel="tiles, one after another")
axes.legend(frameon=False)
show(
    figure,
    alt="Tiles that the busiest of 132 processors walks, against the parts of each history, by the number of sequences. "
    + " ".join(f"With {n}: {', '.join(map(str, v))}." for n, v in walks.items())
    + f" The parts are {PARTS}.",
)

# %% [markdown] id="split-reading"
# One long conversation gets a sixteenth of the walk. Sixty-four fill the GPU as they are: cutting only costs a second launch.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **No mask on a load.** It works in the test, and in production reads somebody else's memory, or stops with "illegal memory access".
# - **Masking the score and loading the value.** `0 * NaN` is NaN.
# - **-inf minus -inf.** A row that has seen nothing needs another reference than its best.
# - **exp2 without log2(e), or exp with it.** A softmax at the wrong temperature: fluent text, slightly off.
# - **Shrinking the sum and forgetting the total.** Right whenever the best score comes first.
# - **int32 addresses.** 40 GB of cache are 20 billion numbers.
# - **Timing a launch.** It returns at once, and the first one compiles.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | "skipped on this machine" | macOS and Windows have no Triton. Use WSL or a cloud machine, or read on |
# | `0 active drivers`, "cannot be accessed from Triton" | A kernel was launched in this notebook without a GPU. `interpreted(...)` uses a process that interprets |
# | "Both operands must be same dtype" | `tl.dot(weights_RK.to(v_KD.dtype), v_KD)` |
# | "arange's range must be a power of 2" | Take `tl.arange(0, TILE)`, and mask |
# | A name "is not defined" in a kernel | A kernel sees its arguments, its own names, `tl`, and `@triton.jit` functions of its cell |
# | I want to print | `print(x)` in a kernel; on a GPU `tl.device_print("x", x)` |
# | `name 'lab' is not defined` | The notebook's kernel was restarted. Run the set-up cell |
# | I am stuck | `hint("8.3")`, then `solution("8.3")`. `skip("8.3")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 8.q1}}

# %% id="quiz-8-q1" tags=["nbval-check-output"]
quiz("8.q1", "b")

# %% [markdown] id="quiz-8-q2-text"
# {{question 8.q2}}

# %% id="quiz-8-q2" tags=["nbval-check-output"]
quiz("8.q2", "a")

# %% [markdown] id="quiz-8-q3-text"
# {{question 8.q3}}

# %% id="quiz-8-q3" tags=["nbval-check-output"]
quiz("8.q3", "c")

# %% [markdown] id="quiz-8-q4-text"
# {{question 8.q4}}

# %% id="quiz-8-q4" tags=["nbval-check-output"]
quiz("8.q4", lambda tokens, kv_heads, head_dim: 2 * tokens * kv_heads * head_dim * 2 / 1e6)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A kernel is a grid of programs that know only their number. Pointers know no shape: masks keep a program on its own land.
# - A softmax needs one pass and three numbers a row. A better score shrinks all that came before by one factor; the same factor joins parts.
# - Decode attention is reading. The best kernel reads each key and value once, for all heads of a group.
# - Too few programs leave a GPU idle; too large tiles spill.

# %% [markdown] id="further"
# ## Further learning
#
# - Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018), arXiv:1805.02867: exercise 8.2.
# - Dao et al., *FlashAttention* (2022), arXiv:2205.14135: the same loop for prompts. *Flash-Decoding* (2023): exercise 8.4.
# - `minivllm/attention/triton_kernels.py`: `prefill_kernel` calls your `attend` with other rows.
# - `python -m minivllm.bench.gpu_report` on a GPU.

# %% [markdown] id="next"
# ## Next: Lab 09, CUDA graphs and torch.compile
#
# Your kernel takes microseconds. Starting it from Python, with a step's three hundred other operations, takes longer. Next you record a
# whole step once, and replay it.

# %% id="journey"
journey()
