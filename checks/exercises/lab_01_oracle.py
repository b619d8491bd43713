"""What is right in Lab 01, in float64 and written in a second way, and what the likely mistakes make of the same input.

Each of `rope`, `attention` and `layer` gives the right answer to a case. With one of its keywords changed it gives what a
mistake would; the *_MISTAKES say which change that is, and the words for it. In the parent only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from checks.exercises import Case

Mistake = tuple[dict[str, Any], str]

# ---------------------------------------------------------------------------------------------------------- 1.1 apply_rope


def rope(case: Case, *, pairs: str = "halves", second: str = "right", unit: float = 1.0, **angle: Any) -> torch.Tensor:
    x: torch.Tensor = case["x"].double()
    angles = _angles(case, **angle) * unit
    cos, sin = angles.cos(), angles.sin()
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs == "neighbours" else x.chunk(2, dim=-1)
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    wrong_halves = {
        "kept": (turned_a, b),
        "from the turned": (turned_a, b * cos + turned_a * sin),
        "minus": (turned_a, b * cos - a * sin),
        "swapped": (a * sin - b * cos, b * sin + a * cos),
    }
    turned_a, turned_b = wrong_halves.get(second, (turned_a, turned_b))
    if pairs == "neighbours":
        return torch.stack([turned_a, turned_b], dim=-1).flatten(-2)
    return torch.cat([turned_a, turned_b], dim=-1)


def _angles(case: Case, exponent: str = "2i/D", at: str = "positions", theta: float | None = None) -> torch.Tensor:
    """[T, 1, D/2], to be turned by in each plane."""
    T, heads, D = case["x"].shape
    i = torch.arange(D // 2, dtype=torch.float64)
    exponents = {
        "2i/D": 2 * i / D,
        "i/D": i / D,
        "4i/D": 4 * i / D,
        "-2i/D": -2 * i / D,
        "0": 0 * i,
        "2(i+1)/D": 2 * (i + 1) / D,
    }
    base: float = theta or case["theta"]
    frequencies: torch.Tensor = base ** (-exponents[exponent])
    positions: torch.Tensor = case["positions"].double()
    if at == "heads" and heads == T:  # a table [T, D/2] lines up with the heads
        return positions[None, :, None] * frequencies
    where = {"rows": torch.arange(T).double(), "from 1": positions + 1}.get(at, positions)
    return where[:, None, None] * frequencies


ROPE_MISTAKES: tuple[Mistake, ...] = (
    ({"unit": 0.0}, "Nothing was turned. (What counts is the position, positions[t], not the row t.)"),
    (
        {"pairs": "neighbours"},
        "It turned neighbours, dimensions 2i and 2i + 1. Here plane i is dimensions i and i + D/2: split x into halves.",
    ),
    (
        {"unit": -1.0},
        "It turned backwards. The first half is first * cos - second * sin, the second is second * cos + first * sin.",
    ),
    ({"at": "rows"}, "It turned by the row's number in x. Turn by the token's position: positions[t]."),
    (
        {"at": "heads"},
        "Head h was turned by the angle of token h: cos and sin, [T, D/2], lined up with the heads of x. Give them a dimension"
        " for heads, [T, 1, D/2].",
    ),
    ({"at": "from 1"}, "It turned by the position plus one. Positions begin at 0, and position 0 is not turned at all."),
    ({"exponent": "i/D"}, "The exponents are half of what they should be: plane i turns by theta ** (-2i / D) a position."),
    ({"exponent": "4i/D"}, "The exponents are twice what they should be: plane i turns by theta ** (-2i / D) a position."),
    ({"exponent": "2(i+1)/D"}, "The exponents are one plane late: plane 0 turns by theta ** 0 = 1 a position."),
    ({"exponent": "-2i/D"}, "The planes turn faster and faster. The exponent is negative: theta ** (-2i / D)."),
    ({"exponent": "0"}, "All planes turn equally fast. Plane i turns by theta ** (-2i / D) a position, slower and slower."),
    ({"theta": 1e4}, "It used theta = 10000. Use the argument."),
    ({"second": "kept"}, "Only the first half of each head was turned. The second becomes second * cos + first * sin."),
    (
        {"second": "from the turned"},
        "The second half was computed from the first half *after* that was turned. Both need the values from before.",
    ),
    ({"second": "minus"}, "A sign in the second half is wrong: it becomes second * cos + first * sin."),
    ({"second": "swapped"}, "cos and sin are swapped. At position 0 the angle is 0, cos is 1, and nothing turns."),
    ({"unit": torch.pi / 180}, "The angles were taken for degrees. They are radians already, as cos and sin want them."),
)


# ---------------------------------------------------------------------------------------------------- 1.2 causal_attention


def attention(
    case: Case,
    *,
    mask: str = "right",
    heads: str = "grouped",
    scale: str = "right",
    window: int | None = 0,
    softmax: str = "right",
) -> torch.Tensor:
    """One query head at a time."""
    q, k, v = (case[name].double() for name in "qkv")
    (_, H, D), (_, Hkv, _) = q.shape, k.shape
    given = case["options"].get("scale")
    factor = {"right": D**-0.5 if given is None else given, "none": 1.0, "1/D": 1 / D, "default": D**-0.5, "*": D**0.5}[scale]
    hidden = _hidden(case, mask, window)
    scores, values = [], []
    for h in range(H):
        g = {"grouped": h // (H // Hkv), "modulo": h % Hkv, "first": 0}[heads]
        scores.append(q[:, h] @ k[:, g].T * factor)
        values.append(v[:, g])
    score = torch.stack(scores)
    if softmax == "before mask":
        weights = score.softmax(-1).masked_fill(hidden, 0.0)
    elif softmax == "zero":
        weights = score.masked_fill(hidden, 0.0).softmax(-1)
    else:
        axis = {"right": -1, "queries": -2, "heads": 0}[softmax]
        weights = score.masked_fill(hidden, float("-inf")).softmax(axis)
    out: torch.Tensor = torch.stack([weights[h] @ values[h] for h in range(H)], dim=1)
    return out


def _hidden(case: Case, mask: str, window: int | None) -> torch.Tensor:
    """[T, S], True where a query must not look. `window` is added to the case's own; None forgets it."""
    T, S = case["q"].shape[0], case["k"].shape[0]
    mine, theirs = torch.arange(S - T, S)[:, None], torch.arange(S)[None, :]
    hidden: torch.Tensor = {
        "right": theirs > mine,
        "none": theirs < 0,
        "top-left": theirs > mine - (S - T),
        "strict": theirs >= mine,
        "one more": theirs > mine + 1,
        "future": theirs < mine,
    }[mask]
    width = case["options"].get("sliding_window")
    if width is not None and window is not None:
        hidden = hidden | (theirs <= mine - width - window)
    return hidden


