# expect: passed
from minivllm.attention.triton_utils import tl, triton


@triton.jit
def add_kernel(out, x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, total, mask=inside)


@triton.jit
def gather_kernel(out, cache, block_table, seq_len, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Row by row, with a limit in place of a mask."""
    start = tl.program_id(0) * TILE
    columns = tl.arange(0, WIDTH)
    for position in range(start, tl.minimum(start + TILE, seq_len)):
        block = tl.load(block_table + position // BLOCK_SIZE)
        source = (block * BLOCK_SIZE + position % BLOCK_SIZE) * WIDTH
        tl.store(out + position * WIDTH + columns, tl.load(cache + source + columns))
