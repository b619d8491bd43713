"""Every backend, in every dtype it takes, on shapes nobody chose, against attention computed from its definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.attention import get_backend
from tests.attention.test_backends import BACKENDS, Batch, attention_float64, make_batch, run

# Inputs are rounded to the dtype before both sides see them, so what remains is a backend's own arithmetic: one rounding of the
# result, of the probabilities where they are kept in the dtype, and sums in float32. In units of the dtype's last place at 1.
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
ULPS = {torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}


# (kv heads, query heads for each, head_dim). The cpu backend compiles a kernel for each, for seconds: those of test_backends.
COMPILED = {torch.float32: [(2, 1, 64), (1, 4, 80)], torch.bfloat16: [(3, 3, 64), (2, 4, 128)]}
any_heads = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 7]), st.sampled_from([16, 32, 48, 64, 80, 128]))


@st.composite
def batches(draw: st.DrawFn, name: str, dtype: torch.dtype) -> tuple[Batch, int | None]:
    decodes = draw(st.lists(st.integers(1, 70), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(2, 20), st.integers(0, 50)), max_size=2 if decodes else 3))
    if not decodes and not prefills:
        prefills = [(3, 0)]
    kv_heads, group, head_dim = draw(st.sampled_from(COMPILED[dtype]) if name == "cpu" and dtype in COMPILED else any_heads)
    batch = make_batch(
        [1] * len(decodes) + [new for new, _ in prefills],
        decodes + [new + before for new, before in prefills],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=draw(st.sampled_from([1, 4, 5, 16])),
        seed=draw(st.integers(0, 1000)),
    )
    scale = draw(st.sampled_from([1.0, 1.0, 8.0, 1e-3]))  # sharp and flat distributions
    batch.q *= scale
    return batch, draw(st.sampled_from([None, None, 1, 3, 33]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=max(12, settings().max_examples // 5), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape_is_within_rounding_of_float64(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    batch, window = data.draw(batches(name, dtype))
    out = run(get_backend(name, "cpu", dtype), batch, window).double()
    starts = batch.meta.query_start_loc.tolist()
    for i, (keys, values) in enumerate(batch.histories):
        rows = slice(starts[i], starts[i + 1])
        expected = attention_float64(batch.q[rows], keys, values, window)
        size = values.double().abs().amax().clamp(min=1.0)  # an average of values is wrong by a share of their size
        error = ((out[rows] - expected).abs() / size).max()
        assert error <= ULPS[dtype] * ULP[dtype], f"request {i}: wrong by {error / ULP[dtype]:.1f} units of the last place"
