# expect: so 5 more do not fit. It should raise ValueError, and did not
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        start, end = self.lengths[layer], min(self.lengths[layer] + len(k), self.max_len)
        self.kv[layer, 0, start:end] = k[: end - start]
        self.kv[layer, 1, start:end] = v[: end - start]
        self.lengths[layer] = end

    def view(self, layer):
        length = self.lengths[layer]
        return self.kv[layer, 0, :length], self.kv[layer, 1, :length]
