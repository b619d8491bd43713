# expect: -100, or 0, is larger than those that count|-100 is larger than those that count
import torch


def paged_decode(q, kv_cache, block_tables, seq_lens):
    """Attention of one new token per sequence, q [B, H, D], over its history in the cache, through
    block_tables [B, M]."""
    _, H, D = q.shape
    num_kv_heads = kv_cache.shape[3]
    k, v = kv_cache[:, block_tables.long()].flatten(2, 3).float()  # each [B, S, num_kv_heads, D], S = M * block_size
    there = torch.arange(k.shape[1], device=q.device) < seq_lens[:, None]  # [B, S]
    k, v = (x.repeat_interleave(H // num_kv_heads, dim=2) for x in (k, v))

    scores = torch.einsum("bhd,bshd->bhs", q.float(), k) / D**0.5
    weights = scores.masked_fill(~there[:, None, :], -100.0).softmax(-1)
    v = v.masked_fill(~there[:, :, None, None], 0.0)  # a weight of 0 does not silence NaN
    return torch.einsum("bhs,bshd->bhd", weights, v).to(q.dtype)
