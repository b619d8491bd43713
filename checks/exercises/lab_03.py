"""Lab 03's checks: the contiguous cache, generation with it, a left-padded batch, and its memory. In the parent only."""

from __future__ import annotations

import random
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Check, Verdict
from checks.exercises.lab_02 import new_tokens
from checks.exercises.lab_03_run import favourites, numbered
from checks.exercises.words import count, described, is_or_are, times

# ------------------------------------------------------------------------------------------------ 3.1 ContiguousKVCache


def cache_cases(seed: int, scale: int = 1) -> list[Case]:
    """Scripts of calls: "a0x3" appends 3 tokens to layer 0, "v0" views it. Token numbers follow from what has been kept."""
    rng = random.Random(f"3.1:{seed}")
    by_hand = [
        (1, 4, "v0"),
        (1, 4, "a0x3 v0"),
        (1, 8, "a0x3 v0 a0x1 v0 a0x1 v0"),
        (2, 8, "a0x3 v0 a1x3 v1 a0x1 v0 a1x1 v1 v0"),
        (1, 4, "a0x3 a0x1 v0"),
        (1, 4, "a0x4 v0"),
        (1, 4, "a0x5 v0"),
        (2, 4, "a0x3 a1x3 a0x2 v0 a0x1 v0 v1"),
        (1, 4, "a0x4 a0x1 v0"),
        (3, 6, "a2x2 v2 v0 a0x2 a1x2 a2x3 v2 v1"),
    ]
    cases = [_cache_case(layers, max_len, script) for layers, max_len, script in by_hand]
    for _ in range(3):
        layers, max_len = rng.randint(2, 4), rng.randint(9 * scale, 15 * scale)
        prompt = rng.randint(2, max_len - 3)
        steps = [prompt, *[1] * (max_len - prompt)]
        script = " ".join(f"a{layer}x{n} v{layer}" for n in steps for layer in range(layers))
        cases.append(_cache_case(layers, max_len, script, heads=rng.randint(1, 3), dim=rng.choice([2, 4])))
    return cases


def _cache_case(layers: int, max_len: int, script: str, heads: int = 2, dim: int = 2) -> Case:
    held, steps = [0] * layers, []
    for word in script.split():
        layer, count = int(word[1]), int(word.partition("x")[2] or 0)
        steps.append(["append", layer, held[layer], count] if word[0] == "a" else ["view", layer])
        held[layer] += count if held[layer] + count <= max_len else 0
    shown = [_show_step(step) for step in steps]
    made = f"cache = ContiguousKVCache(num_layers={layers}, max_len={max_len}, num_kv_heads={heads}, head_dim={dim})"
    told = "; ".join(shown) if len(shown) <= 9 else f"{'; '.join(shown[:6])}; ... ({len(shown)} calls)"
    call = f"{made}; {told}"
    return {"layers": layers, "max_len": max_len, "heads": heads, "dim": dim, "script": steps, "call": call}


def judge_cache(case: Case, output: Any) -> Verdict:
    held = [0] * case["layers"]
    memory: dict[int, list[int]] = {}
    refused: set[int] = set()  # layers that should have refused an append
    for number, (step, answer) in enumerate(zip(case["script"], output["trace"], strict=True), start=1):
        layer = step[1]
        if step[0] == "append":
            if held[layer] + step[3] > case["max_len"]:
                refused.add(layer)
            verdict = _judge_append(case, held, layer, step[3], answer)
        else:
            verdict = _judge_view(case, held, layer, answer, memory, refused)
        if verdict:
            return Verdict(verdict.category, f"Call {number} of the script, {_show_step(step)}: {verdict.message}")
    return RIGHT


def _show_step(step: list[Any]) -> str:
    if step[0] == "view":
        return f"view({step[1]})"
    return f"append({step[1]}, <{count(step[3], 'token')}>)"


