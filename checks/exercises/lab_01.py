"""Lab 01's checks: rotary embedding, causal attention, the decoder layer. In the parent only.

The right results come from lab_01_oracle.py. A wrong one is compared with what the likely mistakes make of the same input, and
told which of them it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Check, Verdict
from checks.exercises.lab_01_oracle import (
    ATTENTION_MISTAKES,
    LAYER_MISTAKES,
    ROPE_MISTAKES,
    attention,
    layer,
    rope,
)
from checks.exercises.words import count, kind_of, numbers

# ---------------------------------------------------------------------------------------------------------- 1.1 apply_rope


def rope_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"1.1:{seed}")
    by_hand: list[tuple[list[list[list[float]]], list[int], float]] = [
        ([[[1.0, 2.0]]], [0], 16.0),
        ([[[1.0, 2.0]]], [1], 16.0),
        ([[[1.0, 1.0, 0.0, 0.0]]], [1], 16.0),
        ([[[1.0, 2.0, 3.0, 4.0]]], [3], 16.0),
        ([[[1.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]], [0, 1, 2], 16.0),
        ([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]], [1, 2], 16.0),
        ([[[1.0, 0.0]], [[1.0, 0.0]]], [7, 3], 16.0),
    ]
    cases = [_rope_case(torch.tensor(x), positions, theta) for x, positions, theta in by_hand]
    for T, heads, D, last, theta in ((3, 2, 8, 9, 1e4), (5, 3, 64, 8192, 1e5), (4, 9, 64, 8192, 1e6)):
        positions = [rng.randrange(last) for _ in range(T * scale)]
        cases.append(_rope_case(_random(rng, T * scale, heads, D), positions, theta))
    narrow = _random(rng, 4, 2, 4).to(torch.bfloat16)
    cases.append(_rope_case(narrow, [0, 100, 257, rng.randrange(1000, 8000) | 1], 16.0))
    return cases


def _rope_case(x: torch.Tensor, positions: list[int], theta: float) -> Case:
    shown = _shown(x)
    call = f"apply_rope(x={shown}, positions=tensor({positions}), theta={theta:g})"
    return {"x": x, "positions": torch.tensor(positions), "theta": theta, "call": call}


def judge_rope(case: Case, output: Any) -> Verdict:
    form = _judge_form(case, output, "x", like="x")
    if form:
        return form
    returned, positions = output["returned"].double(), case["positions"]
    right = rope(case)
    # cos and sin of a float32 angle are off by what the angle is off by, which grows with the position
    slack = (1e-5 + 1e-6 * positions.double())[:, None, None] if case["x"].dtype == torch.float32 else 2e-2
    slack = slack * case["x"].double().abs().amax().clamp(min=1.0)
    if returned.isnan().any():
        return Verdict("wrong value", "There is NaN in the result.")
    wrong = (returned - right).abs() > slack
    if not wrong.any():
        return RIGHT
    t, h = wrong.any(-1).nonzero()[0].tolist()
    why = next((words for change, words in ROPE_MISTAKES if _close(returned, rope(case, **change), slack)), "")
    if not why and case["x"].dtype != torch.float32:
        why = "Compute the angles in float32, whatever x is: bfloat16 has 8 bits and cannot count past 256."
    return Verdict("wrong value", "\n".join([*_rope_picture(case, t, h, right, returned), why]).rstrip())


def _rope_picture(case: Case, t: int, h: int, right: torch.Tensor, returned: torch.Tensor) -> Iterator[str]:
    D = case["x"].shape[-1]
    yield f"Token {t}, at position {int(case['positions'][t])}, head {h}:"
    if D <= 8:
        parts = ("all of it", list(range(D)))
    else:
        i = int((right[t, h] - returned[t, h]).abs().argmax()) % (D // 2)
        parts = (f"plane {i}, dimensions {i} and {i + D // 2}", [i, i + D // 2])
    for name, tensor in (("x", case["x"]), ("should be", right), ("yours", returned)):
        yield f"    {name:<10} {_numbers(tensor[t, h, parts[1]])}" + (f"   ({parts[0]})" if name == "x" and D > 8 else "")


# ---------------------------------------------------------------------------------------------------- 1.2 causal_attention


def attention_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"1.2:{seed}")
    # T, S, H, Hkv, D, options. The values of the small ones are rows of a unit matrix, so that the result shows the weights.
    shapes: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
        (1, 1, 1, 1, 2, {}),
        (3, 3, 1, 1, 4, {}),
        (3, 3, 2, 2, 4, {}),
        (1, 3, 1, 1, 4, {}),
        (2, 4, 1, 1, 4, {}),
        (2, 2, 4, 2, 4, {}),
        (3, 5, 6, 2, 8, {}),
        (2, 2, 1, 1, 4, {"scale": 1.0}),
        (2, 2, 1, 1, 4, {"scale": 0.25, "sliding_window": None}),
        (4, 4, 1, 1, 4, {"sliding_window": 2}),
        (2, 4, 1, 1, 4, {"sliding_window": 1}),
        (3, 5, 4, 2, 8, {"scale": None, "sliding_window": 4}),
        (3, 4, 2, 1, 4, {"sliding_window": 9}),
    ]
    cases = [_attention_case(rng, *shape) for shape in shapes]
    large = _attention_case(rng, 3, 4, 1, 1, 4, {})
    cases.append(_attention_call({**large, "q": (40 * large["q"]).round()}))  # scores of hundreds: exp of them overflows
    low = {name: sign * (30 + large[name]) for name, sign in (("q", 1), ("k", -1))}  # all scores below -1,000
    cases.append(_attention_call({**large, **low}))
    for T, S, H, Hkv, D in ((6 * scale, 6 * scale, 9, 3, 64), (1, 40 * scale, 8, 2, 16), (17 * scale, 50 * scale, 4, 4, 32)):
        cases.append(_attention_case(rng, T, S, H, Hkv, D, {}))
    narrow = _attention_case(rng, 4, 6, 4, 2, 8, {})
    cases.append(_attention_call({**narrow, **{name: narrow[name].to(torch.bfloat16) for name in "qkv"}}))
    close = _attention_case(rng, 3, 6, 2, 1, 16, {})  # all scores near 100, where bfloat16 has steps of 0.5
    close |= {name: 5 + 0.1 * close[name] for name in "qk"}
    cases.append(_attention_call({**close, **{name: close[name].to(torch.bfloat16) for name in "qkv"}}))
    return cases


def _attention_case(rng: random.Random, T: int, S: int, H: int, Hkv: int, D: int, options: dict[str, Any]) -> Case:
    q, k, v = _random(rng, T, H, D, scale=2.0), _random(rng, S, Hkv, D, scale=2.0), _random(rng, S, Hkv, D)
    if S <= D <= 4:
        v = torch.eye(D)[:S, None].repeat(1, Hkv, 1)
    return _attention_call({"q": q, "k": k, "v": v, "options": options})


def _attention_call(case: Case) -> Case:
    options = "".join(f", {name}={value}" for name, value in case["options"].items())
    shapes = ", ".join(f"{name} {list(case[name].shape)}" for name in "qkv")
    narrow = "" if case["q"].dtype == torch.float32 else f", {str(case['q'].dtype).removeprefix('torch.')}"
    return {**case, "call": f"causal_attention(q, k, v{options})   with {shapes}{narrow}"}


def judge_attention(case: Case, output: Any) -> Verdict:
    form = _judge_form(case, output, "q", "k", "v", like="q")
    if form:
        return form
    returned, right = output["returned"].double(), attention(case)
    slack = torch.tensor(1e-4 if case["q"].dtype == torch.float32 else 3e-2)
    if returned.isnan().any():
        return Verdict("wrong value", _attention_nan(returned, case))
    wrong = (returned - right).abs() > slack
    if not wrong.any():
        return RIGHT
    t, h = wrong.any(-1).nonzero()[0].tolist()
    why = next((words for change, words in ATTENTION_MISTAKES if _close(returned, attention(case, **change), slack)), "")
    if float((case["q"][:, 0].double() @ case["k"][:, 0].double().T).max()) < -1000:
        why = "All scores are below -1,000 here. A hidden one must be -inf: -100, or 0, is larger than those that count."
    elif not why and case["q"].dtype != torch.float32:
        why = "The inputs are bfloat16, which has 8 bits for a number: convert to float32 before you multiply (.float())."
    return Verdict("wrong value", "\n".join([*_attention_picture(case, t, h, right, returned), why]).rstrip())


def _attention_nan(returned: torch.Tensor, case: Case) -> str:
    t = int(returned.isnan().flatten(1).any(1).nonzero()[0])
    position = case["k"].shape[0] - case["q"].shape[0] + t
    return (
        f"The result of query {t} has NaN in it. Either all its scores are -inf (query {t} is at position {position} and sees"
        f" positions 0 .. {position}, itself included), or exp overflowed: torch.softmax takes care of that."
    )


def _attention_picture(case: Case, t: int, h: int, right: torch.Tensor, returned: torch.Tensor) -> Iterator[str]:
    (T, H, D), (S, Hkv, _) = case["q"].shape, case["k"].shape
    window, position = case["options"].get("sliding_window"), S - T + t
    first = 0 if window is None else max(0, position - window + 1)
    sees = f"position {first}" if first == position else f"positions {first} .. {position}"
    yield f"Query {t}, head {h}, is at position {position} and sees {sees}" + (
        f", through KV head {h // (H // Hkv)}." if Hkv > 1 else "."
    )
    unit = D <= 4 and torch.equal(case["v"][:, 0].float(), torch.eye(D)[:S])
    if unit:
        yield "(v is a unit matrix here, so what comes back are the weights.)"
    for name, tensor in (("should be", right), ("yours", returned)):
        yield f"    {name:<10} {_numbers(tensor[t, h, :S] if unit else tensor[t, h])}"


# ------------------------------------------------------------------------------------------------------- 1.3 decoder_layer


def layer_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"1.3:{seed}")
    # positions, hidden, heads, KV heads, head_dim, intermediate, eps
    shapes: list[tuple[list[int], int, int, int, int, int, float]] = [
        ([0], 4, 2, 1, 2, 6, 1e-6),
        ([0, 1], 4, 2, 1, 2, 6, 1e-6),
        ([0, 1, 2], 8, 4, 2, 2, 8, 1e-6),
        ([0, 3, 5], 4, 2, 1, 2, 8, 1e-6),
        ([4, 5], 6, 2, 1, 4, 5, 1e-6),
        ([0, 1], 4, 2, 1, 2, 4, 0.5),
    ]
    cases = [_layer_case(rng, *shape, theta=100.0) for shape in shapes]
    cases.append(_layer_case(rng, sorted(rng.sample(range(60 * scale), 7 * scale)), 24, 6, 2, 8, 40, 1e-5, theta=1e5))
    return cases


def _layer_case(
    rng: random.Random, positions: list[int], hidden: int, H: int, Hkv: int, D: int, wide: int, eps: float, theta: float
) -> Case:
    q, kv = H * D, Hkv * D
    shapes = {
        "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
        "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
    }  # fmt: skip
    tensors = {name: _random(rng, *shape, scale=1.2 * shape[1] ** -0.5) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[name] = 1 + _random(rng, hidden, scale=0.5)
    call = f"decoder_layer(x, weights, positions=tensor({positions}))   with x {[len(positions), hidden]}, {count(H, 'head')}"
    return {
        "x": _random(rng, len(positions), hidden),
        "positions": torch.tensor(positions),
        "tensors": tensors,
        "numbers": {"head_dim": D, "rms_norm_eps": eps, "rope_theta": theta},
        "call": f"{call}, {count(Hkv, 'KV head')}, head_dim {D}, rms_norm_eps {eps:g}",
    }


def judge_layer(case: Case, output: Any) -> Verdict:
    form = _judge_form(case, output, "x", "positions", like="x")
    if form:
        return form
    returned, right = output["returned"].double(), layer(case)
    slack = torch.tensor(2e-4)
    if returned.isnan().any():
        return Verdict("wrong value", "There is NaN in the result.")
    wrong = (returned - right).abs() > slack
    if not wrong.any():
        return RIGHT
    t = int(wrong.any(-1).nonzero()[0])
    lines = [f"Token {t}, at position {int(case['positions'][t])}:"]
    lines += [
        f"    {name:<10} {_numbers(tensor[t])}"
        for name, tensor in (("x", case["x"]), ("should be", right), ("yours", returned))
    ]
    why = next(
        (words for change, words in LAYER_MISTAKES if _close(returned, layer(case, **change), slack)),
        _first_part(case),
    )
    return Verdict("wrong value", "\n".join([*lines, why]).rstrip())


def _first_part(case: Case) -> str:
    """No known mistake: say where to look, by what the layer adds to the residual stream in each half."""
    half = layer(case, mlp="none")
    return (
        f"To compare with, for the last token: after attention and its residual the stream is {_numbers(half[-1])}; the MLP"
        f" adds {_numbers((layer(case) - half)[-1])}. Print yours."
    )


# ------------------------------------------------------------------------------------------ what the three have in common


def _judge_form(case: Case, output: Any, *inputs: str, like: str) -> Verdict | None:
    """Type, shape, dtype, and the inputs left as they were."""
    returned = output["returned"]
    if returned is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not isinstance(returned, torch.Tensor):
        return Verdict("wrong type", f"It should return a tensor, and returned {kind_of(returned)}.")
    wanted = case[like]
    if returned.shape != wanted.shape:
        return Verdict(
            "wrong shape", f"It returned shape {list(returned.shape)}, and should return {like}'s, {list(wanted.shape)}."
        )
    if returned.dtype != wanted.dtype:
        names = [str(t.dtype).removeprefix("torch.") for t in (returned, wanted)]
        return Verdict(
            "wrong type",
            f"It returned {names[0]}, and should return {like}'s dtype, {names[1]}: convert with .to({like}.dtype).",
        )
    for name in inputs:
        if not torch.equal(output[name], case[name]):
            return Verdict(
                "input changed",
                f"It changed its input {name} in place (+=, or an assignment into {name}[...]). Make a new tensor.",
            )
    return None


def _random(rng: random.Random, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal noise with few digits, so that it can be printed whole."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return (torch.randn(*shape, generator=generator) * scale * 100).round() / 100


def _close(a: torch.Tensor, b: torch.Tensor, slack: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= slack).all())


def _shown(x: torch.Tensor) -> str:
    dtype = "" if x.dtype == torch.float32 else f", dtype={x.dtype}"
    if x.numel() <= 8:
        return f"tensor({[[[round(v, 2) for v in head] for head in token] for token in x.tolist()]}{dtype})"
    return f"<{' x '.join(map(str, x.shape))} of {str(x.dtype).removeprefix('torch.')}>"


def _numbers(row: torch.Tensor) -> str:
    return numbers(row.double().round(decimals=3) + 0, 6, ".3f")  # + 0: no "-0.000"


CHECKS = {
    "1.1": Check(
        cases=rope_cases,
        judge=judge_rope,
        minutes=12,
        difficulty=2,
        hints=(
            "Start from the angles: positions [T] times frequencies [D/2] is a table [T, D/2]. The frequencies are theta **"
            " (-2i / D) for i = 0 .. D/2 - 1, so torch.arange(0, D, 2) / D is the exponent without its sign. Loops are right"
            " too: for each token t and plane i one angle, and with it the numbers i and i + D/2 of each of its heads.",
            "cos and sin are [T, D/2], x is [T, num_heads, D]. Give them a dimension for the heads: cos[:, None, :]. And cut x"
            " in two halves, first and second, with x.chunk(2, dim=-1).",
            "angles = positions[:, None].float() * frequencies\nnew first  = first * cos - second * sin\n"
            "new second = second * cos + first * sin\ntorch.cat the two along the last dimension; .to(x.dtype) at the end",
        ),
    ),
    "1.2": Check(
        cases=attention_cases,
        judge=judge_attention,
        minutes=15,
        difficulty=2,
        hints=(
            "Three steps: scores [H, T, S] from q and k, the mask, softmax and the sum over v. For grouped queries,"
            " first repeat the heads"
            " of k and v so that there are H: repeat_interleave(H // Hkv, dim=1). Loops are right too: for each query t and"
            " head h, whose KV head is h // (H // Hkv), the scores of the keys it sees, their softmax, the weighted sum.",
            'torch.einsum("thd,shd->hts", q, k) makes the scores. For the mask, write down where each query stands'
            " (torch.arange(S - T, S)) and where each key stands (torch.arange(S)), and compare [:, None] with [None, :].",
            "hidden = key position > query position; with a window also key position <= query position - window. Then"
            ' scores.masked_fill(hidden, float("-inf")).softmax(-1), and torch.einsum("hts,shd->thd", weights, v). Do'
            " it in float32 and return .to(q.dtype).",
        ),
    ),
    "1.3": Check(
        cases=layer_cases,
        judge=judge_layer,
        minutes=15,
        difficulty=2,
        hints=(
            "Two halves of the same form: x = x + something(rms_norm(x)). In the first, something is attention; in"
            " the second, the MLP.",
            "First half: q, k and v are F.linear(h, weights.q_proj) and so on, each cut into heads with .view(len(x), -1,"
            " weights.head_dim). Turn q and k, attend, .flatten(1), then o_proj. Add to x.",
            "Second half: h = rms_norm(x, weights.post_attention_layernorm, eps), then"
            " F.linear(F.silu(gate) * up, weights.down_proj), with gate and up made from h. Add to x.",
        ),
    ),
}
