"""The real executor over a tiny random model, float32: whatever the schedule, the paged path gives `full_forward`'s logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.attention import reference
from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.engine_core import EngineCore
from minivllm.core.step import (
    CachedRequestData,
    EngineCoreRequest,
    ExecutorDeadError,
    NewRequestData,
    SchedulerOutput,
    StepHandle,
    StepOutput,
)
from minivllm.sampling.sampler import Sampler, SamplerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import slot_mapping
from minivllm.worker.model_runner import ModelRunner

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 7}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_runner(
    folder: Path, model: dict[str, Any] = LLAMA, components: dict[str, Any] | None = None, **settings: Any
) -> ModelRunner:
    (folder / "config.json").write_text(json.dumps(model))
    defaults = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "reference",
        "block_size": 4,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return ModelRunner(EngineConfig(**{**defaults, "model": str(folder), **settings}), Components(components))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 101, (n,), generator=generator).tolist() for n in lengths]


class Recorder:
    """The runner, with the logits of every token it samples kept by (request, position)."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_blocks = runner.num_blocks
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.preempted: list[str] = []

    def submit(self, step: SchedulerOutput) -> None:
        self.preempted += step.preempted_req_ids
        self.runner.submit(step)

    def sample(self, grammar_mask: Any = None) -> StepHandle:
        assert self.runner._submitted is not None
        inputs, hidden = self.runner._submitted
        for row, logits in zip(inputs.sample_rows, self.runner.model.logits(hidden), strict=True):
            self.logits[inputs.req_ids[row], int(inputs.seq_lens[row])] = logits
        return self.runner.sample(grammar_mask)

    def shutdown(self) -> None: ...


def complete(
    runner: ModelRunner, token_ids: list[list[int]], params: SamplingParams | list[SamplingParams] = GREEDY, seed: int = 0
) -> tuple[list[list[int]], Recorder]:
    """All prompts through the engine; returns their output tokens and what was recorded."""
    recorder = Recorder(runner)
    core = EngineCore(runner.config.fit_max_model_len(runner.max_model_len, runner.num_blocks), recorder)
    each = params if isinstance(params, list) else [params] * len(token_ids)
    for i, (prompt, p) in enumerate(zip(token_ids, each, strict=True)):
        core.add_request(EngineCoreRequest(f"r{i}", prompt, p, seed=p.seed or seed))
    outputs: dict[str, list[int]] = {f"r{i}": [] for i in range(len(token_ids))}
    while core.has_unfinished_requests():
        for out in core.step():
            assert out.error is None, out.error
            outputs[out.request_id] += out.new_token_ids
    return list(outputs.values()), recorder


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["llama", "window of 7"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "cpu"},
        {"attention_backend": "naive"},
        {"max_num_batched_tokens": 8},  # chunks, and mixed batches
        {"max_num_batched_tokens": 8, "attention_backend": "cpu"},
        {"max_num_batched_tokens": 9, "block_size": 3, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 14, "attention_backend": "cpu"},  # requests are preempted
    ],
    ids=str,
)
def test_every_sampled_tokens_logits_are_those_of_the_whole_sequence(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any]
) -> None:
    runner = make_runner(tmp_path, model, **settings)
    token_ids = prompts(1, 4, 5, 8, 13, 21)
    token_ids.append([*token_ids[-1][:12], 7])  # shares three blocks with the one before
    outputs, recorder = complete(runner, token_ids)
    assert bool(recorder.preempted) == (settings.get("num_gpu_blocks_override") == 14)
    for i, (prompt, output) in enumerate(zip(token_ids, outputs, strict=True)):
        assert len(output) == 6
        expected = runner.model.full_forward(torch.tensor(prompt + output))
        for position in range(len(prompt), len(prompt) + 6):
            torch.testing.assert_close(recorder.logits[f"r{i}", position], expected[position - 1], atol=1e-4, rtol=0)
            assert output[position - len(prompt)] == expected[position - 1].argmax()


