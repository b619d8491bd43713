# expect: still has a holder (ref_cnt 1): it is not free yet
from collections import deque

from minivllm.core.block_pool import KVCacheBlock


class BlockPool:
    capabilities = frozenset({"allocate"})

    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_blocks = deque(self.blocks[1:])

    @property
    def num_free_blocks(self):
        return len(self.free_blocks)

    def allocate(self, n):
        if n > self.num_free_blocks:
            raise ValueError(f"Cannot allocate {n} blocks: {self.num_free_blocks} are free.")
        blocks = [self.free_blocks.popleft() for _ in range(n)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"Block {block.block_id} is not in use.")
            block.ref_cnt -= 1
            self.free_blocks.append(block)
