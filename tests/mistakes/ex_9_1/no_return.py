# expect: is a `return` missing
from minivllm.attention.reference import paged_decode, write_kv


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    write_kv(k, v, kv_cache, buffers.slot_mapping)
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens)
    x + attended.flatten(1) @ model.o
