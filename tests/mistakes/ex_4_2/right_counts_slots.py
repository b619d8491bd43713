# expect: passed
class KVCacheManager:
    capabilities = frozenset({"paging"})

    def __init__(self, block_pool, block_size):
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks = {}

    def free(self, request):
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, [])[::-1])

    def allocate_slots(self, request, num_new_tokens):
        blocks = self.req_to_blocks.get(request.request_id) or []
        room = len(blocks) * self.block_size - request.num_computed_tokens
        n = 0
        while room + n * self.block_size < num_new_tokens:
            n += 1
        if self.block_pool.num_free_blocks < n:
            return None
        new = []
        for _ in range(n):
            new += self.block_pool.allocate(1)
        self.req_to_blocks[request.request_id] = blocks + new
        return new
