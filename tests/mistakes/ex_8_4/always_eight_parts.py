# expect: the first 8 parts alone
from minivllm.attention.triton_utils import tl, triton


@triton.jit(do_not_specialize=["num_parts"])
def combine_kernel(out, sums, bests, totals, num_parts, HEAD_DIM: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, 8), tl.arange(0, D)
    inside = parts < num_parts
    best_P = tl.load(bests + row * num_parts + parts, mask=inside, other=float("-inf"))
    best = tl.max(best_P, 0)
    shrink_P = tl.exp2(best_P - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(tl.load(totals + row * num_parts + parts, mask=inside, other=0.0) * shrink_P, 0)
    offsets = (row * num_parts + parts)[:, None] * HEAD_DIM + dims[None, :]
    sums_PD = tl.load(sums + offsets, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    out_D = tl.sum(sums_PD * shrink_P[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, out_D.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
