"""Lab 00's checks: a first red and green, the bytes of a decode step, its time. In the parent only.

The answers are single numbers. A wrong one is looked up among what the likely mistakes give for the same input.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from checks.exercises import RIGHT, Case, Check, Verdict
from checks.exercises.words import kind_of

Mistake = tuple[float, str]  # what a mistake gives, and the words for it

# -------------------------------------------------------------------------------------------------------------- 0.0 double


def double_cases(seed: int) -> list[Case]:
    rng = random.Random(f"0.0:{seed}")
    values = [2, 3, 0, -1, 0.5, 0.25, rng.randint(10, 99), -rng.randint(100, 999)]
    return [{"x": x, "call": f"double({x})"} for x in values]


def judge_double(case: Case, output: Any) -> Verdict:
    x = case["x"]
    if output is None:
        return Verdict("wrong type", "It returned None. A function gives its result back with `return`; print only shows it.")
    if isinstance(output, str):
        return Verdict("wrong type", f"It returned the text {output!r}. It should return the number {2 * x}.")
    if not _is_number(output):
        return _no_number(output)
    if output == 2 * x:
        return RIGHT
    told = f"It returned {output}, and should return {2 * x}."
    if output == x + 2:
        return Verdict(
            "wrong value", f"{told} That is x + 2, which is twice x for x = 2 only. So one case alone proves little."
        )
    if output == x * x:
        return Verdict("wrong value", f"{told} That is x * x, the square.")
    return Verdict("wrong value", f"{told} {'It returned x unchanged.' if output == x else ''}".rstrip())


# --------------------------------------------------------------------------------------------------- 0.1 decode_step_bytes

_TINY = {
    "num_layers": 3,
    "hidden_size": 6,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 2,
    "intermediate_size": 10,
    "vocab_size": 10,
}


def bytes_cases(seed: int) -> list[Case]:
    rng = random.Random(f"0.1:{seed}")
    wide = {**_TINY, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "vocab_size": 50}  # heads wider than hidden_size
    drawn = [_draw_sizes(rng) for _ in range(4)]
    cases = [_bytes_case("streamed_parameters", sizes) for sizes in (_TINY, wide, *drawn[:2])]
    for sizes, rest in (
        (_TINY, (3, 5, 1)),
        (_TINY, (3, 5, 2)),
        (_TINY, (4, 0, 2)),
        (wide, (2, 7, 4)),
        *((sizes, (rng.randint(2, 99), rng.randint(2, 999), rng.choice([1, 2, 4]))) for sizes in drawn),
    ):
        cases.append(_bytes_case("decode_step_bytes", sizes, *rest))
    return cases


def _draw_sizes(rng: random.Random) -> dict[str, int]:
    num_kv_heads = rng.choice([1, 2, 3])
    return {
        "num_layers": rng.randint(2, 9),
        "hidden_size": rng.randint(3, 40),
        "num_heads": num_kv_heads * rng.choice([2, 3, 4]),
        "num_kv_heads": num_kv_heads,
        "head_dim": 2 * rng.randint(1, 6),
        "intermediate_size": rng.randint(41, 99),
        "vocab_size": rng.randint(100, 999),
    }


def _bytes_case(function: str, sizes: dict[str, int], *rest: int) -> Case:
    given = (
        "config" if function == "streamed_parameters" else "config, batch_size={}, context_len={}, dtype_bytes={}".format(*rest)
    )
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return {"function": function, "sizes": sizes, "rest": rest, "call": f"{function}({given})   with {shown}"}


def judge_bytes(case: Case, output: Any) -> Verdict:
    weights_only = case["function"] == "streamed_parameters"
    if output is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not _is_number(output):
        return _no_number(output)
    if weights_only and not isinstance(output, int):
        told = f"It should return an integer, and returned {output!r}, a float. Nothing has to be divided here (or use //)."
        return Verdict("wrong type", told)
    matrices = _matrices(case["sizes"])
    weights = case["sizes"]["num_layers"] * sum(matrices.values()) + _head(case["sizes"])
    right = weights if weights_only else _step_bytes(case, weights)
    if output == right:
        return RIGHT
    told = f"It returned {output:,}, and should return {right:,}."
    for value, why in _count_mistakes(case["sizes"], right) if weights_only else _step_mistakes(case, weights):
        if output == value:
            return Verdict("wrong value", f"{told} {why}")
    return Verdict(
        "wrong value", "\n".join([told, "", *(_weight_table(case, matrices) if weights_only else _step_table(case, weights))])
    )


def _matrices(sizes: dict[str, int], **changed: int) -> dict[str, int]:
    """The numbers in each of one layer's seven matrices."""
    s = {**sizes, **changed}
    q, kv, hidden, wide = (
        s["num_heads"] * s["head_dim"],
        s["num_kv_heads"] * s["head_dim"],
        s["hidden_size"],
        s["intermediate_size"],
    )
    return {
        "q": hidden * q,
        "k": hidden * kv,
        "v": hidden * kv,
        "o": q * hidden,
        "gate": hidden * wide,
        "up": hidden * wide,
        "down": wide * hidden,
    }


