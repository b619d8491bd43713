"""Paged attention as Triton kernels. Lab 08 builds `attend`, the heart of `decode_kernel` (8.3), and `combine_kernel` (8.4).
The backend around them is `gpu.py`, which imports this file only where Triton is there. May not know requests or the scheduler.

All three attention kernels are one loop, `attend`: some query rows walk over the positions first .. stop - 1 of one sequence
and one kv head, TILE at a time, through the block table, and keep a running softmax ("Online normalizer calculation for
softmax", Milakov and Gimelshein 2018). They differ in what a row is and in how the walk is shared out:

    decode_kernel    a program per (sequence, kv head); its rows are the GQA group: heads that read the same keys
    split_kernel     the same, the walk cut into parts so that few long sequences still fill the GPU; `combine` joins the parts
                     (flash-decoding, Dao et al. 2023)
    prefill_kernel   a program per (TILE_Q queries of one sequence, query head); its rows are the queries

    program (sequence 1, kv head 0), block_size 4, TILE 8:    block table  [ 5 | 2 | 7 | . ]    seq_len 11

        keys of blocks 5 2        then of block 7 _        masked: position 11, and the tile's missing block
        |0 1 2 3|4 5 6 7|         |8 9 10 .|. . . .|

Shape suffixes: R query rows, K tile of keys, D head_dim (a power of two, padded), P parts. `tl.dot` wants 16 rows at least, so
a group of 3 heads is padded with rows of zeros that nobody stores. Slots no token of this sequence owns may hold NaN: they are
never loaded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from minivllm.attention.triton_utils import tl, triton

MIN_ROWS = 16  # of tl.dot
MAX_PARTS = 32
NO_WINDOW = 1 << 30  # more than any sequence, and small enough to be subtracted in 32 bits
LOG2_E = 1.4426950408889634  # exp(x) = 2 ** (x * log2(e)), and GPUs have an instruction for 2 ** x


# ---------------------------------------------------------------------- kernels


@triton.jit
def write_kv_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_stride,
    value_stride,
    values_start,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per token: its WIDTH = Hkv * D numbers of key and of value go to the row of the cache its slot names."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    k = tl.load(key + token * key_stride + columns, mask=inside)
    v = tl.load(value + token * value_stride + columns, mask=inside)
    tl.store(kv_cache + slot * WIDTH + columns, k, mask=inside)
    tl.store(kv_cache + values_start + slot * WIDTH + columns, v, mask=inside)


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
    """Rows q [R, D] at `row_positions` [R] over positions first .. stop - 1. `keys` and `values` point at the kv head's first
    row of the cache. Returns the weighted sum of values, not yet divided [R, D]; the largest score [R]; the sum of weights [R].
    """
    R: tl.constexpr = q_RD.shape[0]
    D: tl.constexpr = q_RD.shape[1]
    dims = tl.arange(0, D)
    sum_RD = tl.zeros([R, D], tl.float32)
    best_R = tl.full([R], float("-inf"), tl.float32)
    total_R = tl.zeros([R], tl.float32)
    for start in range(first, stop, TILE):
        positions = start + tl.arange(0, TILE)
        inside = positions < stop
        block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        rows = (block_ids * BLOCK_SIZE + positions % BLOCK_SIZE) * TOKEN_STRIDE
        offsets = rows[:, None] + dims[None, :]
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        k_KD = tl.load(keys + offsets, mask=mask, other=0.0)
        v_KD = tl.load(values + offsets, mask=mask, other=0.0)

        scores_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee") * scale_log2
        distance = row_positions[:, None] - positions[None, :]
        scores_RK = tl.where((distance >= 0) & (distance < window) & inside[None, :], scores_RK, float("-inf"))

        new_best_R = tl.maximum(best_R, tl.max(scores_RK, 1))
        # a row that has seen nothing yet: its best is -inf, and -inf - -inf would be NaN
        reference_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
        weights_RK = tl.exp2(scores_RK - reference_R[:, None])
        shrink_R = tl.exp2(best_R - reference_R)
        total_R = total_R * shrink_R + tl.sum(weights_RK, 1)
        sum_RD = sum_RD * shrink_R[:, None] + tl.dot(weights_RK.to(v_KD.dtype), v_KD, input_precision="ieee")
        best_R = new_best_R
    return sum_RD, best_R, total_R


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode_kernel(
    out,
    q,
    kv_cache,
    block_tables,
    seq_lens,
    q_stride,
    values_start,
    table_stride,
    window,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One new token per sequence. Program (sequence, kv head): GROUP query heads over the sequence's whole history."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    group, dims = tl.arange(0, ROWS), tl.arange(0, D)
    offsets = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_RD = tl.load(q + seq * q_stride + offsets, mask=mask, other=0.0)
    seq_len = tl.load(seq_lens + seq)

    keys = kv_cache + kv_head * HEAD_DIM
    sum_RD, _, total_R = attend(
        q_RD,
        seq_len - 1 + group * 0,
        keys,
        keys + values_start,
        block_tables + seq * table_stride,
        tl.maximum(seq_len - window, 0),
        seq_len,
        window,
        scale_log2,
        BLOCK_SIZE,
        TOKEN_STRIDE,
        HEAD_DIM,
        TILE,
    )
    # a padding row (seq_len 0) comes out as zeros
    out_RD = sum_RD / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
    out_stride = tl.num_programs(1) * GROUP * HEAD_DIM
    tl.store(out + seq * out_stride + offsets, out_RD.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "window"])
def split_kernel(
    sums,
    bests,
    totals,
    q,
    kv_cache,
    block_tables,
    seq_lens,
    q_stride,
    values_start,
    table_stride,
    window,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """`decode_kernel` for one of P equal parts of the history. Program (sequence, kv head, part) leaves what `attend` returned:
    sums [B, H, P, HEAD_DIM], bests and totals [B, H, P]. A part beyond a short history leaves 0, -inf and 0."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head, part, num_parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    group, dims = tl.arange(0, ROWS), tl.arange(0, D)
    heads = kv_head * GROUP + group
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_RD = tl.load(q + seq * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)

    seq_len = tl.load(seq_lens + seq)
    first = tl.maximum(seq_len - window, 0)
    tiles_per_part = tl.cdiv(tl.cdiv(seq_len - first, TILE), num_parts)
    start = first + part * tiles_per_part * TILE
    stop = tl.minimum(start + tiles_per_part * TILE, seq_len)

    keys = kv_cache + kv_head * HEAD_DIM
    sum_RD, best_R, total_R = attend(
        q_RD,
        seq_len - 1 + group * 0,
        keys,
        keys + values_start,
        block_tables + seq * table_stride,
        start,
        stop,
        window,
        scale_log2,
        BLOCK_SIZE,
        TOKEN_STRIDE,
        HEAD_DIM,
        TILE,
    )
    num_heads = tl.num_programs(1) * GROUP
    rows = (seq * num_heads + heads) * num_parts + part
    tl.store(sums + rows[:, None] * HEAD_DIM + dims[None, :], sum_RD, mask=mask)
    tl.store(bests + rows, best_R, mask=group < GROUP)
    tl.store(totals + rows, total_R, mask=group < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def combine_kernel(out, sums, bests, totals, num_parts, HEAD_DIM: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """A program per row (sequence and head). Each part's numbers are relative to its own best score: bring them to the best of
    all, then add."""
    row = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, P), tl.arange(0, D)
    inside = parts < num_parts
    best_P = tl.load(bests + row * num_parts + parts, mask=inside, other=float("-inf"))
    best = tl.max(best_P, 0)
    shrink_P = tl.exp2(best_P - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(tl.load(totals + row * num_parts + parts, mask=inside, other=0.0) * shrink_P, 0)
    offsets = (row * num_parts + parts)[:, None] * HEAD_DIM + dims[None, :]
    sums_PD = tl.load(sums + offsets, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    out_D = tl.sum(sums_PD * shrink_P[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, out_D.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def sequence_of(tile, query_start_loc, num_seqs, TILE_Q: tl.constexpr):
    """The sequence a tile belongs to: the last one whose first tile is not after it. Sequence i's first tile is number
    query_start_loc[i] // TILE_Q + i, which leaves room for every tile of the sequences before."""
    low = tile * 0
    high = num_seqs + low
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TILE_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


# Behind a batch's decodes these arrays begin anywhere: a variant for each alignment would be compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "window"],
    do_not_specialize_on_alignment=["query_start_loc", "block_tables", "seq_lens"],
)
def prefill_kernel(
    out,
    q,
    kv_cache,
    query_start_loc,
    block_tables,
    seq_lens,
    num_seqs,
    q_stride,
    values_start,
    table_stride,
    window,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE: tl.constexpr,
):
    """Several new tokens per sequence, of any lengths. Program (tile, query head): TILE_Q queries of one sequence over what
    the last of them sees. The host knows how many tiles there can be, not whose they are: programs look that up, and some
    find nothing to do."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = sequence_of(tile, query_start_loc, num_seqs, TILE_Q)
    seq_start, seq_stop = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    tile_start = seq_start + (tile - seq_start // TILE_Q - seq) * TILE_Q
    if tile_start >= seq_stop:
        return
    tokens, dims = tile_start + tl.arange(0, TILE_Q), tl.arange(0, D)
    mask = (tokens < seq_stop)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = tokens[:, None].to(tl.int64) * q_stride + head * HEAD_DIM + dims[None, :]
    q_RD = tl.load(q + q_offsets, mask=mask, other=0.0)

    seq_len = tl.load(seq_lens + seq)
    first_position = seq_len - seq_stop + tile_start  # of the tile's first query: its last one is at seq_len - 1
    keys = kv_cache + head // GROUP * HEAD_DIM
    sum_RD, _, total_R = attend(
        q_RD,
        first_position + tl.arange(0, TILE_Q),
        keys,
        keys + values_start,
        block_tables + seq.to(tl.int64) * table_stride,
        tl.maximum(first_position - window + 1, 0),
        tl.minimum(first_position + TILE_Q, seq_len),
        window,
        scale_log2,
        BLOCK_SIZE,
        TOKEN_STRIDE,
        HEAD_DIM,
        TILE,
    )
    out_RD = sum_RD / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
    out_stride = tl.num_programs(1) * HEAD_DIM
    out_offsets = tokens[:, None].to(tl.int64) * out_stride + head * HEAD_DIM + dims[None, :]
    tl.store(out + out_offsets, out_RD.to(out.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------- launching them


@dataclass(frozen=True)
class Limits:
    """What of a GPU decides tile sizes and grids. shared_memory: bytes one program may have."""

    capability: tuple[int, int]
    shared_memory: int
    num_processors: int


_SHARED_MEMORY = {(7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}
_SMALLEST = 64 << 10
NO_GPU = Limits((8, 0), _SMALLEST, num_processors=64)  # the interpreter, and compiling for a GPU that is not here


@functools.cache
def limits_of(device: torch.device) -> Limits:
    if device.type != "cuda" or not torch.cuda.is_available():
        return NO_GPU
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    known = _SHARED_MEMORY.get(capability, _SMALLEST)  # a torch too old to say
    return Limits(capability, getattr(properties, "shared_memory_per_block_optin", known), properties.multi_processor_count)


@dataclass(frozen=True)
class Tiles:
    """TILE_Q queries by TILE keys. num_stages: how far loads run ahead of the arithmetic, through shared memory."""

    TILE_Q: int
    TILE: int
    num_warps: int
    num_stages: int

    def shared_memory(self, head_dim: int, itemsize: int, limits: Limits) -> int:
        """Bytes a program needs, at most: tiles of keys and of values (two of each where the tensor cores read them from there,
        as Hopper's do), the queries (twice without tensor cores), and the weights on their way to the second product."""
        buffers = 2 if limits.capability >= (9, 0) else 1
        queries = 1 if limits.capability >= (8, 0) else 2
        D = triton.next_power_of_2(head_dim)
        return ((2 * buffers * self.TILE + queries * self.TILE_Q) * D + self.TILE_Q * self.TILE) * itemsize + 1024


def choose_tiles(rows: int | None, head_dim: int, itemsize: int, limits: Limits) -> Tiles:
    """The first choice that fits. rows: of a decode, padded; None for a prefill, which may choose its own.

    The choices are the largest that compile without spilled registers (two of them at most). Triton uses tensor cores for
    16-bit numbers from compute capability 8.0 on; float32, which is multiplied as it is and not rounded to TF32, and older GPUs
    take more registers.
    """
    has_tensor_cores = itemsize == 2 and limits.capability >= (8, 0)
    if rows is not None:
        choices = [Tiles(rows, 64, 4, 3)] if has_tensor_cores and head_dim <= 128 else []
        choices += [Tiles(rows, 32, 4, 2), Tiles(rows, 16, 4, 1)]
    else:
        choices = [Tiles(32, 32, 8, 2), Tiles(16, 16, 4, 1)]
        if has_tensor_cores and head_dim <= 128:
            choices.insert(0, Tiles(64, 64, 4, 3) if head_dim <= 64 else Tiles(128, 64, 8, 3))
    for tiles in choices:
        if tiles.shared_memory(head_dim, itemsize, limits) <= limits.shared_memory:
            return tiles
    raise ValueError(
        f"head_dim={head_dim} in {8 * itemsize} bits does not fit the {limits.shared_memory >> 10} KiB of shared memory that a"
        " program has on this GPU. Use attention_backend='reference'."
    )


def choose_num_parts(num_programs: int, longest: int, tile: int, limits: Limits) -> int:
    """Into how many parts to cut each history: 1 while whole sequences give every processor of the GPU a few programs. Asks for
    nothing only the device knows: `longest` is what the block table has room for, not what the sequences have."""
    wanted = 4 * limits.num_processors // max(1, num_programs)
    most = min(MAX_PARTS, longest // (4 * tile))  # a part of less than four tiles costs more than it brings
    return max(1, min(wanted, most))


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As `reference.write_kv`. The cache must be contiguous."""
    _, num_blocks, block_size, num_kv_heads, head_dim = kv_cache.shape
    key, value = _packed_heads(key), _packed_heads(value)
    width = num_kv_heads * head_dim
    write_kv_kernel[(len(key),)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        num_blocks * block_size * width,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    num_parts: int | None = None,
) -> torch.Tensor:
    """As `reference.paged_decode`; a padding row (seq_len 0) comes out as zeros. num_parts: at most MAX_PARTS; None chooses."""
    B, H, head_dim = q.shape
    _, num_blocks, block_size, num_kv_heads, _ = kv_cache.shape
    q = _packed_heads(q)
    rows = max(MIN_ROWS, triton.next_power_of_2(H // num_kv_heads))
    limits = limits_of(q.device)
    tiles = choose_tiles(rows, head_dim, q.element_size(), limits)
    if num_parts is None:
        num_parts = choose_num_parts(B * num_kv_heads, block_tables.shape[1] * block_size, tiles.TILE, limits)
    inputs = (
        q,
        kv_cache,
        block_tables,
        seq_lens,
        q.stride(0),
        num_blocks * block_size * num_kv_heads * head_dim,
        block_tables.stride(0),
        NO_WINDOW if sliding_window is None else sliding_window,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
    )
    constants = {
        "GROUP": H // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "TOKEN_STRIDE": num_kv_heads * head_dim,
        "HEAD_DIM": head_dim,
        "ROWS": rows,
        "D": triton.next_power_of_2(head_dim),
        "TILE": tiles.TILE,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    if num_parts == 1:
        out = torch.empty(B, H, head_dim, dtype=q.dtype, device=q.device)
        decode_kernel[(B, num_kv_heads)](out, *inputs, **constants)
        return out
    sums = torch.empty(B, H, num_parts, head_dim, dtype=torch.float32, device=q.device)
    bests = torch.empty(B, H, num_parts, dtype=torch.float32, device=q.device)
    totals = torch.empty_like(bests)
    split_kernel[(B, num_kv_heads, num_parts)](sums, bests, totals, *inputs, **constants)
    return combine(sums, bests, totals, q.dtype)


# As a part of its own, with a student's kernels in this file: it never makes the host wait, so graphs may hold it.
paged_decode.capabilities = frozenset({"sliding window", "graphs"})  # type: ignore[attr-defined]


def combine(sums: torch.Tensor, bests: torch.Tensor, totals: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Join the P parts of split-KV attention. sums [B, H, P, D], bests and totals [B, H, P], float32; returns [B, H, D].

    Scores are in powers of two: a part's weights are 2 ** (score - its best), and totals are their sums.
    """
    B, H, num_parts, head_dim = sums.shape
    out = torch.empty(B, H, head_dim, dtype=dtype, device=sums.device)
    D = triton.next_power_of_2(head_dim)
    combine_kernel[(B * H,)](out, sums, bests, totals, num_parts, HEAD_DIM=head_dim, D=D, P=MAX_PARTS, num_warps=4)
    return out


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """As `reference.paged_prefill`, all sequences in one launch, and without asking the device for a length."""
    T, H, head_dim = q.shape
    _, num_blocks, block_size, num_kv_heads, _ = kv_cache.shape
    q = _packed_heads(q)
    tiles = choose_tiles(None, head_dim, q.element_size(), limits_of(q.device))
    out = torch.empty(T, H, head_dim, dtype=q.dtype, device=q.device)
    num_seqs = len(seq_lens)
    prefill_kernel[(T // tiles.TILE_Q + num_seqs, H)](
        out,
        q,
        kv_cache,
        query_start_loc,
        block_tables,
        seq_lens,
        num_seqs,
        q.stride(0),
        num_blocks * block_size * num_kv_heads * head_dim,
        block_tables.stride(0),
        NO_WINDOW if sliding_window is None else sliding_window,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        GROUP=H // num_kv_heads,
        BLOCK_SIZE=block_size,
        TOKEN_STRIDE=num_kv_heads * head_dim,
        HEAD_DIM=head_dim,
        D=triton.next_power_of_2(head_dim),
        TILE_Q=tiles.TILE_Q,
        TILE=tiles.TILE,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def _packed_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with a token's heads one after another; tokens may lie apart, as in a slice of a packed projection."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
