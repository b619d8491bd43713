# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "11"
#     title: "Serving: the process tree"
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 90 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Lab 06 (continuous batching, the token budget)
#     required: required
# ---

# %% [markdown] id="title"
# # Lab 11 · Serving: the process tree
#
# Your engine has answered scripts. Today it answers strangers: they come when they like, read as slowly as they like, and leave without a
# word. You turn tokens into text that never shows half a character, bring each output to its own reader, and load the server as people
# do. At the end `curl` and the `openai` client, which know nothing of you, get their answers from your engine.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. Each exercise is one cell: write your code where it says `raise
# NotImplementedError`, run the cell, and it tells you at once whether the answer is right. `hint("11.1")` gives a hint.

# %% id="setup"
import asyncio
import json
import random
import time

from checks import (
    components,
    hint,
    journey,
    need,
    need_serving,
    new_figure,
    predict,
    progress,
    quiz,
    recall,
    reset,
    save_result,
    serve,
    show,
    show_diff,
    skip,
    solution,
    start,
    use,
)

lab = start("11")
need_serving()

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Stream text from tokens: no half characters, nothing lost, the same work for every token.
# - Route a batch's outputs to their readers, so that a slow one holds up nobody and one that leaves costs nothing.
# - Explain which process does what, and what each must never wait for.
# - Measure a server: closed and open loop, TTFT, TPOT, ITL, goodput; and say what one number hides.

# %% [markdown] id="big-idea"
# ## The big idea
#
# A restaurant has a kitchen and a waiter. The kitchen cooks for all tables at once, round by round, and must never stand still. The waiter
# talks: takes orders, carries plates, notices who left. If the cook also took the orders, the stoves would be cold half of the time.
#
# A server is the same, in processes, because Python runs one thread at a time:
#
# ```text
# clients          curl    openai    a browser
#                     \       |       /
# front end        HTTP, JSON, tokens to text          one event loop; knows no torch
#                     |  add, abort      ^ outputs      two sockets
#                     v                  |
# engine core      scheduler, KV cache, model          a loop: commands, step, outputs, commands, step ...
# ```
#
# - **The core** takes commands between two steps and never waits for anybody.
# - **The front end** waits all the time, for hundreds at once: every `await` lets the others go on.
#
# **Where the picture breaks.** A plate is served whole. Here the waiter carries every bite as it is cooked, thirty a second for each of
# sixty guests, and some bites are half a letter. And a guest who leaves is not just an unpaid bill: his table, the KV blocks, stays
# taken until the kitchen is told.

# %% [markdown] id="predict"
# ## Predict first
#
# {{question 11.p1}}

# %% id="predict-11-p1"
predict("11.p1", "step")

# %% [markdown] id="predict-11-p2-text"
# {{question 11.p2}}

# %% id="predict-11-p2"
predict("11.p2", "grows")

# %% [markdown] id="example"
# ## A small example, by hand
#
# The model's tokens are pieces of *bytes*. Most are whole words. But an emoji takes four bytes in UTF-8, an é two, and the borders of
# tokens fall where they like.

# %% id="example-tokens"
tokenizer = lab.load_tokenizer()
text = "naïve 🦙 日"
token_ids = tokenizer.encode(text)
print(f"{'token':>6}  {'bytes':28} {'decoded alone':>14}")
for token_id in token_ids:
    alone = tokenizer.decode([token_id])
    print(f"{token_id:6}  {tokenizer.token_bytes(token_id)!s:28} {alone!r:>14}")
print(f"\nall decoded together:   {tokenizer.decode(token_ids)}")
print(f"pieces, decoded alone:  {''.join(tokenizer.decode([t]) for t in token_ids)}")

# %% [markdown] id="example-naive"
# `�` (U+FFFD) is what a decoder writes for bytes that are no character. A stream that has sent it cannot take it back.
#
# The usual way out: decode *everything* after each token, and send what is new, unless it ends in `�`. That is right for most texts, and
# its work grows with every token. Here it is, for answers of 250 to 2,000 tokens.


