"""Any load, any settings, any accident: every request ends, answers as the echo model does, and leaks nothing.

Run more examples with  HYPOTHESIS_PROFILE=fuzz pytest tests/core/test_engine_properties.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.step import EngineCoreRequest, FinishReason, SchedulerOutput
from minivllm.sampling_params import SamplingParams
from minivllm.spec_decode.config import SpeculativeConfig
from tests.core.harness import AheadScheduler, Driver, check_all_free, examples, make_engine, oracle

MORE = settings(max_examples=examples(250))
SHARED = [[2, 3, 4, 5, 6, 7, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], [9, 8, 7, 6, 5, 4, 3, 2, 9, 9, 8, 8, 7, 7, 6, 6]]


@dataclass
class Load:
    """Who comes when, who is aborted when (also between a step's begin and end), and which steps go wrong."""

    arrivals: list[tuple[int, EngineCoreRequest]]
    aborts: list[tuple[int, int, bool, bool]]  # (step, which request, mid-step, its id is used again at once)
    raising_steps: set[int]
    failing_requests: dict[int, int]  # step -> index of the request in it that fails alone
    resets: set[int]


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    chunked = draw(st.sampled_from([None, None, True, False]))
    caching = draw(st.sampled_from([True, None, False]))
    seqs = draw(st.sampled_from([1, 2, 3, 4, 5, 5]))
    budget = draw(st.integers(max(2, seqs), 24))
    return {
        "num_blocks": draw(st.integers(3, 12)),
        "block_size": draw(st.integers(1, 4)),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": 0 if chunked is False else draw(st.integers(0, min(4, budget))),
        "enable_prefix_caching": caching,
        "prefix_cache": "hash" if caching is False else draw(st.sampled_from(["hash", "radix"])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority", "priority" if caching is False else "longest_prefix"])),
    }


@st.composite
def loads(draw: st.DrawFn, priorities: bool) -> Load:
    arrivals = []
    for i in range(draw(st.sampled_from([1, 3, 5, 6, 7, 8]))):
        shared = draw(st.sampled_from(SHARED))[: draw(st.integers(0, 16))]
        prompt = shared + draw(st.lists(st.integers(0, 15), min_size=0 if shared else 1, max_size=4))
        params = SamplingParams(
            max_tokens=(max_tokens := draw(st.sampled_from([12, None, 1, 5, 20]))),
            min_tokens=draw(st.integers(0, min(3, max_tokens or 3))),
            ignore_eos=draw(st.sampled_from([True, True, False])),
            stop_token_ids=draw(st.sampled_from([[], [], [5], [0, 9]])),
        )
        request = EngineCoreRequest(
            f"r{i}",
            prompt,
            params,
            eos_token_ids=(0, 3),
            priority=draw(st.integers(0, 2)) if priorities else 0,
            arrival_time=float(draw(st.integers(0, 3))),
            cache_salt=draw(st.sampled_from([None, None, "a", "b"])),
        )
        arrivals.append((draw(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 12])), request))
    when = st.integers(0, 25)
    return Load(
        arrivals=arrivals,
        aborts=draw(st.lists(st.tuples(when, st.integers(0, 7), st.booleans(), st.booleans()), max_size=3)),
        raising_steps=draw(st.sets(when, max_size=2)),
        failing_requests=draw(st.dictionaries(when, st.integers(0, 4), max_size=2)),
        resets=draw(st.sets(when, max_size=2)),
    )


