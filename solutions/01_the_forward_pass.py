# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   minivllm:
#     lab: "01"
#     title: The forward pass
#     version: 1
#     gpu: No. It runs on any laptop; a GPU only makes it faster.
#     time: about 60 minutes
#     download: 98 MB once (SmolLM2-135M, a small language model), if it is not here yet
#     prerequisites: Lab 00, and PyTorch as far as indexing, broadcasting and matrix products.
#     required: required; every later lab changes how this computation is scheduled, never what it computes
# ---

# %% [markdown] id="title"
# # Lab 01 · The forward pass
#
# A language model is often drawn as a tower of mysteries. It is 30 times the same layer, and the layer is a dozen lines. Today you write its three
# essential functions. Then you stack them 30 times, give them the weights of a real model, and they say the same as a library that a
# million people use, to four decimals.

# %% [markdown] id="box"
# {{box}}
#
# Run the cells from top to bottom with Shift+Enter. The next one loads the model.

# %% id="setup"
import inspect
import time

import torch
import torch.nn.functional as F

from checks import hint, need, predict, progress, quiz, recall, reset, skip, solution, start, use
from checks import journey, new_figure, save_result, show, show_diff
from minivllm.models.layers import rms_norm
from minivllm.models.rope import rotary_table
from minivllm.sim.hardware import best_time, count_work

lab = start("01", model="smollm2-135m")
# float32, so that what you compare today differs by rounding only
decoder = lab.load_decoder().float()
config, tokenizer = decoder.config, lab.load_tokenizer()

# %% [markdown] id="objectives"
# ## What you will be able to do
#
# - Follow a token from its id to the scores of its successors, with the shape of everything on the way.
# - Implement rotary position embedding, causal attention with grouped queries, and a decoder layer.
# - Say where the operations and the bytes of a forward pass go, and why the two disagree about time.

# %% [markdown] id="big-idea"
# ## The big idea
#
# Think of a **draft that passes through 30 editors**. It begins as raw notes, one line for each token. Each editor reads the whole draft,
# thinks, and *adds* remarks to the lines. Nobody erases anything. The last reader looks at what has piled up on the last line, and guesses
# the next word.
#
# The draft is the **residual stream**: a vector of 576 numbers for each token. Each editor is a **layer** and makes two additions:
#
# ```text
#  x ---+------------------------------> + ---+--------------------------> + ---> next layer
#       |                                ^    |                            ^
#       +-> norm -> look around -> o ----+    +-> norm -> think (MLP) -----+
#                   (attention)
# ```
#
# *Attention* is the only place where tokens see each other: each line collects from earlier lines what it needs. The *MLP* then works on
# each line alone. That is all.
#
# **Where the picture breaks.** Real remarks stand beside the text. Here they are *added into the same 576 numbers*. A layer can cancel
# what an earlier one wrote by adding its negative, and thousands of different remarks share 576 numbers, overlapping. And an editor reads
# line after line, while a layer does all lines at once: for a processor, that makes all the difference (Lab 00).

# %% [markdown] id="predict"
# ## Predict first
#
# Two commitments for the plots at the end.
#
# {{question 1.p1}}

# %% id="predict-1-p1"
predict("1.p1", "3000")

# %% [markdown] id="predict-1-p2-text"
# {{question 1.p2}}

# %% id="predict-1-p2"
predict("1.p2", "more")

# %% [markdown] id="example"
# ## A small example, by hand
#
# **Attention.** Three tokens, one head. The last token's query has been compared with the three keys, and the scores are 0, ln 2 and ln 4.
# Softmax takes `e` to the power of each (1, 2, 4) and divides by their sum, 7: the weights are 1/7, 2/7, 4/7. If the values are 7, 0 and
# 14, the token collects 1 + 0 + 8 = **9**. The token before it must not see the last one. Its scores, say, are 0 and ln 2: weights 1/3 and
# 2/3, and it collects 7/3. The first token sees itself only, and collects 7.
#
# **Position.** Scores are dot products, and a dot product does not know who stands where. So before comparing, each query and key is
# *turned*, like the hand of a clock, by an angle that grows with its position. Two hands of length 1, both starting at 3 o'clock, one radian a
# position: the dot product is the cosine of the angle between them.
#
# | query at | key at | angle between | score |
# |---|---|---|---|
# | 2 | 0 | 2 radians | cos 2 = -0.416 |
# | 5 | 3 | 2 radians | cos 2 = -0.416 |
# | 5 | 4 | 1 radian | cos 1 = 0.540 |
#
# Only the distance is left. A real head has 32 such hands, from fast ones (neighbouring words) to slow ones (chapters).

