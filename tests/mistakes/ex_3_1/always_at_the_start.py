# expect: go behind the old ones
import torch


class ContiguousKVCache:
    def __init__(self, num_layers, max_len, num_kv_heads, head_dim, dtype=torch.float32, device="cpu"):
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, max_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    def append(self, layer, k, v):
        n = len(k)
        if self.lengths[layer] + n > self.max_len:
            raise ValueError(f"layer {layer} holds {self.lengths[layer]} of {self.max_len} tokens")
        self.kv[layer, 0, :n] = k
        self.kv[layer, 1, :n] = v
        self.lengths[layer] += n

    def view(self, layer):
        length = self.lengths[layer]
        return self.kv[layer, 0, :length], self.kv[layer, 1, :length]