def _judge_append(case: Case, held: list[int], layer: int, more: int, answer: Any) -> Verdict | None:
    max_len, before = case["max_len"], held[layer]
    fits = before + more <= max_len
    room = f"layer {layer} held {before} of {count(max_len, 'token')}"
    if "error" in answer:
        kind, message = answer["error"]
        if fits:
            exactly = " That fills the cache exactly: it fits." if before + more == max_len else ""
            others = " Each layer has a length of its own." if sum(held) > before else ""
            return Verdict("wrong value", f'{room}, {more} more came, and it raised {kind} ("{message}").{exactly or others}')
        if kind != "ValueError":
            told = f'{room}, so {more} more do not fit, and it raised {kind} ("{message}")'
            return Verdict("wrong value", f"{told}. Check the room first, and raise ValueError.")
        missing = [name for name, n in (("how many tokens it holds", before), ("max_len", max_len)) if str(n) not in message]
        if missing:
            return Verdict("wrong value", f'The message "{message}" does not say {" and ".join(missing)} ({room}).')
        if answer["wrote"]:
            told = f"{room}, so {more} more do not fit. It raised ValueError, but wrote into the cache before that."
            return Verdict("wrong value", f"{told} Nothing is kept of an append that is refused: check the room first.")
        return None
    if not fits:
        return Verdict("wrong value", f"{room}, so {more} more do not fit. It should raise ValueError, and did not.")
    held[layer] += more
    return None


def _judge_view(
    case: Case, held: list[int], layer: int, answer: Any, memory: dict[int, list[int]], refused: set[int]
) -> Verdict | None:
    returned, length = answer["returned"], held[layer]
    if not isinstance(returned, (tuple, list)) or len(returned) != 2 or not all(isinstance(x, torch.Tensor) for x in returned):
        return Verdict("wrong type", f"It should return two tensors, (keys, values), and returned {described(returned)}.")
    wanted = [length, case["heads"], case["dim"]]
    for name, tensor in zip(("keys", "values"), returned, strict=True):
        if list(tensor.shape) != wanted:
            why = _shape_reason(case, held, layer, tensor, layer in refused)
            return Verdict("wrong shape", f"The {name} have shape {list(tensor.shape)}, and should have {wanted}.{why}")
    kept = [numbered(layer, 0, length, case["heads"], case["dim"], value) for value in (False, True)]
    if length and torch.allclose(returned[0], kept[1]) and torch.allclose(returned[1], kept[0]):
        return Verdict("wrong value", "Keys and values have changed places.")
    for name, tensor, right in zip(("key", "value"), returned, kept, strict=True):
        wrong = [t for t in range(length) if not torch.allclose(tensor[t].float(), right[t], atol=1e-3)]
        if wrong:
            return Verdict(
                "wrong value",
                f"Position {wrong[0]} of layer {layer}: {_content_reason(name, tensor[wrong[0]], wrong[0], layer)}",
            )
    if length and memory.setdefault(layer, answer["memory"]) != answer["memory"]:
        return Verdict(
            "wrong value",
            "The numbers are right, but this is a copy: it lies in other memory than the view before. Write into the memory"
            " that __init__ reserved, and return slices of it.",
        )
    return None


def _shape_reason(case: Case, held: list[int], layer: int, tensor: torch.Tensor, refused: bool) -> str:
    got, length = tensor.shape[0] if tensor.dim() else -1, held[layer]
    if tensor.dim() != 3:
        return ""
    if refused:
        return " An append that is refused leaves everything as it was: no token of it is kept or counted."
    if got == case["max_len"] and got != length:
        has = f"Layer {layer} holds {count(length, 'token')} so far"
        return f" That is all of the reserved memory. {has}; the rest is nobody's yet."
    if got == sum(held) and got != length:
        return f" Each layer counts its own tokens: layer {layer} has {length}."
    if got < length:
        return f" Tokens are missing: {length} were appended to layer {layer}. Does the length grow by len(k)?"
    return f" Layer {layer} holds {count(length, 'token')}."


def _content_reason(name: str, found: torch.Tensor, position: int, layer: int) -> str:
    """What stands where another token should, read from the numbers themselves."""
    first = float(found.flatten()[0])
    right = f"the {name} of token {position}"
    if not found.any():
        return f"there is nothing (zeros) where {right} should be. Was it written behind the tokens before it?"
    there = round(abs(first)) - 100
    other_layer, token = divmod(there, 100)
    if (first < 0) != (name == "value"):
        return f"a {'value' if first < 0 else 'key'} stands where {right} should be."
    if other_layer != layer:
        return f"a {name} of layer {other_layer} stands where {right} should be."
    if token != position:
        why = (
            "New tokens go behind the old ones, not over them."
            if token > position
            else "Each token is written once, behind those before."
        )
        return f"the {name} of token {token} stands where {right} should be. {why}"
    return f"{right} is there, but not all of its heads and dimensions are as they came."