# %% [markdown] id="exercise-1-1-text"
# ## Exercise 1.1 · Turn by position
#
# {{exercise 1.1}}
#
# Write **`apply_rope(x, positions, theta)`** (rotary position embedding).
#
# - `x` is `[T, num_heads, D]`: `T` tokens, each with some heads of `D` numbers (`D` is even). `positions` is `[T]`, int64: where each
#   token stands in its text. They need not be 0, 1, 2, ...
# - A head is `D/2` planes. **Plane `i` is dimensions `i` and `i + D/2`**: the first half of the head holds all first coordinates, the second half
#   all second ones.
# - A token at position `p` is turned in plane `i` by `p * theta ** (-2 * i / D)` radians, all its heads alike. A point `(a, b)` turned by an
#   angle is `(a cos - b sin, b cos + a sin)`.
# - Return a new tensor of x's shape and dtype. `x` may be bfloat16, which cannot count past 256: compute the angles in float32.
#
# With `D = 2` there is one plane, and it turns by `p` radians: the head `(1, 2)` at position 1 becomes (0.540 - 1.683, 1.081 + 0.841) =
# (-1.143, 1.922). With `D = 4` and `theta = 16` plane 0 turns by `p` and plane 1 by `p / 4`.

# %% id="exercise-1-1" tags=["nbval-check-output"]
from checks import check
import torch


def apply_rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, num_heads, D] with each head turned by its token's position, positions [T]."""
    # solution: minivllm.models.rope.apply_rope


check("1.1")

# %% [markdown] id="rope-picture"
# Your function on a query and a key that are equal, all ones, moved apart. This is the score before anything was learned: near tokens
# match best, and what is far fades into waves.

# %% id="rope-plot"
need("1.1")
distances = torch.arange(200)
ones = torch.ones(len(distances), 1, config.head_dim)
turned = apply_rope(ones, distances, config.rope.theta)[:, 0]
scores = (turned @ turned[0]) / config.head_dim

figure, axes = new_figure(height=2.6)
axes.plot(distances, scores)
axes.set(xlabel="distance between query and key", ylabel="score", xlim=(0, 199))
axes.set_title("The same query and key, moved apart", loc="left")
show(
    figure,
    alt="Score against distance, falling in waves: "
    + ", ".join(f"{scores[d]:.2f} at {d}" for d in (0, 5, 50, 199)),
)

# %% [markdown] id="exercise-1-2-text"
# ## Exercise 1.2 · Look around
#
# {{exercise 1.2}}
#
# Write **`causal_attention(q, k, v, *, scale=None, sliding_window=None)`**: softmax of the scaled, masked scores, times the values.
#
# - `q` is `[T, H, D]`, `k` and `v` are `[S, Hkv, D]`, with `S >= T`. Return `[T, H, D]` in q's dtype; compute in float32.
# - **Scores**: the dot product of a query and a key, times `scale`; `None` means `1 / sqrt(D)`.
# - **Grouped queries**: `H` is a multiple of `Hkv`. Heads in a row share a KV head: query head `h` reads KV head `h // (H // Hkv)`.
# - **Causal, from the end**: the `T` queries are the *last* `T` of the `S` positions. Query `i` stands at position `p = S - T + i` and sees
#   positions `0 .. p`, itself included. (Today `T = S` in the model. Lab 03 will need `T = 1`.)
# - `sliding_window=w`, if given, makes it forgetful, as in Mistral: it sees the last `w` of those only, `p - w + 1 .. p`.
#
# | T = 2, S = 4 | key 0 | key 1 | key 2 | key 3 |
# |---|---|---|---|---|
# | query 0, at position 2 | sees | sees | sees | |
# | query 1, at position 3 | sees | sees | sees | sees |
# | query 1, with a window of 2 | | | sees | sees |

