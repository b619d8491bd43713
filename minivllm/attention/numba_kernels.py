"""The CPU's kernels in Numba: `paged_decode_kernel` and `write_kv_kernel`. Only `cpu.py` imports this file, and only where
Numba is installed.

Decode attention is bound by memory: each key and value is read for one new token only. So the kernel's design is about touching
the cache once and in order, and about keeping up with it:

    - it follows the block table in place: no gather, no copy, no read at or beyond seq_len, never the null block;
    - work is cut by tokens, not by sequences: each worker gets the same number of tokens to read, whether these are 30 short
      sequences or a piece of one long one. Pieces of a sequence are put together at the end (split-KV, as in Lab 08);
    - while it computes it asks for the row 16 tokens ahead: block tables jump, and hardware prefetchers do not follow jumps.

The cache comes in as one flat array of 4-byte words. A float32 is a word. A bfloat16 is the upper half of a float32, so a
word holds two of them: `word << 16` is the first as a float32, `word & 0xffff0000` the second. Widening a pair costs one cheap
instruction each, but it puts even and odd elements into different vectors. Queries and sums are kept in the same two halves:

    bfloat16    words of a row    | 0 1 | 2 3 | 4 5 | 6 7 |        first half 0 2 4 6, second half 1 3 5 7
    float32     words of a row    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | first half 0 1 2 3, second half 4 5 6 7

The two innermost loops are tiles of `numba_tiles.py`, written in vector instructions. Around them, scores, their exponentials
and the weighted sum of values are three passes over a piece of one sequence: its scores fit into a core's own cache, and passes
need no rescaling on the way (the online softmax of Lab 08 does). May not know torch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit, prange
from numba.core import types
from numba.extending import overload

from minivllm.attention.numba_tiles import AHEAD, FASTMATH, num_lanes, pointer, score_tile, value_tile

TILE = 16  # tokens; a piece's last tile is filled up with its last token, at weight 0
LOG2_E = np.float32(1.4426950408889634)


def _widen(bits):
    """An element of the queries, as float32 (compiled by its type: a float32, or the 16 bits of a bfloat16)."""


def _narrow(x, like):
    """x in the type of the array `like`; to bfloat16 it is rounded to the nearest, ties to even."""


@overload(_widen, inline="always")
def _compile_widen(bits):
    if bits == types.uint16:
        return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    return lambda bits: bits


@overload(_narrow)
def _compile_narrow(x, like):
    if like.dtype != types.uint16:
        return lambda x, like: x

    def narrow(x, like):
        bits = np.float32(x).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(rounded) if x == x else np.uint16(0x7FC0)  # rounding would turn some NaNs into zeros

    return narrow


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
def _token_offsets(block_table, start, n, block_size, row, offsets):
    """offsets[i] = where the keys of token start + i begin, in words. Beyond the end the last token is repeated, so that tiles,
    and the prefetch, never look at anything the sequence does not own."""
    for i in range(n):
        t = start + i
        offsets[i] = (np.int64(block_table[t // block_size]) * block_size + t % block_size) * row
    for i in range(n, n + TILE + AHEAD):
        offsets[i] = offsets[n - 1]


@njit(inline="always", fastmath=FASTMATH)
def _weights(scores, n, num_tokens, tops, totals):
    """Scores become weights e ** (score - top), not yet divided by their sum totals[h]; those past n become 0."""
    for h in range(len(tops)):
        top = np.float32(-np.inf)
        for i in range(n):
            top = scores[h, i] if scores[h, i] > top else top
        total = np.float32(0)
        for i in range(n):
            weight = _exp(scores[h, i] - top)
            scores[h, i] = weight
            total += weight
        tops[h], totals[h] = top, total
        for i in range(n, num_tokens):
            scores[h, i] = np.float32(0)


@njit(inline="always", fastmath=FASTMATH)
def _combine(piece_of, tops, totals, sums, out, stride, partner):
    """Sequences that were cut: piece e is of sequence piece_of[e] (-1: unused), and a sequence's pieces are neighbours. Each
    piece's weights are relative to its own top score; here they come to share one."""
    num_pieces, num_heads = tops.shape
    half = sums.shape[2] // 2
    for e in range(num_pieces):
        b = piece_of[e]
        if b < 0 or (piece_of[:e] == b).any():
            continue
        for h in range(num_heads):
            top, total = np.float32(-np.inf), np.float32(0)
            for k in range(e, num_pieces):
                if piece_of[k] == b and tops[k, h] > top:
                    top = tops[k, h]
            for k in range(e, num_pieces):
                if piece_of[k] == b:
                    tops[k, h] = _exp(tops[k, h] - top)
                    total += totals[k, h] * tops[k, h]
            for d in range(half):
                first, second = np.float32(0), np.float32(0)
                for k in range(e, num_pieces):
                    if piece_of[k] == b:
                        first += sums[k, h, d] * tops[k, h]
                        second += sums[k, h, half + d] * tops[k, h]
                out[b, h, d * stride] = _narrow(first / total, out)
                out[b, h, d * stride + partner] = _narrow(second / total, out)


