# expect: Where does a block without a hash belong|goes behind what has been unused for longer|what has a hash goes to the back
from minivllm.core.block_pool import FreeKVCacheBlockQueue, KVCacheBlock


class BlockPool:
    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block = {}

    @property
    def num_free_blocks(self):
        return self.free_block_queue.num_free_blocks

    def allocate(self, n):
        blocks = [self.free_block_queue.popleft() for _ in range(n)]
        for block in blocks:
            self.unpublish(block)
            block.ref_cnt = 1
        return blocks

    def publish(self, block, block_hash):
        if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:
            block.block_hash = block_hash
            self.cached_block_hash_to_block[block_hash] = block

    def unpublish(self, block):
        if block.block_hash is not None:
            del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None

    def free(self, blocks):
        for block in blocks:
            if block.ref_cnt < 1:
                raise ValueError(f"Block {block.block_id} is freed twice.")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is not None:
                    self.free_block_queue.prepend(block)
                else:
                    self.free_block_queue.append(block)

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
