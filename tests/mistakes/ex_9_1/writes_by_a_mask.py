# expect: data-dependent shape
from minivllm.attention.reference import paged_decode, write_kv


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    real = buffers.slot_mapping >= 4
    write_kv(k[real], v[real], kv_cache, buffers.slot_mapping[real])
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens)
    return x + attended.flatten(1) @ model.o