@njit(inline="always")
def _write_rows(key, value, words, slots, row):
    """Rows of key and value [T, at least row] into their slots of the cache. IndexError, and nothing written, if a slot is not
    there."""
    values = len(words) // 2
    for t in range(len(slots)):
        if slots[t] < 0 or (slots[t] + 1) * row > values:
            raise IndexError("A slot of slot_mapping is not in the KV cache.")
    for t in range(len(slots)):
        start = slots[t] * row
        for d in range(row):
            words[start + d] = key[t, d]
            words[values + start + d] = value[t, d]


@functools.cache
def paged_decode_kernel(head_dim: int, group: int, is_bfloat16: bool) -> Any:
    """The compiled kernel for one head size and number of query heads that share a kv head: constants in it, because tiles are.

    kernel(q, q_stride, cache, num_words, block_tables, num_columns, seq_lens, out, num_seqs, scale, window, block_size,
           num_kv_heads, num_workers, num_new, key, key_stride, value, value_stride, slots)

    Arrays are given by address (to make a NumPy array of a tensor takes as long as a short sequence): q [B, H, D], whose rows
    begin q_stride elements apart, the cache of num_words words, block_tables [B, M] int32, seq_lens [B] int32, out [B, H, D]. q
    and out are float32, or the bits of bfloat16. A row of seq_len 0 becomes zeros. First num_new tokens are written, as
    `write_kv_kernel` does it (0: key, value and slots are not looked at). IndexError for a slot or block number that the cache
    does not have, and for a seq_len beyond the table. Compiling takes some seconds; later processes load the machine code from
    Numba's cache.
    """
    element, word = (np.uint16, np.uint32) if is_bfloat16 else (np.float32, np.float32)
    half = head_dim // 2
    stride = 2 if is_bfloat16 else 1  # in the vector: element d of the first half is at d * stride, its partner `partner` later
    partner = 1 if is_bfloat16 else half
    width = half if is_bfloat16 else head_dim  # words of a row of one kv head
    lanes = num_lanes(half)
    score_heads = _largest_divisor(group, lanes)
    score_tokens = 1 << ((lanes // score_heads).bit_length() - 1)
    value_heads = _largest_divisor(
        group, max(1, 24 * lanes // head_dim)
    )  # their sums stay in registers, of which AVX-512 has 32

    def kernel(
        q_address,
        q_stride,
        cache_address,
        num_words,
        tables_address,
        num_columns,
        lengths_address,
        out_address,
        num_seqs,
        scale,
        window,
        block_size,
        num_kv_heads,
        num_workers,
        num_new,
        key_address,
        key_stride,
        value_address,
        value_stride,
        slots_address,
    ):
        num_heads = num_kv_heads * group
        q = carray(pointer(q_address, element), (num_seqs, q_stride))
        words = carray(pointer(cache_address, word), (num_words,))
        block_tables = carray(pointer(tables_address, np.int32), (num_seqs, num_columns))
        seq_lens = carray(pointer(lengths_address, np.int32), (num_seqs,))
        out = carray(pointer(out_address, element), (num_seqs, num_heads, head_dim))
        row = num_kv_heads * width
        values = len(words) // 2  # a token's values begin so many words after its keys
        if block_tables.size > 0 and (block_tables.min() < 0 or block_tables.max() >= values // (block_size * row)):
            raise IndexError("A block table names a block that the KV cache does not have.")
        if num_seqs > 0 and seq_lens.max() > num_columns * block_size:
            raise IndexError("A sequence is longer than its block table.")
        if num_new > 0:
            key = carray(pointer(key_address, word), (num_new, key_stride))
            value = carray(pointer(value_address, word), (num_new, value_stride))
            _write_rows(key, value, words, carray(pointer(slots_address, np.int64), (num_new,)), row)
        total = np.int64(0)
        for b in range(len(seq_lens)):
            total += min(np.int64(seq_lens[b]), window)
            if seq_lens[b] == 0:
                out[b] = 0
        share = -(-total // num_workers)
        piece_of = np.full(2 * num_workers, -1, np.int64)  # the first and the last sequence of a worker may be cut
        piece_tops = np.empty((2 * num_workers, num_heads), np.float32)
        piece_totals = np.empty((2 * num_workers, num_heads), np.float32)
        piece_sums = np.empty((2 * num_workers, num_heads, head_dim), np.float32)
        for worker in prange(num_workers):
            capacity = -(-share // TILE) * TILE + TILE
            offsets = np.empty(capacity + AHEAD, np.int64)
            scores = np.empty((num_heads, capacity), np.float32)
            q_halves = np.empty((num_heads, head_dim), np.float32)
            sums = np.empty((num_heads, head_dim), np.float32)
            tops, totals = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
            before = np.int64(0)  # tokens of the sequences before b
            for b in range(len(seq_lens)):
                length = min(np.int64(seq_lens[b]), window)
                begin = max(worker * share - before, 0)
                end = min((worker + 1) * share - before, length)
                before += length
                n = end - begin
                if n <= 0:
                    continue
                _token_offsets(block_tables[b], seq_lens[b] - length + begin, n, block_size, row, offsets)
                for h in range(num_heads):
                    for d in range(half):
                        q_halves[h, d] = _widen(q[b, h * head_dim + d * stride]) * scale
                        q_halves[h, half + d] = _widen(q[b, h * head_dim + d * stride + partner]) * scale
                num_tokens = -(-n // TILE) * TILE
                for i in range(0, num_tokens, score_tokens):
                    for h in range(0, num_heads, score_heads):
                        head = h // group * width
                        score_tile(words, offsets, i, head, q_halves, h, scores, head_dim, score_heads, score_tokens)
                _weights(scores, n, num_tokens, tops, totals)
                sums[:] = np.float32(0)
                for i in range(0, num_tokens, TILE):
                    for h in range(0, num_heads, value_heads):
                        head = h // group * width + values
                        value_tile(words, offsets, i, head, scores, h, sums, head_dim, value_heads, TILE)
                if n < length:
                    piece = 2 * worker + (1 if begin == 0 else 0)
                    piece_of[piece], piece_tops[piece], piece_totals[piece], piece_sums[piece] = b, tops, totals, sums
                    continue
                for h in range(num_heads):
                    for d in range(half):
                        out[b, h, d * stride] = _narrow(sums[h, d] / totals[h], out)
                        out[b, h, d * stride + partner] = _narrow(sums[h, half + d] / totals[h], out)
        _combine(piece_of, piece_tops, piece_totals, piece_sums, out, stride, partner)

    signature = types.void(*[types.int64] * 9, types.float32, *[types.int64] * 10)
    return _compiled(kernel, signature, parallel=True)


@functools.cache
def write_kv_kernel(is_bfloat16: bool) -> Any:
    """kernel(key, key_stride, value, value_stride, cache, num_words, slots, num_tokens, row): `write_kv`, in words. As above,
    arrays are given by address: key and value [T, row] with rows so many words apart, slots [T] int64. IndexError, and nothing
    written, if a slot is not in the cache."""
    word = np.uint32 if is_bfloat16 else np.float32

    def kernel(
        key_address,
        key_stride,
        value_address,
        value_stride,
        cache_address,
        num_words,
        slots_address,
        num_tokens,
        row,
    ):
        key = carray(pointer(key_address, word), (num_tokens, key_stride))
        value = carray(pointer(value_address, word), (num_tokens, value_stride))
        words = carray(pointer(cache_address, word), (num_words,))
        _write_rows(key, value, words, carray(pointer(slots_address, np.int64), (num_tokens,)), row)

    return _compiled(kernel, types.void(*[types.int64] * 9), parallel=False)


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, min(n, limit) + 1) if n % d == 0)


def _compiled(function, signature, parallel):
    """Numba's compiler, with its cache on disk: beside this file, or in the user's cache folder when that is read-only. Where
    neither can be written, each process compiles anew."""
    options = {"parallel": parallel, "nogil": True, "fastmath": FASTMATH}
    try:
        return njit(signature, cache=True, **options)(function)
    except RuntimeError:  # Numba: "no locator available"
        return njit(signature, **options)(function)
