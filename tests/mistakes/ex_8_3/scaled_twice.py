# expect: multiplied with scale_log2 twice
from checks import check
from minivllm.attention.triton_utils import tl, triton


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

        scores_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee") * scale_log2 * scale_log2
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
    group, dims = tl.arange(0, ROWS), tl.arange(0, D)  # ROWS: GROUP rounded up, at least 16
    offsets = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_RD = tl.load(q + seq * q_stride + offsets, mask=mask, other=0.0)
    seq_len = tl.load(seq_lens + seq)

    keys = kv_cache + kv_head * HEAD_DIM  # of slot 0; the values begin values_start further
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
