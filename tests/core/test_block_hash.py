"""Block hashes: equal exactly where the KV is, computed once."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.core.block_hash import extend_block_hashes, extra_keys, hash_block
from minivllm.core.request import Request
from minivllm.sampling_params import SamplingParams


def make(tokens: list[int], **fields: Any) -> Request:
    return Request("r", tokens, SamplingParams(), max_tokens=16, **fields)


def hashes(tokens: list[int], **fields: Any) -> list[Any]:
    return list(extend_block_hashes(make(tokens, **fields), 4))


def test_the_same_input_has_the_same_hash_everywhere():
    """A number, not a comparison: it must be the same in another process, on another machine."""
    digest = hash_block(hash_block(None, [1, 2, 3, 4]), [5, 6, 7, 8], (("salt", "a"),))
    assert isinstance(digest, bytes)
    assert digest.hex()[:16] == "383f4b70a9105365"


@pytest.mark.parametrize(
    "other",
    [
        (None, [1, 2, 3, 5], ()),
        (None, [4, 3, 2, 1], ()),
        (None, [1, 2, 3, 4, 0], ()),
        (None, [1, 2, 3], ()),
        (b"\1" * 32, [1, 2, 3, 4], ()),
        (None, [1, 2, 3, 4], (("salt", ""),)),
        (None, [1, 2, 3, 4 + 2**32], ()),
    ],
)
def test_another_parent_other_tokens_or_other_keys_are_another_hash(other: tuple):
    assert hash_block(*other) != hash_block(None, [1, 2, 3, 4], ())


def test_extra_keys_are_tagged_so_that_no_value_passes_for_another_kind():
    assert hash_block(None, [1], (("salt", "x"),)) != hash_block(None, [1], (("lora", "x"),))
    assert hash_block(None, [1], (("a", "b"), ("c", "d"))) != hash_block(None, [1], (("a", "b', 'c"), ("", "d")))


def test_only_full_blocks_have_a_hash():
    assert [len(hashes(list(range(n)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_a_hash_names_the_whole_prefix():
    a, b = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([1, 2, 3, 9, 5, 6, 7, 8])
    assert a[0] != b[0]
    assert a[1] != b[1]  # the same four tokens behind another prefix
    assert hashes([1, 2, 3, 4, 9, 9, 9, 9])[0] == a[0]


def test_the_salt_stands_in_the_first_block_only_and_still_separates_all():
    request = make([1] * 12, cache_salt="tenant")
    assert extra_keys(request, 0) == (("salt", "tenant"),)
    assert extra_keys(request, 1) == ()
    assert not set(hashes([1] * 12, cache_salt="a")) & set(hashes([1] * 12, cache_salt="b"))


def test_case_11_a_lora_is_known_by_its_content_in_every_block():
    request = make([1] * 8, lora_digest="sha of the weights", cache_salt="s")
    assert extra_keys(request, 0) == (("lora", "sha of the weights"), ("salt", "s"))
    assert extra_keys(request, 1) == (("lora", "sha of the weights"),)
    assert not set(hashes([1] * 8, lora_digest="old weights")) & set(hashes([1] * 8, lora_digest="new weights"))


def test_each_block_is_hashed_once_while_the_request_grows():
    calls: list[list[int]] = []

    def counting(parent: Any, tokens: Any, extra: Any = ()) -> Any:
        calls.append(list(tokens))
        return hash_block(parent, tokens, extra)

    request = make(list(range(6)))
    for token in range(6, 14):
        extend_block_hashes(request, 4, counting)
        request.all_token_ids.append(token)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert request.block_hashes == hashes(list(range(13)))


def test_a_replaced_hash_may_return_anything_hashable():
    request = make(list(range(8)))
    assert extend_block_hashes(request, 4, lambda parent, tokens, extra: (parent, *tokens)) == [
        (None, 0, 1, 2, 3),
        ((None, 0, 1, 2, 3), 4, 5, 6, 7),
    ]
