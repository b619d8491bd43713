# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "03"
#     title: The KV cache
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 60 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Lab 02 (naive generation), for what is wasted there; a little PyTorch
#     required: required; Lab 04 takes this cache apart
# ---

# %% [markdown] id="title"
# # Lab 03 · The KV cache
#
# In Lab 02 every new token cost more than the one before, because everything was computed again. Today you keep what was
# computed. It takes two short methods and a small change to the loop, and the time per token stops growing.
#
# Memory is the price. The second half of this lab is about that price, because it decides how many people an engine can serve
# at once.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("3.1")` gives a hint.

# %% id="setup"
import random
import statistics
import time

import torch

from checks import (
    hint,
    journey,
    live,
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
from minivllm.attention.contiguous import forward_batch_with_cache, forward_with_cache
from minivllm.models.registry import KNOWN_CONFIGS

lab = start("03")
decoder = lab.load_decoder()
tokenizer = lab.load_tokenizer()


def naive_model(token_ids):
    """Logits [T, vocab_size] of a whole sequence, computed from nothing, as in Lab 02."""
    return decoder.full_forward(token_ids.to(lab.device))


# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Say why keys and values can be kept, and why queries need not be.
# - Build a KV cache, and generate with it: prefill once, then decode token by token.
# - Put prompts of different lengths into one static batch: left padding, its mask, its positions.
# - Compute what a token costs in memory, and how many requests fit, and see what "128k, just in case" does to that number.

# %% [markdown] id="big-idea"
# ## The big idea
#
# The writer of Lab 02 had no memory: for each new word she read her whole manuscript again. Now give her a notebook. When she
# reads a word for the first time she writes down two notes about it, and they never change. To find the next word she reads her
# notes, and the manuscript stays closed.
#
# The two notes are the word's **key** (what it can be found by) and its **value** (what it has to say), one pair in every
# layer. Attention for a new token needs its own query and the keys and values of all tokens before it:
#
# ```text
# to choose    naive generation       with a cache           and read
# token 4:     computes               computes               from it
# token 0      q k v   again          -                      k v
# token 1      q k v   again          -                      k v
# token 2      q k v   again          -                      k v
# token 3      q k v   new            q k v   new, kept      k v
# ```
#
# Why may the notes be kept? Because no token sees a later one. What token 1 looks like in layer 17 depends on tokens 0 and 1
# alone, so it was final when it was first computed.
#
# So generation falls into two parts. **Prefill**: the prompt goes through the model at once and fills the cache. **Decode**:
# each step puts one token through. We measure them separately: TTFT is the time to the first token, TPOT the time per token
# after it.
#
# **Where the picture breaks.** A person's notes are shorter than the book. These are not: a token of text takes about four
# bytes, and its notes in our small model take 23,040 (in 2-byte numbers). And a person would look up the one note she needs.
# The model reads every note, for every word.

# %% [markdown] id="predict"
# ## Predict first
#
# Two commitments. You will meet each again beside its plot. Write one of the words in place of the question mark.
#
# {{question 3.p1}}

# %% id="predict-3-p1"
predict("3.p1", "same")

# %% [markdown] id="predict-3-p2-text"
# {{question 3.p2}}

# %% id="predict-3-p2"
predict("3.p2", "few")

# %% [markdown] id="example"
# ## A small example, by hand
#
# First see for yourself that nothing changes. We give the model five tokens, then the same five and one more, and compare what
# it says after each of the first five.

# %% id="example-unchanged" tags=["nbval-check-output"]
tokens = torch.tensor(tokenizer.encode("The cat sat on the mat"))
short, longer = naive_model(tokens[:5]), naive_model(tokens[:6])
for t in range(5):
    difference = (short[t] - longer[t]).abs().max() / short[t].abs().max()
    print(
        f"after token {t}: {'unchanged (up to rounding)' if difference < 5e-2 else 'changed'} by the sixth token"
    )

# %% [markdown] id="example-by-hand"
# Now a cache with room for 8 tokens, for one layer, filled by a prompt of 3 tokens and two decode steps:
#
# ```text
#                      append          cache afterwards                        length
# prefill  (3 tokens)  k0 k1 k2        | k0 | k1 | k2 |  . |  . |  . |  . |  . |     3
# decode   (1 token)   k3              | k0 | k1 | k2 | k3 |  . |  . |  . |  . |     4
# decode   (1 token)   k4              | k0 | k1 | k2 | k3 | k4 |  . |  . |  . |     5
# ```
#
# Count what went through the model: 3 + 1 + 1 = 5 tokens, each once. Naive generation would have put 3 + 4 + 5 = 12 through.
# Count the memory too: 8 places are taken from the first moment on, and 3 are never used. Keep that in mind.

# %% [markdown] id="exercise-3-1-text"
# ## Exercise 3.1 · A place to keep them
#
# {{exercise 3.1}}
#
# All memory is reserved in `__init__`, which is given: `self.kv[layer, 0]` holds a layer's keys, `self.kv[layer, 1]` its
# values, each `[max_len, num_kv_heads, head_dim]`. `self.lengths[layer]` says how many tokens a layer holds. Each layer has a
# length of its own, because a step goes through the layers one after another.
#
# - **`append(layer, k, v)`**: `k` and `v` are `[T, num_kv_heads, head_dim]`, the layer's next `T` tokens (T is the prompt's
#   length at prefill, and 1 after it). Write them behind those the layer has, and count them.
# - If not all of them fit, raise a `ValueError` whose message names how many tokens the layer holds and `max_len`, both as
#   numbers. Then nothing is kept and nothing counted. Filling the cache to its last place is fine.
# - **`view(layer)`** returns `(keys, values)`, each `[S, num_kv_heads, head_dim]`, of the `S` tokens the layer holds. Return
#   slices of the reserved memory, not copies: this is called in every layer of every step.

# %% id="exercise-3-1" tags=["nbval-check-output"]
from checks import check
import torch


class ContiguousKVCache:
    """Keys and values of one sequence, at most max_len tokens, in memory that is reserved at
    once."""

    def __init__(
        self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"
    ):
        self.max_len = max_len
        self.kv = torch.zeros(
            num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device
        )
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        """Keep k and v of the layer's next T tokens. ValueError, keeping nothing, if they do not
        all fit."""
        # solution: minivllm.attention.contiguous.ContiguousKVCache.append

    def view(self, layer):
        """(keys, values) of the S tokens the layer holds: slices, not copies."""
        # solution: minivllm.attention.contiguous.ContiguousKVCache.view


check("3.1")

# %% [markdown] id="exercise-3-2-text"
# ## Exercise 3.2 · Prefill, then decode
#
# {{exercise 3.2}}
#
# Write `generate_with_cache(model, token_ids, max_new_tokens, cache)`. Here `model(new_ids, positions, cache)` takes **only
# what is new**: 1-D `int64` tensors of token ids and of their positions, equally long. It appends their keys and values to the
# cache and returns logits, one row for each *new* token. `cache` is only handed on: count tokens yourself.
#
# - The first call gets the whole prompt `token_ids` (a list, at least one token), at positions 0, 1, 2, ...
# - Each new token is the argmax of the last row. The next call gets that one token, at its position: the number of tokens
#   before it.
# - Return a list of the new tokens only, exactly `max_new_tokens` integers (at least 1). Do not stop early.
# - One call for each new token, none besides: the last token need not go in. Leave the caller's list as it is.

# %% id="exercise-3-2" tags=["nbval-check-output"]
from checks import check
import torch


def generate_with_cache(model, token_ids, max_new_tokens, cache):
    """The greedy continuation of token_ids, max_new_tokens long; every token goes through the model
    once."""
    # BEGIN SOLUTION
    new, num_cached, output = list(token_ids), 0, []
    for _ in range(max_new_tokens):
        positions = torch.arange(num_cached, num_cached + len(new))
        logits = model(torch.tensor(new), positions, cache)
        num_cached += len(new)
        new = [int(logits[-1].argmax())]
        output += new
    return output
    # END SOLUTION


check("3.2")

# %% [markdown] id="exercise-3-3-text"
# ## Exercise 3.3 · A static batch
#
# {{exercise 3.3}}
#
# One decode step reads all weights of the model to make one token. Reading them once for eight requests makes eight. But a
# batch is a rectangle, and prompts are not: `[5, 6, 7]`, `[8]` and `[9, 4]` have 3, 1 and 2 tokens. So the short ones get
# padding, **in front**: then the last column holds everybody's newest token, and all can be continued there.
#
# ```text
# token_ids    5  6  7        mask   T  T  T        positions   0  1  2
#              0  0  8               .  .  T                    .  .  0
#              0  9  4               .  T  T                    .  0  1
# ```
#
# **`left_pad(prompts)`** takes a list of lists of token ids (each has at least one) and returns three tensors `[B, T]`, T the
# longest length:
#
# - `token_ids`, int64: the prompts, with token id 0 as padding in front.
# - `mask`, bool: True where a token of the prompt stands. Token id 0 may also be a real token.
# - `positions`, int64: each prompt's tokens count from 0, wherever they stand. What stands at padding does not matter.
#
# Leave the caller's lists as they are.

# %% id="exercise-3-3" tags=["nbval-check-output"]
from checks import check
import torch


def left_pad(prompts):
    """(token_ids, mask, positions), each [B, T], of prompts padded on the left to the longest."""
    # BEGIN SOLUTION
    width = max(len(prompt) for prompt in prompts)
    token_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    positions = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        first = width - len(prompt)
        token_ids[row, first:] = torch.tensor(prompt)
        mask[row, first:] = True
        positions[row, first:] = torch.arange(len(prompt))
    return token_ids, mask, positions
    # END SOLUTION


check("3.3")

# %% [markdown] id="exercise-3-4-text"
# ## Exercise 3.4 · What a token costs
#
# {{exercise 3.4}}
#
# - **`kv_bytes_per_token(config, dtype_bytes)`**: the bytes of KV cache that one token keeps. `config` has `num_layers`,
#   `num_heads` (query heads), `num_kv_heads` and `head_dim` (and `hidden_size`); a number takes `dtype_bytes` bytes.
# - **`max_concurrency(memory_bytes, max_model_len, bytes_per_token)`**: how many requests fit into `memory_bytes` when each
#   reserves `max_model_len` tokens up front. It may be 0.
#
# All numbers are whole, some are larger than a float can hold exactly, and so are the results: return `int`.

# %% id="exercise-3-4" tags=["nbval-check-output"]
from checks import check


def kv_bytes_per_token(config, dtype_bytes):
    """Bytes of KV cache one token keeps, in all layers."""
    # solution: minivllm.sim.cost_model.kv_bytes_per_token


def max_concurrency(memory_bytes, max_model_len, bytes_per_token):
    """How many requests fit when each reserves max_model_len tokens up front."""
    # solution: minivllm.sim.cost_model.max_concurrency


check("3.4")

# %% [markdown] id="cost-table-text"
# What do real models cost? Your function knows (2 bytes a number: bfloat16).

# %% id="cost-table" tags=["nbval-check-output"]
need("3.4")
for name in (
    "smollm2-135m",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
):
    config = KNOWN_CONFIGS[name]
    each = kv_bytes_per_token(config, 2)
    heads = f"{config.num_kv_heads} of {config.num_heads} heads"
    print(
        f"{name:35} {heads:14} {each / 1024:6.1f} KiB a token  {each * 4096 / 2**20:6.0f} MiB for 4,096"
    )

# %% [markdown] id="plug-in"
# ## Plug it in
#
# Your cache, under the real model. `forward_with_cache` is the decoder of Lab 01 whose attention calls your `append` and `view`
# in each of its layers.
#
# Is the text right? One call of the naive model over prompt and output says what greedy would have chosen after *every* token,
# so it checks them all at once. (Up to rounding: in 2-byte numbers two logits can tie. Engines verify guesses in the same way,
# see Lab 10.)


# %% id="plug-in-run"
def model(token_ids, positions, cache):
    """Logits [T, vocab_size] of the next T tokens of a sequence; what came before is read from the
    cache."""
    return forward_with_cache(decoder, token_ids.to(lab.device), positions.to(lab.device), cache)


def new_cache(max_len, batch_size=1):
    """A cache for one sequence; for a static batch the sequences' heads lie side by side."""
    config = decoder.config
    heads = batch_size * config.num_kv_heads
    return ContiguousKVCache(
        config.num_layers, max_len, heads, config.head_dim, dtype=lab.dtype, device=lab.device
    )


need("3.1", "3.2")  # after a restart, or if you skipped them: your saved answers, or minivllm's
prompt = tokenizer.encode("The best thing about keeping a notebook is")
num_new = 16 if lab.fast else 40
output = generate_with_cache(model, prompt, num_new, new_cache(len(prompt) + num_new))
print(tokenizer.decode(prompt + output))


def as_naive(prompt, output):
    """How many of the output's tokens the naive model would have chosen too, up to rounding."""
    logits = naive_model(torch.tensor(prompt + output))[len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])[:, 0]
    return int((logits.max(-1).values - chosen < 0.02 * logits.max()).sum())


