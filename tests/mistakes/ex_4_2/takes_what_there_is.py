# expect: nothing is taken
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
        new_blocks = []
        while len(blocks) * self.block_size < request.num_computed_tokens + num_new_tokens:
            if self.block_pool.num_free_blocks == 0:
                return None
            new_blocks += self.block_pool.allocate(1)
            blocks += new_blocks[-1:]
        return new_blocks
