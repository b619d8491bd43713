"""The engine on a device that is not this machine's: the CPU's tokens, one wait a step, and no tensor on the wrong side.

`simulated_cuda.py` says what its device is, and what it is not: nothing here is about speed, or about Triton's kernels.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minivllm import SamplingParams
from minivllm.bench import gpu_report
from minivllm.core.engine_core import EngineCore
from minivllm.core.step import EngineCoreRequest, SchedulerOutput
from minivllm.models.weights import load_model
from minivllm.spec_decode.eagle import EagleHead
from minivllm.worker import graphs
from minivllm.worker.graphs import DecodeBuffers, GraphRunner
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.transfer import to_device
from tests.gpu.test_engine import (  # noqa: F401  they run here, too
    test_a_padded_step_leaves_every_real_slot_untouched,
    test_a_step_makes_the_host_wait_once_at_its_end,
    test_arrays_arrive_whole_and_in_one_copy,
    test_graphed_and_eager_engines_agree_under_preemption,
    test_graphed_equals_eager_bit_for_bit,
    test_no_room_says_what_to_change,
    test_requests_get_the_tokens_of_a_full_forward,
    test_sampling_draws_what_the_cpu_draws,
)
from tests.spec_decode.harness import LLAMA, SHAPES, make_runner, many_prompts, save_model
from tests.worker.simulated_cuda import SimulatedCuda, why_not

pytest.importorskip("triton", reason="on a GPU the engine's attention is Triton's")
reason_to_skip = functools.cache(why_not)


@pytest.fixture(autouse=True)
def cuda() -> Iterator[SimulatedCuda]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    with SimulatedCuda() as simulated:
        yield simulated


# ---------------------------------------------------------------- the device itself

HOST = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x + HOST, r"same device.*aten\.add\.Tensor in test_on_simulated_cuda\.py is given \[2, 3\] on the CPU"),
        (lambda x: HOST @ x.T, "same device"),
        (lambda x: torch.cat([x, HOST]), "same device"),
        (lambda x: x.index_copy(0, torch.tensor([1, 0]), x), "same device"),
        (lambda x: torch.where(x > 0, x, HOST), "same device"),
        (lambda x: HOST[x.long()[0]], "same device"),
        (lambda x: x.view(3, 2)[1:].add_(HOST.view(3, 2)[1:]), "same device"),
        (lambda x: torch.nn.functional.linear(x, torch.nn.Parameter(HOST)), "same device"),
    ],
)
def test_two_devices_in_one_operator_are_refused(call: Callable[[torch.Tensor], object], words: str) -> None:
    with torch.inference_mode(), pytest.raises((RuntimeError, TypeError), match=words):
        call(HOST.to("cuda"))


def test_numpy_does_not_reach_the_device() -> None:
    for call in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            call(HOST.cuda())


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 1].item(),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "_unique2": lambda x: x.unique(),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[0].long()),
    "mask as an index": lambda x: x[x > 2],
    "index on the host": lambda x: x[torch.tensor([1, 0])],
    "cpu": lambda x: x.cpu(),
    "to": lambda x: HOST.to(x),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "copy_": lambda x: x.copy_(HOST),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING: list[Callable[[torch.Tensor], object]] = [
    lambda x: x.to(x.device, torch.float16),
    lambda x: torch.arange(3, device=x.device) + x * 2,
    lambda x: x.masked_fill_(x > 2, 0.0),
    lambda x: x[torch.tensor([1, 0]).to("cuda", non_blocking=True)],
    lambda x: torch.full_like(x, 3).sort().values.cumsum(-1),
    lambda x: torch.empty(3, pin_memory=True).to("cuda", non_blocking=True),
]


@pytest.mark.parametrize("what", WAITING)
def test_what_makes_the_host_wait_is_written_down_or_refused(cuda: SimulatedCuda, what: str) -> None:
    x = HOST.to("cuda", non_blocking=True)
    WAITING[what](x)
    assert cuda.waits == [f"{what} in test_on_simulated_cuda.py"]
    if what != "synchronize":  # that one is asked for
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match=f"synchronizing CUDA operation: {what} in"):
            WAITING[what](x)


@pytest.mark.parametrize("call", NOT_WAITING)
def test_what_does_not_make_the_host_wait(cuda: SimulatedCuda, call: Callable[[torch.Tensor], Any]) -> None:
    assert call(HOST.to("cuda", non_blocking=True)).is_cuda
    assert cuda.waits == []


@pytest.mark.parametrize(
    "copy",
    [lambda x: x.to("cpu", non_blocking=True), lambda x: torch.empty(2, 3).copy_(x, non_blocking=True)],
    ids=["to", "copy_"],
)
def test_a_copy_that_nobody_waited_for_has_not_arrived(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    copied = copy(HOST.cuda())
    assert copied.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(copied, HOST)


def test_page_locked_memory_may_not_change_while_it_is_copied() -> None:
    staging = torch.zeros(4, pin_memory=True)
    staging.to("cuda", non_blocking=True)
    staging.numpy()[0] = 1
    with pytest.raises(RuntimeError, match="page-locked memory was overwritten"):
        torch.cuda.synchronize()


# ---------------------------------------------------------------- the CPU's tokens, whatever is asked

K = 3
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "logit_bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 17: 3.0, 40: -100.0}},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": [3, 5, 8, 13, 21, 34]},
    "bad_words": {"bad_words": [[7], [50, 3], *([i] for i in range(60, 90))]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 7, "stop_token_ids": list(range(60))},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
}
MIXED = list(ASKED)[2:]  # as many as there are prompts; some of them are greedy, and some sampled
DRAFTED = ("n-gram", "draft model", "EAGLE")


@dataclass
class Played:
    """tokens, and (token ids, ranks, rounded numbers) of log-probabilities, by request; and of each step what it was."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    waits: list[list[str]] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_drafts: int = 0

    @property
    def said(self) -> tuple[Any, Any]:
        return self.tokens, self.logprobs

    def waits_of(self, is_prefill: bool) -> set[tuple[str, ...]]:
        """What the host waited for in the steps that were, or were not, made of decodes alone."""
        longest = [max(step.num_scheduled_tokens.values()) for step in self.steps]
        return {tuple(waits) for n, waits in zip(longest, self.waits, strict=True) if (n > 1 + K) == is_prefill}


