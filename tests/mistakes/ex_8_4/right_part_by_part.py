# expect: passed
from minivllm.attention.triton_utils import tl, triton


@triton.jit(do_not_specialize=["num_parts"])
def combine_kernel(out, sums, bests, totals, num_parts, HEAD_DIM: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """A running combination, as in 8.2: one part after another."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, D)
    there = dims < HEAD_DIM
    best = float("-inf")
    total = 0.0
    summed = tl.zeros([D], tl.float32)
    for part in range(0, num_parts):
        at = row * num_parts + part
        its_best = tl.load(bests + at)
        new = tl.maximum(best, its_best)
        base = tl.where(new == float("-inf"), 0.0, new)
        mine, old = tl.exp2(its_best - base), tl.exp2(best - base)
        total = total * old + tl.load(totals + at) * mine
        summed = summed * old + tl.load(sums + at * HEAD_DIM + dims, mask=there, other=0.0) * mine
        best = new
    result = summed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=there)
