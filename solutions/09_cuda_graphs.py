# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "09"
#     title: CUDA graphs and torch.compile
#     version: 1
#     gpu: Better with one. Without, a recorder takes the graph's place, all exercises work, and the times tell another story.
#     time: about 60 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Labs 00 and 04 (launches; slots, block tables and the null block)
#     required: required
# ---

# %% [markdown] id="title"
# # Lab 09 · CUDA graphs and torch.compile
#
# In Lab 00 your prediction of a step was a ceiling, and the machine stayed under it. One reason has nothing to do with arithmetic: Python
# tells the device what to do, one small operation after another, hundreds of times a step. Today you record a step once and play it back
# without Python. It sounds like a trick that cannot go wrong. It goes wrong in five ways.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("9.1")` gives a hint.

# %% id="setup"
import dataclasses
import logging
from collections import Counter
from functools import partial
from types import SimpleNamespace

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
from minivllm.attention import get_backend
from minivllm.attention.reference import paged_decode, write_kv
from minivllm.bench.gpu_report import fill as fill_rows
from minivllm.models.compile_cache import load_compiled
from minivllm.models.decoder import Decoder
from minivllm.sim.cost_model import decode_step_bytes, decode_step_flops, step_time
from minivllm.sim.hardware import best_time, count_work, measure_device
from minivllm.worker.graph_safety import find_faults
from minivllm.worker.graphs import CudaGraph, DecodeBuffers, compiled
from minivllm.worker.graphs import decode_step as engine_step
from minivllm.worker.kv_cache import allocate_kv_caches
from minivllm.worker.operator_graph import OperatorGraph

lab = start("09")
device = torch.device(lab.device)

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Say what a graph records and what it does not, and predict what a replay returns.
# - Find and repair what keeps code from being captured, and what is captured and then wrong.
# - Serve batches of any size with graphs of a few sizes, and let padding harm nobody.
# - Split a step's time into Python, launches and kernels, and say which of graphs and compilation helps where.

# %% [markdown] id="big-idea"
# ## The big idea
#
# A conductor who hums every note to every musician, one after the other, gets music, slowly: the orchestra waits for the humming. A
# **CUDA graph** is the score. The step is run once while somebody writes down every kernel, with the addresses it reads and writes. From
# then on, "play it" is one instruction for all of them. The GPU plays what the score says, *from the memory that the score names*.
#
# **torch.compile** does something else. It rewrites the music: it looks at the operations, melts small neighbours into one (a norm, a
# multiplication and a cast become one kernel that reads memory once), and makes code for your machine. Fewer notes, easier to play. A graph
# keeps all the notes and takes away the humming. They combine.
#
# | | Python between operations | launches | the kernels themselves |
# |---|---|---|---|
# | eager | yes | one each | as they are |
# | compiled | little | fewer | fused, made for this machine |
# | graphed | none | one in all | as they are |
#
# **Where the picture breaks.** Musicians read a score and use their judgement. A graph has none: no `if`, no other number of rows, no new
# tensor. Whatever Python decided while it was recorded is decided.

# %% [markdown] id="predict"
# ## Predict first
#
# {{question 9.p1}}

# %% id="predict-9-p1"
predict("9.p1", "old")

# %% [markdown] id="predict-9-p2-text"
# {{question 9.p2}}

# %% id="predict-9-p2"
predict("9.p2", "third")

# %% [markdown] id="example"
# ## A small example: yesterday's answer
#
# The whole model, recorded while it reads "The capital of France is". On a GPU this is a CUDA graph; elsewhere it is minivllm's
# **operator recorder**, which notes every PyTorch operator with its tensors, and repeats the list. The recorder saves little time. But what it
# returns, and when it is wrong, is a graph's.


# %% id="example-record"
def new_graph():
    """An empty recording for this device."""
    if lab.device == "cuda":
        return CudaGraph(torch.cuda.graph_pool_handle())
    return OperatorGraph()