# %% id="exercise-1-2" tags=["nbval-check-output"]
from checks import check
import torch


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention: q [T, H, D] are the last T of the S positions of k and v [S, Hkv, D]."""
    # solution: minivllm.attention.naive.causal_attention


check("1.2")

# %% [markdown] id="attention-picture"
# Let the real model run on your attention, and look over its shoulder. A trick shows the weights themselves: if `v` is a unit matrix, what
# attention collects *is* its weights. We record two of the 270 heads.

# %% id="attention-weights"
need("1.2")


def weights_of_heads(token_ids, wanted):
    """{(layer, head): attention weights [T, T]} of the real model, computed by your
    causal_attention."""
    T, found = len(token_ids), {}
    unit = torch.eye(config.head_dim, device=lab.device)[:T, None].repeat(1, config.num_kv_heads, 1)
    x = F.embedding(token_ids, decoder.embed_tokens)
    cos, sin = rotary_table(torch.arange(T, device=lab.device), decoder.frequencies, x.dtype)
    for number, layer in enumerate(decoder.layers):

        def attend(q, k, v, number=number, **settings):
            weights = causal_attention(q, k, unit, **settings)[:, :, :T]
            found.update({(n, h): weights[:, h].cpu() for n, h in wanted if n == number})
            return causal_attention(q, k, v, **settings)

        x = layer(x, cos, sin, attend)
    return found


# %% id="attention-plot"
text = "The red fox saw a green bird. The red fox saw a green bird."
token_ids = torch.tensor(tokenizer.encode(text), device=lab.device)
words = [tokenizer.decode([token]).strip() for token in token_ids.tolist()]
heads = {(16, 0): "the word before", (17, 5): "what came next last time"}
with torch.inference_mode():
    weights = weights_of_heads(token_ids, heads)

figure, _ = new_figure(width=8.6, height=4.4)
figure.clear()
for axes, ((layer, head), what) in zip(figure.subplots(1, 2), heads.items()):
    axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(words)), words, rotation=90)
    axes.set_yticks(range(len(words)), words)
    axes.set_title(f"layer {layer}, head {head}: {what}", loc="left", fontsize=10)
    axes.set(xlabel="key", ylabel="query")
before = weights[16, 0].diagonal(-1).mean()
after = weights[17, 5].diagonal(-7)[1:].mean()
show(
    figure,
    alt=f"Two maps of attention weights for '{text}', darker is more. Layer 16, head 0: a line below the"
    f" diagonal, each token gives {before:.0%} of its weight to the one before. Layer 17, head 5: in the second"
    f" half, a line seven tokens back, {after:.0%} of the weight on what followed the same word the first time.",
)

# %% [markdown] id="attention-reading"
# Nobody programmed these two. Together they are an *induction head*: "when I saw `red` before, `fox` came next". The dark first column is
# a habit of many heads with nothing to do: softmax has to put the weight somewhere, and the first token is always there.

# %% [markdown] id="exercise-1-3-text"
# ## Exercise 1.3 · A layer
#
# {{exercise 1.3}}
#
# Write **`decoder_layer(x, weights, positions)`**: the picture from the big idea, in code. `x` is the residual stream `[T, hidden]`,
# `positions` `[T]`; return the stream after the layer, `[T, hidden]`, and leave `x` as it is.
#
# `weights` has these attributes. Matrices are `[out, in]`, so `F.linear(h, weights.q_proj)`, which is `h @ weights.q_proj.T`, takes
# `[T, in]` to `[T, out]`.
#
# | attribute | shape |
# |---|---|
# | `input_layernorm`, `post_attention_layernorm` | hidden |
# | `q_proj` | num_heads * head_dim, hidden |
# | `k_proj`, `v_proj` | num_kv_heads * head_dim, hidden |
# | `o_proj` | hidden, num_heads * head_dim |
# | `gate_proj`, `up_proj` | intermediate, hidden |
# | `down_proj` | hidden, intermediate |
# | `head_dim`, `rms_norm_eps`, `rope_theta` | numbers |
#
# 1. `h` is `x`, normed with `input_layernorm` and `rms_norm_eps`. From `h` make q, k and v, and cut each into heads, `[T, num_heads, head_dim]` (k and v:
#    `num_kv_heads`): the first `head_dim` numbers of a row are head 0, the next are head 1.
# 2. Turn q and k by their positions, with `rope_theta`. Attend. Join the heads again, `[T, num_heads * head_dim]`, and
#    put the result through `o_proj`. **Add it to x.**
# 3. Norm the new stream with `post_attention_layernorm`. The MLP is silu(gate) times up, number by number, put through `down_proj`
#    (`F.silu`; gate and up are the normed stream through `gate_proj` and `up_proj`). **Add it to the stream.**
#
# `rms_norm(x, weight, eps)`, `apply_rope` and `causal_attention` are at hand. In your notebook they are the ones above; the check brings
# minivllm's, so that this exercise is judged by itself.

# %% id="exercise-1-3" tags=["nbval-check-output"]
from checks import check
import torch
import torch.nn.functional as F


def decoder_layer(x: torch.Tensor, weights, positions: torch.Tensor) -> torch.Tensor:
    """The residual stream x [T, hidden], one layer on; positions [T]."""
    # solution: minivllm.models.decoder.decoder_layer


check("1.3")

# %% [markdown] id="plug-in"
# ## Plug it in
#
# A model is your layer 30 times. Before the first, each token id picks its row of the *embedding* matrix; after the last, one more norm, and
# the same matrix turns the stream into logits, a score for each of 49,152 tokens.

# %% id="plug-in-run"
need("1.1", "1.2", "1.3")


@torch.inference_mode()
def my_forward(token_ids):
    """Logits [T, vocab_size] of token_ids [T], by your functions."""
    x = F.embedding(token_ids, decoder.embed_tokens)
    positions = torch.arange(len(token_ids), device=token_ids.device)
    for number in range(config.num_layers):
        x = decoder_layer(x, decoder.layer_weights(number), positions)
    return decoder.logits(rms_norm(x, decoder.norm, config.rms_norm_eps))


token_ids = torch.tensor(tokenizer.encode("The capital of France is"), device=lab.device)
logits = my_forward(token_ids)
print(f"{len(token_ids)} tokens in, logits of shape {list(logits.shape)} out")
for token in logits[-1].topk(5).indices.tolist():
    print(f"  {logits[-1, token]:6.2f}  {tokenizer.decode([token])!r}")

# %% [markdown] id="wonder"
# Is it right, or does it only look right? Ask transformers, the library most models are published with.

# %% id="wonder-run"
import transformers
from minivllm.models.hub import resolve_model

transformers.utils.logging.disable_progress_bar()
folder = resolve_model(lab.model)
theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(
    lab.device
)
text = "Once upon a time there was a small engine that could answer many questions at once."
token_ids = torch.tensor(tokenizer.encode(text), device=lab.device)
with torch.inference_mode():
    expected = theirs(token_ids[None]).logits[0]
theirs = None  # half a gigabyte
mine = my_forward(token_ids)

functions = (apply_rope, causal_attention, decoder_layer, my_forward)
lines = sum(len(inspect.getsource(function).strip().splitlines()) for function in functions)
difference = (mine - expected).abs().max().item()
print(
    f"{len(token_ids)} tokens x {config.vocab_size} logits, between {expected.min():.0f} and {expected.max():.0f}"
)
print(f"largest difference   {difference:.6f}")
print(f"same best next token {(mine.argmax(-1) == expected.argmax(-1)).all()}")
print(f"lines of code        {lines}")
assert difference < 1e-3, "Your layers and transformers disagree: check 1.1, 1.2 and 1.3 again."

# %% [markdown] id="plug-in-diff-text"
# That is a whole language model, in fewer lines than this notebook has paragraphs. The engine's file with your layer in it:

# %% id="plug-in-diff"
show_diff("models/decoder.py")

# %% [markdown] id="experiment"
# ## Experiment · Where do the operations go, and where the time?
#
# We run your functions once and count: operations of all matrix products, and bytes, as if every operation read its inputs from
# memory and wrote its result there. (They mostly do.) Three parts: attention itself (scores, mask, softmax, sum), everything else in the layers,
# nearly all of it matrices, and the logits.

# %% id="experiment-count"
need("1.2", "1.3")
# every fourth layer stands for all
LAYERS = [decoder.layer_weights(number) for number in range(0, config.num_layers, 4)]
PARTS = ("layers' matrices", "attention", "logits")


def runs_of(length, some):
    """What to run for each part: attention, and whole layers, with the weights in `some`, and
    the logits."""
    x = torch.randn(length, config.hidden_size, device=lab.device)
    q = torch.randn(length, config.num_heads, config.head_dim, device=lab.device)
    k, v = torch.randn(2, length, config.num_kv_heads, config.head_dim, device=lab.device)
    positions = torch.arange(length, device=lab.device)
    return (
        lambda: [causal_attention(q, k, v) for _ in some],
        lambda: [decoder_layer(x, weights, positions) for weights in some],
        lambda: decoder.logits(x),
    )


def by_part(attention, layers, logits, some):
    """Amounts for the whole model: attention's share is taken out of the layers'."""
    times = config.num_layers / len(some)
    return dict(zip(PARTS, (times * max(layers - attention, 0), times * attention, logits)))


def too_long(length, last, begin):
    """Whether `length` tokens would take minutes, judged by `last` tokens, which took from `begin`
    until now: attention's time grows with the square."""
    minutes = (time.perf_counter() - begin) * (length / last) ** 2 / 60
    if last > 1 and minutes > 1:
        print(f"{length:5} tokens left out: about {minutes:.0f} min. Loops are right, and slow.")
    return last > 1 and minutes > 1