def play(runner: ModelRunner, asked: list[dict[str, Any]], cuda: SimulatedCuda) -> Played:
    """All of `many_prompts` through an engine, prompt i asking for asked[i % len(asked)]."""
    played = Played()
    submit = runner.submit

    def noted(step: SchedulerOutput) -> None:
        played.steps.append(step)
        submit(step)

    runner.submit = noted  # type: ignore[method-assign]
    config = runner.config.fit_max_model_len(runner.max_model_len, runner.num_blocks)
    core = EngineCore(config, runner, vocab_size=runner.vocab_size)
    for i, prompt in enumerate(many_prompts()):
        values = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "seed": i, **asked[i % len(asked)]}
        bad_words = values.pop("bad_words", [])
        params = SamplingParams(**values)
        params.bad_words_token_ids = bad_words
        anew = params.prompt_logprobs is not None
        core.add_request(EngineCoreRequest(f"r{i}", prompt, params, seed=i, skip_reading_prefix_cache=anew))
    while core.has_unfinished_requests():
        before = len(cuda.waits)
        for out in core.step():
            assert out.error is None, out.error
            played.tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            found = [*(out.prompt_logprobs or []), *(out.new_logprobs or [])]
            entries = [(entry.token_ids, entry.ranks, np.round(entry.logprobs, 3).tolist()) for entry in found]
            played.logprobs.setdefault(out.request_id, []).extend(entries)
            played.num_cached_tokens += out.num_cached_tokens
        played.waits.append(cuda.waits[before:])
    if runner.speculation is not None:
        played.num_drafts = sum(runner.speculation.stats.drafted)
    return played


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("model"))
    head = EagleHead(load_model(str(folder), dtype=torch.float32, load_format="dummy").config, torch.arange(33), torch.float32)
    with torch.no_grad():
        for _, tensor in head.named_tensors():
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3, generator=torch.Generator().manual_seed(1))
    head.save(folder / "head")
    return folder


def drafts_of(method: str, model: Path) -> dict[str, Any]:
    named = {"n-gram": "ngram", "draft model": "draft_model", "EAGLE": "eagle"}
    where = {"n-gram": {"prompt_lookup_min": 1}, "draft model": {"model": str(model)}, "EAGLE": {"model": str(model / "head")}}
    return {"speculative_config": {"method": named[method], "num_speculative_tokens": K, **where[method]}}


def on_cuda(model: Path, asked: list[dict[str, Any]], cuda: SimulatedCuda, **settings: Any) -> Played:
    runner = make_runner(model, device="cuda", attention_backend="auto", **settings)
    assert runner.device_type == "cuda" and runner.model.attention_backend.name == "triton"
    runner.warm_up()
    assert (runner.graphs is None) == settings.get("enforce_eager", False)
    return play(runner, asked, cuda)


def on_cpu(model: Path, asked: list[dict[str, Any]], cuda: SimulatedCuda, **settings: Any) -> Played:
    played = play(make_runner(model, **settings), asked, cuda)
    assert cuda.waits == []
    return played