decoder, tokenizer = lab.load_decoder(), lab.load_tokenizer()


def token_ids(country):
    return torch.tensor(tokenizer.encode(f"The capital of {country} is"), device=device)


def say(logits):
    print(repr(tokenizer.decode([int(logits[-1].argmax())])))


ids = token_ids("France")
decoder.full_forward(ids)  # warm up: nothing may be compiled or allocated for good in a recording
graph = new_graph()
with torch.inference_mode(), graph.capture():
    logits = decoder.full_forward(ids)
graph.replay()
say(logits)

# %% [markdown] id="example-new-tensor-text"
# Now ask about Japan: a new tensor, under the old name.

# %% id="example-new-tensor"
recorded = ids
ids = token_ids("Japan")
graph.replay()
recall("9.p1")
say(logits)

# %% [markdown] id="example-copy-text"
# Yesterday's answer, and no error. `ids` is a *name*, and names are Python's; the recording knows the *memory* that was read. So a graph's
# inputs live in **static buffers**, tensors that stay where they are, and each step's numbers are copied into them. The result, too,
# appears where it appeared the first time: in `logits`.

# %% id="example-copy"
recorded.copy_(ids)
graph.replay()
say(logits)

# %% [markdown] id="faults-text"
# ## A step that cannot be recorded
#
# Here is a decode step of a toy model with one layer. It computes the right thing. It takes its inputs from two places: `buffers`, the
# static ones, and `host`, what Python knows of the step: `host.token_ids` (the tensor that was sampled last), `host.seq_lens` (a list),
# `host.num_blocks` (how many blocks the longest sequence has). One row of each batch is padding.

# %% id="faults-step"
BLOCK_SIZE = 4


def broken_step(model, kv_cache, buffers, host):
    """Hidden states [N, C] of N rows, each one new token of a sequence."""
    x = model.embed[host.token_ids] + model.position[buffers.positions]
    if x.isnan().any():
        raise FloatingPointError("a token has no embedding")
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    real = (buffers.slot_mapping >= BLOCK_SIZE).nonzero().flatten()  # padding is not written
    write_kv(k[real], v[real], kv_cache, buffers.slot_mapping[real])
    block_tables = buffers.block_tables[:, : host.num_blocks]  # no wider than needed
    seq_lens = torch.tensor(host.seq_lens, dtype=torch.int32, device=x.device)
    attended = paged_decode(q, kv_cache, block_tables, seq_lens)
    return x + attended.flatten(1) @ model.o


# %% [markdown] id="faults-inputs-text"
# Inputs for it: sequences of 3 and 2 tokens, and a padding row.

# %% id="faults-inputs"
torch.manual_seed(0)
toy = SimpleNamespace(embed=torch.randn(32, 8), position=torch.randn(64, 8), num_heads=2)
toy.q, toy.k, toy.v, toy.o = torch.randn(4, 8, 8)
toy_cache = torch.randn(2, 6, BLOCK_SIZE, 2, 4)
toy_buffers = DecodeBuffers.allocate(num_rows=3, max_blocks=3, device="cpu")


