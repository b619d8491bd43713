# expect: leave out .block_id
from minivllm.core.block_hash import extend_block_hashes


class KVCacheManager:
    def __init__(self, block_pool, block_size, hash_block):
        self.block_pool = block_pool
        self.block_size = block_size
        self.hash_block = hash_block

    def find_longest_cache_hit(self, request):
        hashes = extend_block_hashes(request, self.block_size, self.hash_block)
        hits = []
        for block_hash in hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block.block_id)
        return hits
