"""KVCacheManager: the block table of every request, and what the prefix cache knows about it.
Built in Lab 04 (`allocate_slots`) and Lab 07 (`find_longest_cache_hit`). May not know queues, budgets, or torch.

    block size 4, request "A" with 10 computed tokens:      req_to_blocks["A"] = [ 7, 3, 9 ]
    positions   0 1 2 3 | 4 5 6 7 | 8 9 . .                 token 6 lives in block 3, slot 2 of it
    blocks      block 7 | block 3 | block 9
    published     h0    |   h1    |  not full: no hash
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.core.block_hash import HashBlock, extend_block_hashes, hash_block
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.request import Request


class KVCacheManager:
    """Block tables over a pool. `max_model_len` bounds the slots a sequence can ever need. With `use_eagle` a drafter's layer
    lives under the same tables and holds at each position the token after it, so that token is in a block's name too."""

    capabilities = frozenset({"paging", "prefix caching"})

    def __init__(
        self,
        block_pool: BlockPool,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        hash_block: HashBlock = hash_block,
        use_eagle: bool = False,
    ) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.hash_block = hash_block
        self.use_eagle = use_eagle
        self.num_usable_blocks = block_pool.num_free_blocks
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold now, 0 to 1."""
        return 1 - self.block_pool.num_free_blocks / self.num_usable_blocks

    def get_block_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self.req_to_blocks.get(request.request_id, ())]

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """The blocks of the prefix cache that a waiting request can start from, and how many tokens they hold. Nothing
        is taken: `allocate_slots` does that. Requests that want every position's logits (prompt_logprobs) must compute
        them: no lookup."""
        request.next_token_in_hashes = self.use_eagle
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return [], 0
        blocks = self.find_longest_cache_hit(request)
        return blocks, len(blocks) * self.block_size

    def find_longest_cache_hit(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of cached blocks from the start of the request; a gap ends it, for KV behind a gap is unreachable.

        Never the whole sequence: the next token is sampled from the *last* token's logits, which the cache does not keep. So a
        prompt of exactly 2 blocks can hit 1, and its second is computed again.
        """
        max_hits = (request.num_tokens - 1) // self.block_size
        hits = []
        for block_hash in extend_block_hashes(request, self.block_size, self.hash_block)[:max_hits]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_named_blocks(self, request: Request, num_tokens: int) -> int:
        """How many blocks the first `num_tokens` tokens fill, of those that have a name: with EAGLE the newest token has to be
        one behind them."""
        return min(num_tokens, request.num_tokens - request.next_token_in_hashes) // self.block_size

    def has_room(self, request: Request, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock] = ()) -> bool:
        """Whether the pool could give the request slots for `num_tokens` tokens in all, beside what it holds or has hit."""
        held = len(self.req_to_blocks.get(request.request_id, ())) + len(new_computed_blocks)
        num_new_blocks = max(0, -(-num_tokens // self.block_size) - held)
        num_free_hits = sum(block.ref_cnt == 0 for block in new_computed_blocks)  # free now, but not once they are touched
        return num_new_blocks + num_free_hits <= self.block_pool.num_free_blocks

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] = (),
        num_lookahead_tokens: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Make room for the next `num_new_tokens` tokens; returns the blocks newly allocated ([] if the last one has room), or
        None when the pool has too few: then nothing is changed, and the scheduler decides who must give way.

            | num_computed_tokens | new_computed_blocks | num_new_tokens | num_lookahead_tokens |
            '-- has KV (ours) ----'-- has KV (cached) --'-- this step ---'-- drafter's own KV --'
            '-- blocks held ------'-- touched here -----'-- allocated here: whole blocks -------'
            '------- full blocks are published -------------'  up to num_tokens: drafts may be rejected
        """
        num_tokens = request.num_computed_tokens + len(new_computed_blocks) * self.block_size + num_new_tokens
        num_slots = num_tokens + num_lookahead_tokens
        if num_slots > self.max_model_len:
            num_slots = self.max_model_len
        blocks = self.req_to_blocks.get(request.request_id, [])
        new_blocks: list[KVCacheBlock] = []
        if num_slots > len(blocks) * self.block_size:  # seldom for a decode: the last block has room
            if not self.has_room(request, num_slots, new_computed_blocks):
                return None
            if new_computed_blocks:  # touch first: allocating could evict the very blocks we hit
                self.block_pool.touch(new_computed_blocks)
                request.num_published_blocks = len(new_computed_blocks)
            num_held = len(blocks) + len(new_computed_blocks)
            new_blocks = self.take_blocks(-(-num_slots // self.block_size) - num_held)
            self.req_to_blocks[request.request_id] = [*blocks, *new_computed_blocks, *new_blocks]
        if self.enable_caching and num_tokens >= (request.num_published_blocks + 1) * self.block_size:
            self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the request's full blocks among its first `num_tokens` tokens. The KV of the newest is written in the
        step being scheduled: a request admitted to the same step may share them, for a layer writes all keys and values
        before it reads any.
        """
        num_full_blocks = self.num_named_blocks(request, num_tokens)
        if num_full_blocks <= request.num_published_blocks:
            return
        hashes = extend_block_hashes(request, self.block_size, self.hash_block)
        blocks = self.req_to_blocks[request.request_id]
        for i in range(request.num_published_blocks, num_full_blocks):
            self.block_pool.publish(blocks[i], hashes[i])
        request.num_published_blocks = num_full_blocks

    def free(self, request: Request) -> None:
        """Let go of all the request's blocks (it ended, or is preempted).

        First its unproven hashes go: those published for tokens of a step that is only being built, is still in flight, or has
        failed. Then the blocks, tail first, so that the tail is evicted before the prefix it hangs on.
        """
        blocks = self.req_to_blocks.pop(request.request_id, [])
        num_proven_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        for block in blocks[num_proven_tokens // self.block_size : request.num_published_blocks]:
            self.take_back(block)
        request.num_published_blocks = 0
        self.block_pool.free(blocks[::-1])

    def take_blocks(self, n: int) -> list[KVCacheBlock]:
        """n blocks of the pool, which forgets what they cached."""
        return self.block_pool.allocate(n)

    def take_back(self, block: KVCacheBlock) -> None:
        """A block that was published can be found no longer."""
        self.block_pool.unpublish(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use. True where there is no cache."""
        return not self.enable_caching or self.block_pool.reset_prefix_cache()