counted, last, begin = {}, 1, 0.0
with torch.inference_mode():
    for length in (1, 64, 256, 1024):
        if too_long(length, last, begin):
            break
        last, begin = length, time.perf_counter()
        one = LAYERS[:1]  # all layers do the same
        attention, layers, logits = (count_work(run) for run in runs_of(length, one))
        counted[length] = {
            "operations": by_part(attention.flops, layers.flops, logits.flops, one),
            "bytes": by_part(attention.bytes, layers.bytes, logits.bytes, one),
        }
        for unit, parts in counted[length].items():
            shares = ", ".join(
                f"{part} {amount / sum(parts.values()):.0%}" for part, amount in parts.items()
            )
            print(
                f"{length:5} tokens, {sum(parts.values()) / 1e9:7.2f} billion {unit:10}  {shares}"
            )

# %% id="experiment-count-plot"
recall("1.p1")
per_token = counted[1]["operations"]["layers' matrices"]
# of tokens: q k, then the sum; multiply and add
per_pair = 4 * config.num_layers * config.num_heads * config.head_dim
crossing = per_token / per_pair
print(f"\nAttention does as many operations as the layers' matrices at {crossing:,.0f} tokens.")

bars = {
    f"{unit}, T = {length}": parts for length in counted for unit, parts in counted[length].items()
}
share = {
    name: {part: parts[part] / sum(parts.values()) for part in PARTS}
    for name, parts in bars.items()
}
figure, axes = new_figure(height=3.4)
left = [0.0] * len(bars)
for part in PARTS:
    widths = [share[name][part] for name in bars]
    axes.barh(list(bars), widths, left=left, label=part)
    left = [a + b for a, b in zip(left, widths)]