def test_a_seed_gives_the_same_tokens_alone_and_among_others_and_after_preemption(tmp_path: Path) -> None:
    token_ids = prompts(9, 14, 5, 17)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=5 + i, max_tokens=8, ignore_eos=True) for i in range(4)]
    params[1] = GREEDY
    alone = [complete(make_runner(tmp_path), [t], [p])[0][0] for t, p in zip(token_ids, params, strict=True)]
    together, _ = complete(make_runner(tmp_path), token_ids, params)
    squeezed, recorder = complete(make_runner(tmp_path, num_gpu_blocks_override=16), token_ids, params)
    assert recorder.preempted
    assert together == alone
    assert squeezed == alone


# ---------------------------------------------------------------- the executor's contract


def new(req_id: str, token_ids: list[int], blocks: list[int], params: SamplingParams = GREEDY) -> NewRequestData:
    return NewRequestData(req_id, token_ids, len(token_ids), params, 0, (), blocks, 0)


def step_of(*requests: NewRequestData, n: dict[str, int] | None = None, **others: Any) -> SchedulerOutput:
    n = n or {r.req_id: len(r.token_ids) for r in requests}
    return SchedulerOutput(0, list(requests), num_scheduled_tokens=n, total_num_scheduled_tokens=sum(n.values()), **others)


def do(runner: ModelRunner, step: SchedulerOutput) -> StepOutput:
    runner.submit(step)
    return runner.sample().result()


def decode(req_id: str, computed: int) -> SchedulerOutput:
    return step_of(n={req_id: 1}, scheduled_cached_reqs=CachedRequestData([req_id], [[]], [computed]))


