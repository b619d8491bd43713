"""How much of a GPU's memory the KV cache may have: what is left of our share when the largest step there can be has run.
May not know requests.

    total   |  others, driver  |  weights  |  largest step  |  graphs  |        KV cache        |    not ours    |
            '------------------------ gpu_memory_utilization * total --------------------------'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from minivllm.config import EngineConfig
from minivllm.sampling.sampler import SamplingMetadata
from minivllm.worker.input_batch import NO_DRAFT, StepInputs

GRAPHS = 256 << 20  # bytes kept for CUDA graphs, which are recorded when the KV cache is there: workspaces, and intermediates


@contextmanager
def needs_memory(device: torch.device, what: str, fix: str) -> Iterator[None]:
    """Running out of a GPU's memory inside is a ValueError that says for what, and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(
            f"{what} does not fit into the GPU's memory: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free. {fix}"
        ) from error


def free_for_kv_cache(device: torch.device, config: EngineConfig, run_largest_step: Callable[[], object]) -> int:
    """Bytes left of `gpu_memory_utilization` beside what is in use and the most that `run_largest_step` takes: less than 0 if
    that is too much already. Raises ValueError, saying what to lower, if the step does not fit into the GPU at all."""
    budget = (
        f"max_num_batched_tokens={config.max_num_batched_tokens} tokens and max_num_seqs={config.max_num_seqs} rows of logits"
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with needs_memory(
        device, f"A step of {budget}", "Lower max_num_batched_tokens, then max_num_seqs; or take a smaller model."
    ):
        run_largest_step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)  # the driver's, and other processes'
    torch.cuda.empty_cache()
    used = torch.cuda.max_memory_allocated(device) + outside_torch
    return int(total * config.gpu_memory_utilization) - used


def largest_step(config: EngineConfig, max_model_len: int) -> StepInputs:
    """Prompts that fill the token budget, all in block 1 of a pool of two: its numbers mean nothing, its activations have their
    true sizes."""
    num_tokens, block_size = config.max_num_batched_tokens, config.block_size
    assert num_tokens is not None, "the config is resolved"
    length = min(num_tokens, config.max_model_len or max_model_len)
    lengths = [length] * (num_tokens // length) + ([num_tokens % length] if num_tokens % length else [])
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return StepInputs(
        req_ids=[],
        rows=np.arange(len(lengths)),
        token_starts=starts,
        num_decodes=0,
        input_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        query_start_loc=starts,
        seq_lens=np.array(lengths, dtype=np.int32),
        block_tables=np.ones((len(lengths), -(-length // block_size)), dtype=np.int32),
        slot_mapping=block_size + positions % block_size,
        sample_rows=np.arange(len(lengths)),
        logits_indices=starts[1:] - 1,
        sample_row_of=np.arange(len(lengths)),
        ahead=np.zeros(len(lengths), dtype=np.int64),
        draft_ids=np.full(len(lengths), NO_DRAFT),
    )


def costliest_sampling(num_rows: int, device: torch.device) -> SamplingMetadata:
    """Every row drawn through every filter: a sort of the whole vocabulary."""
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    ones = torch.ones(num_rows, dtype=torch.float32, device=device)
    return SamplingMetadata(
        temperature=ones,
        seeds=zeros,
        positions=zeros,
        sampled_rows=torch.arange(num_rows, device=device),
        min_p=0.01 * ones,
        top_k=zeros + 50,
        top_p=0.9 * ones,
    )