# %% id="example-naive-time"
class DecodesEverything:
    """Right for most texts, and slower with every token."""

    def __init__(self, tokenizer):
        self.tokenizer, self.token_ids, self.sent = tokenizer, [], ""

    def push(self, token_id):
        self.token_ids.append(token_id)
        text = self.tokenizer.decode(self.token_ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self.sent = text[len(self.sent) :], text
        return new


long_answer = (tokenizer.encode("The llama 🦙 looked at the naïve traveller. ") * 200)[:2000]


def milliseconds_a_token(detokenizer, count):
    """The mean of the last fifty pushes of so many."""
    for token_id in long_answer[: count - 50]:
        detokenizer.push(token_id)
    begin = time.perf_counter()
    for token_id in long_answer[count - 50 : count]:
        detokenizer.push(token_id)
    return 1000 * (time.perf_counter() - begin) / 50


lengths = (250, 500) if lab.fast else (250, 500, 1000, 2000)
naive_times = {n: milliseconds_a_token(DecodesEverything(tokenizer), n) for n in lengths}
for n, ms in naive_times.items():
    print(
        f"token {n:5}: {ms:6.3f} ms, so {1000 / ms / 30:5,.0f} streams of 30 tokens a second fill a core"
    )

# %% [markdown] id="exercise-11-1-text"
# ## Exercise 11.1 · Never half a character
#
# {{exercise 11.1}}
#
# **`push(token_id)`** returns the text that this token completes: `""` while a character is unfinished, else one character or more. All
# pieces together, and `finish()` at the end, are the text of all tokens.
#
# - Tokens in `self.hidden_ids` (such as the model's end token) are no text.
# - `self.bytes_of(token_id, is_first)`, given, is what a token adds. `is_first`: it is the first of a text that nothing stands before, where
#   some tokenizers drop a space. `self.at_start` says whether that is still to come; it is yours to clear.
# - What is whole is given out at once. The work for a token must not grow with the text.
# - Bytes that can never become a character are `�` at once: nobody waits for what cannot come.
#
# Look at what `__init__` makes. You do not have to know UTF-8.

# %% id="exercise-11-1" tags=["nbval-check-output"]
from checks import check
import codecs

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Text of one request's output, as it grows."""

    def __init__(self, tokenizer, prompt_token_ids=(), skip_special_tokens=True):
        self.tokenizer = tokenizer
        self.hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.at_start = all(token_id in self.hidden_ids for token_id in prompt_token_ids)
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id):
        """The text that token_id completes."""
        # solution: minivllm.text.detokenizer.IncrementalDetokenizer.push

    def bytes_of(self, token_id, is_first):
        """What the token adds to the text. Some tokenizers drop a space at the start of one."""
        text = self.tokenizer.token_text(token_id, first=True) if is_first else REPLACEMENT
        return self.tokenizer.token_bytes(token_id) if REPLACEMENT in text else text.encode()

    def finish(self):
        """What is still held back when the output ends."""
        return self.utf8.decode(b"", final=True)


check("11.1")

# %% id="detokenizer-time"
need("11.1")
mine = IncrementalDetokenizer(tokenizer, [tokenizer.bos_token_id])
print(f"your pieces: {[mine.push(token_id) for token_id in token_ids]}")
for n, ms in naive_times.items():
    own = milliseconds_a_token(IncrementalDetokenizer(tokenizer), n)
    print(f"token {n:5}: {own:6.4f} ms; decoding everything took {ms / own:5,.0f} times as long")

# %% [markdown] id="exercise-11-2-text"
# ## Exercise 11.2 · To each their own
#
# {{exercise 11.2}}
#
# A step brings a token for each of sixty requests. Sixty readers wait, each in a task of its own. Between them:
#
# ```text
# step's outputs --> route("A", ...) --> queue of A --> stream of A --> reader of A
#                    route("B", ...) --> queue of B --> stream of B --> reader of B    reads once a minute
#                    route("C", ...) --> dropped                        C has left:    leave("C") --> abort("C")
# ```
#
# Given are `OutputQueue` and `OutputStream` (read them: `minivllm/serving/async_llm.py`). `queue.put(output)` never waits, for a queue holds one
# output at most and adds to it what comes while nobody reads. `OutputStream(request_id, queue, leave)` is the reader's end; it calls
# `leave(request_id)` if its reader goes before the last output.
#
# - **`open(request_id)`** makes the queue of a new request and returns the stream for its reader.
# - **`route(request_id, output)`** puts an output into the queue of its request. The last one has `output.finished`: it must arrive, and the
#   queue is forgotten. What comes for a reader who has left is dropped; it was under way.
# - **`leave(request_id)`**: the reader has gone. If the request still runs, the queue is forgotten and `self.abort(request_id)` called, once.
#
# `self.queues` is a dictionary of the requests that somebody waits for. Nothing here has to wait, so there is no `await`.