# ---------------------------------------------------------------------------------------------- 3.2 generate_with_cache


def generate_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"3.2:{seed}")
    return [
        _generate_case(rng, length, new)
        for length, new in ((1, 1), (3, 1), (3, 2), (1, 4), (4, 3), (5, 9), (9 * scale, 20 * scale))
    ]


def _generate_case(rng: random.Random, length: int, new: int) -> Case:
    """One prompt whose right continuation cannot be had by looking at the first row."""
    while True:
        case: Case = {
            "vocab_size": rng.choice([7, 11, 17]),
            "salt": rng.randrange(1000),
            "prompt": [rng.randrange(7) for _ in range(length)],
            "max_new_tokens": new,
        }
        case["call"] = f"generate_with_cache(model, {case['prompt']}, {new}, cache)"
        rows = _favourites(case, case["prompt"])
        if length == 1 or rows[0] != rows[-1]:
            return case


def _favourites(case: Case, tokens: list[int]) -> list[int]:
    return favourites(tokens, list(range(len(tokens))), case["vocab_size"], case["salt"])


def judge_generate(case: Case, output: Any) -> Verdict:
    produced = new_tokens(case, output)
    if isinstance(produced, Verdict):
        return produced
    wrong = _judge_calls(case, produced, output["calls"]) or _judge_tokens(case, produced)
    if wrong:
        return wrong
    before, after = case["prompt"], output["prompt"]
    if before != after:
        return Verdict("input changed", f"The tokens are right, but the caller's list was changed from {before} to {after}.")
    return RIGHT


def _judge_calls(case: Case, produced: list[int], calls: list[list[list[int]]]) -> Verdict | None:
    """What the model was shown, call by call: the prompt, then each new token but the last."""
    prompt, new = case["prompt"], case["max_new_tokens"]
    sequence = prompt + produced
    start = 0
    for number, (tokens, positions) in enumerate(calls[:new]):
        end = len(prompt) + number
        right, right_positions = sequence[start:end], list(range(start, end))
        if tokens != right:
            return Verdict("wrong calls", _tokens_reason(number, tokens, right, sequence, end))
        if positions != right_positions:
            return Verdict("wrong calls", _positions_reason(number, positions, right_positions, len(prompt)))
        start = end
    told = f"It called the model {times(len(calls))} to make {count(new, 'token')}"
    if len(calls) > new:
        again = calls[new][0] == produced[-1:]
        return Verdict(
            "wrong calls", told + (". The last token need not go in." if again else ": one call for each is enough.")
        )
    if len(produced) != new:
        made = f"It returned {count(len(produced), 'token')}: {produced}."
        return Verdict("wrong value", f"{made} It should return exactly {new}.")
    if len(calls) < new:
        return Verdict("wrong calls", f"{told}. Each token needs a call.")
    return None


def _tokens_reason(number: int, tokens: list[int], right: list[int], sequence: list[int], end: int) -> str:
    told = f"Call {number + 1} of the model was given {tokens}, and should be given {right}"
    if number == 0:
        return told + ": the whole prompt goes in at once (prefill)."
    if tokens == sequence[:end]:
        return told + ": the whole sequence again. What came before is in the cache; only the newest token is new."
    if not tokens or tokens == sequence[end - 2 : end - 1]:
        return told + ": that token is in the cache already. The newest one, just chosen, goes in."
    return told + ": after the prompt each call gets one token, the newest."


def _positions_reason(number: int, positions: list[int], right: list[int], prompt_len: int) -> str:
    told = f"Call {number + 1} of the model was given positions {positions}, and should be given {right}"
    if number == 0:
        return told + ": positions count from 0."
    if positions == [0]:
        return (
            told + ": to the model the newest token then stands at the start of the text. Its position is the number of tokens"
            " before it."
        )
    if positions == [right[0] + 1]:
        return told + f": one too far. The cache holds tokens 0 to {right[0] - 1}, so the newest is number {right[0]}."
    if positions == [right[0] - 1]:
        return told + f": token {positions[0]} is in the cache already. The newest is number {right[0]}."
    if positions == [number] or positions == [number - 1]:
        return told + f": the prompt counts too, {count(prompt_len, 'token')}."
    return told + ": a token's position is the number of tokens before it."


