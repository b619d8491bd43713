"""Cases real users hit, by number; the scheduler's and the cache's share of them."""

from __future__ import annotations

import pickle

import pytest

from minivllm.config import EngineConfig
from minivllm.core.step import FinishReason
from tests.core.harness import Driver, check_all_free, generate, make_engine, make_request, oracle

pytestmark = pytest.mark.usefixtures("prefix_cache")


def assert_exact(driver: Driver, *requests) -> None:
    for request in requests:
        answer = driver.answers[request.request_id]
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == oracle(driver.engine, request)


def test_case_1_prompts_too_long_for_the_pool_are_refused_alone_and_the_others_answered():
    """50 blocks of 16, one of them the null block: max_model_len fits itself to 784."""
    driver = Driver(make_engine(50, block_size=16))
    for i in range(5):
        with pytest.raises(ValueError, match=r"prompt has 1002 tokens, but max_model_len=784 .*49 blocks of 16: 784 tokens"):
            driver.engine.add_request(make_request(f"long{i}", 1002))
    sixth = make_request("sixth", 20)
    driver.add(sixth)
    driver.run()
    assert_exact(driver, sixth)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_case_2_two_prompts_longer_than_the_budget_in_a_pool_that_holds_one(policy: str):
    driver = Driver(make_engine(17, max_num_batched_tokens=8, scheduling_policy=policy))
    requests = [make_request(name, 40, max_tokens=20) for name in "ab"]
    driver.add(*requests)
    driver.run()
    assert_exact(driver, *requests)
    assert driver.num_begun < 200
    assert driver.num_preemptions == 0  # the second starts when there is room for all of it, not for its first chunk


def test_case_3_priority_drafts_and_a_tiny_pool():
    """Victims that were scheduled in the same step, with drafts, over and over."""
    undone = 0
    for seed in range(20):
        echo = {"num_speculative_tokens": 3, "draft_accuracy": 0.7, "seed": seed}
        driver = Driver(make_engine(8, scheduling_policy="priority", max_num_batched_tokens=20, echo=echo))
        scheduler = driver.engine.scheduler
        unschedule = scheduler._unschedule

        def count(step, request, unschedule=unschedule):
            nonlocal undone
            undone += request.request_id in step.num_scheduled_tokens
            unschedule(step, request)

        scheduler._unschedule = count
        requests = []
        for i in range(6):
            request = make_request(f"{seed}.{i}", 5 + i + seed % 3, max_tokens=12, priority=5 - i)
            requests.append(request)
            driver.add(request)
            driver.step()
        driver.run()
        assert_exact(driver, *requests)
    assert undone >= 10


def test_case_4_a_preempted_request_is_prefilled_again_after_the_lookup():
    driver = Driver(make_engine(max_num_batched_tokens=16))
    request = make_request("a", 21, max_tokens=8)
    driver.add(request)
    for _ in range(4):
        driver.step()
    state = driver.engine.scheduler.requests["a"]
    assert (state.num_tokens, state.num_computed_tokens) == (24, 23)
    driver.engine.scheduler.preempt(state)
    driver.step()
    step = driver.step()
    assert step.scheduled_new_reqs[0].num_computed_tokens == 20  # five of its own blocks are still there
    assert step.num_scheduled_tokens == {"a": 4}
    driver.run()
    assert_exact(driver, request)


def test_case_5_the_same_prompt_of_exactly_two_blocks_twice():
    driver = Driver(make_engine())
    prompt = list(range(50, 58))
    for name in "ab":
        driver.add(make_request(name, prompt))
        if name == "b":
            step = driver.step()
            assert step.num_scheduled_tokens == {"b": 4}  # one block from the cache, one computed again
        driver.run()
    assert driver.answers["b"].token_ids == driver.answers["a"].token_ids
    assert driver.answers["b"].num_cached_tokens == 4


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_case_6_a_prompt_of_three_budgets_and_one_token(prefix_caching: bool):
    request = make_request("a", 3 * 16 + 1)
    whole = generate(make_engine(max_num_batched_tokens=64, enable_prefix_caching=prefix_caching), request)["a"]
    driver = Driver(make_engine(max_num_batched_tokens=16, enable_prefix_caching=prefix_caching))
    driver.add(request)
    assert [driver.step().num_scheduled_tokens["a"] for _ in range(5)] == [16, 16, 16, 1, 1]
    chunked = driver.run()["a"]
    assert chunked.token_ids == whole.token_ids == oracle(driver.engine, request)[0]