# %% id="exercise-11-2" tags=["nbval-check-output"]
from checks import check
from minivllm.serving.async_llm import OutputQueue, OutputStream


class OutputRouter:
    """Who gets which output. abort(request_id) is called for a request whose reader leaves before its end."""

    def __init__(self, abort):
        self.abort = abort
        self.queues = {}

    def __len__(self):
        return len(self.queues)

    def open(self, request_id):
        """The stream of a new request, for its reader."""
        # solution: minivllm.serving.async_llm.OutputRouter.open

    def route(self, request_id, output):
        """To the request's own queue, and no other."""
        # solution: minivllm.serving.async_llm.OutputRouter.route

    def leave(self, request_id):
        """The reader of a request has gone."""
        # solution: minivllm.serving.async_llm.OutputRouter.leave

    def fail(self, error, request_id=None):
        """End one stream, or all, with an error."""
        for key in list(self.queues) if request_id is None else [request_id]:
            if (queue := self.queues.pop(key, None)) is not None:
                queue.fail(error)


check("11.2")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# An `AsyncLLM` is the front end without HTTP: an engine for programs that have an event loop. Jupyter has one running, so a cell may
# simply `await` (in a script it would stand in an `async def` that `asyncio.run` starts).
#
# Your router in it, and three readers of the *echo model*, whose every token can be computed beforehand: one reads at once, one comes by
# three times a second, one leaves after ten tokens.

# %% id="plug-in-run"
from minivllm import SamplingParams
from minivllm.serving.async_llm import AsyncLLM
from minivllm.serving.echo_model import expected_token_ids

need("11.2")
aborted, readings = [], {}


def make_router(abort):
    return OutputRouter(lambda request_id: (aborted.append(request_id), abort(request_id)))


async def reader(llm, name, prompt, pause=0.0, leave_after=None):
    """Read a stream; note when, and how many tokens have come by then."""
    tokens, notes = [], readings.setdefault(name, [])
    ask = SamplingParams(temperature=0, max_tokens=60)
    async with llm.stream({"prompt_token_ids": prompt}, ask) as stream:
        async for output in stream:
            tokens += output.outputs[0].token_ids
            notes.append((time.perf_counter() - begin, len(tokens)))
            if leave_after and len(tokens) >= leave_after:
                break
            await asyncio.sleep(pause)
    return tokens


prompts = {name: [10 + i] * 5 for i, name in enumerate(("reads at once", "comes by", "leaves"))}
async with AsyncLLM("echo:20", block_size=4, max_model_len=128, make_router=make_router) as llm:
    begin = time.perf_counter()
    answers = await asyncio.gather(
        reader(llm, "reads at once", prompts["reads at once"]),
        reader(llm, "comes by", prompts["comes by"], pause=0.3),
        reader(llm, "leaves", prompts["leaves"], leave_after=10),
    )
    left = await llm.snapshot()

for (name, prompt), tokens in zip(prompts.items(), answers):
    right = tokens == expected_token_ids(prompt, 60, 128)[: len(tokens)]
    print(
        f"{name:14} {len(tokens):3} tokens in {len(readings[name]):2} pieces; each the right one: {right}"
    )
print(f"aborted: {len(aborted)} request; still open in the core: {len(left['requests'])}")

# %% id="plug-in-figure"
figure, axes = new_figure(width=6.5, height=2.6)
for (name, notes), marker in zip(readings.items(), ("o", "s", "X")):
    axes.plot(*zip((0, 0), *notes), marker=marker, markersize=4, drawstyle="steps-post", label=name)
axes.set(xlabel="seconds", ylim=(0, 65))
axes.set_title("tokens read", loc="left", fontsize=10)
axes.legend(frameon=False)
show(
    figure,
    alt="Tokens read over time. "
    + " ".join(
        f"{name}: {notes[-1][1]} tokens by {notes[-1][0]:.1f} s, in {len(notes)} pieces."
        for name, notes in readings.items()
    ),
)

# %% [markdown] id="plug-in-reading"
# The slow reader missed nothing and held up nobody: what it did not read was added up. The one who left was aborted once.
#
# ## The tree
#
# Now the real thing: the command `minivllm serve`, with everything that you have built, as a child of this notebook. It takes a free port
# of this machine only, and ends with this notebook, however that ends. Sixteen seats are enough for today (`--max-num-seqs`): we can send
# more people than that, and want to see them wait.

# %% id="serve"
import os

import psutil

