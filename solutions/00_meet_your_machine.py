# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "00"
#     title: Meet your machine
#     version: 1
#     gpu: Better with one, and the numbers are more dramatic. Everything works without.
#     time: about 30 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Python. No knowledge of language models is needed yet.
#     required: required; later labs are measured against the numbers you find here
# ---

# %% [markdown] id="title"
# # Lab 00 · Meet your machine
#
# How fast can a language model answer on the machine in front of you? Today you find out *before* running one: you measure three
# numbers of your machine, count what one step of a model has to do, and predict its speed. Then you run it, and put your own dots
# into the picture that engineers of inference engines carry in their heads.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. The next one loads the model; it may take a minute the first time.

# %% id="setup"
from functools import partial

import torch
import torch.nn.functional as F

from checks import hint, need, predict, progress, quiz, recall, reset, skip, solution, start, use
from checks import journey, new_figure, reference_results, save_result, show
from minivllm.models.layers import rms_norm
from minivllm.models.rope import rotary_table
from minivllm.sim.cost_model import decode_step_flops, kv_bytes_per_token
from minivllm.sim.hardware import DATA_SHEETS, Device, best_time, count_work

lab = start("00")
decoder = lab.load_decoder()
config = decoder.config

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Measure the two ceilings of a machine, memory and arithmetic, and what it costs to start an operation.
# - Count the bytes that a model must read to make one token, from the sizes in its config.
# - Predict tokens per second for any batch size, and say which of the three sets the limit.
# - Explain why an engine puts many users into one batch, and why reading a prompt is another kind of work than writing an answer.

# %% [markdown] id="exercise-0-0-text"
# ## Exercise 0.0 · Get this one wrong
#
# {{exercise 0.0}}
#
# First, how these notebooks work. `double(x)` returns twice `x`, for any number `x`. But **get it wrong first**: put `return x + 2` in place
# of the `raise` line and run the cell. You will see red:
#
# ```text
# Exercise 0.0 is not right yet (wrong value).
#
#     double(3)
#
# It returned 5, and should return 6. ...
#
# 1 of 8 cases is right; this is the smallest that is not.
# ```
#
# That is all that red ever means: a call, what came back, what should have. Nothing is broken, nothing is counted against you. Ask for
# a hint: run `hint("0.0")` in a cell of its own (the B key adds one). Then write what is right, run again, and see green.

# %% id="exercise-0-0" tags=["nbval-check-output"]
from checks import check


def double(x):
    """Twice x."""
    # BEGIN SOLUTION
    return 2 * x
    # END SOLUTION


check("0.0")

# %% [markdown] id="big-idea"
# ## The big idea
#
# A language model writes one token (a piece of a word) at a time. For each token, every number of the model, its *weights*, has to travel
# from memory to the processor. Writing one token for one user is a **bus trip with a single passenger**: the whole route is driven
# for one person. With forty passengers the trip takes about as long, and forty people arrive. Engines fill the bus. That is *batching*,
# and most of this course is about doing it well.
#
# Three things take time on the trip:
#
# | on the bus | in the machine | grows with passengers? |
# |---|---|---|
# | driving the route | reading the weights from **memory** | no: read once for all |
# | stamping tickets | **arithmetic**: each weight times each sequence's numbers | yes |
# | starting the engine at each stop | **launches**: telling the processor what to do next, hundreds of times a step | no |
#
# Stamping happens while the bus drives, so of the first two only the longer one counts. The starts come on top.
#
# **Where the picture breaks.** Passengers bring luggage. Each sequence has a memory of its own, the *KV cache*, which is read at each step
# and grows with each token it writes. Nobody shares it (until Lab 07). With long texts the luggage weighs more than the bus, and
# another passenger is no longer free.

# %% [markdown] id="predict"
# ## Predict first
#
# Commit to an answer before you know. You will meet it again beside the plot. Write one of the words in place of the question mark.
#
# {{question 0.p1}}

# %% id="predict-0-p1"
predict("0.p1", "some")

# %% [markdown] id="predict-0-p2-text"
# {{question 0.p2}}

# %% id="predict-0-p2"
predict("0.p2", "memory")

