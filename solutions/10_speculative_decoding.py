# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "10"
#     title: Speculative decoding
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 90 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Labs 02 and 06 (sampling; the unified schedule)
#     required: required
# ---

# %% [markdown] id="title"
# # Lab 10 · Speculative decoding
#
# A decode step reads all the weights and yields one token. Reading them for four tokens costs hardly more: a prompt shows it, its tokens
# come by the hundred. But the next token cannot be computed before this one is known. Or can it be *guessed*? Today you guess several
# tokens, let the model check all of them in one step, and prove that the answer is the model's own, whoever guessed.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("10.1")` gives a hint.

# %% id="setup"
import dataclasses
import html
import inspect
import logging
import statistics
from contextlib import ExitStack

import torch
from IPython.display import display

from checks import (
    components,
    hint,
    journey,
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
from minivllm import LLM, Components, SamplingParams
from minivllm.bench.spec import workload
from minivllm.spec_decode.eagle import EagleDrafter, EagleHead
from minivllm.text.detokenizer import IncrementalDetokenizer

lab = start("10", model="smollm2-135m")  # the model the EAGLE head below was trained for

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Say from three numbers whether speculation will pay, before you build it.
# - Write a drafter that needs no model, and the verification of anybody's drafts.
# - Prove that sampled text has the model's own distribution, and catch a bias of two percent.
# - Say where speculation loses: by workload, by k, by batch size.

# %% [markdown] id="big-idea"
# ## The big idea
#
# An editor of few words and great patience writes one word a minute: for each she reads the whole shelf of reference books. Her
# assistant scribbles the next three words ahead. Reading the shelf *once*, she checks all three; up to the first one she would not have
# written they stay, and in its place she writes her own. At worst that is one word, as before; at best, four.
#
# The shelf is the weights, a minute is a step, the assistant is the **drafter**, the editor is the **target**. The step that checks is
# an ordinary one with more tokens in it, as in Lab 06. Row `i` of its logits says what follows draft `i - 1`, so `k` drafts give
# `k + 1` rows:
#
# ```text
# newest token, drafts     t        d1         d2            d3            k = 3: four tokens go in
# the target's rows        p(.|t)   p(.|t d1)  p(.|t d1 d2)  p(.|t d1 d2 d3)
# answer                   d1       d2         its own                     two drafts accepted, one of its own
# ```
#
# The keys and values of `d3` are not erased: `num_computed_tokens` goes back to the last token that counts, and the next step writes
# over the rest.
#
# **Where the picture breaks.** The editor keeps only words she would have written *herself*, not all that are good enough: quality is
# not traded for speed. And reading the shelf is the whole cost only while she has one author. With sixteen, checking is work.

# %% [markdown] id="predict"
# ## Predict first
#
# {{question 10.p1}}

# %% id="predict-10-p1"
predict("10.p1", "part")

# %% [markdown] id="predict-10-p2-text"
# {{question 10.p2}}

# %% id="predict-10-p2"
predict("10.p2", "less")

# %% [markdown] id="example"
# ## A small example, by hand
#
# The text so far ends in "the cat", which has stood in it before. So the drafter guesses what followed then.

# %% id="example-figure"
from matplotlib.patches import Rectangle

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"
LOOKS = {  # colour, hatch
    "text": ("#dddddd", ""),
    "right": (BLUE, "//"),
    "wrong": (ORANGE, "xx"),
    "own": (GREEN, ".."),
    "lost": ("white", ""),
}


def draw_words(axes, rows):
    """Rows of (name, first column, [(word, look), ...])."""
    for y, (name, first, words) in enumerate(rows):
        axes.text(-0.2, y + 0.4, name, ha="right", va="center", fontsize=9)
        for x, (word, look) in enumerate(words, start=first):
            colour, hatch = LOOKS[look]
            axes.add_patch(
                Rectangle(
                    (x, y), 0.94, 0.8, facecolor=colour, alpha=0.4, hatch=hatch, edgecolor="#555555"
                )
            )
            axes.text(
                x + 0.47,
                y + 0.4,
                word,
                ha="center",
                va="center",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
    axes.set(xlim=(-3.2, 12.1), ylim=(len(rows), -0.2), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(False)


so_far = [(w, "text") for w in ["the", "cat", "sat", "on", "the", "mat", ".", "the", "cat"]]
figure, axes = new_figure(width=8.5, height=1.9)
draw_words(
    axes,
    [
        ("text so far", 0, so_far),
        ("drafts", 9, [("sat", "right"), ("on", "right"), ("the", "wrong")]),
        ("target's rows", 8, [("sat", "own"), ("on", "own"), ("a", "own"), ("?", "lost")]),
        ("answer", 9, [("sat", "right"), ("on", "right"), ("a", "own")]),
    ],
)
show(
    figure,
    alt="The text so far: the cat sat on the mat . the cat. Drafts for the next three places: sat, on, the. The target's four rows, one"
    " column to the left of the places they speak of: after cat it says sat, after sat it says on, after on it says a; the fourth row"
    " is lost. Answer: sat, on (drafts, hatched), a (the target's own, dotted).",
)

# %% [markdown] id="example-by-hand"
# - A row stands below the token it was computed for. One step, three tokens: two drafts, and `a`, which the target says after "the cat sat on".
# - The last row speaks about what follows `the`, which is not in the text. Nobody may use it.
# - With all three drafts right, the fourth row would be a token for nothing: the **bonus**.

# %% [markdown] id="exercise-10-1-text"
# ## Exercise 10.1 · Will it pay?
#
# {{exercise 10.1}}
#
# Let each draft be right with probability `acceptance`, if all before it are. With acceptance 0.5 and three drafts a step yields
# 1 + 0.5 + 0.25 + 0.125 = 1.875 tokens: its own, the first draft in half the steps, the second in a quarter.
#
# **`expected_tokens(acceptance, k)`** returns that number, for any acceptance from 0 to 1, both included, and `k` from 0 on.
#
# **`expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0)`** returns how many times as many tokens a second there are as without
# drafts. The unit of time is one plain step: a draft takes `cost_ratio` (one after the other, `k` of them), and the step that checks `k`
# drafts takes `verify_ratio`. With the numbers above and a cost ratio of 0.1 it is 1.875 / (3 · 0.1 + 1) = 1.44.

# %% id="exercise-10-1" tags=["nbval-check-output"]
from checks import check


def expected_tokens(acceptance, k):
    """Tokens that a step with k drafts yields on average, the target's own token included."""
    # BEGIN SOLUTION
    return sum(acceptance**i for i in range(k + 1))
    # END SOLUTION


def expected_speedup(acceptance, k, cost_ratio, verify_ratio=1.0):
    """Tokens a second with k drafts, against those without. Times are in plain steps."""
    # BEGIN SOLUTION
    return expected_tokens(acceptance, k) / (k * cost_ratio + verify_ratio)
    # END SOLUTION


check("10.1")

# %% [markdown] id="gain-text"
# Your formula, for drafts that cost nothing and for drafts that cost a seventh of a step each (a small model).

# %% id="gain"
ks = range(11)
figure, (left, right) = new_figure(width=8.0, height=2.8, columns=2)
told = []
for axes, cost in ((left, 0.0), (right, 0.15)):
    for acceptance, marker in ((0.9, "o"), (0.6, "s"), (0.3, "D")):
        speed = [expected_speedup(acceptance, k, cost) for k in ks]
        axes.plot(ks, speed, marker=marker, markersize=4, label=f"acceptance {acceptance}")
        best = max(ks, key=speed.__getitem__)
        told.append(
            f"Cost {cost}, acceptance {acceptance}: best at k = {best} with {speed[best]:.2f}, {speed[10]:.2f} at k = 10."
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="k", ylim=(0, 7))
    axes.set_title(f"speed-up if a draft costs {cost:g} steps", loc="left", fontsize=10)
left.legend(frameon=False)
show(figure, alt="Expected speed-up against k. " + " ".join(told))

# %% [markdown] id="exercise-10-2-text"
# A cheap drafter often beats a good one. So, first the cheapest there is.
#
# ## Exercise 10.2 · Guess from the text itself
#
# {{exercise 10.2}}
#
# Text repeats itself: code, tables, answers that quote the question. **`propose(token_ids, k)`** gets all tokens of a request, prompt and
# output, as a NumPy array, and returns a list of `k` guesses at what comes next:
#
# - Take the last `n` tokens, for `n` from `self.prompt_lookup_max` down to `self.prompt_lookup_min`. Have they stood in the text before?
#   (The earlier place may overlap the end: in `7 7 7` the last two have.) The **longest** such run counts.
# - Of several places, the **last**: a text resembles most what it has just said.
# - The drafts are the `k` tokens that followed there. Where the copy reaches the end of the text, it goes on with what it has just copied:
#   after `9 1 2 1 2` come `1 2 1 2 1 ...`
# - Nothing seen before: `[]`.
#
# One drafter serves all requests, so keep nothing between calls, and leave the array as it is.

# %% id="exercise-10-2" tags=["nbval-check-output"]
from checks import check
import numpy as np


class NgramDrafter:
    """prompt_lookup_max, prompt_lookup_min: the longest and shortest run that counts as seen before."""

    def __init__(self, prompt_lookup_max=5, prompt_lookup_min=2):
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def propose(self, token_ids, k):
        """k guesses at what follows token_ids; [] if nothing like its end was seen before."""
        # solution: minivllm.spec_decode.ngram.NgramDrafter.propose


check("10.2")

# %% [markdown] id="exercise-10-3-text"
# ## Exercise 10.3 · Greedy verification
#
# {{exercise 10.3}}
#
# **`verify_greedy(draft_ids, target_logits)`** returns the answer: the drafts that the target would have chosen itself, up to the first
# it would not, and one token of its own.
#
# `draft_ids` is a tensor of `k` token ids (perhaps none). `target_logits` is `[k + 1, V]`: row `i` is about draft `i`
# (from 0), row `k` about what follows. The result: a tensor of 1 to `k + 1` ids. Leave them as they are.

# %% id="exercise-10-3" tags=["nbval-check-output"]
from checks import check
import torch


def verify_greedy(draft_ids, target_logits):
    """The accepted drafts and one token more, [1 .. k + 1]."""
    # solution: minivllm.sampling.rejection.verify_greedy


check("10.3")

# %% [markdown] id="exercise-10-4-text"
# ## Exercise 10.4 · And with dice?
#
# {{exercise 10.4}}
#
# At temperature 1 there is no one right token. What must be right is the *distribution*: each token with the target's probability `p`,
# although a drafter with other ideas, `q`, proposed it. Three tokens, one draft:
#
# | token | `q` proposes | `p` wants | kept: min(p, q) | owed: max(p - q, 0) |
# |---|---|---|---|---|
# | x | 0.8 | 0.5 | 0.5 | 0 |
# | y | 0.2 | 0.3 | 0.2 | 0.1 |
# | z | 0 | 0.2 | 0 | 0.2 |
#
# x is proposed too often, so it is kept in only 0.5 of 0.8 cases. In the 30 % that are refused, the token comes from what is *owed*: y and
# z as 1 to 2. Kept and owed add up to `p` in each row.
#
# **`rejection_sample(draft_ids, draft_probs, target_probs, noise)`** does that for `B` requests with `k` drafts each.
#
# - Draft `i` of request `b`, call it `d`, is kept with probability min(1, p(d) / q(d)): if `u * q(d) < p(d)`, where `u` is
#   `noise[b, i, 0]`. Row `i` of `target_probs[b]` is its `p`, row `i` of `draft_probs[b]` its `q`.
# - In place of the **first** refused draft stands a draw from max(p - q, 0). If rounding leaves nothing of that, draw from `p`.
# - If all `k` are kept, the bonus is drawn from the last row of `p`.
# - `choose(weights.log(), numbers)` draws an index for each row of weights `[B, V]`, with one number a row; weights need not add up to 1.
#   The number is `noise[b, i, 1]`, for place `i`. All chance comes from `noise` `[B, k + 1, 2]`.
# - Behind its end an answer is `INVALID`. The result is `[B, k + 1]`.
#
# The check draws 200,000 times at once: let tensors do all requests. A loop over `k` is fine.

# %% id="exercise-10-4" tags=["nbval-check-output"]
from checks import check
import torch
from minivllm.sampling.sampler import INVALID, choose


def rejection_sample(draft_ids, draft_probs, target_probs, noise):
    """The answers [B, k + 1]: drafts [B, k] from q [B, k, V], kept or replaced so that all follow p [B, k + 1, V]."""
    # solution: minivllm.sampling.rejection.rejection_sample


check("10.4")

# %% [markdown] id="bias-text"
# Yours, and the obvious shortcut: a plain draw from `p` in place of a refused draft.

# %% id="bias"
p = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1])
q = torch.tensor([0.1, 0.4, 0.2, 0.0, 0.3])
n = 200_000
torch.manual_seed(0)
drafts, noise = torch.multinomial(q, n, replacement=True), torch.rand(n, 2, 2, dtype=torch.float64)
yours = rejection_sample(drafts[:, None], q.expand(n, 1, 5), p.expand(n, 2, 5), noise)
is_kept = noise[:, 0, 0] * q[drafts] < p[drafts]
shortcut = torch.where(is_kept, drafts, torch.multinomial(p, n, replacement=True))
shares = {
    "target": p,
    "yours": torch.bincount(yours[:, 0], minlength=5) / n,
    "shortcut": torch.bincount(shortcut, minlength=5) / n,
}
figure, axes = new_figure(width=7.0, height=2.6)
for x, ((name, share), colour, hatch) in enumerate(
    zip(shares.items(), (GREY, BLUE, ORANGE), ("", "//", "xx"))
):
    places = torch.arange(5) + 0.28 * (x - 1)
    axes.bar(places, 100 * share, 0.26, label=name, color=colour, hatch=hatch, alpha=0.75)
axes.set_xlabel("token")
axes.set_title(f"% of {n:,} first tokens", loc="left", fontsize=10)
axes.legend(frameon=False)
show(
    figure,
    alt="How often each of five tokens comes first. "
    + " ".join(
        f"{name}: {', '.join(f'{100 * float(v):.1f} %' for v in share)}."
        for name, share in shares.items()
    ),
)
kept = float((yours[:, 1] != INVALID).double().mean())
print(
    f"kept: {kept:.1%} of the drafts; the sum of min(p, q) is {float(torch.minimum(p, q).sum()):.0%}"
)

# %% [markdown] id="plug-in"
# ## Plug it in
#
# Your drafter and your verification, in the engine of Lab 06's schedule: drafts are tokens asked for in the same step, so nothing else had
# to change. All in float32, so that rounding does not decide.

# %% id="plug-in-run"
logging.getLogger("minivllm").setLevel(logging.WARNING)
mine = components()
print(
    "\n".join(line for line in mine.describe().splitlines() if line.split()[0] in mine), end="\n\n"
)
questions = [
    "Repeat this list twice: 4, 8, 15, 16, 23, 42",
    "Why is the sky blue?",
    "Write the word 'block' ten times.",
    "Name three colours.",
]
chats = [[{"role": "user", "content": question}] for question in questions]
greedy = SamplingParams(temperature=0, max_tokens=12 if lab.fast else 32, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def answers(**settings):
    """The tokens of each answer, and what the drafts were worth, in words."""
    with LLM(
        lab.model, dtype="float32", max_model_len=512, num_gpu_blocks_override=129, **settings
    ) as llm:
        outputs = llm.chat(chats, greedy, use_tqdm=False)
        stats = llm.spec_decode_stats
        return [out.outputs[0].token_ids for out in outputs], stats and stats.describe()


with_drafts, told = answers(components=mine, speculative_config=NGRAM)
without, _ = answers()
print(told)
same = sum(a == b for a, b in zip(with_drafts, without))
print(f"{same} of {len(chats)} answers are the same as without drafts, token for token")

# %% [markdown] id="plug-in-diff"
# Your drafter, against minivllm's:

# %% id="plug-in-show-diff"
show_diff("spec_decode/ngram.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · Who wrote this?
#
# Every token below was checked by the model, and most of them were written by it. **Underlined and bold** is what your drafter guessed, the
# darker the further ahead.

# %% id="who"
mine = components()
parts = Components({s: mine[s] for s in ("drafter", "rejection_sampler") if s in mine})
settings = {
    "dtype": str(lab.dtype).removeprefix("torch."),
    "max_model_len": 1024,
    "trace": True,
}
num_tokens = 24 if lab.fast else 64
SHADES = ("#d6e9f8", "#a9d1ee", "#7fbbe5", "#56a5db")


def writers(trace, request_id):
    """Of each output token, in order: 0 if the model wrote it, else which draft of its step it was."""
    found = []
    for step in trace.steps:
        new = step.sampled.get(request_id, [])
        accepted = step.tokens[request_id].num_accepted if new else 0
        found += [place if place <= accepted else 0 for place in range(1, len(new) + 1)]
    return found


def paint(title, output, trace):
    """The answer with its drafts marked: as HTML, and in [brackets] where that does not show."""
    marks = writers(trace, output.request_id)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=output.prompt_token_ids)
    shown, plain = "", ""
    for token, draft in zip(output.outputs[0].token_ids, marks):
        piece = detokenizer.push(token)
        text = html.escape(piece).replace("\n", "⏎<br>")
        if draft:
            shade = SHADES[min(draft, len(SHADES)) - 1]
            text = f'<b><u style="background:{shade};color:#000">{text}</u></b>'
        shown, plain = shown + text, plain + (f"[{piece}]" if draft and piece else piece)
    share = f"{sum(d > 0 for d in marks)} of {len(marks)} tokens are drafts"
    style = "max-width:60em;line-height:1.7;padding:.4em .8em;border-left:3px solid #999"
    page = f"<p><i>{html.escape(title)}: {share}</i></p><div style='{style}'>{shown}</div>"
    text = f"{title}: {share}\n{plain.replace('][', '')}"
    display({"text/html": page, "text/plain": text}, raw=True)


def ask(llm, prompts, **changes):
    """Answer prompts (texts to continue, or chats), all at once."""
    asked = SamplingParams(
        **{"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, **changes}
    )
    return (llm.generate if isinstance(prompts[0], str) else llm.chat)(
        prompts, asked, use_tqdm=False
    )


tokenizer = lab.load_tokenizer()
names = {
    "repetitive": "a text for the fourth time",
    "code": "a little program",
    "chat": "a chat",
}
with LLM(
    lab.model, components=parts, speculative_config=NGRAM, num_gpu_blocks_override=129, **settings
) as llm:
    for name, title in names.items():
        paint(title, ask(llm, workload(name, 1))[0], llm.trace)

# %% [markdown] id="k-text"
# ## Experiment 2 · How far ahead?
#
# The same three workloads, one request at a time, several `k`. The speed counts from the first token on: drafts cannot help the prompt.

# %% id="k"


def decode_speed(llm, prompts):
    """Tokens a second of the whole batch, from when all have their first token."""
    before = len(llm.trace.requests)
    if llm.spec_decode_stats:
        llm.spec_decode_stats.reset()
    ask(llm, prompts)
    records = list(llm.trace.requests.values())[before:]
    begin, end = max(r.first_token for r in records), max(r.finish for r in records)
    return sum(t > begin for r in records for t in r.token_times) / (end - begin)


num_tokens = 16 if lab.fast else 48
lengths = [1, 6] if lab.fast else [1, 2, 4, 8]
speeds, worth = {}, {}
with ExitStack() as stack:
    engines = {}
    for k in [0, *lengths]:
        drafts = {"components": parts, "speculative_config": {**NGRAM, "num_speculative_tokens": k}}
        engine = LLM(lab.model, num_gpu_blocks_override=65, **settings, **(drafts if k else {}))
        engines[k] = stack.enter_context(engine)
    for _ in range(1 if lab.fast else 2):  # in turns: a busy moment of the machine hits all
        for name in names:
            for k, llm in engines.items():
                speed = decode_speed(llm, workload(name, 1))
                speeds[name, k] = max(speed, speeds.get((name, k), 0.0))
                worth[name, k] = llm.spec_decode_stats and dataclasses.replace(
                    llm.spec_decode_stats
                )
drafted = {key: speed / speeds[key[0], 0] for key, speed in speeds.items()}
recall("10.p1")
figure, axes = new_figure(width=6.5, height=2.8)
for name, marker in zip(names, "osD"):
    axes.plot(lengths, [drafted[name, k] for k in lengths], marker=marker, label=name)
axes.axhline(1, color="black", linestyle=":", linewidth=1)
axes.set_xticks(lengths)
axes.set_ylim(0)
axes.set_xlabel("k, drafts for each step")
axes.set_title("speed-up against no drafts", loc="left", fontsize=10)
axes.legend(frameon=False)
show(
    figure,
    alt="Speed-up of one request against no drafts. "
    + " ".join(
        f"{name}: {', '.join(f'{drafted[name, k]:.2f} at k = {k}' for k in lengths)}."
        for name in names
    ),
)
for name in names:
    stats = worth[name, lengths[-1]]
    told = f"{stats.num_verifications} steps had drafts, {stats.tokens_per_step:.1f} tokens each"
    kept = " ".join(f"{a / max(1, stats.num_verifications):.0%}" for a in stats.accepted)
    print(f"{name:11} k = {lengths[-1]}: of {num_tokens} tokens, {told}; kept by place: {kept}")
best = max(lengths, key=lambda k: drafted["repetitive", k])
save_result(
    "10",
    tokens_per_second=speeds["repetitive", best],
    what=f"n-gram drafts, a text that repeats itself, k = {best}",
    data={
        "device": lab.device,
        "dtype": lab.dtype,
        "model": lab.model,
        "speedup": {f"{name}, k = {k}": value for (name, k), value in drafted.items()},
    },
)

# %% [markdown] id="k-reading"
# A draft at place 3 counts only behind two right ones: the shares fall from place to place, and where they fall fast, a larger `k` buys rows
# that are thrown away. (In the chat most steps find no run seen before, and have no drafts: an n-gram drafter
# loses little because it so often keeps silent.)
#
# ## A drafter that has learned · reading code together
#
# For a chat somebody has to guess *new* words: a small model, or a head. A target knows more than the token it says. Its last hidden state,
# from which the logits are made, leans towards several continuations. An **EAGLE head** is one decoder layer over that: from the hidden state at a
# position and the token that was then drawn, it predicts the next hidden state; the target's own output matrix makes a token of it.
# minivllm ships one for SmolLM2, trained in an hour on one CPU thread. Here is its forward pass, and the loop that drafts.

# %% id="eagle-code"
print(inspect.getsource(EagleHead.forward))
print(inspect.getsource(EagleDrafter.propose))

# %% [markdown] id="eagle-reading"
# Three things to find in it:
#
# 1. **`next_ids`** is one token further on than the hidden states beside it. What a hidden state cannot know is which token the dice chose.
# 2. **`predicted` goes back in** where `progress.hidden` stood: from the second draft on the head builds on its own guesses.
# 3. **`self.rows`** are 6,144 rows of the target's output matrix, those of the most frequent tokens. All 49,152 would cost a fifth of the
#    target's whole step, for each draft. A rare word is then never drafted: that costs speed, and no correctness.
#
# Its keys and values lie in the target's own blocks, as one more layer.

# %% id="eagle"
num_tokens = 24 if lab.fast else 64
EAGLE = {"method": "eagle", "num_speculative_tokens": 3}
talk = workload("chat", 2 if lab.fast else 8)
by_temperature = {}
with LLM(lab.model, speculative_config=EAGLE, num_gpu_blocks_override=257, **settings) as llm:
    for temperature in (0.0, 0.8):
        llm.spec_decode_stats.reset()
        outputs = ask(llm, talk, temperature=temperature, seed=1)
        stats = llm.spec_decode_stats
        by_temperature[temperature] = stats.acceptance, stats.tokens_per_step
        if not temperature:
            paint("a chat, drafts by the EAGLE head", outputs[0], llm.trace)
figure, axes = new_figure(width=6.0, height=2.3)
told = []
for x, ((temperature, (acceptance, tokens)), colour, hatch) in enumerate(
    zip(by_temperature.items(), (BLUE, ORANGE), ("//", ""))
):
    places = [place + 0.36 * (x - 0.5) for place in range(1, 4)]
    name = f"temperature {temperature:g}"
    bars = axes.bar(
        places,
        [100 * a for a in acceptance],
        0.34,
        color=colour,
        hatch=hatch,
        alpha=0.75,
        label=name,
    )
    axes.bar_label(bars, [f"{a:.0%}" for a in acceptance], fontsize=9)
    told.append(
        f"{name}: {', '.join(f'{a:.0%}' for a in acceptance)}; {tokens:.2f} tokens a verification."
    )
axes.set_xticks([1, 2, 3])
axes.set_xlabel("draft")
axes.margins(y=0.15)
axes.set_title("% kept, with all before it", loc="left", fontsize=10)
axes.legend(frameon=False)
show(figure, alt="Share of the EAGLE head's drafts that are kept. " + " ".join(told))
acceptance, tokens = by_temperature[0.0]
print(
    f"greedy: {tokens:.2f} tokens a verification."
    f" Your formula, with the first draft's acceptance for all: {expected_tokens(acceptance[0], 3):.2f}"
)

# %% [markdown] id="batch-text"
# With dice fewer drafts are kept: the target takes the head's one best guess only as often as it gives it probability.
#
# ## Experiment 3 · Why it fades
#
# Now several requests at once. Your formula gets measured numbers: tokens a verification, the time of a draft, and the time of a step that
# verifies, in plain steps. Its forecast stands beside what came out.

# %% id="batch"
num_tokens = 12 if lab.fast else 32
sizes = [1, 4] if lab.fast else [1, 4, 16]
pool = 1 + sizes[-1] * 44


def step_time(steps):
    return statistics.median(step.duration for step in steps)


def compare(plain_llm, llm, prompts):
    """(measured speed-up, forecast, tokens a verification, verify_ratio, cost_ratio) of llm against plain_llm."""
    first, start = len(plain_llm.trace.steps), len(llm.trace.steps)
    rounds = range(1 if lab.fast else 2)
    slow, fast = map(
        max, zip(*[(decode_speed(plain_llm, prompts), decode_speed(llm, prompts)) for _ in rounds])
    )
    stats, n = llm.spec_decode_stats, len(prompts)
    plain_step = step_time(
        s for s in plain_llm.trace.steps[first:] if not s.num_prefill_tokens and len(s.tokens) == n
    )
    checking = [
        s
        for s in llm.trace.steps[start:]
        if not s.num_prefill_tokens and sum(t.num_drafts for t in s.tokens.values()) >= 2 * n
    ]
    draft = stats.draft_s * n / max(1, stats.num_verifications)  # of a step, all its requests
    cost_ratio = draft / 3 / plain_step
    verify_ratio = (step_time(checking) - draft) / plain_step if checking else 1.0
    tokens = stats.tokens_per_step
    return fast / slow, tokens / (3 * cost_ratio + verify_ratio), tokens, verify_ratio, cost_ratio


curves = {"n-gram, repetitive": [], "EAGLE, chat": []}
with (
    LLM(lab.model, num_gpu_blocks_override=pool, **settings) as none,
    LLM(
        lab.model,
        components=parts,
        speculative_config=NGRAM,
        num_gpu_blocks_override=pool,
        **settings,
    ) as ngram,
    LLM(lab.model, speculative_config=EAGLE, num_gpu_blocks_override=pool, **settings) as eagle,
):
    for size in sizes:
        curves["n-gram, repetitive"].append(compare(none, ngram, workload("repetitive", size)))
        curves["EAGLE, chat"].append(compare(none, eagle, workload("chat", size)))
recall("10.p2")
figure, axes = new_figure(width=6.5, height=2.6)
for (name, rows), marker in zip(curves.items(), "os"):
    axes.plot(sizes, [row[0] for row in rows], marker=marker, label=name)
axes.axhline(1, color="black", linestyle=":", linewidth=1)
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, sizes)
axes.set_ylim(0)
axes.set_xlabel("requests at once")
axes.set_title("speed-up against no drafts, k = 3", loc="left", fontsize=10)
axes.legend(frameon=False)
show(
    figure,
    alt="Speed-up against the number of requests at once. "
    + " ".join(
        f"{name}: {', '.join(f'{row[0]:.2f} at {size}' for size, row in zip(sizes, rows))}."
        for name, rows in curves.items()
    ),
)
print(f"{'':20}{'at once':>8}{'tokens':>8}{'verify':>8}{'cost':>8}{'forecast':>10}{'measured':>10}")
for name, rows in curves.items():
    for size, (measured, forecast, tokens, verify, cost) in zip(sizes, rows):
        print(
            f"{name:20}{size:8}{tokens:8.2f}{verify:8.2f}{cost:8.3f}{forecast:10.2f}{measured:10.2f}"
        )

# %% [markdown] id="batch-reading"
# `tokens` hardly moves: a draft is as good in a crowd. What grows is `verify`, and for the head `cost`, since it drafts for all. A lone request
# leaves the arithmetic idle, and drafts use it for nothing; with sixteen, four times the tokens are real work. Nearly four tokens a step can pay
# for that, two cannot. (Lab 00's ridge, once more. A GPU's lies at hundreds of tokens, so there it fades later. But it fades.)
#
# So, where does speculation **lose**?
#
# - **Large batches**: they are for throughput, and wrong drafts spend it.
# - **New text from an n-gram drafter**, and **copies from the EAGLE head**, which was trained on chat answers: on verbatim copies 15 % of its
#   first drafts are right. A drafter guesses what it knows.
# - **High temperature**: less to agree on.
# - **Short answers**: the prompt is not made faster at all.
# - **A drafter that costs**: see the right half of your first plot.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Counting all drafts that agree.** After a wrong one the rows speak about another text.
# - **Forgetting the bonus.** If all drafts are right, the last row is a token for nothing.
# - **Replacing a refused draft by a draw from p.** Fluent, and biased towards the drafter's favourites.
# - **One number for two decisions.** The number that refused a draft is large; using it again draws from the end of the vocabulary.
# - **Naming blocks that hold drafts.** The prefix cache would hand out rejected tokens. Names wait until tokens are certain.
# - **Stopping late.** An end token among accepted drafts ends the answer there.
# - **Measuring one request and serving sixty.** See above.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | Another Python runs the notebook. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` | The kernel was restarted. Run the set-up cell first |
# | `name 'expected_speedup' is not defined` | Run the cell of exercise 10.1, or `skip("10.1")` |
# | "needs 'mixed batches', which your scheduler component ... does not have" | Lab 05's scheduler cannot plan drafts. Lab 06's can, or `use("scheduler", "reference")` |
# | "The drafter ... proposed" | `propose` gave more than `k` ids, or something that is no token id |
# | Not all answers are the same | `use("rejection_sampler", "reference")`, then `use("drafter", "reference")`: whose part is it? |
# | Speed-ups below 1 everywhere | Something else is running. Run the cell again when the machine is quiet |
# | I want to use the debugger | `check("10.4", here=True)` runs in this kernel: put `breakpoint()` into your function |
# | I am stuck | `hint("10.2")`, again for the next one, then `solution("10.2")`. `skip("10.2")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 10.q1}}

# %% id="quiz-10-q1" tags=["nbval-check-output"]
quiz("10.q1", "b")

# %% [markdown] id="quiz-10-q2-text"
# {{question 10.q2}}

# %% id="quiz-10-q2" tags=["nbval-check-output"]
quiz("10.q2", "c")

# %% [markdown] id="quiz-10-q3-text"
# {{question 10.q3}}

# %% id="quiz-10-q3" tags=["nbval-check-output"]
quiz("10.q3", "b")

# %% [markdown] id="quiz-10-q4-text"
# {{question 10.q4}}

# %% id="quiz-10-q4" tags=["nbval-check-output"]
quiz("10.q4", lambda percent: 1 + percent / 100 + (percent / 100) ** 2)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - Drafts are guesses; the target's one step checks all of them. Each step yields at least its own token.
# - The answer is exact: greedy, token for token; with dice, in distribution. A bad drafter costs time, never words.
# - Tokens a verification, cost of a draft, cost of a verification: these three decide, and the last grows with the batch.
# - The best drafter is the one that knows *this* text: copies for n-grams, new words for a model.

# %% [markdown] id="further"
# ## Further learning
#
# - Leviathan et al., *Fast Inference from Transformers via Speculative Decoding* (2023), arXiv:2211.17192, and Chen et al. (2023),
#   arXiv:2302.01318: the method, its proof, and your formula of 10.1.
# - Li et al., *EAGLE* (2024), arXiv:2401.15077, and *EAGLE-3* (2025), arXiv:2503.01840: heads over the target's own states.
# - `minivllm/sampling/rejection.py`: why the engine itself *couples* instead: it draws the target's token, and keeps the draft if it is
#   that. As exact, and a seed then gives the same text with and without drafts.
# - `python -m minivllm.spec_decode.train_eagle` trains a head of your own; `minivllm bench spec` measures it.

# %% [markdown] id="next"
# ## Next: Lab 11, serving
#
# The engine is built: what it computes, how, and how far ahead. It still talks to one Python program. Next it gets a door: HTTP, streams,
# and many clients at once, some of whom hang up in mid-sentence.

# %% id="journey"
journey()
