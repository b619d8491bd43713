# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "02"
#     title: Naive generation
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 45 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Python, a little PyTorch. Lab 01 (the forward pass) helps; here the model is given.
#     required: required; every later lab is measured against this one
# ---

# %% [markdown] id="title"
# # Lab 02 · Naive generation
#
# A language model does one thing: it reads text and says how likely each possible next token is. It does not write. Writing is
# a loop around it, and today you write that loop, then the few lines that turn likelihoods into a choice. By the end your own
# sampler runs inside a real engine.
#
# The loop will be correct and wasteful. Seeing exactly *how* wasteful is the reason for every lab that follows.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says
# `raise NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("2.1")` gives a hint.

# %% id="setup"
import statistics
import time

import torch

from checks import (
    components,
    hint,
    need,
    predict,
    progress,
    quiz,
    recall,
    reset,
    skip,
    solution,
    start,
    use,
    whose,
)
from checks import journey, live, new_figure, save_result, show, show_diff

lab = start("02")
decoder = lab.load_decoder()
tokenizer = lab.load_tokenizer()


def model(token_ids):
    """Logits [T, vocab_size] for token ids [T]. Row t says what could follow token t."""
    return decoder.full_forward(token_ids.to(lab.device))


# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Write the loop that turns a model into a text generator, and say what each call of it computes.
# - Implement temperature, top-k and top-p for a whole batch, including the edges that break real samplers.
# - Measure what recomputing costs, and predict it from the sequence length.
# - Put your own sampler into an engine, and see it answer a prompt.

# %% [markdown] id="big-idea"
# ## The big idea
#
# Imagine a writer with no memory at all. To add one word, she reads the whole manuscript from page one, adds the word, and
# forgets everything. For the next word she begins at page one again. The book gets written, and every word is the right one.
# But page one is read as many times as the book has words.
#
# That is naive generation:
#
# ```text
# call 1   [The cat sat]              -> on
# call 2   [The cat sat on]           -> the
# call 3   [The cat sat on the]       -> mat
# ```
#
# **Where the picture breaks.** The writer reads word after word, so a longer manuscript always takes longer. A processor works
# on all tokens of a call at once. A machine that is mostly idle during a call (a large GPU with a short text) takes no longer
# for 100 tokens than for 10. So the waste is always there, but it does not always show on the clock. You will measure where it
# begins to show on yours.

# %% [markdown] id="predict"
# ## Predict first
#
# Before you measure anything, commit to an answer. You will meet it again beside the plot. Write one of the words in place of
# the question mark.
#
# {{question 2.p1}}

# %% id="predict-2-p1"
predict("2.p1", "line")

# %% [markdown] id="example"
# ## A small example, by hand
#
# Take a toy vocabulary of four tokens, and a model that was given the three tokens `[2, 0, 1]`. It returns **one row of logits
# for each token it saw**, three rows of four numbers. Row 0 is the forecast after token 2 alone, row 1 the forecast after `[2,
# 0]`, row 2 after the whole `[2, 0, 1]`.
#
# A logit is a score: the higher, the likelier. Softmax turns a row of scores into probabilities that add up to 1.

# %% id="example-rows" tags=["nbval-check-output"]
# what a model might say to [2, 0, 1]
example = torch.tensor([[1.0, 3.0, 0.0, 0.0], [0.0, 2.0, 0.5, 0.5], [0.0, 1.0, 0.0, 2.0]])
for row, seen in zip(example, ([2], [2, 0], [2, 0, 1])):
    probabilities = ", ".join(f"{p:.2f}" for p in row.softmax(-1))
    print(f"after {seen!s:10} logits {row.tolist()}   probabilities {probabilities}")

# %% [markdown] id="example-count"
# To continue the text only the **last** row counts: its largest logit is token 3, so the sequence becomes `[2, 0, 1, 3]`. Rows
# 0 and 1 forecast tokens we have already.
#
# Now count the work. Starting from 3 tokens and adding 4, the model is called with 3, 4, 5 and 6 tokens: 18 positions. The
# finished text has 7 tokens, and the last one never goes in, so 6 positions would have been enough had anything been
# remembered. Two thirds of the work was done before.

# %% [markdown] id="real-model"
# The same with the real model. Its vocabulary has 49,152 tokens, so we print only the five likeliest.

# %% id="real-rows"
prompt = tokenizer.encode("The capital of France is")
logits = model(torch.tensor(prompt))
print(f"{len(prompt)} tokens in, logits of shape {list(logits.shape)} out")
values, tokens = logits[-1].float().softmax(-1).topk(5)
for value, token in zip(values.tolist(), tokens.tolist()):
    print(f"  {value:6.1%}  {tokenizer.decode([token])!r}")

