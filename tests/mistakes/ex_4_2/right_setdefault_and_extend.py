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
        table = self.req_to_blocks.setdefault(request.request_id, [])
        total = request.num_computed_tokens + num_new_tokens
        need = (total + self.block_size - 1) // self.block_size - len(table)
        if need <= 0:
            return []
        if need > self.block_pool.num_free_blocks:
            return None
        fresh = self.block_pool.allocate(need)
        table.extend(fresh)
        return fresh