def _head(sizes: dict[str, int]) -> int:
    return sizes["hidden_size"] * sizes["vocab_size"]


def _count_mistakes(sizes: dict[str, int], right: int) -> Iterator[Mistake]:
    yield from _weight_mistakes(sizes)
    for dtype_bytes in (2, 4):
        yield dtype_bytes * right, "Those are bytes. This function counts numbers; decode_step_bytes makes bytes of them."


def _weight_mistakes(sizes: dict[str, int]) -> Iterator[Mistake]:
    layers, head, matrices = sizes["num_layers"], _head(sizes), _matrices(sizes)
    layer = sum(matrices.values())
    yield layers * layer, "The matrix that makes logits, hidden_size x vocab_size, is missing: every step reads it too."
    yield layer + head, f"That is one layer, and there are {layers} (num_layers)."
    yield layer, f"That is one layer, and there are {layers} (num_layers). The matrix that makes logits is missing too."
    yield (
        layers * (layer + head),
        "The matrix that makes logits is counted in each layer. It is there once, after the last layer.",
    )
    yield (
        layers * layer + 2 * head,
        (
            "The embedding is counted as well. A step does not read that matrix, only one row a token; the one that makes"
            " logits is read whole."
        ),
    )
    yield (
        layers * sum(_matrices(sizes, num_kv_heads=sizes["num_heads"]).values()) + head,
        "k and v are counted as wide as q. They have num_kv_heads heads, which are fewer (grouped queries).",
    )
    yield (
        layers * sum(_matrices(sizes, num_heads=sizes["num_kv_heads"]).values()) + head,
        "q and o are counted as narrow as k and v. They have num_heads heads.",
    )
    square = layer - matrices["q"] - matrices["o"] + 2 * sizes["hidden_size"] ** 2
    yield (
        layers * square + head,
        (
            "q and o are counted as hidden_size x hidden_size. Their other side is num_heads * head_dim, which need"
            " not be hidden_size."
        ),
    )
    yield (
        layers * (layer - matrices["k"]) + head,
        "One of k and v is missing: both are there, each num_kv_heads * head_dim wide.",
    )
    yield (
        layers * (layer - matrices["o"]) + head,
        "o, the matrix after attention (num_heads * head_dim x hidden_size), is missing.",
    )
    yield layers * (layer - matrices["up"]) + head, "The MLP has three matrices, gate, up and down, and one is missing."
    yield layers * (layer - 2 * matrices["up"]) + head, "The MLP has three matrices, gate, up and down, and two are missing."


def _weight_table(case: Case, matrices: dict[str, int]) -> Iterator[str]:
    """The count, as far as its shape: the sizes of the parts, so that one can see which is off."""
    yield "The parts, in numbers:"
    yield (
        "    one layer   "
        + ", ".join(f"{name} {count:,}" for name, count in matrices.items())
        + f": {sum(matrices.values()):,}"
    )
    yield f"    layers      {case['sizes']['num_layers']}"
    yield f"    logits      {_head(case['sizes']):,}"


def _kv_per_token(sizes: dict[str, int]) -> int:
    """Numbers, not bytes."""
    return 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"]


def _step_bytes(case: Case, weights: int) -> int:
    batch_size, context_len, dtype_bytes = map(int, case["rest"])
    return (weights + batch_size * context_len * _kv_per_token(case["sizes"])) * dtype_bytes