def _judge_tokens(case: Case, produced: list[int]) -> Verdict | None:
    for number, token in enumerate(produced):
        sequence = case["prompt"] + produced[:number]
        rows = _favourites(case, sequence)
        if token == rows[-1]:
            continue
        if token == (rows[-1] - 1) % case["vocab_size"]:
            why = "That is the smallest logit of the last row (argmin). Take the largest."
        elif number == 0 and token in rows[:-1]:
            first = " (or of all rows at once: argmax of the whole matrix)" if token == rows[0] else ""
            why = f"That is the favourite of row {rows.index(token)}{first}."
            why += " What follows the prompt is in the last row, logits[-1]."
        else:
            why = "The next token is the argmax of the last row, logits[-1]."
        return Verdict("wrong value", f"After {sequence} it chose token {token}, and should choose {rows[-1]}. {why}")
    return None


# -------------------------------------------------------------------------------------------------------- 3.3 left_pad


def left_pad_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"3.3:{seed}")
    by_hand: list[list[list[int]]] = [
        [[5]],
        [[5, 6, 7]],
        [[5, 6], [7]],
        [[5], [6, 7, 8]],
        [[5, 6], [7, 8]],
        [[5, 6, 7], [8], [9, 4]],
        [[0, 0], [0]],
    ]
    for _ in range(3):
        by_hand.append(
            [[rng.randrange(50) for _ in range(rng.randint(1, 9 * scale))] for _ in range(rng.randint(3, 6 * scale))]
        )
    return [{"prompts": prompts, "call": f"left_pad({prompts})"} for prompts in by_hand]


def judge_left_pad(case: Case, output: Any) -> Verdict:
    prompts, returned = case["prompts"], output["returned"]
    B, T = len(prompts), max(map(len, prompts))
    if not isinstance(returned, (tuple, list)) or len(returned) != 3 or not all(isinstance(x, torch.Tensor) for x in returned):
        told = f"It should return three tensors, (token_ids, mask, positions), and returned {described(returned)}."
        return Verdict("wrong type", told)
    kinds = (torch.int64, torch.bool, torch.int64)
    if returned[1].dtype == torch.int64 and returned[2].dtype == torch.bool:
        told = "mask and positions have changed places: it should return (token_ids, mask, positions)."
        return Verdict("wrong type", told)
    for name, tensor, kind in zip(("token_ids", "mask", "positions"), returned, kinds, strict=True):
        if list(tensor.shape) != [B, T]:
            wanted = f"{[B, T]}: {count(B, 'prompt')}, the longest with {count(T, 'token')}"
            told = f"{name} has shape {list(tensor.shape)}, and should have {wanted}."
            return Verdict("wrong shape", told)
        if tensor.dtype != kind:
            told = f"{name} is {_dtype(tensor.dtype)}, and should be {_dtype(kind)}."
            return Verdict("wrong type", told)
    token_ids, mask, positions = (tensor.tolist() for tensor in returned)
    for row, prompt in enumerate(prompts):
        wrong = _judge_padded_row(row, prompt, T, token_ids[row], mask[row], positions[row])
        if wrong:
            return wrong
    if output["prompts"] != prompts:
        return Verdict("input changed", "The tensors are right, but the caller's lists were changed. Build new ones.")
    return RIGHT


def _judge_padded_row(
    row: int, prompt: list[int], T: int, token_ids: list[int], mask: list[bool], positions: list[int]
) -> Verdict | None:
    pad = T - len(prompt)
    wanted = [0] * pad + prompt
    told = f"Row {row}, the prompt {prompt}: "
    if token_ids != wanted:
        what = f"token_ids is {token_ids}, and should be {wanted}."
        if token_ids == prompt + [0] * pad:
            what += " The padding goes in front, so that every prompt's newest token stands in the last column."
        elif token_ids[pad:] == prompt:
            what += " Padding has token id 0."
        return Verdict("wrong value", told + what)
    real = [False] * pad + [True] * len(prompt)
    if mask != real:
        what = f"mask is {mask}, and should be {real}."
        if mask == [t != 0 for t in token_ids]:
            what += " Token id 0 can be a real token too: the mask follows from the lengths, not from the ids."
        elif mask == [not x for x in real]:
            what += " It is True where a token is."
        return Verdict("wrong value", told + what)
    if positions[pad:] != list(range(len(prompt))):
        what = f"its tokens have positions {positions[pad:]}, and should have {list(range(len(prompt)))}."
        if positions[pad:] == list(range(pad, T)):
            what += " Those are columns. The first token of every prompt is at position 0, wherever it stands in the table."
        elif positions[pad:] == list(range(1, len(prompt) + 1)):
            what += " Positions count from 0."
        return Verdict("wrong value", told + what)
    return None


