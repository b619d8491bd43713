# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "06"
#     title: Chunked prefill and the token budget
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 60 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Lab 05 (continuous batching)
#     required: required
# ---

# %% [markdown] id="title"
# # Lab 06 · Chunked prefill and the token budget
#
# Lab 05's scheduler keeps every seat filled, and when a long prompt comes in, everybody's text stops until it is through. Today
# you cut prompts into pieces and let them ride along with the decodes. It takes one idea, and the idea makes the scheduler
# shorter.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("6.1")` gives a hint.

# %% id="setup"
import ast
import difflib
import inspect
import logging
import random
import statistics
import sys
import textwrap

import numpy as np

import minivllm.core.scheduler
from checks import (
    answer_text,
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
    skip,
    solution,
    start,
    use,
)
from minivllm import EngineConfig, LLM, SamplingParams
from minivllm.bench import metrics
from minivllm.bench.replay import replay
from minivllm.bench.workloads import Workload, WorkloadRequest
from minivllm.components import Components
from minivllm.core.request import RequestStatus
from minivllm.observe.clock import VirtualClock
from minivllm.observe.recorder import RecordingEngineCore
from minivllm.observe.timeline import alt_text, plot_budget
from minivllm.sim.echo import EchoExecutor
from minivllm.worker.input_batch import slot_mapping

lab = start("06")

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Say what a token budget caps, and what it costs to lower it.
# - Write a scheduler that knows no phases: every request lacks some tokens, and gets as many as the budget holds.
# - Lay decodes and pieces of prompts end to end in one batch, and describe it to attention with four arrays.
# - Measure whom a long prompt keeps waiting, and choose a budget.

# %% [markdown] id="big-idea"
# ## The big idea
#
# Eight people stand at a supermarket till, each with one item, again and again: they pay, fetch the next, come back. Then
# somebody arrives with a trolley of a thousand. If the trolley is rung up in one go, the eight wait for minutes. So the cashier
# makes a rule: **at most 64 items a round**. The eight come first, one item each; what is left of the 64 goes to the trolley.
# Every round is short, everybody moves, and the trolley gets through too.
#
# A round is a step, and the 64 is the **token budget**, `max_num_batched_tokens`. Behind the rule is a thought that is larger
# than the rule: **there is no prefill phase and no decode phase**. Every request has `num_computed_tokens`, chasing the tokens
# it has:
#
# ```text
# a decode          t t t t t t t t t|t          lacks 1
# a new prompt     |t t t t t t t t t t          lacks 10
# half a prompt     t t t t t t|t t t t          lacks 4
# back after a preemption      |t t t t t t t t  lacks 8
# ```
#
# One rule covers all: give each what it lacks, as far as the budget goes.
#
# **Where the picture breaks.** Ringing up 8 items takes an eighth of the time of 64. A step does not shrink like that: it reads
# all the weights, however few its tokens are (Lab 00). So very small budgets buy nothing, and a prompt that needs many steps
# pays that price many times. And a late piece of a prompt is dearer than an early one: its attention looks back at all the
# pieces before it.

# %% [markdown] id="predict"
# ## Predict first
#
# Two commitments. You will meet each again beside its plot.
#
# {{question 6.p1}}

# %% id="predict-6-p1"
predict("6.p1", "trade")

# %% [markdown] id="predict-6-p2-text"
# {{question 6.p2}}

# %% id="predict-6-p2"
predict("6.p2", "little")

