"""Scheduler.schedule(): who computes how much in a step, who gives way, who is let in. Block size 4; `n` is tokens a step."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from tests.core.harness import AheadScheduler, Driver, check_all_free, make_engine, make_request, oracle

pytestmark = pytest.mark.usefixtures("prefix_cache")


def start(num_blocks: int = 101, **config: Any) -> Driver:
    return Driver(make_engine(num_blocks, **config))


def running(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.engine.scheduler.running]


def waiting(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.engine.scheduler.waiting]


# ---------------------------------------------------------------- tokens of a step


def test_one_step_mixes_decodes_and_prompts_under_one_budget():
    driver = start(max_num_batched_tokens=16)
    driver.add(make_request("a", 5))
    assert driver.step().num_scheduled_tokens == {"a": 5}
    driver.add(make_request("b", 6), make_request("c", 20))
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 6, "c": 9}  # c's prompt is cut where the budget ends
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 11}


def test_the_running_come_first_in_the_order_they_were_admitted():
    driver = start(max_num_batched_tokens=8)
    driver.add(make_request("a", 12), make_request("b", 2))
    assert driver.step().num_scheduled_tokens == {"a": 8}
    assert list(driver.step().num_scheduled_tokens.items()) == [("a", 4), ("b", 2)]


def test_the_threshold_cuts_a_long_prompt_and_leaves_short_ones():
    driver = start(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    driver.add(make_request("a", 10), make_request("b", 3))
    assert driver.step().num_scheduled_tokens == {"a": 4, "b": 3}


def test_the_threshold_is_ignored_while_a_request_is_alone():
    driver = start(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    driver.add(make_request("a", 40))
    assert driver.step().num_scheduled_tokens == {"a": 16}
    driver.add(make_request("b", 40))
    assert driver.step().num_scheduled_tokens == {"a": 4, "b": 4}
    driver.engine.abort_requests(["b"])
    assert driver.step().num_scheduled_tokens == {"a": 16}


def test_the_last_position_is_sampled_but_never_computed():
    """max_model_len 8: tokens at positions 0 to 7, of which position 7 needs no KV. Drafts are cut by it."""
    driver = start(max_model_len=8, echo={"num_speculative_tokens": 5, "draft_accuracy": 1.0})
    driver.add(make_request("a", 5, max_tokens=None))
    assert driver.step().num_scheduled_tokens == {"a": 5}
    step = driver.step()
    assert step.num_scheduled_tokens == {"a": 2}  # positions 5 and 6: one token and one draft
    assert len(step.scheduled_spec_decode_tokens["a"]) == 1
    assert len(driver.answers["a"].token_ids) == 3


def test_num_computed_tokens_counts_at_schedule_time():
    driver = start()
    driver.add(make_request("a", 5))
    driver.begin()
    request = driver.engine.scheduler.requests["a"]
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens) == (5, 5, 5)
    driver.end()
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens) == (5, 0, 6)


def test_a_request_with_nothing_to_compute_does_not_hold_up_the_next():
    """Scheduled ahead of its result, a has no known token left: n == 0 means continue, not break."""
    driver = start()
    driver.add(make_request("a", 5), make_request("b", 70))
    driver.begin()  # a: 5, b: 59 of 70
    driver.begin()
    assert driver.last.num_scheduled_tokens == {"b": 11}
    driver.end()
    driver.end()
    driver.run()


def test_a_token_in_flight_counts_as_known_when_steps_are_scheduled_ahead():
    driver = Driver(make_engine(deferred=True, components={"scheduler": AheadScheduler}))
    request = make_request("a", 5, max_tokens=4)
    driver.add(request)
    for n in (5, 1, 1):
        driver.begin()
        assert driver.last.num_scheduled_tokens == {"a": n}
    state = driver.engine.scheduler.requests["a"]
    assert (state.num_output_placeholders, state.num_tokens, state.num_computed_tokens) == (3, 5, 7)
    for left in (2, 1, 0):
        driver.end()
        assert state.num_output_placeholders == left
    driver.run()
    assert driver.answers["a"].token_ids == oracle(driver.engine, request)[0]


def test_a_prefill_chunk_yields_no_token_and_no_news():
    driver = start(max_num_batched_tokens=8)
    driver.add(make_request("a", 20))
    driver.engine.begin_step()
    assert driver.engine.end_step() == []
    assert driver.engine.scheduler.requests["a"].num_tokens == 20


def test_without_chunked_prefill_a_prompt_goes_in_whole_or_waits():
    driver = start(max_num_batched_tokens=16, enable_chunked_prefill=False)
    driver.add(make_request("a", 10), make_request("b", 10), make_request("c", 2))
    assert driver.step().num_scheduled_tokens == {"a": 10}  # b does not fit, and c does not overtake it
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 10, "c": 2}


def test_without_chunked_prefill_drafts_are_cut_by_the_budget_not_refused():
    driver = start(max_num_batched_tokens=8, max_num_seqs=2, enable_chunked_prefill=False, echo={"num_speculative_tokens": 6})
    driver.add(make_request("a", 2, max_tokens=9), make_request("b", 2, max_tokens=9))
    driver.step()
    assert driver.step().num_scheduled_tokens == {"a": 4, "b": 4}  # both could have computed 5: the budget is shared out
    driver.run()


# ---------------------------------------------------------------- the step as the worker is told


def test_a_new_request_is_told_whole_and_a_running_one_by_difference():
    driver = start(max_num_batched_tokens=6, max_num_seqs=2)
    driver.add(make_request("a", [5, 6, 7, 8, 9, 10, 11], seed=3))
    (new,) = driver.step().scheduled_new_reqs
    assert (new.req_id, new.token_ids, new.num_prompt_tokens) == ("a", [5, 6, 7, 8, 9, 10, 11], 7)
    assert (new.block_ids, new.num_computed_tokens) == ([1, 2], 0)
    step = driver.step()
    assert step.scheduled_new_reqs == []
    assert step.scheduled_cached_reqs.req_ids == ["a"]
    assert step.scheduled_cached_reqs.new_block_ids == [[]]
    assert step.scheduled_cached_reqs.num_computed_tokens == [6]
    driver.step()
    assert driver.step().scheduled_cached_reqs.new_block_ids == [[3]]  # its ninth token


def test_the_worker_is_told_once_who_is_finished():
    driver = start()
    driver.add(make_request("a", 3, max_tokens=1), make_request("b", 3, max_tokens=3))
    driver.step()
    assert driver.step().finished_req_ids == ["a"]
    assert driver.step().finished_req_ids == []


def test_step_ids_count_up():
    driver = start()
    driver.add(make_request("a", 3))
    assert [driver.step().step_id for _ in range(3)] == [0, 1, 2]


# ---------------------------------------------------------------- preemption


def test_fcfs_preempts_the_tail_and_puts_it_first_in_line():
    """6 blocks. a, b, c hold 2 each and are full: a needs a third, so c, the last to come, gives way."""
    driver = start(num_blocks=7)
    driver.add(*(make_request(name, 7, max_tokens=10) for name in "abc"))
    driver.step()  # 7 tokens each
    driver.step()  # the eighth fills the blocks
    driver.add(make_request("d", 2))
    step = driver.step()
    assert step.preempted_req_ids == ["c"]
    assert step.num_scheduled_tokens == {"a": 1, "b": 1}
    assert (running(driver), waiting(driver)) == (["a", "b"], ["c", "d"])


def test_several_victims_of_one_step_keep_their_order_in_the_queue():
    driver = start(num_blocks=9, max_num_batched_tokens=32)
    driver.add(make_request("a", 17, max_tokens=9), make_request("b", 3), make_request("c", 3), make_request("d", 3))
    driver.step()
    scheduler = driver.engine.scheduler
    scheduler.preempt(scheduler.pick_victim())
    scheduler.preempt(scheduler.pick_victim())
    assert waiting(driver) == ["c", "d"]
    driver.run()


def test_a_preempted_request_keeps_its_outputs_and_loses_its_kv_and_drafts():
    driver = start(echo={"num_speculative_tokens": 3})
    driver.add(make_request("a", 7, max_tokens=10))
    driver.step()
    request = driver.engine.scheduler.requests["a"]
    outputs = request.output_token_ids
    assert request.spec_token_ids
    driver.engine.scheduler.preempt(request)
    assert request.output_token_ids == outputs != []
    assert (request.num_computed_tokens, request.spec_token_ids, request.num_preemptions) == (0, [], 1)
    assert request.status is RequestStatus.PREEMPTED
    assert driver.engine.scheduler.kv_cache_manager.get_block_ids(request) == []
    assert driver.engine.scheduler.kv_cache_manager.usage == 0


def test_priority_preempts_the_lowest_priority_then_the_latest_arrival():
    driver = start(scheduling_policy="priority")
    for name, priority, arrival in [("a", 1, 0.0), ("b", 2, 1.0), ("c", 2, 2.0), ("d", 0, 3.0)]:
        driver.add(make_request(name, 3, priority=priority, arrival_time=arrival))
    driver.step()
    scheduler = driver.engine.scheduler
    order = []
    while scheduler.running:
        order.append(scheduler.pick_victim().request_id)
        scheduler.preempt(scheduler.pick_victim())
    assert order == ["c", "b", "a", "d"]
    assert waiting(driver) == ["d", "a", "b", "c"]


def test_nobody_is_admitted_in_a_step_that_preempted():
    driver = start(num_blocks=7)
    driver.add(*(make_request(name, 7, max_tokens=10) for name in "abc"))
    driver.step()
    driver.step()
    driver.add(make_request("d", 1))
    assert driver.step().scheduled_new_reqs == []  # though c's two blocks are free now, and d needs one
    assert driver.last.preempted_req_ids == ["c"]


def test_a_victim_already_in_the_step_is_taken_out_of_it():
    """Priority, 5 blocks, running [low, high] in the order of admission. In one step low computes its token 11, in its last
    block's last slot, and then high needs a block."""
    driver = start(num_blocks=6, scheduling_policy="priority")
    driver.add(make_request("low", 10, max_tokens=9, priority=5))
    driver.step()
    driver.add(make_request("high", 8, max_tokens=9, priority=0))
    assert driver.step().num_scheduled_tokens == {"low": 1, "high": 8}
    step = driver.step()
    assert step.preempted_req_ids == ["low"]
    assert (step.num_scheduled_tokens, step.total_num_scheduled_tokens) == ({"high": 1}, 1)
    cached = step.scheduled_cached_reqs
    assert (cached.req_ids, len(cached.new_block_ids), cached.num_computed_tokens) == (["high"], 1, [8])
    driver.run()