server = serve(lab.model, "--max-model-len", "2048", "--max-num-seqs", "16")
seeds = iter(range(1_000_000))  # of prompts that this server has not seen yet


def describe(process, text):
    megabytes = process.memory_info().rss / 1e6
    print(f"{text:46} process {process.pid:7}   {megabytes:6,.0f} MB")


front_end = psutil.Process(server.process.pid)
(core,) = front_end.children()
describe(psutil.Process(os.getpid()), "this notebook's kernel")
describe(front_end, "  front end: HTTP, text, your detokenizer")
describe(core, "    engine core: scheduler, blocks, the model")

# %% [markdown] id="sse-text"
# This is what an answer looks like on the wire. `Transfer-Encoding: chunked` lets the server send while it does not know the length yet: a
# line with the size in hexadecimal, then so many bytes. In them are **server-sent events**: `data: `, a JSON object, an empty line. The last
# one says `[DONE]`. (Writing and reading them is given: `api_server.py` and `bench/http_stream.py`.)

# %% id="sse"
import socket
from urllib.parse import urlsplit

address = urlsplit(server.url)
body = json.dumps({"prompt": "The llama", "max_tokens": 2, "temperature": 0, "stream": True})
with socket.create_connection((address.hostname, address.port)) as connection:
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    )
    print(connection.makefile("rb").read().decode().replace("\r\n", "\n"))

# %% [markdown] id="wonder-text"
# ## Kill a client
#
# Four clients, each a process of its own, ask for long answers. We look at the blocks they hold after every step or so, and then kill one
# the hard way: no goodbye, no last message.

# %% id="wonder"
import subprocess
import sys

CLIENT = """
import json, sys, urllib.request
url, name, prompt = sys.argv[1:]
body = {"prompt": json.loads(prompt), "max_tokens": 1700, "ignore_eos": True, "stream": True, "request_id": name}
request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request):
    pass
"""
rng = random.Random(0)
prompt_of = {
    name: [rng.randrange(tokenizer.vocab_size) for _ in range(100 + 60 * i)]
    for i, name in enumerate("ABCD")
}


def blocks_now():
    """{client: number of blocks}, between two steps of the core."""
    return {r["request_id"].split("-")[1]: len(r["block_ids"]) for r in server.stats()["requests"]}


clients = {
    name: subprocess.Popen([sys.executable, "-c", CLIENT, server.url, name, json.dumps(prompt)])
    for name, prompt in prompt_of.items()
}
deadline = time.perf_counter() + 60
while sum(n > 0 for n in blocks_now().values()) < len(clients) and time.perf_counter() < deadline:
    await asyncio.sleep(0.02)
samples, killed, freed = [], None, None
begin = time.perf_counter()
while (now := time.perf_counter() - begin) < 2 or (freed is None and now < 30):
    held = blocks_now()
    samples.append((time.perf_counter() - begin, held))
    if killed is None and now > 0.8:
        clients["C"].kill()
        killed, killed_blocks = time.perf_counter() - begin, held.get("C", 0)
    if killed is not None and freed is None and "C" not in samples[-1][1]:
        freed = samples[-1][0]
    await asyncio.sleep(0.0 if killed is not None and freed is None else 0.03)
for client in clients.values():
    client.kill()
    client.wait()
print(f"C was killed. {1000 * (freed - killed):.0f} ms later its {killed_blocks} blocks were free.")

# %% id="wonder-figure"
recall("11.p1")
figure, axes = new_figure(width=6.5, height=2.8)
times = [t for t, _ in samples]
areas = axes.stackplot(
    times,
    [[held.get(name, 0) for _, held in samples] for name in clients],
    step="post",
    alpha=0.7,
    edgecolor="white",
)
below = 0
for name, area, hatch in zip(clients, areas, ("", "//", "xx", "..")):
    area.set_hatch(hatch)
    height = samples[0][1].get(name, 0)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    axes.text(times[0] + 0.05, below + height / 2, name, va="center", fontsize=9, bbox=white)
    below += height
axes.axvline(killed, color="black", linestyle="--")
axes.text(killed, axes.get_ylim()[1], " C is killed", va="top", fontsize=9)
axes.set(xlabel="seconds", ylim=(0, None))
axes.set_title("blocks held, by client", loc="left", fontsize=10)
show(
    figure,
    alt=f"Blocks held by four clients over {times[-1]:.1f} s, stacked. All grow slowly. At {killed:.2f} s client C is killed, and"
    f" {1000 * (freed - killed):.0f} ms later its {killed_blocks} blocks are gone; the others grow on.",
)

