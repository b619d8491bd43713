# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "05"
#     title: Continuous batching
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 75 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Lab 03 (the static batch) and Lab 04 (paged KV)
#     required: required; the scheduler is the heart of the engine
# ---

# %% [markdown] id="title"
# # Lab 05 · Continuous batching
#
# Lab 03's batch began and ended together: nobody could join it, and whoever was done early sat on in it. Lab 04 made room for
# many requests. Today you write the part that says, before every step, who is in the batch: the scheduler. You decide when a
# request ends, who goes next, and who gives way when memory is full.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("5.1")` gives a hint.

# %% id="setup"
import logging
import random
import statistics
import sys
import time

import torch

import minivllm.core.scheduler
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
from minivllm import EngineConfig, LLM, SamplingParams
from minivllm.attention.contiguous import ContiguousKVCache, forward_batch_with_cache
from minivllm.bench import metrics
from minivllm.bench.replay import replay
from minivllm.bench.workloads import Workload, WorkloadRequest
from minivllm.components import Components
from minivllm.core.engine_core import apply_capabilities
from minivllm.observe.clock import VirtualClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.observe.timeline import alt_text, plot_timeline
from minivllm.sim.echo import EchoExecutor

lab = start("05")

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Count what a static batch throws away.
# - Write a scheduler that decides anew before every step, and say which rules keep it fair.
# - Take memory away from a running request, and bring it back later without losing a token.
# - Measure throughput and waiting against static batches, also where nothing is gained.

# %% [markdown] id="big-idea"
# ## The big idea
#
# A restaurant with eight tables serves in sittings. At seven the doors open, eight parties sit down, the doors close. Most want
# a bowl of soup, one wants nine courses. Seven tables stand empty for hours, and the street is full of hungry people. The next
# restaurant reseats **after every course**: a table that is free gets the next party, whatever the others are eating.
#
# A course is a **step** of the model: one forward pass, one token for everybody who is in it. The host at the door is the
# **scheduler**, and it has two lists:
#
# ```text
# add_request -> waiting --admit--> running --finish--> gone
#                   ^                  |
#                   '----- preempt ----'      its blocks are taken; its tokens stay
# ```
#
# **Where the picture breaks.** A kitchen that cooks for eight works eight times as much as for one. A step does not: reading
# the weights is most of its cost (Lab 00), so an empty seat saves almost nothing. A guest's table does not grow with every
# course; a request's memory does, and when it is full somebody must leave in mid-meal, to eat everything again later. And when
# almost all guests order the same starter, a good kitchen cooks it once: that is Lab 07.

# %% [markdown] id="predict"
# ## Predict first
#
# {{question 5.p1}}

# %% id="predict-5-p1"
predict("5.p1", "some")

# %% [markdown] id="predict-5-p2-text"
# {{question 5.p2}}

# %% id="predict-5-p2"
predict("5.p2", "mean")

# %% [markdown] id="example"
# ## A small example, by hand
#
# Three requests come at the same moment, and two can run at once. Block size 4.
#
# | | prompt tokens | wants | blocks at first |
# |---|---|---|---|
# | A | 5 | 3 tokens | 2 |
# | B | 6 | 6 tokens | 2 |
# | C | 3 | 2 tokens | 1 |
#
# A step computes either whole prompts (each gives its request the first token) or one more token for everybody who runs. Below,
# `p` is a prompt, `d` a decode, and a dot a seat that is taken and idle.

# %% id="example-draw"
from matplotlib.patches import Patch, Rectangle

STATIC = {"A": "pdd...  ", "B": "pddddd  ", "C": "      pd"}
CONTINUOUS = {"A": "pdd    ", "B": "pdd.ddd", "C": "   pd  "}
LOOKS = {
    "p": ("#0072B2", "////", "prompt"),
    "d": ("#E69F00", "", "decode"),
    ".": ("#e4e4e4", "xxxx", "seat taken, no token"),
}


def draw_steps(axes, rows, title):
    """A row for each request, a cell for each step."""
    for y, steps in enumerate(rows.values()):
        for x, kind in enumerate(steps):
            if kind != " ":
                colour, hatch, _ = LOOKS[kind]
                axes.add_patch(
                    Rectangle(
                        (x, y - 0.4), 1, 0.8, facecolor=colour, hatch=hatch, edgecolor="white"
                    )
                )
    axes.set(xlim=(0, 8), ylim=(len(rows) - 0.4, -0.6), xticks=[x + 0.5 for x in range(8)])
    axes.set_xticklabels(range(1, 9))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("step")
    axes.grid(False)
    axes.set_title(title, loc="left", fontsize=10)


