# expect: passed
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
        free = self.num_free_blocks
        if free < n:
            raise ValueError("asked for %d, have %d" % (n, free))
        taken = []
        while len(taken) < n:
            block = self.free_blocks.pop()
            assert block.ref_cnt == 0
            block.ref_cnt += 1
            taken.append(block)
        return taken

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt < list(blocks).count(block):
                raise ValueError(f"double free of {block.block_id}")
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free_blocks.appendleft(block)