def test_the_drafts_of_a_victim_already_in_the_step_are_dropped():
    driver = start(num_blocks=6, scheduling_policy="priority", echo={"num_speculative_tokens": 2, "draft_accuracy": 0.0})
    driver.add(make_request("low", 8, max_tokens=9, priority=5))
    driver.step()
    driver.add(make_request("high", 6, max_tokens=9, priority=0))
    assert driver.step().scheduled_spec_decode_tokens.keys() == {"low"}
    step = driver.step()
    assert step.preempted_req_ids == ["low"]
    assert step.scheduled_spec_decode_tokens.keys() == step.num_scheduled_tokens.keys() == {"high"}
    driver.run()


def test_the_budget_of_an_undone_victim_goes_to_those_behind_it():
    """Budget 6, 8 blocks, at most 4 tokens of a long prompt. low's last 2 tokens are in the step when high takes its
    blocks: mid gets 4 tokens, not the 3 that would be left."""
    driver = start(
        num_blocks=9, scheduling_policy="priority", max_num_batched_tokens=6, max_num_seqs=3, long_prefill_token_threshold=4
    )
    driver.add(make_request("low", 24, max_tokens=2, priority=9))
    assert driver.step().num_scheduled_tokens == {"low": 6}
    driver.add(make_request("high", 1, max_tokens=9, priority=0), make_request("mid", 8, priority=1))
    for _ in range(4):
        assert driver.step().num_scheduled_tokens == {"low": 4, "high": 1, "mid": 1}
    assert driver.step().num_scheduled_tokens == {"high": 1, "mid": 4}
    assert driver.last.preempted_req_ids == ["low"]
    driver.run()