# %% [markdown] id="example"
# ## A small example, by hand
#
# A toy machine does 100 operations a second, reads 10 bytes a second, and needs half a second to start an operation. A toy model has 30
# weights of one byte each, and a step of it is 2 launches. Each weight costs every sequence two operations: one multiply, one add.
#
# | batch | operations | arithmetic | bytes | memory | launches | the step | tokens a second |
# |---|---|---|---|---|---|---|---|
# | 1 | 60 | 0.6 s | 30 | **3 s** | 1 s | 4 s | 0.25 |
# | 5 | 300 | **3 s** | 30 | **3 s** | 1 s | 4 s | 1.25 |
# | 10 | 600 | **6 s** | 30 | 3 s | 1 s | 7 s | 1.43 |
#
# Up to five sequences the step takes 4 s, however many there are: waiting for memory leaves time for their arithmetic. At five both take
# equally long; that is the **ridge**, 100 / 10 = 10 operations a byte. Beyond it arithmetic decides, and more sequences make the step
# longer. (The toy has no luggage.)

# %% [markdown] id="measure"
# ## Measure your machine
#
# The toy's three numbers, for real. A large copy shows how fast memory is read and written, a large sum how fast it is read; the better
# of them is your memory's ceiling. A large matrix product shows how fast the arithmetic can be: `n * n` results of `n` multiplies and `n` adds.
# And a hundred additions of a single number show what starting an operation takes when there is nothing to do. `best_time` repeats each
# and takes the fastest, since other programs can only make it slower.

# %% id="measure-run"
with torch.inference_mode():
    size = 2**28  # bytes: too many for any cache
    source = torch.ones(size // lab.dtype.itemsize, dtype=lab.dtype, device=lab.device)
    target = torch.empty_like(source)
    copy = best_time(lambda: target.copy_(source))
    total = best_time(lambda: source.sum())
    source = target = None  # half a gigabyte

    n = 8192 if lab.device == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=lab.device).to(lab.dtype)
    product = best_time(lambda: torch.mm(a, b))

    one = torch.ones(1, device=lab.device)
    additions = best_time(lambda: [one.add(1) for _ in range(100)])

device = Device(
    "this machine",
    flops=2 * n**3 / product,
    bandwidth=max(2 * size / copy, size / total),  # a copy moves each byte twice
    launch_overhead=additions / 100,
)
print(f"memory       {device.bandwidth / 1e9:8.1f} GB/s")
print(f"arithmetic   {device.flops / 1e9:8.1f} GFLOP/s in {str(lab.dtype).removeprefix('torch.')}")
print(f"a launch     {device.launch_overhead * 1e6:8.1f} microseconds")
print(f"the ridge    {device.ridge:8.1f} operations a byte")

# %% [markdown] id="exercise-0-1-text"
# ## Exercise 0.1 · The bytes of a decode step
#
# {{exercise 0.1}}
#
# A *decode step* makes one token for each of `batch_size` sequences. What must it read? A model is a stack of `num_layers` equal
# layers, and each has seven matrices. (What they do is Lab 01. Here only their sizes count.)
#
# | matrix | from | to |
# |---|---|---|
# | q | hidden_size | num_heads * head_dim |
# | k, v (one each) | hidden_size | num_kv_heads * head_dim |
# | o | num_heads * head_dim | hidden_size |
# | gate, up (one each) | hidden_size | intermediate_size |
# | down | intermediate_size | hidden_size |
#
# A matrix from `a` to `b` holds `a * b` numbers. After the last layer, once, comes the matrix that makes logits, from hidden_size to
# vocab_size.
#
# - **`streamed_parameters(config)`**: how many numbers that is in all (an integer; *numbers*, not bytes). Everything else in a model is
#   less than a hundredth of it; leave it out. `config` has the seven sizes above as attributes: `config.num_layers`, `config.hidden_size` ...
# - **`decode_step_bytes(config, batch_size, context_len, dtype_bytes)`**: the bytes one step reads. The weights, each `dtype_bytes` long,
#   are read once for the whole batch. Each of the `batch_size` sequences also reads the KV cache of its own `context_len` tokens.
#   `kv_bytes_per_token(config, dtype_bytes)` is given: bytes of cache for one token of one sequence. (Lab 03 takes it apart.)
#
# For a model with num_layers 1, hidden_size 2, num_heads 2, num_kv_heads 1, head_dim 1, intermediate_size 3, vocab_size 5: q and o hold 4
# numbers each, k and v 2 each, gate, up and down 6 each, the layer 30, and with the logits' 10 there are 40. A token's cache takes 2 numbers.
# With 1-byte numbers, 3 sequences of 7 tokens: 40 + 3 * 7 * 2 = 82 bytes.

