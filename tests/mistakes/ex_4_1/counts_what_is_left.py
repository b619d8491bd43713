# expect: free before it, and no blocks are free after it
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
        blocks = []
        for _ in range(n):
            if not self.free_blocks:
                raise ValueError(f"Cannot allocate {n} blocks: {len(self.free_blocks)} are free.")
            blocks.append(self.free_blocks.popleft())
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"Block {block.block_id} is not in use.")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_blocks.append(block)
