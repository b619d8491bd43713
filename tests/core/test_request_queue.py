"""The waiting queues: their order, and that neither a push, a pop nor an abort looks at all who wait."""

from __future__ import annotations

import pytest

from minivllm.core.request import Request
from minivllm.core.request_queue import (
    FCFSRequestQueue,
    LongestPrefixRequestQueue,
    PriorityRequestQueue,
    create_request_queue,
)
from minivllm.sampling_params import SamplingParams


def make(name: str, index: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    return Request(name, [1], SamplingParams(), max_tokens=1, priority=priority, arrival_time=arrival_time, arrival_index=index)


def drain(queue: FCFSRequestQueue | PriorityRequestQueue) -> str:
    return "".join(queue.pop().request_id for _ in range(len(queue)))


def test_fcfs_serves_in_the_order_of_arrival_and_the_preempted_first():
    queue = FCFSRequestQueue()
    for i, name in enumerate("abc"):
        queue.add(make(name, i))
    queue.prepend(make("y", 8))
    queue.prepend(make("x", 7))
    assert [r.request_id for r in queue] == list("xyabc")
    assert queue.peek().request_id == "x"
    assert drain(queue) == "xyabc"


def test_priority_serves_the_lowest_value_first_then_who_came_earlier():
    queue = PriorityRequestQueue()
    for i, (name, priority, arrival) in enumerate([("d", 2, 0.0), ("c", 1, 5.0), ("b", 1, 4.0), ("a", 0, 9.0), ("e", 2, 0.0)]):
        queue.add(make(name, i, priority, arrival))
    assert [r.request_id for r in queue] == list("abcde")
    assert drain(queue) == "abcde"


def test_a_preempted_request_finds_its_place_in_the_priority_queue():
    queue = PriorityRequestQueue()
    queue.add(make("c", 2, priority=1))
    queue.add(make("a", 0, priority=0))
    queue.prepend(make("b", 1, priority=1))
    assert drain(queue) == "abc"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix"])
def test_an_aborted_request_leaves_wherever_it_stands(policy: str):
    queue = create_request_queue(policy, lambda request: 0)
    requests = [make(name, i) for i, name in enumerate("abcde")]
    for request in requests:
        queue.add(request)
    for i, first, left in [(2, "a", 4), (0, "b", 3), (4, "b", 2)]:
        queue.remove(requests[i])
        assert (queue.peek().request_id, len(queue)) == (first, left)
    assert [r.request_id for r in queue] == ["b", "d"]
    with pytest.raises(KeyError):
        queue.remove(requests[0])
    assert [queue.pop().request_id for _ in range(2)] == ["b", "d"]
    assert not queue
    for ask in (queue.peek, queue.pop):
        with pytest.raises(IndexError, match="waiting queue is empty"):
            ask()


def test_the_dead_entries_of_the_heap_never_outnumber_the_living():
    queue = PriorityRequestQueue()
    requests = [make(str(i), i) for i in range(1000)]
    for request in requests:
        queue.add(request)
    for request in requests[5:]:
        queue.remove(request)
        assert len(queue._heap) <= 2 * len(queue) + 1
    assert drain(queue) == "01234"


def test_longest_prefix_serves_who_has_most_cached_and_equals_in_the_order_of_arrival():
    queue = LongestPrefixRequestQueue(lambda request: {"c": 8, "d": 16, "e": 16}.get(request.request_id, 0))
    for i, name in enumerate("abcde"):
        queue.add(make(name, i))
    assert drain(queue) == "decab"


def test_longest_prefix_pops_whom_it_showed_though_the_cache_has_changed():
    cached = {"b": 8}
    queue = LongestPrefixRequestQueue(lambda request: cached.get(request.request_id, 0))
    for i, name in enumerate("abc"):
        queue.add(make(name, i))
    assert queue.peek().request_id == "b"
    cached["c"] = 16
    assert drain(queue) == "bca"


def test_longest_prefix_passes_nobody_over_for_ever():
    """ "a" has nothing cached and is first in line; somebody with more comes after every pop."""
    queue = LongestPrefixRequestQueue(lambda request: 0 if request.request_id == "a" else 8)
    queue.add(make("a", 0))
    order = []
    for i in range(1, 200):
        queue.add(make(str(i), i))
        order.append(queue.pop().request_id)
    assert order.index("a") == queue.MAX_OVERTAKES


def test_longest_prefix_serves_a_preempted_request_first_though_others_have_more_cached():
    queue = LongestPrefixRequestQueue(lambda request: 0 if request.request_id == "p" else 8)
    queue.add(make("a", 0))
    queue.prepend(preempted := make("p", 1))
    preempted.num_preemptions = 1
    assert drain(queue) == "pa"


def test_longest_prefix_looks_at_a_few_however_many_wait():
    asked: list[str] = []
    queue = LongestPrefixRequestQueue(lambda request: asked.append(request.request_id) or 0)  # type: ignore[func-returns-value]
    for i in range(10_000):
        queue.add(make(str(i), i))
    queue.peek()
    assert len(asked) == queue.WINDOW
