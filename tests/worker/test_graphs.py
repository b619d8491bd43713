"""Graphs of decode steps, here through the operator recorder: buckets, padding, and that a replay is the step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm.attention import reference
from minivllm.worker.graphs import DecodeBuffers, GraphRunner, bucket_sizes, compiled, decode_step
from minivllm.worker.input_batch import NO_DRAFT, StepInputs
from minivllm.worker.model_runner import ModelRunner
from tests.worker.test_model_runner import LLAMA, MISTRAL, complete, make_runner, prompts

GRAPHED = {"graph_runner": GraphRunner}


def graphed_runner(folder: Path, **settings: object) -> ModelRunner:
    runner = make_runner(folder, components=GRAPHED, **settings)
    runner.warm_up()
    return runner


def decodes(seq_lens: list[int], first_block: int = 1, block_size: int = 4) -> StepInputs:
    """A step of decodes whose requests have blocks of their own, one after another."""
    n = len(seq_lens)
    lens = np.array(seq_lens, dtype=np.int32)
    num_blocks = -(-lens // block_size)
    tables = np.zeros((n, max(num_blocks)), dtype=np.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = first_block + np.arange(count)
        first_block += int(count)
    positions = lens.astype(np.int64) - 1
    slots = tables[np.arange(n), positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepInputs(
        req_ids=[str(i) for i in range(n)],
        rows=np.arange(n),
        token_starts=np.arange(n + 1),
        num_decodes=n,
        input_ids=np.arange(n, dtype=np.int64) + 7,
        positions=positions,
        query_start_loc=np.arange(n + 1, dtype=np.int32),
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=slots,
        sample_rows=np.arange(n),
        logits_indices=np.arange(n),
        sample_row_of=np.arange(n),
        ahead=np.zeros(n, dtype=np.int64),
        draft_ids=np.full(n, NO_DRAFT),
    )


# ---------------------------------------------------------------- buckets


def test_buckets_are_small_steps_first() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = bucket_sizes(512)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-3:] == [480, 496, 512]
    assert [b - a for a, b in pairwise(sizes)][4:] == [8] * 30 + [16] * 16


def test_there_is_a_bucket_for_a_full_batch_and_none_for_thousands() -> None:
    assert bucket_sizes(100)[-2:] == [96, 100]
    assert bucket_sizes(5000)[-1] == 512


@pytest.mark.parametrize(("n", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (20, 20), (21, None)])
def test_the_smallest_bucket_that_holds_the_step(n: int, bucket: int | None) -> None:
    assert GraphRunner(lambda buffers: buffers.input_ids, 20, 4, torch.device("cpu")).pick_bucket(n) == bucket


# ---------------------------------------------------------------- padding


def test_padding_rows_are_a_token_in_the_null_block() -> None:
    runner = GraphRunner(lambda buffers: buffers.input_ids, 8, 4, torch.device("cpu"))
    for tensor in runner.buffers.tensors()[:5]:
        tensor.fill_(3)  # what an earlier, larger step left there
    runner.fill(decodes([5, 2, 8]), 4)
    b = runner.buffers
    assert b.input_ids[:4].tolist() == [7, 8, 9, 0]
    assert b.positions[:4].tolist() == [4, 1, 7, 0]
    assert b.slot_mapping[:4].tolist() == [8, 13, 23, 0]
    assert b.seq_lens[:4].tolist() == [5, 2, 8, 1]
    assert b.block_tables[:4, :2].tolist() == [[1, 2], [3, 0], [4, 5], [0, 0]]
    assert b.query_start_loc.tolist() == list(range(9))


def checksum(runner: ModelRunner, *, without_slots: list[int]) -> torch.Tensor:
    """Of every slot but the null block's and those named, bit by bit."""
    bits = torch.stack([cache.view(torch.int32).long() for cache in runner.kv_caches])
    bits = bits.flatten(2, 3)  # [layers, 2, slots, heads, head_dim]
    kept = torch.ones(bits.shape[2], dtype=torch.bool)
    kept[: runner.config.block_size] = False
    kept[without_slots] = False
    return (bits[:, :, kept] * torch.arange(1, 1 + bits.shape[-1], device=bits.device)).sum(dim=(-1, -2))


@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_a_padded_step_leaves_every_real_slot_untouched(tmp_path: Path, num_rows: int) -> None:
    """Case 27: all of the pool is somebody's, and a step writes to its requests' own new slots alone."""
    runner = graphed_runner(tmp_path)
    for cache in runner.kv_caches:
        torch.nn.init.normal_(cache[:, 1:])
    inputs = decodes([5, 2, 8, 4, 1][:num_rows])
    own = inputs.slot_mapping.tolist()
    before = checksum(runner, without_slots=own)
    null_before = [cache[:, 0].clone() for cache in runner.kv_caches]
    with torch.inference_mode():
        assert runner.graphs is not None and runner.graphs.run(inputs) is not None
    assert torch.equal(checksum(runner, without_slots=own), before)
    for cache, null in zip(runner.kv_caches, null_before, strict=True):
        assert torch.equal(cache[:, 0, 1:], null[:, 1:])  # of the null block too, slot 0 alone is written


def test_recording_leaves_every_real_slot_untouched(tmp_path: Path) -> None:
    runner = graphed_runner(tmp_path)
    with torch.inference_mode():
        assert runner.graphs is not None and runner.graphs.run(decodes([3, 9])) is not None
    before = checksum(runner, without_slots=[])
    runner.graphs.capture()  # anew: the buffers hold a step's rows
    assert torch.equal(checksum(runner, without_slots=[]), before)


# ---------------------------------------------------------------- a replay is the step