class Accidents:
    """The echo executor's `fault`: some steps raise, in some steps one request fails."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.hit: set[str] = set()  # requests that were failed

    def __call__(self, step: SchedulerOutput) -> dict[str, str]:
        if step.step_id in self.load.raising_steps:
            self.hit |= set(step.num_scheduled_tokens)
            raise RuntimeError("planted")
        if step.step_id in self.load.failing_requests:
            ids = sorted(step.num_scheduled_tokens)
            victim = ids[self.load.failing_requests[step.step_id] % len(ids)]
            self.hit.add(victim)
            return {victim: "planted"}
        return {}


def drive(config: dict[str, Any], load: Load, *, depth: int = 1, lookahead: int = 0, **engine_args: Any) -> Driver:
    """Run a load to its end with `depth` steps in flight, and compare every answer with the oracle."""
    accidents = Accidents(load)
    echo = {"vocab_size": 24, "fault": accidents, **engine_args.pop("echo", {})}
    engine = make_engine(echo=echo, **config, **engine_args)
    engine.scheduler.num_lookahead_tokens = lookahead
    driver = Driver(engine, expect_errors=True)
    requests: dict[str, EngineCoreRequest] = {}
    aborted: set[str] = set()
    arrivals = sorted(load.arrivals, key=lambda a: a[0])
    limit = 200 + 20 * sum(len(r.prompt_token_ids) + engine.config.max_model_len for _, r in arrivals)
    in_flight = now = 0

    def abort(mid_step: bool) -> None:
        for step, index, mid, again in load.aborts:
            if step == now and mid == mid_step and f"r{index}" in engine.scheduler.requests:
                engine.abort_requests([f"r{index}"])
                driver.check(kv=False)
                if again:  # the id, not the request: the late token of the first must not reach the second
                    aborted.discard(f"r{index}")
                    accidents.hit.discard(f"r{index}")
                    requests[f"r{index}"] = EngineCoreRequest(f"r{index}", SHARED[0][:1], SamplingParams(max_tokens=3))
                    driver.add(requests[f"r{index}"])
                else:
                    aborted.add(f"r{index}")

    while arrivals or engine.has_unfinished_requests() or in_flight:
        while arrivals and arrivals[0][0] <= now:
            request = arrivals.pop(0)[1]
            if len(request.prompt_token_ids) < engine.config.max_model_len and request.request_id not in requests:
                requests[request.request_id] = request
                driver.add(request)
        if now in load.resets:
            engine.reset_prefix_cache()
        abort(mid_step=False)
        sent = driver.begin()
        in_flight += sent
        abort(mid_step=True)
        if not sent or in_flight >= depth:
            driver.end()
            in_flight = len(engine._in_flight)  # a failed step takes those behind it along
        now += 1
        assert now < limit, "the engine spins"

    check_all_free(engine)
    for req_id, request in requests.items():
        answer = driver.answers[req_id]
        expected, reason, stop_reason = oracle(engine, request)
        if req_id in aborted or answer.finish_reason is FinishReason.ERROR:
            assert req_id in aborted or req_id in accidents.hit or depth > 1, f"{req_id} failed: {answer.error}"
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (expected, reason, stop_reason)
    return driver


@MORE
@given(st.data())
def test_every_request_ends_with_the_oracles_answer_and_nothing_leaks(data: st.DataObject):
    config = data.draw(engines())
    load = data.draw(loads(config["scheduling_policy"] == "priority"))
    drive(config, load, deferred=data.draw(st.booleans()))


@MORE
@given(st.data())
def test_drafts_right_or_wrong_never_change_an_answer(data: st.DataObject):
    config = data.draw(engines())
    load = data.draw(loads(config["scheduling_policy"] == "priority"))
    drafts = {
        "num_speculative_tokens": data.draw(st.integers(1, 4)),
        "draft_accuracy": data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "seed": data.draw(st.integers(0, 9)),
    }
    drive(config, load, lookahead=data.draw(st.integers(0, 4)), echo=drafts)


@MORE
@given(st.data())
def test_a_drafters_layer_under_the_same_block_tables_is_always_what_its_request_says(data: st.DataObject):
    """Hits, chunks, preemption, failed steps and rejected drafts included. Its slots hold the token *after* theirs: without the
    token after a block in the block's name, this fails: two requests compute an equal block at once, and a third is given the
    one's block and the other's next."""
    config = data.draw(engines())
    num_drafts = data.draw(st.integers(1, min(3, config["max_num_batched_tokens"] - 1)))
    config["speculative_config"] = SpeculativeConfig("eagle", num_drafts)
    load = data.draw(loads(config["scheduling_policy"] == "priority"))
    drafts = {
        "num_speculative_tokens": num_drafts,
        "draft_accuracy": data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "has_drafter_layer": True,
    }
    drive(config, load, lookahead=num_drafts, echo=drafts)


@MORE
@given(st.data())
def test_steps_scheduled_ahead_of_their_results_never_change_an_answer(data: st.DataObject):
    config = data.draw(engines())
    load = data.draw(loads(config["scheduling_policy"] == "priority"))
    drive(config, load, depth=data.draw(st.integers(2, 3)), deferred=True, components={"scheduler": AheadScheduler})
