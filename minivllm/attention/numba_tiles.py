"""The innermost loops of the CPU's decode kernel, as vector instructions: a tile is a few tokens of one kv head, against the
query heads that share it. Only `numba_kernels.py` imports this file; the layout of words and halves is explained there. Labs:
built by none. May not know torch, block tables or requests.

Written in LLVM's own language because two things decide the speed and no loop says them: each key and value is widened once for
all heads of the group, and sums across a vector, one for each token and head, are taken for a whole tile at a time:

    the tile's sums, a vector of partial sums each      a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1 c2 c3 | d0 d1 d2 d3
    neighbours added, two vectors into one              a01 a23 b01 b23           | c01 c23 d01 d23
    again                                               a b c d                     three additions for four sums

Vectors have 16 lanes, or fewer where a row has no multiple of 16; LLVM cuts them to what the processor has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Sums may be reordered and fused (loops need that to vectorize), but NaN and infinity keep their meaning: a broken request must
# come out as NaN, not as a plausible number.
FASTMATH = {"reassoc", "contract", "arcp", "afn", "nsz"}
AHEAD = 16  # tokens to prefetch; with half as many a noisy measurement saw no difference
LINE = 16  # words in a 64-byte cache line

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLAGS = tuple(sorted(FASTMATH))


def num_lanes(half: int) -> int:
    """Of a vector: the largest power of two up to 16 that divides half a row."""
    return min(16, half & -half)


class _Tile:
    """One tile being written: where its arrays are, and the few instructions it is made of."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self.pointers = {
            k: context.make_array(kind)(context, builder, args[k]).data
            for k, kind in enumerate(signature.args)
            if isinstance(kind, types.Array)
        }
        self.columns = {  # of the two-dimensional ones, to find a row
            k: builder.extract_value(context.make_array(signature.args[k])(context, builder, args[k]).shape, 1)
            for k in self.pointers
            if signature.args[k].ndim == 2
        }
        self.is_bfloat16 = signature.args[0].dtype == types.uint32
        self.head_dim, self.heads, self.tokens = (kind.literal_value for kind in signature.args[-3:])
        self.half = self.head_dim // 2
        self.lanes = num_lanes(self.half)
        self.floats = ir.VectorType(_FLOAT, self.lanes)
        self.zero = ir.Constant(self.floats, [0.0] * self.lanes)

    def row(self, array: int, row: Any, column: Any = 0) -> Any:
        """Pointer into a two-dimensional array."""
        column = _INT64(column) if isinstance(column, int) else column
        at = self.builder.add(self.builder.mul(row, self.columns[array]), column)
        return self.builder.gep(self.pointers[array], [at])

    def load(self, pointer: Any, index: int, kind: Any = None) -> Any:
        kind = self.floats if kind is None else kind
        at = self.builder.gep(pointer, [_INT64(index)])
        return self.builder.load(self.builder.bitcast(at, kind.as_pointer()), align=4)

    def store(self, vector: Any, pointer: Any, index: int) -> None:
        at = self.builder.gep(pointer, [_INT64(index)])
        self.builder.store(vector, self.builder.bitcast(at, vector.type.as_pointer()), align=4)

    def token(self, offsets: Any, i: Any, t: int, shift: Any) -> Any:
        """Pointer to the words of token i + t of the piece, with the one AHEAD of it on its way."""
        b = self.builder
        ahead = b.load(b.gep(offsets, [b.add(i, _INT64(t + AHEAD))]))
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [_INT32] * 3)
        prefetch = b.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        for line in range(0, self.half if self.is_bfloat16 else self.head_dim, LINE):
            at = b.gep(self.pointers[0], [b.add(b.add(ahead, shift), _INT64(line))])
            read, keep, data_cache = (_INT32(value) for value in (0, 3, 1))
            b.call(prefetch, [b.bitcast(at, cgutils.voidptr_t), read, keep, data_cache])
        return b.gep(self.pointers[0], [b.add(b.load(b.gep(offsets, [b.add(i, _INT64(t))])), shift)])

    def widened(self, words: Any, start: int) -> tuple[Any, Any]:
        """Elements start .. start + lanes of a row's first half, and their partners of the second, as float32."""
        if not self.is_bfloat16:
            return self.load(words, start), self.load(words, self.half + start)
        pairs = self.load(words, start, ir.VectorType(_INT32, self.lanes))
        shift, mask = (ir.Constant(pairs.type, [value] * self.lanes) for value in (16, 0xFFFF0000))
        first, second = self.builder.shl(pairs, shift), self.builder.and_(pairs, mask)
        return self.builder.bitcast(first, self.floats), self.builder.bitcast(second, self.floats)

    def multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(x, y, flags=_FLAGS), total, flags=_FLAGS)

    def broadcast(self, number: Any) -> Any:
        undefined = ir.Constant(self.floats, ir.Undefined)
        vector = self.builder.insert_element(undefined, number, _INT32(0))
        return self.builder.shuffle_vector(vector, undefined, self._lanes([0] * self.lanes))

    def sums_of(self, vectors: list[Any]) -> Any:
        """One vector: the sum of each of up to `lanes` vectors (the file's drawing)."""
        vectors = vectors + [self.zero] * (self.lanes - len(vectors))
        even, odd = self._lanes(range(0, 2 * self.lanes, 2)), self._lanes(range(1, 2 * self.lanes, 2))
        while len(vectors) > 1:
            vectors = [
                self.builder.fadd(self.builder.shuffle_vector(a, b, even), self.builder.shuffle_vector(a, b, odd), flags=_FLAGS)
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def part(self, vector: Any, start: int, length: int) -> Any:
        return self.builder.shuffle_vector(vector, vector, self._lanes(range(start, start + length)))

    @staticmethod
    def _lanes(numbers: Any) -> Any:
        numbers = list(numbers)
        return ir.Constant(ir.VectorType(_INT32, len(numbers)), numbers)


@intrinsic
def pointer(typing_context, address, element):
    """The address of a number of type `element` (np.float32, ...) as a pointer, for `carray`."""
    kind = types.CPointer(element.dtype)

    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.int64, element), emit