# %% id="exercise-0-1" tags=["nbval-check-output"]
from checks import check
from minivllm.sim.cost_model import kv_bytes_per_token


def streamed_parameters(config):
    """How many weights every step reads: seven matrices a layer, and the one that makes logits."""
    # solution: minivllm.sim.cost_model.streamed_parameters


def decode_step_bytes(config, batch_size, context_len, dtype_bytes):
    """Bytes one decode step reads: the weights once, and context_len tokens of KV cache for each
    sequence."""
    # solution: minivllm.sim.cost_model.decode_step_bytes


check("0.1")

# %% [markdown] id="count-text"
# Now count the real model with it.

# %% id="count"
need("0.1")
itemsize = lab.dtype.itemsize
weights = streamed_parameters(config)
print(f"weights      {weights:,} numbers, {weights * itemsize / 1e6:.0f} MB")
print(f"a token      {kv_bytes_per_token(config, itemsize) / 1e3:.0f} kB of KV cache")
for batch_size in (1, 64):
    megabytes = decode_step_bytes(config, batch_size, 128, itemsize) / 1e6
    print(
        f"a step       {megabytes:.0f} MB at batch {batch_size}, 128 tokens each: {megabytes / batch_size:.0f} MB a token"
    )

# %% [markdown] id="exercise-0-2-text"
# ## Exercise 0.2 · How long a step takes
#
# {{exercise 0.2}}
#
# **`step_time(flops, bytes, launches, device)`** returns the seconds of a step that does `flops` operations, moves `bytes` bytes and
# starts `launches` operations.
#
# - `device.flops` is operations a second, `device.bandwidth` bytes a second, `device.launch_overhead` seconds a launch.
# - Arithmetic and memory traffic go on at the same time: the longer of the two counts.
# - The launches come on top, one after another.
#
# The first row of the toy's table: `step_time(60, 30, 2, toy)` is 4.0.

# %% id="exercise-0-2" tags=["nbval-check-output"]
from checks import check


def step_time(flops, bytes, launches, device):
    """Seconds: the longer of arithmetic and memory traffic, plus the launches."""
    # solution: minivllm.sim.cost_model.step_time


check("0.2")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# Your two functions are a *cost model*: capacity planning runs on the same formulas. All it needs is a real step to apply them
# to. Here is one: every layer of the model once, for one new token of each sequence. You need not read it today. After Lab 01 you can.

# %% id="decode-step"
CONTEXT = 128  # tokens that each sequence has in its KV cache


def decode_step(tokens, caches):
    """One token for each sequence: all layers, each reading its own cache (keys, values), then
    logits."""
    positions = torch.full_like(tokens, CONTEXT)
    x = F.embedding(tokens, decoder.embed_tokens)
    cos, sin = rotary_table(positions, decoder.frequencies, x.dtype)
    for layer, (keys, values) in zip(decoder.layers, caches):

        def attend(q, k, v, keys=keys, values=values, **settings):
            return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[
                :, :, 0
            ]

        x = layer(x, cos, sin, attend)
    return decoder.logits(rms_norm(x, decoder.norm, config.rms_norm_eps))


def inputs_for(batch_size):
    """Tokens and filled caches for a batch. What is in them does not matter for the time."""
    shape = (2, batch_size, config.num_kv_heads, CONTEXT, config.head_dim)
    caches = [torch.randn(shape, device=lab.device).to(lab.dtype) for _ in range(config.num_layers)]
    return torch.arange(batch_size, device=lab.device), caches


# %% [markdown] id="prediction-text"
# Your prediction, for this model on this machine. Each column of times is your own `step_time`, with the other parts set to zero.

# %% id="prediction"
need("0.1", "0.2")
batches = [1, 4, 16] if lab.fast else [1, 2, 4, 8, 16, 32, 64]
with torch.inference_mode():
    launches = count_work(partial(decode_step, *inputs_for(1))).launches

predicted, intensity = {}, {}
print(f"{launches} launches a step\n\nbatch  arithmetic  memory  launches    step   tokens/s")
for batch_size in batches:
    flops = decode_step_flops(config, batch_size, CONTEXT)
    moved = decode_step_bytes(config, batch_size, CONTEXT, lab.dtype.itemsize)
    predicted[batch_size] = step_time(flops, moved, launches, device)
    intensity[batch_size] = flops / moved
    parts = (
        step_time(flops, 0, 0, device),
        step_time(0, moved, 0, device),
        step_time(0, 0, launches, device),
    )
    shown = "  ".join(f"{1000 * seconds:7.1f}" for seconds in (*parts, predicted[batch_size]))
    print(f"{batch_size:5}  {shown} ms {batch_size / predicted[batch_size]:9.1f}")

