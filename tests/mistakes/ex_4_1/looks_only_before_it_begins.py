# expect: each block of A is in this list twice
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
            raise ValueError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        taken = [self.free_blocks.popleft() for _ in range(n)]
        for block in taken:
            block.ref_cnt = 1
        return taken

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is free already")
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt <= 0:
                self.free_blocks.append(block)