# %% [markdown] id="wonder-reading"
# Nobody told the engine that C died. The system closed its connection, the front end saw it and closed the stream, your `leave` was called,
# and an abort went to the core, which takes commands between two steps. The other three never noticed.
#
# ## Exercise 11.3 · A load that does not wait
#
# {{exercise 11.3}}
#
# **Closed loop**: eight clients, each sends its next request when its last is answered. If the server slows down, so do they, and the queue
# never grows beyond eight. **Open loop**: people come when they come. They do not know of each other, so the pauses between them are
# exponentially distributed: a *Poisson process*.
#
# - **`poisson_arrivals(rate, n, rng)`** returns `n` growing times in seconds (the first comes one pause after 0), with `rate` requests a second on average. `rng` is a
#   `random.Random`; draw from nothing else, so that a run can be repeated.
# - **`await open_loop(ask, arrivals)`** sends request `i` at `arrivals[i]` seconds, whatever has been answered by then. `ask(i)` is an
#   asynchronous generator: `async for token in ask(i)` sends the request and brings its tokens. Returns `(due, times)` for each request, in
#   order: when it *was to be* sent (its arrival, even if the client was late) and when each token came, all in seconds since the load
#   began. A request that raises an error keeps the times it has; the others go on.
# - **`measure(requests, max_ttft, max_tpot)`** makes of that `{"ttft": [...], "tpot": [...], "itl": [...], "goodput": ...}`. TTFT: one for each
#   request that got a token. TPOT: (last - first) / (tokens - 1), for those with two or more. ITL: every pause between two tokens of a
#   request. **Goodput**: requests a second (from the first arrival to the last token) that met both limits. A value equal to a limit meets it; a
#   request of one token has no TPOT to miss; no tokens at all is a goodput of 0.

# %% id="exercise-11-3" tags=["nbval-check-output"]
from checks import check
import asyncio
import time
from itertools import pairwise


def poisson_arrivals(rate, n, rng):
    """n growing times in seconds, rate of them a second on average; the first comes one pause after 0."""
    # BEGIN SOLUTION
    times, now = [], 0.0
    for _ in range(n):
        now += rng.expovariate(rate)
        times.append(now)
    return times
    # END SOLUTION


async def open_loop(ask, arrivals):
    """Send request i at arrivals[i], whatever has been answered. [(due, times of its tokens)]."""
    # BEGIN SOLUTION
    begin = time.perf_counter()

    async def one(i, due):
        await asyncio.sleep(begin + due - time.perf_counter())
        times = []
        try:
            async for _ in ask(i):
                times.append(time.perf_counter() - begin)
        except Exception:
            pass  # what it got until then counts
        return due, times

    return await asyncio.gather(*(one(i, due) for i, due in enumerate(arrivals)))
    # END SOLUTION


def measure(requests, max_ttft, max_tpot):
    """{"ttft", "tpot", "itl": lists of seconds, "goodput": good requests a second}."""
    # BEGIN SOLUTION
    ttft, tpot, itl, good = [], [], [], 0
    for due, times in requests:
        if not times:
            continue
        gaps = [b - a for a, b in pairwise(times)]
        ttft.append(times[0] - due)
        itl += gaps
        if gaps:
            tpot.append(sum(gaps) / len(gaps))
        good += ttft[-1] <= max_ttft and (not gaps or tpot[-1] <= max_tpot)
    if not ttft:
        return {"ttft": [], "tpot": [], "itl": [], "goodput": 0.0}
    begin = min(due for due, _ in requests)
    end = max(times[-1] for _, times in requests if times)
    return {"ttft": ttft, "tpot": tpot, "itl": itl, "goodput": good / (end - begin)}
    # END SOLUTION


check("11.3")

# %% [markdown] id="experiment"
# ## Experiment 1 · Latency against load
#
# First a number of the kind that brochures print: eight clients, prompts of 512 tokens, answers of 128. Then the same server with three kinds of
# users, and 1 to 64 of them (a closed loop; `bench.serve` is minivllm's load generator). Prompts are random tokens, so that the prefix
# cache has nothing to find.

# %% id="experiment-closed-loop"
from minivllm.bench import metrics
from minivllm.bench.serve import Target, run_load
from minivllm.bench.workloads import Workload, make


def random_prompts(n, prompt_len, max_tokens):
    """Requests that the server has not seen: its prefix cache finds nothing."""
    sizes = {"prompt_len": prompt_len, "max_tokens": max_tokens, "vocab_size": tokenizer.vocab_size}
    return make("fixed", n=n, seed=next(seeds), **sizes)


