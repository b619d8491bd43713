"""KVCacheManager: when a new block is needed, what the prefix cache finds, and whose hashes can be believed."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.core.block_hash import hash_block
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.radix_cache import RadixKVCacheManager
from tests.core.harness import compute, core_request


@pytest.fixture(autouse=True, params=[KVCacheManager, RadixKVCacheManager])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[KVCacheManager]:
    """Every test here is about both prefix caches, unless it is about hashes."""
    monkeypatch.setitem(globals(), "KIND", request.param)
    return request.param  # type: ignore[no-any-return]


KIND: type[KVCacheManager] = KVCacheManager


def make_manager(num_blocks: int = 11, max_model_len: int = 40, **options: Any) -> KVCacheManager:
    kind = KVCacheManager if "hash_block" in options else KIND
    return kind(BlockPool(num_blocks), 4, max_model_len, **options)


# ---------------------------------------------------------------- allocate_slots


def test_a_block_is_taken_only_when_the_last_one_is_full():
    manager, request = make_manager(), core_request(20)
    assert compute(manager, request, 3) == [1]
    assert compute(manager, request, 1) == []  # fills block 1
    assert compute(manager, request, 1) == [2]
    assert compute(manager, request, 8) == [3, 4]
    assert manager.get_block_ids(request) == [1, 2, 3, 4]


def test_too_few_blocks_is_none_and_changes_nothing():
    manager = make_manager(num_blocks=3)
    request, other = core_request(12), core_request([9] * 4, "other")
    assert compute(manager, request, 4) == [1]
    assert manager.allocate_slots(request, 8) is None
    assert manager.get_block_ids(request) == [1]
    assert manager.block_pool.num_free_blocks == 1
    assert compute(manager, other, 4) == [2]
    assert manager.allocate_slots(core_request(4, "new"), 1) is None
    assert "new" not in manager.req_to_blocks


def test_lookahead_tokens_get_slots_but_never_beyond_max_model_len():
    manager, request = make_manager(max_model_len=12), core_request(8)
    assert [b.block_id for b in manager.allocate_slots(request, 4, num_lookahead_tokens=2) or []] == [1, 2]
    request.num_computed_tokens = 4
    assert [b.block_id for b in manager.allocate_slots(request, 4, num_lookahead_tokens=9) or []] == [3]


def test_slots_left_over_from_rejected_drafts_are_used_first():
    manager, request = make_manager(), core_request(4)
    assert compute(manager, request, 4 + 3) == [1, 2]
    request.num_computed_tokens = 5  # the drafts were wrong
    assert compute(manager, request, 3) == []


def test_cached_blocks_that_are_free_count_as_taken():
    """4 blocks, all free; a request that hits 2 of them and needs 3 more does not fit, though 4 are "free"."""
    manager = make_manager(num_blocks=5)
    first = core_request(9, "first")
    compute(manager, first, 9)
    manager.free(first)
    second = core_request([*range(8), *[7] * 12], "second")
    hits, _ = manager.get_computed_blocks(second)
    assert len(hits) == 2 and manager.block_pool.num_free_blocks == 4
    assert not manager.has_room(second, 17, hits)
    assert manager.allocate_slots(second, 9, hits) is None
    assert manager.has_room(second, 16, hits)


def test_allocating_never_evicts_the_blocks_just_hit():
    manager = make_manager(num_blocks=5)
    first = core_request(8, "first")
    compute(manager, first, 8)
    manager.free(first)
    second = core_request([*range(8), *[7] * 8], "second")
    hits, _ = manager.get_computed_blocks(second)
    assert compute(manager, second, 8) is not None
    assert manager.req_to_blocks["second"][:2] == hits
    assert len(set(manager.get_block_ids(second))) == 4


# ---------------------------------------------------------------- lookup


def test_a_prefix_is_found_up_to_the_first_difference():
    manager = make_manager()
    compute(manager, core_request(12, "first"), 12)
    assert len(manager.find_longest_cache_hit(core_request(13))) == 3
    assert len(manager.find_longest_cache_hit(core_request([*range(8), 99, *range(9, 13)]))) == 2
    assert manager.find_longest_cache_hit(core_request([99, *range(1, 13)])) == []


@pytest.mark.parametrize(("num_tokens", "num_hits"), [(4, 0), (5, 1), (7, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_always_computed(num_tokens: int, num_hits: int):
    manager = make_manager()
    compute(manager, core_request(12, "first"), 12)
    assert len(manager.find_longest_cache_hit(core_request(num_tokens))) == num_hits


def test_blocks_behind_a_gap_are_unreachable():
    manager = make_manager()
    first = core_request(12, "first")
    compute(manager, first, 12)
    manager.take_back(manager.req_to_blocks["first"][1])
    assert len(manager.find_longest_cache_hit(core_request(13))) == 1


def test_the_lookup_takes_nothing():
    manager = make_manager()
    first = core_request(8, "first")
    compute(manager, first, 8)
    manager.free(first)
    blocks, num_tokens = manager.get_computed_blocks(core_request(9))
    assert num_tokens == 8 and all(block.ref_cnt == 0 for block in blocks)
    assert manager.block_pool.num_free_blocks == 10


def test_a_request_that_needs_every_logit_skips_the_lookup():
    manager = make_manager()
    compute(manager, core_request(8, "first"), 8)
    assert manager.get_computed_blocks(core_request(9, skip_reading_prefix_cache=True)) == ([], 0)


def test_without_caching_nothing_is_hashed_published_or_found():
    def forbidden(*args: Any) -> Any:
        raise AssertionError("hashed")

    manager = make_manager(enable_caching=False, hash_block=forbidden)
    compute(manager, core_request(12, "first"), 12)
    assert manager.get_computed_blocks(core_request(13)) == ([], 0)
    assert manager.reset_prefix_cache()


def test_with_eagle_a_blocks_name_holds_the_token_after_it():
    """The head's layer has at each position the token after it, so the last block of a prompt has no name yet."""
    manager = make_manager(use_eagle=True)
    compute(manager, core_request(12, "first"), 12)
    assert [manager.get_computed_blocks(core_request(n))[1] for n in (13, 9, 5, 4)] == [8, 8, 4, 0]


