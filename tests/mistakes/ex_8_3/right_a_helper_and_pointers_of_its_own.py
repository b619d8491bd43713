# expect: passed
from minivllm.attention.triton_utils import tl, triton


@triton.jit
def tile_of(pointer, rows, inside, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, D)
    return tl.load(pointer + rows[:, None] + dims[None, :], mask=inside[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def attend(
    q_RD,
    row_positions,
    keys,
    values,
    block_table,
    first,
    stop,
    window,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Another style: a helper, a counter of tiles, the best shifted before the loop's exponentials."""
    ROWS: tl.constexpr = q_RD.shape[0]
    D: tl.constexpr = q_RD.shape[1]
    acc = tl.zeros([ROWS, D], dtype=tl.float32)
    largest = tl.zeros([ROWS], dtype=tl.float32) - float("inf")
    weight = tl.zeros([ROWS], dtype=tl.float32)
    number_of_tiles = tl.cdiv(tl.maximum(stop - first, 0), TILE)
    for t in range(0, number_of_tiles):
        p = first + t * TILE + tl.arange(0, TILE)
        real = p < stop
        block = tl.load(block_table + p // BLOCK_SIZE, mask=real, other=0)
        row = (block.to(tl.int64) * BLOCK_SIZE + p % BLOCK_SIZE) * TOKEN_STRIDE
        k = tile_of(keys, row, real, D, HEAD_DIM)
        s = tl.dot(q_RD, tl.trans(k), input_precision="ieee") * scale_log2
        seen = (p[None, :] <= row_positions[:, None]) & (p[None, :] > row_positions[:, None] - window) & real[None, :]
        s = tl.where(seen, s, float("-inf"))
        larger = tl.maximum(largest, tl.max(s, axis=1))
        safe = tl.where(larger > float("-inf"), larger, 0.0)
        w = tl.where(seen, tl.exp2(s - safe[:, None]), 0.0)
        factor = tl.exp2(largest - safe)
        weight = weight * factor + tl.sum(w, axis=1)
        v = tile_of(values, row, real, D, HEAD_DIM)
        acc = acc * factor[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        largest = larger
    return acc, largest, weight
