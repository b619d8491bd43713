# expect: passed
import torch

from minivllm.attention.reference import paged_decode


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    block, row = buffers.slot_mapping // 4, buffers.slot_mapping % 4
    is_real = (block > 0)[:, None, None]
    kv_cache[0, block, row] = torch.where(is_real, k, kv_cache[0, block, row])
    kv_cache[1, block, row] = torch.where(is_real, v, kv_cache[1, block, row])
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens)
    return x + attended.flatten(1) @ model.o