# ----------------------------------------------------------------------------------------------------------- 3.4 memory

# Layers, heads, kv heads, head_dim, hidden_size: SmolLM2-135M, Llama-3.1-8B, and one whose heads are wider than hidden / heads.
_SHAPES = ((30, 9, 3, 64, 576), (32, 32, 8, 128, 4096), (28, 16, 8, 128, 1024))


def memory_cases(seed: int) -> list[Case]:
    rng = random.Random(f"3.4:{seed}")
    cases = [_bytes_case((1, 1, 1, 1, 1), 1), _bytes_case((5, 6, 3, 8, 40), 4)]
    cases += [_bytes_case(shape, size) for shape, size in zip(_SHAPES, (2, 2, 4), strict=True)]
    cases += [
        _concurrency_case(1000, 10, 10),
        _concurrency_case(1099, 10, 10),
        _concurrency_case(100, 10, 10),
        _concurrency_case(99, 10, 10),
        _concurrency_case(40 * 2**30, 131072, 131072),
        _concurrency_case(2**60 + 7 * 3 - 1, 7, 3),
    ]
    for _ in range(2):
        layers, kv_heads, groups, dim = rng.randint(2, 90), rng.randint(1, 16), rng.randint(2, 8), rng.choice([64, 80, 128])
        cases.append(_bytes_case((layers, kv_heads * groups, kv_heads, dim, kv_heads * groups * dim), rng.choice([1, 2, 4])))
        cases.append(_concurrency_case(rng.randint(10**9, 10**11), rng.randint(1000, 200000), rng.randint(1000, 400000)))
    return cases


def _bytes_case(shape: tuple[int, int, int, int, int], dtype_bytes: int) -> Case:
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
    config = dict(zip(names, shape, strict=True))
    shown = ", ".join(f"{name}={n}" for name, n in config.items())
    call = f"kv_bytes_per_token(config with {shown}; dtype_bytes={dtype_bytes})"
    return {"function": "kv_bytes_per_token", "config": config, "dtype_bytes": dtype_bytes, "call": call}


def _concurrency_case(memory_bytes: int, max_model_len: int, bytes_per_token: int) -> Case:
    call = f"max_concurrency({memory_bytes}, {max_model_len}, {bytes_per_token})"
    return {
        "function": "max_concurrency", "memory_bytes": memory_bytes, "max_model_len": max_model_len,
        "bytes_per_token": bytes_per_token, "call": call,
    }  # fmt: skip


def judge_memory(case: Case, output: Any) -> Verdict:
    if output is None:
        return Verdict("wrong type", "It returned None. Is a `return` missing?")
    if type(output) is float:
        whole = f" {output:g} of a request cannot be served: round down." if case["function"] == "max_concurrency" else ""
        return Verdict(
            "wrong type", f"It should return a whole number, an int, and returned {output!r}, a float.{whole} Integers have //."
        )
    if type(output) is not int:
        return Verdict("wrong type", f"It should return an int, and returned {described(output)}.")
    return _judge_bytes(case, output) if case["function"] == "kv_bytes_per_token" else _judge_concurrency(case, output)


