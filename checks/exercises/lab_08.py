"""Lab 08's checks: first Triton kernels, softmax in one pass, the paged decode kernel, split-KV's combine. In the parent only.

The judges are in lab_08_first.py (which memory a kernel touches), lab_08_attention.py (what comes out of a running softmax) and
lab_08_compiled.py (what the compiler says).
"""

from __future__ import annotations

from checks.exercises import Check
from checks.exercises.lab_08_attention import (
    attend_cases,
    combine_cases,
    judge_attend,
    judge_combine,
    judge_softmax,
    softmax_cases,
)
from checks.exercises.lab_08_compiled import compiled
from checks.exercises.lab_08_first import first_cases, judge_first
from checks.sandbox.sandbox import Limits


def why_no_kernels() -> str | None:
    """None where Triton is installed: with a GPU kernels run on it, without one in the interpreter."""
    from minivllm.attention.triton_utils import HAS_TRITON, why_no_triton

    return None if HAS_TRITON else why_no_triton()


def _limits() -> Limits:
    """CUDA reserves tens of gigabytes of addresses, and the first launch of a kernel compiles it."""
    import torch

    if torch.cuda.is_available():
        return Limits(cpu_seconds=90, wall_seconds=180, memory_bytes=1 << 46)
    return Limits(cpu_seconds=20, wall_seconds=60)


CHECKS = {
    "8.1": Check(
        cases=first_cases,
        judge=judge_first,
        minutes=15,
        difficulty=2,
        hints=(
            "Start with program 0: which numbers does it add? Then: what is different for program 3? Only where it starts.",
            "add: offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), a vector of BLOCK numbers. `offsets < n` is the"
            " mask of both loads and of the store.\ngather: a program has TILE positions, the same way. Their blocks are loaded"
            " from block_table + positions // BLOCK_SIZE: a load with a vector of pointers gives a vector.",
            "gather: rows = blocks * BLOCK_SIZE + positions % BLOCK_SIZE are the rows of the cache, [TILE]. Row r begins at"
            " cache + r * WIDTH. A rectangle of pointers is rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], its mask"
            " inside[:, None]. The same rectangle with positions in place of rows says where it goes in out.",
        ),
        limits=_limits(),
        why_not=why_no_kernels,
        second=compiled("8.1"),
    ),
    "8.2": Check(
        cases=softmax_cases,
        judge=judge_softmax,
        minutes=15,
        difficulty=2,
        hints=(
            "Carry three things from tile to tile: the largest score so far (best), the sum of weights so far (total), the"
            " weighted sum of values so far. All weights are exp(score - best). What must happen to what was summed when best"
            " grows?",
            "Old weights were exp(score - old best), and should be exp(score - new best): multiply what was summed, both the"
            " total and the values, by exp(old best - new best). Then add the tile's own.",
            "new_best = torch.maximum(best, tile.max()); shrink = exp(best - new_best); weights = exp(tile - new_best)\ntotal ="
            " total * shrink + weights.sum(); summed = summed * shrink + weights @ values; best = new_best\nWhere new_best is"
            " still -inf, subtract 0 in place of it. At the end divide by total, or by 1 if it is 0.",
        ),
    ),
    "8.3": Check(
        cases=attend_cases,
        judge=judge_attend,
        minutes=30,
        difficulty=3,
        hints=(
            "It is 8.2's loop for R rows at once, with 8.1's gather in front. Write the gather first: positions, blocks, rows,"
            " offsets, and two loads. `mask=` and `other=0.0` keep NaN out.",
            "scores_RK = tl.dot(q_RD, tl.trans(k_KD)) * scale_log2. A row sees a position if row_positions[:, None] -"
            " positions[None, :] is at least 0 and less than window, and positions < stop. tl.where(visible, scores_RK,"
            ' float("-inf")). From there on it is 8.2 with exp2 for exp, and tl.max(..., 1), tl.sum(..., 1) along the keys.',
            "new_best_R = tl.maximum(best_R, tl.max(scores_RK, 1)); reference_R = 0 where new_best_R is -inf, else new_best_R\n"
            "weights_RK = exp2(scores_RK - reference_R[:, None]); shrink_R = exp2(best_R - reference_R)\ntotal_R = total_R *"
            " shrink_R + the weights' sum; sum_RD = sum_RD * shrink_R[:, None] + tl.dot(weights_RK.to(v_KD.dtype), v_KD);"
            " best_R = new_best_R\nReturn sum_RD, best_R, total_R.",
        ),
        limits=_limits(),
        why_not=why_no_kernels,
        second=compiled("8.3"),
    ),
    "8.4": Check(
        cases=combine_cases,
        judge=judge_combine,
        minutes=15,
        difficulty=2,
        hints=(
            "Each part's numbers are relative to its own best score. It is the step of 8.2 in which best grows, for all parts"
            " at once: what does each have to be multiplied with?",
            "Load the P bests with a mask (`other` is -inf), take tl.max of them. shrink_P = tl.exp2(best_P - best). The total"
            " is the sum of the parts' totals, each times its shrink; the same with their sums, a rectangle [P, D].",
            "Row r's bests are at bests + r * num_parts + parts, its sums at sums + (r * num_parts + parts)[:, None] * HEAD_DIM"
            " + dims[None, :]. Add over parts with tl.sum(..., 0). Where best is -inf subtract 0; where the total is 0 divide"
            " by 1. Store HEAD_DIM numbers at out + r * HEAD_DIM + dims, converted to out.dtype.element_ty.",
        ),
        limits=_limits(),
        why_not=why_no_kernels,
        second=compiled("8.4"),
    ),
}
