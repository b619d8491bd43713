# expect: passed
from minivllm.core.block_pool import KVCacheBlock


class BlockPool:
    capabilities = frozenset({"allocate"})

    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_ids = set(range(1, num_blocks))

    @property
    def num_free_blocks(self):
        return len(self.free_ids)

    def allocate(self, n):
        if n > len(self.free_ids):
            raise ValueError(f"{n} blocks are asked for, and {len(self.free_ids)} are free")
        blocks = [self.blocks[i] for i in sorted(self.free_ids)[:n]]
        self.free_ids -= {block.block_id for block in blocks}
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free(self, blocks):
        for block in blocks:
            if block.block_id in self.free_ids or block is self.null_block:
                raise ValueError(f"block {block.block_id} is nobody's")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_ids.add(block.block_id)