# %% [markdown] id="example"
# ## A small example, by hand
#
# Block size 4, a budget of 8 tokens. A decodes: it has 6 tokens, of which 5 are computed. B (10 prompt tokens) and C (3) wait,
# in that order.
#
# | step | A | B | C | tokens | what happens |
# |---|---|---|---|---|---|
# | 1 | 1 | 7 | - | 8 | A comes first. B lacks 10 and gets the 7 that are left. C waits |
# | 2 | 1 | 3 | 3 | 7 | B's prompt is complete: its first token comes out of this step. C fits too |
# | 3 | 1 | 1 | 1 | 3 | three decodes |
#
# A got a token in every step. In Lab 05 it would have paused. And in step 2 one forward pass holds a decode, half a prompt and
# a whole one, end to end, with no padding:
#
# ```text
#                    A | B      | C
# token of the batch 0 | 1 2  3 | 4 5 6
# position           6 | 7 8  9 | 0 1 2
# query_start_loc   [0,  1,       4,      7]     where each row begins, and the end
# seq_lens          [7,  10,      3]             tokens each sequence has after the step
# ```
#
# Check by hand: B computed 7 tokens in step 1, positions 0 to 6. If its block table is `[7, 2, 4]`, its three tokens of step 2
# go to slots 2 * 4 + 3 = 11, 4 * 4 + 0 = 16 and 17.

# %% [markdown] id="exercise-6-1-text"
# ## Exercise 6.1 · How many tokens?
#
# {{exercise 6.1}}
#
# **`num_new_tokens(request, budget, num_cached_tokens=0)`** returns how many tokens the request computes in the next step; 0
# means "not in this one". `num_cached_tokens` were found in the prefix cache for a request that waits (Lab 07; 0 until then),
# and count as computed: `num_computed = request.num_computed_tokens + num_cached_tokens`.
#
# 1. It lacks `request.num_tokens_with_spec + request.num_output_placeholders - num_computed`. (The first is its tokens and its
#    drafts, Lab 10; the second counts tokens in flight. Today both add nothing.)
# 2. If `self.long_prefill_token_threshold` is above 0 and it lacks more than that, it gets only that many: so that several
#    long prompts share a step. Not if it is alone (`len(self.requests)` is 1).
# 3. The token at the last position, `self.max_model_len - 1`, is sampled and never computed: `self.max_model_len - 1 -
#    num_computed` at most.
# 4. If chunks are switched off (`self.chunked_prefill` is `False`) and the budget is smaller than the *tokens* it lacks
#    (`request.num_tokens - num_computed`; drafts may be cut), it gets 0: a prompt goes in whole or not at all.
# 5. `budget` at most.

# %% id="exercise-6-1" tags=["nbval-check-output"]
from checks import check
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def num_new_tokens(self, request, budget, num_cached_tokens=0):
        """How many tokens the request computes in this step: all it lacks, within the limits."""
        # solution: minivllm.core.scheduler.Scheduler.num_new_tokens


check("6.1")

# %% [markdown] id="exercise-6-2-text"
# ## Exercise 6.2 · One schedule for all
#
# {{exercise 6.2}}
#
# **`schedule()`** again, with no phases. Your `num_new_tokens` does the counting.
#
# 1. **Those who run**, in order, get what they lack within the budget that is left. One that lacks nothing just now (its token is in
#    flight) is no reason to stop: the next may lack something. If `advance` says `False`, the loop ends.
# 2. **Those who wait**, in order, within the budget that is left. The first that gets no token, or no room, ends it: nobody
#    overtakes.
#
# | given | what it does |
# |---|---|
# | `self.open_step()`, `self.close_step(step)` | as in Lab 05: a new step; return the closed one |
# | `self.budget_left(step)` | tokens the step may still compute. (A victim that is taken out of it gives its own back) |
# | `self.running_in_order()` | goes through those who run; one that gives way meanwhile is passed over |
# | `self.advance(step, request, n)` | as in Lab 05, for any `n` of 1 or more |
# | `self.next_in_line()` | the waiting request whose turn it is, or `None`: nobody waits, all seats are taken, or somebody had to give way in this very step |
# | `self.kv_cache_manager.get_computed_blocks(request)` | `(hits, num_cached_tokens)`: what the prefix cache has of a waiting request. Lab 07 fills it; until then `([], 0)` |
# | `self.admit(step, request, n, hits, num_cached_tokens)` | lets it start with `n` tokens, on top of the hits. `False`, and nothing happened, without room for **all** its tokens: else two long prompts could start on half the pool each, and take it from one another for ever |