def fill_toy(ids, lens, tables):
    """One step's numbers, into the static buffers and into `host`."""
    toy_buffers.clear()
    n, last = len(ids), torch.tensor(lens) - 1
    tables = torch.tensor(tables, dtype=torch.int32)
    toy_buffers.input_ids[:n] = torch.tensor(ids)
    toy_buffers.positions[:n] = last
    toy_buffers.seq_lens[:n] = last + 1
    toy_buffers.block_tables[:n] = tables
    blocks = tables[torch.arange(n), last // BLOCK_SIZE]
    toy_buffers.slot_mapping[:n] = blocks * BLOCK_SIZE + last % BLOCK_SIZE
    host = SimpleNamespace(token_ids=torch.tensor([*ids, 0]), seq_lens=[*lens, 1])
    host.num_blocks = -(-max(lens) // BLOCK_SIZE)
    return host


host = fill_toy([11, 7], [3, 2], [[1, 2, 0], [3, 0, 0]])
static = [*vars(toy).values(), toy_cache, *toy_buffers.tensors()]
static = [tensor for tensor in static if isinstance(tensor, torch.Tensor)]
for fault in find_faults(lambda: broken_step(toy, toy_cache, toy_buffers, host), static):
    print(f"{fault.kind:22} {fault.code}\n{'':22} {fault.why}")

# %% [markdown] id="faults-reading"
# `find_faults` runs the step once under two watchers: of Python's calls of torch, and of the operators these become. It needs no GPU, and
# minivllm's CI runs it over the real decode step. A real capture stops at the first of these.
#
# It finds four faults. The step has five. The fifth is worse, since capture does *not* stop at it: the recording succeeds, and is wrong
# later. Which line is it?
#
# ## Exercise 9.1 · Repair the step
#
# {{exercise 9.1}}
#
# **`decode_step(model, kv_cache, buffers, host)`** computes what `broken_step` does, and can be recorded: copy its body into the cell, run it,
# and repair line by line.
#
# - `buffers` holds all that changes from step to step, N rows each: `input_ids`, `positions`, `slot_mapping`, `seq_lens` and `block_tables`
#   [N, M], 0-padded. They are filled before each replay. Only read them.
# - Return the hidden states of all N rows; those of padding rows may hold anything finite.
# - In the KV cache, each real row's slot gets its key and value. Block 0, the null block, is nobody's and may be written. No other slot may.
#
# The check runs it, then runs it under `find_faults`, then records it and replays it in a later step, when sequences are longer.

# %% id="exercise-9-1" tags=["nbval-check-output"]
from checks import check
import torch
from minivllm.attention.reference import paged_decode, write_kv


def decode_step(model, kv_cache, buffers, host):
    """Hidden states [N, C] of N rows. Everything that changes from step to step is read from buffers."""
    # BEGIN SOLUTION
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    write_kv(k, v, kv_cache, buffers.slot_mapping)
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens)
    return x + attended.flatten(1) @ model.o
    # END SOLUTION


check("9.1")

# %% [markdown] id="compile-sees-text"
# ## What torch.compile sees
#
# torch.compile reads the Python instead of recording it. It turns what it can follow into a graph of operators, and hands that to a
# *backend* which makes code of it. Where it cannot follow, it ends the graph, lets Python run, and starts another (a **graph break**). And it
# notes what it took for granted: if `host.num_blocks` is another number the next time, it compiles anew. A backend is a function,
# so here is one that only counts. Two steps, the second with longer sequences:


# %% id="compile-sees"
need("9.1")


def graphs_of(step):
    """The sizes of the graphs that torch.compile hands to its backend in two steps."""
    seen = []

    def counting_backend(graph_module, example_inputs):
        seen.append(sum(node.op.startswith("call") for node in graph_module.graph.nodes))
        return graph_module.forward

    torch._dynamo.reset()
    traced = torch.compile(step, backend=counting_backend)
    for lens in ([3, 2], [6, 9]):
        host = fill_toy([11, 7], lens, [[1, 2, 0], [3, 4, 5]])
        traced(toy, toy_cache.clone(), toy_buffers, host)
    return seen


logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
for name, step in (("broken_step", broken_step), ("decode_step", decode_step)):
    sizes = graphs_of(step)
    print(f"{name}: graphs of {sizes} operations in two steps")

# %% [markdown] id="compile-sees-reading"
# Nearly the same faults, but other consequences. torch.compile breaks at the `if` and at `nonzero`, and where `num_blocks` has grown it compiles anew: the
# broken step stays *right* and gets slow, in pieces. A CUDA graph guards nothing: it is fast, and wrong in silence.
#
# ## Exercise 9.2 · Buckets and padding
#
# {{exercise 9.2}}
#
# A graph has one number of rows. A batch has as many as there are requests. So a few sizes are recorded, the **buckets**, and a step is
# rounded up to the next one. With a step of 3 requests and bucket 4:
#
# ```text
# row    input_ids   positions   slot_mapping   seq_lens   block_tables      block size 16
#  0        812         40           88            41        9  6  5
#  1         17          3          115             4        7  .  .
#  2        400         19           35            20        1  2  .
#  3          ?          ?            ?             ?        ?               padding: computed like the others
# ```
#
# **`pick_bucket(n)`** returns the smallest of `self.buckets` (sorted) that holds `n` rows, or `None` if none does.
#
# **`fill(inputs, bucket)`** puts a step into the first `bucket` rows of `self.buffers`. `inputs.input_ids`, `.positions`, `.slot_mapping`,
# `.seq_lens` [n] and `.block_tables` [n, m] are NumPy arrays of the step's n rows; n may be less than `bucket`, and m less than the
# buffers' columns.
#
# - Rows n to bucket - 1 become padding. They are computed like any row, so each must be a harmless sequence: one token, that writes to the first
#   slot of the null block and reads only what it wrote. The buffers still hold an earlier, larger step's numbers.
# - The buffers must stay the same tensors. (You know what happens otherwise.)
# - Columns of `block_tables` from m on may keep what they had: no `seq_len` reaches them.
#
# Given, if you like: `padded(array, num_rows, value)` makes an array `num_rows` long with rows of `value`, and `to_device(arrays, device)` turns a list
# of arrays into tensors on the device, with a single copy.

# %% id="exercise-9-2" tags=["nbval-check-output"]
from checks import check
from bisect import bisect_left
import torch
from minivllm.worker.graphs import DecodeBuffers, bucket_sizes, padded
from minivllm.worker.transfer import to_device


class GraphRunner:
    """Graphs of a decode step, one for each bucket. (Recording them is the next exercise.)"""

    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)  # 1, 2, 4, 8, 16, 24, ...
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)

    def pick_bucket(self, n):
        """The smallest bucket that holds n rows, or None."""
        # solution: minivllm.worker.graphs.GraphRunner.pick_bucket

    def fill(self, inputs, bucket):
        """Put a step into the first rows of the buffers, and padding into the rest of the bucket."""
        # solution: minivllm.worker.graphs.GraphRunner.fill