def _step_mistakes(case: Case, weights: int) -> Iterator[Mistake]:
    (B, context, size), sizes, kv = case["rest"], case["sizes"], _kv_per_token(case["sizes"])
    yield (
        B * (weights + context * kv) * size,
        "The weights are counted once for each sequence. One step reads them once, however many sequences share it: that is why"
        " batching pays.",
    )
    yield (
        (weights + context * kv) * size,
        f"The KV cache of one sequence is counted. There are {B}, each with a cache of its own.",
    )
    yield (
        (weights + B * kv) * size,
        f"One token of each sequence is counted. The step reads the cache of all {context} (context_len).",
    )
    yield weights * size, "The KV cache is missing: each sequence's, context_len tokens long."
    yield B * context * kv * size, "The weights are missing. Every step reads all of them."
    yield weights + B * context * kv, f"Those are numbers, not bytes: each takes {size} (dtype_bytes)."
    yield (
        weights + B * context * kv * size,
        f"The weights are counted in numbers, not in bytes: each takes {size} (dtype_bytes).",
    )
    yield (
        weights * size + B * context * kv,
        "The KV cache is counted in numbers, not in bytes. kv_bytes_per_token takes dtype_bytes as its second argument.",
    )
    yield (
        weights * size + B * context * kv * 2,
        f"The KV cache is counted with 2 bytes a number (kv_bytes_per_token's default), and dtype_bytes is {size}.",
    )
    yield (
        weights * size + B * context * kv * size**2,
        "The KV cache was multiplied by dtype_bytes twice: kv_bytes_per_token(config, dtype_bytes) gives bytes already.",
    )
    yield (
        (weights + B * (context + 1) * kv) * size,
        f"One token too many in each sequence's cache: context_len, {context}, counts all of them.",
    )
    yield (
        (weights + (B + context) * kv) * size,
        "batch_size and context_len were added. Each of the sequences has that many tokens: multiply.",
    )
    yield (weights + B * context * kv // 2) * size, "Half of the KV cache is missing: a token keeps a key and a value."
    yield (
        (weights + B * context * kv // sizes["num_layers"]) * size,
        "The KV cache of one layer is counted. Every layer has its own.",
    )
    yield (
        (weights + B * context * kv * sizes["num_heads"] // sizes["num_kv_heads"]) * size,
        "The KV cache is counted with num_heads. It keeps num_kv_heads heads, which are fewer.",
    )
    yield (weights * size + B * context * kv) * size, "The weights were multiplied by dtype_bytes twice."
    for value, why in _weight_mistakes(sizes):
        yield _step_bytes(case, int(value)), f"The weights: {why[0].lower()}{why[1:]}"


def _step_table(case: Case, weights: int) -> Iterator[str]:
    (batch_size, context_len, dtype_bytes), kv = case["rest"], _kv_per_token(case["sizes"])
    yield "The parts, in bytes:"
    yield f"    weights, read once        {weights:,} x {dtype_bytes} = {weights * dtype_bytes:,}"
    yield f"    KV cache of one token     {kv:,} x {dtype_bytes} = {kv * dtype_bytes:,}"
    yield f"    sequences, tokens each    {batch_size}, {context_len}"


# ----------------------------------------------------------------------------------------------------------- 0.2 step_time


def step_time_cases(seed: int) -> list[Case]:
    rng = random.Random(f"0.2:{seed}")
    toy = (100.0, 10.0, 0.5)
    by_hand = [(200, 0, 0), (0, 30, 0), (200, 30, 0), (400, 30, 0), (0, 0, 3), (200, 30, 4), (500, 30, 4)]
    cases = [_step_time_case(counts, toy) for counts in by_hand]
    for _ in range(4):
        device = (rng.uniform(1, 900) * 1e12, rng.uniform(0.1, 5) * 1e12, rng.uniform(1, 9) * 1e-6)
        cases.append(_step_time_case((rng.randint(1, 999) * 10**10, rng.randint(1, 99) * 10**8, rng.randint(100, 600)), device))
    return cases


def _step_time_case(counts: tuple[int, int, int], device: tuple[float, float, float]) -> Case:
    flops, num_bytes, launches = counts
    shown = "flops {:.6g}, bandwidth {:.6g}, launch_overhead {:.6g}".format(*device)
    call = f"step_time(flops={flops:,}, bytes={num_bytes:,}, launches={launches}, device)   with a device of {shown}"
    return {"counts": counts, "device": device, "call": call}


def judge_step_time(case: Case, output: Any) -> Verdict:
    if output is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if not _is_number(output):
        return _no_number(output)
    (flops, num_bytes, launches), (peak, bandwidth, overhead) = case["counts"], case["device"]
    compute, memory, launch = flops / peak, num_bytes / bandwidth, launches * overhead
    right = max(compute, memory) + launch
    if _same(output, right):
        return RIGHT
    parts = f"arithmetic {compute:.6g}, memory {memory:.6g}, launches {launch:.6g}"
    told = f"It returned {output:.6g}, and should return {right:.6g} seconds: {parts}."
    part = "the arithmetic" if compute < memory else "the memory traffic"
    shorter = f"That is {part} alone, the shorter of the two here. Both go on at once; the step is done when the longer one is."
    mistakes: list[Mistake] = [
        (compute + memory + launch, "Arithmetic and memory were added. They run at the same time: take the longer."),
        (
            compute + memory,
            "Arithmetic and memory were added. They run at the same time: take the longer. The launches are missing.",
        ),
        (min(compute, memory) + launch, shorter),
        (min(compute, memory), shorter),
        *(
            [(max(compute, memory, launch), "The launches went into the maximum. Here they come on top of it.")]
            if launch > max(compute, memory)
            else [
                (
                    max(compute, memory),
                    "The launches are missing: launches * device.launch_overhead comes on top (and not into the maximum).",
                )
            ]
        ),
        (max(compute, memory) + overhead, f"One launch is counted, and there are {launches}."),
        (max(compute, memory) + launches, "The launches were added as a number. Each takes device.launch_overhead seconds."),
        (max(flops / bandwidth, num_bytes / peak) + launch, "Bandwidth and flops are swapped: bytes go with device.bandwidth."),
        (max(flops * peak, num_bytes * bandwidth) + launch, "It multiplied. Work divided by what is done a second is seconds."),
        (max(compute, memory) + (launches / overhead), "Each launch takes device.launch_overhead seconds: multiply."),
        (max(flops // peak, num_bytes // bandwidth) + launch, "// cuts off what is below a second. Divide with /."),
        (max(flops // peak, num_bytes // bandwidth), "// cuts off what is below a second. Divide with /."),
        *((round(right, n), "It was rounded. Return the time as it comes out.") for n in range(10)),
        (right * 1e3, "Those are milliseconds. Return seconds."),
        (right * 1e6, "Those are microseconds. Return seconds."),
        (1 / right if right else math.nan, "That is steps a second. Return the seconds of one step."),
    ]
    why = next(
        (words for value, words in mistakes if _same(output, value)),
        "It is the longer of the first two plus the third. Compute each by itself and compare it with these.",
    )
    return Verdict("wrong value", f"{told}\n{why}")


# ------------------------------------------------------------------------------------------------------------------- words


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _no_number(value: Any) -> Verdict:
    return Verdict("wrong type", f"It should return one number, and returned {kind_of(value)}.")


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


CHECKS = {
    "0.0": Check(
        cases=double_cases,
        judge=judge_double,
        minutes=3,
        difficulty=1,
        hints=(
            "This is what a hint looks like: one at a time, from a nudge to nearly the answer. Twice a number is the number and"
            " the number again.",
            "`x + 2` and twice x are the same for x = 2 only. Multiply.",
        ),
    ),
    "0.1": Check(
        cases=bytes_cases,
        judge=judge_bytes,
        minutes=12,
        difficulty=1,
        hints=(
            "streamed_parameters: go down the table of the seven matrices. A matrix from a to b numbers holds a * b. Add up one"
            " layer, multiply by the number of layers, then add the matrix that makes logits, once.",
            "q and o have num_heads * head_dim on one side, k and v num_kv_heads * head_dim. All three matrices of the MLP hold"
            " hidden_size * intermediate_size.",
            "decode_step_bytes: which part does the whole batch share, and which does each sequence bring? Weights:"
            " streamed_parameters(config) * dtype_bytes, whatever the batch. Caches: batch_size * context_len tokens, each of"
            " kv_bytes_per_token(config, dtype_bytes).",
        ),
    ),
    "0.2": Check(
        cases=step_time_cases,
        judge=judge_step_time,
        minutes=5,
        difficulty=1,
        hints=(
            "Three times in seconds: for the arithmetic, for the memory traffic, for the launches. Which of them overlap?",
            "Arithmetic takes flops / device.flops, memory bytes / device.bandwidth. Both go on at once, so the"
            " longer one decides.",
            "The maximum of the two, plus launches * device.launch_overhead.",
        ),
    ),
}