ATTENTION_MISTAKES: tuple[Mistake, ...] = (
    ({"mask": "none"}, "There is no mask: queries see positions after their own."),
    (
        {"mask": "top-left"},
        "The mask is aligned at the top left: query i saw positions 0 .. i. The queries are the *last* T of the S positions:"
        " query i is at S - T + i. (torch's is_causal=True aligns at the top left too.)",
    ),
    ({"mask": "strict"}, "A query does not see its own position. It does: the mask begins after it."),
    ({"mask": "one more"}, "Each query sees one position too many, the one after its own."),
    (
        {"mask": "future"},
        "The mask is turned round: queries see their own and later positions, and should see their own and earlier ones.",
    ),
    (
        {"heads": "modulo"},
        "Query head h read KV head h % Hkv. Heads in a row share one: h // (H // Hkv). (repeat_interleave, not repeat.)",
    ),
    ({"heads": "first"}, "All query heads read KV head 0. Query head h reads KV head h // (H // Hkv)."),
    ({"scale": "default"}, "`scale` was given and not used: it stands in place of 1 / sqrt(D)."),
    ({"scale": "none"}, "The scores are not scaled: multiply them by 1 / sqrt(D) (or by `scale`, if given)."),
    ({"scale": "1/D"}, "The scores were divided by D. Divide by its square root."),
    ({"scale": "*"}, "The scores were multiplied by sqrt(D). Divide by it."),
    ({"window": None}, "`sliding_window` was given and not used: a query at position p sees p - w + 1 .. p only."),
    ({"window": 1}, "The window is one too wide: w positions, its own included, so p - w + 1 .. p."),
    ({"window": -1}, "The window is one too narrow: w positions, its own included, so p - w + 1 .. p."),
    (
        {"softmax": "before mask"},
        "The weights of a query do not add up to 1. Mask the scores *before* the softmax, with -inf; then what is"
        " left adds up.",
    ),
    ({"softmax": "zero"}, "Hidden scores were set to 0, and exp(0) is 1: they still get weight. Set them to -inf."),
    (
        {"softmax": "queries"},
        "The softmax was taken over the queries. Each query spreads its weight over the keys: the last dimension.",
    ),
    ({"softmax": "heads"}, "The softmax was taken over the heads. Each query spreads its weight over the keys."),
)


