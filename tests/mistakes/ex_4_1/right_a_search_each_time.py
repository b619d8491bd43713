# expect: passed
from minivllm.core.block_pool import KVCacheBlock


class BlockPool:
    capabilities = {"allocate"}

    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]

    @property
    def num_free_blocks(self):
        return len(self._free())

    def _free(self):
        return [block for block in self.blocks[1:] if block.ref_cnt == 0]

    def allocate(self, n):
        free = self._free()
        if n > len(free):
            raise ValueError(f"need {n}, have {len(free)}")
        for block in free[:n]:
            block.ref_cnt = 1
        return free[:n]

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"block {block.block_id} is not in use")
            block.ref_cnt -= 1
