"""BlockPool: who gets which block, what the free list remembers, and which block dies first."""

from __future__ import annotations

import pytest

from minivllm.core.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue]


def test_a_pool_of_n_blocks_gives_n_minus_1_and_never_the_null_block():
    pool = BlockPool(5)
    assert sorted(block.block_id for block in pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    assert pool.null_block.block_id == 0


def test_an_allocated_block_is_held_once():
    assert [block.ref_cnt for block in BlockPool(4).allocate(3)] == [1, 1, 1]


def test_allocating_more_than_is_free_says_both_numbers_and_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(ValueError, match=r"Cannot allocate 3 blocks: 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    assert pool.allocate(0) == []


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks=1 is too few"):
        BlockPool(1)


def test_freeing_a_block_twice_is_refused_by_its_number():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match=f"Block {block.block_id} is freed twice"):
        pool.free([block])


def test_a_block_without_a_hash_is_handed_out_again_first():
    pool = BlockPool(6)
    blocks = pool.allocate(2)  # blocks 1 and 2; 3, 4, 5 are free
    pool.free(reversed(blocks))
    assert free_ids(pool) == [1, 2, 3, 4, 5]


def test_a_block_with_a_hash_goes_to_the_back_and_keeps_it():
    pool = BlockPool(6)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], "h0")
    pool.free(reversed(blocks))
    assert free_ids(pool) == [2, 3, 4, 5, 1]
    assert pool.get_cached_block("h0") is blocks[0]


def test_the_tail_of_a_chain_is_evicted_before_its_head():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.publish(block, f"h{i}")
    pool.free(reversed(blocks))
    pool.allocate(1)
    assert [pool.get_cached_block(f"h{i}") is not None for i in range(3)] == [True, True, False]


def test_eviction_is_lazy_and_takes_the_least_recently_freed():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.publish(block, f"h{i}")
        pool.free([block])
    assert len(pool.cached_block_hash_to_block) == 3  # all free, all still there
    pool.touch([blocks[0]])
    pool.free([blocks[0]])  # used again: now the newest
    assert pool.allocate(1) == [blocks[1]]
    assert blocks[1].block_hash is None
    assert pool.get_cached_block("h1") is None


def test_touch_takes_a_free_block_out_of_the_middle_of_the_list():
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    for i, block in enumerate(blocks):
        pool.publish(block, i)
    pool.free(blocks)
    pool.touch([blocks[2]])
    assert free_ids(pool) == [1, 2, 4, 5]
    assert blocks[2].ref_cnt == 1
    assert [block.block_id for block in pool.allocate(4)] == [1, 2, 4, 5]


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, "h")
    pool.touch([block])
    pool.free([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (1, 1)
    pool.free([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (0, 2)


def test_the_first_block_published_under_a_hash_keeps_it():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, "h")
    pool.publish(second, "h")
    assert pool.get_cached_block("h") is first
    assert second.block_hash is None
    pool.unpublish(second)  # has nothing to lose, and takes nothing from the first
    assert pool.get_cached_block("h") is first


def test_an_unpublished_block_can_be_published_again():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, "h")
    pool.unpublish(block)
    assert pool.get_cached_block("h") is None
    pool.publish(block, "h")
    assert pool.get_cached_block("h") is block


def test_reset_prefix_cache_forgets_every_hash_and_frees_nothing_twice():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for i, block in enumerate(blocks):
        pool.publish(block, i)
    pool.free(blocks)
    assert pool.reset_prefix_cache()
    assert pool.cached_block_hash_to_block == {}
    assert all(block.block_hash is None for block in pool.blocks)
    assert pool.num_free_blocks == 3


def test_reset_prefix_cache_is_refused_while_a_block_is_in_use(caplog: pytest.LogCaptureFixture):
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish(block, "h")
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block("h") is block
    assert "1 blocks are in use" in caplog.text


def test_the_free_list_refuses_a_block_it_has_and_one_it_has_not():
    block, stranger = KVCacheBlock(1), KVCacheBlock(2)
    queue = FreeKVCacheBlockQueue([block])
    with pytest.raises(ValueError, match="Block 1 is in the free list already"):
        queue.append(block)
    with pytest.raises(ValueError, match="Block 2 is not in the free list"):
        queue.remove(stranger)
    queue.popleft()
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()