def test_a_prefill_chunk_yields_no_token(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    out = do(runner, step_of(new("a", [1, 2, 3, 4, 5], [1, 2]), new("b", [6, 7], [3]), n={"a": 3, "b": 2}))
    assert out.sampled_token_ids["a"] == []
    assert len(out.sampled_token_ids["b"]) == 1


def test_a_step_of_chunks_alone_never_reaches_the_sampler(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    runner.sampler = None
    assert do(runner, step_of(new("a", [1, 2, 3], [1]), n={"a": 2})).sampled_token_ids == {"a": []}


@pytest.mark.parametrize("part", ["model", "sampler", "_to_host"])
def test_an_error_after_which_the_gpu_refuses_every_call_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner = make_runner(tmp_path)
    if part == "model":
        monkeypatch.setattr(runner, "_forward", fail)
    elif part == "sampler":
        monkeypatch.setattr(runner, "sampler", fail)
    else:
        monkeypatch.setattr(runner, "_to_host", fail)
    with pytest.raises(ExecutorDeadError, match=r"computes nothing for this process any more: CUDA error: an illegal"):
        do(runner, step_of(new("a", [1, 2], [1])))


def test_an_error_after_which_the_gpu_answers_is_the_steps_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    runner = make_runner(tmp_path)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(runner, "_forward", fail)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        do(runner, step_of(new("a", [1, 2], [1])))


def test_a_handle_gives_its_result_any_number_of_times(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    runner.submit(step_of(new("a", [1, 2], [1])))
    handle = runner.sample()
    assert handle.result() is handle.result()
    assert runner.batch.num_tokens[0] == 3


def test_a_step_submitted_before_the_last_was_collected_sees_its_tokens(tmp_path: Path) -> None:
    expected = complete(make_runner(tmp_path), [[1, 2]])[0][0]
    runner = make_runner(tmp_path)
    runner.submit(step_of(new("a", [1, 2], [1])))
    first = runner.sample()
    runner.submit(decode("a", 2))
    second = runner.sample()
    assert [h.result().sampled_token_ids["a"] for h in (first, second)] == [expected[:1], expected[1:2]]


def test_a_request_with_nan_fails_alone(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    healthy = do(runner, step_of(new("a", [1, 2], [1])))
    runner.model.embed_tokens[50] = float("nan")
    out = do(runner, step_of(new("b", [50, 2], [2]), new("c", [1, 2], [3])))
    assert "NaN or infinite" in out.errors["b"] and "token 2" in out.errors["b"]
    assert out.sampled_token_ids["b"] == []
    assert out.sampled_token_ids["c"] == healthy.sampled_token_ids["a"]
    assert runner.batch.num_tokens[runner.batch.rows["b"]] == 2
    assert list(out.errors) == ["b"]


def test_a_failed_forward_leaves_the_runner_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.submit(step_of(new("a", [1, 2], [1])))
    with pytest.raises(RuntimeError, match="needs a step"):
        runner.sample()
    assert do(runner, step_of(new("b", [1, 2], [1]), finished_req_ids=["a"])).sampled_token_ids["b"]


def test_logprobs_come_for_who_asked_and_as_many_as_asked(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)

    def asking(n: int | None) -> SamplingParams:
        return SamplingParams(temperature=0, logprobs=n)

    requests = [new(name, [1, 2 + i], [1 + i], asking(n)) for i, (name, n) in enumerate((("a", None), ("b", 0), ("c", 3)))]
    out = do(runner, step_of(*requests))
    assert set(out.logprobs) == {"b", "c"}
    (b,), (c,) = out.logprobs["b"], out.logprobs["c"]
    assert b.token_ids == out.sampled_token_ids["b"] and b.ranks == [1]
    assert c.token_ids[0] == c.token_ids[1] == out.sampled_token_ids["c"][0]
    assert c.ranks == [1, 1, 2, 3]
    expected = runner.model.full_forward(torch.tensor([1, 4])).float()[-1].log_softmax(-1)
    torch.testing.assert_close(torch.tensor(c.logprobs), expected[c.token_ids], atol=1e-4, rtol=0)


def test_min_tokens_keeps_the_end_token_away(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    natural = do(runner, step_of(new("a", [1, 2], [1]))).sampled_token_ids["a"][0]
    params = SamplingParams(temperature=0, min_tokens=1)
    asked = NewRequestData("b", [1, 2], 2, params, 0, (natural,), [2], 0)
    assert do(runner, step_of(asked)).sampled_token_ids["b"] != [natural]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.submit(step_of(new("a", [1], [1]), scheduled_spec_decode_tokens={"a": [5]})), "no speculative decoding"),
        (lambda r: r.sample(grammar_mask=object()), "no structured output"),
    ],
)
def test_what_is_not_served_yet_is_refused(tmp_path: Path, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(make_runner(tmp_path))


def test_warm_up_leaves_no_trace(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    runner.warm_up()
    assert runner.batch.rows == {}
    assert not any(cache.any() for cache in runner.kv_caches)
    assert complete(runner, [[1, 2, 3]])[0] == complete(make_runner(tmp_path), [[1, 2, 3]])[0]


@pytest.mark.parametrize("settings", [{"num_gpu_blocks_override": 2}, {"num_gpu_blocks_override": 3, "block_size": 1}])
def test_warm_up_fits_into_the_smallest_pools(tmp_path: Path, settings: dict[str, int]) -> None:
    make_runner(tmp_path, **settings).warm_up()


def test_the_runner_says_what_it_chose(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    assert (runner.vocab_size, runner.max_model_len, runner.num_blocks) == (101, 128, 64)
    assert (runner.device_type, runner.dtype_name) == ("cpu", "float32")
    assert "cpu in float32, eager, attention reference, KV cache of 64 blocks of 4 (252 tokens," in runner.describe()


def test_the_gpus_share_is_what_the_largest_step_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic, and a step of the full budget, with the GPU's counters made up."""
    runner = make_runner(tmp_path, max_model_len=10, gpu_memory_utilization=0.5)
    for name, answer in {
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (600, 1000),
        "memory_reserved": 250,
        "max_memory_allocated": 200,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    steps = []
    forward = runner._forward
    monkeypatch.setattr(runner, "_forward", lambda inputs: steps.append(inputs) or forward(inputs))
    assert runner._gpu_memory_for_kv() == 1000 * 0.5 - 200 - (1000 - 600 - 250)
    assert steps[0].seq_lens.tolist() == [10, 10, 10, 10, 10, 10, 4]
    assert len(steps[0].input_ids) == 64


# ---------------------------------------------------------------- replaced parts


def test_replaced_parts_are_the_ones_that_run(tmp_path: Path) -> None:
    used: set[str] = set()

    def mine_slot_mapping(positions, block_table, block_size):
        used.add("slot_mapping")
        return slot_mapping(positions, block_table, block_size)

    def mine_write_kv(key, value, kv_cache, slot_mapping):
        used.add("write_kv")
        reference.write_kv(key, value, kv_cache, slot_mapping)

    def mine_decode(q, kv_cache, block_tables, seq_lens):  # as a lab writes it: no scale, no window
        used.add("attention.decode")
        return reference.paged_decode(q, kv_cache, block_tables, seq_lens)

    def mine_prefill(*args, **kwargs):
        used.add("attention.prefill")
        return reference.paged_prefill(*args, **kwargs)

    class MySampler:
        def __call__(self, logits, metadata):
            used.add("sampler")
            assert logits.dtype == torch.float32
            return SamplerOutput(logits.argmax(-1))

    parts = {
        "slot_mapping": mine_slot_mapping,
        "write_kv": mine_write_kv,
        "attention.decode": mine_decode,
        "attention.prefill": mine_prefill,
        "sampler": MySampler,
    }
    runner = make_runner(tmp_path, components=parts)
    outputs, _ = complete(runner, prompts(5, 9))
    assert used == set(parts)
    assert outputs == complete(make_runner(tmp_path), prompts(5, 9))[0]
    assert "replaced write_kv, decode, prefill" in runner.describe()


def test_a_part_without_windows_is_refused_for_a_model_that_has_one(tmp_path: Path) -> None:
    def mine(q, kv_cache, block_tables, seq_lens, *, scale, sliding_window=None): ...

    mine.capabilities = frozenset()
    with pytest.raises(ValueError, match=r"sliding_window=7 needs 'sliding window'.*attention\.decode component"):
        make_runner(tmp_path, MISTRAL, {"attention.decode": mine})
    make_runner(tmp_path, LLAMA, {"attention.decode": mine})


def test_a_part_that_does_not_take_a_window_has_none(tmp_path: Path) -> None:
    def mine(q, kv_cache, block_tables, seq_lens): ...

    with pytest.raises(ValueError, match=r"takes sliding_window=\.\.\.; yours is mine\(q, kv_cache, block_tables, seq_lens\)"):
        make_runner(tmp_path, MISTRAL, {"attention.decode": mine})


def test_a_sampler_that_leaves_the_vocabulary_fails_the_request(tmp_path: Path) -> None:
    class Wild(Sampler):
        def __call__(self, logits, metadata):
            return SamplerOutput(torch.full((len(logits),), 101))

    out = do(make_runner(tmp_path, components={"sampler": Wild}), step_of(new("a", [1], [1])))
    assert out.errors == {"a": "The sampler gave token id 101 for token 1; the vocabulary ends at 100."}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n: SamplerOutput(torch.zeros(n, 1, dtype=torch.int64)), r"gave token_ids \[1, 1\] of torch\.int64 for 1 rows"),
        (lambda n: SamplerOutput(torch.zeros(n)), r"gave token_ids \[1\] of torch\.float32"),
        (lambda n: [7] * n, r"gave \[7\] for 1 rows"),
        (lambda n: None, "gave None for 1 rows"),
        (lambda n: SamplerOutput(torch.zeros(n, dtype=torch.int64)), "gave no logprobs, which were asked for"),
    ],
)
def test_a_sampler_that_gives_something_else_is_named(tmp_path: Path, answer: Any, words: str) -> None:
    class Odd(Sampler):
        def __call__(self, logits, metadata):
            return answer(len(logits))

    runner = make_runner(tmp_path, components={"sampler": Odd})
    with pytest.raises(ValueError, match=rf"The sampler .*Odd {words}"):
        do(runner, step_of(new("a", [1], [1], SamplingParams(logprobs=2))))


def test_a_forked_process_is_told_instead_of_waiting_for_threads_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tmp_path)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="before this process was forked"):
        runner.submit(step_of(new("a", [1], [1])))