# %% [markdown] id="experiment"
# ## Experiment 1 · Tokens per second against the batch
#
# Now run it, and see how well you know your machine.

# %% id="experiment-measure"
measured = {}
with torch.inference_mode():
    for batch_size in batches:
        step = partial(decode_step, *inputs_for(batch_size))
        measured[batch_size] = best_time(step, seconds=0.2 if lab.fast else 0.8)
        rate = batch_size / measured[batch_size]
        print(
            f"batch {batch_size:3}: {1000 * measured[batch_size]:7.1f} ms a step, {rate:7.1f} tokens/s",
            flush=True,
        )
step = None

speed = {batch_size: batch_size / seconds for batch_size, seconds in measured.items()}
save_result(
    "00",
    tokens_per_second=speed[1],
    what="bare decode steps, one sequence",
    data={
        "device": lab.device,
        "dtype": str(lab.dtype),
        "model": lab.model,
        **vars(device),
        "step_seconds": measured,
    },
)

# %% id="experiment-plot"
largest = batches[-1]
gain = speed[largest] / speed[1]
small = f"{largest} sequences made {gain:.1f} times the tokens of one. The arithmetic of a few"
small += " already fills this machine, or other programs use it."
recall("0.p1", but=small if gain < 3 else "")

figure, axes = new_figure(height=4.0)
elsewhere = {
    r["name"]: r["step_seconds"] for r in reference_results("00") if r["model"] == lab.model
}
for (name, steps), line in zip(elsewhere.items(), ("-", ":", "-.")):
    others = [b for b in batches if str(b) in steps]
    axes.loglog(
        others,
        [b / steps[str(b)] for b in others],
        linestyle=line,
        color="#bbbbbb",
        linewidth=1,
        label=name,
    )
axes.loglog(
    batches,
    [b / predicted[b] for b in batches],
    linestyle="--",
    color="#777777",
    label="your prediction",
)
axes.loglog(batches, list(speed.values()), marker="o", color="#0072B2", label="measured here")
for b in (1, largest):
    axes.annotate(
        f"{speed[b]:.0f}", (b, speed[b]), xytext=(0, -16), textcoords="offset points", ha="center"
    )
axes.margins(y=0.12)
axes.set_xticks(batches, batches, minor=False)
axes.minorticks_off()
axes.yaxis.set_major_formatter("{x:g}")
axes.set(xlabel="sequences in the batch", ylabel="tokens/s, all together")
axes.set_title(f"{largest} sequences make {gain:.1f} times the tokens of one", loc="left")
axes.legend(frameon=False)
show(
    figure,
    alt="Tokens per second against the batch size, both logarithmic. Measured: "
    + ", ".join(f"{s:.0f} at batch {b}" for b, s in speed.items())
    + f". Predicted: {1 / predicted[1]:.0f} at batch 1, {largest / predicted[largest]:.0f} at batch {largest}."
    + "".join(
        f" For comparison, {name}: {1 / steps['1']:.0f} at batch 1."
        for name, steps in elsewhere.items()
    ),
)

# %% [markdown] id="experiment-reading"
# The prediction is a **ceiling**: nothing in it is wasted. Measured dots lie below it, and the distance is what software could still
# win. Look where it is largest. Often that is in the middle, where a few sequences share the weights: a matrix library that is
# excellent for one vector, and for large matrices, may do poorly for four rows. On a GPU the whole curve may lie far below, with
# hundreds of launches that the processor waits for: Lab 09 closes that gap. (Pale lines, if there are any: the same cell on other
# machines.)
#
# **Where batching does not help.** Look at one user: a step at the largest batch takes longer than at batch 1, so each single answer comes
# *slower*. Batching buys tokens for all with time of each.

# %% id="experiment-parts"
recall("0.p2")
flops, moved = (
    decode_step_flops(config, 1, CONTEXT),
    decode_step_bytes(config, 1, CONTEXT, lab.dtype.itemsize),
)
print("\nA step at batch 1, by your own functions:")
for name, seconds in {
    "arithmetic": step_time(flops, 0, 0, device),
    "memory": step_time(0, moved, 0, device),
    "launches": step_time(0, 0, launches, device),
    "measured": measured[1],
}.items():
    print(f"  {name:12}{1000 * seconds:8.2f} ms")