figure, (left, right) = new_figure(width=8.0, height=2.0, columns=2)
draw_steps(left, STATIC, "Static: 8 steps")
draw_steps(right, CONTINUOUS, "Continuous: 7 steps")
handles = [
    Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
    for colour, hatch, label in LOOKS.values()
]
figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
show(
    figure,
    alt="Two tables of steps. Static: A and B start in step 1; A is done after step 3 and sits idle until B is done after step 6;"
    " C starts in step 7 and is done in step 8. Continuous: A and B start in step 1, A is done after step 3, C starts in step 4,"
    " where B pauses, and is done in step 5; B is done in step 7.",
)

# %% [markdown] id="example-by-hand"
# Follow the right picture with a finger:
#
# - Step 3 gives A its third token, so A is done. Its two blocks and its seat are free.
# - Step 4 takes C in. Its prompt has the step to itself, and B pauses for it: the price of whole prompts, which Lab 06 gets rid
#   of.
# - Step 6: B has 6 + 4 = 10 tokens with KV after it. When did it need its third block? With its ninth, in step 5.
# - C's first token comes after step 7 on the left, and after step 4 on the right.

# %% [markdown] id="exercise-5-1-text"
# ## Exercise 5.1 · What a static batch throws away
#
# {{exercise 5.1}}
#
# `lengths` are the output tokens that requests want, in the order they came. Static batching takes the first `batch_size` of
# them, computes a token for each row in every step until the *longest* is done, then takes the next `batch_size`. The last
# batch may be smaller; rows that nobody asked for are not there.
#
# A slot is one row in one step. **`wasted_slots(lengths, batch_size)`** returns how many slots, over all batches, hold no token
# that anybody wanted. For `[3, 6, 2]` in batches of two, as above, it is 3. There may be no requests. Leave the list as it is.

# %% id="exercise-5-1" tags=["nbval-check-output"]
from checks import check


def wasted_slots(lengths, batch_size):
    """Slots without a token, over all static batches of requests that want `lengths` output tokens."""
    # BEGIN SOLUTION
    wasted = 0
    for first in range(0, len(lengths), batch_size):
        batch = lengths[first : first + batch_size]
        wasted += max(batch) * len(batch) - sum(batch)
    return wasted
    # END SOLUTION


check("5.1")

# %% [markdown] id="exercise-5-2-text"
# ## Exercise 5.2 · Why a request ends
#
# {{exercise 5.2}}
#
# From here on you write methods of the engine's `Scheduler`. Your class derives from minivllm's, so all that is not in the cell
# is there already: the queues, and the way of a token from the model back to its request.
#
# **`finish_reason(request, token_id)`** is asked after every token. `token_id` has just been appended to the request. It
# returns
#
# - `FinishReason.STOP` if `token_id` is in `request.stop_eos_ids` (the model's own end tokens; empty if the user wants to go on
#   after them) or in `request.stop_token_ids` (the user's);
# - `FinishReason.LENGTH` if the request has all the output tokens it may have: `request.num_output_tokens`, which counts
#   `token_id`, has reached `request.max_tokens` (never `None`);
# - `None` if it goes on.
#
# If both are true, it is `STOP`: the model was done, and the user should hear so. Only say why, and change nothing.

# %% id="exercise-5-2" tags=["nbval-check-output"]
from checks import check
import minivllm.core.scheduler
from minivllm.core.step import FinishReason


class Scheduler(minivllm.core.scheduler.Scheduler):
    def finish_reason(self, request, token_id):
        """Whether the request ends with token_id, which it has just been given, and why."""
        # solution: minivllm.core.scheduler.Scheduler.finish_reason


check("5.2")

