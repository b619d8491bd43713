# expect: all of the reserved memory. Layer 0 holds no tokens so far
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        start, end = self.lengths[layer], self.lengths[layer] + len(k)
        if end > self.max_len:
            raise ValueError(f"layer {layer} holds {start} of {self.max_len} tokens, and {len(k)} more came")
        self.kv[layer, 0, start:end] = k
        self.kv[layer, 1, start:end] = v
        self.lengths[layer] = end

    def view(self, layer):
        return self.kv[layer, 0], self.kv[layer, 1]
