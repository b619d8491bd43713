"""What a step costs, counted from a config: against numbers done by hand, and against the tensors a decoder really has."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from minivllm.models.decoder import Decoder
from minivllm.models.registry import KNOWN_CONFIGS, ModelConfig
from minivllm.sim.cost_model import (
    decode_step_bytes,
    decode_step_flops,
    kv_bytes_per_token,
    max_concurrency,
    step_time,
    streamed_parameters,
)
from minivllm.sim.hardware import DATA_SHEETS, Device, best_time, count_work

# vocabulary 10, hidden 4, intermediate 8, 2 layers, 2 heads, 1 KV head, head_dim 2
TINY = ModelConfig("LlamaForCausalLM", 10, 4, 8, 2, 2, 1, 2, 32)


def test_streamed_parameters_of_a_model_counted_by_hand():
    q = o = 4 * 4
    k = v = 4 * 2
    gate = up = down = 4 * 8
    assert streamed_parameters(TINY) == 2 * (q + k + v + o + gate + up + down) + 4 * 10


@pytest.mark.parametrize("name", ["smollm2-135m", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-8B"])
def test_streamed_parameters_are_the_matrices_of_the_decoder(name: str):
    decoder = Decoder(KNOWN_CONFIGS[name], torch.bfloat16, "meta")
    matrices = {n: t for n, t in decoder.checkpoint_tensors() if t.dim() == 2}
    if not decoder.config.tie_word_embeddings:
        del matrices["model.embed_tokens.weight"]  # of which a step reads a row a token
    assert streamed_parameters(decoder.config) == sum(t.numel() for t in matrices.values())


def test_kv_bytes_per_token_are_known_for_well_known_models():
    assert kv_bytes_per_token(KNOWN_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]) == 128 * 1024
    assert kv_bytes_per_token(KNOWN_CONFIGS["smollm2-135m"]) == 23_040


def test_a_batch_reads_the_weights_once_and_each_sequence_s_cache():
    weights, kv = 2 * streamed_parameters(TINY), kv_bytes_per_token(TINY)
    assert decode_step_bytes(TINY, 0, 5, dtype_bytes=2) == weights
    assert decode_step_bytes(TINY, 3, 5, dtype_bytes=2) == weights + 3 * 5 * kv == 896


def test_flops_grow_with_the_batch():
    one = decode_step_flops(TINY, 1, 5)
    assert one == 2 * streamed_parameters(TINY) + 2 * 2 * 2 * (2 * 2) * 5  # q k^T, then p v: 2 layers, 2 heads of 2
    assert decode_step_flops(TINY, 7, 5) == 7 * one


def test_max_concurrency_is_whole_sequences():
    assert max_concurrency(1000, max_model_len=10, bytes_per_token=16) == 6


@pytest.mark.parametrize(
    ("flops", "num_bytes", "launches", "seconds"),
    [(200, 0, 0, 2.0), (0, 30, 0, 3.0), (200, 30, 0, 3.0), (300, 20, 0, 3.0), (200, 30, 4, 5.0), (0, 0, 1, 0.5)],
)
def test_step_time_is_the_longer_of_the_two_and_the_launches(flops: int, num_bytes: int, launches: int, seconds: float):
    assert step_time(flops, num_bytes, launches, Device("toy", flops=100, bandwidth=10, launch_overhead=0.5)) == seconds


def test_at_the_ridge_memory_and_arithmetic_take_equally_long():
    device = DATA_SHEETS["H100-SXM"]
    assert step_time(device.ridge * 1e9, 0, 0, device) == pytest.approx(step_time(0, 1e9, 0, device))


def test_decode_is_bound_by_memory_and_a_long_prompt_by_arithmetic_on_every_data_sheet():
    config = KNOWN_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
    for device in DATA_SHEETS.values():
        num_bytes = decode_step_bytes(config, 1, 0, 2)
        assert step_time(decode_step_flops(config, 1, 0), num_bytes, 0, device) == num_bytes / device.bandwidth
        assert step_time(decode_step_flops(config, 4096, 0), num_bytes, 0, device) > 2 * num_bytes / device.bandwidth


def test_work_counts_launches_bytes_and_flops_but_no_views():
    x = torch.ones(4, 4)
    work = count_work(lambda: (x.view(2, 8).t()[0], x + 1, x @ x))
    assert work.launches == 2
    assert work.bytes == 4 * (2 * 16 + 3 * 16)
    assert work.flops == 2 * 4**3


def test_of_a_table_only_the_rows_picked_are_traffic():
    table, ids = torch.ones(1000, 8), torch.tensor([1, 2, 3])
    assert count_work(lambda: torch.nn.functional.embedding(ids, table)).bytes == 2 * 3 * 8 * 4


def test_the_counted_work_of_a_decoder_is_what_the_cost_model_says():
    config = ModelConfig("LlamaForCausalLM", 100, 32, 64, 2, 4, 2, 8, 32, tie_word_embeddings=True)
    decoder = Decoder(config, torch.float32)
    for tensor in decoder.parameters():
        tensor.data.fill_(0.01)
    work = count_work(lambda: decoder.full_forward(torch.arange(3)))
    assert work.flops == decode_step_flops(config, batch_size=3, context_len=3)  # naive: each token meets all three


def test_best_time_runs_once_to_warm_up_and_at_least_twice():
    runs: list[int] = []
    assert best_time(lambda: runs.append(1), seconds=0) > 0
    assert len(runs) == 3


def test_the_cost_model_is_imported_without_torch():
    code = "import sys, minivllm.sim.cost_model; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