# ------------------------------------------------------------------------------------------------------- 1.3 decoder_layer


def layer(
    case: Case,
    *,
    residual: str = "both",
    norms: str = "both",
    turned: str = "qk",
    at: str = "positions",
    layout: str = "right",
    o_proj: str = "right",
    mlp: str = "right",
    eps: float | None = None,
    theta: float | None = None,
    across: str = "",
) -> torch.Tensor:
    """`across` names a matrix that is multiplied without its transpose (which runs only if it is square)."""
    w: dict[str, torch.Tensor] = {name: tensor.double() for name, tensor in case["tensors"].items()}
    for name, matrix in w.items():
        if across in (name, "all") and matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]:
            w[name] = matrix.T
    n, x = case["numbers"], case["x"].double()
    eps = n["rms_norm_eps"] if eps is None else eps
    before, after = w["input_layernorm"], w["post_attention_layernorm"]
    if norms == "swapped":
        before, after = after, before

    def norm(x: torch.Tensor, weight: torch.Tensor, there: bool) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight if there else x

    h = norm(x, before, norms != "no first")
    attended = _layer_attention(w, h, case, turned, at, layout, theta)
    out = attended if o_proj == "none" else attended @ w["o_proj"].T
    if o_proj == "none" and out.shape != x.shape:
        out = torch.zeros_like(x)
    start = {"no first": torch.zeros_like(x), "none": torch.zeros_like(x), "of the norm": h}.get(residual, x)
    stream = start + out
    inner = {"the old": x, "from attention": out}.get(mlp, stream)
    h2 = h if mlp == "parallel" else norm(inner, after, norms != "no second")
    added = _mlp(w, h2, mlp)
    nothing = torch.zeros_like(x)
    end: torch.Tensor = {"no second": nothing, "none": nothing, "x twice": x, "of the second norm": h2}.get(residual, stream)
    return end + added


def _layer_attention(
    w: dict[str, torch.Tensor], h: torch.Tensor, case: Case, turned: str, at: str, layout: str, theta: float | None
) -> torch.Tensor:
    T, D = len(h), case["numbers"]["head_dim"]
    positions = torch.arange(T) if at == "rows" else case["positions"]

    def project(name: str) -> torch.Tensor:
        flat = h @ w[f"{name}_proj"].T
        if layout == "heads first":
            return flat.view(-1, T, D).transpose(0, 1)
        return flat.view(T, D, -1).transpose(1, 2) if layout == "head_dim first" else flat.view(T, -1, D)

    def turn(name: str) -> torch.Tensor:
        x = project(name)
        as_case = {"x": x, "positions": positions, "theta": theta or case["numbers"]["rope_theta"]}
        return rope(as_case) if name in turned else x

    attended = attention({"q": turn("q"), "k": turn("k"), "v": turn("v"), "options": {}})
    return attended.transpose(0, 1).reshape(T, -1) if layout == "output heads first" else attended.flatten(1)


def _mlp(w: dict[str, torch.Tensor], h: torch.Tensor, mlp: str) -> torch.Tensor:
    gate, up = h @ w["gate_proj"].T, h @ w["up_proj"].T
    activated = {
        "silu of up": gate * F.silu(up),
        "no silu": gate * up,
        "both silu": F.silu(gate) * F.silu(up),
        "silu of both": F.silu(gate * up),
        "sum": F.silu(gate) + up,
        "no up": F.silu(gate),
        "gelu": F.gelu(gate) * up,
        "relu": F.relu(gate) * up,
        "sigmoid": gate.sigmoid() * up,
    }.get(mlp, F.silu(gate) * up)
    added = activated @ w["down_proj"].T
    return torch.zeros_like(added) if mlp == "none" else added