axes.invert_yaxis()
axes.grid(False)
axes.xaxis.set_major_formatter("{x:.0%}")
axes.set(xlim=(0, 1))
axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
show(
    figure,
    alt="Shares of a forward pass of T tokens. "
    + "; ".join(
        f"{name}: " + ", ".join(f"{part} {share[name][part]:.0%}" for part in PARTS)
        for name in bars
    ),
)

# %% [markdown] id="experiment-time"
# Operations and bytes agree at one token: both are the weights. At 1,024 tokens they part. Attention's tables of scores are a quarter of the
# layers' operations and most of their bytes. Which of the two does the clock follow?

# %% id="experiment-measure"
measured, last, begin = {}, 1, 0.0
with torch.inference_mode():
    for length in (16, 64, 256, 1024):
        if too_long(length, last, begin):
            break
        last, begin = length, time.perf_counter()
        seconds = 0.1 if lab.fast else 0.4
        attention, layers, logits = (best_time(run, seconds) for run in runs_of(length, LAYERS))
        measured[length] = by_part(attention, layers, logits, LAYERS)
        total = sum(measured[length].values())
        part = measured[length]["attention"] / total
        print(f"{length:5} tokens: {1000 * total:8.0f} ms, {part:4.0%} of it attention", flush=True)
        if length == 256 and lab.fast:
            break