def test_the_hashes_an_undone_victim_published_in_this_step_are_taken_back():
    """6 blocks. low's 4 tokens complete its fourth block, which is published; then high takes low's blocks, so the four
    are never computed. Blocks computed in earlier steps stay in the cache."""
    driver = start(num_blocks=7, scheduling_policy="priority", max_num_batched_tokens=9, long_prefill_token_threshold=4)
    driver.add(make_request("low", 23, max_tokens=1, priority=5))
    assert driver.step().num_scheduled_tokens == {"low": 9}
    driver.add(make_request("high", 4, max_tokens=9, priority=0))
    assert driver.step().num_scheduled_tokens == {"low": 4, "high": 4}
    low = driver.engine.scheduler.requests["low"]
    assert low.num_published_blocks == 3
    assert driver.step().preempted_req_ids == ["low"]
    assert len(driver.engine.scheduler.kv_cache_manager.find_longest_cache_hit(low)) == 3
    driver.run()


def test_a_request_that_is_its_own_victim_ends_the_running_loop():
    """Priority: low is first in the list and lowest; out of blocks, it gives way to itself, and the step ends there."""
    driver = start(num_blocks=7, scheduling_policy="priority")
    driver.add(make_request("low", 11, max_tokens=9, priority=5))
    driver.step()
    driver.add(make_request("high", 11, max_tokens=9, priority=0))
    driver.step()
    low, high = (driver.engine.scheduler.requests[name] for name in ("low", "high"))
    assert (low.num_tokens, high.num_tokens) == (13, 12)  # low needs its fourth block now, and there is none
    assert driver.begin() is False
    assert driver.last.preempted_req_ids == ["low"]
    assert driver.last.num_scheduled_tokens == {}
    driver.end()
    assert driver.step().num_scheduled_tokens == {"high": 1}  # the next step goes on without it
    driver.run()
    assert driver.num_begun < 60