def test_case_7_a_resumed_request_prefills_although_it_has_outputs():
    driver = Driver(make_engine(max_num_batched_tokens=8, enable_prefix_caching=False))
    request = make_request("a", 12, max_tokens=9)
    driver.add(request)
    for _ in range(6):
        driver.step()
    state = driver.engine.scheduler.requests["a"]
    assert state.num_output_tokens == 5
    driver.engine.scheduler.preempt(state)
    driver.step()
    for chunk in (8, 8):
        assert driver.step().num_scheduled_tokens == {"a": chunk}
        assert state.num_output_tokens == 5  # a chunk yields nothing, outputs or not
    assert driver.step().num_scheduled_tokens == {"a": 1}
    assert state.num_output_tokens == 6
    driver.run()
    assert_exact(driver, request)


def test_case_7_an_engine_pickled_in_mid_flight_goes_on_as_if_nothing_had_happened():
    engine = make_engine(17, max_num_batched_tokens=8)
    requests = [make_request(name, n, max_tokens=12) for name, n in [("a", 3), ("b", 20), ("c", 9)]]
    for request in requests:
        engine.add_request(request)
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        engine = pickle.loads(pickle.dumps(engine))
    assert tokens == {request.request_id: oracle(engine, request)[0] for request in requests}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("max_model_len", "max_tokens"), [(None, None), (15, None), (16, None), (16, 10_000)])
def test_case_8_a_sequence_alone_that_reaches_the_end_of_the_pool_ends_with_length(
    drafts: int, max_model_len: int | None, max_tokens: int | None
):
    engine = make_engine(5, max_model_len=max_model_len, echo={"num_speculative_tokens": drafts})
    engine.scheduler.num_lookahead_tokens = drafts
    request = make_request("a", 5, max_tokens=max_tokens)
    answer = generate(engine, request)["a"]
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.token_ids) == (max_model_len or 16) - 5
    assert answer.token_ids == oracle(engine, request)[0]


def test_case_8_many_that_reach_the_end_of_the_pool_take_turns():
    driver = Driver(make_engine(5))
    requests = [make_request(name, 5, max_tokens=None) for name in "abc"]
    driver.add(*requests)
    driver.run()
    assert_exact(driver, *requests)
    assert driver.num_begun < 100


@pytest.mark.parametrize("deferred", [False, True])
def test_case_9_abort_between_schedule_and_update(deferred: bool):
    driver = Driver(make_engine(deferred=deferred))
    a, b = make_request("a", 5), make_request("b", 6)
    driver.add(a, b)
    driver.step()
    driver.begin()
    driver.engine.abort_requests(["a"])
    driver.check(kv=False)  # a's blocks are free, once
    held = driver.engine.scheduler.kv_cache_manager.get_block_ids(driver.engine.scheduler.requests["b"])
    free = driver.engine.scheduler.kv_cache_manager.block_pool.num_free_blocks
    assert free == 100 - len(held)
    driver.end()
    assert len(driver.answers["a"].token_ids) == 1  # the late token is ignored
    driver.run()
    assert_exact(driver, b)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, ("max_num_seqs=9", "max_num_batched_tokens=8")),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 4, "long_prefill_token_threshold": 9},
            ("long_prefill_token_threshold=9", "max_num_batched_tokens=8"),
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 4},
            ("long_prefill_token_threshold=4", "enable_chunked_prefill=False"),
        ),
        (
            {"enable_chunked_prefill": False, "max_model_len": 64, "max_num_batched_tokens": 63},
            ("max_model_len=64", "max_num_batched_tokens=63"),
        ),
    ],
)
def test_case_10_settings_that_contradict_each_other_are_refused_at_start(settings: dict, words: tuple):
    with pytest.raises(ValueError) as refused:
        EngineConfig(**settings)
    assert all(word in str(refused.value) for word in words)