# %% id="exercise-6-2" tags=["nbval-check-output"]
from checks import check
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def schedule(self):
        """The next step: all that each request lacks, under one budget; those who run come first."""
        # solution: minivllm.core.scheduler.Scheduler.schedule


check("6.2")

# %% [markdown] id="shorter-text"
# ## It got shorter
#
# The obvious way to add chunks to Lab 05's scheduler is a third kind of request, the half-computed prompt, and a loop for it.
# Here it is, and it works. Compare three versions of `schedule`: Lab 05's, the obvious one, and yours. The pauses are those of
# eight requests that decode while a prompt of 512 tokens comes in (the echo model, and a clock that says a step takes 10 ms
# and 0.1 ms for each token).


# %% id="shorter"
class PhasedScheduler(minivllm.core.scheduler.Scheduler):
    """Lab 05's phases, and one more."""

    def schedule(self):
        step = self.open_step()
        budget = self.max_num_batched_tokens
        for request in list(self.running):  # prompts that were begun go on
            n = min(request.num_tokens - request.num_computed_tokens, budget)
            if request.status is not RequestStatus.RUNNING or n < 2:
                continue
            if not self.advance(step, request, n):
                break
            budget -= n
        while self.waiting and budget and not self.preempted_req_ids:  # new ones begin
            request = self.waiting.peek()
            n = min(request.num_tokens, budget)
            if len(self.running) == self.max_num_seqs or not self.admit(step, request, n):
                break
            budget -= n
        if step.num_scheduled_tokens:
            return self.close_step(step)
        for request in list(self.running):  # nothing of the kind: a token for everybody
            if request.status is not RequestStatus.RUNNING:
                continue
            if not self.advance(step, request, 1):
                break
        return self.close_step(step)


def class_of(text):
    """The scheduler that a cell defines."""
    space = {}
    exec(text, space)
    return space["Scheduler"]


def statements(text):
    """The lines of schedule(), without comments and docstring."""
    function = next(
        node
        for node in ast.walk(ast.parse(textwrap.dedent(text)))
        if isinstance(node, ast.FunctionDef) and node.name == "schedule"
    )
    body = [
        node
        for node in function.body
        if ast.get_docstring(function) is None or node is not function.body[0]
    ]
    return ast.unparse(ast.Module(body, [])).splitlines()


def worst_pause(scheduler, budget, **settings):
    """The longest ITL in ms of eight requests that decode while a long prompt comes in."""
    config = EngineConfig(
        max_num_batched_tokens=budget, max_num_seqs=16, max_model_len=640, **settings
    )
    engine = RecordingEngineCore(
        config.resolved("cpu"), EchoExecutor(400, 16), Components({"scheduler": scheduler})
    )
    asked = [WorkloadRequest(None, [i] * 16, 64, group="reader") for i in range(8)]
    asked.append(WorkloadRequest(None, [9] * 512, 4, arrival_s=0.2, group="long"))
    trace = replay(engine, Workload("a long prompt", 0, asked), clock=VirtualClock())
    return 1000 * max(metrics.itl(metrics.select(trace, group="reader")))


texts = {
    "Lab 05: whole prompts, phases": answer_text("5.3"),
    "with chunks, in phases": inspect.getsource(PhasedScheduler.schedule),
    "yours, unified": answer_text("6.2"),
}
lab_05 = class_of(answer_text("5.3"))
unified = components().pick("scheduler")
pauses = [worst_pause(lab_05, 640), worst_pause(PhasedScheduler, 64), worst_pause(unified, 64)]
for (name, text), pause in zip(texts.items(), pauses):
    print(f"{name:30} {len(statements(text)):3} lines, worst pause {pause:5.1f} ms")

# %% [markdown] id="shorter-reading"
# Look at the middle line. Chunks alone made it worse: prompts still had steps of their own, more of them, and the eight waited
# for all. The gain comes from **mixing**, and mixing made the phases go away. (The counting went into `num_new_tokens`, where one
# rule serves all kinds; going through the lists safely went into two given helpers.) From Lab 05 to today:

# %% id="shorter-diff"
before, after = (
    statements(texts["Lab 05: whole prompts, phases"]),
    statements(texts["yours, unified"]),
)
print("\n".join(list(difflib.unified_diff(before, after, "Lab 05", "Lab 06", lineterm="", n=1))))

# %% [markdown] id="exercise-6-3-text"
# ## Exercise 6.3 · One batch for all
#
# {{exercise 6.3}}
#
# The scheduler says `{A: 1, B: 3, C: 3}`. The worker has to turn that into flat arrays, as in the picture above.
#
# **`build_metadata(num_computed_tokens, num_scheduled_tokens, block_tables, block_size, map_slots)`** gets three NumPy arrays
# for `B` rows: how many tokens of each were computed before this step and how many are in it (int64 `[B]`), and their block
# tables (`[B, M]`, 0 behind a row's blocks). It returns four integer arrays, in this order:
#
# - `query_start_loc` `[B + 1]`: where each row's tokens begin in the batch, and at the end the number of all tokens;
# - `seq_lens` `[B]`: how many tokens each sequence has computed after the step;
# - `positions` `[T]`: each token's position in its own sequence;
# - `slots` `[T]`: the cache slot where each token's key and value go. `map_slots(positions, block_table, block_size)` is your
#   exercise 4.3, for one sequence.
#
# A loop over rows is fine; no loop over tokens is needed. Leave the inputs as they are.

# %% id="exercise-6-3" tags=["nbval-check-output"]
from checks import check
import numpy as np


def build_metadata(num_computed_tokens, num_scheduled_tokens, block_tables, block_size, map_slots):
    """query_start_loc [B + 1], seq_lens [B], positions [T] and slots [T] of a step's batch."""
    # solution: minivllm.worker.input_batch.build_metadata


check("6.3")

# %% [markdown] id="metadata-text"
# Step 2 of the example, by your function (A's blocks are `[5, 3]`, B's `[7, 2, 4]`, C's `[6]`):

# %% id="metadata" tags=["nbval-check-output"]
need("6.3")
tables = np.array([[5, 3, 0], [7, 2, 4], [6, 0, 0]])
arrays = build_metadata(np.array([6, 7, 0]), np.array([1, 3, 3]), tables, 4, slot_mapping)
for name, array in zip(("query_start_loc", "seq_lens", "positions", "slots"), arrays):
    print(f"{name:16} {array.tolist()}")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# Your scheduler under a real model, with a budget of 16 tokens a step: the prompts below are longer, so each is cut. The text
# must not change by that.

# %% id="plug-in-run"
# one handler, also if this cell runs twice
logging.getLogger("minivllm").handlers = [logging.StreamHandler(sys.stdout)]
logging.getLogger("minivllm").setLevel(logging.WARNING)

mine = components()
print("\n".join(line for line in mine.describe().splitlines() if line.split()[0] in mine))
questions = [
    "Why is the sky blue?",
    "Name three colours.",
    "What is a supermarket?",
    "Say hello in French.",
]
chats = [[{"role": "user", "content": question}] for question in questions]
params = SamplingParams(temperature=0, max_tokens=10 if lab.fast else 30)
settings = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 129}
tokens = {}
for name, parts, budget in (
    ("yours, 16 tokens a step", mine, 16),
    ("minivllm's, 1024", None, 1024),
):
    with LLM(
        lab.model, components=parts, max_num_batched_tokens=budget, trace=True, **settings
    ) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
        most = max(step.num_tokens for step in llm.trace.steps)
        mixed = sum(0 < step.num_prefill_tokens < step.num_tokens for step in llm.trace.steps)
        print(
            f"{name}: {len(llm.trace.steps)} steps of at most {most} tokens, {mixed} of them mixed"
        )
    tokens[name] = [output.outputs[0].token_ids for output in outputs]
