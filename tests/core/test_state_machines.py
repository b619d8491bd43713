"""BlockPool and KVCacheManager beside slow obvious models of them: any calls, in any order. (The scheduler and the engine under
any load: test_engine_properties.py.) `make fuzz` searches for minutes; here it is seconds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.radix_cache import RadixKVCacheManager
from minivllm.core.request import Request
from minivllm.sampling_params import SamplingParams
from tests.core.harness import examples


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of free ids, front first; a count of holders; a name for each block that has one."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(1, num_blocks))
        self.holders = dict.fromkeys(range(1, num_blocks), 0)
        self.names: dict[int, str] = {}
        self.held: list[KVCacheBlock] = []  # a block as often as it is held

    @rule(n=st.integers(0, 9) | st.integers(1, 2))
    def allocate(self, n: int) -> None:
        if n > len(self.free):
            with pytest.raises(ValueError, match=f"Cannot allocate {n} blocks: {len(self.free)} of"):
                self.pool.allocate(n)
            return
        blocks = self.pool.allocate(n)
        assert [block.block_id for block in blocks] == self.free[:n]
        for block in blocks:
            self.free.remove(block.block_id)
            self.holders[block.block_id] = 1
            self.names.pop(block.block_id, None)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(1, 3))
    def let_go(self, data: st.DataObject, n: int) -> None:
        blocks = [self.held.pop(data.draw(st.integers(0, len(self.held) - 1))) for _ in range(min(n, len(self.held)))]
        self.pool.free(blocks)
        for block in blocks:
            self.holders[block.block_id] -= 1
            if self.holders[block.block_id] == 0:
                self.free.insert(len(self.free) if block.block_id in self.names else 0, block.block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), names=st.text("abcd", min_size=1, max_size=3))
    def publish(self, data: st.DataObject, names: str) -> None:
        for name in names:
            block = data.draw(st.sampled_from(self.held))
            self.pool.publish(block, name)
            if block.block_id not in self.names and name not in self.names.values():
                self.names[block.block_id] = name

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.unpublish(block)
        self.names.pop(block.block_id, None)

    @rule(name=st.sampled_from("abcd"))
    def hit(self, name: str) -> None:
        block = self.pool.get_cached_block(name)
        expected = next((i for i, other in self.names.items() if other == name), None)
        assert (block and block.block_id) == expected
        if block is not None:
            self.pool.touch([block])
            if self.holders[block.block_id] == 0:
                self.free.remove(block.block_id)
            self.holders[block.block_id] += 1
            self.held.append(block)

    @rule()
    def reset(self) -> None:
        in_use = any(self.holders.values())
        assert self.pool.reset_prefix_cache() is not in_use
        if not in_use:
            self.names.clear()

    @rule(i=st.integers(0, 8))
    def free_what_nobody_holds(self, i: int) -> None:
        block = self.pool.blocks[i % len(self.pool.blocks)]
        if self.holders.get(block.block_id, 0) == 0:
            with pytest.raises(ValueError, match="freed twice"):
                self.pool.free([block])

    @invariant()
    def is_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert [block.block_id for block in self.pool.free_block_queue] == self.free
        assert self.pool.num_free_blocks == len(self.free)
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks[1:]} == self.holders
        assert {b.block_id: b.block_hash for b in self.pool.blocks if b.block_hash is not None} == self.names
        assert self.pool.null_block.ref_cnt == 0


SIZE = 2
SHARED = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1]  # how prompts begin


class ManagerMachine(RuleBasedStateMachine):
    """The model: what token each slot of the cache holds, or None. A request's slots must hold its own tokens as far as it has
    computed, whoever computed them; a hit must be a hit because the tokens are there, and the longest there is."""

    KIND: type[KVCacheManager] = KVCacheManager

    @initialize(num_blocks=st.integers(5, 14), caching=st.sampled_from([True, True, True, False]), eagle=st.booleans())
    def start(self, num_blocks: int, caching: bool, eagle: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.eagle = eagle
        self.manager = self.KIND(self.pool, SIZE, 16, enable_caching=caching, use_eagle=eagle)
        self.slots: list[tuple[str | None, int] | None] = [None] * (num_blocks * SIZE)
        self.live: list[Request] = []
        self.num_seen = 0

    def slot(self, request: Request, position: int) -> int:
        return self.manager.get_block_ids(request)[position // SIZE] * SIZE + position % SIZE

    def compute(self, request: Request, n: int, hits: list[KVCacheBlock], lookahead: int) -> bool:
        """n tokens of the request in the step being planned. Its writes come before all reads, so its slots count as written;
        should it fail, they hold garbage."""
        before = [block.block_id for block in self.pool.free_block_queue]
        blocks = self.manager.allocate_slots(request, n, hits, lookahead)
        if blocks is None:
            assert [block.block_id for block in self.pool.free_block_queue] == before, "a refusal changed something"
            return False
        request.num_computed_tokens += len(hits) * SIZE + n
        request.num_in_flight_tokens += n
        for position in range(request.num_computed_tokens - n, min(request.num_computed_tokens, request.num_tokens)):
            self.slots[self.slot(request, position)] = (request.cache_salt, request.all_token_ids[position])
        return True

    @rule(
        shared=st.integers(0, 10),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        chunk=st.sampled_from([12, 12, 4, 1]),
        lookahead=st.integers(0, 3),
        salt=st.sampled_from([None, None, "a"]),
    )
    def admit(self, shared: int, own: list[int], chunk: int, lookahead: int, salt: str | None) -> None:
        tokens = [*SHARED[:shared], *own]
        request = Request(f"r{self.num_seen}", tokens, SamplingParams(), max_tokens=16, cache_salt=salt)
        self.num_seen += 1
        hits, num_cached = self.manager.get_computed_blocks(request)
        assert num_cached == len(hits) * SIZE < len(tokens)
        found = [self.slots[block.block_id * SIZE + i] for block in hits for i in range(SIZE)]
        assert found == [(salt, token) for token in tokens[:num_cached]], "a hit does not hold these tokens"
        if self.compute(request, min(chunk, len(tokens) - num_cached), hits, lookahead):
            self.live.append(request)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), n=st.integers(1, 4), drafts=st.integers(0, 2), lookahead=st.integers(0, 3))
    def go_on(self, data: st.DataObject, n: int, drafts: int, lookahead: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        left = request.num_tokens - request.num_computed_tokens
        room = 16 - 1 - request.num_computed_tokens
        self.all_come_back()
        if (n := min(n, left + drafts, room)) > 0 and request.num_computed_tokens < request.num_tokens:
            self.compute(request, n, [], lookahead)

    @rule()
    def all_come_back(self) -> None:
        """The step is done. Its drafts were wrong."""
        for request in self.live:
            request.num_in_flight_tokens = 0
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), token=st.integers(0, 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.all_come_back()
        if request.num_tokens < 15 and request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(token)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), n=st.integers(1, 2))
    def leave(self, data: st.DataObject, n: int) -> None:
        """Ended or preempted, between two steps."""
        self.all_come_back()
        for _ in range(min(n, len(self.live))):
            request = data.draw(st.sampled_from(self.live))
            self.manager.free(request)
            self.live.remove(request)

    @precondition(lambda self: any(request.num_in_flight_tokens for request in getattr(self, "live", ())))
    @rule()
    def the_step_fails(self) -> None:
        """Garbage stands where its tokens should, and nobody may find it. Who was admitted on top of blocks of that step was in
        the same step, and leaves with it."""
        for request in [r for r in self.live if r.num_in_flight_tokens]:
            for position in range(request.num_computed_tokens - request.num_in_flight_tokens, request.num_computed_tokens):
                self.slots[self.slot(request, position)] = None
            self.manager.free(request)
            self.live.remove(request)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        counted = dict.fromkeys(range(1, len(self.pool.blocks)), 0)
        for request in self.live:
            for block_id in self.manager.get_block_ids(request):
                counted[block_id] += 1
            for position in range(min(request.num_computed_tokens, request.num_tokens)):
                expected = (request.cache_salt, request.all_token_ids[position])
                assert self.slots[self.slot(request, position)] == expected, f"{request.request_id}: {position}"
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks[1:]} == counted
        assert self.pool.num_free_blocks == sum(n == 0 for n in counted.values())
        assert set(self.manager.req_to_blocks) == {r.request_id for r in self.live}


class RadixManagerMachine(ManagerMachine):
    KIND = RadixKVCacheManager


STEPS = settings(stateful_step_count=40, max_examples=examples(150))
TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = STEPS
TestKVCacheManager = ManagerMachine.TestCase
TestKVCacheManager.settings = STEPS
TestRadixKVCacheManager = RadixManagerMachine.TestCase
TestRadixKVCacheManager.settings = STEPS