async def closed_loop(num_clients, prompt_len, max_tokens, n):
    """Median TTFT and TPOT in ms, output tokens a second, requests a second."""
    target = Target(server.url, lab.model, extra={"ignore_eos": True})
    work = random_prompts(n, prompt_len, max_tokens)
    result = (await run_load(target, work, max_concurrency=num_clients)).result({})
    if result["errors"]:
        raise RuntimeError(result["errors"][0])
    return [
        result["ttft_ms"]["p50"],
        result["tpot_ms"]["p50"],
        result["output_throughput"],
        result["request_throughput"],
    ]


small = 4 if lab.fast else 1
shapes = {
    "question": (32, 32 // small),
    "document": (512 // small, 8),
    "story": (16, 64 // small),
}
levels = [1, 4, 16] if lab.fast else [1, 2, 4, 8, 16, 32, 64]
seconds_a_shape = 6 if lab.fast else 40
await closed_loop(2, 64, 4, n=4)  # warm-up
brochure = await closed_loop(8, 512 // small, 128 // small, n=8)
curves = {name: {} for name in shapes}
for name, (prompt_len, max_tokens) in shapes.items():
    begin = time.perf_counter()
    for level in levels:
        if time.perf_counter() - begin > seconds_a_shape:
            print(f"{name}: stopped before {level} clients, for time")
            break
        curves[name][level] = await closed_loop(level, prompt_len, max_tokens, n=max(2, level))

print(
    f"The brochure: TTFT {brochure[0]:.0f} ms, TPOT {brochure[1]:.0f} ms, {brochure[2]:.0f} tokens/s\n"
)
print(f"{'':10}" + "".join(f"{level:>9}" for level in levels) + "   clients")
for i, what in enumerate(("TTFT ms", "TPOT ms", "tokens/s")):
    for name, curve in curves.items():
        print(
            f"{name:10}"
            + "".join(f"{curve[n][i]:9.0f}" if n in curve else f"{'':9}" for n in levels)
            + f"   {what}"
        )

# %% id="experiment-figure"
figure, both = new_figure(width=8.0, height=3.0, columns=2)
for axes, i, title in zip(
    both, (0, 1), ("median time to first token, ms", "median time per output token, ms")
):
    for (name, curve), marker in zip(curves.items(), "osD"):
        axes.plot(list(curve), [values[i] for values in curve.values()], marker=marker, label=name)
    axes.plot([8], [brochure[i]], "*", color="black", markersize=12, label="brochure")
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, levels)
    axes.set_xlabel("clients")
    axes.set_title(title, loc="left", fontsize=10)
both[0].set_yscale("log")
both[1].set_ylim(0)
both[1].legend(frameon=False, fontsize=8)
told = [
    f"{name}: time to first token {curve[min(curve)][0]:.0f} ms with one client, {curve[max(curve)][0]:.0f} with {max(curve)};"
    f" time per token {curve[min(curve)][1]:.0f} and {curve[max(curve)][1]:.0f} ms."
    for name, curve in curves.items()
]
show(
    figure,
    alt="Two plots of latency against the number of clients, for three kinds of users. "
    + " ".join(told)
    + f" A star at 8 clients, the brochure: {brochure[0]:.0f} and {brochure[1]:.0f} ms.",
)
best = max(curves["question"])
save_result(
    "11",
    tokens_per_second=curves["question"][best][2],
    what=f"{best} clients over HTTP",
    requests=best,
    alone=curves["question"][1][2],
    data={
        "device": lab.device,
        "dtype": lab.dtype,
        "model": lab.model,
        "curves": {name: {str(n): v for n, v in curve.items()} for name, curve in curves.items()},
    },
)

# %% [markdown] id="experiment-reading"
# One server, and the star tells of none of these users. With documents each further client is felt at once: the first token waits in a queue of
# prefills, and running answers pause for each of them. A client with questions, or with stories, hardly notices others like it, up to sixteen. Then all seats are
# taken: the time per token stays, and the time to first token is the wait for a seat. **Measure your own shapes, over the loads you
# expect, and look for the knee**: up to there another client is nearly free, beyond it everyone waits.
#
# ## Experiment 2 · The queue that a closed loop hides
#
# Your generator, and people with questions. They come half as fast as sixteen clients were served; nearly as fast; half as fast again.

# %% id="open-loop"
from minivllm.bench.http_stream import post_events

need("11.3")
prompt_len, max_tokens = shapes["question"]
_, _, _, capacity = await closed_loop(16, prompt_len, max_tokens, n=32)  # requests a second
alone = curves["question"][1]
max_ttft, max_tpot = 5 * alone[0] / 1000, 4 * alone[1] / 1000
seconds = 2 if lab.fast else 7
loads = {}
for factor in (0.5, 0.9, 1.5):
    arrivals = poisson_arrivals(
        factor * capacity, max(3, round(factor * capacity * seconds)), random.Random(1)
    )
    work = random_prompts(len(arrivals), prompt_len, max_tokens)

    async def ask(i, work=work):
        request = work.requests[i]
        body = {
            "prompt": request.prompt_token_ids,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        async for event in post_events(f"{server.url}/v1/completions", body):
            yield event

    requests = await open_loop(ask, arrivals)
    loads[factor] = requests, measure(requests, max_ttft, max_tpot)
print(
    f"A closed loop of 16: {capacity:.1f} requests/s. Good: first token within {1000 * max_ttft:.0f} ms, then one every {1000 * max_tpot:.0f} ms."
)
for factor, (_, found) in loads.items():
    p50, p99 = (1000 * metrics.percentile(found["ttft"], p) for p in (50, 99))
    worst = 1000 * metrics.percentile(found["itl"], 99)
    print(
        f"{factor * capacity:5.1f} requests/s come: TTFT p50 {p50:6.0f}, p99 {p99:6.0f} ms; ITL p99 {worst:4.0f} ms;"
        f" goodput {found['goodput']:4.1f}/s"
    )

# %% id="open-loop-figure"
recall("11.p2")
figure, (left, right) = new_figure(width=8.0, height=2.8, columns=2)
for (factor, (requests, _)), marker in zip(loads.items(), "osX"):
    points = [(due, 1000 * (times[0] - due)) for due, times in requests if times]
    left.plot(*zip(*points), marker, markersize=4, label=f"{factor * capacity:.1f} requests/s")
left.set(xlabel="when it came, s", ylim=(0, None))
left.set_title("time to first token, ms", loc="left", fontsize=10)
left.legend(frameon=False, fontsize=8, loc="upper left")
right.bar(
    [f"{factor * capacity:.1f}" for factor in loads],
    [found["goodput"] for _, found in loads.values()],
    color="#009E73",
    alpha=0.7,
    hatch="//",
)
right.set_xlabel("requests/s that come")
right.set_title("goodput, requests/s", loc="left", fontsize=10)
show(
    figure,
    alt="Time to first token against arrival, and goodput. "
    + " ".join(
        f"At {factor * capacity:.1f} requests/s: the first request waits {1000 * found['ttft'][0]:.0f} ms, the last"
        f" {1000 * found['ttft'][-1]:.0f}; goodput {found['goodput']:.1f}/s."
        for factor, (_, found) in loads.items()
    ),
)

# %% [markdown] id="open-loop-reading"
# Beyond the capacity each request waits longer than the one before, for as long as the load lasts, and all that work is for people who have
# gone. Throughput says that the server is doing splendidly. A real one refuses in time: `--max-open-requests`, status 429, `Retry-After`.
#
# ## Your engine answers
#
# `curl` first. Put the line into a terminal, too: it works while this notebook runs. (So does the address itself, in a browser.)

# %% id="curl"
import shlex
import shutil

body = {
    "model": lab.model,
    "messages": [{"role": "user", "content": "What is a llama?"}],
    "max_tokens": 40,
    "temperature": 0,
}
command = [
    "curl",
    "-s",
    f"{server.url}/v1/chat/completions",
    "-H",
    "Content-Type: application/json",
    "-d",
    json.dumps(body),
]
print(shlex.join(command), end="\n\n")
if shutil.which("curl"):
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
else:
    print("(curl is not installed here; Python sends the same.)")
    answer = server.post("/v1/chat/completions", **body)
print(answer["choices"][0]["message"]["content"])
print(answer["usage"])

# %% [markdown] id="openai-text"
# And the client that thousands of programs are written with. It was made for another company's models; it is told an address, and talks to
# your scheduler.

# %% id="openai"
messages = [{"role": "user", "content": "Write two lines about a llama 🦙 that serves tea."}]
try:
    from openai import OpenAI
except ImportError:
    print("(openai is not installed, pip install openai; plain HTTP gets the same answer.)")
    answer = server.post("/v1/chat/completions", model=lab.model, messages=messages, max_tokens=60)
    print(answer["choices"][0]["message"]["content"])
else:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for chunk in client.chat.completions.create(
        model=lab.model, messages=messages, max_tokens=60, stream=True
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
mine = components()
print("\n" + "\n".join(line for line in mine.describe().splitlines() if line.split()[0] in mine))

# %% [markdown] id="openai-reading"
# The lines at the end are the parts of the server that are yours, and the router is, too. Every lab you passed is among them; what you skipped
# is minivllm's. The router's file, yours and minivllm's:

# %% id="show-diff"
show_diff("serving/async_llm.py")

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **One concurrency and one prompt shape, 512/128.** It says where one point lies, and nothing about the knee.
# - **Decoding token by token.** English is fine; the first emoji is not.
# - **Waiting for a reader.** `await queue.put(...)` on a full queue, and one phone in a tunnel stops the batch.
# - **Forgetting those who left.** Blocks stay taken, the batch computes for nobody, and the server is slow without anybody there.
# - **Something slow in the event loop.** A `time.sleep`, a large JSON, a tokenizer on a novel: every stream stands still meanwhile.
# - **Counting TTFT from the sending.** If the client is late, the wait vanishes from the books (*coordinated omission*).
# - **Reporting throughput beyond the knee.** Goodput is what people got in time.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | Another Python runs the notebook. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | "This lab runs a server, which needs fastapi ..." | `pip install -e '.[serve]'` in the clone's folder, then restart the kernel |
# | "The server did not start" | Its last lines stand below. A part of yours that fails to load is named; `skip` or `reset` its exercise |
# | `'await' outside function` | The cell runs as a script. A notebook may await at the top of a cell, a `.py` file may not |
# | `asyncio.run() cannot be called from a running event loop` | Write `await ...` instead; the notebook's loop is running already |
# | `name 'server' is not defined`, or connection refused | The kernel was restarted, and the server went with it. Run the cell under "The tree" |
# | `PermissionError` for a socket | Some company machines forbid listening. The exercises work without; the server does not |
# | The answers are nonsense | It is a very small model. Are they the same with `use("detokenizer", "reference")`? Then it is the model |
# | I am stuck | `hint("11.2")`, again for the next one, then `solution("11.2")`. `skip("11.2")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, in place of the question mark and run the cell.
#
# {{question 11.q1}}

# %% id="quiz-11-q1" tags=["nbval-check-output"]
quiz("11.q1", "b")

# %% [markdown] id="quiz-11-q2-text"
# {{question 11.q2}}

# %% id="quiz-11-q2" tags=["nbval-check-output"]
quiz("11.q2", "c")

# %% [markdown] id="quiz-11-q3-text"
# {{question 11.q3}}

# %% id="quiz-11-q3" tags=["nbval-check-output"]
quiz("11.q3", "b")

# %% [markdown] id="quiz-11-q4-text"
# {{question 11.q4}}

# %% id="quiz-11-q4" tags=["nbval-check-output"]
quiz("11.q4", lambda rate, ttft, tokens, tpot: rate * (ttft + tokens * tpot) / 1000)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - The core never waits for anybody; the front end waits for everybody, and does nothing slow. So they are two processes.
# - Tokens are bytes. A stream gives out whole characters, and keeps at most three bytes.
# - A queue for each reader, of one output that grows: nothing lost, nobody held up. A request whose reader leaves is aborted within a step.
# - A closed loop measures capacity, an open loop what people feel. Latency is a curve over load, for each shape of request.

# %% [markdown] id="further"
# ## Further learning
#
# - Schroeder et al., *Open Versus Closed: A Cautionary Tale* (NSDI 2006): how far wrong a closed loop leads.
# - Zhong et al., *DistServe* (2024), arXiv:2401.09670: goodput, and prefill and decode on different machines.
# - The HTML standard's chapter on server-sent events: the framing, with reconnection and event names that nobody here uses.
# - `minivllm/serving/`: `engine_process.py` is the core's loop on one screen, `api_server.py` the HTTP side. In the
#   repository, `python -m tests.serving.soak --seconds 60` loads a server with rude clients and checks every token.

# %% [markdown] id="next"
# ## The end of the tree
#
# From a matrix product to a server that strangers use: all of it is yours now. What vLLM has beyond it is more of the same (more models, more
# hardware, more machines), and you know where it would go. The last cell stops the server.

# %% id="journey"
server.stop()
journey()