def test_case_10_without_chunked_prefill_max_model_len_fits_itself_to_one_step():
    engine = make_engine(max_num_batched_tokens=24, enable_chunked_prefill=False)
    assert engine.config.max_model_len == 24
    request = make_request("a", 23)
    assert generate(engine, request)["a"].token_ids == oracle(engine, request)[0]


def test_case_11_the_same_adapter_name_with_other_weights_finds_no_stale_kv():
    driver = Driver(make_engine())
    for name, digest in [("a", "old weights"), ("b", "new weights"), ("c", "new weights")]:
        driver.add(make_request(name, list(range(50, 62)), lora_digest=digest))
        driver.run()
    assert [driver.answers[name].num_cached_tokens for name in "abc"] == [0, 0, 8]


def test_case_12_the_same_id_twice_at_once_is_refused_and_the_first_goes_on():
    driver = Driver(make_engine())
    first = make_request("a", 5)
    driver.add(first)
    driver.step()
    with pytest.raises(ValueError, match="Request id 'a' is in use"):
        driver.engine.add_request(make_request("a", 9))
    driver.run()
    assert_exact(driver, first)


@pytest.mark.parametrize("mid_step", [False, True])
def test_case_12_abort_then_resubmit_the_same_id(mid_step: bool):
    driver = Driver(make_engine())
    driver.add(make_request("a", 5))
    driver.step()
    if mid_step:
        driver.begin()
    driver.engine.abort_requests(["a"])
    second = make_request("a", [60, 61, 62, 63, 64, 65, 66])
    driver.add(second)  # its answer starts anew
    if mid_step:
        driver.end()
        assert driver.answers["a"].token_ids == []  # the late token was the first one's
    driver.run()
    assert_exact(driver, second)


def test_case_12_an_id_can_be_used_again_after_its_request_ended():
    driver = Driver(make_engine())
    for n in (5, 7):
        request = make_request("a", n)
        driver.add(request)
        driver.run()
        assert_exact(driver, request)


@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_case_15_prompts_around_max_model_len(max_tokens: int | None):
    engine = make_engine(max_model_len=16)
    longest = make_request("longest", 15, max_tokens=max_tokens)
    answer = generate(engine, longest)["longest"]
    assert (len(answer.token_ids), answer.finish_reason) == (1, FinishReason.LENGTH)
    assert answer.token_ids == oracle(engine, longest)[0]
    for n in (16, 17):
        with pytest.raises(ValueError, match=rf"The prompt has {n} tokens, but max_model_len=16 .* Shorten it to 15 tokens"):
            engine.add_request(make_request("a", n))
    check_all_free(engine)


def test_case_22_min_tokens_and_ignore_eos_with_a_list_of_end_tokens():
    engine = make_engine(echo={"vocab_size": 10})
    requests = [
        make_request(f"{kind}{i}", [i % 10, i // 10], max_tokens=12, eos_token_ids=(2, 7), **params)
        for i in range(30)
        for kind, params in {"min": {"min_tokens": 5, "ignore_eos": False}, "ignore": {"ignore_eos": True}}.items()
    ]
    driver = Driver(engine)
    driver.add(*requests)
    driver.run()
    assert_exact(driver, *requests)
    lengths = [len(a.token_ids) for name, a in driver.answers.items() if name.startswith("min")]
    assert min(lengths) > 5 and max(lengths) == 12
    assert all(len(a.token_ids) == 12 for name, a in driver.answers.items() if name.startswith("ignore"))
