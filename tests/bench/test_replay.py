"""Replay: every request is sent when it is due, and the trace says what its user felt."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minivllm import LLM, SamplingParams
from minivllm.bench import metrics
from minivllm.bench.replay import replay
from minivllm.bench.workloads import Workload, WorkloadRequest, make, word_ids
from minivllm.config import EngineConfig
from minivllm.core.step import FinishReason
from minivllm.observe.clock import VirtualClock, WallClock
from minivllm.sim.echo import EchoExecutor, echo_generate
from tests.core.harness import VOCAB, make_engine, make_request
from tests.observe.harness import recording_engine


def one_second(step: object) -> float:
    return 1.0


def requests(*arrivals: float, max_tokens: int = 3) -> Workload:
    return Workload("test", 0, [WorkloadRequest(None, [50 + i] * 5, max_tokens, at) for i, at in enumerate(arrivals)])


def test_requests_are_sent_when_they_are_due():
    trace = replay(recording_engine(), requests(0.0, 1.5, 20.0), clock=VirtualClock(one_second))
    first, second, third = trace.requests.values()
    assert (first.arrival, first.first_token, first.finish) == (0.0, 1.0, 3.0)
    assert (second.arrival, second.first_token) == (1.5, 3.0)  # taken at 2: the half second before counts as waiting
    assert (third.arrival, third.first_token) == (20.0, 21.0)  # nothing ran: the clock went on by itself
    assert trace.requests["1"].ttft == 1.5


def test_a_turn_waits_for_the_one_before():
    workload = make("chat", n=2, turns=3, max_tokens=4).encoded(lambda text: word_ids(text, VOCAB))
    trace = replay(recording_engine(300), workload, clock=VirtualClock(one_second))
    for group in ("chat-1", "chat-2"):
        turns = metrics.select(trace, group=group)
        assert [request.turn for request in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert after.arrival == before.finish
            assert after.num_cached_tokens >= before.num_prompt_tokens // 4 * 4 - 4
    assert metrics.cache_hit_rate(metrics.select(trace, turn=2)) > 0.5


def test_a_level_of_a_tree_waits_for_all_of_the_level_above():
    workload = make("tree_of_thought", n=1, branches=2, depth=2).encoded(lambda text: word_ids(text, VOCAB))
    trace = replay(recording_engine(300), workload, clock=VirtualClock(one_second))
    ends = [max(r.finish or 0 for r in metrics.select(trace, turn=turn)) for turn in (0, 1, 2)]
    starts = [min(r.arrival for r in metrics.select(trace, turn=turn)) for turn in (0, 1, 2)]
    assert starts == [0.0, ends[0], ends[1]]


def test_the_same_run_is_the_same_trace():
    workload = make("mixed", n=6, rate=1.0, long_len=(40, 60), vocab_size=VOCAB)
    one, two = (replay(recording_engine(60), workload, clock=VirtualClock()) for _ in range(2))
    assert one == two and len(one.requests) == 6


def test_an_llm_is_driven_as_its_core_is():
    workload = make("chat", n=2, turns=2, rate=0.5, max_tokens=4).encoded(lambda text: word_ids(text, VOCAB))
    llm = echo_llm()
    trace = replay(llm, workload, clock=VirtualClock(one_second))
    core = replay(recording_engine(300, **SETTINGS), workload, clock=VirtualClock(one_second))
    trace.model = core.model
    assert trace == core and llm.trace is trace


def test_every_replay_has_a_trace_of_its_own():
    llm = echo_llm()
    cold = replay(llm, requests(0.0), clock=VirtualClock(one_second))
    warm = replay(llm, requests(0.0), clock=VirtualClock(one_second))
    assert len(cold.requests) == len(warm.requests) == 1 and llm.trace is warm
    assert cold.requests["0"].num_cached_tokens == 0 and warm.requests["0"].num_cached_tokens == 4
    assert isinstance(llm.engine_core.clock, WallClock)  # type: ignore[attr-defined]
    llm.generate([5, 6, 7], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(warm.requests) == 2  # llm.trace goes on


def test_real_time_is_kept_without_a_clock():
    trace = replay(recording_engine_in_real_time(), requests(0.0, 0.05))
    assert trace.requests["1"].arrival == 0.05 and (trace.requests["1"].first_token or 0) >= 0.05


def recording_engine_in_real_time():  # type: ignore[no-untyped-def]
    engine = recording_engine()
    engine.clock = WallClock()
    return engine


def test_outputs_are_those_of_the_model():
    engine = recording_engine()
    (prompt,) = requests(0.0).requests
    trace = replay(engine, requests(0.0), clock=VirtualClock(one_second))
    said = [token for step in trace.steps for token in step.sampled["0"]]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected, reason, _ = echo_generate(prompt.prompt_token_ids or [], params, max_model_len=100, vocab_size=VOCAB)
    assert said == expected and reason is FinishReason.LENGTH


def test_an_engine_that_does_not_record_is_refused():
    with pytest.raises(ValueError, match="LLM\\(trace=True\\)"):
        replay(make_engine(), requests(0.0))  # type: ignore[arg-type]


def test_a_busy_engine_is_refused():
    engine = recording_engine()
    engine.add_request(make_request("a", 5))
    with pytest.raises(ValueError, match="idle engine"):
        replay(engine, requests(0.0))


def test_text_without_a_tokenizer_is_refused_and_nothing_keeps_running():
    engine = recording_engine()
    workload = requests(0.0)
    workload.requests.append(WorkloadRequest("some text", None, 3))
    with pytest.raises(ValueError, match=r"workload\.encoded"):
        replay(engine, workload, clock=VirtualClock(one_second))
    assert not engine.has_unfinished_requests()


SETTINGS = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


def echo_llm() -> LLM:
    return LLM.from_executor(
        EchoExecutor(300, 4, vocab_size=VOCAB),
        EngineConfig(block_size=4, trace=True, **SETTINGS),
        vocab_size=VOCAB,
        model_max_len=1196,
    )