# %% [markdown] id="exercise-5-3-text"
# ## Exercise 5.3 · Who is in the next step?
#
# {{exercise 5.3}}
#
# **`schedule()`** plans one step: as many whole prompts as fit, in order of arrival, or, if there is none, one token for
# everybody who runs. Prompts go first, so that empty seats are filled at once.
#
# 1. **Prompts.** Look at the first in line, `self.waiting.peek()`. It computes all its tokens, `request.num_tokens` (of one
#    that was preempted that is more than its prompt). It is taken if fewer than `self.max_num_seqs` run, if the step then has
#    at most `self.max_num_batched_tokens` tokens, and if there is memory, which `admit` finds out. Then the next. The first that
#    does not fit ends it: **nobody overtakes**, or a long prompt would starve.
# 2. **Decodes**, if step 1 took nobody. Each request of the list `self.running` gets 1 token, in order. Where memory is full,
#    `advance` takes it from others, which then are no longer in `self.running`, and whose `status` is no longer
#    `RequestStatus.RUNNING`. They get nothing. Do not change a list while you go through it.
#
# | given | what it does |
# |---|---|
# | `self.open_step()` | a new step with nobody in it: `step.num_scheduled_tokens` is `{}` |
# | `self.waiting` | the queue: `self.waiting.peek()` is the first in line; empty counts as false |
# | `self.admit(step, request, n)` | moves the first in line to `self.running` and puts its `n` tokens into the step. `False`, and nothing happened, if memory is short |
# | `self.advance(step, request, n)` | the same for one that runs; makes room if need be. `False` if it had to give way *itself*: then nobody behind it gets anything either |
# | `self.close_step(step)` | counts the step's tokens as computed, and returns it: return that |
#
# `capabilities` tells the engine what this scheduler can do: not cut prompts, for one. Leave it as it is.

# %% id="exercise-5-3" tags=["nbval-check-output"]
from checks import check
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    """Whole prompts, or a token for everybody."""

    capabilities = frozenset({"stops", "whole prompts", "preemption", "priority"})

    def schedule(self):
        """The next step: whole prompts as long as they fit; if there are none, one token for everybody who runs."""
        # BEGIN SOLUTION
        step = self.open_step()
        budget = self.max_num_batched_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            n = request.num_tokens
            if n > budget or not self.admit(step, request, n):
                break
            budget -= n
        if step.num_scheduled_tokens:
            return self.close_step(step)
        for request in list(self.running):  # a copy: one that gives way leaves self.running
            if request.status is RequestStatus.RUNNING and not self.advance(step, request, 1):
                break
        return self.close_step(step)
        # END SOLUTION


check("5.3")

# %% [markdown] id="exercise-5-4-text"
# ## Exercise 5.4 · Who gives way, and to where?
#
# {{exercise 5.4}}
#
# Memory is handed out token by token, so it can run out while everybody's text grows. `advance` then calls your two methods
# until there is room.
#
# **`pick_victim()`** returns the request of `self.running` that we would serve last. Under `self.policy == "fcfs"` (first come,
# first served) that is the last of the list. Under `"priority"` a *smaller* `priority` is served first, and of equals who came
# first: `request.sort_key` is a tuple that sorts them so.
#
# **`preempt(request)`** takes a running request's memory and makes it wait again. Everybody has to hear of it:
#
# - the pool: `self.kv_cache_manager.free(request)`, first of all, for it still reads `num_computed_tokens`;
# - the queues: out of `self.running`, and to the front of `self.waiting` with `self.waiting.prepend(request)` (a priority
#   queue finds the right place by itself);
# - the request: `status` is `RequestStatus.PREEMPTED`, `num_computed_tokens` 0, `spec_token_ids` `[]` (guesses for a next step,
#   Lab 10), and `num_preemptions` one more. **Its tokens stay**: the user may have read them;
# - the worker: its `request_id` joins the list `self.preempted_req_ids`.

# %% id="exercise-5-4" tags=["nbval-check-output"]
from checks import check
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    def pick_victim(self):
        """Who gives its blocks back: the one we would have served last."""
        # solution: minivllm.core.scheduler.Scheduler.pick_victim

    def preempt(self, request):
        """Its KV goes, its tokens stay, and it waits again, first in line."""
        # solution: minivllm.core.scheduler.Scheduler.preempt


check("5.4")

# %% [markdown] id="replay-text"
# Your answers are a scheduler. Here it plans the example. The echo model stands in for a model: its tokens
# are made from what is read through the block tables, so a wrong slot shows.


