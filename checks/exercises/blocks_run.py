"""Blocks as their numbers, for Labs 04 and 07. Beside the student's code: runs in the child, and knows no answer."""

from __future__ import annotations

from typing import Any

from checks.sandbox.plain import Opaque

NUMBER = Opaque("block number")  # a number where a block should be


def ids_of(returned: Any) -> Any:
    """A list of blocks as their numbers; what is no list of blocks as it is. A number may not pass for a block's."""
    if not isinstance(returned, (list, tuple)):
        return returned
    ids = [NUMBER if type(block) is int else getattr(block, "block_id", block) for block in returned]
    return ids if isinstance(returned, list) else tuple(ids)
