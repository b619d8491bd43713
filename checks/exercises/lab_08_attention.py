"""Exercises 8.2 to 8.4: softmax in one pass, over tiles of scores, over a paged history, over parts. Cases and judges, in the
parent only; lab_08.py gathers them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_08_first import no_jit, with_and
from checks.exercises.lab_08_run import LOG2_E, TILE, attend_inputs, combine_inputs, softmax_tiles
from checks.exercises.words import described, numbers

INF = float("inf")

# ----------------------------------------------------------------------------------------------------- 8.2 online_softmax

MANY_TILES = 12
ONE_LOOP = (
    "Not all values were taken. Tiles come once: after a loop over scores alone, a second one finds nothing. One loop takes"
    " both: for s, v in zip(scores, values)."
)
NO_OTHER = (
    "A load has a mask and no `other`. Where the mask is false it reads nothing, and on a GPU the numbers there are whatever a"
    " register held: here NaN, and 0 * NaN is NaN."
)
MOST_ALIVE = 8  # of scores and values together: the tiles at hand, those before them, and a view or two


def softmax_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"8.2:{seed}")
    by_hand: list[list[list[float]]] = [
        [[0.0, 0.0]],
        [[1.0, 2.0, 3.0]],
        [[1.0, 3.0], [2.0, 0.0]],
        [[0.0, 1.0], [2.0]],
        [[0.0], [1.0]],
        [[2.0, 1.0], [-1.0, -3.0]],
        [[-5.0], [0.0, 4.0], [2.0]],
        [[-INF, 1.0], [2.0, -INF]],
        [[-INF, -INF], [1.0, 2.0]],
        [[1.0], [-INF, -INF]],
        [[-INF], [-INF, -INF]],
        [[1.0, 2.0], [-INF], [1.0]],
        [[1000.0], [0.0]],
        [[1000.0, 998.0], [999.0]],
        [[-2000.0, -2001.0], [-1999.0, -2005.0]],
    ]
    cases = [_softmax_case(i, tiles, 1, whole_values=True) for i, tiles in enumerate(by_hand)]
    tiles = [[round(rng.gauss(0, 3), 2) for _ in range(rng.randint(1, 5))] for _ in range(MANY_TILES * scale)]
    return [*cases, _softmax_case(seed, tiles, 3, whole_values=False)]


def _softmax_case(seed: int, scores: list[list[float]], D: int, *, whole_values: bool) -> Case:
    shown = str(scores).replace("'", "") if len(scores) < 5 else f"<{len(scores)} tiles>"
    values = "1, 2, ..." if whole_values else f"random, D = {D}"
    call = f"online_softmax(scores, values)   scores, tile by tile: {shown}; values: {values}"
    return {"seed": seed, "scores": scores, "D": D, "whole_values": whole_values, "call": call}


def judge_softmax(case: Case, output: Any) -> Verdict:
    returned = output["returned"]
    if output["values_left"] and not (isinstance(returned, torch.Tensor) and list(returned.shape) == [case["D"]]):
        return Verdict("wrong calls", ONE_LOOP)
    if not isinstance(returned, torch.Tensor):
        return Verdict("wrong type", f"It should return a tensor [D], and returned {described(returned)}.")
    if list(returned.shape) != [case["D"]]:
        return Verdict("wrong shape", f"It returned shape {list(returned.shape)}, and should return [{case['D']}], [D].")
    found = returned.double()
    wanted = _softmax(case)
    if not torch.allclose(found, wanted, atol=1e-4, rtol=1e-4):
        told = f"It returned {numbers(found)}, and should return {numbers(wanted)}."
        return Verdict("wrong value", f"{told} {ONE_LOOP}" if output["values_left"] else told + _softmax_reason(case, found))
    if len(case["scores"]) >= MANY_TILES and output["most_alive"] > MOST_ALIVE:
        return Verdict(
            "wrong calls",
            f"The result is right, but at one time {output['most_alive']} tiles were kept. On a chip there is room for the one"
            " at hand: use each as it comes, and carry only best, total and the weighted sum on.",
        )
    return RIGHT


def _softmax(
    case: Case, shrink_total: bool = True, shrink_sum: bool = True, divide: bool = True, base_of_exp: float = math.e
) -> torch.Tensor:
    """By the definition, or with a step of the running version left out."""
    best, total, summed = -INF, 0.0, torch.zeros(case["D"], dtype=torch.float64)
    for scores, values in zip(*softmax_tiles(case), strict=True):
        new = max(best, float(scores.max()))
        base = 0.0 if new == -INF else new
        weights = base_of_exp ** (scores.double() - base)
        shrink = base_of_exp ** (best - base)
        total = total * (shrink if shrink_total else 1) + float(weights.sum())
        summed = summed * (shrink if shrink_sum else 1) + weights @ values.double()
        best = new
    return summed / (total or 1.0) if divide else summed


def _softmax_reason(case: Case, found: torch.Tensor) -> str:
    scores = [s for tile in case["scores"] for s in tile]
    if found.isnan().any():
        if all(s == -INF for s in scores):
            return " All scores are -inf, so nothing is seen and the sum of weights is 0. Divide by 1 then: zeros come out."
        if any(all(s == -INF for s in tile) for tile in case["scores"]):
            return (
                " The first tile is all -inf, so best is -inf, and -inf - -inf is NaN. Where the new best is -inf, subtract 0:"
                " exp(-inf - 0) is 0, as it should be."
                if all(s == -INF for s in case["scores"][0])
                else " A tile of nothing but -inf must add nothing: not its own largest score counts, but the largest so far."
            )
        if max(scores) > 80:
            return " exp(1000) is infinite, and inf / inf is NaN. Subtract the largest score so far before exp."
        if max(scores) < -80:
            return " exp(-2000) is 0, and 0 / 0 is NaN. Subtract the largest score so far before exp."
        return " NaN comes from -inf - -inf, or from 0 / 0."
    if found.isinf().any():
        return " exp of a large score is infinite. Subtract the largest score so far before exp."
    ways: list[tuple[torch.Tensor, str]] = [
        (_softmax(case, divide=False), "That is the weighted sum; it is still to be divided by the sum of the weights."),
        (
            _softmax(case, shrink_sum=False),
            "When best grows, the weighted sum so far must shrink too, by exp(old best - new best).",
        ),
        (
            _softmax(case, shrink_total=False),
            "When best grows, the total so far must shrink too, by exp(old best - new best).",
        ),
        (
            _softmax(case, shrink_total=False, shrink_sum=False),
            "The tiles' weights are relative to different bests: shrink total and weighted sum when best grows.",
        ),
    ]
    ways.append((_softmax(case, base_of_exp=2.0), "That is with powers of 2. Softmax takes powers of e: torch.exp."))
    if bool((found == 0).all()):
        ways.append((found, "Zeros: all weights are 0, or a NaN was turned into 0. A NaN says that -inf was taken from -inf."))
    tiles, values = softmax_tiles(case)
    last = tiles[-1].softmax(0).double() @ values[-1].double()
    told = (
        "That is the last tile alone. The tiles before it count too, and best is the largest score so far, not the tile's own."
    )
    ways.append((last, told))
    ways.append((tiles[0].softmax(0).double() @ values[0].double(), "That is the first tile alone."))
    each = [s.softmax(0).double() @ v.double() for s, v in zip(tiles, values, strict=True)]
    ways.append((torch.stack(each).mean(0), "That is the mean of the tiles' own softmaxes. Tiles weigh differently."))
    ways.append((torch.stack(each).sum(0), "That is the sum of the tiles' own softmaxes."))
    return next((f" {why}" for way, why in ways if torch.allclose(found, way, atol=1e-4, rtol=1e-4)), "")


# ------------------------------------------------------------------------------------------------------------- 8.3 attend


def attend_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"8.3:{seed}")
    long = [3, 7, 1, 9, 4, 8, 2, 6, 10, 5]  # 10 blocks of 4: three tiles
    cases = [
        _attend_case(0, [1], 4, stale="numbers"),
        _attend_case(1, [1], 3),
        _attend_case(2, [2, 1], 6, stale="numbers"),
        _attend_case(3, [3, 1], 7, kv_heads=2, kv_head=1, HEAD_DIM=12),
        _attend_case(4, [3, 1], 7, rows=3, kv_heads=2, kv_head=0, HEAD_DIM=12),
        _attend_case(5, long, 21, stale="numbers"),
        _attend_case(5, long, 21, rows=2, HEAD_DIM=20, D=32, TILE=32),
        _attend_case(6, long, 40, rows=4, kv_heads=2, kv_head=1),
        _attend_case(7, long, 24, first=19, window=5),
        _attend_case(8, long, 40, window=3, TILE=32),
        _attend_case(9, long, 22, rows=6, spread=True),
        _attend_case(10, long, 22, rows=6, spread=True, window=2),
        _attend_case(11, long, 40, first=18, stop=31),
        _attend_case(12, long, 9, first=16, stop=9),
        _attend_case(13, long, 40, q_size=300.0),
        _attend_case(14, long, 38, rows=2, dtype="float16", HEAD_DIM=12),
    ]
    size, length = rng.choice([3, 5, 8]), rng.randint(33 * scale, 50 * scale)
    table = rng.sample(range(1, 24 * scale), -(-length // size))
    rows, kv_head = rng.randint(2, 9), rng.randrange(3)
    more: dict[str, Any] = {"rows": rows, "kv_heads": 3, "kv_head": kv_head, "BLOCK_SIZE": size, "num_blocks": 24 * scale}
    cases.append(_attend_case(seed, table, length, **more))
    return cases


def _attend_case(seed: int, table: list[int], seq_len: int, *, rows: int = 1, spread: bool = False, **more: Any) -> Case:
    """`rows` queries at the sequence's last position, or (spread) at its last positions."""
    positions = [seq_len - 1 - (rows - 1 - i if spread else 0) for i in range(rows)]
    case: Case = {
        "seed": seed, "seq_len": seq_len, "row_positions": positions, "first": 0, "stop": seq_len, "window": None,
        "BLOCK_SIZE": 4, "num_blocks": 24, "kv_heads": 1, "kv_head": 0, "HEAD_DIM": 16, "D": 16,
        "dtype": "float32", "q_size": 1.0, "stale": "nan", "TILE": TILE,
        **more,
    }  # fmt: skip
    case["block_table"] = table[: -(-seq_len // case["BLOCK_SIZE"])]
    where = f"row{'s' * (rows > 1)} at position{'s' * spread} {', '.join(map(str, positions)) if spread else positions[0]}"
    if rows > 1 and not spread:
        where = f"{rows} {where}"
    extra = f", window={case['window']}" if case["window"] else ""
    extra += f", KV head {case['kv_head']} of {case['kv_heads']}" if case["kv_heads"] > 1 else ""
    extra += f", HEAD_DIM={case['HEAD_DIM']} in D={case['D']}" if case["HEAD_DIM"] < case["D"] else ""
    extra += f", {case['dtype']}" if case["dtype"] != "float32" else ""
    extra += ", large scores" if case["q_size"] > 1 else ""
    extra += f", BLOCK_SIZE={case['BLOCK_SIZE']}" if case["BLOCK_SIZE"] != 4 else ""
    walk = f"first={case['first']}, stop={case['stop']}"
    case["call"] = f"attend(q <{where}>, block_table={case['block_table']}, {walk}{extra}, TILE={case['TILE']})"
    return case


def judge_attend(case: Case, output: Any) -> Verdict:
    return with_and(_judge_attend(case, output), output)


def _judge_attend(case: Case, output: Any) -> Verdict:
    if "plain" in output:
        return no_jit(output["plain"])
    if "unpack" in output:
        return Verdict("wrong type", f"It should return three things: sum_RD, best_R, total_R. ({output['unpack']})")
    inputs = attend_inputs(case)
    for row, position in enumerate(case["row_positions"]):
        found = output["sums"][row].double(), float(output["bests"][row]), float(output["totals"][row])
        wrong = _judge_attend_row(case, inputs, found, row, output["undefined"])
        if wrong:
            return Verdict("wrong value", f"Row {row}, at position {position}: {wrong}")
    if output["stray"]:
        return Verdict("wrong value", f"What it returns is right. But {_stray_of_walk(case, *output['stray'])}")
    return RIGHT


def _stray_of_walk(case: Case, program: int, is_write: bool, name: str | None, offset: int) -> str:
    """A load of what is no part of the walk, whose numbers then count for nothing."""
    somebody = "On a GPU that is somebody else's memory: the kernel reads rubbish, or ends with 'illegal memory access'."
    if name is None:
        return f"it {'writes to' if is_write else 'reads'} memory that belongs to none of its arguments. {somebody}"
    if is_write:
        return f"it writes to {name} itself. attend returns its results, and decode_kernel stores them."
    first, stop, size = case["first"], case["stop"], case["BLOCK_SIZE"]
    if name == "block_table" and 0 <= offset < first // size:
        return f"it looks at positions before {first} (entry {offset} of block_table): it begins at `first`."
    if name == "block_table":
        needed = f"the positions {first} to {stop - 1} need the entries {first // size} to {(stop - 1) // size}"
        needed = "there is no position to look at" if first >= stop else needed
        return (
            f"it reads entry {offset} of block_table, and {needed}. {somebody} Mask that load too, with the"
            " positions that are inside: tl.load(block_table + ..., mask=inside, other=0)."
        )
    if name != "cache":
        return f"it reads {name}, which is not among its arguments."
    slots = case["num_blocks"] * size
    slot, within = divmod(offset, case["kv_heads"] * case["HEAD_DIM"])
    if not 0 <= slot < 2 * slots:
        return f"it reads memory beside the cache. {somebody}"
    head, dim = divmod(within, case["HEAD_DIM"])
    block, row = divmod(slot % slots, size)
    if head == case["kv_head"] and block in case["block_table"] and case["block_table"].index(block) * size + row < first:
        return f"it reads position {case['block_table'].index(block) * size + row}, and begins at `first`, {first}."
    return (
        f"it reads a {'value' if slot >= slots else 'key'} of KV head {head} (dimension {dim}), in row {row} of block {block},"
        f" which is no part of its walk: KV head {case['kv_head']}, positions {first} to {stop - 1}, blocks"
        f" {case['block_table']}. Mask both loads with inside[:, None] & (dims < HEAD_DIM)[None, :]: other slots may hold NaN,"
        " and what is not read costs no time."
    )


Found = tuple[torch.Tensor, float, float]


def _judge_attend_row(case: Case, inputs: dict[str, torch.Tensor], found: Found, row: int, undefined: bool) -> str | None:
    wanted = _walk(case, inputs, row)
    if _same(case, found, wanted):
        return None
    H = case["HEAD_DIM"]
    sums, best, total = found
    if math.isnan(total) or sums[:H].isnan().any() or math.isnan(best):
        return _nan_reason(case, wanted, undefined)
    if wanted[2] == 0.0:
        return (
            f"it sees none of the positions from {case['first']} to {case['stop'] - 1}, so sum_RD is 0, best_R is -inf and"
            f" total_R is 0. It returned {numbers(sums[:H])}, {best:.3g} and {total:.3g}."
        )
    told = f"sum_RD / total_R is {numbers(sums[:H] / (total or 1))}, and should be {numbers(wanted[0][:H] / wanted[2])}."
    for wrong, why in _other_walks(case, inputs, row):
        if _same(case, found, wrong):
            return f"{told} {why}"
    if not torch.allclose(sums[:H] / (total or 1), wanted[0][:H] / wanted[2], atol=5e-3, rtol=5e-3):
        return told
    if not _close(best, wanted[1]):
        told = f"sum_RD / total_R is right. best_R is {best:.4g}, and should be the largest score, {wanted[1]:.4g}."
        if _close(best * LOG2_E, wanted[1]):
            told += " Scores are multiplied with scale_log2, and the exponential is tl.exp2: combine relies on that."
        return told + " (8.4 brings parts to a common best with it.)"
    if len(sums) > H and sums[H:].abs().max() > 1e-6 and torch.allclose(sums[:H], wanted[0][:H], atol=5e-3):
        return f"sum_RD is right up to HEAD_DIM = {H}, and not 0 behind it: mask dims < HEAD_DIM, or it reads the next head's."
    return (
        f"sum_RD / total_R and best_R are right. total_R is {total:.4g}, and should be {wanted[2]:.4g}: the sum of 2 ** (score"
        " - best_R)."
    )


def _nan_reason(case: Case, wanted: Found, undefined: bool) -> str:
    told = "it returned NaN. "
    if case["q_size"] > 1:
        return told + "Scores are in the hundreds here, and 2 to such a power is infinite: subtract the largest score so far."
    if wanted[2] == 0.0 or case["window"] or len(set(case["row_positions"])) > 1:
        return told + (
            "A row may see nothing of a whole tile: then its best is still -inf, and -inf - -inf is NaN. Where new_best_R is"
            " -inf, subtract 0."
        )
    if undefined:
        return f"{told}{NO_OTHER} Say other=0.0."
    return told + (
        f"Slots beyond position {case['seq_len'] - 1}, other blocks and other KV heads hold NaN here, and 0 * NaN is NaN. Load"
        " only what belongs to the walk: mask the positions (inside) and the dims (dims < HEAD_DIM), with other=0.0, for keys"
        " and for values."
    )


def _walk(
    case: Case,
    inputs: dict[str, torch.Tensor],
    row: int,
    *,
    slot: Callable[[int], int] | None = None,
    visible: Callable[[int], bool] | None = None,
    scale: float = 1.0,
    shrink: tuple[bool, bool] = (True, True),
    parts: tuple[int, int] = (0, 1),
    hidden: float = -INF,
    first: int | None = None,
    stop: int | None = None,
    only_last: bool = False,
    base: float = 2.0,
    base_of_shrink: float | None = None,
    step: int | None = None,
    upright: bool = False,
) -> Found:
    """One row's walk in float64, tile by tile, rightly, or with one thing done otherwise."""
    size, position, window = case["BLOCK_SIZE"], case["row_positions"][row], case["window"] or 1 << 30
    slot = slot or (lambda p: case["block_table"][p // size] * size + p % size)
    visible = visible or (lambda p: p <= position and position - p < window)
    keys, values = (inputs["cache"].double()[part].flatten(0, 1)[:, case["kv_head"]] for part in parts)
    query = inputs["q"][row, : case["HEAD_DIM"]].double()
    factor = scale * case["HEAD_DIM"] ** -0.5 * math.log2(math.e)
    summed, best, total = torch.zeros(case["D"], dtype=torch.float64), -INF, 0.0
    width: int = case["TILE"]
    first, stop = case["first"] if first is None else first, stop or case["stop"]
    for start in range(first, stop, step or width):
        tile = range(start, min(start + width, stop))
        slots = [min(slot(p), len(keys) - 1) for p in tile]
        scores = (_not_transposed(keys[slots], width) if upright else keys[slots]) @ query * factor
        scores = torch.where(torch.tensor([visible(p) for p in tile]), scores, torch.tensor(hidden, dtype=torch.float64))
        beyond = width - len(tile) if hidden == 0.0 else 0  # of a tile that reaches beyond the walk, with values of 0
        new = max(best, float(scores.max()), 0.0 if beyond else -INF)
        reference = 0.0 if new == -INF else new
        weights = base ** (scores - reference)
        shrunk = (base_of_shrink or base) ** (best - reference)
        if only_last:
            summed, total = torch.zeros_like(summed), 0.0
        total = total * (shrunk if shrink[0] else 1.0) + float(weights.sum()) + beyond * base ** (0.0 - reference)
        summed = summed * (shrunk if shrink[1] else 1.0)
        summed[: case["HEAD_DIM"]] += weights @ values[slots]
        best = new
    return summed, best, total


def _not_transposed(keys: torch.Tensor, width: int) -> torch.Tensor:
    """A tile of keys [K, width] as a product without tl.trans sees it: dimensions for positions."""
    tile = torch.zeros(width, width, dtype=keys.dtype)
    tile[: len(keys), : keys.shape[1]] = keys
    return tile.T[: len(keys), : keys.shape[1]]


def _other_walks(case: Case, inputs: dict[str, torch.Tensor], row: int) -> Iterator[tuple[Found, str]]:
    """What common mistakes would give, each with the word for it."""
    table, size, position = case["block_table"], case["BLOCK_SIZE"], case["row_positions"][row]
    window, first = case["window"] or 1 << 30, case["first"]

    def walk(**wrong: Any) -> Found:
        return _walk(case, inputs, row, **wrong)

    right = walk()
    divided = right[0] / (right[2] or 1.0), right[1], right[2]
    yield divided, "sum_RD is divided already. Return it as it is: decode_kernel divides, and split parts must not."
    yield (right[0], right[2], right[1]), "best_R and total_R changed places: return sum_RD, best_R, total_R."
    yield walk(first=0), "That is the walk from position 0: it begins at `first`."
    yield walk(scale=1 / (case["HEAD_DIM"] ** -0.5 * math.log2(math.e))), "The scores are not multiplied with scale_log2."
    yield walk(scale=case["HEAD_DIM"] ** -0.5 * math.log2(math.e)), "The scores are multiplied with scale_log2 twice."
    yield walk(base_of_shrink=math.e), "Weights are powers of 2, so shrink_R is one, too: tl.exp2(best_R - the new best)."
    yield walk(base=math.e), "scale_log2 holds log2(e) already: the exponential is tl.exp2, not tl.exp."
    yield walk(shrink=(True, False)), "When best_R grows, sum_RD must shrink with it: sum_RD * shrink_R[:, None]."
    yield walk(shrink=(False, True)), "When best_R grows, total_R must shrink with it: total_R * shrink_R."
    yield walk(shrink=(False, False)), "When best_R grows, sum_RD and total_R must shrink with it."
    yield walk(only_last=True), "That is the last tile alone: add to what was there, shrunk."
    yield walk(slot=lambda p: p), "That reads the cache from its start: load the block from the table."
    yield walk(slot=lambda p: table[0] * size + p), "That reads on behind the first block. The next block can be anywhere."
    yield walk(slot=lambda p: table[p // size]), "That is block_ids alone. Each block has BLOCK_SIZE rows."
    yield from _walks_by_tiles(case, walk)
    if first % size:
        told = f"`first` is {first} here, in the middle of a block (BLOCK_SIZE={size}): "
        yield walk(first=first // size * size), told + "the walk begins there, not at the block's first position."
        entries = [first // size + (p - first) // size for p in range(case["stop"])]
        yield (
            walk(slot=lambda p: table[p // size] * size + (p - first) % size),
            told + "a position's row in its block is position % BLOCK_SIZE, counted from 0 and not from `first`.",
        )
        told += "a position's block is entry position // BLOCK_SIZE of the table, counted from 0 and not from `first`."
        yield walk(slot=lambda p: table[max(entries[p], 0)] * size + p % size), told
        yield walk(slot=lambda p: table[max(entries[p], 0)] * size + (p - first) % size), told
    if case["TILE"] > TILE:
        told = f"TILE is {case['TILE']} here, and can be another number: "
        every = walk(visible=lambda p: p <= position and position - p < window and (p - first) % case["TILE"] < TILE)
        yield every, told + "a round takes tl.arange(0, TILE) positions, not always 16."
        yield walk(step=TILE), told + "the loop goes on by TILE, range(first, stop, TILE), or positions count twice."
    yield walk(parts=(0, 0)), "That is the weighted sum of the keys. v_KD is loaded from `values`."
    if window < 1 << 30:
        yield walk(visible=lambda p: p <= position), "The window is left out: position - p must be less than window."
    behind = walk(visible=lambda p: position - p < window)
    yield behind, "Positions behind the row's own are seen: position - p must be at least 0."
    yield walk(visible=lambda p: True), "All positions are seen: position - p must be at least 0, and less than window."
    yield walk(visible=lambda p: p < position and position - p < window), "A row sees its own position too: distance 0 counts."
    yield (
        walk(visible=lambda p: p <= position and position - p <= window),
        f"One position too many: a window of {case['window']} holds {case['window']} positions, the row's own included.",
    )
    yield walk(hidden=0.0), "A hidden score is -inf, not 0: 2 ** 0 is a weight like any other."


def _walks_by_tiles(case: Case, walk: Callable[..., Found]) -> Iterator[tuple[Found, str]]:
    """What becomes of a walk that takes tiles for blocks, or one tile for all."""
    table: list[int] = case["block_table"]
    size: int = case["BLOCK_SIZE"]
    width: int = case["TILE"]
    first: int = case["first"]
    entry = "A position's block is entry position // BLOCK_SIZE of the table, its row in it position % BLOCK_SIZE"
    yield walk(slot=lambda p: table[p // width] * size + p % size), f"{entry}. TILE has no say in it: a tile is no block."
    yield walk(slot=lambda p: table[p // size] * size + p % width), f"{entry}. TILE has no say in it: a tile is no block."
    yield (
        walk(slot=lambda p: table[p // size] * width + p % size),
        "A block has BLOCK_SIZE rows, not TILE: block_ids * BLOCK_SIZE.",
    )
    if case["stop"] - first > width:
        position, window = case["row_positions"][0], case["window"] or 1 << 30
        for origin in {first, 0}:

            def again(p: int, origin: int = origin) -> int:
                return origin + (p - first) % width

            last = first + -(-(case["stop"] - first) // width) * width
            same = walk(
                slot=lambda p: table[again(p) // size] * size + again(p) % size,
                visible=lambda p: again(p) <= position and position - again(p) < window,
                stop=last,
            )
            yield same, "Each round takes the first tile again: positions are start + tl.arange(0, TILE)."
    if width == case["D"] == case["HEAD_DIM"]:
        told = "Those are products with the keys' columns: keys [K, D] are to be turned, tl.dot(q_RD, tl.trans(k_KD))."
        yield walk(upright=True), told
    if case["window"]:
        told = "A row's distance is counted from its own position, row_positions, not from `stop`."
        yield walk(visible=lambda p: case["stop"] - p < case["window"]), told


def _same(case: Case, found: Found, wanted: Found) -> bool:
    """Within what the dtype's weights allow. Sums can be large where many tokens are seen, so relative to the total."""
    tolerance = 2e-2 if case["dtype"] == "float16" else 5e-3
    size = max(1.0, wanted[2])
    return (
        bool(torch.allclose(found[0] / size, wanted[0] / size, atol=tolerance, rtol=tolerance))
        and _close(found[1], wanted[1], tolerance)
        and _close(found[2], wanted[2], tolerance)
    )


def _close(a: float, b: float, tolerance: float = 5e-3) -> bool:
    return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


# ----------------------------------------------------------------------------------------------------- 8.4 combine_kernel


def combine_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"8.4:{seed}")
    by_hand: list[list[list[float]]] = [
        [[0.0]],
        [[0.0, 0.0]],
        [[0.0, 1.0]],
        [[2.0, -1.0, 0.0]],
        [[1.0, 0.0, -INF]],
        [[-INF, 3.0], [0.0, 2.0], [1.0, -INF]],
        [[-INF, -INF], [1.0, 1.0]],
        [[400.0, 399.0, 397.0], [-400.0, -401.0, -INF]],
    ]
    cases = [_combine_case(i, bests, 2, 2, whole_numbers=True) for i, bests in enumerate(by_hand)]
    bests = [[round(rng.gauss(0, 4), 2) for _ in range(7)] for _ in range(4 * scale)]
    cases.append(_combine_case(seed, bests, 12, 16))
    bests = [[round(rng.gauss(0, 4), 2) for _ in range(19)] for _ in range(4 * scale)]
    cases.append(_combine_case(seed, bests, 20, 32, P=32, dtype="float16"))
    return cases


def _combine_case(seed: int, bests: list[list[float]], head_dim: int, D: int, **more: Any) -> Case:
    case: Case = {
        "seed": seed,
        "bests": bests,
        "HEAD_DIM": head_dim,
        "D": D,
        "P": 8,
        "whole_numbers": False,
        "dtype": "float32",
        **more,
    }
    shown = str(bests) if len(bests) < 4 else f"<{len(bests)} rows of {len(bests[0])}>"
    extra = ", out in float16" if case["dtype"] == "float16" else ""
    case["call"] = (
        f"combine_kernel[({len(bests)},)](out, sums, bests={shown}, totals, num_parts={len(bests[0])}, HEAD_DIM={head_dim},"
        f" D={D}, P={case['P']}){extra}"
    )
    return case


def judge_combine(case: Case, output: Any) -> Verdict:
    return with_and(_judge_combine(case, output), output)


def _judge_combine(case: Case, output: Any) -> Verdict:
    if "plain" in output:
        return no_jit(output["plain"])
    inputs = {name: tensor.double() for name, tensor in combine_inputs(case).items()}
    for row in range(len(case["bests"])):
        found, wanted = output["out"][row].double(), _combined(inputs, row)
        if _near(case, found, wanted):
            continue
        told = f"Row {row}, parts with best {case['bests'][row]}: out is {numbers(found)}, and should be {numbers(wanted)}."
        return Verdict("wrong value", told + _combine_reason(case, inputs, row, found, output["undefined"]))
    if not output["around"]:
        rest = f"{case['HEAD_DIM']} numbers (D is that, rounded up to a power of two)"
        return Verdict("wrong value", f"It wrote beyond a row of out, which has {rest}. Mask the store with dims < HEAD_DIM.")
    if output["stray"]:
        return Verdict("wrong value", f"Every row of out is right. But {_stray_of_row(case, *output['stray'])}")
    return RIGHT


def _stray_of_row(case: Case, program: int, is_write: bool, name: str | None, offset: int) -> str:
    """A load or a store of another row's."""
    if name is None:
        return f"program {program} reads memory that belongs to none of its arguments."
    each = {"out": case["HEAD_DIM"], "sums": len(case["bests"][0]) * case["HEAD_DIM"]}.get(name, len(case["bests"][0]))
    first, last = program * each, program * each + each - 1
    return (
        f"program {program} {'writes to' if is_write else 'reads'} {name} at offset {offset}, and row {program} has the offsets"
        f" {first} to {last}. Mask parts < num_parts and dims < HEAD_DIM in every load and store."
    )


def _near(case: Case, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = 2e-3 if case["dtype"] == "float16" else 1e-4
    return bool(torch.allclose(found, wanted, atol=tolerance, rtol=tolerance))


def _combined(
    inputs: dict[str, torch.Tensor], row: int, shrink: tuple[bool, bool] = (True, True), base: float = 2.0, divide: bool = True
) -> torch.Tensor:
    bests = inputs["bests"][row]
    best = float(bests.max())
    shrunk = base ** (bests - (0.0 if best == -INF else best))
    even = torch.ones_like(shrunk)
    total = float((inputs["totals"][row] * (shrunk if shrink[0] else even)).sum())
    summed = (inputs["sums"][row] * (shrunk if shrink[1] else even)[:, None]).sum(0)
    return summed / (total or 1.0) if divide else summed


def _combine_reason(case: Case, inputs: dict[str, torch.Tensor], row: int, found: torch.Tensor, undefined: bool) -> str:
    bests = case["bests"][row]
    if bool((found == -7).all()):
        return " Nothing was written there: row r's result is HEAD_DIM numbers at out + r * HEAD_DIM."
    written = int((found != -7).sum())
    if bool((found[written:] == -7).all()) and written < len(found):
        return f" Nothing was written from dimension {written} on: they are tl.arange(0, D), and D is {case['D']} here."
    if found.isnan().any():
        if all(b == -INF for b in bests):
            return (
                " No part saw anything: best is -inf, and -inf - -inf is NaN; the total is 0, and 0 / 0 is NaN. Subtract 0, and"
                " divide by 1, then zeros come out."
            )
        if max(bests) > 100:
            return " 2 ** 400 is infinite: subtract the best of all parts before tl.exp2."
        if undefined:
            return f" {NO_OTHER} Say other=-inf for bests, and other=0.0 for totals and sums."
        return (
            " Around bests, totals and sums there is NaN: mask parts < num_parts in each of the three loads (and dims <"
            " HEAD_DIM), `other` -inf for bests and 0.0 for the rest."
        )
    ways: list[tuple[torch.Tensor, str]] = [
        (_combined(inputs, row, (False, False)), "The parts were added as they are. Each is relative to its own best."),
        (_combined(inputs, row, (True, False)), "The sums must be multiplied with 2 ** (best_P - best) too."),
        (_combined(inputs, row, (False, True)), "The totals must be multiplied with 2 ** (best_P - best) too."),
        (_combined(inputs, row, base=math.e), "Scores are in powers of two: tl.exp2, not tl.exp."),
        (_combined(inputs, row, divide=False), "It is still to be divided by the total."),
    ]
    parts = inputs["sums"][row] / inputs["totals"][row].clamp(min=1e-9)[:, None]
    ways.append((parts.mean(0), "That is the mean of the parts' own results. Parts weigh differently."))
    for taken in (8, 16):
        if taken < len(bests):
            some = {name: tensor[:, :taken] for name, tensor in inputs.items()}
            told = f"Those are the first {taken} parts alone: parts are tl.arange(0, P), and P is {case['P']} here."
            ways.append((_combined(some, row), told))
    ways += [(part, f"That is part {i} alone.") for i, part in enumerate(parts) if len(parts) > 1]
    for other in range(len(case["bests"])):
        if other != row:
            ways.append((_combined(inputs, other), f"That is row {other}'s result: rows are tl.program_id(0)."))
    return next((f" {why}" for way, why in ways if _near(case, found, way)), "")


# ------------------------------------------------------------------------------------------------------------------- words