# %% id="replay" tags=["nbval-check-output"]
def serve_by_hand(scheduler, requests, blocks=100, **settings):
    """Trace of (prompt tokens, output tokens) requests that all come at once, in blocks of 4."""
    config = EngineConfig(block_size=4, enable_prefix_caching=False, **settings).resolved("cpu")
    engine = RecordingEngineCore(
        config, EchoExecutor(blocks + 1, 4, vocab_size=1000), Components({"scheduler": scheduler})
    )
    asked = [
        WorkloadRequest(None, [100 * i + t for t in range(n)], outputs)
        for i, (n, outputs) in enumerate(requests)
    ]
    return replay(engine, Workload("by hand", 0, asked), clock=VirtualClock())


mine = components()
scheduler = mine.pick("scheduler")  # yours, with minivllm's in the places you skipped
trace = serve_by_hand(
    scheduler, [(5, 3), (6, 6), (3, 2)], max_num_seqs=2, max_num_batched_tokens=16
)
for step in trace.steps:
    told = [
        f"{'ABC'[int(name)]} {'prompt' if t.is_prefill else 'decode'} {t.num_tokens}"
        for name, t in step.tokens.items()
    ]
    ended = ["ABC"[int(name)] for name in step.finished]
    print(
        f"step {step.index + 1}: {', '.join(told):22} {', '.join(ended) + ' is done' if ended else ''}".rstrip()
    )

# %% [markdown] id="plug-in"
# ## Plug it in
#
# The same scheduler, with whatever else you have built so far, under a real model. Look at the log: a scheduler that does
# not say that it can cut prompts (`chunking`) is not asked to. (After Lab 06, `use("scheduler", "5.3")` brings today's back.)

# %% id="plug-in-run"
# one handler, also if this cell runs twice
logging.getLogger("minivllm").handlers = [logging.StreamHandler(sys.stdout)]
logging.getLogger("minivllm").setLevel(logging.INFO)

print("\n".join(line for line in mine.describe().splitlines() if line.split()[0] in mine))
questions = [
    "Why is the sky blue?",
    "Name three colours.",
    "What does a scheduler do?",
    "Say hello in French.",
    "Count to five.",
]
chats = [[{"role": "user", "content": question}] for question in questions]
params = SamplingParams(temperature=0, max_tokens=12 if lab.fast else 40)
settings = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 129,
    "max_num_seqs": 3,
}
with LLM(lab.model, components=mine, **settings) as llm:
    answers = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
logging.getLogger("minivllm").setLevel(logging.WARNING)
for question, answer in zip(questions, answers):
    print(f"\n{question} ({answer.finish_reason})\n  {answer.text.strip()}")

# %% [markdown] id="plug-in-same-text"
# A scheduler decides when something is said, never what. Does minivllm's say the same?

# %% id="plug-in-same"
with LLM(lab.model, **settings) as llm:
    expected = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
same = sum(answer.token_ids == other.token_ids for answer, other in zip(answers, expected))
print(f"{same} of {len(answers)} answers are the same, token for token")

# %% [markdown] id="plug-in-refused-text"
# What your scheduler cannot do is switched off if nobody asked for it. Somebody who does is told no, by name:

# %% id="plug-in-refused"
try:
    apply_capabilities(EngineConfig(enable_chunked_prefill=True), mine)
except ValueError as error:
    print(error)

# %% [markdown] id="plug-in-diff"
# And what you changed in the engine's file ("+" lines are yours, "-" lines minivllm's).

# %% id="plug-in-show-diff"
show_diff("core/scheduler.py")

# %% [markdown] id="experiment"
# ## Experiment 1 · The same queue, three ways
#
# A queue of requests, all there from the start: short prompts, and answers of which most are short and a few long. Eight may run
# at once. We serve it
#
# 1. as Lab 03 did: pad the prompts, decode until the longest is done, answer all, next batch;
# 2. with today's engine and a **static** scheduler, which lets nobody in while anybody runs. It is kinder than Lab 03: nothing
#    is padded, and finished requests leave the batch. What is left is the idea of static batching, and nothing else;
# 3. with today's engine and **your** scheduler.