length = min(256, max(measured))
save_result(
    "01",
    tokens_per_second=1 / sum(measured[length].values()),
    what=f"one forward of {length} tokens for each token",
    data={"device": lab.device, "dtype": "float32", "model": lab.model, "seconds": measured},
)

# %% id="experiment-plot"
longest = max(measured)
attention, matrices = measured[longest]["attention"], measured[longest]["layers' matrices"]
of_time, of_operations = attention / (attention + matrices), longest / (longest + crossing)
if longest < 1024:
    why = f"it went up to {longest} tokens."
elif of_time < 1.5 * of_operations:
    why = (
        f"attention took {of_time:.0%} of the layers' time: its tables stay in the caches, perhaps."
    )
else:
    why = ""
recall("1.p2", but=why)
print(
    f"\nAt {longest} tokens attention is {of_operations:.0%} of the layers' operations, and {of_time:.0%} of their time."
)

figure, axes = new_figure(height=3.4)
for part in PARTS:
    axes.loglog(
        list(measured), [1000 * parts[part] for parts in measured.values()], marker="o", label=part
    )
axes.set_xticks(list(measured), [f"{length:,}" for length in measured])
axes.minorticks_off()
axes.yaxis.set_major_formatter("{x:g}")
axes.set(xlabel="tokens", ylabel="ms of one forward pass")
axes.set_title(f"Attention: {of_time:.0%} of the layers' time at {longest:,} tokens", loc="left")
axes.legend(frameon=False)
show(
    figure,
    alt="Milliseconds of each part against the length, both logarithmic. "
    + "; ".join(
        f"{part}: "
        + ", ".join(f"{1000 * parts[part]:.1f} at {length}" for length, parts in measured.items())
        for part in PARTS
    ),
)

# %% [markdown] id="experiment-reading"
# The lines of matrices and logits rise with the length, attention's rises with its square. And it is dearer than its operations say, since
# the tables go through memory five times: scores, scaled, masked, softmax, sum. A *fused* kernel never writes the table down (Lab 08).
#
# **Where naive is fine.** As the oracle. minivllm keeps your `causal_attention` and tests every faster backend against it: slow, short, and plainly
# right is a virtue.

# %% [markdown] id="mistakes"
# ## Common mistakes
#
# - **Neighbours for planes.** There are two layouts of RoPE. Hugging Face's Llama pairs `i` with `i + D/2`; GGUF files and the original
#   code pair neighbours. With the wrong one the model still writes, but like someone who has lost the thread.
# - **`repeat` for `repeat_interleave`.** Shapes fit, nothing fails, and two thirds of the heads read someone else's keys.
# - **`is_causal=True` with fewer queries than keys.** PyTorch aligns that mask at the top left. A single query then sees key 0 only.
# - **Masking after the softmax.** The weights no longer add up to 1. Mask the scores, with -inf.
# - **Adding to the normed stream.** The norm is for reading. What is added to is `x` itself.
# - **`view` across tokens.** `view(num_heads, T, D)` has the right number of numbers and mixes all tokens up. Cut each row into heads,
#   then move dimensions.

