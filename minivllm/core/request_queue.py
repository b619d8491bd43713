"""The queue of waiting requests, one class a policy. Given ready-made to the labs, which decide *when* to push and pop.

Ten thousand may wait, so nothing here is O(n) in a step: not the head, not a push at either end, not an abort in the middle.
May not know blocks, budgets, or torch.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from minivllm.core.request import Request


class RequestQueue(Protocol):
    """What the scheduler needs of a queue of waiting requests."""

    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def prepend(self, request: Request) -> None:
        """One that has waited before: preempted, or skipped in this step."""
        ...

    def peek(self) -> Request:
        """The next one, left in the queue. Raises IndexError when empty."""
        ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None:
        """One that was aborted. Raises KeyError if it is not here."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order they would be popped. O(n log n) at worst: for people and tests."""
        ...


class FCFSRequestQueue:
    """First come, first served; one that was preempted has come before all who wait, and goes to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()  # a deque that can also lose its middle

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        for request in self._requests.values():
            return request
        raise IndexError("The waiting queue is empty.")

    def pop(self) -> Request:
        if not self._requests:
            raise IndexError("The waiting queue is empty.")
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))


class PriorityRequestQueue:
    """Lowest (priority, arrival) first: a heap. Its order is its own, so a preempted request finds its place by itself.

    A heap cannot lose its middle cheaply: a removed request stays as a dead entry that `peek` drops when it surfaces. When
    more are dead than alive the heap is rebuilt, which costs O(1) per removal on average and bounds the memory.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []  # keys are unique, so requests are never compared
        self._alive: dict[int, Request] = {}  # by arrival_index

    def add(self, request: Request) -> None:
        self._alive[request.arrival_index] = request
        heapq.heappush(self._heap, (request.sort_key, request))

    prepend = add

    def peek(self) -> Request:
        while self._heap and self._heap[0][1].arrival_index not in self._alive:
            heapq.heappop(self._heap)
        if not self._heap:
            raise IndexError("The waiting queue is empty.")
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._alive[request.arrival_index]
        return request

    def remove(self, request: Request) -> None:
        del self._alive[request.arrival_index]
        if len(self._heap) > 2 * len(self._alive):
            self._heap = [(r.sort_key, r) for r in self._alive.values()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._alive.values(), key=lambda r: r.sort_key))


class LongestPrefixRequestQueue(FCFSRequestQueue):
    """Of those who have waited longest, the one with the most tokens in the prefix cache, so that what is cached is used before
    it is evicted; who came first decides between equals. This order is ours; vLLM has none like it, SGLang's name for it is
    longest prefix match.

    Two bounds. Only the first WINDOW are looked up, so that ten thousand waiting cost no more than a few. And whoever is first
    in line is passed over MAX_OVERTAKES times at most, so everybody moves up, and is served. One who was preempted is first in
    line and never passed over: its tokens were paid for.
    """

    WINDOW = 32
    MAX_OVERTAKES = 64

    def __init__(self, num_cached_tokens: Callable[[Request], int]) -> None:
        super().__init__()
        self._num_cached_tokens = num_cached_tokens
        self._next: Request | None = None  # who was peeked at: the cache may change before the pop, and the order with it
        self._first: Request | None = None  # who was first in line at the last pop, and
        self._num_overtakes = 0  # how often it has been passed over

    def peek(self) -> Request:
        self._next = first = super().peek()
        if first.num_preemptions == 0 and (first is not self._first or self._num_overtakes < self.MAX_OVERTAKES):
            window = islice(self._requests.values(), self.WINDOW)
            self._next = max(window, key=self._num_cached_tokens)  # the first of equals
        return self._next

    def pop(self) -> Request:
        first, request = super().peek(), self._next or self.peek()
        if request is not first:
            self._num_overtakes = self._num_overtakes + 1 if first is self._first else 1
        self._first = first
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._next = None


def create_request_queue(policy: str, num_cached_tokens: Callable[[Request], int]) -> RequestQueue:
    """`policy` is "fcfs", "priority" or "longest_prefix", which asks `num_cached_tokens` of waiting requests."""
    if policy == "longest_prefix":
        return LongestPrefixRequestQueue(num_cached_tokens)
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