check("9.2")

# %% [markdown] id="exercise-9-3-text"
# ## Exercise 9.3 · Capture and replay
#
# {{exercise 9.3}}
#
# **`capture()`** records every bucket, the largest first (graphs share one memory, and the smaller ones fit into what the largest took). Each
# gets an entry `self.graphs[bucket]`, whatever your `replay` needs.
#
# - `self.new_graph()` gives an empty graph; what runs inside `with graph.capture():` is recorded.
# - `self.decode_step(buffers)` runs the step and returns its hidden states, [rows, hidden size]. `self.buffers.first(bucket)` are the first
#   rows of the buffers, in the same memory.
# - A first call of a new size compiles kernels and allocates workspaces, and recording breaks at that. Call it once before.
# - Each of these calls really computes. `self.buffers.clear()` makes every row padding, so that nobody's KV cache is written.
#
# **`replay(bucket)`** runs that bucket's graph over what the buffers hold now, and returns its hidden states.

# %% id="exercise-9-3" tags=["nbval-check-output"]
from checks import check
import torch
from minivllm.worker.graphs import CudaGraph, DecodeBuffers, bucket_sizes
from minivllm.worker.operator_graph import OperatorGraph


class GraphRunner:
    """Graphs of a decode step, one for each bucket."""

    def __init__(self, decode_step, max_num_seqs, max_blocks, device):
        self.decode_step = decode_step
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        self.buffers = DecodeBuffers.allocate(self.buckets[-1], max_blocks, device)
        self.graphs = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def new_graph(self):
        return CudaGraph(self._pool) if self.device.type == "cuda" else OperatorGraph()

    @torch.inference_mode()
    def capture(self):
        """Record every bucket, the largest first."""
        # solution: minivllm.worker.graphs.GraphRunner.capture

    def replay(self, bucket):
        """Run the bucket's graph; the hidden states [bucket, hidden size] of what the buffers hold."""
        # solution: minivllm.worker.graphs.GraphRunner.replay