# %% id="experiment-requests"
def make_requests(count, longest, seed=1):
    """Prompts of 8 to 40 tokens; answers of 3 to `longest` tokens, most of them short."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(100, 10000) for _ in range(rng.randint(8, 40))]
        wanted = min(longest, max(3, int(rng.lognormvariate(2.0, 1.4))))
        requests.append(WorkloadRequest(None, prompt, wanted, group=str(i)))
    return Workload("mixed lengths", seed, requests)


work = make_requests(24, 48) if lab.fast else make_requests(40, 120)
lengths = [request.max_tokens for request in work.requests]
wasted = wasted_slots(lengths, 8)
bound = (sum(lengths) + wasted) / sum(lengths)
print(
    f"{len(lengths)} requests want {sum(lengths)} tokens: {min(lengths)} to {max(lengths)} each, {statistics.median(lengths):g} in the middle"
)
print(
    f"static batches of 8 waste {wasted} slots of {wasted + sum(lengths)}, so at most {bound:.1f} times can be won"
)

# %% id="experiment-serve"
dtype = str(lab.dtype).removeprefix("torch.")


class StaticScheduler(minivllm.core.scheduler.Scheduler):
    """Nobody starts while anybody who has started before is still running."""

    def next_in_line(self):
        is_under_way = any(request.num_output_tokens for request in self.running)
        return None if is_under_way else super().next_in_line()


def serve(scheduler, *workloads):
    """A trace of each workload in an engine with this scheduler; all else is minivllm's."""
    settings = {
        "max_num_seqs": 8,
        "max_model_len": 512,
        "num_gpu_blocks_override": 300,
        "dtype": dtype,
    }
    with LLM(lab.model, components={"scheduler": scheduler}, trace=True, **settings) as llm:
        return [replay(llm, workload) for workload in workloads]


need("3.3")  # left_pad, of Lab 03
config = lab.load_decoder().config


def lab_03(workload):
    """Lab 03's loop. Returns the seconds until each request had its answer."""
    decoder, waits, started = lab.load_decoder(), [], time.perf_counter()
    for first in range(0, len(workload), 8):
        batch = workload.requests[first : first + 8]
        padded = left_pad([request.prompt_token_ids for request in batch])  # noqa: F821 (yours: need() brought it)
        token_ids, mask, positions = (x.to(lab.device) for x in padded)
        longest = max(request.max_tokens for request in batch)
        heads = len(batch) * config.num_kv_heads
        room = token_ids.shape[1] + longest
        cache = ContiguousKVCache(
            config.num_layers, room, heads, config.head_dim, dtype=lab.dtype, device=lab.device
        )
        newest = token_ids
        for _ in range(longest):
            newest = forward_batch_with_cache(decoder, newest, positions, mask, cache).argmax(
                -1, keepdim=True
            )
            newest.tolist()  # the tokens go out, and a GPU is waited for
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(newest, dtype=torch.bool)], dim=1)
        waits += [time.perf_counter() - started] * len(batch)
    return waits


waits = lab_03(work)
(static,), (continuous,) = serve(StaticScheduler, work), serve(scheduler, work)
results = {
    "Lab 03's static batch": (sum(lengths) / max(waits), metrics.summarize(waits)),
    "static, in the engine": (
        metrics.output_throughput(static),
        metrics.summarize(metrics.e2e(static)),
    ),
    "continuous, yours": (
        metrics.output_throughput(continuous),
        metrics.summarize(metrics.e2e(continuous)),
    ),
}
for name, (speed, wait) in results.items():
    print(f"{name:22} {speed:6.1f} tokens/s   wait: mean {wait.mean:5.2f} s, p99 {wait.p99:5.2f} s")

# %% id="experiment-plot"
recall("5.p1")
recall("5.p2")
figure, three = new_figure(width=8.0, height=2.6, columns=3)
values = {
    "tokens per second": [speed for speed, _ in results.values()],
    "mean wait, s": [wait.mean for _, wait in results.values()],
    "p99 wait, s": [wait.p99 for _, wait in results.values()],
}
for axes, (title, bars) in zip(three, values.items()):
    drawn = axes.bar(
        ["Lab 03", "static", "yours"],
        bars,
        color=["#CC79A7", "#E69F00", "#0072B2"],
        hatch=["..", "//", ""],
    )
    axes.bar_label(drawn, fmt="%.3g")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylim(0, 1.18 * max(bars))