def test_fcfs_never_preempts_the_oldest_while_others_run():
    driver = start(num_blocks=9, max_num_seqs=4)
    driver.add(*(make_request(name, 6, max_tokens=20) for name in "abcd"))
    while "a" in driver.engine.scheduler.requests:
        assert "a" not in driver.step().preempted_req_ids
    driver.run()
    assert driver.num_preemptions > 0


# ---------------------------------------------------------------- admission


def test_no_more_than_max_num_seqs_run():
    driver = start(max_num_seqs=2)
    driver.add(*(make_request(name, 3, max_tokens=2) for name in "abc"))
    driver.step()
    assert (running(driver), waiting(driver)) == (["a", "b"], ["c"])


def test_a_prompt_starts_only_with_room_for_all_of_it_though_a_chunk_would_fit():
    driver = start(num_blocks=9, max_num_batched_tokens=8)
    driver.add(make_request("a", 13, max_tokens=12), make_request("b", 20))
    driver.step()
    driver.step()  # a: 4 of 8 blocks; b needs 5
    driver.step()
    assert (running(driver), waiting(driver)) == (["a"], ["b"])
    driver.run()


def test_nobody_overtakes_the_head_of_the_line():
    driver = start(num_blocks=9)
    driver.add(make_request("a", 13, max_tokens=3), make_request("b", 20), make_request("c", 1))
    driver.step()
    assert (running(driver), waiting(driver)) == (["a"], ["b", "c"])
    driver.run()


def test_a_resumed_request_needs_room_for_its_outputs_too():
    driver = start(num_blocks=7, enable_prefix_caching=False)
    driver.add(make_request("a", 7, max_tokens=16), make_request("b", 3, max_tokens=16))
    for _ in range(7):
        driver.step()
    scheduler = driver.engine.scheduler
    b = scheduler.requests["b"]
    assert driver.last.preempted_req_ids == ["b"]
    assert (b.num_tokens, scheduler.kv_cache_manager.block_pool.num_free_blocks) == (9, 2)
    assert not scheduler.can_admit(b, [])  # its prompt is one block, but it is three by now
    driver.step()
    assert (running(driver), waiting(driver)) == (["a"], ["b"])
    driver.run()


