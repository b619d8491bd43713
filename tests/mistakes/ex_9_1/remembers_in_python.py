# expect: is still as it was when it was recorded
from minivllm.attention.reference import paged_decode, write_kv


seen = []


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    write_kv(k, v, kv_cache, buffers.slot_mapping)
    seen.append(len(seen))
    scale = q.shape[2] ** -0.5 * (1 + max(0, len(seen) - 7))
    attended = paged_decode(q, kv_cache, buffers.block_tables, buffers.seq_lens, scale=scale)
    return x + attended.flatten(1) @ model.o