# %% [markdown] id="help"
# ## Help: I get ...
#
# | what you see | what to do |
# |---|---|
# | `No module named 'checks'` | The notebook runs in another Python. In the clone's folder run `make lab`, or choose the kernel of its `.venv` |
# | `name 'lab' is not defined` (or `need`, `decoder`, `config`) | The kernel was restarted. Run the set-up cell at the top, then this one |
# | The experiment does not end | Your functions loop over tokens, and it computes 1,024 of them: interrupt, then vectorize, or `skip("1.2")` |
# | "not passed yet: using the reference" | Fine: you can go on, and come back to that exercise |
# | "mat1 and mat2 shapes cannot be multiplied" | A matrix is `[out, in]`: use `F.linear(h, matrix)`, or `h @ matrix.T` |
# | "shape '[...]' is invalid for input" | Print `.shape` line by line. In 1.3 `.view(len(x), -1, weights.head_dim)` finds the number of heads itself |
# | NaN in 1.2 | A row with nothing to see. Each query sees at least itself |
# | Green everywhere, but transformers disagrees | Was a cell changed after its check, or run out of order? Run all three again, then the last |
# | I want to use the debugger | `check("1.2", here=True)` runs in this kernel: put `breakpoint()` into your function |
# | I am stuck | `hint("1.2")`, again for the next one, then `solution("1.2")`. `skip("1.2")` goes on without it |

# %% [markdown] id="check-yourself"
# ## Check yourself
#
# Write the letter, or the number, between the quotation marks in place of the question mark, and run the cell. Every answer is
# explained, even the wrong ones.
#
# {{question 1.q1}}

# %% id="quiz-1-q1" tags=["nbval-check-output"]
quiz("1.q1", "a")

# %% [markdown] id="quiz-1-q2-text"
# {{question 1.q2}}

# %% id="quiz-1-q2" tags=["nbval-check-output"]
quiz("1.q2", "b")

# %% [markdown] id="quiz-1-q3-text"
# {{question 1.q3}}

# %% id="quiz-1-q3" tags=["nbval-check-output"]
quiz("1.q3", "b")

# %% [markdown] id="quiz-1-q4-text"
# {{question 1.q4}}

# %% id="quiz-1-q4" tags=["nbval-check-output"]
quiz("1.q4", lambda weights, tokens: 2 * weights * 1e6 * tokens / 1e9)

# %% [markdown] id="takeaways"
# ## Key takeaways
#
# - A decoder is one layer, repeated: look around, add; think, add. Tokens meet in attention only.
# - RoPE turns queries and keys by their positions; what is left in a score is the distance.
# - A token never sees what comes after it. So nothing that was computed for it changes when the text goes on.
# - Two operations for each weight and token, plus attention, which grows with the square. Bytes, not operations, say what naive attention costs.

# %% [markdown] id="further"
# ## Further learning
#
# - Vaswani et al., *Attention Is All You Need* (2017), arXiv:1706.03762; Su et al., *RoFormer* (2021), arXiv:2104.09864, section 3.4 for
#   the turning; Ainslie et al., *GQA* (2023), arXiv:2305.13245.
# - Elhage et al., *A Mathematical Framework for Transformer Circuits* (2021), transformer-circuits.pub: the residual stream and induction
#   heads, seen above.
# - Dao et al., *FlashAttention* (2022), arXiv:2205.14135: your last plot, and what to do about it.
# - `minivllm/models/decoder.py`: the same layer with its matrices packed, for Llama, Mistral and Qwen at once. Find the three lines
#   that are new to you.

# %% [markdown] id="next"
# ## Next: Lab 02, naive generation
#
# Your model reads. It does not write yet: that takes a loop around it, and a way to choose. One last look at where you stand.

# %% id="journey"
journey()