# %% [markdown] id="exercise-2-1-text"
# ## Exercise 2.1 · The loop
#
# {{exercise 2.1}}
#
# Write `greedy_generate(model, token_ids, max_new_tokens)`.
#
# - `token_ids` is a Python list of integers, the prompt (at least one token). Leave the caller's list as it is.
# - `model(x)` takes a 1-D `int64` tensor of token ids, `T` of them, and returns logits `[T, vocab_size]`, one row a token.
# - Each new token is the argmax of the last row (the largest logit: *greedy*). It joins the sequence, and the model is called
#   again with **the whole sequence**.
# - Return a list of the new tokens only, exactly `max_new_tokens` integers (not tensors). Do not stop early, whatever the tokens are.
# - One call of the model for each new token, none besides. `max_new_tokens=0` calls nothing and returns `[]`.

# %% id="exercise-2-1" tags=["nbval-check-output"]
from checks import check
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    """The greedy continuation of token_ids, max_new_tokens long, recomputing everything at each
    step."""
    # BEGIN SOLUTION
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(token_ids) :]
    # END SOLUTION


check("2.1")

# %% [markdown] id="first-text"
# Green? Then let your loop write. This is a real language model speaking through your few lines.

# %% id="first-text-run"
need("2.1")  # after a restart, or if you skipped it: your saved answer, or minivllm's
prompt = tokenizer.encode("The best thing about learning how things work is")
continuation = greedy_generate(model, prompt, 12 if lab.fast else 40)
print(tokenizer.decode(prompt + continuation))

# %% [markdown] id="greedy-is-dull"
# Run it twice and you get the same text twice: greedy is deterministic. Let it run on and it often begins to repeat itself,
# since what has just been said becomes the likeliest thing to say next. To get variety we *draw* from the probabilities. But
# the tail of 49,152 tokens, each very unlikely, is likely as a whole, and one odd token can derail a text. So before drawing,
# samplers reshape the logits. That is the next two exercises.

# %% [markdown] id="exercise-2-2-text"
# ## Exercise 2.2 · Temperature and top-k
#
# {{exercise 2.2}}
#
# An engine answers many requests at once, so both work on a **batch**: `logits` is `[B, V]` in float32, one row a request, and
# each row has a setting of its own. Both return a tensor `[B, V]` and leave their inputs unchanged.
#
# **`apply_temperature(logits, temperature)`**: divide row `b` by `temperature[b]` (float32, `[B]`). Below 1 the differences
# grow and the draw becomes surer, above 1 they shrink. A row whose temperature is below `GREEDY_EPS` (0 means greedy) is
# returned as it was: its argmax is all that counts, and dividing it would end in infinities and NaN.
#
# **`apply_top_k(logits, k)`**: in row `b` the `k[b]` largest logits (int64, `[B]`) keep their value, and all others become
# `-inf`, so that softmax gives them probability 0.
#
# | logits | k | result |
# |---|---|---|
# | 1, 3, 2, 0 | 2 | -inf, 3, 2, -inf |
# | 1, 3, 2, 0 | 0, -1, 4 or more | unchanged: `k <= 0` and `k >= V` mean off |
# | 2, 5, 5, 5 | 2 | two of the fives, or all three: tokens that tie with the k-th may stay or go, as long as at least k stay |
# | -inf, 3, -inf, 1 | 3 | unchanged: what was removed before stays removed, and nothing becomes NaN |

# %% id="exercise-2-2" tags=["nbval-check-output"]
from checks import check
import torch

# 1e-5: a request whose temperature is below this is greedy
from minivllm.sampling_params import GREEDY_EPS

REMOVED = float("-inf")


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide each row of logits [B, V] by its temperature [B]; a row with temperature < GREEDY_EPS
    comes back as it was."""
    # solution: minivllm.sampling.logits.apply_temperature


def apply_top_k(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the k [B] largest logits of each row of logits [B, V], make the others REMOVED; k <= 0
    or k >= V is off."""
    # solution: minivllm.sampling.logits.apply_top_k


check("2.2")

# %% [markdown] id="temperature-picture"
# See what your temperature does to a real forecast. Watch the last group of bars: all the tokens that are not worth a bar of
# their own.

# %% id="temperature-plot"
need("2.2")
prompt = tokenizer.encode("Roses are red, violets are")
row = model(torch.tensor(prompt))[-1:].float().cpu()
settings = [0.5, 1.0, 1.5]
likeliest = row[0].topk(6).indices
names = [tokenizer.decode([token]).strip() for token in likeliest.tolist()]

