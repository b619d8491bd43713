"""The contiguous cache of Lab 03, and the two forward passes over it: the same logits as with no cache at all."""

from __future__ import annotations

import pytest
import torch

from minivllm.attention.contiguous import (
    ContiguousKVCache,
    forward_batch_with_cache,
    forward_with_cache,
    visible_columns,
)
from minivllm.models.decoder import Decoder
from minivllm.models.registry import ModelConfig
from minivllm.models.weights import _fill_randomly

PROMPTS = ([5, 1, 9, 9, 2, 7], [3], [8, 4, 4, 6])


def make_cache(num_layers: int = 2, max_len: int = 4, num_kv_heads: int = 2, head_dim: int = 3) -> ContiguousKVCache:
    return ContiguousKVCache(num_layers, max_len, num_kv_heads, head_dim)


def tokens(n: int, start: float = 0.0) -> torch.Tensor:
    """[n, 2, 3], every number another."""
    return torch.arange(start, start + n * 6).view(n, 2, 3)


def make_decoder(sliding_window: tuple[int | None, ...] = ()) -> Decoder:
    config = ModelConfig("LlamaForCausalLM", 31, 32, 48, 2, 4, 2, 8, 128, sliding_window=sliding_window)
    decoder = Decoder(config, torch.float32)
    with torch.no_grad():
        _fill_randomly(decoder, seed=0)
    return decoder.eval()


def cache_for(decoder: Decoder, max_len: int, batch_size: int = 1) -> ContiguousKVCache:
    config = decoder.config
    return ContiguousKVCache(config.num_layers, max_len, batch_size * config.num_kv_heads, config.head_dim)


# ---------------------------------------------------------------------------------------------------------------- the cache


def test_what_is_appended_comes_back_in_order():
    cache = make_cache()
    k, v = tokens(3), tokens(3, start=100)
    cache.append(0, k[:2], v[:2])
    cache.append(0, k[2:], v[2:])
    keys, values = cache.view(0)
    assert torch.equal(keys, k) and torch.equal(values, v)


def test_an_empty_cache_views_no_tokens():
    keys, values = make_cache().view(1)
    assert keys.shape == values.shape == (0, 2, 3)


def test_each_layer_has_a_length_of_its_own():
    cache = make_cache()
    cache.append(0, tokens(2), tokens(2, 50))
    assert (len(cache.view(0)[0]), len(cache.view(1)[0])) == (2, 0)
    cache.append(1, tokens(2, 7), tokens(2, 70))
    assert torch.equal(cache.view(1)[0], tokens(2, 7)) and torch.equal(cache.view(0)[0], tokens(2))


def test_a_view_is_the_cache_itself():
    cache = make_cache()
    cache.append(0, tokens(1), tokens(1))
    keys, values = cache.view(0)
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache.kv.untyped_storage().data_ptr()


def test_it_can_be_filled_to_the_last_slot():
    cache = make_cache(max_len=4)
    cache.append(0, tokens(3), tokens(3))
    cache.append(0, tokens(1), tokens(1))
    assert len(cache.view(0)[0]) == 4


def test_a_full_cache_refuses_with_its_numbers_and_keeps_what_it_has():
    cache = make_cache(max_len=4)
    cache.append(1, tokens(3), tokens(3))
    with pytest.raises(ValueError, match="layer 1 holds 3 of 4 tokens, and 2 more came"):
        cache.append(1, tokens(2, 90), tokens(2, 90))
    assert torch.equal(cache.view(1)[0], tokens(3))


# ------------------------------------------------------------------------------------------------------- one sequence's steps


@pytest.mark.parametrize("window", [(), (3, None)], ids=["full attention", "a window in layer 0"])
@pytest.mark.parametrize("chunks", [[6], [1] * 6, [4, 1, 1], [2, 3, 1]])
def test_logits_are_those_of_no_cache_at_all(chunks: list[int], window: tuple[int | None, ...]):
    decoder = make_decoder(window)
    token_ids = torch.tensor(PROMPTS[0])
    cache, rows, start = cache_for(decoder, max_len=6), [], 0
    for n in chunks:
        part = slice(start, start + n)
        rows.append(forward_with_cache(decoder, token_ids[part], torch.arange(6)[part], cache))
        start += n
    whole = cache_for(decoder, max_len=6)
    expected = forward_with_cache(decoder, token_ids, torch.arange(6), whole)
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-5, rtol=1e-5)
    if not window:
        torch.testing.assert_close(torch.cat(rows), decoder.full_forward(token_ids), atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- a static batch


def left_padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    token_ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return token_ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def test_a_left_padded_batch_gives_each_row_the_logits_it_has_alone():
    decoder = make_decoder()
    rows = [list(prompt) for prompt in PROMPTS]
    token_ids, mask, positions = left_padded(rows)
    cache = cache_for(decoder, max_len=10, batch_size=3)
    logits = forward_batch_with_cache(decoder, token_ids, positions, mask, cache)
    for step in range(3):
        for row, seen in zip(rows, logits, strict=True):
            torch.testing.assert_close(seen, decoder.full_forward(torch.tensor(row))[-1], atol=1e-5, rtol=1e-5)
        newest = logits.argmax(-1, keepdim=True)
        rows = [[*row, int(token)] for row, token in zip(rows, newest, strict=True)]
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], dim=1)
        positions = torch.tensor([[len(row) - 1] for row in rows])
        logits = forward_batch_with_cache(decoder, newest, positions, mask, cache)
        assert not logits.isnan().any(), f"step {step}"


def test_padding_sees_itself_alone_and_tokens_see_no_padding():
    mask = torch.tensor([[False, False, True, True]])
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert visible_columns(mask, 4)[0].int().tolist() == expected
    assert visible_columns(mask, 1)[0].int().tolist() == [[0, 0, 1, 1]]
    assert visible_columns(torch.ones(1, 4, dtype=torch.bool), 1, sliding_window=2)[0].int().tolist() == [[0, 0, 1, 1]]