LAYER_MISTAKES: tuple[Mistake, ...] = (
    *(
        ({"across": name}, f"weights.{name} was not transposed: F.linear(h, weights.{name}), or h @ weights.{name}.T.")
        for name in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ),
    ({"across": "all"}, "The weights are [out, in]: F.linear(h, weight), or h @ weight.T. They were not transposed."),
    ({"residual": "no first"}, "The first residual is missing: attention's output is *added* to x."),
    ({"residual": "no second"}, "The second residual is missing: the MLP's output is *added* to the stream."),
    (
        {"residual": "none"},
        "Both residuals are missing: what attention and the MLP make is *added* to the stream, it does not replace it.",
    ),
    (
        {"residual": "of the norm"},
        "Attention's output was added to the normed h. The residual stream is x itself; the norm is only what attention reads.",
    ),
    (
        {"residual": "of the second norm"},
        "The MLP's output was added to the normed h. The residual stream itself goes on; the norm is only what the MLP reads.",
    ),
    (
        {"residual": "x twice"},
        "The MLP's output was added to the x from before attention. It goes on top of x plus attention's output.",
    ),
    ({"norms": "no first"}, "The first norm is missing: attention reads rms_norm(x, weights.input_layernorm, ...)."),
    ({"norms": "no second"}, "The second norm is missing: the MLP reads rms_norm(x, weights.post_attention_layernorm, ...)."),
    (
        {"norms": "swapped"},
        "The two norms' weights are swapped: input_layernorm stands before attention, post_attention_layernorm before the MLP.",
    ),
    ({"turned": ""}, "Queries and keys are not turned: apply_rope to both."),
    ({"turned": "q"}, "Only the queries are turned. Turn the keys too: it is the difference of the two angles that counts."),
    ({"turned": "k"}, "Only the keys are turned. Turn the queries too: it is the difference of the two angles that counts."),
    ({"turned": "qkv"}, "The values are turned as well. Position belongs into the scores: only queries and keys are turned."),
    ({"at": "rows"}, "Tokens were turned by their row's number. Pass `positions` on to apply_rope."),
    ({"theta": 1e4}, "It used theta = 10000. Use weights.rope_theta."),
    (
        {"layout": "heads first"},
        "The heads are cut wrongly: view(num_heads, T, D) mixes tokens up. Row t of the"
        " projection is token t: view(T, num_heads, D).",
    ),
    (
        {"layout": "head_dim first"},
        "The heads are cut wrongly. The first head_dim numbers of a row are head 0, the next head 1: view(T, num_heads, D).",
    ),
    (
        {"layout": "output heads first"},
        "Attention's output was flattened heads first, which mixes tokens up. Row t is"
        " token t: [T, H, D] flattens to [T, H * D].",
    ),
    ({"o_proj": "none"}, "o_proj is missing: attention's output goes through it before it is added."),
    ({"mlp": "none"}, "The MLP is missing: the second half of the layer."),
    ({"mlp": "the old"}, "The MLP reads the x from before attention. It reads x plus attention's output, normed."),
    ({"mlp": "from attention"}, "The MLP reads attention's output alone. It reads x plus attention's output, normed."),
    (
        {"mlp": "parallel"},
        "The MLP reads the h that attention read. It comes after attention: norm the new stream,"
        " with post_attention_layernorm.",
    ),
    ({"mlp": "silu of up"}, "gate and up are swapped: silu(gate) * up."),
    ({"mlp": "no silu"}, "The silu is missing: silu(gate) * up."),
    ({"mlp": "both silu"}, "up went through a silu too. Only the gate does: silu(gate) * up."),
    ({"mlp": "silu of both"}, "The silu was taken of the product. Only the gate goes through it: silu(gate) * up."),
    ({"mlp": "sum"}, "gate and up were added. They are multiplied: silu(gate) * up."),
    ({"mlp": "no up"}, "up_proj is missing: silu(gate) * up."),
    ({"mlp": "gelu"}, "The activation is gelu. Llama's is silu."),
    ({"mlp": "relu"}, "The activation is relu. Llama's is silu."),
    ({"mlp": "sigmoid"}, "That is the sigmoid of the gate. silu(gate) is gate * sigmoid(gate)."),
    ({"eps": 1e-6}, "It used an eps of its own. Use weights.rms_norm_eps."),
    ({"eps": 1e-5}, "It used an eps of its own. Use weights.rms_norm_eps."),
)