@intrinsic(prefer_literal=True)
def score_tile(typing_context, words, offsets, i, shift, q, h, scores, head_dim, heads, tokens):
    """scores[h + g, i + t] = q[h + g] . key[i + t] for g < heads and t < tokens, constants; heads * tokens <= `num_lanes`.
    The key of token i begins `shift` words after offsets[i]; q [H, D] is in halves."""

    def emit(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args)
        i, shift, h = args[2], args[3], args[5]
        query = tile.row(4, h)
        sums = [[tile.zero] * tile.tokens for _ in range(tile.heads)]
        for t in range(tile.tokens):
            key = tile.token(tile.pointers[1], i, t, shift)
            for start in range(0, tile.half, tile.lanes):
                first, second = tile.widened(key, start)
                for g in range(tile.heads):
                    q_first = tile.load(query, g * tile.head_dim + start)
                    q_second = tile.load(query, g * tile.head_dim + tile.half + start)
                    sums[g][t] = tile.multiply_add(second, q_second, tile.multiply_add(first, q_first, sums[g][t]))
        by_head = tile.sums_of([vector for row in sums for vector in row])
        for g in range(tile.heads):
            tile.store(tile.part(by_head, g * tile.tokens, tile.tokens), tile.row(6, builder.add(h, _INT64(g)), i), 0)
        return context.get_dummy_value()

    return types.void(words, offsets, types.int64, types.int64, q, types.int64, scores, head_dim, heads, tokens), emit


@intrinsic(prefer_literal=True)
def value_tile(typing_context, words, offsets, i, shift, weights, h, sums, head_dim, heads, tokens):
    """sums[h + g] += weights[h + g, i + t] * value[i + t], over t < tokens, for g < heads. Where values begin, and how the rows
    of sums [H, D] lie, is as in `score_tile`."""

    def emit(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args)
        i, shift, h = args[2], args[3], args[5]
        target = tile.row(6, h)
        places = [g * tile.head_dim + start for g in range(tile.heads) for start in range(0, tile.half, tile.lanes)]
        first_sums = {place: tile.load(target, place) for place in places}
        second_sums = {place: tile.load(target, place + tile.half) for place in places}
        weights_of = [tile.row(4, builder.add(h, _INT64(g)), i) for g in range(tile.heads)]
        for t in range(tile.tokens):
            value = tile.token(tile.pointers[1], i, t, shift)
            weight = [tile.broadcast(builder.load(builder.gep(row, [_INT64(t)]))) for row in weights_of]
            for start in range(0, tile.half, tile.lanes):
                first, second = tile.widened(value, start)
                for g in range(tile.heads):
                    place = g * tile.head_dim + start
                    first_sums[place] = tile.multiply_add(weight[g], first, first_sums[place])
                    second_sums[place] = tile.multiply_add(weight[g], second, second_sums[place])
        for place in places:
            tile.store(first_sums[place], target, place)
            tile.store(second_sums[place], target, place + tile.half)
        return context.get_dummy_value()

    return types.void(words, offsets, types.int64, types.int64, weights, types.int64, sums, head_dim, heads, tokens), emit
