# expect: 5 lines are left that no recording
import torch

from minivllm.attention.reference import paged_decode, write_kv


def decode_step(model, kv_cache, buffers, host):
    x = model.embed[host.token_ids] + model.position[buffers.positions]
    if x.isnan().any():
        raise FloatingPointError("a token has no embedding")
    q, k, v = ((x @ w).view(len(x), model.num_heads, -1) for w in (model.q, model.k, model.v))
    real = (buffers.slot_mapping >= 4).nonzero().flatten()
    write_kv(k[real], v[real], kv_cache, buffers.slot_mapping[real])
    block_tables = buffers.block_tables[:, : host.num_blocks]
    seq_lens = torch.tensor(host.seq_lens, dtype=torch.int32, device=x.device)
    attended = paged_decode(q, kv_cache, block_tables, seq_lens)
    return x + attended.flatten(1) @ model.o
