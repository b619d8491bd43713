# expect: host read
from minivllm.attention.reference import paged_decode, write_kv


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    for t, slot in enumerate(buffers.slot_mapping.tolist()):
        kv_cache[0].view(-1, *k.shape[1:])[slot] = k[t]
        kv_cache[1].view(-1, *v.shape[1:])[slot] = v[t]
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens)
    return x + attended.flatten(1) @ model.o
