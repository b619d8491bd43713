# expect: another program does
from minivllm.attention.triton_utils import tl, triton


@triton.jit
def add_kernel(out, x, y, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n
        total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
        tl.store(out + offsets, total, mask=inside)


@triton.jit
def gather_kernel(out, cache, block_table, seq_len, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    inside = positions < seq_len
    blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0)
    rows = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    numbers = tl.load(cache + rows[:, None] * WIDTH + columns[None, :], mask=inside[:, None])
    tl.store(out + positions[:, None] * WIDTH + columns[None, :], numbers, mask=inside[:, None])