def test_blocked_requests_are_skipped_and_keep_their_place():
    class Picky(Scheduler):
        blocked: frozenset[str] = frozenset("bd")

        def is_blocked(self, request: Request) -> bool:
            return request.request_id in self.blocked

    for policy in ("fcfs", "priority"):
        driver = start(components={"scheduler": Picky}, scheduling_policy=policy, max_num_seqs=3)
        driver.add(*(make_request(name, 3, max_tokens=2) for name in "abcdef"))
        driver.step()
        assert (running(driver), waiting(driver)) == (["a", "c", "e"], ["b", "d", "f"])
        driver.engine.scheduler.blocked = frozenset()
        driver.run()


def test_tokens_are_counted_after_the_prefix_lookup():
    driver = start(max_num_batched_tokens=16)
    driver.add(make_request("a", [*range(50, 62)], max_tokens=3))
    driver.run()
    driver.add(make_request("b", [*range(50, 62), *range(80, 90)]))
    step = driver.step()
    assert step.num_scheduled_tokens == {"b": 10}  # not 16: 12 of its 22 tokens are there
    assert step.scheduled_new_reqs[0].num_computed_tokens == 12


def test_requests_of_one_step_share_blocks_that_are_computed_in_it():
    driver = start()
    requests = [make_request(name, [*range(50, 62), 70 + i]) for i, name in enumerate("abc")]
    driver.add(*requests)
    assert driver.step().num_scheduled_tokens == {"a": 13, "b": 1, "c": 1}
    answers = driver.run()
    assert all(answers[r.request_id].token_ids == oracle(driver.engine, r)[0] for r in requests)


def test_the_cached_token_count_is_that_of_the_first_admission():
    driver = start()
    request = make_request("a", [*range(50, 59)], max_tokens=6)
    driver.add(request)
    driver.step()
    driver.engine.scheduler.preempt(driver.engine.scheduler.requests["a"])
    assert driver.step().preempted_req_ids == ["a"]
    step = driver.step()
    assert step.scheduled_new_reqs[0].num_computed_tokens == 8  # its own blocks, found again
    assert driver.run()["a"].num_cached_tokens == 0
    driver.add(make_request("b", [*range(50, 59)]))
    assert driver.run()["b"].num_cached_tokens == 8


def test_admission_with_lookahead_that_does_not_fit_waits():
    driver = start(num_blocks=4)
    driver.engine.scheduler.num_lookahead_tokens = 4
    driver.add(make_request("a", 3, max_tokens=2), make_request("b", 3, max_tokens=2))
    driver.step()  # a takes 2 blocks: 3 tokens, 4 of lookahead; b fits by itself, but not with its lookahead
    assert (running(driver), waiting(driver)) == (["a"], ["b"])
    driver.run()


def test_a_request_under_fcfs_that_asks_for_a_priority_is_refused():
    with pytest.raises(ValueError, match='priority=1 needs scheduling_policy="priority"'):
        start().add(make_request("a", 3, priority=1))


def test_priority_is_served_best_first_and_does_not_interrupt_the_running():
    driver = start(scheduling_policy="priority", max_num_seqs=1)
    driver.add(make_request("a", 3, max_tokens=2, priority=5))
    driver.step()
    driver.add(make_request("b", 3, max_tokens=2, priority=2), make_request("c", 3, max_tokens=2, priority=1))
    order = []
    while driver.engine.has_unfinished_requests():
        order += [r for r in driver.step().num_scheduled_tokens if r not in order]
    assert order == ["a", "c", "b"]
    check_all_free(driver.engine)


def test_longest_prefix_uses_what_is_cached_before_it_is_evicted():
    """Three documents, two questions each, asked in turns; the pool holds one document and a half. First come, first served
    finds each one evicted; the cache-aware order asks both questions while it is there. Nobody's answer changes."""
    found = {}
    for policy in ("fcfs", "longest_prefix"):
        driver = start(num_blocks=10, scheduling_policy=policy, max_num_seqs=1)
        requests = [
            make_request(f"{document}{question}", [100 * document + i for i in range(20)] + [question] * 3, 1)
            for question in (7, 8)
            for document in (1, 2, 3)
        ]
        driver.add(*requests)
        answers = driver.run()
        assert all(answers[r.request_id].token_ids == oracle(driver.engine, r)[0] for r in requests)
        found[policy] = [answers[r.request_id].num_cached_tokens for r in requests]
    assert found == {"fcfs": [0, 0, 0, 0, 0, 0], "longest_prefix": [0, 0, 0, 20, 20, 20]}