figure, axes = new_figure()
rest = []
for i, temperature in enumerate(settings):
    probabilities = apply_temperature(row, torch.tensor([temperature])).softmax(-1)[0]
    bars = probabilities[likeliest].tolist()
    rest.append(1 - sum(bars))
    places = [n + 0.27 * (i - 1) for n in range(7)]
    axes.bar(places, [*bars, rest[-1]], width=0.25, label=f"temperature {temperature}")
    axes.annotate(f"{rest[-1]:.0%}", (places[-1], rest[-1]), ha="center", va="bottom", fontsize=8)
axes.set_xticks(range(7), [*names, f"{row.shape[1] - 6:,}\nothers"])
axes.set_ylabel("probability")
axes.set_title("Roses are red, violets are ...", loc="left")
axes.legend(frameon=False)
shares = ", ".join(f"{share:.0%} at {t}" for t, share in zip(settings, rest))
show(
    figure,
    alt=f"Probabilities of the 6 likeliest tokens and of all others at 3 temperatures. The others: {shares}.",
)

# %% [markdown] id="temperature-reading"
# Each of the others is very unlikely. Together, at temperature 1.5, they are what is drawn most of the time. That is the tail
# that top-k cuts off.

# %% [markdown] id="exercise-2-3-text"
# ## Exercise 2.3 · Top-p
#
# {{exercise 2.3}}
#
# Top-k always keeps the same number of tokens. But after "The capital of France is" a handful is enough, and after "My
# favourite season is" hundreds make sense. Top-p (nucleus sampling) asks instead: which are the fewest tokens that together
# have probability at least p?
#
# Sort by probability, add up from the top, stop **with** the token that reaches p. With probabilities 0.1, 0.2, 0.3, 0.4 and p
# = 0.6: 0.4 is not enough, 0.4 + 0.3 = 0.7 is. So the last two stay. The token that crosses the line belongs to the set.
#
# **`apply_top_p(logits, p)`**, `logits` `[B, V]`, `p` `[B]` and above 0, both float32:
#
# - In each row the smallest such set, by that row's own p, keeps its logits exactly; all others become `-inf`. At least one
#   token stays.
# - Among equal logits at the boundary it is up to you which stay, and how many more than needed.
# - `p >= 1` means off: the row comes back as it was, every token of it.
# - Logits may be `-inf` already. They stay so, and nothing becomes NaN. Inputs are unchanged.

# %% id="exercise-2-3" tags=["nbval-check-output"]
from checks import check
import torch

REMOVED = float("-inf")


def apply_top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep in each row of logits [B, V] the fewest tokens whose probabilities add up to at least p
    [B]; p >= 1 is off."""
    # solution: minivllm.sampling.logits.apply_top_p


check("2.3")

# %% [markdown] id="top-p-adapts"
# The point of top-p in two lines: how many of 49,152 tokens are left at p = 0.9, where the model is sure and where it is not?

# %% id="top-p-counts"
need("2.3")
for text in ("The capital of France is", "My favourite season is"):
    row = model(torch.tensor(tokenizer.encode(text)))[-1:].float().cpu()
    kept = (apply_top_p(row, torch.tensor([0.9])) > float("-inf")).sum()
    print(f"{text!r}: {int(kept)} tokens stay")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# What you wrote is a part of an engine. `components()` collects your passed exercises (they were saved as
# `my_engine/sampling/logits.py`, a mirror of minivllm's own file), and `LLM(components=...)` uses them in place of its own.
# Everything you have not written yet is minivllm's. (The first engine on a machine compiles its attention kernel: up to a minute, once.)

# %% id="plug-in-run"
from minivllm import LLM, SamplingParams

print(f"Components: {whose()}")
llm = None  # if this cell runs twice, the first engine goes before the second comes
llm = LLM(lab.model, components=components(), max_model_len=512)
question = [{"role": "user", "content": "Give me one reason to learn how computers work."}]
params = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, seed=7, max_tokens=16 if lab.fast else 80
)
answer = llm.chat(question, params, use_tqdm=False)[0].outputs[0]
print(answer.text.strip())
print(f"\n{len(answer.token_ids)} tokens, each drawn after your top-k and top-p.")

# %% [markdown] id="plug-in-diff"
# What differs between minivllm's file ("-" lines) and yours ("+" lines). Yours need not look the same; where they differ, ask
# which one you would rather read in a year.

# %% id="plug-in-show-diff"
show_diff("sampling/logits.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · How much of the work was done before?
#
# A forward pass over `T` tokens multiplies each token with every weight (two operations a weight), and compares it with the
# tokens it may see. The first call has to do all of that. Every later call adds a single new token; the rest repeats the call
# before.
#
# Watch it while your own loop runs. Each bar is one call of the model.


# %% id="experiment-flops"
def flops_of_new_tokens(config, new, length):
    """Operations for the last `new` tokens of a sequence of `length`: their matrix multiplications
    and their attention."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # queries, keys, values, output
    attention_weights = config.hidden_size * config.head_dim * heads
    mlp_weights = 3 * config.hidden_size * config.intermediate_size
    head_weights = config.vocab_size * config.hidden_size
    weights = config.num_layers * (attention_weights + mlp_weights) + head_weights
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length
    return 2 * new * (weights + attention)