check("9.3")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# An engine with your runner, and one without graphs: the same prompts, in float32. (On a CPU minivllm records only if a runner is plugged
# in, and up to 16 rows: nothing is gained there but practice.) Steps with a prompt in them are never graphed: no two have the same
# shape.

# %% id="plug-in-run"
logging.getLogger("minivllm").setLevel(logging.WARNING)
mine = {seam: part for seam, part in components().items() if seam == "graph_runner"}
if not mine:
    print("9.2 and 9.3 have not passed yet: minivllm's runner is used.")
    from minivllm.worker.graphs import GraphRunner as MinivllmsRunner

    mine = {"graph_runner": MinivllmsRunner}


replays = Counter()


class Counting(mine["graph_runner"]):
    """Your runner, and how often each bucket was replayed."""

    def replay(self, bucket):
        replays[bucket] += 1
        return super().replay(bucket)


prompts = [
    f"{name}, in one sentence:"
    for name in ("A bucket", "A conductor", "A graph", "Yesterday", "A musical score")
]
lengths = (2, 4, 6, 3, 5) if lab.fast else (3, 12, 20, 7, 16)
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
answers = {}
settings = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 128}
for name, parts in (("graphed", {"graph_runner": Counting}), ("eager", {})):
    eager = {} if parts else {"enforce_eager": True}
    with LLM(lab.model, components=parts, num_gpu_blocks_override=65, **settings, **eager) as llm:
        replays.clear()  # those of the warm-up
        answers[name] = [
            list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)
        ]
        if parts:
            told = ", ".join(f"{count} of {size}" for size, count in sorted(replays.items()))
            print(f"replays by bucket: {told}")
same = sum(a == b for a, b in zip(answers["graphed"], answers["eager"]))
print(f"{same} of {len(prompts)} answers are the same as without graphs, token for token")

# %% [markdown] id="plug-in-diff"
# Five requests run in bucket 8, and as they end, the batch falls through the smaller ones. Your file against minivllm's:

# %% id="plug-in-show-diff"
show_diff("worker/graphs.py")

# %% [markdown] id="plug-in-parts-text"
# **Your own `paged_decode` and `write_kv`** from Lab 04 also run inside the step. Can they be recorded? If they loop over rows in Python, no: the
# loop's lengths would be those of the recording. The engine cannot know, so it leaves graphs off unless a part says that it has the
# capability `graphs`. Here is what the checker says:

# %% id="plug-in-parts"
own = {
    seam: part for seam, part in components().items() if seam in ("write_kv", "attention.decode")
}
q, kv = torch.randn(3, 2, 4), torch.randn(2, 3, 2, 4)
arguments = {
    "write_kv": (*kv, toy_cache, toy_buffers.slot_mapping),
    "attention.decode": (q, toy_cache, toy_buffers.block_tables, toy_buffers.seq_lens),
}
for seam, part in own.items():
    once = partial(part, *arguments[seam])
    faults = find_faults(once, [q, kv, toy_cache, *toy_buffers.tensors()])
    print(f"{seam}: {'; '.join(f'{f.kind}, {f.code}' for f in faults) or 'it can be recorded'}")
if not own:
    print("write_kv and attention.decode are minivllm's here: Lab 04 has not been passed.")

# %% [markdown] id="experiment"
# ## Experiment · Where a step's time goes
#
# Three numbers of a decode step at batch 1, without a profiler:
#
# - **Python and launches together**: a *hollow* model, with the same layers and the same operators, whose matrices are so small (64 columns)
#   that computing takes next to nothing. What is left is the time it takes to ask for it.
# - **launches**: how many operators a step starts, times what starting one costs (Lab 00's measurement). The rest of the hollow
#   step is Python.
# - **kernels**: on a CPU, where each operator is finished before the next one is asked for, the real step less the hollow one. On a GPU,
#   which computes while Python goes on, the time of the graph.