one, other = tokens.values()
print(
    f"{sum(a == b for a, b in zip(one, other))} of {len(one)} answers are the same, token for token"
)

# %% [markdown] id="experiment"
# ## Experiment 1 · A long prompt lands
#
# Eight requests decode: eight people read along as their text appears. Then a long prompt arrives. With the prompt in one
# piece, and with three smaller budgets, we watch the eight (the time between their tokens, **ITL**) and the newcomer (its
# **TTFT**). The scheduler is yours; all else is minivllm's.


# %% id="experiment-run"
READERS = 8


def prompt_of(rng, length):
    return [rng.randrange(100, 10000) for _ in range(length)]


def long_prompt_lands(budget, length, num_new):
    """The trace of eight readers and a long prompt. budget None: prompts go in whole."""
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2 * length}
    chunks = {"max_num_batched_tokens": budget}
    settings = {
        "max_num_seqs": READERS + 1,
        "max_model_len": 2 * length,
        "enable_prefix_caching": False,
    }
    settings |= {
        "dtype": str(lab.dtype).removeprefix("torch."),
        "trace": True,
        "kv_cache_memory_bytes": 512 << 20,
    }
    rng = random.Random(6)
    readers = [
        WorkloadRequest(None, prompt_of(rng, 16), num_new, group="reader") for _ in range(READERS)
    ]
    newcomer = WorkloadRequest(None, prompt_of(rng, length), 2, group="long")
    parts = {"scheduler": unified}
    with LLM(
        lab.model, components=parts, **(whole if budget is None else chunks), **settings
    ) as llm:
        short = [WorkloadRequest(None, r.prompt_token_ids, 12, group="reader") for r in readers]
        replay(llm, Workload("warm up", 6, [newcomer]))
        newcomer.arrival_s = replay(llm, Workload("readers alone", 6, short)).duration
        return replay(llm, Workload("a long prompt lands", 6, [*readers, newcomer]))


def pauses_of(trace):
    """Milliseconds between two tokens of a reader, and the newcomer's TTFT."""
    gaps = [1000 * gap for gap in metrics.itl(metrics.select(trace, group="reader"))]
    return gaps, 1000 * metrics.ttft(metrics.select(trace, group="long"))[0]


length = 512 if lab.fast else 1024
while True:
    num_new = 16 + length // 16
    whole = long_prompt_lands(None, length, num_new)
    gaps, _ = pauses_of(whole)
    visible = max(gaps) / statistics.median(gaps)
    print(
        f"a prompt of {length} tokens, whole: a pause of {max(gaps):.0f} ms, {visible:.1f} times the usual one"
    )
    if visible > 5 or length >= 4096:
        break
    length *= 2  # on a device this fast the pause can hardly be seen: a longer prompt
budgets = {"whole": None, "512": 512, "128": 128, "32": 32}
if length <= 512:
    budgets = {"whole": None, "256": 256, "128": 128, "32": 32}
traces = {
    name: whole if b is None else long_prompt_lands(b, length, num_new)
    for name, b in budgets.items()
}
rows = {}
for name, trace in traces.items():
    gaps, ttft = pauses_of(trace)
    rows[name] = {"worst": max(gaps), "usual": statistics.median(gaps), "ttft": ttft}
    print(
        f"budget {name:5}: readers' worst ITL {max(gaps):6.1f} ms, usual {rows[name]['usual']:5.1f} ms; the long prompt's TTFT {ttft:6.1f} ms"
    )

# %% [markdown] id="experiment-spikes-text"
# Every dot below is a token of a reader: when it came, and how long its reader had waited for it. (All eight get theirs in the
# same steps, so eight dots lie on one another.) Left and right are the same requests on the same machine; one number was changed.

