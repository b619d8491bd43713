# expect: while its ref_cnt was 1
from collections import deque

from minivllm.core.block_pool import KVCacheBlock


class BlockPool:
    capabilities = frozenset({"allocate"})

    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.next = 0

    @property
    def num_free_blocks(self):
        return sum(block.ref_cnt == 0 for block in self.blocks[1:])

    def allocate(self, n):
        if n > self.num_free_blocks:
            raise ValueError(f"Cannot allocate {n} blocks: {self.num_free_blocks} are free.")
        blocks = []
        for _ in range(n):
            self.next = self.next % (len(self.blocks) - 1) + 1
            self.blocks[self.next].ref_cnt = 1
            blocks.append(self.blocks[self.next])
        return blocks

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"Block {block.block_id} is not in use.")
            block.ref_cnt -= 1
