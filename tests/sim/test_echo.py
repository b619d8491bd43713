"""The echo model: any wrong slot changes the output, and a message that makes no sense is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minivllm.core.step import CachedRequestData, FinishReason, NewRequestData, SchedulerOutput, StepOutput
from minivllm.sampling_params import SamplingParams
from minivllm.sim.echo import DeferredExecutor, EchoExecutor, echo_generate, echo_token

PROMPT = [5, 6, 7, 8, 9, 10]


def new(
    req_id: str = "a", tokens: list[int] | None = None, block_ids: list[int] | None = None, num_computed: int = 0, **params
) -> NewRequestData:
    tokens = PROMPT if tokens is None else tokens
    return NewRequestData(
        req_id, tokens, len(tokens), SamplingParams(**params), 0, (1,), [1, 2] if block_ids is None else block_ids, num_computed
    )


def first(request: NewRequestData, n: int, **fields) -> SchedulerOutput:
    return SchedulerOutput(0, [request], CachedRequestData(), {request.req_id: n}, n, **fields)


def then(n: int, num_computed: int, new_blocks: list[int] | None = None, req_id: str = "a", **fields) -> SchedulerOutput:
    cached = CachedRequestData([req_id], [new_blocks or []], [num_computed])
    return SchedulerOutput(1, [], cached, {req_id: n}, n, **fields)


def run(executor: EchoExecutor | DeferredExecutor, step: SchedulerOutput) -> StepOutput:
    executor.submit(step)
    return executor.sample().result()


def expected(num_tokens: int) -> list[int]:
    return echo_generate(PROMPT, SamplingParams(max_tokens=num_tokens, ignore_eos=True), max_model_len=99)[0]


def test_whole_chunked_and_step_by_step_agree_with_the_oracle():
    executor = EchoExecutor(4, 4)
    assert run(executor, first(new(ignore_eos=True), 4)).sampled_token_ids == {"a": []}  # a chunk
    tokens = run(executor, then(2, 4)).sampled_token_ids["a"]
    tokens += run(executor, then(1, 6)).sampled_token_ids["a"]
    tokens += run(executor, then(1, 7)).sampled_token_ids["a"]
    tokens += run(executor, then(1, 8, [3])).sampled_token_ids["a"]
    assert tokens == expected(4)


def test_a_wrong_block_in_the_table_changes_the_output():
    executor = EchoExecutor(5, 4)
    run(executor, first(new(), 6))
    executor.kv_cache[1 * 4 + 2] += 1  # somebody wrote into the block of another
    assert run(executor, then(1, 6)).sampled_token_ids["a"] != expected(2)[1:]


def test_a_cached_prefix_is_read_not_trusted():
    executor = EchoExecutor(6, 4)
    run(executor, first(new("a"), 6))
    good = run(executor, first(new("b", block_ids=[1, 3], num_computed=4), 2)).sampled_token_ids["b"]
    bad = run(executor, first(new("c", block_ids=[4, 5], num_computed=4), 2)).sampled_token_ids["c"]
    assert good == expected(1) != bad


def test_every_rows_tokens_are_written_before_any_row_reads():
    """b shares block 1 with a, in the same step, and comes before a in it."""
    b, a = new("b", block_ids=[1, 3], num_computed=4), new("a")
    step = SchedulerOutput(0, [b, a], CachedRequestData(), {"b": 2, "a": 6}, 8)
    assert run(EchoExecutor(4, 4), step).sampled_token_ids["b"] == expected(1)


def test_right_drafts_are_accepted_and_the_first_wrong_one_is_replaced():
    executor = EchoExecutor(5, 4)
    run(executor, first(new(ignore_eos=True, max_tokens=9), 6))
    t = expected(6)
    wrong = (t[3] + 1) % 64
    step = then(4, 6, [3], scheduled_spec_decode_tokens={"a": [t[1], t[2], wrong]})
    assert run(executor, step).sampled_token_ids["a"] == [t[1], t[2], t[3]]
    step = then(2, 9, scheduled_spec_decode_tokens={"a": [t[4]]})
    assert run(executor, step).sampled_token_ids["a"] == [t[4], t[5]]


@pytest.mark.parametrize(("accuracy", "right"), [(1.0, 3), (0.0, 0)])
def test_proposed_drafts_are_as_right_as_asked(accuracy: float, right: int):
    executor = EchoExecutor(5, 4, num_speculative_tokens=3, draft_accuracy=accuracy)
    drafts = run(executor, first(new(ignore_eos=True), 6)).draft_token_ids["a"]
    t = expected(4)[1:]
    assert len(drafts) == 3
    assert (drafts == t) if right else (drafts[0] != t[0])


def test_end_tokens_are_masked_until_min_tokens():
    params = SamplingParams(min_tokens=3, max_tokens=30, stop_token_ids=[2])
    for i in range(50):
        tokens, reason, _ = echo_generate([i], params, max_model_len=99, eos_token_ids=(0, 1), vocab_size=4)
        assert len(tokens) > 3 and not {0, 1, 2} & set(tokens[:3])
        assert reason is FinishReason.STOP
    with pytest.raises(ValueError, match="min_tokens=3 masks all 3 tokens"):
        echo_token([0], 1, params, (0, 1), 3)


def test_a_failing_forward_leaves_garbage_in_its_slots_and_only_there():
    def fault(step: SchedulerOutput) -> None:
        if step.step_id == 1:
            raise RuntimeError("planted")

    executor = EchoExecutor(4, 4, fault=fault)
    run(executor, first(new(), 4))
    with pytest.raises(RuntimeError, match="planted"):
        executor.submit(then(2, 4))
    assert executor.kv_cache[4:12] == [*PROMPT[:4], -1, -1, -1, -1]


def test_single_requests_can_fail():
    executor = EchoExecutor(4, 4, fault=lambda step: {"a": "NaN"})
    assert run(executor, first(new(), 6)).errors == {"a": "NaN"}


def test_logprobs_are_as_many_as_asked_for_the_sampled_token_first():
    output = run(EchoExecutor(4, 4), first(new(logprobs=3), 6))
    (token,), (logprobs,) = output.sampled_token_ids["a"], output.logprobs["a"]
    assert logprobs.token_ids == [token, token, (token + 1) % 64, (token + 2) % 64]
    assert logprobs.ranks == [1, 1, 2, 3]
    assert logprobs.logprobs == sorted(logprobs.logprobs, reverse=True)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (first(new(), 7), "tokens 0 to 7 asked for, 6 are known"),
        (first(new(block_ids=[1]), 6), "token 5 has no block"),
        (first(new(block_ids=[0, 1]), 6), "block 0 is the null block"),
        (first(new(block_ids=[1, 4]), 6), "block 4 is the null block or outside"),
        (then(1, 6), "request 'a' is cached, but the batch does not hold it"),
        (SchedulerOutput(0), "the token counts do not add up"),
        (SchedulerOutput(0, [new()], CachedRequestData(), {"a": 6}, 5), "the token counts do not add up"),
        (SchedulerOutput(0, [new()], CachedRequestData(), {"b": 6}, 6), "requests with tokens and requests described differ"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(step: SchedulerOutput, words: str):
    with pytest.raises(AssertionError, match=words):
        EchoExecutor(4, 4).submit(step)


def test_a_request_comes_back_only_after_it_was_dropped():
    executor = EchoExecutor(4, 4)
    run(executor, first(new(), 6))
    with pytest.raises(AssertionError, match="is new, but the batch holds it"):
        executor.submit(first(new(), 6))
    run(executor, first(new(), 6, preempted_req_ids=["a", "never seen"]))
    run(executor, first(new(), 6, finished_req_ids=["a"]))


@pytest.mark.parametrize("wrap", [lambda executor: executor, DeferredExecutor])
def test_a_grammar_mask_is_refused_as_by_the_model_runner(wrap: Callable[[EchoExecutor], EchoExecutor | DeferredExecutor]):
    executor = wrap(EchoExecutor(4, 4))
    executor.submit(first(new(), 6))
    with pytest.raises(ValueError, match="grammar_mask is given, and this executor has no structured output"):
        executor.sample(grammar_mask=object())


def test_a_deferred_step_runs_when_its_result_is_asked_for_and_in_order():
    ran: list[int] = []
    executor = DeferredExecutor(EchoExecutor(4, 4, fault=lambda step: ran.append(step.step_id)))
    executor.submit(first(new(ignore_eos=True), 6))
    one = executor.sample()
    executor.submit(then(1, 6))
    two = executor.sample()
    assert ran == []
    assert two.result().sampled_token_ids["a"] == expected(2)[1:]
    assert ran == [0, 1]
    assert one.result().sampled_token_ids["a"] == expected(1)
    executor.shutdown()