@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["full attention", "sliding window"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_replay_gives_what_the_step_gives_bit_for_bit(tmp_path: Path, model: dict, backend: str) -> None:
    runner = make_runner(tmp_path, model, GRAPHED, attention_backend=backend)
    runner.warm_up()
    assert runner.graphs is not None
    for cache in runner.kv_caches:
        torch.nn.init.normal_(cache[:, 1:])
    for seq_lens in ([5, 2, 8], [1], [9, 9, 9, 9, 9], [30, 2]):
        with torch.inference_mode():
            replayed = runner.graphs.run(decodes(seq_lens)).clone()
            bucket = runner.graphs.pick_bucket(len(seq_lens))
            eager = decode_step(runner.model, runner.kv_caches, runner.graphs.buffers.first(bucket))
        assert torch.equal(replayed, eager[: len(seq_lens)])


def test_requests_through_the_engine_get_the_same_tokens(tmp_path: Path) -> None:
    token_ids = prompts(5, 9, 1, 17, 3)
    expected, _ = complete(make_runner(tmp_path), token_ids)
    runner = graphed_runner(tmp_path)
    replays: list[int] = []
    assert runner.graphs is not None
    replay = runner.graphs.replay
    runner.graphs.replay = lambda bucket: replays.append(bucket) or replay(bucket)
    assert complete(runner, token_ids)[0] == expected
    assert 8 in replays  # five decodes


def test_and_under_preemption(tmp_path: Path) -> None:
    token_ids = prompts(9, 8, 7)
    settings = {"num_gpu_blocks_override": 8, "max_model_len": 24}
    expected, recorder = complete(make_runner(tmp_path, **settings), token_ids)
    assert recorder.preempted
    assert complete(graphed_runner(tmp_path, **settings), token_ids)[0] == expected


def test_a_step_with_a_prefill_is_not_for_a_graph(tmp_path: Path) -> None:
    runner = graphed_runner(tmp_path)
    inputs = decodes([5, 8])
    inputs.num_decodes = 1
    assert runner.graphs is not None and runner.graphs.run(inputs) is None


def test_a_step_larger_than_every_bucket_is_not_for_a_graph(tmp_path: Path) -> None:
    runner = graphed_runner(tmp_path, max_num_seqs=4)
    assert runner.graphs is not None and runner.graphs.run(decodes([1] * 5)) is None


def test_before_anything_is_recorded_steps_run_as_they_are(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, components=GRAPHED)
    assert runner.graphs is not None and runner.graphs.run(decodes([5])) is None


def test_the_compiled_step_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile must see the whole step as one graph, our operators included. (Traced only: what a compiler makes of it
    needs a GPU.)"""
    runner = make_runner(tmp_path, attention_backend="cpu")
    buffers = DecodeBuffers.allocate(4, 3, "cpu")
    step = partial(decode_step, runner.model, runner.kv_caches)
    with torch.inference_mode():
        expected = step(buffers)
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        torch.testing.assert_close(compiled(step)(buffers), expected)


# ---------------------------------------------------------------- when there are graphs


def test_a_cpu_has_graphs_only_to_try_a_component(tmp_path: Path) -> None:
    assert make_runner(tmp_path).graphs is None
    assert make_runner(tmp_path, components=GRAPHED).graphs is not None


def one_row_at_a_time(q, kv_cache, block_tables, seq_lens):
    """A student's: right as it stands, and in a recording it would keep the lengths it saw."""
    rows = [
        reference.paged_decode(q[i : i + 1], kv_cache, block_tables[i : i + 1, : -(-n // 4)], seq_lens[i : i + 1])
        for i, n in enumerate(seq_lens.tolist())
    ]
    return torch.cat(rows)


def test_a_part_that_may_loop_in_python_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = {**GRAPHED, "attention.decode": one_row_at_a_time}
    with caplog.at_level("INFO", logger="minivllm"):
        runner = make_runner(tmp_path, components=parts)
    assert runner.graphs is None
    assert "graphs is off: the attention.decode component" in caplog.text
    runner.warm_up()
    token_ids = prompts(5, 9, 1, 17, 3)
    assert complete(runner, token_ids)[0] == complete(make_runner(tmp_path), token_ids)[0]


def test_a_part_that_says_it_can_be_recorded_is(tmp_path: Path) -> None:
    class Decode:
        capabilities = frozenset({"graphs"})

        def __call__(self, q, kv_cache, block_tables, seq_lens, *, scale=None, sliding_window=None):
            return reference.paged_decode(q, kv_cache, block_tables, seq_lens, scale=scale, sliding_window=sliding_window)

    runner = make_runner(tmp_path, components={**GRAPHED, "attention.decode": Decode()})
    runner.warm_up()
    assert runner.graphs is not None and runner.graphs.graphs
    token_ids = prompts(5, 9, 1, 17, 3)
    assert complete(runner, token_ids)[0] == complete(make_runner(tmp_path), token_ids)[0]


def test_a_cpu_records_small_batches_only(tmp_path: Path) -> None:
    """A recording keeps every result of every bucket in memory of its own."""
    runner = make_runner(tmp_path, components=GRAPHED, max_num_seqs=64)
    assert runner.graphs is not None and runner.graphs.buckets == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("components", "settings", "words"),
    [
        (GRAPHED, {"enforce_eager": True}, "enforce_eager=True runs without graphs"),
        (None, {"torch_compile": True}, "torch_compile=True is for CUDA"),
        (None, {"torch_compile": True, "enforce_eager": True}, "Leave one of them out"),
        (None, {"enforce_eager": "yes"}, "enforce_eager must be True or False"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, components: dict | None, settings: dict, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_runner(tmp_path, components=components, **settings)
