# expect: The table is to hold the blocks themselves
class KVCacheManager:
    capabilities = frozenset({"paging"})

    def __init__(self, block_pool, block_size):
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks = {}

    def free(self, request):
        ids = self.req_to_blocks.pop(request.request_id, [])
        self.block_pool.free([self.block_pool.blocks[i] for i in ids[::-1]])

    def allocate_slots(self, request, num_new_tokens):
        ids = self.req_to_blocks.get(request.request_id, [])
        num_slots = request.num_computed_tokens + num_new_tokens
        missing = max(0, -(-num_slots // self.block_size) - len(ids))
        if missing > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.allocate(missing)
        self.req_to_blocks[request.request_id] = ids + [block.block_id for block in new_blocks]
        return new_blocks