@pytest.mark.parametrize("what", ASKED)
def test_a_request_gets_the_cpus_tokens(model: Path, cuda: SimulatedCuda, what: str) -> None:
    expected = on_cpu(model, [ASKED[what]], cuda)
    assert on_cuda(model, [ASKED[what]], cuda).said == expected.said
    assert any(expected.logprobs.values()) == (what in ("logprobs", "prompt_logprobs"))


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphed"])
@pytest.mark.parametrize("shape", ["plain", "chunks", "preemption", "preemption and chunks", "radix"])
def test_all_requests_in_one_batch_get_the_cpus_tokens(model: Path, cuda: SimulatedCuda, shape: str, eager: bool) -> None:
    """Preemption gives some their blocks back from the prefix cache; chunks are computed beside decodes."""
    assert len(MIXED) == len(many_prompts())
    asked = [ASKED[what] for what in MIXED]
    expected = on_cpu(model, asked, cuda, **SHAPES[shape])
    found = on_cuda(model, asked, cuda, enforce_eager=eager, **SHAPES[shape])
    assert found.said == expected.said
    assert any(step.preempted_req_ids for step in found.steps) == ("preemption" in shape)
    sizes = [set(step.num_scheduled_tokens.values()) for step in found.steps]
    assert "chunks" not in shape or any(1 in n and max(n) > 1 for n in sizes)
    assert found.num_cached_tokens > 0


@pytest.mark.parametrize("shape", ["plain", "preemption and chunks"])
@pytest.mark.parametrize("method", DRAFTED)
def test_drafts_change_no_token(model: Path, cuda: SimulatedCuda, method: str, shape: str) -> None:
    asked = [ASKED["greedy"], ASKED["sampled"], ASKED["penalties"], ASKED["logprobs"]]
    settings = {**drafts_of(method, model), **SHAPES[shape]}
    expected = on_cpu(model, asked, cuda, **settings)
    found = on_cuda(model, asked, cuda, **settings)
    assert found.said == expected.said
    assert found.num_drafts == expected.num_drafts > 0


# ---------------------------------------------------------------- what the host waits for, in every step

ONE = ("synchronize in model_runner.py",)
WAITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ASKED, ONE),
    "n-gram": ONE,
    "draft model": (*ONE, *["to in draft_model.py"] * K, "tolist in draft_model.py"),
    "EAGLE": (*ONE, *["to in eagle.py"] * (1 + K), "tolist in eagle.py"),
}


@pytest.mark.parametrize(
    ("what", "eager"),
    [
        *(pytest.param(what, False, id=what) for what in WAITS),
        *(pytest.param(what, True, id=f"{what}, eager") for what in ("greedy", "EAGLE")),
    ],
)
def test_a_decode_step_waits_for(model: Path, cuda: SimulatedCuda, what: str, eager: bool) -> None:
    settings = drafts_of(what, model) if what in DRAFTED else {}
    played = on_cuda(model, [ASKED.get(what, {})], cuda, enforce_eager=eager, **settings)
    assert played.waits_of(is_prefill=False) == {WAITS[what]}


def test_a_step_with_prompts_waits_once_too(model: Path, cuda: SimulatedCuda) -> None:
    asked = [ASKED[what] for what in MIXED if what != "prompt_logprobs"]
    assert on_cuda(model, asked, cuda, max_num_batched_tokens=9).waits_of(is_prefill=True) == {ONE}


def test_each_slice_of_a_prompts_logprobs_is_waited_for(model: Path, cuda: SimulatedCuda) -> None:
    runner = make_runner(model, device="cuda", attention_backend="auto", max_num_seqs=1)
    (first, *_) = play(runner, [ASKED["prompt_logprobs"]], cuda).waits_of(is_prefill=True)
    assert first == ("to in prompt_logprobs.py", *["tolist in prompt_logprobs.py"] * 3, *ONE)


# ---------------------------------------------------------------- recordings

