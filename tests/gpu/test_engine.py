"""The engine on a GPU: graphs against eager steps, against the CPU, its memory, and how often the host waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm.sampling.sampler import Sampler, SamplingMetadata
from minivllm.sampling_params import SamplingParams
from minivllm.worker.graph_safety import check_graph_safe
from minivllm.worker.graphs import decode_step
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.transfer import to_device
from tests.worker.test_graphs import checksum, decodes
from tests.worker.test_model_runner import LLAMA, MISTRAL, complete, make_runner, new, prompts, step_of

pytestmark = pytest.mark.gpu
ON_GPU = {"device": "cuda", "attention_backend": "auto", "block_size": 16}


def gpu_runner(folder: Path, model: dict = LLAMA, **settings: object) -> ModelRunner:
    runner = make_runner(folder, model, **{**ON_GPU, **settings})
    runner.warm_up()
    return runner


@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["full attention", "sliding window"])
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphed"])
def test_requests_get_the_tokens_of_a_full_forward(tmp_path: Path, model: dict, enforce_eager: bool) -> None:
    """Teacher-forced: each token's logit, computed from nothing, is within 1e-3 of the largest."""
    runner = gpu_runner(tmp_path, model, enforce_eager=enforce_eager)
    assert (runner.graphs is None) == enforce_eager
    token_ids = prompts(5, 9, 1, 17, 30)
    outputs, _ = complete(runner, token_ids)
    for prompt, output in zip(token_ids, outputs, strict=True):
        logits = runner.model.full_forward(torch.tensor(prompt + output, device="cuda"))
        for i, token in enumerate(output):
            row = logits[len(prompt) + i - 1]
            assert row.max() - row[token] < 1e-3


def test_graphed_equals_eager_bit_for_bit(tmp_path: Path) -> None:
    """The same kernels on the same memory: a replay differs in nothing."""
    runner = gpu_runner(tmp_path, dtype="float16")
    assert runner.graphs is not None
    for cache in runner.kv_caches:
        torch.nn.init.normal_(cache[:, 1:])
    for seq_lens in ([5, 2, 8], [1], [100], [30] * 5, [7] * 8):
        inputs = decodes(seq_lens, block_size=16)
        with torch.inference_mode():
            hidden = runner.graphs.run(inputs)
            assert hidden is not None
            replayed = hidden.clone()
            buffers = runner.graphs.buffers.first(runner.graphs.pick_bucket(len(seq_lens)))
            eager = decode_step(runner.model, runner.kv_caches, buffers)
        assert torch.equal(replayed, eager[: len(seq_lens)])


def test_a_padded_step_leaves_every_real_slot_untouched(tmp_path: Path) -> None:
    runner = gpu_runner(tmp_path)
    assert runner.graphs is not None
    for cache in runner.kv_caches:
        torch.nn.init.normal_(cache[:, 1:])
    inputs = decodes([5, 20, 8], block_size=16)
    own = inputs.slot_mapping.tolist()
    before = checksum(runner, without_slots=own)
    with torch.inference_mode():
        assert runner.graphs.run(inputs) is not None
    assert torch.equal(checksum(runner, without_slots=own), before)


def test_graphed_and_eager_engines_agree_under_preemption(tmp_path: Path) -> None:
    settings = {"num_gpu_blocks_override": 5, "max_model_len": 60}
    token_ids = prompts(30, 14, 15, 17)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    eager, recorder = complete(gpu_runner(tmp_path, enforce_eager=True, **settings), token_ids, params)
    assert recorder.preempted
    assert complete(gpu_runner(tmp_path, **settings), token_ids, params)[0] == eager


def test_the_decode_step_passes_the_check_on_real_tensors(tmp_path: Path) -> None:
    runner = gpu_runner(tmp_path)
    assert runner.graphs is not None
    buffers = runner.graphs.buffers.first(4)
    static = [*runner.model.parameters(), *runner.model.buffers(), *runner.kv_caches, *buffers.tensors()]
    with torch.inference_mode():
        check_graph_safe(lambda: decode_step(runner.model, runner.kv_caches, buffers), static)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphed"])
def test_a_step_makes_the_host_wait_once_at_its_end(tmp_path: Path, enforce_eager: bool) -> None:
    """torch raises where an operation would wait; only result() may."""
    runner = gpu_runner(tmp_path, enforce_eager=enforce_eager)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, logprobs=2, max_tokens=8, min_tokens=4)
    requests = [new(str(i), token_ids, [1 + 2 * i, 2 + 2 * i], params) for i, token_ids in enumerate(prompts(5, 9, 3))]
    decode_all = step_of(n={str(i): 1 for i in range(3)}, scheduled_cached_reqs=_cached([5, 9, 3]))
    for step in (step_of(*requests), decode_all):
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.submit(step)
            handle = runner.sample()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(len(tokens) == 1 for tokens in handle.result().sampled_token_ids.values())


def _cached(computed: list[int]):
    from minivllm.core.step import CachedRequestData

    return CachedRequestData([str(i) for i in range(len(computed))], [[] for _ in computed], computed)


def test_sampling_draws_what_the_cpu_draws() -> None:
    """Noise is a function of seed and position, on every device the same. exp() may differ in its last bit, so of a thousand
    draws a few may fall on the other side of a border."""
    logits = torch.randn(1000, 512)
    metadata = {
        "temperature": torch.full((1000,), 0.9),
        "seeds": torch.arange(1000),
        "positions": torch.arange(1000) * 7,
        "sampled_rows": torch.arange(1000),
        "top_k": torch.full((1000,), 100),
        "top_p": torch.full((1000,), 0.95),
    }
    on_cpu = Sampler()(logits, SamplingMetadata(**metadata)).token_ids
    on_gpu = Sampler()(logits.cuda(), SamplingMetadata(**{name: t.cuda() for name, t in metadata.items()})).token_ids
    assert (on_cpu == on_gpu.cpu()).float().mean() > 0.99


def test_arrays_arrive_whole_and_in_one_copy() -> None:
    import numpy as np

    arrays = [np.arange(5), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, dtype=np.float32), np.float32([1.5, 2.5])]
    for array, tensor in zip(arrays, to_device(arrays, torch.device("cuda")), strict=True):
        assert tensor.is_cuda and tensor.shape == array.shape
        assert np.array_equal(tensor.cpu().numpy(), array)


def test_the_pool_fills_its_share_and_no_more(tmp_path: Path) -> None:
    """A model whose longest sequences could use all there is."""
    model = {**LLAMA, "max_position_embeddings": 1 << 20}
    total = torch.cuda.mem_get_info()[1]
    runner = make_runner(tmp_path, model, **ON_GPU, num_gpu_blocks_override=None, gpu_memory_utilization=0.5, max_num_seqs=64)
    pool = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches)
    runner.warm_up()
    free, _ = torch.cuda.mem_get_info()
    assert pool > 0.25 * total or free < 0.5 * total  # others may hold a part of the GPU
    assert torch.cuda.memory_reserved() < 0.52 * total


def test_no_room_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="raise gpu_memory_utilization, lower max_num_batched_tokens and max_num_seqs"):
        make_runner(tmp_path, **ON_GPU, num_gpu_blocks_override=None, gpu_memory_utilization=0.001)


@pytest.mark.slow
def test_the_compiled_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    token_ids = prompts(5, 9, 1)
    expected, _ = complete(gpu_runner(tmp_path), token_ids)
    assert complete(gpu_runner(tmp_path, torch_compile=True), token_ids)[0] == expected
