# expect: passed
from math import ceil


class KVCacheManager:
    capabilities = frozenset({"paging"})

    def __init__(self, block_pool, block_size):
        self.block_pool = block_pool
        self.block_size = block_size
        self.req_to_blocks = {}

    def free(self, request):
        self.block_pool.free(self.req_to_blocks.pop(request.request_id, [])[::-1])

    def allocate_slots(self, request, num_new_tokens):
        have = self.req_to_blocks.get(request.request_id, [])
        want = ceil((request.num_computed_tokens + num_new_tokens) / self.block_size)
        try:
            fresh = self.block_pool.allocate(max(want - len(have), 0))
        except ValueError:
            return None
        self.req_to_blocks[request.request_id] = [*have, *fresh]
        return fresh
