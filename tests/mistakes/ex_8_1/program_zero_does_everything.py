# expect: another program does
from minivllm.attention.triton_utils import tl, triton


@triton.jit
def add_kernel(out, x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, total, mask=inside)


@triton.jit
def gather_kernel(out, cache, block_table, seq_len, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    if tl.program_id(0) == 0:
        columns = tl.arange(0, WIDTH)
        for position in range(0, seq_len):
            block = tl.load(block_table + position // BLOCK_SIZE)
            row = block * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(out + position * WIDTH + columns, tl.load(cache + row * WIDTH + columns))
