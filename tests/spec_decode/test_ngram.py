"""`NgramDrafter`: the longest suffix seen before, and what followed it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.spec_decode.ngram import NgramDrafter


def propose(tokens: list[int], k: int, longest: int = 5, shortest: int = 2) -> list[int]:
    return NgramDrafter(longest, shortest).propose(np.array(tokens, dtype=np.int32), k)


def test_what_followed_the_suffix_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]


def test_the_longest_suffix_decides() -> None:
    #      long match: 1 2 3 -> 7      shorter and later: 2 3 -> 8
    assert propose([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3], 1) == [7]


def test_of_equal_matches_the_last_counts() -> None:
    assert propose([2, 3, 7, 2, 3, 8, 2, 3], 1) == [8]


def test_a_match_shorter_than_prompt_lookup_min_is_none() -> None:
    tokens = [1, 2, 3, 9, 8, 3]
    assert propose(tokens, 2, shortest=2) == []
    assert propose(tokens, 2, shortest=1) == [9, 8]


def test_suffixes_longer_than_prompt_lookup_max_are_not_compared() -> None:
    tokens = [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]
    assert propose(tokens, 1, longest=3) == [7]
    assert propose(tokens, 1, longest=2) == [8]  # both places end in 1 2 now


def test_a_copy_runs_on_into_itself() -> None:
    assert propose([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert propose([7, 7, 7], 4) == [7, 7, 7, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3, 4]])
def test_nothing_seen_before_means_no_drafts(tokens: list[int]) -> None:
    assert propose(tokens, 3, shortest=1) == []


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 6),
    st.sampled_from([(1, 1), (3, 1), (5, 2), (4, 4)]),
)
def test_it_agrees_with_the_definition(tokens: list[int], k: int, lengths: tuple[int, int]) -> None:
    longest, shortest = lengths
    expected: list[int] = []
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        places = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if places:
            copy = list(tokens)
            for i in range(k):
                copy.append(copy[places[-1] + i])
            expected = copy[len(tokens) :]
            break
    assert propose(tokens, k, longest, shortest) == expected