def test_other_tenants_and_other_adapters_find_nothing():
    manager = make_manager()
    compute(manager, core_request(8, "first", cache_salt="a", lora_digest="d"), 8)
    assert len(manager.find_longest_cache_hit(core_request(9, cache_salt="a", lora_digest="d"))) == 2
    for fields in ({}, {"cache_salt": "a"}, {"lora_digest": "d"}, {"cache_salt": "b", "lora_digest": "d"}):
        assert manager.find_longest_cache_hit(core_request(9, **fields)) == []


# ---------------------------------------------------------------- publishing


def test_full_blocks_are_published_at_allocation():
    """So a request admitted to the same step can share them: a layer writes all keys and values before it reads any."""
    manager, request = make_manager(), core_request(12)
    manager.allocate_slots(request, 9)
    assert len(manager.find_longest_cache_hit(core_request(13, "second"))) == 2


def test_draft_tokens_are_never_published():
    manager, request = make_manager(), core_request(7)
    compute(manager, request, 7)
    request.spec_token_ids = [50, 51, 52, 53, 54]
    request.num_computed_tokens = 6
    manager.allocate_slots(request, 1 + 5)  # reaches over the ends of blocks 1 and 2
    assert request.num_published_blocks == 1
    request.all_token_ids.append(60)
    assert len(manager.find_longest_cache_hit(core_request([*range(7), 60, 61], "second"))) == 1


def test_a_block_filled_by_outputs_is_published_when_its_last_token_is_computed():
    manager, request = make_manager(), core_request(3)
    compute(manager, request, 3)
    request.all_token_ids.append(77)  # sampled, its KV not there yet
    assert manager.find_longest_cache_hit(core_request([0, 1, 2, 77, 5], "second")) == []
    compute(manager, request, 1)
    assert len(manager.find_longest_cache_hit(core_request([0, 1, 2, 77, 5], "second"))) == 1


def test_a_chunk_publishes_the_blocks_it_fills():
    manager, request = make_manager(), core_request(12)
    published = []
    for n in (3, 4, 5):
        compute(manager, request, n)
        published.append(request.num_published_blocks)
    assert published == [0, 1, 3]


def test_freeing_takes_back_the_hashes_of_a_step_that_has_not_come_back():
    manager, request = make_manager(), core_request(16)
    compute(manager, request, 8)
    manager.allocate_slots(request, 8)  # counted as in flight below, as the scheduler does
    request.num_computed_tokens, request.num_in_flight_tokens = 16, 8
    assert request.num_published_blocks == 4
    manager.free(request)
    assert len(manager.find_longest_cache_hit(core_request(17, "second"))) == 2
    assert manager.block_pool.num_free_blocks == 10


def test_freeing_keeps_cached_blocks_in_order_of_worth():
    """Hashed blocks at the back, the tail before the head; the block without a hash in front of all that is free."""
    manager = make_manager(num_blocks=7)
    request = core_request(10)
    compute(manager, request, 10)  # blocks 1, 2 full, 3 half
    manager.free(request)
    assert [block.block_id for block in manager.block_pool.free_block_queue] == [3, 4, 5, 6, 2, 1]


def test_freeing_a_request_that_holds_nothing_is_nothing():
    manager = make_manager()
    manager.free(core_request(4))
    assert manager.block_pool.num_free_blocks == 10


def test_usage_is_the_share_of_blocks_held():
    manager = make_manager()
    assert manager.usage == 0
    compute(manager, core_request(8), 8)
    assert manager.usage == pytest.approx(0.2)


def test_the_hash_function_is_the_one_given():
    manager = make_manager(hash_block=lambda parent, tokens, extra: (parent, *tokens))
    request = core_request(5)
    compute(manager, request, 5)
    assert request.block_hashes == [(None, 0, 1, 2, 3)] != [hash_block(None, [0, 1, 2, 3])]