def draw_work(lengths, picture):
    """One bar a call: what is new in it, and what repeats an earlier call. Returns the repeated
    share."""
    config = decoder.config
    total = [flops_of_new_tokens(config, length, length) / 1e9 for length in lengths]
    new = [total[0]] + [flops_of_new_tokens(config, 1, length) / 1e9 for length in lengths[1:]]
    share = 1 - sum(new) / sum(total)
    figure, axes = new_figure()
    calls = range(1, len(lengths) + 1)
    axes.bar(calls, new, label="new")
    axes.bar(calls, [t - n for t, n in zip(total, new)], bottom=new, label="computed before")
    axes.set(xlabel="call of the model", ylabel="GFLOP", xlim=(0, max(calls) + 1))
    axes.set_title(f"{share:.0%} of all work so far was done before", loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=2)
    axes.set_ylim(0, max(total) * 1.25)
    picture.update(
        figure, alt=f"{len(lengths)} calls: {share:.1%} of their work repeats an earlier call."
    )
    return share


# %% id="experiment-live"
need("2.1")
picture, lengths = live(), []


def watched_model(token_ids):
    lengths.append(len(token_ids))
    if len(lengths) % 4 == 1:
        draw_work(lengths, picture)
    return model(token_ids)


prompt = tokenizer.encode(
    "Here is a short story about a robot who wanted to learn to cook. One morning"
)
story = greedy_generate(watched_model, prompt, 12 if lab.fast else 60)
share = draw_work(lengths, picture)
print(tokenizer.decode(prompt + story))
print(
    f"\n{len(prompt)} tokens of prompt, {len(story)} new ones: {share:.1%} of the work was done before."
)

# %% [markdown] id="experiment-time"
# ## Experiment 2 · Time per token against length
#
# Work is one thing, the clock another. Measure one call of your loop at doubling lengths, until the longest takes at least
# three times as long as the shortest.

# %% id="experiment-measure"
need("2.1")
text = tokenizer.encode("It was a bright cold day, and the clocks were striking. ")
longest = min(2048, decoder.config.max_position_embeddings)


