# expect: float32; q is bfloat16
import torch


def paged_decode(q, kv_cache, block_tables, seq_lens):
    B, H, D = q.shape
    k, v = kv_cache[:, block_tables.long()].flatten(2, 3).float()
    groups = H // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bhd,bshd->bhs", q.float(), k) / D**0.5
    hidden = torch.arange(k.shape[1]) >= seq_lens[:, None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    v = v.masked_fill(hidden[:, :, None, None], 0.0)
    return torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v)
