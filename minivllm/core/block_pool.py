"""BlockPool: which blocks of the KV cache are free, in use, or free but still worth something.
Built in Lab 04 (`allocate`, `free`) and Lab 07 (`free`, `touch` with a prefix cache). May not know requests, tokens, or torch.

A block is in one of three states. Nothing is ever erased: a hash is taken away only when its block is handed out again.

                  allocate                          free, hashed
    free, no hash ---------> in use (ref_cnt >= 1) --------------> free, hashed: "cached"
         ^                     |            ^                         |        |
         '--- free, no hash ---'            '-------- touch (hit) ----'        | allocate evicts it: the hash goes,
                                                                               v the block is in use by another
    free list   front [ no hash | no hash | cached, oldest | ... | cached, newest ] back
                 ^ next to be handed out                              freed last ^
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

logger = logging.getLogger("minivllm")


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """`block_size` token slots of KV, the same in every layer. `block_hash` is set while the block can be found in the
    prefix cache. The two links are the free list's, None outside it: a block can leave the middle of the list without a
    search."""

    block_id: int
    ref_cnt: int = 0
    block_hash: Hashable | None = None
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False)
    next_free_block: KVCacheBlock | None = field(default=None, repr=False)


class FreeKVCacheBlockQueue:
    """A doubly linked list of the free blocks, threaded through the blocks themselves; every operation is O(1).

        head <-> block <-> block <-> ... <-> tail          head and tail are sentinels: no end is a special case

    A deque would do for Lab 04. It stops doing when a cache hit must take a block out of the *middle*.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self.num_free_blocks = 0
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free_block, self._tail.prev_free_block = self._tail, self._head
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Take the block at the front, the one least worth keeping. Raises ValueError when the list is empty."""
        block = self._head.next_free_block
        if block is None or block is self._tail:
            raise ValueError("No free blocks.")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise ValueError(f"Block {block.block_id} is not in the free list.")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back: it is handed out last."""
        assert self._tail.prev_free_block is not None
        self._link(self._tail.prev_free_block, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the front: it is handed out next."""
        assert self._head.next_free_block is not None
        self._link(self._head, block, self._head.next_free_block)

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next_free_block is not None:
            raise ValueError(f"Block {block.block_id} is in the free list already.")
        block.prev_free_block, block.next_free_block = before, after
        before.next_free_block = after.prev_free_block = block
        self.num_free_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block


class BlockPool:
    """`num_blocks` blocks, of which block 0, the null block, is nobody's: padding is written there, so N blocks serve N - 1.

    A replacement needs `allocate`, `free` and `num_free_blocks`; one with the capability "caching" also `touch`,
    `get_cached_block`, `publish`, `unpublish` and `reset_prefix_cache`.
    """

    capabilities = frozenset({"allocate", "caching"})

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is too few: block 0 is the null block, so at least 2 are needed.")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block: dict[Hashable, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now. Cached ones count: they are free until someone touches them."""
        return self.free_block_queue.num_free_blocks

    def allocate(self, n: int) -> list[KVCacheBlock]:
        """Hand out n blocks from the front of the free list, evicting what they cached. Raises ValueError when fewer
        are free; then nothing is taken."""
        if n > self.num_free_blocks:
            raise ValueError(f"Cannot allocate {n} blocks: {self.num_free_blocks} of {len(self.blocks) - 1} are free.")
        blocks = [self.free_block_queue.popleft() for _ in range(n)]
        for block in blocks:
            self.unpublish(block)
            block.ref_cnt = 1
        return blocks

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of blocks, in the order they should be evicted. A block that nobody holds any more is free: at the
        *back* of the list if its hash may still be hit, at the *front* if not, so that no cached block dies while a
        worthless one is free.

        A request passes its blocks in reverse, tail first: a chain is found from its start, so its tail is worth least.
        """
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"Block {block.block_id} is freed twice: its ref_cnt is {block.ref_cnt}.")
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if block.block_hash is None:
                self.free_block_queue.prepend(block)
            else:
                self.free_block_queue.append(block)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks found in the prefix cache. One that was free leaves the free list, so that it cannot be evicted."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def get_cached_block(self, block_hash: Hashable) -> KVCacheBlock | None:
        return self.cached_block_hash_to_block.get(block_hash)

    def publish(self, block: KVCacheBlock, block_hash: Hashable) -> None:
        """Let a full block be found by its hash. If another block has it already (the last block of a prompt is recomputed even
        when cached), that one keeps it and this one stays nameless: block tables only grow, so the two cannot be merged."""
        if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:
            block.block_hash = block_hash
            self.cached_block_hash_to_block[block_hash] = block

    def unpublish(self, block: KVCacheBlock) -> None:
        """Take the block's hash away, if it has one: it is reused, or was never computed."""
        if block.block_hash is not None:
            del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None

    def reset_prefix_cache(self) -> bool:
        """Forget every hash (after the weights changed, or between benchmarks). Refused, returning False, while any
        block is in use: its holder would publish more blocks computed on top of the old ones."""
        if (num_used := len(self.blocks) - 1 - self.num_free_blocks) > 0:
            logger.warning("The prefix cache is not reset: %d blocks are in use. Wait until no request is running.", num_used)
            return False
        for block in self.cached_block_hash_to_block.values():
            block.block_hash = None
        self.cached_block_hash_to_block.clear()
        return True