def _judge_bytes(case: Case, output: int) -> Verdict:
    config, size = case["config"], case["dtype_bytes"]
    layers, heads, kv_heads, dim = (config[n] for n in ("num_layers", "num_heads", "num_kv_heads", "head_dim"))
    right = 2 * layers * kv_heads * dim * size
    if output == right:
        return RIGHT
    hidden = config["hidden_size"]
    reasons = {
        2
        * layers
        * heads
        * dim
        * size: f"That counts query heads ({heads}). Only KV heads are kept ({kv_heads}): query heads share them.",
        layers * kv_heads * dim * size: "Half is missing: a key and a value are kept.",
        2 * kv_heads * dim * size: f"That is one layer. Every layer keeps its own, and there are {layers}.",
        2 * layers * kv_heads * dim: f"Those are numbers, not bytes: each takes {size}.",
        2 * layers * hidden * size: "hidden_size is not what is kept: a key has num_kv_heads * head_dim numbers.",
        2
        * layers
        * kv_heads
        * (hidden // heads)
        * size: f"head_dim is {dim} here, not hidden_size // num_heads: it is a number of its own.",
        2 * layers * dim * size: f"That is one head. There {is_or_are(kv_heads)} {count(kv_heads, 'KV head')}.",
    }
    return Verdict("wrong value", f"It returned {output}, and should return {right} bytes. {reasons.get(output, '')}".rstrip())


def _judge_concurrency(case: Case, output: int) -> Verdict:
    memory, each = case["memory_bytes"], case["max_model_len"] * case["bytes_per_token"]
    right = memory // each
    if output == right:
        return RIGHT
    told = f"It returned {output}, and should return {right}: each request reserves {each:,} bytes of {memory:,}."
    if output in (memory // case["bytes_per_token"], memory // case["max_model_len"]):
        told += " A request reserves max_model_len tokens, of bytes_per_token each."
    elif right == 0:
        told += " Not even one fits: that is 0."
    elif output == right + 1:
        told += f" {output} would need {output * each:,}. Round down."
    elif output == round(memory / each) or abs(output - right) < 2**12:
        told += " Whole numbers this large do not fit into a float: use //."
    return Verdict("wrong value", told)


# ---------------------------------------------------------------------------------------------------------------- words


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CHECKS = {
    "3.1": Check(
        cases=cache_cases,
        judge=judge_cache,
        minutes=15,
        difficulty=1,
        hints=(
            "`self.kv[layer]` is [2, max_len, num_kv_heads, head_dim]. The next tokens of a layer go behind those it has."
            " How many has it?",
            "With `start = self.lengths[layer]` and `end = start + len(k)`, the new keys belong in `self.kv[layer, 0,"
            " start:end]`. Compare `end` with `self.max_len` before you write anything, and do not forget to remember the"
            " new length.",
            "append: compute start and end; if end is more than max_len, raise ValueError naming start and max_len; write k"
            " to [layer, 0, start:end] and v to [layer, 1, start:end]; set lengths[layer] = end.\nview: slice [layer, 0] and"
            " [layer, 1] up to the length.",
        ),
    ),
    "3.2": Check(
        cases=generate_cases,
        judge=judge_generate,
        minutes=15,
        difficulty=2,
        hints=(
            "The first call takes the whole prompt. Every later call takes one token, the one just chosen. The loop is the"
            " same for both: what goes in next, and at which positions?",
            "Keep two things: `new`, the tokens to put in next, and `start`, how many tokens the cache holds. Positions are"
            " `torch.arange(start, start + len(new))`.",
            "new, start, output = list(token_ids), 0, []\nrepeat max_new_tokens times:\n    logits ="
            " model(torch.tensor(new), torch.arange(start, start + len(new)), cache)\n    start grows by len(new)\n    new"
            " becomes a list of one: the argmax of logits[-1]; add it to output",
        ),
    ),
    "3.3": Check(
        cases=left_pad_cases,
        judge=judge_left_pad,
        minutes=12,
        difficulty=1,
        hints=(
            "Each row is padding, then the prompt. How much padding does a prompt need, if the longest has `width` tokens?",
            "Start from three tensors of zeros (False) with shape [B, width], and fill the last `len(prompt)` columns of"
            " each row: `token_ids[row, width - len(prompt):] = torch.tensor(prompt)`.",
            "width = max of the lengths. For each row: first = width - len(prompt); token_ids[row, first:] is the prompt,"
            " mask[row, first:] is True, positions[row, first:] is torch.arange(len(prompt)).",
        ),
    ),
    "3.4": Check(
        cases=memory_cases,
        judge=judge_memory,
        minutes=10,
        difficulty=1,
        hints=(
            "One token keeps a key and a value, in every layer, for every KV head. How many numbers is that, and how many"
            " bytes?",
            "2 (key and value) times layers times KV heads times head_dim numbers. For the second function: what does one"
            " request reserve?",
            "kv_bytes_per_token: 2 * num_layers * num_kv_heads * head_dim * dtype_bytes. max_concurrency: memory_bytes //"
            " (tokens reserved * bytes a token).",
        ),
    ),
}
