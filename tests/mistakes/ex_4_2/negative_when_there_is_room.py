# expect: It returned 1
class KVCacheManager:
    capabilities = frozenset({"paging"})

    def __init__(self, block_pool, block_size):
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks = {}

    def free(self, request):
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, [])[::-1])

    def allocate_slots(self, request, num_new_tokens):
        blocks = self.req_to_blocks.setdefault(request.request_id, [])
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - len(blocks)
        if missing > self.block_pool.num_free_blocks:
            return None
        pieces = self.block_pool.allocate(abs(missing))
        blocks += pieces
        return pieces