show(
    figure,
    alt="Three bar charts of Lab 03's batch, the static scheduler, and yours. "
    + "; ".join(
        f"{title}: " + ", ".join(f"{value:.3g}" for value in bars) for title, bars in values.items()
    )
    + ".",
)
gain = {
    title: bars[2] / bars[1] if "second" in title else bars[1] / bars[2]
    for title, bars in values.items()
}
print(
    f"Yours against static, in the same engine: {gain['tokens per second']:.1f} times the throughput,",
    end=" ",
)
print(
    f"a mean wait {gain['mean wait, s']:.1f} times as short, a p99 wait {gain['p99 wait, s']:.1f} times as short."
)
if gain["tokens per second"] < 3:
    print(f"More than {bound:.1f} times was not to be had: that is what the static batches waste.")

# %% [markdown] id="experiment-twins-text"
# ## Experiment 2 · Twins
#
# The same requests, a lane each, in the order they came; the same clock on both pictures. Both are drawn from what the engine
# recorded in the run you just did.

# %% id="experiment-twins"
from matplotlib.figure import Figure

figure = Figure(figsize=(8.0, 1.2 + 0.19 * len(lengths)), layout="constrained")
above, below = figure.subplots(2, 1, sharex=True)
for axes, name, trace in ((above, "Static", static), (below, "Continuous", continuous)):
    plot_timeline(trace, axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks([])
    axes.set_ylabel(f"{name}\n{len(lengths)} requests")
below.get_legend().remove()
above.set_xlabel("")
below.set_xlim(0, 1.02 * max(static.duration, continuous.duration))
show(
    figure,
    alt=f"Static: {alt_text(plot_timeline, static)} Continuous, on the same time axis: {alt_text(plot_timeline, continuous)}",
)

# %% [markdown] id="experiment-twins-reading"
# Above, nobody begins before the longest of a batch is done, and the short ones ended long ago. Below, a lane begins where
# another ends, and the picture is a dense band. The white to the right of it is the time you saved.
#
# Look for the thin gaps in the lower lanes too. There, somebody's prompt has the step for itself, and everybody else pauses.
# Lab 06 sends a long one.

# %% [markdown] id="experiment-where-not-text"
# ## Experiment 3 · Where it does not help
#
# If all want the same number of tokens, a static batch wastes nothing. And if requests come one at a time, there is no batch.

# %% id="experiment-where-not"
rng = random.Random(5)
equal = Workload(
    "equal lengths",
    5,
    [
        WorkloadRequest(None, [rng.randrange(100, 10000) for _ in range(16)], 8 if lab.fast else 24)
        for _ in range(16)
    ],
)
alone = Workload("alone", 5, equal.requests[:1])
print(
    f"wasted, if all are equal: {wasted_slots([request.max_tokens for request in equal.requests], 8)} slots"
)
before, after = (
    map(metrics.output_throughput, serve(which, equal, alone))
    for which in (StaticScheduler, scheduler)
)
for name, old, new in zip(("16 of equal length", "one alone"), before, after):
    print(f"{name:20} static {old:6.1f} tokens/s, yours {new:6.1f}: {new / old:.2f} times")
speed_alone = new


# %% [markdown] id="experiment-preempt-text"
# ## Experiment 4 · Too little memory
#
# Six requests, and a pool of 14 blocks of 4: enough for all prompts, not for all answers. The echo model again, so that every
# lost or misplaced token would show.

# %% id="experiment-preempt"
asked = [(6, 14), (7, 12), (5, 15), (9, 10), (4, 12), (8, 9)]
tight = serve_by_hand(
    scheduler, asked, blocks=14, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=56
)
roomy = serve_by_hand(
    scheduler, asked, blocks=100, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=56
)


def tokens_of(trace):
    return {
        name: [token for step in trace.steps for token in step.sampled.get(name, [])]
        for name in trace.requests
    }


print(
    f"14 blocks:  {len(tight.steps)} steps, {metrics.num_preemptions(tight)} preemptions, {metrics.num_recomputed_tokens(tight)} tokens computed again"
)
print(f"100 blocks: {len(roomy.steps)} steps, {metrics.num_preemptions(roomy)} preemptions")
print("the same tokens:", tokens_of(tight) == tokens_of(roomy))
axes = plot_timeline(tight, x="step")
axes.set_title("")
show(axes.figure, alt=alt_text(plot_timeline, tight))

# %% [markdown] id="experiment-preempt-reading"
# The crosses are your `preempt`. The one who came last gives way, and comes back before anybody who came later. It pays with
# a prefill over all it had, and its user with a pause. The texts are the same to the last token. In production, many
# preemptions are a sign that more requests are let in than memory can carry.

# %% id="experiment-save"
save_result(
    "05",
    tokens_per_second=results["continuous, yours"][0],
    what=f"continuous batching, {len(lengths)} requests of mixed lengths",
    requests=len(lengths),
    alone=speed_alone,
    data={
        "device": lab.device,
        "dtype": dtype,
        "model": lab.model,
        "results": {name: [speed, wait.mean, wait.p99] for name, (speed, wait) in results.items()},
    },
)

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Letting the next one overtake, because it fits.** Throughput looks fine, and a long prompt in front is never served.
# - **Counting the prompt only, when a request comes back.** It has outputs by now, whose keys and values are gone too.
# - **Changing the list you go through.** A preemption takes a request out of `self.running`, everybody behind moves up, and one
#   is passed over. Under FCFS victims stand at the end, so tests pass; under priorities they fail.
# - **Preempting the first of the list.** The one who is served first must never be a victim beside others: that is what makes
#   progress certain.
# - **Dropping a victim's tokens.** With sampling, other ones would come, and the user has read the first.
# - **Forgetting the worker.** It keeps rows and block tables of its own, and would go on reading blocks that are another's.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` | The kernel was restarted. Run the set-up cell first |
# | `name 'wasted_slots' is not defined` (or `scheduler`) | Run the cell of exercise 5.1, or `skip("5.1")`; `scheduler` is made by the cell below exercise 5.4 |
# | "... is in this step twice" | It got a decode token in the step that took it in. Decodes are for steps without prompts |
# | "admit() got 'C'; 'B' is next in line" | `admit` takes the first in line only. Stop at the first that does not fit |
# | "did not come back within ..." | A `while` loop without a `break`: what changes if the first in line does not fit? |
# | "my_engine keeps the reference" | Your method uses an attribute that only your class has. Keep to what the exercise names |
# | `name 'results' is not defined` (or `static`) | Pass Lab 03's exercise 3.3, or `skip("3.3")`, and run the cell with `need("3.3")` again |
# | Not all answers are the same | `use("scheduler", "reference")` takes minivllm's scheduler. Same answers now? Then look for the token that was lost in `preempt` |
# | I want to use the debugger | `check("5.3", here=True)` runs in this kernel: put `breakpoint()` into your method |
# | I am stuck | `hint("5.3")`, again for the next one, then `solution("5.3")`. `skip("5.3")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 5.q1}}

# %% id="quiz-5-q1" tags=["nbval-check-output"]
quiz("5.q1", "c")

# %% [markdown] id="quiz-5-q2-text"
# {{question 5.q2}}

# %% id="quiz-5-q2" tags=["nbval-check-output"]
quiz("5.q2", "b")

# %% [markdown] id="quiz-5-q3-text"
# {{question 5.q3}}

# %% id="quiz-5-q3" tags=["nbval-check-output"]
quiz("5.q3", "a")

# %% [markdown] id="quiz-5-q4-text"
# {{question 5.q4}}

# %% id="quiz-5-q4" tags=["nbval-check-output"]
quiz("5.q4", lambda rows, short, long: (rows - 1) * (long - short))

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - The batch is decided anew before every step. A finished request leaves after its last token, and the next one sits down.
# - What is won is what static batches wasted: much where lengths differ, nothing where they are equal or the queue is empty.
# - Two lists and three rules: first come, first served; nobody overtakes; whoever was served last gives way, and comes back first.
# - A preempted request loses its keys and values and keeps its tokens. It computes them again, in one pass.

# %% [markdown] id="further"
# ## Further learning
#
# - Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI 2022): where deciding before
#   every iteration comes from. Its "selective batching" is what Lab 04's flat batch does.
# - Kwon et al., *PagedAttention* (2023), arXiv:2309.06180, section 4.5: preemption, by recomputing and by swapping.
# - Sheng et al., *Fairness in Serving Large Language Models* (2024), arXiv:2401.00588: other ideas of fairness.
# - `minivllm/core/request_queue.py`: a queue in which ten thousand wait, and a request can be aborted in its middle.

# %% [markdown] id="next"
# ## Next: Lab 06, chunked prefill and the token budget
#
# A prompt still goes in whole, and everybody pauses for it. Send one of a thousand tokens while eight people are reading along,
# and all eight see their text stop. The cure is to forget that there are prompts and decodes at all.

# %% id="journey"
journey()