def milliseconds_per_token(length):
    """Median time of one step of the loop on `length` tokens. The first run does not count: it
    warms up."""
    prompt = (text * (length // len(text) + 1))[:length]
    times = []
    for _ in range(2 if lab.fast else 6):
        started = time.perf_counter()
        greedy_generate(model, prompt, 1)
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times[1:])


measured, length = {}, 16
while length <= longest:
    measured[length] = milliseconds_per_token(length)
    print(f"{length:5} tokens: {measured[length]:7.1f} ms for one more")
    visible = measured[length] >= 3 * min(measured.values())
    slow = measured[length] > (500 if lab.fast else 3000)
    if length >= 256 and (slow or (visible and (lab.fast or length >= 512))):
        break
    length *= 2

save_result(
    "02",
    tokens_per_second=1000 / measured[256],
    what="naive, at 256 tokens",
    data={
        "device": lab.device,
        "dtype": str(lab.dtype),
        "model": lab.model,
        "ms_per_token": measured,
    },
)

# %% id="experiment-plot"
shortest, longest_measured = min(measured), max(measured)
growth = measured[longest_measured] / measured[shortest]
flat = f"at {longest_measured} tokens a call takes {growth:.1f} times as long as at {shortest}:"
flat += " it leaves this machine mostly idle."
recall("2.p1", but=flat if growth < 3 else "")

figure, axes = new_figure()
axes.plot(list(measured), list(measured.values()), marker="o", label="measured")
line = ([0, longest_measured], [0, measured[longest_measured]])
axes.plot(*line, linestyle="--", color="#777777", label="in proportion to the length")
axes.set(xlabel="tokens in the sequence", ylabel="ms for one more token", ylim=0, xlim=0)
axes.set_title(
    f"One more token: {growth:.1f} times the time at {longest_measured} tokens as at {shortest}",
    loc="left",
)
axes.legend(frameon=False)
show(
    figure,
    alt=f"Time for one more token against the sequence's length: {measured[shortest]:.0f} ms at {shortest} tokens,"
    f" {measured[longest_measured]:.0f} ms at {longest_measured}, {growth:.1f} times as much.",
)

# %% [markdown] id="experiment-reading"
# Two regimes meet in this plot. On the left the curve is flatter than the dashed line: a short call is dominated by reading the
# model's weights, which costs the same for 1 token as for 30. On the right the arithmetic dominates and the curve follows the
# dashed line, or rises above it as attention joins in. The area under the curve is what an answer costs, so an answer twice as
# long takes up to four times as long.
#
# **Where naive is fine.** If you want a single token (is this review positive, yes or no?), there is nothing to remember for a
# second call. A cache would gain nothing there.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Giving the model only the newest token.** It keeps nothing between calls, so it forecasts what follows a text of one
#   token. The output looks like language and has nothing to do with the prompt.
# - **Taking the wrong row.** Row `t` forecasts token `t + 1`. Only the last row is about the future.
# - **Dropping the token that crosses p.** With a sure model (first token at 95 %) and p = 0.9, nothing would be left to draw
#   from.
# - **One setting for the whole batch.** `logits / temperature` with shapes `[B, V]` and `[B]` fails, or, if B = V, silently
#   divides columns. `temperature[:, None]` is what you mean.
# - **Taking rounding at its word.** In float32 a running sum can reach 1.0 long before the last token. A filter that is off
#   must not look at the sum at all.
# - **Comparing seconds between lengths.** "20 tokens/s" says nothing without the sequence length, as you have just measured.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` (or `need`, `model`, `decoder`) | The kernel was restarted. Run the set-up cell at the top, then this one |
# | "not attempted yet" | The `raise NotImplementedError` line is still there. Replace it, run the cell again |
# | "... lives in your notebook; define it in this cell" | A check sees its own cell alone. Move the definition or the import into it |
# | "It did not come back within 10 seconds" | A loop has no end. Nothing is lost, the kernel is fine |
# | Green, but later text is nonsense | Look at `model`: did you pass only the newest token somewhere else? |
# | I want to use the debugger | `check("2.1", here=True)` runs in this kernel: put `breakpoint()` into your function |
# | I am stuck | `hint("2.1")`, again for the next one, then `solution("2.1")`. `skip("2.1")` goes on without it |
# | The download fails | The message names the file to bring by hand, and where it goes |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, between the quotation marks in place of the question mark, and run the cell. Every answer is
# explained, even the wrong ones.
#
# {{question 2.q1}}

# %% id="quiz-2-q1" tags=["nbval-check-output"]
quiz("2.q1", "b")

# %% [markdown] id="quiz-2-q2-text"
# {{question 2.q2}}

# %% id="quiz-2-q2" tags=["nbval-check-output"]
quiz("2.q2", "b")

# %% [markdown] id="quiz-2-q3-text"
# {{question 2.q3}}

# %% id="quiz-2-q3" tags=["nbval-check-output"]
quiz("2.q3", "a")

# %% [markdown] id="quiz-2-q4-text"
# {{question 2.q4}}

# %% id="quiz-2-q4" tags=["nbval-check-output"]
quiz("2.q4", lambda prompt, new: sum(prompt + i for i in range(new)))

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A language model forecasts; a loop around it writes. One call makes one token.
# - Without memory a call recomputes every token before. For `n` new tokens that is work in the order of `n` squared.
# - Earlier tokens never see later ones, so all that recomputed work comes out exactly as before. It could be kept.
# - Temperature reshapes the distribution, top-k and top-p cut its tail. Each row of a batch has its own settings, and "off"
#   means untouched.

# %% [markdown] id="further"
# ## Further learning
#
# - Holtzman et al., *The Curious Case of Neural Text Degeneration* (2019), arXiv:1904.09751: why greedy text repeats itself,
#   and where top-p comes from.
# - Nguyen et al., *Turning Up the Heat: Min-p Sampling* (2024), arXiv:2407.01082: a third filter. Find `apply_min_p` in
#   `minivllm/sampling/logits.py` and see why it needs no softmax.
# - `minivllm/sampling/sampler.py`: how an engine draws without sorting 49,152 numbers for each token, and why a seed gives the
#   same text whoever else is being served.

# %% [markdown] id="next"
# ## Next: Lab 03, the KV cache
#
# You know now what is computed again and again, and that it never changes. Next you keep it: the loop stays the same, and the
# time per token stops growing. One last look at where you stand; every lab adds a dot.

# %% id="journey"
journey()
