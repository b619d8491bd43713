# expect: passed
import torch

from minivllm.attention.reference import write_kv


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    N, H = len(x), model.num_heads
    q = (x @ model.q).view(N, H, -1)
    write_kv((x @ model.k).view(N, H, -1), (x @ model.v).view(N, H, -1), kv_cache, buffers.slot_mapping)
    keys, values = kv_cache[:, buffers.block_tables.long()].flatten(2, 3)
    hidden = torch.arange(keys.shape[1]) >= buffers.seq_lens[:, None]
    scores = torch.einsum("nhd,nshd->nhs", q, keys) / q.shape[2] ** 0.5
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return x + torch.einsum("nhs,nshd->nhd", weights, values).flatten(1) @ model.o
