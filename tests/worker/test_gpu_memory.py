"""Running out of a GPU's memory says for what, and what to lower. The GPU's counters are made up."""

from __future__ import annotations

import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.sampling.sampler import Sampler
from minivllm.worker.gpu_memory import costliest_sampling, free_for_kv_cache, largest_step, needs_memory

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (2 << 30, 8 << 30),
        "memory_reserved": 5 << 30,
        "max_memory_allocated": 4 << 30,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_what_is_left_is_the_share_less_what_was_used_at_most() -> None:
    config = EngineConfig(gpu_memory_utilization=0.75).resolved("cuda")
    ours, others = 4 << 30, (8 - 2 - 5) << 30
    assert free_for_kv_cache(GPU, config, lambda: None) == int(0.75 * (8 << 30)) - ours - others


def test_a_step_that_does_not_fit_says_what_to_lower() -> None:
    config = EngineConfig(max_num_batched_tokens=4096, max_num_seqs=32).resolved("cuda")
    words = "max_num_batched_tokens=4096 tokens and max_num_seqs=32 .*: 2.0 of 8.0 GiB are free. Lower max_num_batched_tokens"
    with pytest.raises(ValueError, match=words):
        free_for_kv_cache(GPU, config, out_of_memory)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), needs_memory(GPU, "It", "Lower it."):
        _ = 1 / 0


def test_the_largest_step_fills_the_budget_with_sequences_as_long_as_they_may_be() -> None:
    step = largest_step(EngineConfig(max_num_batched_tokens=100, max_model_len=40, block_size=16).resolved("cuda"), 4096)
    assert step.seq_lens.tolist() == [40, 40, 20]
    assert len(step.input_ids) == 100 and step.num_decodes == 0
    assert set(step.block_tables.flatten()) == {1} and step.block_tables.shape == (3, 3)
    assert step.slot_mapping.min() >= 16 and step.slot_mapping.max() < 32  # block 1


def test_the_costliest_sampling_uses_every_filter() -> None:
    metadata = costliest_sampling(3, torch.device("cpu"))
    assert metadata.min_p is not None and metadata.top_k is not None and metadata.top_p is not None
    assert len(Sampler()(torch.randn(3, 100), metadata).token_ids) == 3