# %% id="experiment-models"
CONTEXT = 128  # tokens of each sequence
batches = [1, 4, 16] if lab.fast else [1, 2, 4, 8, 16, 32, 64]
seconds = 0.1 if lab.fast else 0.5
config = decoder.config
decoder.attention_backend = get_backend("auto", lab.device, lab.dtype)

small = dataclasses.replace(config, hidden_size=64, intermediate_size=64, vocab_size=64)
hollow = Decoder(small, lab.dtype, device)
hollow.attention_backend = decoder.attention_backend
for parameter in hollow.parameters():
    torch.nn.init.normal_(parameter, std=0.02)

num_blocks = 1 + batches[-1] * CONTEXT // 16
kv_caches = allocate_kv_caches(num_blocks, 16, config, lab.dtype, device)
limits = measure_device(lab.device, str(lab.dtype).removeprefix("torch."), seconds=1.0)


def full_step(model, hidden_states, batch):
    """A step to be timed: hidden states, then logits."""

    @torch.inference_mode()
    def run():
        return model.logits(hidden_states(batch))

    return run


def fill_batch(buffers):
    """Every row a sequence of CONTEXT tokens, in blocks of its own."""
    n, columns = len(buffers.seq_lens), CONTEXT // 16
    buffers.block_tables[:, :columns] = 1 + torch.arange(n * columns).view(n, columns)
    buffers.positions.fill_(CONTEXT - 1)
    buffers.seq_lens.fill_(CONTEXT)
    buffers.slot_mapping.copy_(buffers.block_tables[:, columns - 1].long() * 16 + 15)