print(
    f"\n{as_naive(prompt, output)} of {num_new} tokens are what the naive model would have chosen."
)

# %% [markdown] id="plug-in-batch-text"
# And a static batch. Your `left_pad` makes the rectangle; your cache takes all sequences at once, since in a batch they all
# have the same length. The loop around it is given: read it, it has a weakness that you will see in a moment.


# %% id="plug-in-batch"
def generate_static_batch(prompts, num_new):
    """Greedy continuations of all prompts, each num_new tokens long."""
    token_ids, mask, positions = (x.to(lab.device) for x in left_pad(prompts))
    cache = new_cache(token_ids.shape[1] + num_new, batch_size=len(prompts))
    newest, columns = token_ids, []
    for _ in range(num_new):
        logits = forward_batch_with_cache(decoder, newest, positions, mask, cache)
        newest = logits.argmax(-1, keepdim=True)  # [B, 1]
        columns.append(newest)
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(newest, dtype=torch.bool)], dim=1)
    return torch.cat(columns, dim=1).tolist()


need("3.1", "3.3")
texts = [
    "The capital of France is",
    "Water boils at",
    "My favourite season is autumn, because the leaves",
    "Once",
]
prompts = [tokenizer.encode(text) for text in texts]
for prompt, output in zip(prompts, generate_static_batch(prompts, 8)):
    print(f"{tokenizer.decode(prompt + output)!r}   {as_naive(prompt, output)} of 8 as naive")