# %% id="experiment-spikes"
recall("6.p1")
best = min(rows, key=lambda name: rows[name]["worst"])
figure, both = new_figure(width=8.0, height=3.0, columns=2)
highest = 1.15 * max(row["worst"] for row in rows.values())
for axes, name in zip(both, ("whole", best)):
    trace = traces[name]
    for request in metrics.select(trace, group="reader"):
        axes.plot(
            request.token_times[1:],
            [1000 * gap for gap in request.itl],
            ".",
            markersize=4,
            color="#0072B2",
        )
    (newcomer,) = metrics.select(trace, group="long")
    axes.axvspan(
        newcomer.arrival, newcomer.first_token, color="#E69F00", alpha=0.25, hatch="//", linewidth=0
    )
    axes.set(ylim=(0, highest), xlabel="time (s)")
    axes.set_title(
        f"{'Whole prompt' if name == 'whole' else f'Budget {name}'}: worst {rows[name]['worst']:.0f} ms",
        loc="left",
        fontsize=10,
    )
both[0].set_ylabel("ms since the reader's last token")
show(
    figure,
    alt="Two scatter plots of the time between tokens of eight readers, on the same scale. The shaded stretch is the time from the"
    f" long prompt's arrival to its first token. Whole prompt: dots at about {rows['whole']['usual']:.0f} ms and a spike of"
    f" {rows['whole']['worst']:.0f} ms. Budget {best}: no spike, at most {rows[best]['worst']:.0f} ms, and the shaded stretch is"
    f" {rows[best]['ttft'] / rows['whole']['ttft']:.1f} times as long.",
)
ratio = rows["whole"]["worst"] / rows[best]["worst"]
print(f"The readers' worst pause is {ratio:.1f} times as short with a budget of {best}.")
if ratio < 3:
    print("Less than 3 times: even a small step takes long here, compared with the whole prompt.")

# %% [markdown] id="experiment-budget-text"
# ## Experiment 2 · Choosing the budget
#
# A shorter pause for the eight is a longer wait for the one. Both against the budget; the dotted line is the readers' usual ITL.

# %% id="experiment-budget"
recall("6.p2")
figure, (left, right) = new_figure(width=8.0, height=2.8, columns=2)
names = list(rows)[::-1]
for axes, key, title in (
    (left, "worst", "readers' worst ITL, ms"),
    (right, "ttft", "the long prompt's TTFT, ms"),
):
    values = [rows[name][key] for name in names]
    bars = axes.bar(
        names,
        values,
        color="#0072B2" if key == "worst" else "#E69F00",
        hatch="" if key == "worst" else "//",
    )
    axes.bar_label(bars, fmt="%.0f")
    axes.set(xlabel="max_num_batched_tokens", ylim=(0, 1.15 * max(values)))
    axes.set_title(title, loc="left", fontsize=10)
left.axhline(
    rows["whole"]["usual"], color="#555555", linestyle=":", linewidth=1, label="a usual ITL"
)
left.legend(loc="upper left", fontsize=8, frameon=False)
show(
    figure,
    alt="Bars against the budget. "
    + "; ".join(
        f"{name}: worst ITL {row['worst']:.0f} ms, TTFT {row['ttft']:.0f} ms"
        for name, row in rows.items()
    )
    + f". A dotted line marks a usual ITL, {rows['whole']['usual']:.0f} ms.",
)

# %% [markdown] id="experiment-steps-text"
# And this is what a budget of 128 looks like from inside: a bar for each step, prompt tokens on top of decodes, cut off at
# the budget.

# %% id="experiment-steps"
axes = plot_budget(traces["128"])
show(axes.figure, alt=alt_text(plot_budget, traces["128"]))

# %% [markdown] id="experiment-reading"
# **Where it does not help.** The dotted line is a step with decodes alone. The worst ITL comes down towards it and never below,
# for no step is cheaper than reading the weights; from some budget on only TTFT changes, and for the worse. If nobody is reading
# along (a batch job over night), there is no pause to protect: take a large budget, and each weight that is read serves more
# tokens. vLLM's default is in the thousands on a GPU, where a step stays cheap up to some hundreds of tokens (the ridge of Lab
# 00); minivllm's is 512 on a CPU.

