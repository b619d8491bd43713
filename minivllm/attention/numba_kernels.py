"""The paged decode kernel for CPUs, in Numba. Only `cpu.py` imports this file, and only where Numba is installed.

Decode attention is bound by memory: each key and value is read for one new token only. So the kernel's design is about touching
the cache once and in order:

    - it follows the block table in place: no gather, no copy, no read at or beyond seq_len, never the null block;
    - one pass over a token's keys serves all query heads, so each K and V row comes from memory once (GQA);
    - while it computes it asks for the row 16 tokens ahead: block tables jump, and hardware prefetchers do not follow jumps.

The cache comes in as one flat array of 4-byte words. A float32 is a word. A bfloat16 is the upper half of a float32, so a
word holds two of them: `word << 16` is the first as a float32, `word & 0xffff0000` the second. Widening a pair costs one cheap
instruction each, but it puts even and odd elements into different vectors. Queries and outputs are kept in the same two halves:

    bfloat16    words of a row    | 0 1 | 2 3 | 4 5 | 6 7 |        first half 0 2 4 6, second half 1 3 5 7
    float32     words of a row    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | first half 0 1 2 3, second half 4 5 6 7

Scores, their exponentials, the weighted sum of values are three plain loops over one sequence: its scores fit into a core's
own cache, and plain loops vectorize better than one that rescales as it goes (the online softmax of Lab 08). Tokens go by
four, which gives the processor four independent sums to work on. May not know torch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, uint64
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

# Sums may be reordered and fused (loops need that to vectorize), but NaN and infinity keep their meaning: a broken request must
# come out as NaN, not as a plausible number.
FASTMATH = {"reassoc", "contract", "arcp", "afn", "nsz"}
AHEAD = 16  # tokens; half and double measured slower
UNROLL = 4
LINE = 16  # words in a 64-byte cache line
LOG2_E = np.float32(1.4426950408889634)


@intrinsic
def _prefetch(typing_context, words, index):
    """Ask for the cache line that holds words[index]; no wait, no fault, no value."""

    def emit(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [ir.IntType(32)] * 3)
        )
        read, keep, data_cache = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        builder.call(hint, [pointer, read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(words, index), emit


def _first(words, index):
    """Element of a row's first half, as float32 (compiled by the type of the cache; see the file's drawing)."""


def _second(words, index, half):
    """Its partner in the second half."""


@overload(_first, inline="always")
def _compile_first(words, index):
    if words.dtype == types.uint32:
        return lambda words, index: np.uint32(words[index] << np.uint32(16)).view(np.float32)
    return lambda words, index: words[index]


@overload(_second, inline="always")
def _compile_second(words, index, half):
    if words.dtype == types.uint32:
        return lambda words, index, half: np.uint32(words[index] & np.uint32(0xFFFF0000)).view(np.float32)
    return lambda words, index, half: words[index + half]


@njit(inline="always", fastmath=FASTMATH)
def _exp(x):
    """e ** x for x <= 0, relative error 2e-7: 2 ** floor(y) by its bits, times a polynomial for the rest. Unlike math.exp it
    vectorizes. NaN stays NaN."""
    y = x * LOG2_E
    y = np.float32(-126.0) if y < np.float32(-126.0) else y
    whole = np.floor(y)
    f = y - whole
    p = np.float32(1.8775767e-3)
    p = p * f + np.float32(8.9893397e-3)
    p = p * f + np.float32(5.5826318e-2)
    p = p * f + np.float32(2.4015361e-1)
    p = p * f + np.float32(6.9315308e-1)
    p = p * f + np.float32(9.9999994e-1)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(inline="always", fastmath=FASTMATH)
def _token_offsets(block_table, start, stop, block_size, row, first_word, offsets):
    """offsets[i] = where the keys of token start + i begin, in words. Beyond the end the last token is repeated, so that loops
    by four, and the prefetch, never look at anything the sequence does not own."""
    i = 0
    for t in range(start, stop):
        offsets[i] = (np.int64(block_table[t // block_size]) * block_size + t % block_size) * row + first_word
        i += 1
    for pad in range(i, i + UNROLL + AHEAD):
        offsets[pad] = offsets[i - 1]


@njit(inline="always", fastmath=FASTMATH)
def _scores(words, offsets, n, q, num_heads, group, width, half, scores, tops):
    """scores[h, i] = q[h] . key[i] for num_heads query heads and n tokens, tops[h] their maximum. q is scaled and in halves; a
    kv head is `width` words. Scores past n repeat the last token's."""
    m = uint64(half)
    for h in range(num_heads):
        tops[h] = np.float32(-np.inf)
    for i in range(0, n, UNROLL):
        for ahead in range(i + AHEAD, i + AHEAD + UNROLL):
            for line in range(0, num_heads // group * width, LINE):
                _prefetch(words, uint64(offsets[ahead] + line))
        for h in range(num_heads):
            head = h // group * width
            k0, k1 = uint64(offsets[i] + head), uint64(offsets[i + 1] + head)
            k2, k3 = uint64(offsets[i + 2] + head), uint64(offsets[i + 3] + head)
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for d in range(half):
                j = uint64(d)
                q_first, q_second = q[h, d], q[h, half + d]
                s0 += q_first * _first(words, k0 + j) + q_second * _second(words, k0 + j, m)
                s1 += q_first * _first(words, k1 + j) + q_second * _second(words, k1 + j, m)
                s2 += q_first * _first(words, k2 + j) + q_second * _second(words, k2 + j, m)
                s3 += q_first * _first(words, k3 + j) + q_second * _second(words, k3 + j, m)
            scores[h, i], scores[h, i + 1], scores[h, i + 2], scores[h, i + 3] = s0, s1, s2, s3
            s0, s2 = s1 if s1 > s0 else s0, s3 if s3 > s2 else s2  # here, the maximum costs nothing: it waits for no memory
            s0 = s2 if s2 > s0 else s0
            tops[h] = s0 if s0 > tops[h] else tops[h]


@njit(inline="always", fastmath=FASTMATH)
def _weights(scores, n, num_heads, tops, totals):
    """Scores become weights e ** (score - top), not yet divided by their sum totals[h]. Padding up to a multiple of four is
    0."""
    for h in range(num_heads):
        top = tops[h]
        total = np.float32(0)
        for i in range(n):
            weight = _exp(scores[h, i] - top)
            scores[h, i] = weight
            total += weight
        totals[h] = total
        for i in range(n, n + UNROLL - 1):
            scores[h, i] = np.float32(0)


@njit(inline="always", fastmath=FASTMATH)
def _weighted_values(words, offsets, n, values, weights, num_heads, group, width, half, acc):
    """acc[h] = sum of weights[h, i] * value[i], in halves. Every token's values begin `values` words after its keys."""
    m = uint64(half)
    for h in range(num_heads):
        for d in range(2 * half):
            acc[h, d] = np.float32(0)
    for i in range(0, n, UNROLL):
        for ahead in range(i + AHEAD, i + AHEAD + UNROLL):
            for line in range(0, num_heads // group * width, LINE):
                _prefetch(words, uint64(offsets[ahead] + values + line))
        for h in range(num_heads):
            head = h // group * width + values
            v0, v1 = uint64(offsets[i] + head), uint64(offsets[i + 1] + head)
            v2, v3 = uint64(offsets[i + 2] + head), uint64(offsets[i + 3] + head)
            w0, w1, w2, w3 = weights[h, i], weights[h, i + 1], weights[h, i + 2], weights[h, i + 3]
            for d in range(half):
                j = uint64(d)
                acc[h, d] += (
                    w0 * _first(words, v0 + j)
                    + w1 * _first(words, v1 + j)
                    + w2 * _first(words, v2 + j)
                    + w3 * _first(words, v3 + j)
                )
                acc[h, half + d] += (
                    w0 * _second(words, v0 + j, m)
                    + w1 * _second(words, v1 + j, m)
                    + w2 * _second(words, v2 + j, m)
                    + w3 * _second(words, v3 + j, m)
                )


@functools.cache
def paged_decode_kernel(head_dim: int, is_bfloat16: bool) -> Any:
    """The compiled kernel for one head size; the size is a constant in it, so that its inner loops unroll.

    kernel(q [B, H, D] float32, words [flat view of the cache], block_tables [B, M], seq_lens [B], out [B, H, D] float32,
           scale, window, block_size, num_kv_heads, num_workers)

    Work is split into num_workers shares of equal numbers of tokens: by sequences, or, when these are few, by (sequence, kv
    head). The first call of each process loads the machine code from Numba's cache, or compiles it (some seconds).
    """
    half = head_dim // 2
    stride = 2 if is_bfloat16 else 1  # in the vector: element d of the first half is at d * stride, its partner `partner` later
    partner = 1 if is_bfloat16 else half
    width = half if is_bfloat16 else head_dim

    def kernel(
        q,
        words,
        block_tables,
        seq_lens,
        out,
        scale,
        window,
        block_size,
        num_kv_heads,
        num_workers,
    ):
        num_seqs, num_q_heads = q.shape[0], q.shape[1]
        group = num_q_heads // num_kv_heads
        row = num_kv_heads * width
        values = len(words) // 2
        parts = 1 if num_seqs >= 2 * num_workers else num_kv_heads  # pieces a sequence is cut into
        heads = num_q_heads // parts
        total, longest = np.int64(0), np.int64(0)
        for b in range(num_seqs):
            n = min(np.int64(seq_lens[b]), window)
            total += n * parts
            longest = max(longest, n)
        for worker in prange(num_workers):
            offsets = np.empty(longest + UNROLL + AHEAD, np.int64)
            scores = np.empty((heads, longest + UNROLL), np.float32)
            q_halves = np.empty((heads, head_dim), np.float32)
            acc = np.empty((heads, head_dim), np.float32)
            tops, totals = np.empty(heads, np.float32), np.empty(heads, np.float32)
            done = np.int64(0)
            for b in range(num_seqs):
                stop = np.int64(seq_lens[b])
                n = min(stop, window)
                for part in range(parts):
                    middle = done + n // 2
                    done += n
                    if n == 0 or middle * num_workers // total != worker:
                        continue
                    _token_offsets(block_tables[b], stop - n, stop, block_size, row, part * (row // parts), offsets)
                    for h in range(heads):
                        for d in range(half):
                            q_halves[h, d] = q[b, part * heads + h, d * stride] * scale
                            q_halves[h, half + d] = q[b, part * heads + h, d * stride + partner] * scale
                    _scores(words, offsets, n, q_halves, heads, group, width, half, scores, tops)
                    _weights(scores, n, heads, tops, totals)
                    _weighted_values(words, offsets, n, values, scores, heads, group, width, half, acc)
                    for h in range(heads):
                        inverse = np.float32(1) / totals[h]
                        for d in range(half):
                            out[b, part * heads + h, d * stride] = acc[h, d] * inverse
                            out[b, part * heads + h, d * stride + partner] = acc[h, half + d] * inverse

    return _compiled(kernel)


def _compiled(function):
    """Numba's parallel compiler, with its cache on disk: beside this file, or in the user's cache folder when that is
    read-only. Where neither can be written, each process compiles anew."""
    options = {"parallel": True, "nogil": True, "fastmath": FASTMATH}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # Numba: "no locator available"
        return njit(**options)(function)