# %% [markdown] id="plug-in-diff"
# What differs between minivllm's file and yours.

# %% id="plug-in-show-diff"
show_diff("attention/contiguous.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · Time per token
#
# The same text, token by token. Your loop runs with its cache and every step is timed. Every so often we also time what Lab 02
# would have done for that very token: one call over everything so far. Watch the two part.


# %% id="experiment-measure"
def timed(function, *arguments):
    """Milliseconds of one call, and what it returned."""
    if lab.device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = function(*arguments)
    if lab.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1000, result


def draw_times(cached, naive, picture):
    """Both lines so far: milliseconds for a token against the number of tokens before it. Returns
    the last two values."""
    lengths, times = list(cached), list(cached.values())
    smooth = [statistics.median(times[max(0, i - 8) : i + 1]) for i in range(len(times))]
    longest = max(naive)
    figure, axes = new_figure()
    axes.plot(list(naive), list(naive.values()), marker="o", label="naive: everything again")
    axes.plot(lengths, smooth, label="with your cache (median of 9 steps)")
    axes.plot(lengths, times, ".", markersize=2, color="#E69F00", alpha=0.5)
    axes.set(xlabel="tokens in the text", ylabel="ms for this token")
    axes.set(xlim=(0, 1.02 * last), ylim=(0, 1.15 * max(naive.values())))
    ratio = naive[longest] / smooth[-1]
    axes.set_title(
        f"At {longest} tokens: {ratio:.1f} times as fast" if ratio > 1.2 else "No gain yet",
        loc="left",
    )
    axes.legend(frameon=False, loc="upper left")
    picture.update(
        figure,
        alt="Time for one token against the text's length."
        f" Naive: {naive[min(naive)]:.0f} ms at {min(naive)} tokens, {naive[longest]:.0f} ms at {longest}."
        f" With the cache: {smooth[0]:.0f} ms at first, {smooth[-1]:.0f} ms at the end.",
    )
    return naive[longest], smooth[-1]


# %% id="experiment-live"
need("3.1", "3.2")
picture, cached, naive, written = live(), {}, {}, []
last, pause = (128, 32) if lab.fast else (512, 64)
text = tokenizer.encode("Here is a long story about a robot who kept a notebook. It began on a")
cache = new_cache(last)


def watched_model(token_ids, positions, cache):
    """The model, timed. Every `pause` tokens the naive model is timed on the same text."""
    length = int(positions[-1]) + 1
    milliseconds, logits = timed(model, token_ids, positions, cache)
    if len(token_ids) == 1:
        cached[length] = milliseconds
        written.append(int(token_ids[0]))
    if length % pause == 0:
        naive[length] = timed(naive_model, torch.tensor(text + written))[0]
        draw_times(cached, naive, picture)
    return logits


naive_model(torch.tensor(text))  # the first call does not count: it warms up
naive[len(text)] = timed(naive_model, torch.tensor(text))[0]
story = generate_with_cache(watched_model, text, last - len(text) + 1, cache)
ms_naive, ms_cached = draw_times(cached, naive, picture)
print(tokenizer.decode(text + story[:40]), "...")

# %% [markdown] id="experiment-reading"
# The naive line climbs because each token pays for all before it. The cached line is nearly flat: each step puts one token
# through the weights, and attention reads a few more notes. At the very left they may touch: for a handful of tokens, reading
# the weights is the whole cost of either.

# %% id="experiment-save"
save_result(
    "03",
    tokens_per_second=1000 / ms_cached,
    what=f"with a KV cache, at {last} tokens",
    data={
        "device": lab.device,
        "dtype": str(lab.dtype),
        "model": lab.model,
        "ms_naive": naive,
        "ms_cached": ms_cached,
    },
)
print(
    f"At {last} tokens: naive {1000 / ms_naive:.2f} tokens/s, with your cache {1000 / ms_cached:.1f} tokens/s."
)

# %% [markdown] id="experiment-ttft-text"
# ## Experiment 2 · Time to the first token
#
# Now the wait before anything appears, for growing prompts, with and without a cache.

# %% id="experiment-ttft"
need("3.1")
ttft = {"naive": {}, "with your cache": {}}
for length in (32, 64, 128) if lab.fast else (64, 128, 256, 512):
    prompt = torch.tensor((text * (length // len(text) + 1))[:length])
    runs = range(2 if lab.fast else 3)  # the best of them: a run can be disturbed
    ttft["naive"][length] = min(timed(naive_model, prompt)[0] for _ in runs)
    ttft["with your cache"][length] = min(
        timed(model, prompt, torch.arange(length), new_cache(length))[0] for _ in runs
    )

figure, axes = new_figure()
for i, (name, times) in enumerate(ttft.items()):
    axes.plot(
        list(times), list(times.values()), marker="os"[i], linestyle=("-", "--")[i], label=name
    )
axes.set(xlabel="tokens in the prompt", ylabel="ms to the first token", xlim=0, ylim=0)
ratio = ttft["with your cache"][length] / ttft["naive"][length]
recall(
    "3.p1",
    but=f"the two waits differ, {ratio:.2f} to 1. Is the machine busy?"
    if abs(ratio - 1) > 0.3
    else "",
)
axes.set_title(f"A prompt of {length} tokens: {ratio:.2f} times the naive wait", loc="left")
axes.legend(frameon=False)
show(
    figure,
    alt="Time to the first token against the prompt's length. "
    + "; ".join(
        f"{name}: " + ", ".join(f"{ms:.0f} ms at {n}" for n, ms in times.items())
        for name, times in ttft.items()
    )
    + ".",
)

# %% [markdown] id="experiment-batch-text"
# ## Experiment 3 · What a static batch wastes
#
# Eight requests in one batch, and each stops after a different number of tokens. The rectangle does not know: it runs until the
# longest is done. Below is every token position your batch computed.

# %% id="experiment-batch"
need("3.1", "3.2", "3.3")
rng = random.Random(3)
prompt_lengths = [rng.randint(4, 24) for _ in range(8)]
output_lengths = [rng.randint(4, 12) for _ in range(6)] + [30, 40]
width, steps = max(prompt_lengths), max(output_lengths)

grid = torch.zeros(8, width + steps)
for row, (asked, wanted) in enumerate(zip(prompt_lengths, output_lengths)):
    grid[row, width - asked : width] = 1
    grid[row, width : width + wanted] = 2
useful = int((grid > 0).sum())

from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

figure, axes = new_figure(height=2.8)
colours = ["#e4e4e4", "#56B4E9", "#0072B2"]
axes.imshow(grid, aspect="auto", cmap=ListedColormap(colours), interpolation="nearest")
axes.set(xlabel="column of the batch", ylabel="request", yticks=range(8))
axes.grid(False)
axes.set_title(f"{1 - useful / grid.numel():.0%} of the positions are nobody's", loc="left")
figure.legend(
    handles=[
        Patch(color=c, label=n) for c, n in zip(colours, ("padding or idle", "prompt", "output"))
    ],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
show(
    figure,
    alt=f"A batch of 8 requests as a rectangle of {grid.shape[1]} columns. {useful} of its {grid.numel()} positions hold prompt or"
    " output. The others are padding in front of short prompts, and idle places behind short outputs.",
)

prompts = [[rng.randrange(100, 1000) for _ in range(n)] for n in prompt_lengths]
num_new = 4 if lab.fast else 12
together = timed(generate_static_batch, prompts, num_new)[0]
alone = sum(
    timed(generate_with_cache, model, p, num_new, new_cache(len(p) + num_new))[0] for p in prompts
)
print(f"{8 * num_new} tokens, one request after another: {alone / 1000:.1f} s")
print(
    f"{8 * num_new} tokens, in one batch: {together / 1000:.1f} s, {alone / together:.1f} times as fast"
)

# %% [markdown] id="experiment-batch-reading"
# Both are true: batching is faster, for weights are read once for all, and much of the rectangle is wasted. Lab 05 gets rid of
# the rectangle. First, memory.

# %% [markdown] id="experiment-memory-text"
# ## Experiment 4 · How many fit?
#
# 64 GiB are left for the cache. Each request reserves `max_model_len` tokens when it arrives, as your class does.
# `max_model_len` is a setting; how long texts really are is not up to us.

# %% id="experiment-memory"
need("3.4")
recall("3.p2")
memory = 64 * 2**30
lengths = [2**n for n in range(10, 18)]
names = {
    "meta-llama/Llama-3.1-8B-Instruct": "an 8B model",
    "meta-llama/Llama-3.1-70B-Instruct": "a 70B model",
}
fits = {
    label: [
        max_concurrency(memory, length, kv_bytes_per_token(KNOWN_CONFIGS[name], 2))
        for length in lengths
    ]
    for name, label in names.items()
}

figure, axes = new_figure()
for label, values in fits.items():
    axes.plot(lengths, values, marker="o", label=label)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
axes.set_yticks([1, 10, 100], ["1", "10", "100"])
axes.minorticks_off()
axes.set(xlabel="max_model_len, reserved up front", ylabel="requests at once")
first, at_4k, at_128k = next(iter(fits)), lengths.index(4096), -1
axes.set_title(
    f"64 GiB, {first}: {fits[first][at_4k]} requests at 4k, {fits[first][at_128k]} at 128k",
    loc="left",
)
axes.legend(frameon=False)
show(
    figure,
    alt="Requests that fit into 64 GiB against max_model_len, both on logarithmic axes: straight lines downwards. "
    + "; ".join(
        f"{label}: " + ", ".join(f"{v} at {n // 1024}k" for n, v in zip(lengths, values))
        for label, values in fits.items()
    )
    + ".",
)

# %% [markdown] id="experiment-used-text"
# And how much of that memory is ever written? Draw a thousand request lengths, most short, a few long, as chat traffic has
# them.

# %% id="experiment-used" tags=["nbval-check-output"]
rng = random.Random(0)
real = [min(131072, int(rng.lognormvariate(6.5, 1.0))) for _ in range(1000)]
print(
    f"half of the requests are shorter than {sorted(real)[500]} tokens, one in a hundred is longer than {sorted(real)[990]}"
)
for length in (4096, 131072):
    written = sum(min(n, length) for n in real) / (len(real) * length)
    too_long = sum(n > length for n in real)
    print(
        f"max_model_len {length:6}: {written:5.1%} of the reserved memory is ever written, {too_long} requests are too long"
    )

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **"128k, just in case."** A reservation costs what it reserves, not what is used. With a contiguous cache, `max_model_len`
#   divides the number of users.
# - **Position 0 for every decoded token.** The shape is right, the text is fluent, and it is wrong: to the model the newest
#   word stands at the beginning. A token's position is the number of tokens before it.
# - **One length for all layers.** Within a step layer 0 already holds the new token while layer 1 does not.
# - **Passing the whole sequence again.** The cache then holds everything twice.
# - **Growing the cache with `torch.cat`.** It works, and copies the whole cache in every layer of every step.
# - **Counting query heads.** Grouped-query attention keeps KV heads only; Llama 3 has a quarter or an eighth as many.
# - **Hiding padding from everybody, itself included.** A softmax over nothing is NaN, and NaN in a cache spreads. See
#   `visible_columns` in `minivllm/attention/contiguous.py`.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` (or `need`, `decoder`) | The kernel was restarted. Run the set-up cell at the top, then this one |
# | `name 'model' is not defined` (or `new_cache`, `timed`) | Run the cells of "Plug it in", or of the experiment, from their first |
# | "not attempted yet" | The `raise NotImplementedError` line is still there. Replace it, run the cell again |
# | "... lives in your notebook; define it in this cell" | A check sees its own cell alone. Move the definition or the import into it |
# | "The cache is full" in an experiment | The cache of that cell is used twice: run the cell from its start, it makes a new one |
# | Green, but the text repeats or drifts | Look at positions: does the first decoded token get `len(prompt)`? |
# | "no gain yet" in experiment 1 | The texts are short, or the machine is busy with something else. Close it and run the two cells again |
# | I want to use the debugger | `check("3.1", here=True)` runs in this kernel: put `breakpoint()` into your method |
# | I am stuck | `hint("3.1")`, again for the next one, then `solution("3.1")`. `skip("3.1")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, between the quotation marks in place of the question mark, and run the cell. Every answer is
# explained, even the wrong ones.
#
# {{question 3.q1}}

# %% id="quiz-3-q1" tags=["nbval-check-output"]
quiz("3.q1", "b")

# %% [markdown] id="quiz-3-q2-text"
# {{question 3.q2}}

# %% id="quiz-3-q2" tags=["nbval-check-output"]
quiz("3.q2", "b")

# %% [markdown] id="quiz-3-q3-text"
# {{question 3.q3}}

# %% id="quiz-3-q3" tags=["nbval-check-output"]
quiz("3.q3", "b")

# %% [markdown] id="quiz-3-q4-text"
# {{question 3.q4}}

# %% id="quiz-3-q4" tags=["nbval-check-output"]
quiz("3.q4", lambda layers, kv_heads: 2 * layers * kv_heads * 128 * 2)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A causal mask makes keys and values final, so they are kept. Each token goes through the model once.
# - Prefill fills the cache and decides TTFT, where a cache gains nothing. Decode reads it and decides TPOT, where it gains
#   nearly everything.
# - A static batch shares the reading of weights and wastes what its rectangle pads.
# - A token keeps `2 * layers * KV heads * head_dim` numbers. Reserving for the longest possible text, not the weights, decides
#   how few users fit.

# %% [markdown] id="further"
# ## Further learning
#
# - Pope et al., *Efficiently Scaling Transformer Inference* (2022), arXiv:2211.05102: prefill and decode as two different
#   problems, and what limits each.
# - Ainslie et al., *GQA* (2023), arXiv:2305.13245: fewer KV heads, a smaller cache, nearly the same answers.
# - DeepSeek-AI, *DeepSeek-V2* (2024), arXiv:2405.04434, section 2.1: a cache of compressed notes, made for exactly the price
#   you computed.
# - `minivllm/attention/contiguous.py`: the two forward passes that called your cache, 20 lines each.

# %% [markdown] id="next"
# ## Next: Lab 04, paged KV
#
# Reserved for the longest, used by the shortest: three quarters of that memory hold nothing at 4k, 99 % at 128k. Operating systems met this problem
# sixty years ago, and their answer was pages. Next you hand out the cache in small blocks, and several times as many requests
# fit into the same memory.

# %% id="journey"
journey()
