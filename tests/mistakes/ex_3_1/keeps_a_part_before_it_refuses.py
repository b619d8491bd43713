# expect: wrote into the cache before that
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        for t in range(len(k)):
            start = self.lengths[layer]
            if start == self.max_len:
                raise ValueError(f"layer {layer} is full: {len(k)} came for {self.max_len} tokens, {start - t} were there")
            self.kv[layer, 0, start] = k[t]
            self.kv[layer, 1, start] = v[t]
            self.lengths[layer] = start + 1

    def view(self, layer):
        length = self.lengths[layer]
        return self.kv[layer, 0, :length], self.kv[layer, 1, :length]