def runner_of(model, sizes):
    """Your runner, with graphs of a model's step for these batch sizes."""
    runner = mine["graph_runner"](model, sizes[-1], CONTEXT // 16, device)
    runner.buckets = sizes
    runner.capture()
    fill_batch(runner.buffers)
    return runner


# %% id="experiment-measure"
steps = {"eager": partial(engine_step, decoder, kv_caches)}
graphs = runner_of(steps["eager"], batches)
hollow_step = partial(engine_step, hollow, kv_caches)
one = graphs.buffers.first(1)
with torch.inference_mode():
    launches = count_work(lambda: decoder.logits(steps["eager"](one))).launches
    host_time = best_time(lambda: hollow.logits(hollow_step(one)), seconds)

ways = {
    "eager": lambda b: steps["eager"](graphs.buffers.first(b)),
    "graphed": graphs.replay,
}
fast_model = decoder
if lab.device == "cuda" and not lab.fast:  # torch.compile, and then graphs of what it made
    compiled_graphs = runner_of(compiled(steps["eager"]), batches)
    ways["compiled, graphed"] = compiled_graphs.replay
if lab.device == "cpu":
    fast_model = load_compiled(lab.model, lab.dtype, decoder.attention_backend) or decoder
    if fast_model is not decoder:
        compiled_step = partial(engine_step, fast_model, kv_caches)
        ways["compiled"] = lambda b: compiled_step(graphs.buffers.first(b))
    else:
        print(f"No compiled model here. Once, a few minutes: minivllm compile {lab.model}")

milliseconds = {name: dict.fromkeys(batches, float("inf")) for name in ways}
for name, batch in [(name, batch) for batch in batches for name in ways] * 2:  # in turns
    model = fast_model if name == "compiled" else decoder
    took = 1000 * best_time(full_step(model, ways[name], batch), seconds)
    milliseconds[name][batch] = min(took, milliseconds[name][batch])
ceiling = {}
for batch in batches:
    flops = decode_step_flops(config, batch, CONTEXT)
    moved = decode_step_bytes(config, batch, CONTEXT, lab.dtype.itemsize)
    ceiling[batch] = 1000 * step_time(flops, moved, 0, limits)

print(f"{'batch':24}" + "".join(f"{batch:8}" for batch in batches))
for name, row in {**milliseconds, "ceiling, no launches": ceiling}.items():
    print(f"{name:20} ms " + "".join(f"{row[batch]:8.2f}" for batch in batches))

# %% id="experiment-plot"
host_ms = 1000 * host_time
launch_ms = min(host_ms, 1000 * launches * limits.launch_overhead)
if lab.device == "cuda":
    kernels_ms = milliseconds["graphed"][1]
else:
    kernels_ms = max(0.0, milliseconds["eager"][1] - host_ms)
parts = {
    "Python": host_ms - launch_ms,
    f"{launches} launches": launch_ms,
    "kernels": kernels_ms,
    "memory alone": ceiling[1],
}
parts |= {f"step, {name}": row[1] for name, row in milliseconds.items()}

figure, (left, right) = new_figure(width=9.0, height=3.4, columns=2)
hatches = ["", "..", "//", "xx", "", "", ""]
colours = ["#CC79A7", "#E69F00", "#0072B2", "#BBBBBB", "#444444", "#444444", "#444444"]
bars = left.barh(list(parts), list(parts.values()), color=colours[: len(parts)], alpha=0.75)
for bar, hatch in zip(bars, hatches):
    bar.set_hatch(hatch)
left.bar_label(bars, [f" {value:.3g}" for value in parts.values()], fontsize=8)
left.invert_yaxis()
left.margins(x=0.15)
left.grid(False)
left.set_title("a step at batch 1, ms", loc="left", fontsize=10)
for (name, row), marker in zip(milliseconds.items(), "osD"):
    right.plot(batches, [row[b] for b in batches], marker=marker, label=name)
right.plot(batches, [ceiling[b] for b in batches], "--", color="#777777", label="ceiling")
right.set_xscale("log", base=2)
right.set_xticks(batches, batches)
right.set_ylim(0)
right.set_xlabel("sequences in the batch")
right.set_title("a step, ms", loc="left", fontsize=10)
right.legend(frameon=False, fontsize=8)
share = host_ms / milliseconds["eager"][1]
recall("9.p2")
show(
    figure,
    alt="Left, a decode step at batch 1 in milliseconds: "
    + ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
    + ". Right, step times by batch size: "
    + " ".join(
        f"{name}: {', '.join(f'{row[b]:.3g} at {b}' for b in batches)}."
        for name, row in {**milliseconds, "ceiling": ceiling}.items()
    ),
)
print(f"Python and launches are {share:.0%} of an eager step at batch 1.")
best = min(milliseconds, key=lambda name: milliseconds[name][1])
save_result(
    "09",
    tokens_per_second=1000 / milliseconds[best][1],
    what=f"decode steps, {best}",
    data={
        "device": lab.device,
        "dtype": lab.dtype,
        "model": lab.model,
        "milliseconds": milliseconds,
        "ceiling": ceiling,
        "parts": parts,
    },
)

# %% [markdown] id="experiment-reading"
# **On a GPU** the kernels of a small model take microseconds each, and the eager step takes as long as Python needs to ask for them, whatever
# the batch: that flat line was Lab 00's gap. The graph closes it; only the kernels are left. As batches or models grow, kernels
# outlast their launches, the lines meet, and graphs stop paying: minivllm's largest bucket is 512. (Your own plot
# decides.)
#
# **On a CPU** nothing runs beside Python, so a step is the *sum*. Here is what the recorder can show, and what it cannot. It skips the
# model's Python; but it starts every operator one by one, from Python, and then copies each result to where it first appeared. So the graphed
# line is about the eager one, often worse, and says nothing of what a graph would win on a GPU. Lab 00's gap on a CPU lies in
# the kernels: eager PyTorch's matrix products read the weights at a fraction of the memory's speed. **Compiled** is the answer there: weights
# packed in the order in which they are read, and norms, rotations and activations fused into the products. It is torch.compile's machinery,
# run once, ahead of time.
#
# Know where the time goes first. A tool that does not address it gains nothing.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Rebinding an input.** `buffers.input_ids = new` compiles, runs, and returns yesterday's answer. `copy_`.
# - **A debugging line that reads a tensor**: `print(x.max())`, `assert not x.isnan().any()`. Capture stops; without graphs, every step waits for
#   the device.
# - **Padding with `seq_len` 0**: a softmax over nothing is NaN. It stays in its row, until something takes a mean over rows.
# - **Padding that keeps old slots**: it overwrites a key of whoever has that block now. The text goes wrong a hundred tokens later.
# - **Tables cut to today's width.** Right in the warm-up, where all sequences are short.
# - **Recording while buffers hold a real step**: the warm-up writes over somebody's cache.
# - **Benchmarking compiled code from the first call on.** The first call of each shape contains the compiler.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | Another Python runs the notebook. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` | The kernel was restarted. Run the set-up cell first |
# | `host has token_ids, seq_lens and num_blocks; no ...` | In 9.1 use `buffers` for everything that changes |
# | `This graph is recorded already` | One graph holds one recording: `self.new_graph()` for each bucket |
# | `operation not permitted when stream is capturing` (GPU) | Something in the step asks the device, or allocates by itself. `find_faults` names the line |
# | `The size of tensor a (5) must match ...` in `fill` | The buffers' tables have more columns than the step's: take `[:, :m]` of them |
# | Not all answers are the same | `use("graph_runner", "reference")` takes minivllm's runner: is it yours? Then look at `fill` |
# | The compiled line is missing | On a CPU: `minivllm compile smollm2-135m` in a terminal, then run the measuring cell again |
# | I want to use the debugger | `check("9.2", here=True)` runs in this kernel: put `breakpoint()` into your method |
# | I am stuck | `hint("9.1")`, again for the next one, then `solution("9.1")`. `skip("9.1")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 9.q1}}

# %% id="quiz-9-q1" tags=["nbval-check-output"]
quiz("9.q1", "c")

# %% [markdown] id="quiz-9-q2-text"
# {{question 9.q2}}

# %% id="quiz-9-q2" tags=["nbval-check-output"]
quiz("9.q2", "a")

# %% [markdown] id="quiz-9-q3-text"
# {{question 9.q3}}

# %% id="quiz-9-q3" tags=["nbval-check-output"]
quiz("9.q3", "b")

# %% [markdown] id="quiz-9-q4-text"
# {{question 9.q4}}

# %% id="quiz-9-q4" tags=["nbval-check-output"]
quiz("9.q4", lambda kernels, launch, work: kernels * launch - kernels * work)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A graph repeats kernels on memory. Names, numbers and decisions of Python are frozen in it; inputs are copied into static buffers.
# - What stops a capture: reading a number, copying from the host, shapes that depend on data, waiting. What does not stop it and is wrong: new
#   tensors, and Python's numbers.
# - Batches are rounded up to buckets. Padding rows are computed, so they are made harmless: one token in the null block.
# - Graphs remove Python and launches; compilation makes fewer and better kernels. Which one helps is a question of where the time goes.

# %% [markdown] id="further"
# ## Further learning
#
# - Gray, *Getting Started with CUDA Graphs* (2019), NVIDIA's developer blog: the idea, with a timeline of launches.
# - PyTorch's documentation, *CUDA semantics*, section *CUDA Graphs*: every constraint.
# - Ansel et al., *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation* (2024), ASPLOS:
#   how torch.compile follows Python, guards, and breaks.
# - `minivllm/worker/graph_safety.py`: the checker; `minivllm/models/compiled.py`: the CPU's compiled decoder.

# %% [markdown] id="next"
# ## Next: Lab 10, speculative decoding
#
# A step at batch 1 now takes what memory takes. The next gain is not a faster step, it is fewer of them: guess several tokens, and let one
# step check them all.

# %% id="journey"
journey()
