# expect: are multiplied in 32 bits
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
        block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=inside, other=0)
        rows = (block_ids * BLOCK_SIZE + positions % BLOCK_SIZE) * TOKEN_STRIDE
        offsets = rows[:, None].to(tl.int64) + dims[None, :]
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
