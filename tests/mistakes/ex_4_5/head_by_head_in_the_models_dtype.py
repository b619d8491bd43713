# expect: convert to float32 before you multiply
import torch


def paged_decode(q, kv_cache, block_tables, seq_lens):
    B, H, D = q.shape
    size, Hkv = kv_cache.shape[2:4]
    rows = []
    for i in range(B):
        slots = [int(block_tables[i, p // size]) * size + p % size for p in range(int(seq_lens[i]))]
        keys, values = kv_cache.flatten(1, 2)[:, slots]
        heads = []
        for h in range(H):
            k, v = keys[:, h * Hkv // H], values[:, h * Hkv // H]
            heads.append(torch.softmax(k @ q[i, h] * D**-0.5, dim=0) @ v)
        rows.append(torch.stack(heads))
    return torch.stack(rows)
