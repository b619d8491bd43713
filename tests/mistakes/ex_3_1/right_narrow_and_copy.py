# expect: passed
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        n, there = k.shape[0], self.lengths[layer]
        if self.max_len - there < n:
            raise ValueError("no room for %d more: %d of %d" % (n, there, self.max_len))
        self.kv[layer][0].narrow(0, there, n).copy_(k)
        self.kv[layer][1].narrow(0, there, n).copy_(v)
        self.lengths[layer] += n

    def view(self, layer):
        return tuple(self.kv[layer, :, : self.lengths[layer]].unbind(0))