# %% id="experiment-save"
save_result(
    "06",
    tokens_per_second=metrics.output_throughput(traces["128"]),
    what="chunked prefill, 8 readers and a long prompt",
    requests=READERS + 1,
    data={
        "device": lab.device,
        "dtype": str(lab.dtype),
        "model": lab.model,
        "length": length,
        "budgets": rows,
    },
)

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Taking the budget for a limit on prompts.** It caps a step, whoever is in it. Any prompt passes, in pieces.
# - **Chunks without mixing.** The pieces get steps of their own, and everybody waits for all of them.
# - **Letting prompts come first.** Then a stream of prompts starves the running ones: their memory is held, and nothing comes
#   out.
# - **Stopping at a request that lacks nothing.** Its token is on its way. Those behind it have work to do.
# - **Counting tokens before looking into the prefix cache.** Then cached ones are computed again (Lab 07).
# - **Sampling after every chunk.** Only the last piece of a prompt knows what comes next; the logits of the others are nobody's.
# - **Positions that begin at 0 in every chunk.** The second piece of a prompt stands behind the first.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` | The kernel was restarted. Run the set-up cell at the top, then this one |
# | `name 'unified' is not defined` (or `statements`) | Run the cell below "It got shorter" |
# | "... is in it with no token" | `advance` was called with 0. A request that lacks nothing is not in the step |
# | "go on, do not stop" | n = 0 of a running request is no reason for `break` |
# | "did not come back within ..." | The second loop never ends if `admit` says `False` and you do not `break` |
# | The pauses in experiment 1 are all alike | Is something else running on this machine? Run the cell again. It says so if the device is too fast for the effect |
# | "max_num_seqs=9 is larger than max_num_batched_tokens=8" | Each running request needs one token of every step's budget |
# | I want to use the debugger | `check("6.2", here=True)` runs in this kernel: put `breakpoint()` into your method |
# | I am stuck | `hint("6.2")`, again for the next one, then `solution("6.2")`. `skip("6.2")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 6.q1}}

# %% id="quiz-6-q1" tags=["nbval-check-output"]
quiz("6.q1", "b")

# %% [markdown] id="quiz-6-q2-text"
# {{question 6.q2}}

# %% id="quiz-6-q2" tags=["nbval-check-output"]
quiz("6.q2", lambda decodes, prompt, budget: -(-prompt // (budget - decodes)))

# %% [markdown] id="quiz-6-q3-text"
# {{question 6.q3}}

# %% id="quiz-6-q3" tags=["nbval-check-output"]
quiz("6.q3", "b")

# %% [markdown] id="quiz-6-q4-text"
# {{question 6.q4}}

# %% id="quiz-6-q4" tags=["nbval-check-output"]
quiz("6.q4", "b")

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - There is no prefill and no decode, only requests that lack tokens, and a budget for each step.
# - The budget caps how long a step takes, and so how long anybody waits for the next token. The price is the TTFT of long
#   prompts.
# - Chunks help because they mix with decodes. Cut and kept apart, they help nobody.
# - A flat batch needs no padding: where rows begin, how long sequences are, and their block tables say all.

# %% [markdown] id="further"
# ## Further learning
#
# - Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve* (2024), arXiv:2403.02310: chunked
#   prefill, and steps without stalls.
# - Zhong et al., *DistServe* (2024), arXiv:2401.09670: the opposite answer, prefill and decode on different machines.
# - Holmes et al., *DeepSpeed-FastGen* (2024), arXiv:2401.08671: the same idea under the name of dynamic SplitFuse.
# - `minivllm/worker/input_batch.py`: your `build_metadata` in its place, fed by a batch that is updated by difference.

# %% [markdown] id="next"
# ## Next: Lab 07, prefix caching
#
# `num_cached_tokens` was 0 all day. But users ask their second question with the first one still in front of it, and ten
# thousand of them begin with the same system prompt. The cheapest tokens are those that somebody has computed already.

# %% id="journey"
journey()