# %% [markdown] id="experiment-roofline"
# ## Experiment 2 · Your dots under the roof
#
# One picture holds all of this, the **roofline**. To the right: how many operations are done for each byte that is moved. Upwards:
# operations per second. Under the slope a step waits for memory, under the flat roof for arithmetic. No dot can lie above the roof.
#
# We add one more dot: a *prompt* of many tokens read in one step (*prefill*). All its tokens go through each matrix together, so it does
# many operations for each weight it reads.

# %% id="experiment-prefill"
prompt = torch.arange(128 if lab.fast else 512, device=lab.device)
work = decode_step_flops(config, len(prompt), len(prompt))
prefill = best_time(lambda: decoder.full_forward(prompt), seconds=0.2 if lab.fast else 0.8)
prefill_intensity = work / decode_step_bytes(config, 1, 0, lab.dtype.itemsize)
print(
    f"a prompt of {len(prompt)} tokens: {1000 * prefill:.0f} ms, {len(prompt) / prefill:.0f} tokens/s read"
)

# %% id="experiment-roofline-plot"
dots = {
    b: (intensity[b], decode_step_flops(config, b, CONTEXT) / measured[b] / 1e9) for b in batches
}
dots["prompt"] = prefill_intensity, work / prefill / 1e9
left, right = (
    min(x for x, _ in dots.values()) / 3,
    max(device.ridge, *(x for x, _ in dots.values())) * 4,
)

figure, axes = new_figure(height=4.2)
roof = device.flops / 1e9
axes.loglog(
    [left, device.ridge, right], [left * device.bandwidth / 1e9, roof, roof], color="#000000"
)
axes.axvline(device.ridge, color="#bbbbbb", linestyle=":")
for name, (x, y) in dots.items():
    color, marker = ("#D55E00", "D") if name == "prompt" else ("#0072B2", "o")
    axes.loglog([x], [y], marker=marker, color=color, markersize=8)
    label = name if name == "prompt" else f"batch {name}"
    axes.annotate(label, (x, y), xytext=(7, -11), textcoords="offset points", fontsize=8)
for text, x, side in (
    ("waits for memory  ", device.ridge, "right"),
    ("  for arithmetic", device.ridge, "left"),
):
    axes.annotate(text, (x, roof * 1.25), ha=side, color="#555555")
axes.xaxis.set_major_formatter("{x:g}")
axes.yaxis.set_major_formatter("{x:g}")
axes.set(
    xlabel="operations for each byte moved",
    ylabel="GFLOP/s",
    xlim=(left, right),
    ylim=(min(y for _, y in dots.values()) / 3, 2.5 * roof),
)
axes.set_title("The roof of your machine, and your dots under it", loc="left")
show(
    figure,
    alt=f"Roofline: a slope of {device.bandwidth / 1e9:.1f} GB/s up to {device.ridge:.0f} operations per byte,"
    f" then flat at {roof:.0f} GFLOP/s. Dots: "
    + "; ".join(
        f"{name if name == 'prompt' else f'batch {name}'}: {x:.1f} operations per byte, {y:.1f} GFLOP/s"
        for name, (x, y) in dots.items()
    ),
)
above = [
    name
    for name, (x, y) in dots.items()
    if y * 1e9 > 1.05 * min(x * device.bandwidth, device.flops)
]
if above:
    print(
        f"Above the roof: {', '.join(map(str, above))}. The machine was busy when you measured it: run that cell again."
    )

# %% [markdown] id="experiment-roofline-reading"
# The batch-1 dot stands far down on the left: one multiply and one add for each weight that travels. Each doubling of the batch moves it
# to the right, and up, for nearly nothing, until luggage and arithmetic catch up. The prompt stands far right, where arithmetic decides (if your ridge
# lies further right still, a longer prompt gets there): **decode waits for memory, prefill for arithmetic**. An engine that runs one
# kind at a time leaves half of its machine idle. Lab 06 mixes them.

# %% [markdown] id="other-machines"
# And because you have a model of it, you can predict machines you do not have. Your functions, fed with data sheets and the sizes of
# Llama 3.1 8B in 2-byte numbers, 1,000 tokens of context each (launches left out):

# %% id="other-machines-run"
from minivllm.models.registry import KNOWN_CONFIGS

