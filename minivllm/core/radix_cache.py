r"""RadixCache: the prefix cache as a tree, the other school beside the chain of hashes. Built in Lab 07 (`match_prefix`).

Prompts that begin alike share the path from the root for as long as they are alike. A node holds a run of blocks, cut at block
edges only, so that block tables are the same with either cache:

    block size 4        A: "abcd efgh ijkl"    B: "abcd efgh WXYZ"    C: "QRST"

                                root
                          /              \
               [abcd efgh] blocks 7 3     [QRST] block 5
               /         \
    [ijkl] block 9    [WXYZ] block 2

Nothing is hashed: a block's key is its token ids in the clear, with the extra keys that a hash would have taken in, so tenants
(`cache_salt`) and adapters begin at branches of their own.

Who is evicted? Of the leaves' last blocks, the one unused for longest. The tree keeps no clock for it: requests free their
blocks tail first, so the pool's free list (BlockPool) has no block in front of one that hangs on it. Blocks in use are not in
that list.

May not know queues, budgets, or torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from minivllm.core.block_hash import ExtraKeys, extend_block_hashes
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request

BlockKey = tuple[ExtraKeys, tuple[int, ...]]


def block_key(parent: Hashable, tokens: Sequence[int], extra: ExtraKeys = ()) -> BlockKey:
    """What `hash_block` would hash, in the clear. The parent is no part of it: a node's place in the tree says that."""
    return extra, tuple(tokens)


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of blocks that nobody has needed to part yet: `keys[i]` says what `blocks[i]` holds. `children` are found by their
    first key. `start` counts the blocks between the root and this node."""

    keys: list[Hashable] = field(default_factory=list)
    blocks: list[KVCacheBlock] = field(default_factory=list)
    children: dict[Hashable, RadixNode] = field(default_factory=dict)
    parent: RadixNode | None = field(default=None, repr=False)
    start: int = 0


class RadixCache:
    """The tree. It knows blocks, not requests: whoever holds a block says so in its ref_cnt.

    A replacement needs `match_prefix`, `insert`, `evict`, `reset` and `len()`.
    """

    capabilities = frozenset({"radix"})

    def __init__(self) -> None:
        self.root = RadixNode()
        self._node_of: dict[int, RadixNode] = {}  # block id -> the node that holds it

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._node_of)

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block.block_id in self._node_of

    def __iter__(self) -> Iterator[RadixNode]:
        """All nodes but the root, parents first."""
        nodes = list(self.root.children.values())
        while nodes:
            yield (node := nodes.pop())
            nodes += node.children.values()

    def match_prefix(self, keys: Sequence[Hashable]) -> list[KVCacheBlock]:
        """The blocks of the longest path from the root that says what `keys` say, in order. The tree stays as it is.

        The cost is the path's length, whatever else is cached.
        """
        node = self.root
        hits: list[KVCacheBlock] = []
        while len(hits) < len(keys) and (child := node.children.get(keys[len(hits)])) is not None:
            for key, block in zip(child.keys, child.blocks, strict=True):
                if len(hits) == len(keys) or keys[len(hits)] != key:  # the match ends inside this node
                    return hits
                hits.append(block)
            node = child
        return hits

    def insert(
        self, keys: Sequence[Hashable], blocks: Sequence[KVCacheBlock], start: int, end: int
    ) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Add blocks[start:end] of a sequence whose blocks before `start` are in the tree. Returns those that are in it now,
        and those that had to go for them.

        Where the tree has a block with that key already (the last block of a prompt is computed again even when cached), the
        new one takes its place if nobody holds the old one. If somebody does, the insertion ends before it. So a request's path
        consists of blocks it holds itself, and no block in use hangs on one that could be evicted.
        """
        replaced: list[KVCacheBlock] = []
        node = self._node_of.get(blocks[start - 1].block_id) if start else self.root
        if node is None:  # what it would hang on was taken back
            return [], []
        at = start - node.start  # the place in the node
        for i in range(start, end):
            if at < len(node.keys) and node.keys[at] != keys[i]:
                node = self.split(node, at)
            if at == len(node.keys):
                child = node.children.get(keys[i])
                if child is None:
                    self._append(node, keys[i:end], blocks[i:end])
                    break
                node, at = child, 0
            twin = node.blocks[at]
            if twin.ref_cnt > 0:
                return list(blocks[start:i]), replaced
            replaced.append(twin)
            del self._node_of[twin.block_id]
            node.blocks[at] = blocks[i]
            self._node_of[blocks[i].block_id] = node
            at += 1
        return list(blocks[start:end]), replaced

    def _append(self, node: RadixNode, keys: Sequence[Hashable], blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks at the end of a node. A leaf grows (a request that generates makes no node per block); else a child comes."""
        if node.children or node is self.root:
            child = RadixNode(parent=node, start=node.start + len(node.keys))
            node.children[keys[0]] = child
            node = child
        node.keys += keys
        node.blocks += blocks
        self._node_of.update((block.block_id, node) for block in blocks)

    def split(self, node: RadixNode, at: int) -> RadixNode:
        """Part a node: its first `at` blocks become its new parent, which is returned. The lower part stays the node it is, so
        its children need not be told.

            parent - [a b c d] - children        split(node, 2)        parent - [a b] - [c d] - children
        """
        parent = node.parent
        assert parent is not None and 0 < at < len(node.keys)
        upper = RadixNode(node.keys[:at], node.blocks[:at], {node.keys[at]: node}, parent, node.start)
        parent.children[upper.keys[0]] = upper
        node.keys, node.blocks, node.parent, node.start = node.keys[at:], node.blocks[at:], upper, node.start + at
        self._node_of.update((block.block_id, upper) for block in upper.blocks)
        return upper

    def evict(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """Forget a block and all that hangs on it, which cannot be reached without it; returns them. [] if it is not here.

        A block handed out by the pool is the last of a leaf: nothing hangs on it, and the cost is the same in any tree.
        """
        node = self._node_of.get(block.block_id)
        if node is None:
            return []
        at = len(node.blocks) - 1 if node.blocks[-1] is block else node.blocks.index(block)
        gone, below = node.blocks[at:], list(node.children.values())
        while below:
            child = below.pop()
            gone += child.blocks
            below += child.children.values()
        if at == 0 and node.parent is not None:
            del node.parent.children[node.keys[0]]
        del node.keys[at:], node.blocks[at:]
        node.children.clear()
        for lost in gone:
            del self._node_of[lost.block_id]
        return gone

    def reset(self) -> None:
        self.root = RadixNode()
        self._node_of.clear()


class RadixKVCacheManager(KVCacheManager):
    """Block tables over a pool, and a tree that finds what is cached in it. Chosen by `prefix_cache="radix"`.

    What the hash chain's manager says of publishing holds here too: at allocation, never drafts, taken back where a step is
    undone or fails. `radix_cache`: the tree's class.
    """

    capabilities = frozenset({"paging", "prefix caching", "radix"})

    def __init__(
        self,
        block_pool: BlockPool,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        radix_cache: type[RadixCache] = RadixCache,
    ) -> None:
        super().__init__(block_pool, block_size, max_model_len, enable_caching, block_key, use_eagle)
        self.radix_cache = radix_cache()

    def find_longest_cache_hit(self, request: Request) -> list[KVCacheBlock]:
        """The blocks of the request's longest cached prefix. Never the whole sequence: its last token's logits are needed."""
        max_hits = (request.num_tokens - 1) // self.block_size
        return self.radix_cache.match_prefix(extend_block_hashes(request, self.block_size, block_key)[:max_hits])

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the request's full blocks among its first `num_tokens` tokens. While another request holds a block of the
        same content, those behind it wait: this is tried again with the next full block."""
        start, end = request.num_published_blocks, self.num_named_blocks(request, num_tokens)
        if end <= start:
            return
        keys = extend_block_hashes(request, self.block_size, block_key)
        added, replaced = self.radix_cache.insert(keys, self.req_to_blocks[request.request_id], start, end)
        for block in replaced:  # worth nothing now: to the front of the free list
            self.block_pool.touch([block])
            self.block_pool.unpublish(block)
            self.block_pool.free([block])
        for block in added:
            self.block_pool.publish(block, block.block_id)  # any name will do: it is the tree that finds the block
        request.num_published_blocks += len(added)

    def take_blocks(self, n: int) -> list[KVCacheBlock]:
        blocks = super().take_blocks(n)
        for block in blocks:
            self.take_back(block)
        return blocks

    def take_back(self, block: KVCacheBlock) -> None:
        for lost in self.radix_cache.evict(block):
            super().take_back(lost)

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.radix_cache.reset()
        return True
