"""The name of a full block: a hash of everything its KV depends on. Built in Lab 07 (`hash_block`).

Attention makes a token's key and value depend on every token before it, so a block's KV can be reused only where the
*whole prefix* is equal. A chain of hashes says exactly that, at a fixed cost per block:

    tokens          a b c d | e f g h | i j            block size 4; the last block is not full: it has no hash
    block_hashes      h0    |   h1    |                h0 = H(None, abcd),   h1 = H(h0, efgh)

Equal h1 means equal e f g h *and* equal h0, hence equal a b c d. May not know pools, schedulers, or torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.request import Request

ExtraKeys = tuple[tuple[str, str], ...]
HashBlock = Callable[[Hashable, Sequence[int], ExtraKeys], Hashable]


def hash_block(parent: Hashable, tokens: Sequence[int], extra: ExtraKeys = ()) -> Hashable:
    """Hash of one full block: its tokens, the hash of the block before it (None for the first), and what else its KV
    depends on.

    SHA-256, because equal hashes are taken for equal prefixes: with Python's 64-bit `hash`, a user who finds a collision
    reads another user's KV. All blocks of a cache have equally many tokens, so no two inputs are written as the same bytes.
    """
    header = b"\0" * 32 if parent is None else parent
    assert isinstance(header, bytes), "a parent is what hash_block returned for the block before"
    digest = hashlib.sha256(header)
    digest.update(array("q", tokens).tobytes())
    digest.update(repr(extra).encode())
    return digest.digest()


def extra_keys(request: Request, block_index: int) -> ExtraKeys:
    """What a block's KV depends on beside token ids, each value tagged so that a salt can never pass for a LoRA digest.

    A LoRA changes every block, and its digest is of its *content*: the same name reloaded with other weights is another key.
    The salt separates tenants; it stands in the first block only, for the chain carries it to all the others.
    """
    keys: list[tuple[str, str]] = []
    if request.lora_digest is not None:
        keys.append(("lora", request.lora_digest))
    if request.cache_salt is not None and block_index == 0:
        keys.append(("salt", request.cache_salt))
    return tuple(keys)


def extend_block_hashes(request: Request, block_size: int, hash_one: HashBlock = hash_block) -> list[Hashable]:
    """Hash the request's full blocks that have no hash yet; returns `request.block_hashes`. Each block is hashed once in the
    request's life: tokens are only ever appended, and neither preemption nor eviction changes them.

    With an EAGLE head the token *after* a block counts too, and a block is hashed once that is known: the head's layer, under
    the same block table, holds at each position the token after it.
    """
    hashes, with_next_token = request.block_hashes, request.next_token_in_hashes
    for i in range(len(hashes), (request.num_tokens - with_next_token) // block_size):
        tokens = request.all_token_ids[i * block_size : (i + 1) * block_size]
        extra = extra_keys(request, i)
        if with_next_token:
            extra = (*extra, ("next", str(request.all_token_ids[(i + 1) * block_size])))
        hashes.append(hash_one(hashes[-1] if hashes else None, tokens, extra))
    return hashes
