# expect: host.seq_lens are Python's numbers
import torch

from minivllm.attention.reference import paged_decode, write_kv


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[buffers.input_ids] + model.position[buffers.positions]
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    write_kv(k, v, kv_cache, buffers.slot_mapping)
    rows = [
        paged_decode(q[i : i + 1], kv_cache, buffers.block_tables[i : i + 1, : -(-n // 4)], buffers.seq_lens[i : i + 1])
        for i, n in enumerate(host.seq_lens)
    ]
    attended = torch.cat(rows)
    return x + attended.flatten(1) @ model.o