STATIC = torch.arange(4)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda b: b.seq_lens.max().item(), "item in test_on_simulated_cuda.py"),
        (lambda b: b.input_ids[: int(b.seq_lens.max())], "item"),
        (lambda b: b.positions.tolist(), "tolist"),
        (lambda b: b.positions.nonzero(), "nonzero"),
        (lambda b: b.input_ids[b.seq_lens > 1], "mask as an index"),
        (lambda b: b.input_ids.cpu(), "cpu"),
        (lambda b: b.input_ids.to("cpu", non_blocking=True), "to"),
        (lambda b: torch.tensor([1, 2], device="cuda"), "tensor"),
        (lambda b: to_device([np.arange(3)], b.input_ids.device), "to in transfer.py"),
        (lambda b: b.input_ids.copy_(STATIC[: len(b.input_ids)], non_blocking=True), "copy_"),
        (lambda b: torch.cuda.synchronize(), "synchronize"),
        (lambda b: torch.cuda.CUDAGraph().replay(), "replay"),
    ],
)
def test_what_may_not_happen_in_a_recording_is_refused(step: Callable[[DecodeBuffers], Any], words: str) -> None:
    runs = []

    def faulty(buffers: DecodeBuffers) -> torch.Tensor:
        runs.append(buffers)
        if len(runs) > 1:  # the run before the recording may do it
            step(buffers)
        return buffers.input_ids + 1

    with pytest.raises(RuntimeError, match=f"not permitted when stream is capturing: {words}"):
        GraphRunner(faulty, 4, 2, torch.device("cuda")).capture()


def test_a_recording_holds_nothing_until_it_is_replayed_and_only_until_the_next_is() -> None:
    runner = GraphRunner(lambda buffers: buffers.positions * 1.5, 2, 2, torch.device("cuda"))
    runner.capture()
    assert all(hidden.isnan().all() for _, hidden in runner.graphs.values())
    runner.buffers.positions.copy_(STATIC[2:4])
    two = runner.replay(2)
    assert two.tolist() == [3.0, 4.5]
    assert runner.replay(1).tolist() == [3.0]
    assert two.isnan().all()


@pytest.mark.parametrize("method", [None, *DRAFTED])
def test_a_step_of_decodes_is_replayed_and_no_other(
    model: Path, cuda: SimulatedCuda, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a step that verifies drafts are decodes, too."""
    replayed: list[int] = []
    replay = GraphRunner.replay
    monkeypatch.setattr(GraphRunner, "replay", lambda self, bucket: replayed.append(bucket) or replay(self, bucket))
    played = on_cuda(model, [{}], cuda, **({} if method is None else drafts_of(method, model)))
    decodes = [step for step in played.steps if not step.scheduled_new_reqs]
    assert len(replayed) == len(decodes) >= 3
    assert all(bucket >= step.total_num_scheduled_tokens for bucket, step in zip(replayed, decodes, strict=True))


# ---------------------------------------------------------------- the report on a GPU


@pytest.fixture
def small_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Times of almost nothing, of a tiny model."""
    monkeypatch.setattr(gpu_report, "MAX_MODEL_LEN", 64)
    monkeypatch.setattr(gpu_report, "BATCHES", (1, 3))
    monkeypatch.setattr(gpu_report, "COLD", 1 << 16)
    monkeypatch.setattr(graphs, "LARGEST_BUCKET", 4)
    workload = gpu_report.uniform(4, vocab_size=300, prompt_len=(5, 20), output_len=(2, 4))
    monkeypatch.setattr(gpu_report, "nano_vllm_workload", lambda n=256: workload)
    time_of = gpu_report.time_of
    monkeypatch.setattr(gpu_report, "time_of", lambda run, device, seconds: time_of(run, device, 0.0))
    config = {**LLAMA, "vocab_size": 300, "num_hidden_layers": 1, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_the_report_of_an_engine_has_its_numbers(small_report: str) -> None:
    parts: dict[str, dict[str, Any]] = {}
    gpu_report.measure_engine(small_report, lambda: gpu_report.COMPILING - 1, parts.__setitem__)
    assert not [part["error"] for part in parts.values() if "error" in part]
    assert list(parts) == ["start", "steps", "throughput", "compiled"]
    assert re.search(r"on cuda in bfloat16, .*attention triton", parts["start"]["engine"])
    assert [row["batch"] for row in parts["steps"]["rows"]] == [1, 4]
    assert all(row["eager_ms"] > 0 and row["graphed_ms"] > 0 for row in parts["steps"]["rows"])
    assert parts["throughput"]["output_tok_s"] > 0
    assert "left out" in parts["compiled"]["line"]
    json.dumps(parts)


def test_the_report_of_the_kernels_has_its_numbers(small_report: str) -> None:
    part = gpu_report.measure_kernels(small_report, 100.0, batches=[(2, 17)], prefills=[(2, 5)])
    (decode,), (prefill,) = part["decode"], part["prefill"]
    assert part["dtype"] == "bfloat16" and (decode["batch"], decode["length"]) == (2, 17)
    assert min(decode["decode_us"], decode["decode_gb_s"], decode["write_us"], decode["write_gb_s"]) > 0
    assert decode["share_of_bandwidth"] == pytest.approx(decode["decode_gb_s"] / 100.0)
    assert min(prefill["prefill_us"], prefill["tflop_s"]) > 0
    json.dumps(part)