llama = KNOWN_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
print(f"{'':12} ridge   tokens/s at batch 1      at batch 64")
for name in ("T4", "L4", "A100-80GB", "H100-SXM", "H200"):
    sheet = DATA_SHEETS[name]
    rates = []
    for b in (1, 64):
        flops, moved = (
            decode_step_flops(llama, b, 1000),
            decode_step_bytes(llama, b, 1000, dtype_bytes=2),
        )
        rates.append(b / step_time(flops, moved, 0, sheet))
    print(f"{name:12} {sheet.ridge:5.0f} {rates[0]:21.0f} {rates[1]:16.0f}")

# %% [markdown] id="other-machines-reading"
# The H200 has the H100's arithmetic and faster memory. For decoding, that is the part that counts. (The T4's 16 GB could not even hold this
# model. The roofline knows speed, not space: that is Lab 03.)

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **"This GPU has 989 TFLOP/s, so ..."** For decoding, look at its GB/s. A data sheet's first number is the other roof.
# - **Tokens per second without the batch.** "5,000 tokens/s" may be one fast answer or 500 slow ones. Always say the batch size, and
#   what one user gets.
# - **Timing a GPU without waiting for it.** A launch returns at once, so a clock around it measures the launch. `best_time` synchronizes
#   before it looks.
# - **Timing the first run.** It loads, compiles, and fills caches. Warm up, repeat, and take the best or the median.
# - **Benchmarking on a buffer that fits into the cache.** A copy of 1 MB measures the cache, not memory.
# - **Taking the ceiling for a forecast.** The roofline says what is impossible. How close you come is up to your code.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` (or `need`, `device`, `decode_step`) | The kernel was restarted. Run the cells from the top: Run, Run All Above |
# | "not attempted yet" | The `raise NotImplementedError` line is still there. Replace it, run the cell again |
# | "... lives in your notebook; define it in this cell" | A check sees its own cell alone. Move the definition or the import into it |
# | Dots above the roof, or a curve that jumps | Other programs are using the machine. Close them, or run the measuring cells again |
# | The kernel dies at batch 64 | Memory: take 64 (and 32) out of `batches` and run from there |
# | I want to use the debugger | `check("0.1", here=True)` runs in this kernel: put `breakpoint()` into your function |
# | I am stuck | `hint("0.1")`, again for the next one, then `solution("0.1")`. `skip("0.1")` goes on without it |
# | The download fails | The message names the file to bring by hand, and where it goes |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, between the quotation marks in place of the question mark, and run the cell. Every answer is
# explained, even the wrong ones.
#
# {{question 0.q1}}

# %% id="quiz-0-q1" tags=["nbval-check-output"]
quiz("0.q1", "b")

# %% [markdown] id="quiz-0-q2-text"
# {{question 0.q2}}

# %% id="quiz-0-q2" tags=["nbval-check-output"]
quiz("0.q2", "a")

# %% [markdown] id="quiz-0-q3-text"
# {{question 0.q3}}

# %% id="quiz-0-q3" tags=["nbval-check-output"]
quiz("0.q3", "b")

# %% [markdown] id="quiz-0-q4-text"
# {{question 0.q4}}

# %% id="quiz-0-q4" tags=["nbval-check-output"]
quiz("0.q4", lambda size, bandwidth, batch: batch / (size / bandwidth))

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A step takes the longer of memory and arithmetic, plus its launches. Three measured numbers and a model's config predict it.
# - Decoding one sequence reads all weights for one token: it is bound by memory, and most of the arithmetic idles.
# - A batch shares the reading of weights and the launches. It does not share arithmetic or KV caches, so the gain ends somewhere,
#   and you can compute where.
# - Prefill does many operations a weight: it is bound by arithmetic.
# - The roofline is a ceiling. Later labs are about coming closer to it.

# %% [markdown] id="further"
# ## Further learning
#
# - Williams, Waterman, Patterson, *Roofline: An Insightful Visual Performance Model* (2009), Communications of the ACM 52(4): the picture's
#   origin, four pages that repay reading.
# - Pope et al., *Efficiently Scaling Transformer Inference* (2022), arXiv:2211.05102: the same counting for 540 billion parameters on many
#   chips.
# - `minivllm/sim/cost_model.py` and `minivllm/sim/hardware.py`: where your two functions live in the engine. Can you say what
#   `max_concurrency` is for before Lab 03 asks?

# %% [markdown] id="next"
# ## Next: Lab 01, the forward pass
#
# You have treated the model as a pile of matrices. Next you open it, write its three essential functions, and let 30 layers of your own
# code say the same as a library that a million people use. Your first dot on the journey:

# %% id="journey"
journey()
